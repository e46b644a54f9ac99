"""Gradient policies of replicated parameters: gradients kept local, or all-reduced in buckets as in DDP."""

from gssim import cost
from gssim.collectives import Communication
from gssim.program.compute import BackwardParts
from gssim.program.lowering import Lowering
from gssim.program.task import MicroBatch, Task, TaskId, collective_task


def keep_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """Return the tasks unchanged: gradients are not communicated."""
    return tasks


def all_reduce_gradients(low: Lowering, rank: int, tasks: list[Task], micro_batch: MicroBatch) -> list[Task]:
    """DDP: each bucket is all-reduced once complete, behind the rest of the backward, which ends when all are reduced.

    Module buffers are broadcast in a forward that follows an all-reduce: under no_sync they are left as they are
    (DistributedDataParallel, require_forward_param_sync).
    """
    if micro_batch.first or micro_batch.sent_before:
        broadcasts = []
        for number, buffer_bytes in enumerate(low.scenario.workload.model.buffer_bytes):
            broadcast = Communication("broadcast", low.group, buffer_bytes)
            broadcasts.append(collective_task(TaskId("broadcast-buffers", part=number), broadcast))
        tasks = [*broadcasts, *tasks]
    if not micro_batch.sends_gradients:
        return tasks
    device = low.device(rank)
    parts, reductions = BackwardParts(low, tasks), []
    for bucket in low.buckets:
        size = bucket.elements * low.value_bytes
        index = parts.at(bucket.complete)
        copied = parts.lengthen(index, cost.copy_time_s(device, size))
        stream = "communication" if low.scenario.plan.overlap else "compute"
        exchange = Communication("all-reduce", low.group, size)
        task = collective_task(TaskId("all-reduce", bucket=bucket.index), exchange, stream, after=(copied,))
        parts.insert_after(index, [task])
        reductions.append(task.id)
    wait = Task(TaskId("all-reduce", "wait"), "exposed_communication", after=tuple(reductions))
    return [*parts.merged(), wait]


def is_reduction(task: Task) -> bool:
    """Return whether a task reduces gradients over the replicas, or waits for that."""
    return task.id.op == "all-reduce" and (task.id.bucket is not None or task.id.action == "wait")
