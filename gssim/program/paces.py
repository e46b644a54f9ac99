"""How fast ranks compute: those that are slower than their device, and how all get to know it."""

from collections.abc import Sequence
from dataclasses import replace

from gssim.collectives import Communication
from gssim.program.lowering import Lowering
from gssim.program.task import Task

SECONDS_BYTES = 8
"""Ranks tell their seconds as float64."""


def slowed_down(tasks: Sequence[Task], ratio: float) -> list[Task]:
    """Return a rank's tasks where its forward and backward take `ratio` times as long."""
    if ratio == 1:
        return list(tasks)
    return [
        replace(task, duration_s=ratio * task.duration_s) if task.phase in ("forward", "backward") else task
        for task in tasks
    ]


def share_compute_times(low: Lowering) -> list[Task]:
    """Return what ends a step where shares follow the ranks' pace: all learn how long each has computed in it."""
    if not low.scenario.plan.shares.replan:
        return []
    name = "share compute times"
    low.communications[name] = Communication("all-gather", low.group, SECONDS_BYTES * len(low.group))
    return [Task(name, "exposed_communication", communication=name)]
