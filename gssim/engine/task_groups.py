"""Task groups: roles with equal tasks, so that the vectorised walk and the memory tracker can handle them as vectors.

A stream's tasks are cut into segments that contain no waits. A segment begins where the stream waits for others. It
ends with a collective, or with a task that others wait for, so that these wait no longer than necessary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gssim.program import Program, Task, TaskId
from gssim.units import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tasks of a stream without a wait between them."""

    number: int
    """Index among all segments of the task group."""
    stream: str
    tasks: tuple[int, ...]
    """Positions in the step; the last task may be a collective."""
    after: tuple[TaskId, ...]
    """Tasks of other streams on which the first task depends."""
    communication: TaskId | None
    issues: bool
    """Whether the host issues some of the tasks."""

    @property
    def computed(self) -> tuple[int, ...]:
        """Positions of the tasks before the collective."""
        return self.tasks if self.communication is None else self.tasks[:-1]


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Roles whose tasks differ only in their times and memory."""

    tasks: Sequence[Task]
    """Tasks of the first role."""
    roles: tuple[int, ...]
    duration_s: Floats
    """By task and role."""
    host_s: Floats
    """Host time to issue each task, by task and role; 0 if it needs none."""
    streams: Mapping[str, tuple[Segment, ...]]
    segments: tuple[Segment, ...]
    waiting: Mapping[int, tuple[int, ...]]
    """For each segment, the segments of the same step that wait for one of its tasks, once per such task."""

    @cached_property
    def place_of(self) -> Mapping[TaskId, int]:
        """Position of each task in the step."""
        return {task.id: place for place, task in enumerate(self.tasks)}


def task_groups_of(program: Program) -> tuple[TaskGroup, ...]:
    """Return the task groups of a program's roles, in the order of their first roles.

    Roles are compared only with those that join the same collectives: to compare takes less time than to hash all
    identities of tasks, because most of these are the same objects.
    """
    groups: list[list[int]] = []
    by_collectives: dict[tuple[int, ...], list[tuple[Sequence[Any], list[int]]]] = {}
    numbers: dict[TaskId | None, int] = {}
    number_of: dict[int, int] = {}  # by identity
    for role, tasks in enumerate(program.tasks):
        joined = [task.communication for task in tasks]
        for each in joined:
            if id(each) not in number_of:
                number_of[id(each)] = numbers.setdefault(each, len(numbers))
        shape = (
            [task.id for task in tasks],
            [task.phase for task in tasks],
            [task.stream for task in tasks],
            [task.after for task in tasks],
            [task.issue and task.issue.goes_on for task in tasks],
        )
        known = by_collectives.setdefault(tuple([number_of[id(each)] for each in joined]), [])
        roles = next((roles for other, roles in known if other == shape), None)
        if roles is None:
            roles = []
            known.append((shape, roles))
            groups.append(roles)
        roles.append(role)
    return tuple(_task_group(program, roles) for roles in groups)


def _task_group(program: Program, roles: Sequence[int]) -> TaskGroup:
    tasks = program.tasks[roles[0]]
    streams: dict[str, tuple[Segment, ...]] = {}
    segments: list[Segment] = []
    for stream in dict.fromkeys(task.stream for task in tasks):
        streams[stream] = tuple(_segments(tasks, stream, len(segments)))
        segments += streams[stream]
    number_of = {tasks[task].id: segment.number for segment in segments for task in segment.tasks}
    waiting: dict[int, list[int]] = {segment.number: [] for segment in segments}
    for segment in segments:
        for awaited in segment.after:
            waiting[number_of[awaited]].append(segment.number)
    return TaskGroup(
        tasks,
        tuple(roles),
        np.array([[task.duration_s for task in program.tasks[role]] for role in roles]).T.copy(),
        np.array([[task.issue.host_s if task.issue else 0.0 for task in program.tasks[role]] for role in roles]).T,
        streams,
        tuple(segments),
        {number: tuple(found) for number, found in waiting.items()},
    )


def _segments(tasks: Sequence[Task], stream: str, first: int) -> list[Segment]:
    parts: list[list[int]] = []
    awaited = {each for task in tasks for each in task.after}
    for place, task in enumerate(tasks):
        if task.stream != stream:
            continue
        before = tasks[parts[-1][-1]] if parts else None
        if before is None or task.after or before.communication is not None or before.id in awaited:
            parts.append([])
        parts[-1].append(place)
    return [
        Segment(
            first + i,
            stream,
            tuple(part),
            tasks[part[0]].after,
            tasks[part[-1]].communication,
            any([tasks[place].issue is not None for place in part]),
        )
        for i, part in enumerate(parts)
    ]


Index = slice | Ints
"""Some of the ranks of a task group, as an index into vectors: a slice for all of them, which is faster."""
EVERYBODY = slice(None)


class Ranks:
    """Classes of a task group as positions in vectors, with the begin and end of every task in every step."""

    def __init__(self, task_group: TaskGroup, classes: Sequence[int], columns: Sequence[int], steps: int) -> None:
        count = len(classes)
        self.task_group, self.classes, self.columns = task_group, np.array(classes), columns
        self.everybody = np.arange(count)
        """Positions of all of them."""
        self.duration_s = task_group.duration_s[:, columns]
        self.takes_time: list[bool] = np.any(self.duration_s, axis=1).tolist()
        self.issued_s = np.zeros(count)
        """For each rank, the time at which its host finished issuing the latest task that has an `issue`."""
        self.now_s = {stream: np.zeros(count) for stream in task_group.streams}
        self.began_s, self.ended_s = np.zeros((2, steps, len(task_group.tasks), count))
        self.wait_s = np.zeros((steps, len(task_group.tasks), count))
        """Time at which the compute stream began to wait for others before a task."""
        self.awaited = np.full((steps, len(task_group.tasks), count), -1)
        """Index of the dependency that was waited for; -1: none."""
        self.place = task_group.place_of
        pending = [[len(each.after) for each in task_group.segments] for _ in range(steps)]
        for stream in task_group.streams.values():
            for step, of_segments in enumerate(pending):
                for segment in stream if step else stream[1:]:  # that wait for the one before it
                    of_segments[segment.number] += 1
        self._pending = pending
        """By step and segment: number of dependencies that have not ended for all ranks at once."""
        self._ended_for: dict[tuple[int, int], Ints] = {}
        """By step and segment: number of dependencies that ended for some ranks only, by rank."""

    def index_of(self, members: Ints) -> Index:
        """Return the positions of some ranks as an index."""
        return EVERYBODY if members is self.everybody else members

    def release(self, step: int, segment: Segment, members: Ints) -> Ints:
        """Count down a pending dependency of a segment for some ranks; return those for which it was the last one."""
        pending, key = self._pending[step], (step, segment.number)
        ended_for = self._ended_for.get(key)
        if members is self.everybody:
            pending[segment.number] -= 1
            if ended_for is None:
                return members if not pending[segment.number] else members[:0]
            return members[np.equal(ended_for, pending[segment.number])]
        if ended_for is None:
            ended_for = self._ended_for[key] = np.zeros(len(self.classes), np.int64)
        ended_for[members] += 1
        return members[np.equal(ended_for[members], pending[segment.number])]

    def is_pending(self, step: int, segment: Segment) -> Bools:
        """Return for each rank whether dependencies of a segment have not ended."""
        ended_for = self._ended_for.get((step, segment.number), np.zeros(len(self.classes), np.int64))
        return np.less(ended_for, self._pending[step][segment.number])

    def rows_of(self, places: Sequence[int], some: Index) -> tuple[slice | Ints, Index]:
        """Return an index into times, by task and rank, for tasks of a stream and some ranks."""
        if places[-1] - places[0] < len(places):
            return slice(places[0], places[-1] + 1), some
        rows = np.array(places, dtype=np.int64)  # others lie between them
        return (rows, some) if isinstance(some, slice) else (rows[:, None], some)
