"""FSDP2: each unit's parameters are all-gathered together, and its gradients are reduce-scattered together.

[Note: order] FSDP2 works in hooks, so the order of its actions is that of torch 2.13's source, folder
torch/distributed/fsdp/_fully_shard. In the forward, the root is gathered first, and each block before its own forward.
In the backward, if blocks were freed after their forward, the hook on a unit's output consumes the gathered parameters
and then issues the gather of the next unit (FSDPParamGroup.pre_backward, _backward_prefetch). The root's own hook, on
the logits, issues the gather of the last block. The root is kept from forward to backward (FSDPState._lazy_init). Its
gradients are reduced last, by the callback at the end of the backward.

[Note: replicas] On a mesh of two axes (HSDP), a unit's gradient shards are reduce-scattered over `dp_shard` and then
all-reduced over `dp_replicate` (_fsdp_collectives.foreach_reduce). The all-reduced tensor stays until the callback at
the end of the backward (FSDPParamGroup._all_reduce_state, finalize_backward). In the first micro-batch it becomes the
gradient and stays anyway. In later micro-batches it is added to the gradient and stays beside it, as does a tensor that
is then cast to another precision. On nccl the all-reduces have a communicator and a stream of their own; only that
callback waits for them.

[Note: stages] In pipeline stages torch runs every backward without reducing gradients and without freeing parameters
(PipelineStage.backward_maybe_with_nosync). After the schedule it frees and reduces unit by unit: the root first, then
the blocks in the model's order (perform_reduce_grad). So the root is gathered once a step, as are blocks that stay
gathered after a forward. Other blocks are gathered by a forward that finds them freed, freed after it, and gathered
again by a backward that finds them freed. Blocks that an earlier backward has gathered are used by a later one, and
freed by the next forward. A stage whose output is not the logits has the root's hook on that output.

[Note: experts] Where ranks divide the experts of a block, the block is two units (as is the root, in a model whose
blocks are not a stack of equal ones). The dense unit is shared by all ranks; the unit of a rank's experts is shared by
the ranks that hold the same ones (a mesh of its own for some parameters, as torch 2.13's shard_placement_fn and
torchtitan have it). Both units are gathered when the block begins, one after the other. In the backward the second
copy-out is followed by the gathers of both units of the block before (FSDPParamGroup._backward_prefetch), while the
root's hook gathers only one unit. The experts' gradients are reduced first. Only their reduction waits for earlier
reduce-scatters and frees the buffers of these, so two buffers may be alive. If the ranks that hold the same experts
outnumber these experts, each expert is cut in the second dimension (torchtitan's apply_fsdp). Gathered parameters are
then copied once more, into their place (foreach_all_gather_copy_out), and so is each gradient before it is reduced; the
last gradient lives beside its copy until the reduction is done. FSDP2 takes the mean over the ranks that hold
the same experts, so before the update the gradients are divided by the number of ranks that divide the experts. Frozen
experts, beside adapters, are gathered and freed in the same way; at the point where their gradients would be reduced
first, the buffers of earlier reduce-scatters are freed all the same.

[Note: last gradient] foreach_reduce releases a unit's gradients once they are copied in, all but one: its loop over
them leaves the last one in a local variable, so that one lives until the reduction returns. (A single rank skips the
loop.) FSDP2 orders parameters by module, children before their parent (_get_managed_modules), so the last one is a
module's own parameter if it has any, else the last one of its last child: the output layer's weight in many roots.

[Note: streams] On nccl, collectives run beside the compute, in the order in which the host issues them. Gathers and
reduce-scatters share one communicator, which runs one collective at a time. Events order them as in wait_for_unshard
and post_backward: a gather waits until the parameters of the second-last unit have been copied out (so at most two flat
buffers are alive), a reduce-scatter until its gradients are copied in, and the next copy-in until the reduce-scatter is
done. The host is assumed to run ahead of the device. Memory is booked on the compute stream, at the tasks where the
host allocates and frees it, because that is the order in which torch.cuda.max_memory_allocated counts. On a CPU, FSDP2
blocks in every collective.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from gssim import cost
from gssim.collectives import Communication
from gssim.memory import Event, Footprint, footprint
from gssim.plan.splitting import shards_inside_experts
from gssim.program.compute import backward_begin, beside_host, forward_id, pass_ends
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.offload import COPY_TO_DEVICE, COPY_TO_HOST, copy, updating_device
from gssim.program.task import MicroBatch, Task, TaskId, collective_task
from gssim.units import PRECISION_BYTES
from gssim.workload import LayerInstance, Parameter
from gssim.workload.quantized import Stored, quantized_weights, stored


@dataclass(frozen=True)
class Tensors:
    """Parameters of a unit, and how ranks shard them; equal blocks share one object."""

    trained: tuple[Parameter, ...]
    ranks: int
    value_bytes: int
    master_bytes: int
    """Bytes of an element of a shard. FSDP2 keeps shards and their gradients in the optimizer's precision; if only the
    optimizer is on the host, devices keep shards in the workload's precision."""
    reduce_bytes: int
    """Bytes of an element of a gradient while it is reduced."""
    frozen: tuple[Parameter, ...] = ()
    """Frozen parameters: they are gathered too, but have no gradients."""
    quantized: tuple[Stored, ...] = ()
    """Weights quantized to few bits. They are gathered in that form; every rank keeps all of their scales."""
    dimension: int = 0
    """Index of the dimension in which each parameter is cut; see [Note: experts]."""
    last: int = -1
    """Index in `trained` of the parameter that FSDP2 reduces last; see [Note: last gradient]."""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters, trained ones first."""
        return (*self.trained, *self.frozen)

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(Rows, elements of a row) of each parameter, along the dimension that is cut; a scalar has one row."""
        rows = [parameter.shape[self.dimension] if parameter.shape else 1 for parameter in self.parameters]
        return tuple((n, parameter.elements // n) for n, parameter in zip(rows, self.parameters, strict=True))

    @cached_property
    def shard_elements(self) -> tuple[int, ...]:
        """Elements of each parameter on one rank, padding included (torch.chunk)."""
        return tuple(math.ceil(rows / self.ranks) * row_elements for rows, row_elements in self.rows)

    @cached_property
    def quantized_shards(self) -> tuple[int, ...]:
        """Bytes of the values of each quantized weight on one rank, padding included."""
        return tuple(math.ceil(each.values_bytes / self.ranks) for each in self.quantized)

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes of the gathered parameters: each padded in its first dimension to a multiple of the ranks."""
        return self.ranks * (sum(self.shard_elements) * self.value_bytes + sum(self.quantized_shards))

    @cached_property
    def padded_tensors(self) -> tuple[float, ...]:
        """Bytes of each gathered parameter, padding included."""
        shards = (*(elements * self.value_bytes for elements in self.shard_elements), *self.quantized_shards)
        return tuple(float(self.ranks * size) for size in shards)

    @cached_property
    def gradient_tensors(self) -> tuple[float, ...]:
        """Bytes of each unsharded gradient."""
        return tuple(float(parameter.elements * self.value_bytes) for parameter in self.trained)

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes, padding included, of the largest unsharded gradient."""
        return self.ranks * max(self.shard_elements[: len(self.trained)], default=0) * self.value_bytes

    @cached_property
    def uneven_bytes(self) -> int:
        """Bytes, padding included, of those gradients that need padding."""
        pairs = zip(self.rows[: len(self.trained)], self.shard_elements, strict=False)
        return self.ranks * sum(elements for (rows, _), elements in pairs if rows % self.ranks) * self.value_bytes

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of the parameters in one shard, padding included."""
        return sum(self.shard_elements) * self.master_bytes + sum(self.quantized_shards)

    @cached_property
    def shard_tensors(self) -> tuple[float, ...]:
        """Bytes of each tensor that a rank keeps for the parameters: its shards, and scales of quantized weights."""
        shards = (elements * self.master_bytes for elements in self.shard_elements)
        scales = (each.scales_bytes for each in self.quantized)
        return tuple(map(float, (*shards, *self.quantized_shards, *scales)))

    @cached_property
    def scales_bytes(self) -> int:
        """Bytes of the scales of quantized weights, which stay on the device wherever their values are."""
        return sum(each.scales_bytes for each in self.quantized)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of the gradients in one shard, padding included."""
        return sum(self.shard_elements[: len(self.trained)])

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return sum(parameter.elements for parameter in self.trained) * self.value_bytes

    def own_elements(self, position: int) -> tuple[int, ...]:
        """Return the elements of each trained parameter on the group's rank at `position`, without padding."""
        elements = []
        for rows, row_elements in self.rows[: len(self.trained)]:
            chunk = math.ceil(rows / self.ranks)
            elements.append(max(0, min(chunk, rows - position * chunk)) * row_elements)
        return tuple(elements)


@dataclass(frozen=True)
class Unit:
    """Layers that FSDP2 shards together: a block, or everything outside blocks (the root)."""

    name: str
    layers: tuple[LayerInstance, ...]
    tensors: Tensors
    experts: bool = False
    """Whether the unit consists of the divided experts of a block; see [Note: experts]."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share the unit."""
        return self.tensors.ranks

    def gathered(self, position: int, *, sign: int) -> Event:
        """Return the event that allocates (`sign` 1) or frees (-1) the parameters copied out of a gather."""
        return Event(position, sign * self.tensors.padded_bytes, "gathered_parameters", self.tensors.padded_tensors)

    @property
    def flat_bytes(self) -> int:
        """Bytes of the flat buffer into which the unit is gathered; 0 for a single rank, which copies its parameters
        without one.
        """
        return self.tensors.padded_bytes if self.ranks > 1 else 0

    @property
    def shard_gradient_bytes(self) -> int:
        """Bytes of the gradients in one shard."""
        return self.tensors.trained_elements * self.tensors.master_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's part of the all-gather."""
        return self.tensors.padded_bytes // self.ranks

    @property
    def scattered_bytes(self) -> int:
        """Bytes of the gradients that are reduce-scattered, padding included."""
        return self.ranks * self.tensors.trained_elements * self.tensors.reduce_bytes

    @property
    def reduced_bytes(self) -> int:
        """Bytes of one rank's reduced gradients, in the precision of the reduction."""
        return self.scattered_bytes // self.ranks

    @property
    def casts(self) -> bool:
        """Whether parameters are gathered in another precision than that of the shards."""
        return self.tensors.value_bytes != self.tensors.master_bytes

    @property
    def casts_gradients(self) -> bool:
        """Whether gradients are reduced in another precision than that of the shards."""
        return self.tensors.reduce_bytes != self.tensors.master_bytes

    @property
    def is_root(self) -> bool:
        """Whether it consists of the layers outside blocks."""
        return not self.layers[0].layer.block


@once_a_run
def units(low: Lowering) -> tuple[Unit, ...]:
    """Return FSDP2's units in the order in which they are gathered: the root first, then each block."""
    kept_bytes = low.value_bytes if low.offload == "optimizer" else low.master_bytes
    ranks, sizes = low.shards, (low.value_bytes, kept_bytes, PRECISION_BYTES[low.reduce_precision])
    precision = low.scenario.workload.frozen_precision

    def divided(parameter: Parameter) -> bool:
        return parameter.of_experts

    def trained(layers: Sequence[LayerInstance], *, of_experts: bool) -> tuple[tuple[Parameter, ...], list[str]]:
        """Return the trained parameters of layers that are divided experts, or all others, and their names."""
        named = [pair for each in layers for pair in zip(each.layer.parameters, each.parameter_names, strict=True)]
        chosen = [pair for pair in named if divided(pair[0]) == of_experts]
        return tuple(parameter for parameter, _ in chosen), [name for _, name in chosen]

    def with_experts(unit: Unit) -> list[Unit]:
        """Return the unit without its divided experts, if anything is left, and the unit of these experts."""
        own, names = trained(unit.layers, of_experts=True)
        at_rest = tuple(each for instance in unit.layers for each in instance.layer.frozen_parameters if divided(each))
        result = [unit] if unit.tensors.parameters or unit.tensors.quantized else []
        if own or at_rest:
            replicas = ranks // low.policies.mesh.expert_stride
            across = shards_inside_experts([each.shape for each in (*own, *at_rest)], replicas=replicas)
            tensors = Tensors(own, replicas, *sizes, at_rest, dimension=int(across), last=_last_reduced(names))
            result.append(Unit(f"{unit.name}.experts", unit.layers, tensors, experts=True))
        return result

    root = tuple(instance for instance in low.layers if not instance.layer.block)
    own, names = trained(root, of_experts=False)
    frozen = tuple(each for instance in root for each in instance.layer.frozen_parameters if not divided(each))
    result = with_experts(Unit("root", root, Tensors(own, ranks, *sizes, frozen, last=_last_reduced(names))))
    repeated: dict[int, Tensors] = {}
    for instance in low.layers:
        layer = instance.layer
        if layer.block and (layer.parameters or layer.frozen_parameters):
            if id(layer) not in repeated:
                dense, names = trained([instance], of_experts=False)
                weights = quantized_weights(layer, precision)
                few_bits = tuple(stored(each, precision) for each in weights if precision)
                elsewhere = [*weights, *filter(divided, layer.frozen_parameters)]
                frozen = tuple(each for each in layer.frozen_parameters if not any(each is one for one in elsewhere))
                last = _last_reduced(names)
                repeated[id(layer)] = Tensors(dense, ranks, *sizes, frozen, few_bits, last=last)
            result += with_experts(Unit(instance.module, (instance,), repeated[id(layer)]))
    return tuple(result)


def _last_reduced(names: Sequence[str]) -> int:
    """Return the index of the parameter that FSDP2 reduces last, of parameters in the model's order (-1 without any).

    See [Note: last gradient].

    >>> _last_reduced(["cls.bias", "cls.dense.weight", "cls.dense.bias"])
    0
    """
    places = [(name.split("."), place) for place, name in enumerate(names)]
    depth = 0
    while places:
        own = [place for path, place in places if len(path) == depth + 1]
        if own:
            return own[-1]
        last_child = places[-1][0][depth]
        places = [each for each in places if each[0][depth] == last_child]
        depth += 1
    return -1


@once_a_run
def owned_rows(low: Lowering, position: int) -> list[int]:
    """Return the elements of each parameter in the shard at a position, in the model's order (also the optimizer's)."""
    own: dict[int, int] = {}
    for unit in units(low):
        elements = unit.tensors.own_elements(position // low.policies.mesh.expert_stride if unit.experts else position)
        own |= zip(map(id, unit.tensors.trained), elements, strict=True)
    return [own[id(parameter)] for _, parameter in low.parameters]


GATHER, REDUCE = "all-gather", "reduce-scatter"
"""Streams on which FSDP2 allocates the buffer of an all-gather, and that of reduced gradients.
(foreach_all_gather, foreach_reduce; everything else is allocated on the compute stream.)"""
TO_HOST_STREAM, TO_DEVICE_STREAM = "to host", "to device"
"""Streams of copies between device and host that do not run on a collective's stream."""
STAGING = 1
"""`Event.number` of a collective's staging copies: tells them apart from its tensors, which may have the same size."""

Places = Mapping[TaskId, Sequence[Task]]
"""Tasks to insert, keyed by the existing task that they are inserted next to."""


def insert_beside(tasks: Sequence[Task], *, before: Places, behind: Places) -> list[Task]:
    """Return `tasks` with those of `before` and `behind` inserted before and after the tasks that they name."""
    merged: list[Task] = []
    for task in tasks:
        merged.extend(before.get(task.id, ()))
        merged.append(task)
        merged.extend(behind.get(task.id, ()))
    return merged


@lru_cache(maxsize=1024)
def _need(*events: Event) -> Footprint:
    """Return the footprint of events, cached for repeated blocks."""
    return footprint(events)


def _exchange(low: Lowering, unit: Unit, kind: str, size_bytes: float) -> Communication:
    """Return a collective of the ranks that share a unit, carried out by the backend or as a ring of messages."""
    carried_as = f"{kind}-v" if low.policies.point_to_point else ""
    if unit.experts:
        return Communication.among(low.expert_replicas, kind, size_bytes, carried_as=carried_as)
    return low.communication(kind, "dp_shard", size_bytes, carried_as=carried_as)


def _staging(low: Lowering, rank: int, communication: Communication, position: float) -> tuple[Event, ...]:
    """Return the staging memory of a running collective, on its own stream, from `position` on."""
    return low.staging(low.device(rank), communication, position, number=STAGING, stream=communication.kind)


# Gradients -----------------------------------------------------------------------------------------------------------


def reduce_scatter_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """FSDP2 after a unit's last gradient: free parameters, copy gradients into one buffer, and reduce-scatter it.

    The buffer of one unit is held until the next unit's backward is done (comm_ctx.reduce_scatter_states). If the
    micro-batch does not send gradients, the parameters are freed all the same (FSDPParamGroup.post_backward). With
    replicas, the reduced shards are then all-reduced; see [Note: replicas]. Gradients that are reduced in another
    precision are kept and added up in that precision between micro-batches (FSDPParam.to_accumulated_grad_if_needed).
    """
    after_block: dict[TaskId, list[Task]] = defaultdict(list)
    at_end: list[Task] = []
    block_ends = pass_ends(tasks, "backward")
    first_trained, without_hook = _first_trained(low), _without_input_gradient(low)
    prefetched = _unused_prefetches(low, first_trained)
    buffered: tuple[Unit, ...] = ()
    """Units whose reduce-scatter buffers are still allocated."""
    # blocks from the last to the first, experts before the rest of their block, and the root; a block without a hook
    # comes after the root, because the callback at the end of the backward processes the root first
    order = sorted(
        units(low),
        key=lambda unit: (unit.layers[0] is without_hook, unit.is_root, -unit.layers[0].index, not unit.experts),
    )
    for unit in order:
        block, is_frozen = unit.layers[0], not unit.tensors.trained
        waits_for_end = unit.is_root or block is without_hook
        if is_frozen and block.index > first_trained and not unit.is_root and not unit.experts:
            new, waits_for_end = [_free(low, unit)], False
        elif block.index < first_trained and not unit.is_root and low.policies.parameters == "sharded":
            # no backward reaches the unit: its parameters were freed after the forward
            gathered_bytes = unit.flat_bytes if unit in prefetched else 0
            released = _need(Event(0, -gathered_bytes, "communication"))
            new, waits_for_end = [Task(_free_id(unit), "backward", need=released)], True
        elif not micro_batch.sends_gradients:
            new = [_free(low, unit)]
            if low.casts_units:
                add = _accumulate(low, rank, unit, micro_batch)
                new = [*new, *add] if micro_batch.first else [*add, *new]
        elif is_frozen:
            new = [_free(low, unit, buffered)]
            # frozen experts have a backward, beside adapters; see [Note: experts]
            waits_for_end = not unit.experts or block.index < first_trained or block is without_hook
            buffered = ()
        else:
            # the experts' buffer outlasts the reduction of their block's dense unit
            kept = buffered if buffered and buffered[-1].experts else ()
            new = _reduce_scatter(low, rank, unit, () if kept else buffered, micro_batch)
            buffered = (*kept, unit)
        if waits_for_end:
            at_end += new
        else:
            after_block[block_ends[block.module]] += new
    return [*insert_beside(tasks, before={}, behind=after_block), *at_end, _callback(low, buffered, micro_batch)]


def _unused_prefetches(low: Lowering, first_trained: int) -> list[Unit]:
    """Return the units below the first trained layer that the backward gathers ahead, though it never reaches them.

    They belong to the block just below, and are as many as the first trained block has units.
    """
    blocks = [unit for unit in units(low) if not unit.is_root]
    below = [unit for unit in blocks if unit.layers[0].index < first_trained]
    gathered = max(1, sum(unit.layers[0].index == first_trained for unit in blocks))
    return [unit for unit in below[-gathered:] if unit.layers[0] is below[-1].layers[0]]


def _free(low: Lowering, unit: Unit, buffered: Sequence[Unit] = ()) -> Task:
    """Return the task that frees a unit's parameters after its backward, without reducing its gradients.

    `buffered`: units whose reduce-scatter buffers are freed as well, once their reductions are done.
    """
    after = tuple(_reduce_id(each) for each in buffered if low.overlaps and each.ranks > 1)
    buffers = [Event(1, -each.scattered_bytes, "communication") for each in buffered]
    return Task(_free_id(unit), "backward", after=after, need=_need(unit.gathered(0, sign=-1), *buffers))


def _free_id(unit: Unit) -> TaskId:
    return TaskId("free", layer=unit.name, during="backward")


def _first_trained(low: Lowering) -> int:
    """Return the index of the first layer with a backward: the first trained layer, or, in a pipeline stage that sends
    the gradient of its input back, layer 0.
    """
    if low.stages and low.stages[0].before is not None:
        return 0
    return next((each.index for each in low.layers if each.layer.parameters), 0)


def _without_input_gradient(low: Lowering) -> LayerInstance | None:
    """Return the block whose input has no gradient because everything before it is frozen; None if there is none.

    FSDP2's hook is on the gradient of a unit's input. This block has none, so the callback at the end of the backward
    handles it, after the root (FSDPState._root_post_backward_final_callback).
    """
    first = next((instance for instance in low.layers if instance.layer.parameters), None)
    if first is None or not first.layer.block or not any(each.layer.frozen_parameters for each in low.layers):
        return None
    return first


def _callback(low: Lowering, buffered: Sequence[Unit], micro_batch: MicroBatch) -> Task:
    """Return the callback at the end of the backward: it waits for the last collectives, and frees all buffers.

    `buffered`: units whose reduce-scatter buffers are still allocated.
    """
    own = TaskId("backward-callback")
    if not buffered or not micro_batch.sends_gradients:
        return Task(own, "backward")
    freed = [Event(0, -each.scattered_bytes, "communication") for each in buffered]
    for unit in units(low) if low.replicates else ():
        if unit.casts_gradients:
            freed.append(Event(0, -unit.reduced_bytes, "communication"))
        else:  # the reduced tensor may be the gradient itself
            freed.append(Event(0, -_added_bytes(low, unit, micro_batch), "gradients", latest=True))
    last, after = buffered[-1], []
    if low.overlaps and last.ranks > 1:
        after.append(_reduce_id(last))
    if low.overlaps and low.replicates:
        after.append(_all_reduce_id(last))
    if low.offload and low.copies_beside and last.tensors.trained:
        after.append(_offload_id(last))
    return Task(own, "backward", after=tuple(after), need=_need(*freed))


def _added_bytes(low: Lowering, unit: Unit, micro_batch: MicroBatch) -> float:
    """Return the bytes of a unit's reduced gradients freed once added to earlier ones or copied to the host."""
    if low.offload:
        return unit.shard_gradient_bytes
    return unit.shard_gradient_bytes if micro_batch.sent_before and not micro_batch.first else 0


def _accumulate(low: Lowering, rank: int, unit: Unit, micro_batch: MicroBatch) -> list[Task]:
    """Return the cast of a unit's whole gradients to the reduction's precision, or their addition to earlier gradients.

    Both work tensor by tensor. On a CPU, an addition of two precisions first casts one tensor to the wider precision:
    either the new gradient, or the sum, which is then cast back.
    """
    device, tensors = low.device(rank), unit.tensors
    value, reduced = tensors.value_bytes, tensors.reduce_bytes
    changes: list[tuple[float, str]] = []
    for size in tensors.gradient_tensors:
        cast = size // value * reduced
        copies = 0.0 if device.kind != "cpu" else cast if reduced > value else 2 * size
        summed = [(cast, "gradients")] if micro_batch.first else [(copies, "temporaries"), (-copies, "temporaries")]
        changes += [*summed, (-size, "gradients")]
    events = [Event(place, size, category) for place, (size, category) in enumerate(changes)]
    moved = (value, reduced) if micro_batch.first else (value, reduced, reduced)
    elements, count = unit.tensors.gradient_bytes // value, len(tensors.trained)
    duration_s = cost.moving_time_s(device, value_bytes=moved, elements=elements, tensors=count)
    return [Task(_reduce_id(unit).serving("accumulate"), "backward", duration_s=duration_s, need=_need(*events))]


def _all_reduce_id(unit: Unit) -> TaskId:
    return TaskId("all-reduce", layer=unit.name)


def _reduce_id(unit: Unit) -> TaskId:
    return TaskId("reduce-scatter", layer=unit.name)


def _reduce_scatter(
    low: Lowering,
    rank: int,
    unit: Unit,
    freed: Sequence[Unit],
    micro_batch: MicroBatch,
    *,
    accumulated: bool = False,
) -> list[Task]:
    """Return the tasks after a unit's complete backward; `freed`: units reduced earlier whose buffers are freed now.

    `accumulated`: whether the micro-batch's gradients have been added to earlier ones already. The shard's summed
    gradients are kept. In later micro-batches they are added to the existing gradient and then freed: at once, or,
    where they are the all-reduced tensor, by the callback at the end of the backward.
    """
    reduce, overlaps = _reduce_id(unit), low.overlaps
    blocks_compute = unit.ranks > 1 and not overlaps
    sums_are_cast = low.casts_units and (accumulated or micro_batch.accumulates)  # sums are kept in that precision
    gradient_tensors, gradient_bytes = unit.tensors.gradient_tensors, float(unit.tensors.gradient_bytes)
    if sums_are_cast:
        gradient_tensors = tuple(
            size // unit.tensors.value_bytes * unit.tensors.reduce_bytes for size in gradient_tensors
        )
        gradient_bytes = sum(gradient_tensors)
    own_bytes = unit.ranks * unit.tensors.trained_elements * unit.tensors.value_bytes
    copied_bytes = (own_bytes + unit.scattered_bytes) / 2 + (gradient_bytes if unit.tensors.dimension else 0)
    last_bytes, beside_copy = gradient_tensors[unit.tensors.last] if unit.ranks > 1 else 0.0, 0.0
    if unit.tensors.dimension:  # gradients are copied first; the last one stays beside its copy
        beside_copy = last_bytes
    elif unit.ranks > 1:
        gradient_tensors = tuple(size for place, size in enumerate(gradient_tensors) if place != unit.tensors.last)
        gradient_bytes -= last_bytes
    # copies that a CPU makes first, all of them; a CUDA kernel pads on the fly (torch 2.13,
    # aten/src/ATen/native/TensorShape.cpp, _chunk_cat and _pad_chunk). A CPU's cat also casts by way of a tensor in the
    # gradients' precision, as large as the one that it casts
    copied_first_bytes = unit.tensors.uneven_bytes if low.device(rank).kind == "cpu" else 0
    if low.device(rank).kind == "cpu" and low.casts_units and not sums_are_cast:
        copied_first_bytes += unit.tensors.largest_bytes
    stays = low.replicates and not unit.casts_gradients
    added = Event(7, 0 if stays else -_added_bytes(low, unit, micro_batch), "gradients", latest=True)
    whole = Event(8, -last_bytes, "gradients", (last_bytes,) if last_bytes else ())
    last = Event(8, -last_bytes, "temporaries") if beside_copy else whole
    released = [] if unit.casts_gradients else [added, last]
    copy_in = Task(
        reduce.serving("copy-in"),
        "backward",
        **_unit_overhead(low, rank, phase="b", tensors=len(unit.tensors.trained), copied_bytes=copied_bytes),
        after=tuple(_reduce_id(each) for each in freed if overlaps and each.ranks > 1),
        need=_need(
            unit.gathered(0, sign=-1),
            Event(0, beside_copy, "temporaries"),
            *(Event(1, -each.scattered_bytes, "communication") for each in freed),
            Event(2, unit.scattered_bytes, "communication"),
            Event(3, copied_first_bytes, "temporaries"),
            Event(4, -copied_first_bytes, "temporaries"),
            Event(5, -gradient_bytes, "gradients", gradient_tensors),
            Event(6, unit.reduced_bytes, "communication" if unit.casts_gradients else "gradients", stream=REDUCE),
            *([] if blocks_compute else released),
        ),
    )
    tasks = [*(_accumulate(low, rank, unit, micro_batch) if sums_are_cast and not accumulated else []), copy_in]
    if unit.ranks > 1:
        exchange = _exchange(low, unit, "reduce-scatter", unit.scattered_bytes)
        if overlaps:
            tasks.append(collective_task(reduce, exchange, "communication", after=(copy_in.id,)))
        else:
            need = _need(*_staging(low, rank, exchange, 0), *released)
            tasks.append(collective_task(reduce, exchange, need=need))
    if low.replicates:
        exchange = low.communication("all-reduce", "dp_replicate", unit.reduced_bytes)
        stream, after = ("replication", (tasks[-1].id,)) if overlaps else ("compute", ())
        tasks.append(collective_task(_all_reduce_id(unit), exchange, stream, after=after))
    tasks += _cast(low, rank, unit, added, last)
    if low.offload:
        tasks += _offload_gradients(low, rank, unit, tasks[-1], micro_batch)
    return tasks


def _offload_id(unit: Unit) -> TaskId:
    return TaskId(COPY_TO_HOST, layer=unit.name)


def _offload_gradients(low: Lowering, rank: int, unit: Unit, reduced: Task, micro_batch: MicroBatch) -> list[Task]:
    """Return the copy of a unit's reduced gradients to the host, after the task that ends their reduction.

    If the host adds the gradients to earlier ones, it waits for the copy; see [Note: offload] in `offload`.
    """
    own, elements = _offload_id(unit), unit.tensors.trained_elements
    cast_bytes = elements * low.master_bytes if unit.tensors.master_bytes != low.master_bytes else 0
    need = _need(Event(0, cast_bytes, "temporaries"), Event(1, -cast_bytes, "temporaries"))
    stream = "compute"
    if low.copies_beside:
        stream = TO_HOST_STREAM if reduced.stream == "compute" else reduced.stream
    tasks = [Task(own.serving("issue"), "backward", need=need)] if cast_bytes else []
    tasks.append(copy(low, own, float(elements * low.master_bytes), stream=stream, after=(reduced.id,)))
    if micro_batch.sent_before and not micro_batch.first:
        values, count = (low.master_bytes,) * 3, len(unit.tensors.trained)
        host = updating_device(low, rank)
        added_s = cost.moving_time_s(host, value_bytes=values, elements=elements, tensors=count)
        tasks.append(Task(own.serving("wait"), "backward", duration_s=added_s, after=(own,)))
    return tasks


def _cast(low: Lowering, rank: int, unit: Unit, *released: Event) -> list[Task]:
    """Return the cast of reduced gradients to the precision of the shard (foreach_reduce), if the two differ.

    Where collectives overlap, the cast runs after the collective and beside the compute. Its memory is allocated, and
    that of the reduced gradients freed, when the host issues both. `released`: what is freed afterwards: the result,
    once it is added to the existing gradient, and the last whole gradient.
    """
    if not unit.casts_gradients:
        return []
    freed = [] if low.replicates else [Event(1, -unit.reduced_bytes, "communication")]
    need = _need(Event(0, unit.shard_gradient_bytes, "gradients", stream=REDUCE), *freed, *released)
    sizes = (unit.tensors.reduce_bytes, unit.tensors.master_bytes)
    elements = unit.tensors.trained_elements
    duration_s = cost.moving_time_s(low.device(rank), value_bytes=sizes, elements=elements, tensors=1)
    cast, issue = _reduce_id(unit).serving("cast"), _reduce_id(unit).serving("issue-cast")
    if not low.overlaps:
        return [Task(cast, "backward", duration_s=duration_s, need=need)]
    stream = "replication" if low.replicates else "communication"
    return [Task(issue, "backward", need=need), Task(cast, "backward", stream, duration_s=duration_s)]


# Stages --------------------------------------------------------------------------------------------------------------


class Gathered(NamedTuple):
    """Units of a stage that are gathered already when a micro-batch runs; see [Note: stages]."""

    root: bool = False
    before_forward: bool = False
    """Whether the blocks are gathered when the forward begins."""
    before_backward: bool = False
    """Whether the blocks are gathered when the backward begins."""

    def includes(self, unit: Unit) -> bool:
        """Return whether a unit is gathered when the forward begins."""
        return self.root if unit.is_root else self.before_forward


NOTHING_GATHERED = Gathered()


def run_stage(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch, gathered: Gathered) -> list[Task]:
    """Return forward and backward of a stage with the gathers that its units need; gradients stay whole."""
    behind: dict[TaskId, list[Task]] = defaultdict(list)
    ends = pass_ends(tasks, "backward")
    end: list[Task] = []
    for unit in units(low) if low.casts_units else ():
        added = _accumulate(low, rank, unit, micro_batch)
        if unit.is_root:
            end = added
        else:
            behind[ends[unit.layers[0].module]][:0] = added  # of a block with divided experts, theirs come first
    tasks = [*insert_beside(tasks, before={}, behind=behind), *end]
    before, after = _gather_forward(low, rank, tasks, gathered)
    if not gathered.before_backward:
        before = {**before, **_gather_backward(low, rank)}
    after = _free_after_forward(low, tasks, after) if low.policies.parameters == "sharded" else after
    return insert_beside(_with_forward_begin(low, tasks), before=before, behind=after)


def unshard_stage(low: Lowering, rank: int, phase: str, gathered: Gathered) -> tuple[list[Task], list[Task]]:
    """Return the gathers of a stage's units ahead of its use, and the copies out of their buffers.

    Interleaved schedules gather all units of the next stages in this way (torch's _add_unshard_reshard). The flat
    buffers of all these units are held until they are copied out.
    """
    missing = [unit for unit in units(low) if not gathered.includes(unit)]
    issued = {unit.name: (gather_id(unit.name, phase).serving("issue"),) for unit in missing}
    gathers = [task for unit in missing for task in _gather(low, rank, unit, phase, issued[unit.name])]
    return gathers, [_copy_out(low, rank, unit, phase, unit.flat_bytes) for unit in missing]


def reshard_stage(low: Lowering, gathered: Gathered, number: int) -> list[Task]:
    """Return the tasks that free a stage's gathered units between two uses; `number`: how often before."""
    return [
        Task(TaskId("free", layer=unit.name, part=number), "forward", need=_need(unit.gathered(0, sign=-1)))
        for unit in units(low)
        if gathered.includes(unit)
    ]


def reduce_stage_gradients(low: Lowering, rank: int) -> list[Task]:
    """Return the tasks after the schedule that free a stage's parameters and reduce its gradients."""
    last = replace(low.micro_batches[-1], sends_gradients=True)
    tasks: list[Task] = []
    buffered: tuple[Unit, ...] = ()
    """Units whose reduce-scatter buffers are still allocated."""
    for unit in units(low):
        if unit.tensors.trained:
            tasks += _reduce_scatter(low, rank, unit, buffered, last, accumulated=True)
            buffered = (unit,)
        elif unit.experts:
            tasks.append(_free(low, unit, buffered))
            buffered = ()
        else:
            tasks.append(_free(low, unit))
    return [*tasks, _callback(low, buffered, last)]


# Parameters ----------------------------------------------------------------------------------------------------------


def keep_parameters(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """Return the tasks unchanged: every rank holds all parameters."""
    return tasks


def gather_parameters(low: Lowering, rank: int, tasks: list[Task], *, twice: bool) -> list[Task]:
    """FSDP2: each unit is gathered before its first forward, and kept (reshard_after_forward=False); or, if `twice`,
    each block is freed after its forward and gathered again (the default).
    """
    before, behind = _gather_forward(low, rank, tasks)
    if twice:
        before = {**before, **_gather_backward(low, rank)}
        behind = _free_after_forward(low, tasks, behind)
    return insert_beside(_with_forward_begin(low, tasks), before=before, behind=behind)


def _free_after_forward(
    low: Lowering, tasks: Sequence[Task], behind: dict[TaskId, list[Task]]
) -> dict[TaskId, list[Task]]:
    """Return the tasks that follow each forward, preceded by the release of each block's parameters."""
    ends = pass_ends(tasks, "forward")
    freed: dict[TaskId, list[Task]] = defaultdict(list)
    for unit in units(low):
        if not unit.is_root:
            own = Task(TaskId("free", layer=unit.name), "forward", need=_need(unit.gathered(0, sign=-1)))
            freed[ends[unit.layers[0].module]].append(own)
    return {**behind, **{end: [*tasks, *behind.get(end, ())] for end, tasks in freed.items()}}


FORWARD_BEGIN = TaskId("forward-begin")


def _with_forward_begin(low: Lowering, tasks: Sequence[Task]) -> list[Task]:
    """Return tasks with a marker of the step's beginning, where other streams must wait for it."""
    return [Task(FORWARD_BEGIN, "forward"), *tasks] if low.overlaps else list(tasks)


def gather_id(unit: str, phase: str) -> TaskId:
    """Return the identity of a unit's all-gather for its forward or its backward."""
    return TaskId("all-gather", layer=unit, during="backward" if phase == "backward" else "")


def _gather(low: Lowering, rank: int, unit: Unit, phase: str, after: tuple[TaskId, ...]) -> list[Task]:
    """Return the gather of a unit into a flat buffer, which stays allocated; `after`: dependencies on nccl.

    A shard of another precision is first cast into a copy that is held until the gather is done (on nccl: until it is
    issued). A shard in host memory is first copied to the device.
    """
    own = gather_id(unit.name, phase)
    fetched = _fetch_id(unit, phase)
    if unit.ranks == 1:
        if low.offload != "parameters":
            return []
        begin = Task(fetched.serving("issue"), phase, need=_need(Event(0, unit.tensors.shard_bytes, "communication")))
        stream = TO_DEVICE_STREAM if low.copies_beside else "compute"
        return [begin, copy(low, fetched, float(unit.tensors.shard_bytes), stream=stream, after=(begin.id,))]
    exchange = _exchange(low, unit, "all-gather", unit.tensors.padded_bytes)
    copy_bytes = unit.chunk_bytes if unit.casts else 0
    flat = [Event(0, copy_bytes, "communication", stream=GATHER)]
    if low.offload == "parameters":
        flat, copy_bytes = _fetched_tensors(unit), unit.chunk_bytes
    flat.append(Event(flat[-1].position + 1, unit.flat_bytes, "communication", stream=GATHER))
    end = flat[-1].position + 1
    fetch: list[Task] = []
    if low.offload == "parameters":
        stream = TO_DEVICE_STREAM if low.copies_beside else "compute"
        fetch = [
            copy(low, fetched, float(unit.tensors.shard_bytes), stream=stream, after=after if low.overlaps else ())
        ]
        after = (*after, fetched) if low.copies_beside else after
    casts: list[Task] = []
    if unit.casts:
        cast_s = cost.master_copy_time_s(
            low.device(rank), low.scenario.workload, elements=sum(unit.tensors.shard_elements), tensors=1, casts=1
        )
        stream, follows = ("communication", after) if low.overlaps else ("compute", ())
        casts = [Task(own.serving("cast"), phase, stream, duration_s=cast_s, after=follows)]
    if low.overlaps:
        issued = _need(*flat, Event(end, -copy_bytes, "communication"))
        gather = collective_task(own, exchange, "communication", after=after)
        return [Task(own.serving("issue"), phase, need=issued), *fetch, *casts, gather]
    need = _need(*flat, *_staging(low, rank, exchange, end), Event(end + 1, -copy_bytes, "communication"))
    return [*fetch, *casts, collective_task(own, exchange, need=need)]


def _fetch_id(unit: Unit, phase: str) -> TaskId:
    return TaskId(COPY_TO_DEVICE, layer=unit.name, during="backward" if phase == "backward" else "")


def _unit_overhead(low: Lowering, rank: int, *, phase: str, tensors: int, copied_bytes: float) -> dict[str, Any]:
    """Return the duration of FSDP2's own work for a unit (host time and copies), as fields of a task."""
    device = low.device(rank)
    copy_s = cost.sharded_unit_copy_s(device, copied_bytes)
    host_s = cost.unit_host_s(device.sharded_unit, phase=phase, tensors=tensors)
    return beside_host(low, low.device(rank), device_s=copy_s, host_s=host_s)


def _fetched_tensors(unit: Unit) -> list[Event]:
    """Return the allocations of a unit's shards on the device, and of their casts, parameter by parameter."""
    events = []
    for elements in unit.tensors.shard_elements:
        whole, cast_bytes = elements * unit.tensors.master_bytes, elements * unit.tensors.value_bytes
        changes = (whole, cast_bytes, -whole) if unit.casts else (whole,)
        events += [(size, "communication") for size in changes]
    events += [(size, "communication") for size in unit.tensors.quantized_shards]  # gathered without a cast
    return [Event(place, size, category, stream=GATHER) for place, (size, category) in enumerate(events)]


def _copy_out(low: Lowering, rank: int, unit: Unit, phase: str, freed_bytes: int) -> Task:
    """Return the copy of a unit's parameters out of its flat buffer; then `freed_bytes` of flat buffers are freed."""
    gather = gather_id(unit.name, phase)
    # a single rank copies parameters of another precision one by one; its peak includes the cast of the last one
    cast_bytes = unit.tensors.shard_elements[-1] * unit.tensors.value_bytes if unit.ranks == 1 and unit.casts else 0
    after = (gather,) if low.overlaps and unit.ranks > 1 else ()
    again_bytes = unit.tensors.padded_bytes if unit.tensors.dimension else 0
    if unit.ranks == 1 and low.offload == "parameters":
        after, freed_bytes = (_fetch_id(unit, phase),), freed_bytes + unit.tensors.shard_bytes
    return Task(
        gather.serving("copy-out"),
        phase,
        **_unit_overhead(
            low,
            rank,
            phase="f",
            tensors=len(unit.tensors.padded_tensors),
            copied_bytes=unit.tensors.padded_bytes + again_bytes,
        ),
        after=after,
        need=_need(
            unit.gathered(0, sign=1),
            Event(0, cast_bytes + again_bytes, "communication"),
            Event(1, -cast_bytes - again_bytes, "communication"),
            Event(2, -freed_bytes, "communication"),
        ),
    )


def _gather_forward(
    low: Lowering, rank: int, tasks: Sequence[Task], gathered: Gathered = NOTHING_GATHERED
) -> tuple[dict[TaskId, list[Task]], dict[TaskId, list[Task]]]:
    """Return two mappings: each unit's gather, keyed by the forward it precedes, and the tasks that follow each
    forward.

    A flat buffer is held until the next unit's copy-out is done, or until the forward ends. (comm_ctx.all_gather_state:
    wait_for_unshard drops it before that copy, but its own variable prev_all_gather_state lives on.)
    """
    before: dict[TaskId, list[Task]] = defaultdict(list)
    all_units = [unit for unit in units(low) if not gathered.includes(unit)]
    if not all_units:
        return before, {}
    flat_bytes = 0
    for number, unit in enumerate(all_units):
        after = (gather_id(all_units[number - 2].name, "forward").serving("copy-out"),) if number > 1 else ()
        copy = _copy_out(low, rank, unit, "forward", flat_bytes)
        first = low.layers[0] if unit.is_root else unit.layers[0]
        start = () if number else (FORWARD_BEGIN,)
        before[forward_id(first)] += [*_gather(low, rank, unit, "forward", after or start), copy]
        flat_bytes = unit.flat_bytes
    end = Task(TaskId("forward-end"), "forward", need=_need(Event(0, -flat_bytes, "communication")))
    if low.stages and low.stages[0].after is not None:  # the stage's last layer is not the loss
        return before, {pass_ends(tasks, "forward")[low.layers[-1].module]: [end]}
    before[forward_id(low.layers[-1])].append(end)
    return before, {}


def _gather_backward(low: Lowering, rank: int) -> dict[TaskId, list[Task]]:
    """Return each block's second gather, keyed by the backward that it precedes; see [Note: order].

    A checkpointed block is recomputed inside its backward, beneath FSDP2's hooks: nothing is gathered for that.
    """
    before: dict[TaskId, list[Task]] = defaultdict(list)
    inner = [unit for unit in units(low) if not unit.is_root]
    blocks = [tuple(block) for _, block in groupby(inner, lambda unit: unit.layers[0].index)]
    if not blocks:
        return before
    blocks.reverse()
    first_trained = _first_trained(low)
    used = [block for block in blocks if block[0].layers[0].index >= first_trained]
    prefetched_unused = blocks[len(used) :][:1]  # its gather is prefetched too, though no backward reaches it

    # the gather of the last block's last unit is issued first, by the hook on the logits or on a stage's output
    last_block, last_unit = blocks[0], blocks[0][-1]
    copied = (gather_id(last_unit.name, "forward").serving("copy-out"),)
    if low.stages:  # the previous forward may be another micro-batch's; a unit of a single rank needs no gather
        shared = next((unit for block in blocks for unit in reversed(block) if unit.ranks > 1), last_unit)
        copied = (gather_id(shared.name, "backward").serving("issue"),)
    has_loss = not low.stages or low.stages[0].after is None
    issuer = low.layers[-2] if units(low)[0].is_root and has_loss else last_block[0].layers[0]
    before[backward_begin(low, issuer)] += _gather(low, rank, last_unit, "backward", copied)
    issued = {last_unit.name}

    for block, following in zip(used, [*used[1:], *prefetched_unused, ()], strict=False):
        new = before[backward_begin(low, block[0].layers[0])]
        for unit in block:
            if unit.name not in issued:
                new += _gather(low, rank, unit, "backward", copied)
            copy_out = _copy_out(low, rank, unit, "backward", unit.flat_bytes)
            new.append(copy_out)
        # only the second copy-out of a block with divided experts is followed by the gathers of both units
        for unit in reversed(following if len(block) > 1 else following[-1:]):
            new += _gather(low, rank, unit, "backward", (copy_out.id,))
            issued.add(unit.name)
    return before
