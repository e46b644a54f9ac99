"""Tensor parallelism of transformer and residual blocks as in Megatron-LM, by whole units in any shares.

DTensor makes the slices if they are even and it supports them, else this module's own code does.

A unit of a transformer block is a key-value head, with the query heads that share it and its part of the perceptron's
columns. A unit of a residual block is a norm group's channels. Each rank has the weights of a contiguous range of
units: the outputs (columns) of a block's first linear maps, the inputs (rows) of its last, so that one sum over the
ranks completes each pair. Everything else is whole and equal on every rank.

[Note: f and g] In Megatron-LM's paper (Shoeybi et al. 2019, section 3) f stands before the maps that are cut by
columns: it is the identity in the forward and a sum over the ranks in the backward. g stands after the maps that are
cut by rows, and is the reverse.

[Note: sequence parts] With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) f is an all-gather of the
ranks' parts of the sequence in the forward and a reduce-scatter in the backward, g the reverse. The first block's input
is divided, and the output of the last block, or of the norm after it, is gathered. Embedding, head and loss, before and
after, are whole and equal on every rank, so that the gradient of this gather is a rank's own part. Gradients of whole
parameters in between must be summed over the ranks, see `PartialGradients`. With `plan.tp_overlap` these collectives
overlap with the products of the linear maps, see `gsreal.methods.overlapped_maps`.

[Note: sliced adapters] Beside a map that is cut by columns, a rank has the whole first matrix of a low-rank adapter and
its own rows of the second. Beside a map that is cut by rows, it has its own columns of the first matrix and the whole
second one, and the adapter's output is part of the sum over the ranks. On every rank, the gradient of a whole matrix is
only a part, that of a slice of the other matrix; see `PartialGradients`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from gsreal.gradient_sharding.bucket import Bucket
from gsreal.measure import Timeline, wait_for_release
from gsreal.methods.adapters import adapter_of
from gsreal.methods.blocks import blocks_of
from gsreal.methods.cuts import (
    AllReduce,
    Cut,
    MeansOverRanks,
    cut_beside_experts,
    cut_of,
    cut_or_reason,
    is_linear,
    is_norm,
    known_cut,
)
from gsreal.methods.mapped import Mapped
from gsreal.methods.overlapped_maps import (
    PartsRing,
    Start,
    Started,
    can_overlap,
    gather_with_overlapped_sum,
    multiply_while_gathered,
    overlap_sum,
    scatter_while_multiplied,
)
from gsreal.model_files.build import build_module
from gssim.errors import UserError
from gssim.scenario import Scenario, units_of_ranks
from gssim.workload import LayerInstance, unrolled


@dataclass(frozen=True)
class Slice:
    """A parameter as part of a whole tensor: ranges of one dimension, concatenated."""

    dimension: int
    size: int
    """Size of that dimension in the whole tensor."""
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return the slice of the whole tensor, as a tensor of its own."""
        pieces = [whole.narrow(self.dimension, first, last - first) for first, last in self.ranges]
        return torch.cat(pieces, self.dimension)


def slices_of(block: nn.Module, held: Sequence[int]) -> dict[tuple[str, str], Slice]:
    """Return the slice of every sliced parameter, by (module, parameter), for a rank with these units."""
    cut, runs = known_cut(block), _runs(held)
    units, slices = cut.units(block), {}
    for path in (*cut.columns, *cut.between, *cut.rows):
        module = block.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            if path in cut.rows and name == "bias":
                continue
            # Hugging Face's linear map Conv1D has its inputs as rows
            transposed = type(module).__name__ == "Conv1D" and parameter.dim() > 1
            dimension = int((path in cut.rows) != transposed)
            parts, size = cut.parts.get(path, 1), parameter.shape[dimension]
            each = size // parts // units
            starts = [part * (size // parts) for part in range(parts)]
            ranges = tuple((start + each * first, start + each * stop) for start in starts for first, stop in runs)
            slices[path, name] = Slice(dimension, size, ranges)
            if name == "weight" and adapter_of(module) is not None:  # the same rows or columns; never transposed
                sliced, of_adapter = ("down", 1) if path in cut.rows else ("up", 0)
                slices[f"{path}.adapter", sliced] = Slice(of_adapter, size, ranges)
    return slices


def _runs(units: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive units as (first, stop).

    >>> _runs(range(2, 5)), _runs([0, 1, 0])
    ([(2, 5)], [(0, 2), (0, 1)])
    """
    runs: list[tuple[int, int]] = []
    for unit in units:
        if runs and runs[-1][1] == unit:
            runs[-1] = runs[-1][0], unit + 1
        else:
            runs.append((unit, unit + 1))
    return runs


def whole_with_parts(block: nn.Module) -> list[tuple[str, str]]:
    """Return the (module, parameter) of a sliced block whose gradient is only a part on every rank.

    That holds where ranks divide no sequences: for norms of heads, and for adapters' whole matrices.
    """
    heads = [(path, block.get_submodule(path)) for path in getattr(cut_of(block), "heads", ())]
    of_heads = [(path, name) for path, norm in heads for name, p in norm.named_parameters() if p.requires_grad]
    return of_heads + partial_adapters(block)


def partial_adapters(block: nn.Module) -> list[tuple[str, str]]:
    """Return the parameters of a sliced block's adapters that are whole, by (module, parameter).

    See [Note: sliced adapters].
    """
    cut = known_cut(block)
    return [
        (f"{path}.adapter", whole)
        for paths, whole in ((cut.columns, "down"), (cut.rows, "up"))
        for path in paths
        if adapter_of(block.get_submodule(path)) is not None
    ]


@dataclass(frozen=True)
class TensorExchanges:
    """Exchanges of tensor-parallel ranks that have slices of the same blocks."""

    ranks: int
    all_reduce: AllReduce
    """Sums over the ranks."""
    group: dist.ProcessGroup | None = None
    parts: "SequenceParts | None" = None
    """How they divide sequences, if they do; see [Note: sequence parts]."""
    reduce_fixed: AllReduce | None = None
    """Sums what has one type in every precision; None: `all_reduce` does that too."""
    start: Start | None = None
    """Begins the sum of an input's gradient, which then overlaps with the products of weights' gradients; None: it
    follows them."""
    ring: PartsRing | None = None
    """Exchanges `parts` while linear maps are computed part by part; None: they are exchanged before and after them."""


def slice_block(block: nn.Module, held: Sequence[int], exchanges: TensorExchanges) -> None:
    """Reduce a block to the units that a rank has."""
    cut = known_cut(block)
    slices = slices_of(block, held)
    for (path, name), part in slices.items():
        module = block.get_submodule(path)
        whole: nn.Parameter = getattr(module, name)
        own = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
        module.register_parameter(name, own)
        mark(module, name, part, exchanges.group)
    for path in cut.over_heads:
        norm = block.get_submodule(path)
        size = len(next(norm.parameters()))
        fraction = size / next(part.size for (owner, _), part in slices.items() if owner == path)
        has_fixed_type = MeansOverRanks.types_of(norm, torch.float64) == MeansOverRanks.types_of(norm)
        reduce = exchanges.reduce_fixed if exchanges.reduce_fixed and has_fixed_type else exchanges.all_reduce
        norm.forward = partial(_norm_over_ranks, norm.forward, MeansOverRanks(fraction, reduce))
    cut.resize(block, len(held))
    if exchanges.ring is not None:
        _overlap_products(block, cut, exchanges.ring)
    else:
        _exchange_around_products(block, cut, exchanges)


def _exchange_around_products(block: nn.Module, cut: Cut, exchanges: TensorExchanges) -> None:
    """Let a block exchange tensors before and after its linear maps."""
    all_reduce, parts, start = exchanges.all_reduce, exchanges.parts, exchanges.start
    f: tuple[AllReduce, AllReduce]
    g: tuple[AllReduce, AllReduce]
    if parts is None:  # Megatron-LM's f copies, and sums gradients over the ranks; its g does the converse
        f, g = (lambda x: x.view_as(x), all_reduce), (all_reduce, _same)
    else:  # f gathers parts, and reduce-scatters gradients; g does the converse
        f, g = (parts.whole, parts.summed), (parts.summed, parts.whole)
    for path in cut.columns if parts is None else cut.gathered:
        module = block.get_submodule(path)
        change: Callable[[Tensor], Tensor] = partial(_map_with_gradient, *f)
        if start is not None and parts is None and can_overlap(module):
            overlap_sum(module, start)
            continue
        if start is not None and parts is not None:
            maps = _maps_below(block, cut, path)
            change = gather_with_overlapped_sum(module, maps, parts.whole, partial(parts.start_sum, start))
        module.register_forward_pre_hook(partial(_with_input, change), with_kwargs=True)
    for path in cut.rows:
        module = block.get_submodule(path)
        module.forward = partial(_row_forward, module, partial(_map_with_gradient, *g), exchanges.ranks)
        if (adapter := adapter_of(module)) is not None:
            adapter.added_by_hook = False


def _overlap_products(block: nn.Module, cut: Cut, ring: PartsRing) -> None:
    """Let a block exchange parts of sequences while its linear maps are computed."""
    for path in cut.gathered:
        module = block.get_submodule(path)
        change = multiply_while_gathered(module, _maps_below(block, cut, path), ring)
        module.register_forward_pre_hook(partial(_with_input, change), with_kwargs=True)
    for path in cut.rows:
        scatter_while_multiplied(block.get_submodule(path), ring)


def _maps_below(block: nn.Module, cut: Cut, path: str) -> dict[str, nn.Module]:
    """Return a block's column-parallel maps that read the input of the module at `path`, by path."""
    reading = [each for each in cut.columns if each == path or each.startswith(f"{path}.")]
    return {each: block.get_submodule(each) for each in reading}


def _map_with_gradient(change: AllReduce, back: AllReduce, x: Tensor) -> Tensor:
    result: Tensor = Mapped.apply(x, change, back)
    return result


def _norm_over_ranks(forward: Callable[[Tensor], Tensor], means: MeansOverRanks, x: Tensor) -> Tensor:
    """Return a norm of a rank's part of the width, whose means are over the parts of all ranks."""
    with means:
        return forward(x)


def mark(module: nn.Module, name: str, part: Slice, group: dist.ProcessGroup | None) -> None:
    """Record the slice of a whole tensor that a module's parameter is, and the group that has it whole."""
    module.__dict__.setdefault("_gsreal_slices", {})[name] = (part, group)


def _with_input(
    change: Callable[[Tensor], Tensor], _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change a module's first input, or its `hidden_states`, if they are passed by name."""
    if inputs:
        return (change(inputs[0]), *inputs[1:]), named
    return inputs, named | {"hidden_states": change(named["hidden_states"])}


def _row_forward(module: Any, summed: Callable[[Tensor], Tensor], ranks: int, x: Tensor) -> Tensor:
    """Return the sum of all ranks' outputs; each adds its fraction of the bias, as DTensor does.

    Every rank has the whole gradient of the bias already.
    """
    bias: Any = None if module.bias is None else Mapped.apply(module.bias, lambda whole: whole / ranks, _same)
    if isinstance(module, nn.Linear):
        y = F.linear(x, module.weight, bias)
    elif isinstance(module, nn.Conv2d):
        y = F.conv2d(x, module.weight, bias, module.stride, module.padding, module.dilation, module.groups)
    else:  # Hugging Face's Conv1D
        y = torch.addmm(bias, x.view(-1, x.size(-1)), module.weight).view(*x.shape[:-1], -1)
    adapter = adapter_of(module)
    return summed(y if adapter is None else y + adapter(x))


def _same(gradient: Tensor) -> Tensor:
    return gradient


class SequenceParts:
    """The division of sequences of shape (batch, sequence, width) among tensor-parallel ranks, in equal parts.

    `all_gather` maps a tensor to those of all ranks, one after another in its first dimension; `reduce_scatter` maps
    such a tensor to the sum over the ranks of this rank's part.
    """

    def __init__(self, ranks: int, rank: int, all_gather: AllReduce, reduce_scatter: AllReduce) -> None:
        self.ranks, self.rank, self.all_gather, self.reduce_scatter = ranks, rank, all_gather, reduce_scatter

    def whole(self, part: Tensor) -> Tensor:
        """Return whole sequences, of which each rank has a part; of a tensor with two dimensions, all ranks' rows."""
        if part.dim() == 2:
            return self.all_gather(part.contiguous())
        by_rank = self.all_gather(part.contiguous()).unflatten(0, (self.ranks, -1))
        return by_rank.transpose(0, 1).flatten(1, 2)

    def summed(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks."""
        return self.reduce_scatter(self._by_rank(whole))

    def start_sum(self, start: Start, whole: Tensor) -> Started:
        """Begin the sum over the ranks of this rank's part; `start` begins a reduce-scatter."""
        return start(self._by_rank(whole))

    def _by_rank(self, whole: Tensor) -> Tensor:
        """Return whole sequences with the parts of all ranks one after another in the first dimension."""
        return whole if whole.dim() == 2 else whole.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part, as a tensor of its own."""
        part = whole.unflatten(1, (self.ranks, -1)).select(1, self.rank)
        return part.clone(memory_format=torch.contiguous_format)


def end_of_parts(order: Sequence[str], blocks: Sequence[str], module: nn.Module) -> str:
    """Return the path of the module whose output is gathered where ranks divide sequences.

    It is the norm after the last block, or else that block. `order`: paths of the modules at which layers of the whole
    model begin, as they run; `blocks`: those of blocks.
    """
    following = order[order.index(blocks[-1]) + 1 :][:1]
    return next((path for path in following if is_norm(module.get_submodule(path))), blocks[-1])


def divide_sequences(
    blocks: Sequence[str], module: nn.Module, parts: SequenceParts, *, end: str, held: Collection[str] | None = None
) -> list[str]:
    """Divide sequences among ranks from a model's first block to its last, or to the norm after that.

    `blocks`: paths of the model's blocks, which are sliced already. `end`: see `end_of_parts`. Before and after them
    all ranks compute the same, so that the gradient at `end` is a rank's own part. `held`: paths of the layers that
    `module`, a stage, has; all by default. Returns the names of the parameters whose gradients are to be summed over
    the ranks.
    """
    held = (*blocks, end) if held is None else held

    def joined(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (Mapped.apply(output[0], parts.whole, parts.own), *output[1:])
        return Mapped.apply(output, parts.whole, parts.own)

    if blocks[0] in held:
        divided = partial(_with_input, lambda x: Mapped.apply(x, parts.own, parts.whole))
        module.get_submodule(blocks[0]).register_forward_pre_hook(divided, with_kwargs=True)
    names = []
    if end in held:
        module.get_submodule(end).register_forward_hook(joined)
        if end not in blocks:
            names = [f"{end}.{name}" for name, p in module.get_submodule(end).named_parameters() if p.requires_grad]
    for path in (each for each in blocks if each in held):
        cut = known_cut(block := module.get_submodule(path))
        adapters = partial_adapters(block)
        inside = {
            *cut.columns,
            *cut.between,
            *cut.rows,
            *(f"{each}.adapter" for each in (*cut.columns, *cut.rows)),
            *cut.experts,
        }
        trained = [name for name, parameter in block.named_parameters() if parameter.requires_grad]
        names += [f"{path}.{name}" for name in trained if name.rpartition(".")[0] not in inside]
        names += [f"{path}.{owner}.{name}" for owner, name in adapters]
    return names


@dataclass(frozen=True)
class PartialGradients:
    """Sums gradients of whole parameters that ranks use on their parts of sequences or heads, in one all-reduce.

    Source: Megatron-LM, core/distributed/finalize_model_grads.py, `_allreduce_layernorm_grads`. For sharded parameters,
    a rank sums the gradients of its shards, padded to equal rows; for pushed gradients, the ranges that it owns.
    """

    places: Sequence[tuple[nn.Module, str]]
    """Modules and the names of their parameters: wrappers may replace these."""
    group: dist.ProcessGroup
    timeline: Timeline
    shards: int

    def sum(self) -> None:
        """Replace the gradients by their sums over the ranks (a collective)."""
        parameters = [getattr(module, name) for module, name in self.places]
        sizes = [-(-len(each) // self.shards) * (each.numel() // len(each)) for each in parameters]
        gradients = [each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad for each in parameters]
        self._sum(gradients, sizes)

    def sum_pushed(self, buckets: Sequence[Bucket]) -> None:
        """Do the same with the ranges of pushed gradients that this rank owns, if any (a collective)."""
        bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        gradients = []
        for parameter in (getattr(module, name) for module, name in self.places):
            bucket = bucket_of[parameter]
            _, own = bucket.owned(parameter)
            if own.start < own.stop:
                assert bucket.shard.grad is not None
                gradients.append(bucket.shard.grad[own])
        if gradients:
            self._sum(gradients, [len(each) for each in gradients])

    def _sum(self, gradients: Sequence[Tensor], sizes: list[int]) -> None:
        """All-reduce gradients in one flat tensor; `sizes`: the elements that each takes in it."""
        with self.timeline.span("all-reduce partial gradients", "exposed_communication", self.group):
            flat = gradients[0].new_zeros(sum(sizes))
            own = [part[: each.numel()] for part, each in zip(flat.split(sizes), gradients, strict=True)]
            for part, gradient in zip(own, gradients, strict=True):
                part.copy_(gradient.reshape(-1))
            dist.all_reduce(flat, group=self.group)
            for part, gradient in zip(own, gradients, strict=True):
                gradient.copy_(part.view_as(gradient))


def slice_blocks(
    scenario: Scenario,
    module: nn.Module,
    timeline: Timeline,
    mesh: DeviceMesh,
    *,
    layers: Sequence[LayerInstance] | None = None,
    end: str | None = None,
) -> list[tuple[nn.Module, str]]:
    """Reduce each block to this rank's slice; `mesh`: the tensor-parallel ranks, one axis.

    `layers`: those of the stage that `module` is; all by default. `end`: of a stage, see `end_of_parts`. Returns the
    parameters, by module and name, whose gradients are only a part on every rank. Raises UserError if a block cannot be
    sliced, or if dropout would differ between the ranks.
    """
    order = [instance for instance in unrolled(scenario.workload.model) if instance.layer.modules]
    held = {instance.module for instance in layers or order if instance.layer.modules}
    paths = [instance.module for instance in order if instance.layer.block]
    blocks = [module.get_submodule(path) for path in paths if path in held]
    _check(scenario, module, blocks)
    parts = _observed_parts(mesh, timeline) if scenario.policies.sequence_parallel else None
    start: Start | None = None
    if scenario.plan.async_input_gradients:
        start = (started_all_reduce if parts is None else _started_reduce_scatter)(mesh, timeline)
    exchanges = TensorExchanges(
        mesh.size(),
        observed_all_reduce(mesh, timeline),
        group=mesh.get_group(),
        parts=parts,
        start=start,
        ring=PartsRing(mesh.get_group(), timeline) if scenario.plan.tp_overlap else None,
    )
    for block in blocks:
        cut = known_cut(block)
        sizes = units_of_ranks(cut.units(block), scenario.slice_shares)
        position = mesh.get_local_rank()
        own = range(sum(sizes[:position]), sum(sizes[: position + 1]))
        if scenario.cuts_natively and is_linear(block, cut):
            distribute(block, cut, own, mesh, timeline)
        else:
            slice_block(block, own, exchanges)
    if parts is None:
        return [(block.get_submodule(path), name) for block in blocks for path, name in whole_with_parts(block)]
    end = end or end_of_parts([each.module for each in order], paths, module)
    names = divide_sequences(paths, module, parts, end=end, held=held)
    return [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]


def partial_gradients(
    scenario: Scenario, places: Sequence[tuple[nn.Module, str]], timeline: Timeline, mesh: DeviceMesh
) -> PartialGradients | None:
    """Return the object that sums these parameters' gradients before each update; None if there are none."""
    shards = scenario.policies.shards if scenario.policies.gradients == "reduce-scatter" else 1
    return PartialGradients(places, mesh.get_group(), timeline, shards) if places else None


def check_slices(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if the plan cuts blocks, but those of the real module cannot be, or it has dropout."""
    if scenario.policies.tp > 1:
        with torch.device("meta"):
            module = build_module(scenario.workload.model.module, where=where)
        blocks = blocks_of(scenario.workload.model, module)
        _check(scenario, module, blocks, where=f"{where}: ")
        workload, native = scenario.workload, scenario.cuts_natively and any(is_linear(b, known_cut(b)) for b in blocks)
        if native and workload.optimizer.startswith("sgd") and workload.optimizer_implementation == "fused":
            raise UserError(
                f"{where}: workload.optimizer_implementation = 'fused': torch has no fused SGD for slices of blocks "
                "(DTensors): it can be predicted, but not run; allowed: default, for-loop, foreach"
            )


def _check(scenario: Scenario, module: nn.Module, blocks: Sequence[nn.Module], *, where: str = "") -> None:
    for block in blocks:
        cut = (cut_beside_experts(block) if scenario.policies.ep > 1 else None) or cut_or_reason(block)
        if isinstance(cut, str):
            raise UserError(f"{where}workload.model: a block cannot be cut: {cut}")
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        raise UserError(
            f"{where}plan.method = '{scenario.plan.method}': ranks draw their random numbers apart, so that dropout "
            "would make the parameters that all hold differ; allowed: dropout of 0"
        )


def observed_all_reduce(mesh: DeviceMesh, timeline: Timeline) -> AllReduce:
    """Return torch's functional all-reduce over the ranks of a mesh, awaited immediately and recorded as a span."""
    from torch.distributed import _functional_collectives as functional

    def all_reduce(tensor: Tensor) -> Tensor:
        with timeline.span("all-reduce", "exposed_communication", mesh.get_group()):
            return _release_result(functional.wait_tensor(functional.all_reduce(tensor, "sum", (mesh, 0))))

    return all_reduce


def started_all_reduce(mesh: DeviceMesh, timeline: Timeline) -> Start:
    """Return the start of an all-reduce in place over the ranks of a mesh, whose wait is recorded as a span."""
    group = mesh.get_group()

    def start(tensor: Tensor) -> Started:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return partial(_wait_for_result, [work], [tensor], "all-reduce", timeline, group)

    return start


def _started_reduce_scatter(mesh: DeviceMesh, timeline: Timeline) -> Start:
    """Return the start of a reduce-scatter, whose wait is recorded as a span.

    The parts for the ranks are one after another in the first dimension.
    """
    group, ranks = mesh.get_group(), mesh.size()

    def start(whole: Tensor) -> Started:
        part = whole.new_empty((len(whole) // ranks, *whole.shape[1:]))
        work = dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)
        # gloo sends a copy, but NCCL reads `whole` until the collective ends
        return partial(_wait_for_result, [work], [whole, part], "reduce-scatter sequence", timeline, group)

    return start


def _wait_for_result(works: list[Any], tensors: list[Tensor], label: str, timeline: Timeline, group: Any) -> Tensor:
    """Wait for a collective and return its result, the last of `tensors`; empties both lists, to release the others."""
    with timeline.span(label, "exposed_communication", group):
        works.pop().wait()
    result = tensors.pop()
    tensors.clear()
    wait_for_release(result)
    return result


def _release_result(result: Tensor) -> Tensor:
    """Wait until torch has released the result of a collective, so that only the caller holds it; return it."""
    wait_for_release(result)
    return result


def _observed_parts(mesh: DeviceMesh, timeline: Timeline) -> SequenceParts:
    """Return the division of sequences among the ranks of a mesh by torch's functional collectives, as spans."""
    from torch.distributed import _functional_collectives as functional

    # torch before 2.13 has only the names with `tensor`
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

    group = mesh.get_group()

    def all_gather(part: Tensor) -> Tensor:
        with timeline.span("all-gather sequence", "exposed_communication", group):
            return _release_result(functional.wait_tensor(gather(part, 0, (mesh, 0))))

    def reduce_scatter(whole: Tensor) -> Tensor:
        with timeline.span("reduce-scatter sequence", "exposed_communication", group):
            return _release_result(functional.wait_tensor(scatter(whole, "sum", 0, (mesh, 0))))

    return SequenceParts(mesh.size(), mesh.get_local_rank(), all_gather, reduce_scatter)


def distribute(block: nn.Module, cut: Cut, held: range, mesh: DeviceMesh, timeline: Timeline) -> None:
    """Slice a block by torch.distributed.tensor.parallel.

    DTensor slices contiguous rows: those of query, key and value are first reordered by the rank that gets them.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    slices = slices_of(block, held)
    for path, count in cut.parts.items():
        with torch.no_grad():
            for parameter in block.get_submodule(path).parameters():  # from (part, rank, row) to (rank, part, row)
                rows = parameter.unflatten(0, (count, mesh.size(), -1))
                parameter.copy_(rows.transpose(0, 1).flatten(0, 2))
    columns, rows = _observed_styles(timeline, mesh.get_group())
    plan = {path: columns() for path in cut.columns} | {path: rows() for path in cut.rows}
    parallelize_module(block, mesh, plan)
    cut.resize(block, len(held))
    for (path, name), part in slices.items():
        mark(block.get_submodule(path), name, part, mesh.get_group())


def _observed_styles(timeline: Timeline, group: dist.ProcessGroup) -> tuple[type, type]:
    """Return torch's column and row styles, with their blocking all-reduces recorded as spans."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    class ObservedColumns(ColwiseParallel):
        """Measures the all-reduce of the input's gradient: from the gradient of its DTensor to its own."""

        @staticmethod
        def _prepare_input_fn(
            input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
        ) -> Any:
            marks: list[Any] = []
            own = inputs[0].view_as(inputs[0])
            shared = ColwiseParallel._prepare_input_fn(
                input_layouts, desired_input_layouts, mod, (own, *inputs[1:]), device_mesh
            )
            if own.requires_grad:
                shared.register_hook(lambda _: marks.append(timeline.mark()))

                def summed(gradient: Tensor) -> None:
                    wait_for_release(gradient, holders=2)  # the hook's and autograd's
                    timeline.between("all-reduce", "exposed_communication", marks.pop(), group=group)

                own.register_hook(summed)
            return shared

    class ObservedRows(RowwiseParallel):
        """Waits for the outputs where they are computed; the next operation needs them immediately anyway."""

        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
        ) -> Any:
            with timeline.span("all-reduce", "exposed_communication", group):
                summed = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
                if isinstance(summed, AsyncCollectiveTensor):
                    summed.trigger_wait()
                    arrived: Any = summed if summed._base is None else summed._base  # it may be a view
                    wait_for_release(arrived.elem)
            return summed

    return ObservedColumns, ObservedRows
