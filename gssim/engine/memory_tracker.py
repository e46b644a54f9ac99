"""Memory trackers: bytes by category, and their peak. There are trackers for one rank, for one rank with a log for
traces, and for all roles of a task group at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress

import numpy as np

from gssim.engine.task_groups import TaskGroup
from gssim.memory import NOTHING, Footprint
from gssim.program import Outline, Program, needs_of
from gssim.units import Bools, Floats, Ints

NOISE_BYTES = 1e-3
"""Smaller amounts count as 0: expected message sizes are fractions, so allocating and freeing them in different orders
leaves rounding errors.
"""
MAX_CELLS = 2**21
"""Largest number of (event, category, role) cells that are computed in one array."""


class MemoryTracker:
    """Memory of one rank over a sequence of tasks: current and peak bytes by category."""

    def __init__(self, persistent: dict[str, float]) -> None:
        self.current = persistent
        self.peak_bytes = 0.0
        self.peak: dict[str, float] = {}
        self._transient: dict[str, Footprint] = {}
        self._current_bytes = sum(persistent.values())

    def begin(self, stream: str, need: Footprint) -> None:
        """Begin a task: add its transient peak until it ends."""
        self._transient[stream] = need
        total = self._current_bytes + sum([part.peak_bytes for part in self._transient.values()])
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak = dict(self.current)
            for part in self._transient.values():
                for category, size in part.peak:
                    self.peak[category] = self.peak.get(category, 0.0) + size

    def end(self, stream: str) -> None:
        """End a task: drop its transient memory, and add what it leaves allocated."""
        need = self._transient[stream]
        self._transient[stream] = NOTHING
        for category, size in need.kept:
            self._add(category, size)

    def _add(self, category: str, size_bytes: float) -> None:
        total = self.current.get(category, 0.0) + size_bytes
        self.current[category] = total if abs(total) > NOISE_BYTES else 0.0
        self._current_bytes += size_bytes

    def run(self, needs: Iterable[Footprint]) -> None:
        """Run tasks one after another."""
        current, level_bytes = self.current, self._current_bytes
        for need in needs:
            if level_bytes + need.peak_bytes > self.peak_bytes:
                self._current_bytes = level_bytes
                self.begin("compute", need)
            for category, size in need.kept:  # as `_add` does: a step of a pipeline has thousands
                total = current.get(category, 0.0) + size
                current[category] = total if abs(total) > NOISE_BYTES else 0.0
                level_bytes += size
        self._current_bytes = level_bytes
        self._transient["compute"] = NOTHING


MEMORY_STEPS = 2
"""Number of steps over which memory is tracked: the second begins with what the first left allocated."""


def memory_after(program: Program, role: int, steps: int) -> MemoryTracker:
    """Return the memory of a role after `steps` steps, with all tasks in sequence, in the order of the program.

    A simulation in which only one stream allocates memory has the same result.
    """
    memory = MemoryTracker(dict(program.persistent[role]))
    needs = needs_of(program.tasks[role])
    for _ in range(steps):
        memory.run(needs)
    return memory


def allocates_beside_compute(program: Program, role: int) -> bool:
    """Return whether other streams than the compute stream allocate or free memory, so that peaks depend on timing."""
    tasks = program.tasks[role]
    plain = chain(tasks.schedule.plain, tasks.further.plain) if isinstance(tasks, Outline) else tasks
    return any(task.stream != "compute" and (task.need.peak_bytes or task.need.kept) for task in plain)


class RecordingTracker(MemoryTracker):
    """Memory tracker that also logs the level over time."""

    def __init__(self, persistent: dict[str, float], now_s: Callable[[], float]) -> None:
        super().__init__(persistent)
        self.now_s = now_s
        self.log: list[tuple[float, dict[str, float]]] = [(now_s(), dict(persistent))]
        """(time, bytes by category): the level from that time on; while a task runs, its peak."""

    def begin(self, stream: str, need: Footprint) -> None:
        """Begin a task: add its transient peak until it ends."""
        super().begin(stream, need)
        self._record()

    def end(self, stream: str) -> None:
        """End a task: drop its transient memory, and add what it leaves allocated."""
        super().end(stream)
        self._record()

    def _record(self) -> None:
        level = dict(self.current)
        for part in self._transient.values():
            for category, size in part.peak:
                level[category] = level.get(category, 0.0) + size
        self.log.append((self.now_s(), level))


@dataclass(frozen=True, eq=False)
class _MemoryNeeds:
    """Memory needs of a task group. Rows are the tasks that need memory, by category; columns are roles."""

    tasks: tuple[int, ...]
    streams: tuple[int, ...]
    """Stream of each of `tasks`, numbered in the order in which streams first need memory."""
    categories: tuple[str, ...]
    peak: Floats
    """By task, category and role."""
    peak_bytes: Floats
    """By task and role."""
    kept: Floats
    """As `peak`."""


@dataclass(eq=False)
class GroupPeaks:
    """Memory peaks of the roles of a task group, for any interleaving of the tasks of several streams."""

    persistent: tuple[Mapping[str, float], ...]
    needs: _MemoryNeeds
    steps: int
    _peaks_by_order: dict[bytes, list[dict[str, float]]] = field(default_factory=dict)

    @property
    def in_one_stream(self) -> bool:
        """Whether only one stream allocates memory, so that the order of events never varies."""
        return len(set(self.needs.streams)) <= 1

    def peaks(self, began_s: Floats, ended_s: Floats, columns: Sequence[int]) -> list[dict[str, float]]:
        """Return the peaks of ranks by category; times are indexed by step, task of the group and rank.

        If events of two streams coincide, that of the stream beside the compute stream comes first.
        """
        if self.in_one_stream:
            peaks = self._peaks_of_order(np.arange(2 * self.steps * len(self.needs.tasks)))
            return [peaks[role] for role in columns]
        rows = sorted(range(len(self.needs.streams)), key=self.needs.streams.__getitem__, reverse=True)
        places = [self.needs.tasks[row] for row in rows]
        times_s = np.stack([began_s[:, places], ended_s[:, places]], axis=2)
        # events are by stream, step, task, begin or end here; `_peaks_of_order` has them by step, task, begin or end
        flat, numbers = self._by_stream(times_s, rows)
        orders = numbers[np.argsort(flat, axis=0, kind="stable")]
        return [self._peaks_of_order(orders[:, i])[role] for i, role in enumerate(columns)]

    def _by_stream(self, times_s: Floats, rows: Sequence[int]) -> tuple[Floats, Ints]:
        steps, tasks, ranks = self.steps, len(rows), times_s.shape[-1]
        streams = np.array([self.needs.streams[row] for row in rows])
        numbers = (np.arange(steps)[:, None, None] * tasks + np.array(rows)[None, :, None]) * 2 + np.arange(2)
        of_streams = [streams == each for each in dict.fromkeys(streams.tolist())]
        flat = np.concatenate([times_s[:, own].reshape(-1, ranks) for own in of_streams])
        return flat, np.concatenate([numbers[:, own].reshape(-1) for own in of_streams])

    def _peaks_of_order(self, order: Ints) -> list[dict[str, float]]:
        """Return the peaks of all roles for an order of events, numbered by step, task, begin or end."""
        key = order.tobytes()
        if key not in self._peaks_by_order:
            self._peaks_by_order[key] = self._compute_peaks(order)
        return self._peaks_by_order[key]

    def _compute_peaks(self, order: Ints) -> list[dict[str, float]]:
        """Return the peaks of all roles for an order of events; roles are processed in batches.

        Peaks occur when a task begins: the level is what was kept until then, plus the peaks of the tasks that are
        active in each stream. Sums are taken in the order of events, so that rounding does not depend on the size of
        the batches.
        """
        needs, count = self.needs, len(self.needs.tasks)
        if not len(order):
            return [dict(each) for each in self.persistent]
        rows, ends = order // 2 % count, order % 2 == 1
        streams, events = np.array(needs.streams)[rows], np.arange(len(order))
        active: list[tuple[Ints, Bools]] = []  # for each stream and event: its latest task, and whether that is active
        for stream in sorted(set(needs.streams)):
            latest = np.maximum.accumulate(np.where(streams == stream, events, -1))
            active.append((rows[latest], (latest >= 0) & ~ends[latest]))
        changing: Bools = np.logical_or.reduce(needs.kept, axis=2)  # only these are added up: most are 0
        ending, category = np.nonzero(changing[rows] & ends[:, None])
        changed_before = np.searchsorted(ending, events)
        found: list[dict[str, float]] = []
        at_a_time = max(1, MAX_CELLS // (len(order) * len(needs.categories)))
        for first in range(0, len(self.persistent), at_a_time):
            roles = slice(first, first + at_a_time)
            held = [[each.get(name, 0.0) for name in needs.categories] for each in self.persistent[roles]]
            whole = [sum(each.values()) for each in self.persistent[roles]]
            changes = needs.kept[rows[ending], category, roles]
            current_bytes = np.cumsum(np.vstack([whole, changes]), axis=0)[changed_before]
            beside: Floats = np.zeros((len(order), len(whole)))
            for each, is_active in active:
                beside = beside + np.where(is_active[:, None], needs.peak_bytes[each, roles], 0.0)
            total_bytes = np.where(ends[:, None], -np.inf, current_bytes + beside)
            worst = np.argmax(total_bytes, axis=0)
            for column, event in enumerate(worst.tolist()):
                role, values = first + column, np.array(held[column])
                if total_bytes[event, column] > whole[column]:
                    before = slice(changed_before[event])
                    np.add.at(values, category[before], changes[before, column])
                    for each, is_active in active:
                        if is_active[event]:
                            values += needs.peak[each[event], :, role]
                named = zip(needs.categories, values.tolist(), strict=True)
                found.append(dict(compress(named, self._is_present[role])))
        return found

    @cached_property
    def _is_present(self) -> Sequence[Sequence[bool]]:
        """By role and category: whether the role has such memory, persistent or of its tasks."""
        needs = self.needs
        found = np.array([[name in persistent for name in needs.categories] for persistent in self.persistent])
        found |= np.logical_or.reduce(needs.peak, axis=0).T | np.logical_or.reduce(needs.kept, axis=0).T
        flags: list[list[bool]] = found.tolist()
        return flags


def group_peaks_of(program: Program, task_group: TaskGroup, steps: int) -> GroupPeaks:
    """Return the tracker of a task group's peaks over `steps` steps. Many tasks and roles share their needs."""
    by_role = [[task.need for task in program.tasks[role]] for role in task_group.roles]
    every = {id(need): need for needs in by_role for need in needs}
    number_of = {key: number for number, key in enumerate(every)}
    numbers = np.array([[number_of[id(need)] for need in needs] for needs in by_role]).T  # by place and role
    is_needed = np.array([bool(need.peak_bytes or need.kept) for need in every.values()])
    places = np.flatnonzero(is_needed[numbers].any(axis=1))
    kinds, first, numbers = np.unique(numbers[places], return_index=True, return_inverse=True)
    listed = list(every.values())
    needs_of = [listed[number] for number in kinds.tolist()]
    persistent = tuple(program.persistent[role] for role in task_group.roles)
    names = [name for each in persistent for name in each]
    names += [name for number in np.argsort(first) for name, _ in (*needs_of[number].peak, *needs_of[number].kept)]
    categories = {name: number for number, name in enumerate(dict.fromkeys(names))}
    numbers = numbers.reshape(len(places), len(task_group.roles))
    peak, kept = np.zeros((2, len(needs_of), len(categories)))
    for number, need in enumerate(needs_of):
        for name, size in need.peak:
            peak[number, categories[name]] = size
        for name, size in need.kept:
            kept[number, categories[name]] = size
    streams = {stream: number for number, stream in enumerate(task_group.shape.streams)}
    needs = _MemoryNeeds(
        tuple(places.tolist()),
        tuple(streams[task_group.shape.stream_of[place]] for place in places.tolist()),
        tuple(categories),
        np.ascontiguousarray(peak[numbers].swapaxes(1, 2)),
        np.array([need.peak_bytes for need in needs_of])[numbers],
        np.ascontiguousarray(kept[numbers].swapaxes(1, 2)),
    )
    return GroupPeaks(persistent, needs, steps)
