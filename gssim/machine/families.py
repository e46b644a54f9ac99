"""Roles that do the same tasks, each in times of its own, taken together: what vectors of times are carried out by.

A stream's tasks fall into segments, within which nothing is waited for: one begins where others are waited for, and
ends with a collective, or with what others wait for, who then need not wait for more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gssim.program import Program, Task
from gssim.units import Floats


@dataclass(frozen=True, eq=False)
class Segment:
    """Tasks of a stream that follow one another without a wait between them."""

    number: int
    """Among all of the family's."""
    stream: str
    tasks: tuple[int, ...]
    """Their places in the step; the last one may be a collective."""
    after: tuple[str, ...]
    """Labels of other streams' tasks that the first one waits for."""
    communication: str | None


@dataclass(frozen=True, eq=False)
class Family:
    """Roles with the same tasks but for their times and memory."""

    tasks: tuple[Task, ...]
    """Of the first role."""
    roles: tuple[int, ...]
    duration_s: Floats
    """By task and role."""
    host_s: Floats
    """The same: what the host takes to issue a task, where it does."""
    streams: Mapping[str, tuple[Segment, ...]]
    segments: tuple[Segment, ...]
    waiting: Mapping[int, tuple[int, ...]]
    """By a segment's number, those of the same step that wait for one of its tasks, once for each such task."""
    awaited: frozenset[str]
    """Labels of tasks that others wait for."""


def families_of_roles(program: Program) -> tuple[Family, ...]:
    """Return the families of a program's roles, in the order of their first ones."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for role, tasks in enumerate(program.tasks):
        shape = tuple(
            (task.label, task.phase, task.stream, task.communication, task.after, task.issue and task.issue.goes_on)
            for task in tasks
        )
        alike.setdefault(shape, []).append(role)
    return tuple(_family(program, roles) for roles in alike.values())


def _family(program: Program, roles: Sequence[int]) -> Family:
    tasks = program.tasks[roles[0]]
    streams: dict[str, tuple[Segment, ...]] = {}
    segments: list[Segment] = []
    for stream in dict.fromkeys(task.stream for task in tasks):
        streams[stream] = tuple(_segments(tasks, stream, len(segments)))
        segments += streams[stream]
    place = {tasks[task].label: segment.number for segment in segments for task in segment.tasks}
    waiting: dict[int, list[int]] = {segment.number: [] for segment in segments}
    for segment in segments:
        for label in segment.after:
            waiting[place[label]].append(segment.number)
    return Family(
        tasks,
        tuple(roles),
        np.array([[task.duration_s for task in program.tasks[role]] for role in roles]).T.copy(),
        np.array([[task.issue.host_s if task.issue else 0.0 for task in program.tasks[role]] for role in roles]).T,
        streams,
        tuple(segments),
        {number: tuple(found) for number, found in waiting.items()},
        frozenset(label for task in tasks for label in task.after),
    )


def _segments(tasks: Sequence[Task], stream: str, first: int) -> list[Segment]:
    parts: list[list[int]] = []
    awaited = {label for task in tasks for label in task.after}
    for place, task in enumerate(tasks):
        if task.stream != stream:
            continue
        before = tasks[parts[-1][-1]] if parts else None
        if before is None or task.after or before.communication is not None or before.label in awaited:
            parts.append([])
        parts[-1].append(place)
    return [
        Segment(first + i, stream, tuple(part), tasks[part[0]].after, tasks[part[-1]].communication)
        for i, part in enumerate(parts)
    ]
