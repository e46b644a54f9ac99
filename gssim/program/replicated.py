"""Gradients that stay where they are, or are all-reduced."""

from dataclasses import replace

from gssim import costs
from gssim.collectives import Communication
from gssim.program.compute import insert_after, part_at
from gssim.program.lowering import Lowering
from gssim.program.task import Task


def keep_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """Leave the tasks as they are: nothing is communicated."""
    return tasks


def all_reduce_gradients(low: Lowering, rank: int, tasks: list[Task]) -> list[Task]:
    """DDP: each bucket is all-reduced once complete, behind the rest of the backward; backward ends when all are."""
    device = low.device(rank)
    labels = []
    for bucket in low.buckets:
        size = bucket.elements * low.value_bytes
        name = f"all-reduce bucket {bucket.index}"
        low.communications[name] = Communication("all-reduce", low.group, size)
        index = part_at(low, tasks, bucket.complete)
        copied = replace(tasks[index], duration_s=tasks[index].duration_s + costs.copy_time_s(device, size))
        tasks[index] = copied
        stream = "communication" if low.scenario.plan.overlap else "compute"
        task = Task(name, "exposed_communication", stream, communication=name, after=(copied.label,))
        insert_after(tasks, index, [task])
        labels.append(name)
    for number, size in enumerate(low.scenario.workload.model.buffer_bytes):
        name = f"broadcast buffers {number}"
        low.communications[name] = Communication("broadcast", low.group, size)
        tasks.insert(number, Task(name, "exposed_communication", communication=name))
    tasks.append(Task("wait for all-reduce", "exposed_communication", after=tuple(labels)))
    return tasks
