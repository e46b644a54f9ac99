"""How fast ranks compute: those that are slower than their device, and how all get to know it."""

from collections.abc import Sequence
from dataclasses import replace

from gssim.collectives import Communication
from gssim.program.lowering import Lowering
from gssim.program.task import Task
from gssim.result import COMPUTE_PHASES, UPDATE_PHASES

SLOWED_PHASES = (*COMPUTE_PHASES, *UPDATE_PHASES)
TOLD_BYTES = 16
"""Ranks tell two numbers as float64: the seconds of their forward and backward, and those of their update."""


def slowed_down(tasks: Sequence[Task], ratio: float) -> list[Task]:
    """Return a rank's tasks where its forward, backward and update take `ratio` times as long."""
    if ratio == 1:
        return list(tasks)
    return [
        replace(task, duration_s=ratio * task.duration_s) if task.phase in SLOWED_PHASES else task for task in tasks
    ]


def share_compute_times(low: Lowering) -> list[Task]:
    """Return what ends a step where shares follow the ranks' pace: all learn how long each has computed."""
    if not low.scenario.plan.shares.replan:
        return []
    name = "share compute times"
    low.communications[name] = Communication("all-gather", low.group, TOLD_BYTES * len(low.group))
    return [Task(name, "exposed_communication", communication=name)]
