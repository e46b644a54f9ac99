"""A vocabulary that tensor-parallel ranks divide: rows of the token embedding, and of the head with its logits.

Embedding: each rank looks up the tokens whose rows it has; the others are zeros until an all-reduce adds the ranks'
results (Megatron-LM, core/tensor_parallel/layers.py, VocabParallelEmbedding).

Loss: each rank has its rows of the head, and computes their logits alone. Two small all-reduces follow: one finds the
largest logit of each token, the other sums its exponentials and its target's logit. Whole logits exist on no rank
(Megatron-LM, core/tensor_parallel/cross_entropy.py; torch's `loss_parallel` needs three). Logits in fp32 or fp64 become
their exponentials and then their gradient in place; those in 16 bits are cast to fp32 first. Every rank has a part of
the gradient of the head's input: a third all-reduce sums them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.data.source import IGNORED
from gsreal.measure import Timeline
from gsreal.methods.mapped import Mapped
from gsreal.methods.overlapped_maps import overlap_sum
from gsreal.methods.tensor_slices import Slice, mark, observed_all_reduce, started_all_reduce
from gsreal.model_files.build import loss_of
from gssim.scenario import Scenario, shares_embedding, token_embedding, units_of_ranks
from gssim.workload import unrolled

Loss = Callable[[Tensor, Tensor], Tensor]
"""Returns the mean loss of logits and targets."""


def _own_rows(scenario: Scenario, whole: Tensor, mesh: DeviceMesh) -> tuple[Slice, int]:
    """Return this rank's rows of a weight with one row for every vocabulary entry, and the number of the first."""
    rows = units_of_ranks(len(whole), scenario.slice_shares)
    place = mesh.get_local_rank()
    first = sum(rows[:place])
    return Slice(0, len(whole), ((first, first + rows[place]),)), first


class _DividedLookup(torch.autograd.Function):
    """Lookup of tokens in a rank's rows of an embedding, from row `first` on, summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        first: int,
        ignored: int | None,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the tokens' rows; `ignored`: a token whose row gets no gradient."""
        rows = len(weight)
        own = tokens - first
        others = (own < 0) | (own >= rows)
        embedded = nn.functional.embedding(own.clamp(0, rows - 1), weight)
        embedded.masked_fill_(others.unsqueeze(-1), 0)
        if ignored is not None:
            others |= tokens == ignored
        ctx.save_for_backward(own.masked_fill_(others, rows))  # an index that the backward leaves out
        ctx.rows = rows
        return all_reduce(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None, None]:
        """Return the gradient of the rank's rows."""
        (own,) = ctx.saved_tensors
        gradient = torch.ops.aten.embedding_dense_backward(gradients[0], own, ctx.rows, ctx.rows, False)
        return None, gradient, None, None, None


def divide_vocabulary(
    scenario: Scenario,
    module: nn.Module,
    timeline: Timeline,
    mesh: DeviceMesh,
    *,
    first: bool = True,
    last: bool = True,
) -> Loss:
    """Reduce a module's embedding and head to this rank's rows of the vocabulary, as the plan says; return its loss.

    `mesh`: the tensor-parallel ranks, one axis. `first`, `last`: whether the module, a stage, has the model's first
    layers and its last.
    """
    plan, model = scenario.plan, scenario.workload.model
    if plan.embedding_parallel and first:
        _divide_embedding(scenario, module, timeline, mesh)
    if not (plan.loss_parallel and last):
        return loss_of
    return _divide_loss(scenario, module, timeline, mesh, is_divided=first and shares_embedding(model))


def _divide_embedding(scenario: Scenario, module: nn.Module, timeline: Timeline, mesh: DeviceMesh) -> None:
    """Reduce a module's token embedding, and a head that shares its weight, to this rank's rows of the vocabulary."""
    name = unrolled(scenario.workload.model)[0].held_names[0]
    embedding = module.get_submodule(name.rpartition(".")[0])
    assert isinstance(embedding, nn.Embedding)
    whole = embedding.weight
    part, first = _own_rows(scenario, whole, mesh)
    sharing = [each for each in module.modules() if getattr(each, "weight", None) is whole]
    own = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
    for each in sharing:
        each.weight = own
    mark(embedding, "weight", part, mesh.get_group())
    all_reduce, ignored = observed_all_reduce(mesh, timeline), embedding.padding_idx

    class DividedEmbedding(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            embedded: Tensor = _DividedLookup.apply(tokens, self.weight, first, ignored, all_reduce)
            return embedded

    # a subclass of nn.Embedding may do more than look up (Gemma's scales the result): its `super().forward` is then
    # this one
    kind = type(embedding)
    does_more = kind is not nn.Embedding
    embedding.__class__ = type(kind.__name__, (kind, DividedEmbedding), {}) if does_more else DividedEmbedding


def _divide_loss(
    scenario: Scenario, module: nn.Module, timeline: Timeline, mesh: DeviceMesh, *, is_divided: bool
) -> Loss:
    """Reduce a module's head to this rank's rows of the vocabulary; return the loss of its logits.

    `is_divided`: the head shares the weight of the module's token embedding, which is divided already.
    """
    group, all_reduce = mesh.get_group(), observed_all_reduce(mesh, timeline)
    head = module.get_submodule(unrolled(scenario.workload.model)[-2].module)
    if is_divided:
        weight = token_embedding(scenario.workload.model)
        assert weight is not None  # a scenario is checked for it
        entries = weight.shape[0]
        first = sum(units_of_ranks(entries, scenario.slice_shares)[: mesh.get_local_rank()])
    else:
        whole: nn.Parameter = head.weight  # type: ignore[assignment]  # a linear map, as the scenario was checked for
        part, first = _own_rows(scenario, whole, mesh)
        head.weight = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
        mark(head, "weight", part, group)
    # a shared weight's gradient belongs to the embedding's layer
    if scenario.plan.async_input_gradients and not is_divided:
        overlap_sum(head, started_all_reduce(mesh, timeline))
    else:
        head.register_forward_pre_hook(
            lambda _head, inputs: (Mapped.apply(inputs[0], lambda x: x.view_as(x), all_reduce), *inputs[1:])
        )

    def reduce(tensor: Tensor, op: Any) -> None:
        with timeline.span("all-reduce", "exposed_communication", group):
            dist.all_reduce(tensor, op, group=group)

    return partial(divided_loss, first, reduce)


def divided_loss(first: int, reduce: Callable[[Tensor, Any], None], logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy from logits of the vocabulary entries from `first` on; it may overwrite the logits.

    `reduce` replaces a tensor by its reduction over the ranks that have the other parts.
    """
    loss: Tensor = _DividedLoss.apply(logits, targets.reshape(-1), first, reduce)
    return loss


class _DividedLoss(torch.autograd.Function):
    """Mean cross-entropy from a rank's logits, of vocabulary entries from `first` on; it may overwrite the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, reduce: Callable[[Tensor, Any], None]) -> Tensor:
        """Return the loss, equal on all ranks."""
        rows = logits.shape[-1]
        exponentials = (logits.float() if logits.element_size() < 4 else logits).detach().view(-1, rows)
        largest = exponentials.amax(1)
        reduce(largest, dist.ReduceOp.MAX)
        exponentials.sub_(largest.unsqueeze(1))
        del largest
        own = targets - first
        inside = (own >= 0) & (own < rows)
        own.clamp_(0, rows - 1)
        sums = exponentials.new_empty(2, len(targets))
        torch.mul(exponentials.gather(1, own.unsqueeze(1)).squeeze(1), inside, out=sums[1])
        torch.sum(exponentials.exp_(), 1, out=sums[0])
        reduce(sums, dist.ReduceOp.SUM)
        counted = targets != IGNORED
        count = counted.sum()
        ctx.save_for_backward(exponentials, sums, own, inside, counted, count)
        ctx.shape, ctx.kind = logits.shape, logits.dtype
        return ((sums[0].log() - sums[1]) * counted).sum().div(count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the rank's logits."""
        exponentials, sums, own, inside, counted, count = ctx.saved_tensors
        exponentials.div_(sums[0].unsqueeze(1))
        exponentials.scatter_add_(1, own.unsqueeze(1), -inside.to(exponentials.dtype).unsqueeze(1))
        exponentials.mul_((counted * (gradients[0] / count)).unsqueeze(1))
        return exponentials.view(ctx.shape).to(ctx.kind), None, None, None
