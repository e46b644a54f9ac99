"""Tensor parallelism: collectives over the ranks of a tensor group, placed where sliced blocks sum, and their host
time.

Blocks all-reduce, or where the ranks divide sequences (`plan.sequence_parallel`) all-gather and reduce-scatter; the
gradients of what runs on parts of sequences are then summed after the backward, all in one tensor, as Megatron-LM does.
Where inputs are gathered again (`plan.gathered_inputs`), the second gather runs beside the backward of the map.
The host's time for each gather and reduce-scatter is assumed to be that of an all-reduce.

torch's functional all-reduce copies its input and sums the copies (the copy is traced as the layer's own buffer); the
rank waits for the sum at once, as the next operation needs it. On nccl, too, it is the compute stream that waits. The
host's overhead over a plain call of the collective counts before each sum, and DTensor's own in each layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gssim import cost
from gssim.collectives import Communication
from gssim.memory import Event, footprint, last_saved
from gssim.program.experts import OPERATIONS as EXPERT_OPERATIONS
from gssim.program.experts import expert_exchange
from gssim.program.lowering import Lowering, layer_groups
from gssim.program.ring import RING_OPERATIONS, attention_ratio, ring_attention
from gssim.program.task import PASSES, Operation, Task, TaskId, collective_task
from gssim.scenario import Scenario
from gssim.workload import Layer, LayerInstance, Reduction
from gssim.workload.layer import EXPERT_EXCHANGES, GATHER_AGAIN


def reductions_in(layer: Layer, phase: str) -> list[Reduction]:
    """Return the sums over ranks in a phase; a recomputation stops once all saved tensors are there."""
    traced = "f" if phase == "r" else phase
    stop = last_saved(layer) if phase == "r" else None
    reductions = [reduction for reduction in layer.reductions if reduction.moment.phase == traced]
    return [reduction for reduction in reductions if stop is None or reduction.moment.position <= stop]


def sum_positions(layer: Layer, phase: str) -> tuple[int, ...]:
    """Return the positions of sums over ranks, after which a layer's phase is split."""
    return tuple(reduction.moment.position for reduction in reductions_in(layer, phase))


def with_all_reduces(
    low: Lowering,
    rank: int,
    instance: LayerInstance,
    phase: str,
    parts: Sequence[Task],
    ends: Sequence[int],
    samples: int,
) -> list[Task]:
    """Return the parts of a layer's phase with the collectives among them; `ends`: the last position of each part."""
    pending = list(enumerate(reductions_in(instance.layer, phase)))
    if not pending:
        return list(parts)
    device = low.device(rank)
    parts, in_ring_s = _without_ring(low, instance, phase, parts, samples)
    tasks: list[Task] = []
    awaited: list[TaskId] = []
    for part, end in zip(parts, ends, strict=True):
        tasks.append(part)
        tasks += [Task(each.serving("await"), "exposed_communication", after=(each,)) for each in awaited]
        awaited = []
        while pending and pending[0][1].moment.position <= end:
            number, reduction = pending.pop(0)
            axis = "cp" if reduction.kind in CONTEXT_EXCHANGES else "tp"
            group, *beside = layer_groups(low, low.batch_sizes[rank], axis)
            every = len(low.group) // (low.policies.cp if axis == "cp" else 1)
            samples_of_group = low.batch_sizes[rank] if len(beside) + 1 < every else None
            if reduction.kind in EXPERT_EXCHANGES:
                tasks.append(expert_exchange(low, rank, instance, reduction, phase, samples))
                continue
            if reduction.kind == "ring":
                tasks += ring_attention(
                    low,
                    rank,
                    instance,
                    phase,
                    samples,
                    reduction=reduction,
                    alone_s=in_ring_s,
                    before=tasks[-1].id,
                    samples_of_group=samples_of_group,
                )
                continue
            # not the part's own number: ranks that hold other slices may cut elsewhere too, where buckets are complete
            own = TaskId(
                OPERATIONS[reduction.kind],
                layer=instance.module,
                part=number or None,
                during=PASSES[phase],
                samples=samples_of_group,
            )
            size = _sum_bytes(low, reduction, samples)
            if reduction.kind == GATHER_AGAIN:
                exchange = Communication("all-gather", group, size, beside=tuple(beside))
                tasks.append(collective_task(own, exchange, "gather", after=(tasks[-1].id,)))
                awaited.append(own)
                continue
            if device.kind == "cpu" and axis == "tp" and (host_s := cost.cut_sum_time_s(device, sum_bytes=size)):
                tasks.append(Task(own.serving("issue"), "exposed_communication", duration_s=host_s))
            exchange = Communication(reduction.kind, group, size, beside=tuple(beside))
            tasks.append(collective_task(own, exchange, need=footprint(low.staging(device, exchange))))
    assert not awaited, "a map's backward follows the gather of its input"
    return tasks


def _without_ring(
    low: Lowering, instance: LayerInstance, phase: str, parts: Sequence[Task], samples: int
) -> tuple[Sequence[Task], float]:
    """Return the parts of a layer's pass without the time of an attention in a ring, and that time."""
    ring = next((each for each in reductions_in(instance.layer, phase) if each.kind == "ring"), None)
    if ring is None:
        return parts, 0.0
    ratio = attention_ratio(low, instance, phase, ring, samples)
    whole_s = sum(part.duration_s for part in parts)
    return [replace(part, duration_s=(1 - ratio) * part.duration_s) for part in parts], ratio * whole_s


OPERATIONS: Mapping[str, Operation] = {
    "all-reduce": "all-reduce",
    "all-gather": "gather-sequence",
    "reduce-scatter": "scatter-sequence",
    "all-to-all": "exchange-heads",
    GATHER_AGAIN: "gather-sequence",
}
"""By kind of collective."""
CONTEXT_EXCHANGES = ("all-to-all", "ring")
"""Kinds of the collectives of context parallelism; all others of layers are over tensor-parallel ranks."""
CONTEXT_OPERATIONS = frozenset(["exchange-heads", *RING_OPERATIONS])
"""Operations of these."""
SLICE_COLLECTIVES = frozenset([*OPERATIONS.values(), *EXPERT_OPERATIONS.values(), *RING_OPERATIONS])


def sum_partial_gradients(low: Lowering, rank: int) -> list[Task]:
    """Return the all-reduce over a tensor group of gradients of which each rank has a part.

    Such are those of norms that each rank runs on its part of the sequence, or on its own heads. They are copied into
    one tensor, and back; of parameters that are sharded, or whose gradients are pushed, a rank has those of its shards,
    as sums may be taken in any order. Megatron-LM's
    distributed optimizer sums those in its buffer after they are reduce-scattered, whole ones, of which a rank uses its
    part (core/distributed/finalize_model_grads.py).
    """
    elements = low.summed_elements[low.position(rank)] if low.policies.tp > 1 else 0
    if not elements:
        return []
    of_shards = low.policies.gradients in ("reduce-scatter", "push")
    size = float(elements * (low.master_bytes if of_shards else low.buffer_value_bytes))
    samples = low.batch_sizes[rank]
    own = TaskId("sum-gradients", samples=samples if len(layer_groups(low, samples, "tp")) < len(low.group) else None)
    alike = [
        other
        for other in low.group
        if low.batch_sizes[other] == samples and low.summed_elements[low.position(other)] == elements
    ]
    if len(set(low.summed_elements)) > 1:  # owners of shards sum what they own
        own = own._replace(place=low.position(alike[0]))
    group, *beside = dict.fromkeys(low.policies.mesh.group(other, "tp") for other in alike)
    copy_s = cost.copy_time_s(low.device(rank), size)
    need = [footprint([Event(0, change, "temporaries")]) for change in (size, -size)]
    phase = "exposed_communication"
    return [
        Task(own.serving("copy-in"), phase, duration_s=copy_s, need=need[0]),
        collective_task(own, Communication("all-reduce", group, size, beside=tuple(beside))),
        Task(own.serving("copy-out"), phase, duration_s=copy_s, need=need[1]),
    ]


def sum_over_slices(low: Lowering, rank: int, own: TaskId, size_bytes: float) -> Task:
    """Return an all-reduce over the ranks that hold the slices of the same blocks."""
    group, *beside = layer_groups(low, low.batch_sizes[rank], "tp")
    if len(beside) + 1 < len(low.group):
        own = own._replace(samples=low.batch_sizes[rank])
    return collective_task(own, Communication("all-reduce", group, size_bytes, beside=tuple(beside)))


def _sum_bytes(low: Lowering, reduction: Reduction, samples: int) -> float:
    shape = {"b": samples, "s": low.scenario.workload.sequence_length or 1}
    return low.traced_scale * reduction.size_bytes.at(**shape)


def with_host_time(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, *, alone_s: float
) -> float:
    """Return the time of a layer's phase that takes `alone_s`, plus the host's overhead where the layer is sliced."""
    layer, device = instance.layer, low.device(rank)
    host_s = slicing_host_s(low, rank, instance, phase, samples)
    operations = layer.backward_operations if phase == "b" else layer.forward_operations
    return cost.with_host_time_s(device, alone_s, host_s=host_s, operations=operations)


def slicing_host_s(low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int) -> float:
    """Return the host's overhead in a layer's phase where the layer is sliced; else 0.

    That is DTensor's own time for each pair of sliced maps, of which each has one sum in the forward. A GPU waits for
    sums while the host issues the next operations, so that the host's time for the sums counts here too; on a CPU it is
    a task of its own before each sum.
    """
    layer, device = instance.layer, low.device(rank)
    # those of context parallelism and of experts are plain calls of the backend
    if not layer.reductions or low.policies.tp == 1 or low.policies.ep > 1:
        return 0.0
    host_s = 0.0
    if layer.linear and low.policies.cuts_natively:  # DTensor
        # a pair of maps ends in one all-reduce, or one reduce-scatter, in the forward
        pairs = sum(each.moment.phase == "f" and each.kind != "all-gather" for each in layer.reductions)
        size = _sum_bytes(low, layer.reductions[0], samples)
        host_s += cost.cut_pairs_time_s(device, phase=phase, pairs=pairs, sum_bytes=size)
    if device.kind != "cpu":
        sums = (each for each in reductions_in(layer, phase) if each.kind not in CONTEXT_EXCHANGES)
        sizes = [_sum_bytes(low, each, samples) for each in sums]
        host_s += sum(cost.cut_sum_time_s(device, sum_bytes=size) for size in sizes)
    return host_s


def unmeasured_host_time(scenario: Scenario) -> tuple[str, ...]:
    """Return the parts of a plan's host time that are not measured and count as 0, each with its reason."""
    if scenario.policies.tp == 1:
        return ()
    kinds = dict.fromkeys(scenario.cluster.devices[rank].type for rank in range(scenario.ranks))
    missing = [name for name in kinds if scenario.cluster.device_types[name].cut_block is None]
    messages = [f"host time in cut blocks: device_types.{name}.cut_block is not measured" for name in missing]
    model = scenario.workload.model
    layers = model.sequence_layers if scenario.policies.sequence_parallel else model.sliced_layers
    blocks = [layer for layer in layers if layer.units]
    if scenario.policies.cuts_natively and any(layer.linear is None for layer in blocks):
        messages.append("DTensor's host time: the model file does not tell whether it cuts the blocks (`gsreal trace`)")
    return tuple(messages)
