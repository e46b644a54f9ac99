"""State kept in host memory: copies over device-host links, and the optimizer's update on the host's cores.

[Note: offload] FSDP2's CPUOffloadPolicy (`plan.offload = "parameters"`) keeps the shards of parameters, their gradients
and the optimizer's state in pinned host memory. A shard is copied to the device on the stream of the gather's copy-in,
before it is cast and gathered (FSDPParam.all_gather_inputs). Reduced gradients are copied to the host on the stream of
their reduction; the device's are freed when the host has issued that copy (foreach_reduce). The callback at the end of
the backward waits for all copies (FSDPParamGroup.finalize_backward). Where gradients are added to those of earlier
micro-batches, the host waits for each copy and adds them up itself; meanwhile it issues nothing to the device.

With `"optimizer"`, as DeepSpeed's `offload_optimizer`, parameters stay on the device in the workload's precision.
Copies are in the optimizer's precision. Gradients of replicas are copied once all are complete, those of shards as with
FSDP2; updated parameters are copied back after the update (DeepSpeed, runtime/zero/stage_1_and_2.py,
async_inplace_copy_grad_to_fp32_buffer_from_gpu and step; its stage 3 copies updated parameters in 16 bits).

DeepSpeed's stages 1 and 2 accumulate gradients in host memory, in the workload's precision: after each reduction, but
in the first micro-batch, the rank's part of earlier gradients is copied to the device and added, and all but the last
sums are copied to the host (async_accumulate_grad_in_cpu_via_gpu). Copies are made through a buffer of the size of the
largest parameter, of which there is one on the host too (temp_grad_buffer_for_gpu_offload).

Copies share links with each other and with network messages that take the same links. The ranks of a host share its
memory bandwidth evenly, whether or not they update at the same time.

A CPU device is its own host: nothing is copied, and no state is elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gssim import cost
from gssim.cluster import DeviceType
from gssim.collectives import TO_HOST, Communication
from gssim.collectives.communication import FROM_HOST
from gssim.memory import NOTHING, Event, Footprint, footprint
from gssim.program.lowering import Lowering, once_a_run
from gssim.program.task import Bucket, MicroBatch, Task, TaskId, collective_task

COPY_TO_HOST: Final = "copy-to-host"
COPY_TO_DEVICE: Final = "copy-to-device"


def updating_device(low: Lowering, rank: int) -> DeviceType:
    """Return the device that updates a rank's shard: its own, or its part of the host's cores and memory bandwidth."""
    if low.offload is None:
        return low.device(rank)
    return _part_of_host(low, low.device_type(rank), low.ranks_on_host(rank))


@once_a_run
def _part_of_host(low: Lowering, device_type: str, ranks: int) -> DeviceType:
    device, host = low.scenario.cluster.device_types[device_type], low.scenario.cluster.host
    assert host is not None  # a scenario is checked for it
    bandwidth = host.memory_bandwidth_bytes_per_s / ranks
    return replace(device, kind="cpu", memory_bandwidth_bytes_per_s=bandwidth, optimizers={}, expandable_segments=False)


def gradient_device(low: Lowering, rank: int) -> DeviceType:
    """Return the device that holds a rank's gradients when they are clipped; offloaded ones are on the host by then."""
    return updating_device(low, rank) if low.policies.gradients == "reduce-scatter" else low.device(rank)


def copy(
    low: Lowering,
    own: TaskId,
    size_bytes: float,
    *,
    ranks: Sequence[int] | None = None,
    stream: str = "compute",
    after: tuple[TaskId, ...] = (),
    need: Footprint = NOTHING,
) -> Task:
    """Return a rank's copy between its device and its host. `ranks` (default: the group) each copy as many bytes.

    The direction follows from the operation of `own`.
    """
    alone = [(rank,) for rank in (low.group if ranks is None else ranks)]
    exchange = Communication.among(alone, TO_HOST if own.op == COPY_TO_HOST else FROM_HOST, size_bytes)
    return collective_task(own, exchange, stream, after=after, need=need)


def offloaded_update(low: Lowering, rank: int, update: Task, owned_of: Callable[[int], Sequence[int]]) -> list[Task]:
    """Return the update of an offloaded optimizer between the copies of its gradients and of updated parameters.

    `owned_of`: elements of every tensor that a rank updates. Gradients of shards are on the host already.
    """
    if low.offload != "optimizer":
        return [update]
    sums = {each: sum(owned_of(each)) for each in low.group}
    sizes = sorted(set(sums.values()))
    part = sizes.index(sums[rank]) if len(sizes) > 1 else None
    equal = [each for each in low.group if sums[each] == sums[rank]]
    owned, size_bytes = owned_of(rank), float(sums[rank] * low.master_bytes)
    device, workload = low.device(rank), low.scenario.workload
    cast_s = cost.master_copy_time_s(device, workload, elements=sums[rank], tensors=len(owned), casts=1)
    cast_bytes = float(max(owned, default=0) * low.master_bytes) if low.has_master_copy else 0.0
    if low.flat_part and low.has_master_copy:
        cast_bytes = size_bytes
    need = footprint([Event(0, cast_bytes, "temporaries"), Event(1, -cast_bytes, "temporaries")])
    gradients = TaskId(COPY_TO_HOST, layer="gradients", part=part)
    parameters = TaskId(COPY_TO_DEVICE, layer="parameters", part=part)
    casts = cast_s and low.casts_gradients
    cast = [Task(gradients.serving("cast"), "optimizer", duration_s=cast_s)] if casts else []
    before = [*cast, copy(low, gradients, size_bytes, ranks=equal, need=need if low.casts_gradients else NOTHING)]
    cast = [Task(parameters.serving("cast"), "optimizer", duration_s=cast_s)] if cast_s else []
    behind = [copy(low, parameters, size_bytes, ranks=equal, need=need), *cast]
    return [*(before if low.policies.gradients != "reduce-scatter" else []), update, *behind]


def exchange_with_host(
    low: Lowering, bucket: Bucket, own_bytes: float, micro_batch: MicroBatch, reduced: Task
) -> list[Task]:
    """Return the copies of a bucket's part of gradients that DeepSpeed accumulates on the host; see [Note: offload]."""
    if not low.offload:
        return []
    part = TaskId(COPY_TO_DEVICE, layer="gradients", bucket=bucket.index)
    made = [] if micro_batch.first else [part]
    if not micro_batch.last:
        made.append(part._replace(op=COPY_TO_HOST))
    tasks = [reduced]
    for own in made:
        tasks.append(copy(low, own, own_bytes, stream=reduced.stream, after=(tasks[-1].id,)))
    return tasks[1:]


def host_bytes(low: Lowering, kept: dict[str, float], owned: Sequence[int]) -> dict[str, float]:
    """Return what a rank keeps in host memory, by category, and subtract it from what its device keeps (`kept`).

    Only gradients of what the rank updates are kept, in the optimizer's precision: those of shards in the memory to
    which each copy is made, those of replicas in one buffer.
    """
    if low.offload is None:
        return {}
    moved = ["optimizer", "master_copy", *(["parameters"] if low.offload == "parameters" else [])]
    held = {name: kept.pop(name) for name in moved if name in kept}
    own_bytes = float(sum(owned) * low.master_bytes)
    if low.offload == "optimizer":
        held.setdefault("master_copy", own_bytes)
    gradients_bytes = own_bytes
    if low.frees_gradients:
        gradients_bytes += copy_buffer_bytes(low)
        if low.scenario.plan.micro_batches > 1:  # the sum of the micro-batches so far
            gradients_bytes += sum(owned) * low.value_bytes
    return {name: size for name, size in {**held, "gradients": gradients_bytes}.items() if size}


def copy_buffer_bytes(low: Lowering) -> float:
    """Return the bytes of the buffer through which DeepSpeed's stages 1 and 2 copy gradients of an offloaded
    optimizer.
    """
    if not (low.offload and low.frees_gradients):
        return 0.0
    return float(max(parameter.elements for _, parameter in low.parameters) * low.value_bytes)
