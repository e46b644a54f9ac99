"""Many classes of ranks at once: what one of them does in a time, all of a family do in a vector of times.

[Note: lockstep] Thresholds leave hardly two ranks alike: all do the same tasks, but each in times of its own. Where
ranks go ahead of the clock between collectives ([Note: ahead] in `ahead`), nothing but these brings them together, so
that only collectives take part in simulated time, and between them times are added up for all ranks of a family that
came from the same one. Every sum is made in the same order as for one rank alone, to the last digit.

Roles that do the same tasks, each in times of its own, taken together: what vectors of times are carried out by.

A stream's tasks fall into segments, within which nothing is waited for: one begins where others are waited for, and
ends with a collective, or with what others wait for, who then need not wait for more.
"""

from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from gssim.engine.collective_instances import Meeting
from gssim.engine.memory_tracker import holding_of
from gssim.program import Program, Task
from gssim.result import PHASES, Span
from gssim.units import Floats, Ints, distinct

if TYPE_CHECKING:
    from gssim.engine.machine import Machine


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


@dataclass(eq=False)
class _Gathering:
    """A collective's members as they come."""

    missing: int
    latest_s: float = 0.0
    came: list[tuple["Ranks", int, Segment, Ints]] = field(default_factory=list)


class Ranks:
    """The classes of a family, as places in vectors, and what they did: by step and task, when it began and ended."""

    def __init__(self, family: Family, classes: Sequence[int], columns: Sequence[int], steps: int) -> None:
        count, segments = len(classes), len(family.segments)
        self.family, self.classes, self.columns = family, np.array(classes), columns
        self.duration_s = family.duration_s[:, columns]
        self.takes_time = [bool(row.any()) for row in self.duration_s]
        self.issued_s = np.zeros(count)
        """When each one's host had issued the last piece that tells of it."""
        self.now_s = {stream: np.zeros(count) for stream in family.streams}
        self.began_s, self.ended_s = np.zeros((2, steps, len(family.tasks), count))
        self.wait_s = np.zeros((steps, len(family.tasks), count))
        """From when on the compute stream waited for others before a task; until it began."""
        self.awaited = np.full((steps, len(family.tasks), count), -1)
        """Which of what it comes after that was, -1: it did not wait."""
        self.place = {task.label: place for place, task in enumerate(family.tasks)}
        needed = np.array([len(each.after) for each in family.segments])
        self.needed = np.broadcast_to(needed[None, :, None], (steps, segments, count)).copy()
        """How many it still waits for, by step and segment."""
        for stream in family.streams.values():
            self.needed[1:, stream[0].number] += 1
            for segment in stream[1:]:
                self.needed[:, segment.number] += 1


class Lockstep:
    """All ranks of a machine, family by family."""

    def __init__(self, machine: "Machine", ranks: Sequence[Ranks], steps: int) -> None:
        self.machine, self.ranks, self.steps = machine, ranks, steps
        self.finished = machine.env.event()
        self._left = sum(each.needed.size for each in ranks)
        self._ready: deque[tuple[Ranks, int, Segment, Ints]] = deque()
        self._gathering: dict[tuple[int, str, int], _Gathering] = {}
        self._numbers: dict[tuple[int, str], Ints] = {}

    def run(self) -> None:
        """Carry out all steps; raise RuntimeError where they cannot end."""
        for each in self.ranks:
            everybody = np.arange(len(each.classes))
            for stream in each.family.streams.values():
                if not stream[0].after:
                    self._ready.append((each, 0, stream[0], everybody))
        self._go_on()
        self.machine.env.run(until=self.finished)
        end_s = max(float(now_s.max()) for each in self.ranks for now_s in each.now_s.values())
        if end_s > self.machine.env.now:
            self.machine.env.run(until=self.machine.env.at(end_s))

    def _go_on(self) -> None:
        """Do what is ready, as far as the next collectives."""
        while self._ready:
            self._begin(*self._ready.popleft())
        if not self._left and not self.finished.triggered:
            self.finished.succeed()

    def _begin(self, ranks: Ranks, step: int, segment: Segment, who: Ints) -> None:
        """Add up the times of a segment's tasks, up to a collective."""
        now_s, tasks = ranks.now_s[segment.stream][who], ranks.family.tasks
        if segment.after:
            now_s = self._awaited(ranks, step, segment, who, now_s)
        for place in segment.tasks:
            ranks.began_s[step, place, who] = now_s
            if tasks[place].communication is not None:
                self._come(ranks, step, segment, who, now_s)
                return
            began_s = now_s
            if ranks.takes_time[place]:
                now_s = now_s + ranks.duration_s[place, who]
            issue = tasks[place].issue
            if issue is not None:  # as `Machine.issued_s` has it
                host_s = ranks.family.host_s[place, ranks.columns][who]
                ranks.issued_s[who] = (ranks.issued_s[who] if issue.goes_on else began_s) + host_s
                now_s = np.maximum(now_s, ranks.issued_s[who])
            ranks.ended_s[step, place, who] = now_s
        self._end(ranks, step, segment, who, now_s)

    def _awaited(self, ranks: Ranks, step: int, segment: Segment, who: Ints, now_s: Floats) -> Floats:
        """Return when ranks go on that wait for other streams' tasks, all of which are known to end by then."""
        ends_s = np.array([ranks.ended_s[step, ranks.place[label], who] for label in segment.after])
        latest_s = ends_s.max(axis=0)
        waits = latest_s > now_s
        if segment.stream == "compute" and waits.any():
            late = len(ends_s) - 1 - np.argmax(np.greater(ends_s[::-1], now_s), axis=0)
            ranks.wait_s[step, segment.tasks[0], who] = now_s
            ranks.awaited[step, segment.tasks[0], who] = np.where(waits, late, -1)
        return np.where(waits, latest_s, now_s)

    def _end(self, ranks: Ranks, step: int, segment: Segment, who: Ints, now_s: Floats | float) -> None:
        """Note that a segment is over; what waited for nothing else is ready."""
        ranks.now_s[segment.stream][who] = now_s
        self._left -= len(who)
        stream = ranks.family.streams[segment.stream]
        last = segment is stream[-1]
        following = stream[0] if last else stream[segment.number - stream[0].number + 1]
        if step + last < self.steps:
            self._release(ranks, step + last, following, who)
        for number in ranks.family.waiting[segment.number]:
            self._release(ranks, step, ranks.family.segments[number], who)

    def _release(self, ranks: Ranks, step: int, segment: Segment, who: Ints) -> None:
        needed = ranks.needed[step, segment.number]
        needed[who] -= 1
        ready = who[needed[who] == 0]
        if len(ready):
            self._ready.append((ranks, step, segment, ready))

    def _come(self, ranks: Ranks, step: int, segment: Segment, who: Ints, now_s: Floats) -> None:
        """Let ranks join a collective; the last ones start it."""
        label = segment.communication
        assert label is not None
        meetings = self.machine.meetings[label]
        numbers = self._number_of(ranks, label, meetings)[who] if len(meetings) > 1 else np.zeros(len(who), np.int64)
        for number in distinct(numbers).tolist() if len(meetings) > 1 else (0,):
            inside = numbers == number
            key = (step, label, number)
            found = self._gathering.setdefault(key, _Gathering(len(meetings[number].classes)))
            found.missing -= int(np.count_nonzero(inside))
            found.latest_s = max(found.latest_s, float(now_s[inside].max()))
            found.came.append((ranks, step, segment, who[inside]))
            if not found.missing:
                self.machine.env.process(self._meet(meetings[number], self._gathering.pop(key)))

    def _number_of(self, ranks: Ranks, label: str, meetings: Sequence[Meeting]) -> Ints:
        """Return in which of a label's meetings each class takes part."""
        key = (id(ranks), label)
        if key not in self._numbers:
            of_class = {each.index: number for number, found in enumerate(meetings) for each in found.classes}
            self._numbers[key] = np.array([of_class[each] for each in ranks.classes.tolist()])
        return self._numbers[key]

    def _meet(self, meeting: Meeting, gathering: _Gathering) -> Generator[simpy.Event, Any, None]:
        env = self.machine.env
        if gathering.latest_s > env.now:
            yield env.at(gathering.latest_s)
        yield from self.machine.carry_out(meeting)
        for ranks, step, segment, who in gathering.came:
            ranks.ended_s[step, segment.tasks[-1], who] = env.now
            self._end(ranks, step, segment, who, float(env.now))
        self._go_on()

    # What happened ---------------------------------------------------------------------------------------------------

    def waits(self) -> list[str]:
        """Return who waits for ever, and for whom."""
        classes, found = self.machine.classes, []
        for (_, label, number), gathering in self._gathering.items():
            came = {int(each) for ranks, _, _, who in gathering.came for each in ranks.classes[who]}
            meeting = self.machine.meetings[label][number]
            missing = sorted(each.representative for each in meeting.classes if each.index not in came)
            cause = f"for rank {', '.join(map(str, missing))}"
            for ranks, _, segment, who in gathering.came:
                task = ranks.family.tasks[segment.tasks[-1]].label
                for index in ranks.classes[who].tolist():
                    rank = classes[index].representative
                    found.append((rank, f"rank {rank} ({segment.stream}) at {task!r}, {cause}"))
        return [text for _, text in sorted(found or self._never_begun())]

    def _never_begun(self) -> list[tuple[int, str]]:
        """Return which tasks wait for others of the same rank that never come."""
        found = []
        for ranks in self.ranks:
            for stream, segments in ranks.family.streams.items():
                waits = np.array([ranks.needed[:, each.number] for each in segments]).swapaxes(0, 1)
                for i, index in enumerate(ranks.classes.tolist()):
                    left = np.flatnonzero(waits[:, :, i].reshape(-1) > 0)
                    task = ranks.family.tasks[segments[left[0] % len(segments)].tasks[0]] if len(left) else None
                    if task is not None and task.after:
                        rank, after = self.machine.classes[index].representative, ", ".join(map(repr, task.after))
                        found.append((rank, f"rank {rank} ({stream}) at {task.label!r}, after {after}"))
        return found

    def ends_s(self) -> list[list[float]]:
        """Return when each class's steps ended."""
        found: dict[int, list[float]] = {}
        for ranks in self.ranks:
            last = ranks.family.streams["compute"][-1].tasks[-1]
            found |= dict(zip(ranks.classes.tolist(), ranks.ended_s[:, last].T.tolist(), strict=True))
        return [found[index] for index in sorted(found)]

    def spans(self) -> list[Span]:
        """Return what occupied each class's streams."""
        found: list[Span] = []
        for ranks in self.ranks:
            names = [self.machine.classes[index].representative for index in ranks.classes.tolist()]
            for step in range(self.steps):
                for place, task in enumerate(ranks.family.tasks):
                    for i in np.flatnonzero(ranks.awaited[step, place] >= 0).tolist():
                        label = task.after[int(ranks.awaited[step, place, i])]
                        shown = task.label if task.label.startswith("wait") else f"wait {label}"
                        begin_s, end_s = float(ranks.wait_s[step, place, i]), float(ranks.began_s[step, place, i])
                        found.append(Span(names[i], task.stream, shown, "exposed_communication", begin_s, end_s))
                    began_s, ended_s = ranks.began_s[step, place], ranks.ended_s[step, place]
                    for i in np.flatnonzero(ended_s > began_s).tolist():
                        span = (task.stream, task.label, task.phase, float(began_s[i]), float(ended_s[i]))
                        found.append(Span(names[i], *span))
        return sorted(found, key=lambda span: span.end_s)

    def peaks(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Give what each class holds at its worst moment, by category."""
        program, steps = self.machine.program, self.steps
        for each in self.ranks:
            held = program.once((each.family, steps), partial(holding_of, each.family, program, steps))
            peaks = held.peaks(each.began_s, each.ended_s, each.columns)
            yield from zip(each.classes.tolist(), peaks, strict=True)

    def phases(self, ends_s: Sequence[Sequence[float]]) -> list[dict[str, float]]:
        """Return each class's phases between its two `ends_s`, as `result.typical_phases` does."""
        found: dict[int, dict[str, float]] = {}
        for ranks in self.ranks:
            start_s, end_s = np.array([ends_s[index] for index in ranks.classes.tolist()]).T
            seconds = self._phases_of(ranks, start_s, end_s)
            rows = np.array([seconds[phase] for phase in PHASES])
            rows = rows * ((end_s - start_s) / sum(rows))
            for index, row in zip(ranks.classes.tolist(), rows.T.tolist(), strict=True):
                found[index] = dict(zip(PHASES, row, strict=True))
        return [found[index] for index in sorted(found)]

    def _phases_of(self, ranks: Ranks, start_s: Floats, end_s: Floats) -> dict[str, Floats]:
        """Return how long ranks were in each phase between two times; what no task fills is idle."""
        phases, began_s, ended_s, there = self._computed(ranks)
        left_s, right_s = np.clip(began_s, start_s, end_s), np.clip(ended_s, start_s, end_s)
        busy_until_s = np.maximum.accumulate(np.concatenate([start_s[None], np.where(there, right_s, start_s)]))
        idle_s = np.where(there, np.maximum(0.0, left_s - busy_until_s[:-1]), 0.0)
        spent_s = np.where(there, right_s - left_s, 0.0)
        seconds = {phase: spent_s[phases == phase].sum(axis=0) for phase in PHASES}
        seconds["idle"] += idle_s.sum(axis=0) + (end_s - busy_until_s[-1])
        return seconds

    def _computed(self, ranks: Ranks) -> tuple[Any, Floats, Floats, Any]:
        """Return what the compute stream did, one thing after another: phase, begin, end, and whether it was at all.

        Before each task is what it waited for.
        """
        tasks = ranks.family.tasks
        places = [place for place, task in enumerate(tasks) if task.stream == "compute"]
        phases = np.array([["exposed_communication", tasks[place].phase] for place in places] * self.steps).ravel()
        began_s, ended_s = ranks.began_s[:, places], ranks.ended_s[:, places]
        waited = ranks.awaited[:, places] >= 0
        shape = (len(phases), len(ranks.classes))
        begins_s = np.stack([np.where(waited, ranks.wait_s[:, places], began_s), began_s], axis=2).reshape(shape)
        ends_s = np.stack([began_s, ended_s], axis=2).reshape(shape)
        there = np.stack([waited, ended_s > began_s], axis=2).reshape(shape)
        return phases, begins_s, ends_s, there


def lockstep_of(machine: "Machine", steps: int) -> Lockstep:
    """Return what carries out all of a machine's classes together."""
    found = machine.program.once("families", lambda: families_of_roles(machine.program))
    column = {role: (family, place) for family in found for place, role in enumerate(family.roles)}
    inside: dict[Family, list[tuple[int, int]]] = defaultdict(list)
    for each in machine.classes:
        family, place = column[machine.roles[each.index]]
        inside[family].append((each.index, place))
    ranks = [
        Ranks(family, [index for index, _ in places], [place for _, place in places], steps)
        for family, places in inside.items()
    ]
    return Lockstep(machine, ranks, steps)
