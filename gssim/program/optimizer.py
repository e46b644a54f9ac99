"""The optimizer's update of a rank's shard, the publication of updated parameters, and a rank's persistent memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gssim import cost
from gssim.collectives import Communication
from gssim.memory import Event, footprint, input_bytes, replaced_bytes
from gssim.program.clipping import clip_gradients, divides_master_gradients, unscale_gradients
from gssim.program.compressed import compressor_tensors
from gssim.program.compute import forward_id
from gssim.program.lowering import Lowering, once_a_run, once_a_step
from gssim.program.messages import threshold_memory
from gssim.program.offload import copy_buffer_bytes, host_bytes, offloaded_update, updating_device
from gssim.program.parameter_gathers import gather_before_reads
from gssim.program.periodic import outer_memory, outer_tensors, synchronize_parameters, unsent_tensors
from gssim.program.publish import publish
from gssim.program.sharded import insert_beside, owned_rows, units
from gssim.program.task import Bucket, Issue, Task, TaskId, collective_task
from gssim.program.tensor_slices import sum_partial_gradients
from gssim.scenario.tensor_slices import native_parameters, native_tensors
from gssim.workload import implementation_on, optimizer_state_bytes
from gssim.workload.optimizers import (
    COUNTS_STEPS,
    Matrix,
    largest_temporaries,
    optimizer_temporary_bytes,
    state_tensor_bytes,
)
from gssim.workload.quantized import frozen_bytes

Tensors = dict[str, tuple[float, ...]]
"""Bytes of tensors, by category."""
CUBLASLT_WORKSPACE_BYTES = 2**20
"""Size of the workspace that torch gives cuBLASLt by default (CUBLASLT_WORKSPACE_SIZE), and keeps."""


def persistent_tensors(low: Lowering, rank: int, held: Mapping[str, float]) -> Tensors:
    """Return the bytes of each persistent tensor of a rank, by category, in the order of allocation.

    `held`: bytes by category. A category whose tensors are not known counts as one tensor. Adam's step counters are on
    the host unless it is fused.
    """
    owned = owned_tensors(low, rank)
    workload = low.scenario.workload
    own = len(low.matrices(rank))  # Muon's matrices come first; AdamW updates the rest
    counters = (
        len(owned) - own if workload.optimizer in (*COUNTS_STEPS, "muon") and not has_quantized_moments(low) else 0
    )
    fused = implementation_on(low.device(rank).kind, workload.optimizer_implementation) == "fused"
    on_device = [4.0] * counters if fused else []
    on_host = 0.0 if fused else 4.0 * counters
    sizes_of: dict[str, Callable[[], Sequence[float]]] = {  # evaluated only for categories that the rank holds
        "parameters": lambda: _parameters(low, owned),
        "master_copy": lambda: [elements * low.master_bytes for elements in _master_copy_elements(low, owned)],
        "buckets": lambda: [bucket.elements * low.buffer_value_bytes for bucket in _buffers(low)],
        "outer_parameters": lambda: outer_tensors(low, rank),
        "outer_momentum": lambda: outer_tensors(low, rank),
        "residuals": lambda: [*compressor_tensors(low).get("residuals", ()), *unsent_tensors(low, rank)],
        "low_rank_factors": lambda: compressor_tensors(low)["low_rank_factors"],
        "buffers": lambda: [] if low.stages else workload.model.buffer_sizes(low.value_bytes),
        "workspace": lambda: workspaces(held["workspace"]),
        "optimizer": lambda: [
            *_state_tensors(low, owned[:own], workload.optimizer),
            *_state_tensors(low, owned[own:], "adamw" if workload.optimizer == "muon" else workload.optimizer),
            *on_device,
        ],
    }
    return {
        category: _parts_that_sum_to(
            size - (on_host if category == "optimizer" else 0.0), sizes_of.get(category, tuple)()
        )
        for category, size in held.items()
        if size
    }


def has_quantized_moments(low: Lowering) -> bool:
    """Return whether the optimizer keeps its moments in 8 or 4 bits; its step counters are then on the host."""
    return low.scenario.workload.optimizer_state_precision is not None


def _state_tensors(low: Lowering, owned: Sequence[int], optimizer: str) -> list[float]:
    """Return the bytes of each optimizer-state tensor, without step counters, for tensors of `owned` elements each."""
    precision = low.scenario.workload.optimizer_state_precision
    return [
        size
        for elements in owned
        for size in state_tensor_bytes(optimizer, elements=elements, value_bytes=low.master_bytes, precision=precision)
    ]


def workspaces(size_bytes: float) -> tuple[float, ...]:
    """Return the workspaces that libraries keep in the allocator: cuBLAS's of each of two threads, and cuBLASLt's.

    The workspace of the forward's thread comes first, that of the backward's last. If `size_bytes` is too small for all
    of them, it is one tensor. Source: torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp: one workspace per handle and
    stream.

    >>> [size / 2**20 for size in workspaces(65 * 2**20)]
    [32.0, 1.0, 32.0]
    """
    cublas = (size_bytes - CUBLASLT_WORKSPACE_BYTES) / 2
    return (cublas, float(CUBLASLT_WORKSPACE_BYTES), cublas) if cublas >= CUBLASLT_WORKSPACE_BYTES else (size_bytes,)


def _parameters(low: Lowering, owned: Sequence[int]) -> Sequence[float]:
    """Return the bytes of the tensors that store parameters: the modules' tensors, GS's flat replicas, or shards."""
    pushes = low.policies.gradients == "push"
    if holds_shards(low):
        if pushes:  # what is not trained has no owner
            return [
                *(elements * low.master_bytes for elements in owned),
                *_whole_units(low),
                *_frozen_tensor_bytes(low),
            ]
        return [size for unit in units(low) for size in unit.tensors.shard_tensors]
    if pushes:
        return [*(bucket.elements * low.value_bytes for bucket in low.buckets), *_frozen_tensor_bytes(low)]
    if low.flat_part:
        return [elements * low.value_bytes for elements in _flat_elements(low)] + _frozen_tensor_bytes(low)
    return [*(parameter.elements * low.value_bytes for _, parameter in low.parameters), *_frozen_tensor_bytes(low)]


def _whole_units(low: Lowering) -> list[int]:
    """Return the bytes of each unit of experts that no other rank has: with a master copy, it is held in addition."""
    alone = [bucket for bucket in low.buckets if bucket.of_experts and low.owning(bucket).nodes == 1]
    return [bucket.elements * low.value_bytes for bucket in alone] if low.has_master_copy else []


def _flat_elements(low: Lowering) -> list[int]:
    """Return the elements of the flat buffer of all parameters and, if there are divided experts, of their buffer."""
    parts = [low.flat_part * len(low.group), low.flat_expert_part * len(low.expert_replicas[0])]
    return [elements for elements in parts if elements]


def _buffers(low: Lowering) -> Sequence[Bucket]:
    """Return the buckets that exist all through the run; experts' only if gradients are in a buffer alone."""
    return (*low.buckets, *(low.expert_buckets if low.has_one_gradient_buffer else ()))


def _frozen_tensor_bytes(low: Lowering) -> list[int]:
    """Return the bytes of each tensor that is not trained: of parameters, and of scales of quantized ones."""
    precision = low.scenario.workload.frozen_precision
    return [
        size for instance in low.layers for size in frozen_bytes(instance.layer, precision, value_bytes=low.value_bytes)
    ]


def _parts_that_sum_to(size: float, parts: Sequence[float]) -> tuple[float, ...]:
    """Return tensor sizes that add up to `size`: the given ones as far as they fit, then the remainder as one more.

    >>> _parts_that_sum_to(10.0, [4.0, 4.0]), _parts_that_sum_to(7.0, [4.0, 4.0])
    ((4.0, 4.0, 2.0), (4.0, 3.0))
    """
    filled = []
    left = size
    for part in parts:
        part = min(part, left)
        if part > 0:
            filled.append(float(part))
        left -= part
    return (*filled, float(left)) if left > 0 else tuple(filled)


def optimize(low: Lowering, rank: int, tasks: list[Task], *, replicas: Sequence[Sequence[int]] = ()) -> list[Task]:
    """Append the update of the rank's shard; where replicas have sharded optimizer states, also its publication.

    `replicas`: see `clip_gradients`.
    """
    owned, summed = owned_tensors(low, rank), sum_partial_gradients(low, rank)
    unscaled = unscale_gradients(low, rank, owned, replicas)
    clipped = clip_gradients(low, rank, owned, replicas)
    if low.assigns_tensors and low.policies.ep > 1:  # experts have an optimizer of their own, which runs second
        updates = [
            _update(
                low,
                rank,
                low.owned_elements(rank, of_experts=each),
                low.matrices(rank, of_experts=each),
                1 if each else None,
                ends=each,
            )
            for each in (False, True)
        ]
        published = [_broadcast_tensors(low, each) for each in (False, True)]
        return [*tasks, *summed, *unscaled, *clipped, updates[0], *published[0], updates[1], *published[1]]
    update = _whole_update(low, rank)
    if low.policies.gradients == "push":
        return publish(low, rank, [*tasks, *summed, *unscaled, *clipped], update)
    updated = offloaded_update(low, rank, update, partial(owned_tensors, low))
    if low.policies.publish_overlaps:
        if not low.stages:  # gathers of stages are among the schedule's tasks
            number = low.micro_batches[0].number
            forwards = [forward_id(layer).at(micro_batch=number) for layer in low.layers]
            tasks = insert_beside(tasks, before=gather_before_reads(low, forwards), behind={})
        return [*tasks, *summed, *unscaled, *clipped, *updated]
    tasks = [*tasks, *summed, *unscaled, *clipped, *updated, *_publish_replicas(low)]
    return [*tasks, *synchronize_parameters(low, rank)]


@once_a_run
def _whole_update(low: Lowering, rank: int) -> Task:
    """Return the update of everything that the rank's optimizer updates."""
    return _update(low, rank, owned_tensors(low, rank), low.matrices(rank), None, ends=True)


def _update(
    low: Lowering, rank: int, owned: Sequence[int], matrices: Sequence[Matrix], part: int | None, *, ends: bool
) -> Task:
    """Return an optimizer's update of tensors of `owned` elements each; those that Muon updates (`matrices`) come
    first.

    `ends`: whether the gradients are freed at the end of the update.
    """
    workload, device = low.scenario.workload, updating_device(low, rank)
    elements = sum(owned)
    groups = _groups_updated_together(low, owned)
    temporary = max(
        optimizer_temporary_bytes(
            workload.optimizer,
            implementation=implementation_on(device.kind, workload.optimizer_implementation),
            tensor_elements=group,
            value_bytes=low.master_bytes,
            weight_decay=workload.weight_decay,
            matrices=matrices,
        )
        for group in groups
    )
    cast = float(elements * low.master_bytes) if low.casts_gradients else 0.0
    whole = tuple(float(n * low.master_bytes) for n in owned)
    of_matrix = largest_temporaries(matrices, value_bytes=low.master_bytes)
    of_groups = (tuple(float(n * low.master_bytes) for n in group) for group in groups)
    at_once = (*of_groups, whole[len(matrices) :], of_matrix)  # tensors whose temporaries live at the same time
    each = next((sizes for sizes in at_once if sizes and sum(sizes) == temporary), ())
    events = [Event(0, cast, "temporaries", whole), Event(1, temporary, "temporaries", each)]
    events += [Event(2, -temporary, "temporaries", each), Event(3, -cast, "temporaries", whole)]
    gradients = _gradients_at_end(low, rank) if ends else ()
    events = [] if low.offload else events  # with offload, temporaries are in host memory
    events.append(Event(4, -sum(gradients), "gradients", gradients))
    distributed = native_tensors(workload.model) if low.scenario.cuts_natively else 0  # DTensors
    if low.policies.gradients == "reduce-scatter":
        distributed = len(owned)
    duration_s = cost.optimizer_time_s(
        device, workload, elements=elements, tensors=len(owned), sharded_tensors=distributed, matrices=matrices
    )
    casts = 0 if holds_shards(low) or low.offload else 1 + low.casts_gradients  # shards are cast when gathered
    duration_s += cost.master_copy_time_s(device, workload, elements=elements, tensors=len(owned), casts=casts)
    if low.copies_part and not (low.has_master_copy or low.offload):
        # gradients are copied to the part, and the part to the parameters
        duration_s += 2 * cost.copy_time_s(device, elements * low.master_bytes)
    if low.has_one_gradient_buffer:  # the buffer, on the rank's device, is zeroed before each step: writes only
        zeroed = sum(bucket.elements for bucket in _buffers(low)) * low.buffer_value_bytes
        duration_s += cost.copy_time_s(low.device(rank), zeroed) / 2
    if divides_master_gradients(low):
        # reads and writes
        both_bytes = 2 * low.master_bytes
        duration_s += cost.gradient_pass_s(device, elements=elements, tensors=len(owned), value_bytes=both_bytes)
    if low.policies.ep > 1 and low.policies.gradients == "reduce-scatter":  # see [Note: experts] in `sharded`
        of_experts = sum(unit.shard_gradient_bytes for unit in units(low) if unit.experts)
        duration_s += cost.copy_time_s(device, of_experts)
    issue_s = cost.optimizer_issue_s(device, workload, tensors=len(owned), sharded_tensors=distributed, casts=casts)
    issue = None if issue_s is None else Issue(issue_s, goes_on=True)
    return Task(TaskId("optimizer", part=part), "optimizer", duration_s=duration_s, need=footprint(events), issue=issue)


def _groups_updated_together(low: Lowering, owned: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return the elements of the tensors, grouped as torch's optimizer updates them: one group for each mesh of ranks.

    Where linear maps of blocks are cut natively, their tensors are DTensors on the tensor-parallel mesh, and all others
    are plain tensors. Shards of divided experts are on a mesh of their own (gsreal.methods.optimizers).
    """
    sharded = low.policies.gradients == "reduce-scatter"
    if not (low.scenario.cuts_natively or (sharded and low.policies.ep > 1)) or len(owned) != len(low.parameters):
        return [owned]  # all are of one kind, or a part of a flat buffer is owned
    of_experts = (
        {id(each) for unit in units(low) if unit.experts for each in unit.tensors.parameters} if sharded else set()
    )
    cut = low.scenario.workload.model.sliced_layers if low.scenario.cuts_natively else ()
    native = {(layer.name, parameter.name) for layer in cut for parameter in native_parameters(layer)}
    groups: dict[tuple[bool, bool], list[int]] = {}
    for (instance, parameter), elements in zip(low.parameters, owned, strict=True):
        group = ((instance.layer.name, parameter.name) in native, id(parameter) in of_experts)
        groups.setdefault(group, []).append(elements)
    return list(groups.values())


def holds_shards(low: Lowering) -> bool:
    """Return whether the rank holds only shards of parameters; under push, a group of one rank holds them whole."""
    pushes = low.policies.gradients == "push"
    return low.policies.parameters != "replicated" and (not pushes or len(low.group) > 1)


@once_a_step
def _publish_replicas(low: Lowering) -> Sequence[Task]:
    """Return the tasks that bring updated parameters to all replicas of the rank's part of the model."""
    if low.assigns_tensors:
        return _broadcast_tensors(low, False)
    tasks: list[Task] = []
    if low.flat_part:
        # DeepSpeed's ZeRO-1: each rank's part is all-gathered into the flat buffer, bucket by bucket, one after another
        # (runtime/utils.py, `all_gather_dp_groups`)
        for part, groups in ((low.flat_part, [low.group]), (low.flat_expert_part, low.expert_replicas)):
            ranks = len(groups[0])
            count = max(1, part * ranks // ALL_GATHER_BUCKET_ELEMENTS) if part and ranks > 1 else 0
            size = part // max(1, count) // 2 * 2
            for number in range(count):
                elements = size if number < count - 1 else part - size * (count - 1)
                exchange = Communication.among(groups, "all-gather", ranks * elements * low.value_bytes)
                tasks.append(collective_task(TaskId("all-gather-parameters", part=len(tasks)), exchange))
        return tasks
    if not low.assigns_layers:
        return []
    # each rank's updated layers are all-gathered into the flat replica by one ring
    parts = tuple(float(sum(_elements(low, *layers)) * low.value_bytes) for layers in low.owned_ranges)
    exchange = Communication("all-gather-v", low.group, sum(parts), part_bytes=parts)
    return [collective_task(TaskId("publish"), exchange)]


@once_a_step
def _broadcast_tensors(low: Lowering, of_experts: bool) -> list[Task]:
    """ZeRO-1: every tensor is broadcast by its owner, rank after rank; the step ends when all have arrived.

    ZeroRedundancyOptimizer posts all broadcasts and then waits. The backend starts them in that order, as many
    concurrently as it has threads. `of_experts`: broadcast the tensors of divided experts, which have an optimizer of
    their own, among the ranks that hold the same ones; there is nothing to send where no other rank does.
    """
    groups = low.expert_replicas if of_experts else [low.group]
    if of_experts and len(groups[0]) == 1:
        return []
    by_root, part = (low.owned_experts, 1) if of_experts else (low.owned_parameters, None)
    handed = Task(TaskId("parameters", "hand-over", part=part), "idle")
    tasks: list[Task] = []
    for root, owned in enumerate(by_root):
        for position in owned:
            instance, parameter = low.parameters[position]
            own = TaskId("broadcast-parameters", layer=instance.name_of(parameter))
            exchange = Communication.among(groups, "broadcast", parameter.elements * low.value_bytes, root=root)
            stream = low.communication_stream(len(tasks))
            tasks.append(collective_task(own, exchange, stream, after=(handed.id,)))
    waited = tuple(task.id for task in tasks)
    return [handed, *tasks, Task(TaskId("parameters", "wait", part=part), "exposed_communication", after=waited)]


ALL_GATHER_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `allgather_bucket_size`."""


def _elements(low: Lowering, first: int, last: int) -> list[int]:
    """Return the elements of every parameter of a range of layers."""
    return [parameter.elements for instance in low.layers[first:last] for parameter in instance.layer.parameters]


@once_a_run
def owned_tensors(low: Lowering, rank: int) -> Sequence[int]:
    """Return the elements of every tensor that the rank's optimizer updates; matrices that are Muon's come first."""
    gradients = low.scenario.policies.gradients
    if gradients == "push":
        return [low.owning(bucket).pushed_elements(bucket, rank) for bucket in low.buckets]
    if gradients == "reduce-scatter":
        return owned_rows(low, low.shard_position(rank))
    if low.flat_part and low.scenario.workload.optimizer == "muon":
        groups = ((len(low.group), False), (len(low.expert_replicas[0]), True))
        rest = [low.even_rest(ranks, of_experts=of_experts) for ranks, of_experts in groups]
        return [*(rows * columns for rows, columns in low.matrices(rank)), *filter(None, rest)]
    if low.flat_part:
        return [part for part in (low.flat_part, low.flat_expert_part) if part]
    if low.assigns_tensors:
        places: Sequence[int] = (*low.owned_places(rank), *low.owned_places(rank, of_experts=True))
        if not low.matrices(rank):
            return tuple(low.parameters[place][1].elements for place in places)
    elif low.assigns_layers:
        return _elements(low, *low.owned_ranges[rank])
    else:
        places = range(len(low.parameters))
    return [low.parameters[place][1].elements for place in sorted(places, key=lambda place: not low.matrices_at(place))]


def _master_copy_elements(low: Lowering, owned: Sequence[int]) -> Sequence[int]:
    """Return the elements of the tensors of which a rank keeps a master copy; `owned`: those that it updates.

    If publishing is thresholded, the copies hold what is not published yet: experts of one rank alone need none.
    """
    if low.has_master_copy or not low.thresholds_publish:
        return owned
    return [elements for elements, bucket in zip(owned, low.buckets, strict=True) if low.publishes(bucket)]


def _gradients_at_end(low: Lowering, rank: int) -> tuple[float, ...]:
    """Return the bytes of each gradient that lives until the optimizer's end. DDP's gradients are views of its buckets.

    Gradients of shards are in the optimizer's precision: owners accumulate in it, and FSDP2 casts the reduced gradients
    to it, all of a unit's in one tensor.
    """
    gradients = low.scenario.policies.gradients
    if low.frees_gradients:
        return tuple(filter(None, [low.part_gradient_bytes]))
    if gradients == "all-reduce":
        return (
            ()
            if low.has_one_gradient_buffer
            else tuple(float(bucket.elements * low.value_bytes) for bucket in low.expert_buckets)
        )
    if gradients == "reduce-scatter" and low.offload:
        return ()
    if gradients == "reduce-scatter":
        return tuple(float(unit.shard_gradient_bytes) for unit in units(low) if unit.tensors.trained)
    value_bytes = low.master_bytes if gradients == "push" else low.value_bytes
    return tuple(float(elements * value_bytes) for elements in owned_tensors(low, rank))


def _replaced_bytes(low: Lowering, rank: int) -> float:
    """Return the bytes that a rank's modules keep from one forward to the next outside of torch's buffers."""
    samples, length = low.samples(rank, low.micro_batches[0]), low.scenario.workload.sequence_length or 1
    return sum(
        replaced_bytes(each.layer, batch_size=samples, sequence_length=length, scale=low.traced_scale)
        for each in low.layers_of(rank).layers
    )


@once_a_run
def persistent_bytes(low: Lowering, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank always keeps on its device, and in its host's memory, by category."""
    workload, policies = low.scenario.workload, low.scenario.policies
    owned = owned_tensors(low, rank)
    total = sum(parameter.elements for _, parameter in low.parameters)
    if low.flat_part:
        total = sum(_flat_elements(low))
    at_rest_bytes = sum(_frozen_tensor_bytes(low))
    parameters = float(total * low.value_bytes + at_rest_bytes)
    if holds_shards(low):  # these are the master copy
        pushes = policies.gradients == "push"
        pushed_bytes = sum(owned) * low.master_bytes + sum(_whole_units(low)) + at_rest_bytes
        parameters = pushed_bytes if pushes else sum(sum(unit.tensors.shard_tensors) for unit in units(low))
    buffers: Sequence[int] = workload.model.buffer_sizes(low.value_bytes)
    if low.stages:  # layers that all stages run have one module each
        buffers = [instance.layer.buffer_size(low.value_bytes) for instance in low.layers]
    held = {
        "parameters": parameters,
        "workspace": low.device(rank).workspace_bytes,
        "buffers": sum(buffers) + _replaced_bytes(low, rank),
        "optimizer": sum(_state_tensors(low, owned, workload.optimizer))
        if has_quantized_moments(low)
        else optimizer_state_bytes(
            workload.optimizer,
            elements=sum(owned),
            tensors=len(owned),
            value_bytes=low.master_bytes,
            matrices=low.matrices(rank),
        ),
        "input": input_bytes(
            workload.model,
            batch_size=low.batch_sizes[rank],
            sequence_length=low.scenario.sequence_positions if policies.cp > 1 else workload.sequence_length,
            value_bytes=low.value_bytes,
        ),
    }
    if (low.has_master_copy and not holds_shards(low)) or low.thresholds_publish or low.copies_part:
        held["master_copy"] = float(sum(_master_copy_elements(low, owned)) * low.master_bytes)
    if policies.gradients == "all-reduce" and not low.frees_gradients:
        held["buckets"] = sum(bucket.elements for bucket in _buffers(low)) * low.buffer_value_bytes
    if workload.gradient_precision is not None and not low.has_one_gradient_buffer:
        # in a buffer that lives as long as the run; what they take beyond their size in the training precision
        more_bytes = low.kept_value_bytes - low.value_bytes
        held["gradients"] = float(sum(parameter.elements for _, parameter in low.parameters) * more_bytes)
    if copied_bytes := copy_buffer_bytes(low):
        held["communication"] = copied_bytes
    held |= outer_memory(low, rank)
    held |= {name: sum(sizes) for name, sizes in compressor_tensors(low).items()}
    held |= threshold_memory(low, rank)
    on_host = host_bytes(low, held, owned)
    if low.offload == "parameters" and (scales_bytes := sum(unit.tensors.scales_bytes for unit in units(low))):
        held["parameters"] = float(scales_bytes)
        on_host["parameters"] -= scales_bytes
    return held, on_host
