"""Routed experts of mixture-of-experts layers: grouped products, and their division among ranks by all-to-alls.

Rows are a token's hidden states, once for each expert that it chose. They are sorted by expert, so that one grouped
product computes those of all experts, whatever their numbers (dropless: none is left out).

[Note: expert parallelism] Where a group of `ep` ranks divides the experts of a layer, the i-th rank holds the i-th part
of them. Each rank counts its rows for each expert, and one even all-to-all tells these counts; a second, uneven one
(dispatch) carries the rows to the ranks of their experts, a third (combine) carries the results back. The backward is
the same in reverse: gradients are dispatched through the combine, and combined through the dispatch. Source: Lepikhin
et al. 2020, GShard (arXiv:2006.16668), section 3; Gale et al. 2022, MegaBlocks (arXiv:2211.15841).

A module of routed experts is one with three-dimensional `gate_up_proj` (experts, 2 * hidden, width) and `down_proj`
(experts, width, hidden), called with tokens, chosen experts and their weights: `gsreal.models.Experts`, and those of
Hugging Face's decoders (Mixtral, DeepSeek-V3, Qwen3-MoE).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gsreal.gradient_sharding.point_to_point import LogicalCollective, announce
from gsreal.measure import Timeline, wait_for_release
from gsreal.methods.mapped import Mapped


@dataclass(frozen=True)
class Splits:
    """Numbers of rows that a rank sends to each rank of its group, and receives from each, in a dispatch."""

    sent: Sequence[int]
    received: Sequence[int]


class Exchange(Protocol):
    """All-to-alls of a group of ranks that divide experts among them."""

    def share_counts(self, counts: Tensor) -> tuple[Tensor, Splits]:
        """Return the number of rows from each rank for each own expert (ranks, own experts), and those of all messages.

        `counts`: this rank's rows for each expert of the layer.
        """
        ...

    def move(self, rows: Tensor, splits: Splits, *, back: bool) -> Tensor:
        """Return the rows that this rank receives in a dispatch, or in a combine (`back`)."""
        ...


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the rows of each group times its matrix; `ends`: int32 index after the last row of each group.

    By torch's grouped product, which has no fp64 and refuses no rows at all: these are multiplied group by group. It
    runs in the precision of the matrices under autocast too, so no rows must do so, or their results would be sent in
    another precision than those of other ranks.
    """
    if rows.dtype != torch.float64 and len(rows):
        return F.grouped_mm(rows, matrices, offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    with torch.autocast(rows.device.type, enabled=False):
        return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), matrices, strict=True)])


def run_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    experts: int,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    exchange: Exchange | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, shaped as `x` (tokens, width).

    `index`, `weights`: experts chosen by each token, and the weights of their outputs, both (tokens, chosen).
    `experts`: of the layer. `gate_up`, `down`: matrices of this rank's experts: all of them without an `exchange`.
    """
    tokens, chosen = index.shape
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=flat.dtype, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    rows = x[order // chosen]
    if exchange is None:
        rows = _products(rows, counts, gate_up, down, activation)
    else:
        sent_here, splits = exchange.share_counts(counts)
        dispatch, combine = (partial(exchange.move, splits=splits, back=back) for back in (False, True))
        rows = Mapped.apply(rows, dispatch, combine)
        # received by sender, and for each sender by expert: all of one expert's together
        held = torch.arange(sent_here.shape[1], device=x.device).repeat(len(sent_here))
        own = held.repeat_interleave(sent_here.reshape(-1), output_size=len(rows)).argsort(stable=True)
        rows = _products(rows[own], sent_here.sum(0), gate_up, down, activation)
        rows = Mapped.apply(rows[_inverse(own)], combine, dispatch)
    slots = rows[_inverse(order)].view(tokens, chosen, rows.shape[-1])  # no -1: there may be no tokens
    return (slots * weights.to(slots.dtype).unsqueeze(-1)).sum(1)


def _products(
    rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the outputs of gated perceptrons for rows that are sorted by expert."""
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = grouped_product(rows, gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
    return grouped_product(activation(gate) * up, down.transpose(1, 2), ends)


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes another."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def experts_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every module of routed experts, with its path."""
    for path, inner in module.named_modules():
        matrices = [getattr(inner, name, None) for name in PARAMETERS]
        if all(isinstance(matrix, nn.Parameter) and matrix.dim() == 3 for matrix in matrices):
            yield path, inner


PARAMETERS = ("gate_up_proj", "down_proj")
"""Matrices of a module of routed experts, the first dimension of which is the expert."""


def trained_experts(module: nn.Module) -> list[str]:
    """Return the names of the parameters of routed experts that are trained: none beside adapters."""
    named = ((f"{path}.{name}", getattr(inner, name)) for path, inner in experts_of(module) for name in PARAMETERS)
    return [name for name, parameter in named if parameter.requires_grad]


def divided_reason(module: nn.Module) -> str | None:
    """Return why ranks cannot divide the experts of a model, with the name of the module; None: they can."""
    experts = dict(experts_of(module))
    if not experts:
        return "the model has no layers of routed experts"
    for path, inner in experts.items():
        others = [name for name, _ in inner.named_parameters() if name not in PARAMETERS]
        width = inner.down_proj.shape[1]
        if others or tuple(inner.gate_up_proj.shape[1:]) != (2 * inner.down_proj.shape[2], width):
            return f"{path}: its experts are no gated perceptrons without biases"
        if getattr(inner, "act_fn", None) is None or hasattr(inner, "limit"):
            return f"{path}: the activation of its experts is not known"
    return None


def replace_experts(inner: Any, held: range, exchange: Exchange | None) -> None:
    """Let a module keep a range of its experts alone, and exchange rows with the ranks that hold the others.

    Without an exchange it runs whole, by this file's operations.
    """
    experts = inner.gate_up_proj.shape[0]
    if len(held) < experts:
        for name in PARAMETERS:
            whole = getattr(inner, name)
            part = whole.detach()[held.start : held.stop].clone()
            setattr(inner, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    inner.forward = partial(_forward, inner, experts, exchange)


def _forward(inner: Any, experts: int, exchange: Exchange | None, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    gate_up, down, activation = inner.gate_up_proj, inner.down_proj, inner.act_fn
    settings: dict[str, Any] = {"experts": experts, "gate_up": gate_up, "down": down, "activation": activation}
    return run_experts(x, index, weights, exchange=exchange, **settings)


class GroupExchange:
    """All-to-alls of `torch.distributed` of a layer among the ranks of a group, recorded as spans of a timeline."""

    def __init__(self, group: dist.ProcessGroup, timeline: Timeline, layer: str) -> None:
        self.group, self.timeline, self.layer = group, timeline, layer
        self.ranks = tuple(sorted(dist.get_process_group_ranks(group)))

    def share_counts(self, counts: Tensor) -> tuple[Tensor, Splits]:
        """Return the number of rows from each rank for each own expert, and those of all messages."""
        received = torch.empty_like(counts)
        with self._span(f"count rows {self.layer}"):
            dist.all_to_all_single(received, counts, group=self.group)
        ranks = len(self.ranks)
        sent_here = received.view(ranks, -1)
        splits = [each.view(ranks, -1).sum(1).tolist() for each in (counts, received)]
        return sent_here, Splits(*splits)

    def move(self, rows: Tensor, splits: Splits, *, back: bool) -> Tensor:
        """Return the rows that this rank receives in a dispatch, or in a combine (`back`)."""
        sent, received = (splits.received, splits.sent) if back else (splits.sent, splits.received)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        row_bytes = result.element_size() * (rows[:1].numel() or result[:1].numel())
        kept = sent[dist.get_rank(self.group)] * row_bytes
        entry = LogicalCollective("all-to-all-v", self.ranks, rows.numel() * rows.element_size(), True, kept)
        passed = "backward " if torch._C._current_graph_task_id() >= 0 else ""
        with self._span(f"{'combine' if back else 'dispatch'} {passed}{self.layer}"), announce(entry):
            dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=self.group)
            wait_for_release(result)
        return result

    def _span(self, label: str) -> AbstractContextManager[None]:
        return self.timeline.span(label, "exposed_communication", self.group)  # labelled as in a prediction
