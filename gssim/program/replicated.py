"""Gradient policies of replicated parameters: gradients kept local, or all-reduced in buckets as in DDP.

[Note: compression] Under torch's bf16_compress_hook and fp16_compress_hook, the thread or stream of the backward casts
a complete bucket to a new 16-bit tensor and divides it by the number of replicas. Whoever ends the all-reduce (gloo's
thread, or a stream of its own) casts the sum back into the bucket and frees the new tensor. Buckets that are in the
16-bit format already are divided and reduced in place. Source: torch 2.13, distributed/algorithms/ddp_comm_hooks/
default_hooks.py, _compress_hook. A wider format (`workload.reduce_precision`) is handled in the same way. Gradients
that are kept in the format of the reduction (`workload.gradient_precision`) are reduced in place.

[Note: freed gradients] Under DeepSpeed's ZeRO-1 and ZeRO-2, a bucket is a part of a buffer that exists from the first
backward whose gradients are to be reduced in it to the end of the one that reduces them. It is divided there and copied
once more for its all-reduce; what the rank updates of the sum is copied back, and then to the gradients of the rank's
part. These are kept until the update; if later micro-batches are reduced too, theirs are added after each backward.
A copy in another precision (`workload.reduce_precision`) lives as long as the other copy, and the sum is cast back.
Buckets are reduced as soon as they are full, but for ZeRO-1 without overlap (DeepSpeed's default), which reduces all
after the backward, in the model's order, so that all gradients exist at once. So does every pipeline, whose buffer
exists only while it reduces (runtime/engine.py, _configure_zero_optimizer). Source: DeepSpeed,
runtime/zero/stage_1_and_2.py: process_gradients, reduce_gradients, average_tensor with use_multi_rank_bucket_allreduce
(its default), allreduce_bucket, copy_grads_in_partition, independent_gradient_partition_epilogue.
"""

from collections.abc import Sequence
from dataclasses import replace

from gssim import cost
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.memory import Event, footprint
from gssim.program.compressed import HALF_BYTES, compress_bucket
from gssim.program.compute import BackwardParts
from gssim.program.experts import expert_reductions
from gssim.program.lowering import Lowering
from gssim.program.offload import exchange_with_host
from gssim.program.task import Bucket, MicroBatch, Task, TaskId, collective_task
from gssim.units import PRECISION_BYTES, Precision


def keep_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """Return the tasks unchanged: gradients are not communicated."""
    return tasks


def all_reduce_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """DDP: each bucket is all-reduced once complete, behind the rest of the backward, which ends when all are reduced.

    Buckets may be compressed; see [Note: compression], and [Note: compressors] in `compressed`. They may be freed; see
    [Note: freed gradients]. Module buffers are broadcast in a forward that follows an all-reduce; under no_sync they
    are left as they are (DistributedDataParallel, require_forward_param_sync). All forwards of a pipeline run under
    no_sync (PipelineStage.forward_maybe_with_nosync), so only the very first one broadcasts.
    """
    if (micro_batch.first or micro_batch.sent_before) and not low.stages:
        tasks = [*broadcast_buffers(low), *tasks]
    if not micro_batch.sends_gradients:
        return tasks
    if low.frees_gradients:
        return _reduce_and_free(low, rank, tasks, micro_batch)
    device, workload = low.device(rank), low.scenario.workload
    hooked = low.policies.compress is not None or low.reduces_cast_gradients
    precision = low.policies.compress or low.reduce_precision
    summed = precision if PRECISION_BYTES[precision] == HALF_BYTES else ""
    casts = hooked and precision != workload.gradient_precision
    parts, reductions = BackwardParts(tasks), list[TaskId]()
    rounds: list[list[Task]] = [[], []]
    for bucket in low.buckets:
        index = parts.at(low, bucket.complete)
        kind = "reduce-scatter" if low.has_one_gradient_buffer else "all-reduce"
        # gradients are copied into the bucket; a single gradient buffer is divided in place by the number of
        # ranks, if there are several (Megatron-LM, core/distributed/param_and_grad_buffer.py, start_grad_sync)
        is_ready = low.has_one_gradient_buffer and len(low.group) == 1
        copied_bytes = 0.0 if is_ready else float(bucket.elements * low.buffer_value_bytes)
        copied = parts.lengthen(index, cost.copy_time_s(device, copied_bytes))
        if low.policies.compressor:
            begun, *ended = compress_bucket(low, device, bucket)
            if not low.scenario.plan.overlap:
                begun, ended = [*begun, *ended[0], *ended[1]], [[], []]
            parts.insert_after(index, _in_hook(low, bucket, begun))
            rounds = [[*before, *tasks] for before, tasks in zip(rounds, ended, strict=True)]
            continue
        stream = low.communication_stream(len(reductions)) if low.scenario.plan.overlap else "compute"
        reduced_bytes = PRECISION_BYTES[precision] * bucket.elements
        exchange = Communication(kind, low.group, reduced_bytes, half_precision=summed)
        task = collective_task(TaskId("all-reduce", bucket=bucket.index), exchange, stream, after=(copied,))
        reduction = [task]
        if casts:
            reduction = _in_hook(low, bucket, _with_casts(low, device, bucket, task, precision))
        parts.insert_after(index, reduction)
        reductions.append(reduction[-1].id)
    if low.policies.compressor:
        return [*parts.all_tasks(), *rounds[0], *rounds[1]]
    reductions += _reduce_experts(low, device, parts, precision, casts=casts)
    wait = Task(TaskId("all-reduce", "wait"), "exposed_communication", after=tuple(reductions))
    return [*parts.all_tasks(), wait]


def _reduce_and_free(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """All-reduce the buckets of a micro-batch whose gradients are then freed; see [Note: freed gradients]."""
    parts, ends = BackwardParts(tasks), []
    after_backward: list[Task] = []
    for bucket in low.buckets:
        reduction = _copies_and_reduction(low, rank, bucket, micro_batch)
        if low.reduces_after_backward:
            after_backward += reduction
        else:
            parts.insert_after(parts.at(low, bucket.complete), reduction)
        ends.append(reduction[-1].id)
    added_bytes = low.part_gradient_bytes if _adds_to_part(micro_batch) else 0.0
    freed = [(low.freed_buffers_bytes, "buckets", False), (added_bytes, "gradients", True)]
    need = footprint([Event(0, -size, what, latest=latest) for size, what, latest in freed if size])
    wait = Task(TaskId("all-reduce", "wait"), "exposed_communication", after=tuple(ends), need=need)
    return [*parts.all_tasks(), *after_backward, wait]


def _adds_to_part(micro_batch: MicroBatch) -> bool:
    """Return whether reduced gradients are added to those that earlier micro-batches left of a rank's part."""
    return micro_batch.sent_before and not micro_batch.first


def _copies_and_reduction(low: Lowering, rank: int, bucket: Bucket, micro_batch: MicroBatch) -> list[Task]:
    """Return the tasks of a bucket whose gradients are freed: its copies, with all their time, and its all-reduce.

    The first one of a micro-batch also allocates the gradients of the rank's part. A tensor that is larger than the
    buffers is not copied into them, but stays alive meanwhile. The host frees further copies once the all-reduce is
    issued.
    """
    plan, device = low.scenario.plan, low.device(rank)
    size, reduced_bytes = (
        float(bucket.elements * each) for each in (low.value_bytes, PRECISION_BYTES[low.reduce_precision])
    )
    own_bytes, is_larger = size / len(low.group), size > plan.bucket_bytes
    casts = low.reduces_cast_gradients
    # into the buffer, divided there, and out of it; of what the rank updates, back, and to its part
    moved_bytes = size * (2 if is_larger else 3) + 2 * own_bytes + casts * (size + reduced_bytes)
    duration_s = cost.copy_time_s(device, moved_bytes)
    # gradients of earlier micro-batches are added to, some of which have come back from the host
    if _adds_to_part(micro_batch) or (low.offload and not micro_batch.first):
        duration_s += cost.accumulation_time_s(device, own_bytes, tensors=1)

    copied_bytes = size + casts * reduced_bytes
    is_first = bucket.index == 0
    part_bytes = low.part_gradient_bytes if is_first else 0.0
    buffer_bytes = low.freed_buffers_bytes if is_first and low.stages else 0.0
    events = [
        (0, buffer_bytes, "buckets"),
        (0, part_bytes, "gradients"),
        (1, copied_bytes, "communication"),
        (2, -copied_bytes, "communication"),
    ]
    if low.reduces_after_backward:
        events.append((2 if is_larger else 0, -size, "gradients"))
    elif is_larger:  # the backward has freed the gradients, but the reduction still reads them
        events += [(1, size, "gradients"), (2, -size, "gradients")]
    need = footprint([Event(*event) for event in sorted(events) if event[1]])

    reduction = TaskId("all-reduce", bucket=bucket.index)
    copied = Task(reduction.serving("copy-in"), "backward", duration_s=duration_s, need=need)
    stream = "communication" if low.overlaps_freed_gradients else "compute"
    summed = low.reduce_precision if PRECISION_BYTES[low.reduce_precision] == HALF_BYTES else ""
    exchange = Communication("all-reduce", low.group, reduced_bytes, half_precision=summed)
    reduced = collective_task(reduction, exchange, stream, after=(copied.id,))
    return [copied, reduced, *exchange_with_host(low, bucket, own_bytes, micro_batch, reduced)]


def _reduce_experts(
    low: Lowering, device: DeviceType, parts: BackwardParts, precision: Precision, *, casts: bool
) -> list[TaskId]:
    """Insert the reductions of gradients of divided experts into a backward; return the task that ends each.

    They are divided in place, or as copies in `precision`. These need no bucket beside the gradients.
    """
    stream = "communication" if low.scenario.plan.overlap else "compute"
    ends = []
    for bucket, exchange in expert_reductions(low, precision):
        index = parts.at(low, bucket.complete)
        casts_it = casts and exchange is not None
        divided_bytes = 0.0 if casts_it else float(bucket.elements * low.buffer_value_bytes)
        divided = parts.lengthen(index, cost.copy_time_s(device, divided_bytes))
        if exchange is None:
            continue
        task = collective_task(TaskId("all-reduce", bucket=bucket.index), exchange, stream, after=(divided,))
        reduction = _with_casts(low, device, bucket, task, precision) if casts_it else [task]
        parts.insert_after(index, reduction)
        ends.append(reduction[-1].id)
    return ends


def broadcast_buffers(low: Lowering) -> list[Task]:
    """Return the broadcasts of the module buffers: one broadcast for each data type."""
    sizes = low.scenario.workload.model.buffer_sizes(low.value_bytes)
    return [
        collective_task(TaskId("broadcast-buffers", part=number), Communication("broadcast", low.group, size))
        for number, size in enumerate(sizes)
    ]


def _in_hook(low: Lowering, bucket: Bucket, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of a bucket's communication hook, during which the gradient that completes the bucket stays
    alive.

    The gradient has been copied to the bucket, but autograd holds a node's inputs until its hooks have run (torch 2.13,
    """
    _, parameter = bucket.members[-1]
    size = float(parameter.elements * low.value_bytes)
    last = max(place for place, task in enumerate(tasks) if task.stream == tasks[0].stream)
    result = list(tasks)
    for place, change in ((0, size), (last, -size)):
        events = result[place].need.events
        position = -1 if change > 0 else max((each.position for each in events), default=0) + 1
        changed = Event(position, change, "gradients")
        result[place] = replace(result[place], need=footprint([*events, changed]))
    return result


def _with_casts(low: Lowering, device: DeviceType, bucket: Bucket, reduction: Task, precision: Precision) -> list[Task]:
    """Return an all-reduce between the casts of its bucket to a precision and back; see [Note: compression]."""
    cast_bytes = float(PRECISION_BYTES[precision] * bucket.elements)
    divide_s = cost.copy_time_s(device, cast_bytes) + device.operation_overhead_s
    if low.scenario.workload.precision == precision:
        divide = Task(
            TaskId("compress", bucket=bucket.index), "compression", duration_s=divide_s, after=reduction.after
        )
        return [divide, replace(reduction, after=(divide.id,))]
    moved_bytes = bucket.elements * low.value_bytes + cast_bytes  # each cast reads one format and writes the other
    cast_s = cost.copy_time_s(device, moved_bytes / 2) + device.operation_overhead_s
    compress = Task(
        TaskId("compress", bucket=bucket.index),
        "compression",
        duration_s=cast_s + divide_s,
        after=reduction.after,
        need=footprint([Event(0, cast_bytes, "communication")]),
    )
    decompress = Task(
        TaskId("decompress", bucket=bucket.index),
        "compression",
        reduction.stream,
        duration_s=cast_s,
        after=(reduction.id,),
        need=footprint([Event(0, -cast_bytes, "communication")]),
    )
    return [compress, replace(reduction, after=(compress.id,)), decompress]


def is_reduction(task: Task) -> bool:
    """Return whether a task reduces gradients over the replicas, or waits for that."""
    if task.id.op in ("compress", "decompress"):
        return True
    return task.id.op == "all-reduce" and (task.id.bucket is not None or task.id.action == "wait")
