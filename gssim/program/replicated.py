"""Gradient policies of replicated parameters: gradients kept local, or all-reduced in buckets as in DDP."""

from dataclasses import replace

from gssim import cost
from gssim.collectives import Communication
from gssim.program.compute import insert_after, part_at
from gssim.program.lowering import Lowering
from gssim.program.task import MicroBatch, Task

REDUCTION = "all-reduce"


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
            name = f"broadcast buffers {number}"
            low.communications[name] = Communication("broadcast", low.group, buffer_bytes)
            broadcasts.append(Task(name, "exposed_communication", communication=name))
        tasks = [*broadcasts, *tasks]
    if not micro_batch.sends_gradients:
        return tasks
    device = low.device(rank)
    labels = []
    for bucket in low.buckets:
        size = bucket.elements * low.value_bytes
        name = f"{REDUCTION} bucket {bucket.index}"
        low.communications[name] = Communication("all-reduce", low.group, size)
        index = part_at(low, tasks, bucket.complete)
        copied = replace(tasks[index], duration_s=tasks[index].duration_s + cost.copy_time_s(device, size))
        tasks[index] = copied
        stream = "communication" if low.scenario.plan.overlap else "compute"
        task = Task(name, "exposed_communication", stream, communication=name, after=(copied.label,))
        insert_after(tasks, index, [task])
        labels.append(name)
    tasks.append(Task(f"wait for {REDUCTION}", "exposed_communication", after=tuple(labels)))
    return tasks


def is_reduction(task: Task) -> bool:
    """Return whether a task reduces gradients over the replicas, or waits for that."""
    return task.label.startswith((f"{REDUCTION} bucket", f"wait for {REDUCTION}"))
