"""Task groups: roles with equal tasks, so that the vectorised walk and the memory tracker can handle them as vectors.

A stream's tasks are cut into segments that contain no waits. A segment begins where the stream waits for others. It
ends with a collective, or with a task that others wait for, so that these wait no longer than necessary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from gssim.execution.cache import Shared, Source
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


HASHED_TASKS = 16
"""Least number of tasks by whose collectives a shape is hashed, if it has so many."""


class TaskShape(Source):
    """Order, streams, dependencies and collectives of a role's tasks, without their times and memory: programs that
    differ in these alone share it.

    It is hashed by some of its parts only. To compare all of them takes less time than to hash them, because most
    identities of equal tasks are the same objects.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.joined = [task.communication for task in tasks]
        """The collective that each task joins."""
        self.ids = [task.id for task in tasks]
        self.stream_of = [task.stream for task in tasks]
        self.phases = [task.phase for task in tasks]
        self.after = [task.after for task in tasks]
        self.goes_on = [task.issue and task.issue.goes_on for task in tasks]
        """Whether the host goes on with each task from the one before; None if it does not issue the task."""

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, TaskShape)
            and self.joined == other.joined
            and self.ids == other.ids
            and self.stream_of == other.stream_of
            and self.phases == other.phases
            and self.after == other.after
            and self.goes_on == other.goes_on
        )

    def __hash__(self) -> int:
        apart = max(1, len(self.joined) // HASHED_TASKS)
        return hash((len(self.joined), *self.joined[::apart]))

    @cached_property
    def place_of(self) -> Mapping[TaskId, int]:
        """Position of each task in the step."""
        return {name: place for place, name in enumerate(self.ids)}

    @cached_property
    def streams(self) -> Mapping[str, tuple[Segment, ...]]:
        """Segments of each stream."""
        found: dict[str, tuple[Segment, ...]] = {}
        for stream in dict.fromkeys(self.stream_of):
            found[stream] = tuple(self._segments(stream, sum(map(len, found.values()))))
        return found

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of all streams."""
        return tuple(chain.from_iterable(self.streams.values()))

    @cached_property
    def waiting(self) -> Mapping[int, tuple[int, ...]]:
        """For each segment, the segments of the same step that wait for one of its tasks, once per such task."""
        number_of = {self.ids[task]: segment.number for segment in self.segments for task in segment.tasks}
        found: dict[int, list[int]] = {segment.number: [] for segment in self.segments}
        for segment in self.segments:
            for awaited in segment.after:
                found[number_of[awaited]].append(segment.number)
        return {number: tuple(several) for number, several in found.items()}

    def _segments(self, stream: str, first: int) -> Iterator[Segment]:
        parts: list[list[int]] = []
        awaited = set(chain.from_iterable(self.after))
        for place in [place for place, own in enumerate(self.stream_of) if own == stream]:
            before = parts[-1][-1] if parts else None
            if before is None or self.after[place] or self.joined[before] is not None or self.ids[before] in awaited:
                parts.append([])
            parts[-1].append(place)
        for number, part in enumerate(parts, first):
            issues = any([self.goes_on[place] is not None for place in part])
            yield Segment(number, stream, tuple(part), self.after[part[0]], self.joined[part[-1]], issues)


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Roles whose tasks differ only in their times and memory."""

    shape: TaskShape
    tasks: Sequence[Task]
    """Tasks of the first role."""
    roles: tuple[int, ...]
    duration_s: Floats
    """By task and role."""
    host_s: Floats
    """Host time to issue each task, by task and role; 0 if it needs none."""


def task_groups_of(program: Program, shared: Shared) -> tuple[TaskGroup, ...]:
    """Return the task groups of a program's roles, in the order of their first roles."""
    groups: dict[TaskShape, list[int]] = {}
    for role, tasks in enumerate(program.tasks):
        groups.setdefault(TaskShape(tasks), []).append(role)
    return tuple(_task_group(program, roles, shape, shared) for shape, roles in groups.items())


def _task_group(program: Program, roles: Sequence[int], shape: TaskShape, shared: Shared) -> TaskGroup:
    return TaskGroup(
        shared.once("task shapes", shape, lambda: shape),
        program.tasks[roles[0]],
        tuple(roles),
        np.array([[task.duration_s for task in program.tasks[role]] for role in roles]).T.copy(),
        np.array([[task.issue.host_s if task.issue else 0.0 for task in program.tasks[role]] for role in roles]).T,
    )


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
        self.now_s = {stream: np.zeros(count) for stream in task_group.shape.streams}
        self.began_s, self.ended_s = np.zeros((2, steps, len(task_group.tasks), count))
        self.wait_s = np.zeros((steps, len(task_group.tasks), count))
        """Time at which the compute stream began to wait for others before a task."""
        self.awaited = np.full((steps, len(task_group.tasks), count), -1)
        """Index of the dependency that was waited for; -1: none."""
        self.place = task_group.shape.place_of
        pending = [[len(each.after) for each in task_group.shape.segments] for _ in range(steps)]
        for stream in task_group.shape.streams.values():
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
