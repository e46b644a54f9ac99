"""Context parallelism: ranks divide every sequence, and exchange parts of it for parts of heads in the attention.

Whatever a model computes position by position runs on a rank's own positions: embeddings, norms, linear maps, the loss.
Around torch's scaled_dot_product_attention, queries, keys and values are exchanged by all-to-alls, so that each rank
attends to whole sequences with its part of the heads; the outputs are exchanged back (Jacobs et al. 2023, DeepSpeed
Ulysses, arXiv 2309.14509). Alternatively, keys and values rotate in a ring: `gsreal.methods.ring_attention`.

A model can run so if its blocks attend by that function without a mask of their own, and if its forward takes
`position_ids`: a rank's positions do not begin at 0. Modules that mix neighbouring positions otherwise (convolutions
along the sequence, recurrent ones) are refused.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gsreal.measure import Timeline, wait_for_release
from gsreal.methods.mapped import Mapped
from gsreal.methods.meshes import context_group
from gsreal.methods.ring_attention import Ring, attend_in_ring, observed_ring
from gsreal.model_files.build import sequences_not_packed
from gssim.errors import UserError
from gssim.plan import Policies, position_ranges

Attention = Callable[..., Tensor]


@dataclass
class ContextParts:
    """The division of sequences among ranks in equal parts, one after another.

    `all_to_all` sends the i-th of `ranks` rows of a tensor to the i-th rank, and returns the rows that all sent here.
    """

    ranks: int
    rank: int
    all_to_all: Callable[[Tensor], Tensor]
    heads: set[int] = field(default_factory=set)
    """Numbers of key-value heads of the attentions that ran so far."""

    def to_heads(self, x: Tensor) -> Tensor:
        """Return whole sequences of this rank's part of the heads, from its part of the sequences with all heads.

        Shapes (batch, heads, sequence, width); every rank calls it (a collective).
        """
        received = self.all_to_all(_contiguous_copy(x.unflatten(1, (self.ranks, -1)).movedim(1, 0)))
        return _contiguous_copy(received.permute(1, 2, 0, 3, 4)).flatten(2, 3)

    def to_parts(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sequences with all heads: the reverse of `to_heads`.

        In its memory the heads of one position lie side by side, as the following linear map reads them.
        """
        received = self.all_to_all(_contiguous_copy(x.unflatten(2, (self.ranks, -1)).movedim(2, 0)))
        return _contiguous_copy(received.permute(1, 3, 0, 2, 4)).flatten(2, 3).transpose(1, 2)


def _contiguous_copy(x: Tensor) -> Tensor:
    """Return a copy of a tensor in contiguous memory, whatever the strides of `x`."""
    return x.clone(memory_format=torch.contiguous_format)


def _attend(
    parts: ContextParts, attention: Attention, query: Tensor, key: Tensor, value: Tensor, *others: Any, **settings: Any
) -> Tensor:
    """Return this rank's part of the attention's output: all-to-alls give it whole sequences of a part of the heads.

    `attention`: torch's function; `others`, `settings`: its further arguments.
    """
    mask = others[0] if others else settings.get("attn_mask")
    if mask is not None or query.shape[2] != key.shape[2]:
        raise UserError(
            "plan.cp: attention with a mask, or from one sequence to another, cannot be divided among ranks"
        )
    parts.heads.add(gcd(query.shape[1], key.shape[1]))
    whole = [Mapped.apply(each, parts.to_heads, parts.to_parts) for each in (query, key, value)]
    return Mapped.apply(attention(*whole, *others, **settings), parts.to_parts, parts.to_heads)


def _cast_before(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, *others: Any, **settings: Any
) -> Tensor:
    """Attend to what torch's function attends to under autocast: it casts its inputs, here before they are exchanged.

    Rotary embeddings leave queries and keys in fp32 there, which would double what is sent of them.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        precision = torch.get_autocast_dtype(kind)
        query, key, value = (each.to(precision) for each in (query, key, value))
    return attention(query, key, value, *others, **settings)


def divide_context(
    module: nn.Module, blocks: Iterable[nn.Module], parts: ContextParts | Ring, *, sequence_parts: int = 1
) -> None:
    """Make a module run on a rank's parts of sequences; every rank has the same number of positions.

    The attention of its `blocks` exchanges heads, or keys and values in a ring. `sequence_parts`: for a stage that is
    given one of several equal parts of the rank's positions, the number of these parts.

    Raises UserError if the module is known to be unable to do so.
    """
    name = type(module).__name__
    if "position_ids" not in signature(module.forward).parameters:
        raise UserError(f"plan.cp: {name}.forward takes no position_ids, and a rank's positions do not begin at 0")
    mixing = [type(part).__name__ for part in module.modules() if isinstance(part, (nn.Conv1d, nn.RNNBase))]
    if mixing:
        raise UserError(f"plan.cp: {name} has a {mixing[0]}, which takes more than a rank's part of the sequence")
    attend: Attention = (
        partial(attend_in_ring, parts)
        if isinstance(parts, Ring)
        else partial(_attend, parts, F.scaled_dot_product_attention)
    )
    attend = partial(_cast_before, attend)

    def with_divided_attention(forward: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Run a block's forward with this attention in the place of torch's."""
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = attend
        try:
            return forward(*args, **settings)
        finally:
            F.scaled_dot_product_attention = before

    for block in blocks:
        block.forward = partial(with_divided_attention, block.forward)
    # RoBERTa's embeddings, and those of its many descendants in transformers, begin behind the padding token's number
    padded = (part for part in module.modules() if hasattr(part, "create_position_ids_from_inputs_embeds"))
    begin = next((int(part.padding_idx) + 1 for part in padded), 0)  # type: ignore[arg-type]

    def with_positions(
        _module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = args[0].shape[1] * sequence_parts * parts.ranks
        zigzag = isinstance(parts, Ring) and parts.zigzag
        ranges = position_ranges(whole, ranks=parts.ranks, rank=parts.rank, zigzag=zigzag)
        runs = [torch.arange(first + begin, last + begin, device=args[0].device) for first, last in ranges]
        positions = runs[0] if len(runs) == 1 else torch.cat(runs)
        return args, {**settings, "position_ids": positions.unsqueeze(0)}

    module.register_forward_pre_hook(with_positions, with_kwargs=True)
    if isinstance(parts, Ring):  # gaps between positions must not be read as packed sequences
        module.forward = sequences_not_packed()(module.forward)


def context_exchange(policies: Policies, timeline: Timeline, device: torch.device) -> ContextParts | Ring:
    """Return how this rank's sequences are divided, and what its attention exchanges: heads, or keys in a ring."""
    group = context_group(policies, device)
    if not policies.ring:
        return observed_parts(group, timeline)
    return observed_ring(
        group, timeline, zigzag=policies.zigzag, gathers=policies.gathers_keys, overlaps=policies.ring_overlaps
    )


def observed_parts(group: dist.ProcessGroup, timeline: Timeline) -> ContextParts:
    """Return the division of sequences among the ranks of a group, whose all-to-alls are recorded as spans."""

    def all_to_all(sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        with timeline.span("all-to-all", "exposed_communication", group):
            dist.all_to_all_single(received, sent, group=group)
            wait_for_release(received)
        return received

    return ContextParts(dist.get_world_size(group), dist.get_rank(group), all_to_all)
