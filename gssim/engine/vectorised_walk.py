"""The vectorised walk: executes many rank classes at once, with one vector of times per group of roles with equal
tasks.

[Note: vectorised walk] With thresholds, hardly two ranks are equal: all execute the same tasks, but each in its own
times. If ranks run ahead of the clock between collectives ([Note: fast path] in `fast_path`), only collectives
synchronise them, so only collectives run in simulated time. Between collectives, times are added up in one vector for
all ranks of a task group that left the same collective. Every sum is made in the same order as for one rank alone, to
the last digit.

If no other traffic can cross a collective's links meanwhile (see `links_used_in_turn`), its duration is known
beforehand, and it ends that long after its last arrival. Such collectives are added up as vectors too, ahead of the
clock. The result is exact to the last digit if the collective is one session. Otherwise it is exact but for rounding,
as its time is that of another size, scaled (`Network.on_idle_links_s`).
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import simpy

from gssim.engine.collective_instances import CollectiveInstance
from gssim.engine.memory_tracker import group_peaks_of
from gssim.engine.rendezvous import (
    PreparedTransfer,
    carry_out,
    carry_prepared,
    delays_of_collective,
    links_used_in_turn,
    prepared_transfer,
)
from gssim.engine.repeated_step import repeated_step
from gssim.engine.state import MachineState, PartOfMachine, TaskSpan
from gssim.engine.task_groups import Index, Ranks, Segment, TaskGroup, TaskShape, task_groups_of
from gssim.program import TaskId
from gssim.result import PHASES
from gssim.units import Floats, Ints, distinct


@dataclass(eq=False)
class _Arrivals:
    """Arrivals of a collective's members."""

    missing: int
    latest_s: float = 0.0
    arrived: list[tuple["Ranks", int, Segment, Ints]] = field(default_factory=list)


class _KnownTimes:
    """One step's instances of a collective whose duration is known beforehand."""

    def __init__(self, instances: Sequence[CollectiveInstance], delays_s: Floats) -> None:
        self.instances, self.delays_s = instances, delays_s
        self.missing = np.array([len(each.classes) for each in instances])
        self.latest_s = np.zeros(len(instances))
        self.arrived: list[tuple[Ranks, Segment, Ints, Ints]] = []
        """Arrived members of a task group, and the number of the instance that each joined."""

    def join(self, numbers: Ints, now_s: Floats) -> bool:
        """Record the arrival of members; return whether that completes some instances."""
        np.subtract.at(self.missing, numbers, 1)
        np.maximum.at(self.latest_s, numbers, now_s)
        return not self.missing[numbers].all()

    def ends_s(self) -> Floats:
        """Return the end of each instance: its latest arrival plus the delays, added one after another as by
        the clock.
        """
        ends_s = self.latest_s
        for delay_s in self.delays_s:
            ends_s = ends_s + delay_s
        return ends_s


MOST_ONE_BY_ONE = 4
"""Largest number of tasks whose times are added up one by one: for a few, that is faster than to add up rows."""
Instances = tuple[CollectiveInstance, ...]
"""The instances of a collective; equal collectives have the same."""


@dataclass(frozen=True, eq=False)
class _Joined:
    """A collective as the ranks of a task group join it."""

    name: int
    """Number of the collective, by which several task groups are known to join the same one."""
    instances: Instances
    delays_s: Floats | None
    """Delays of each instance, to be added up; None if they depend on other traffic."""
    numbers: Ints
    """Number of the instance that each rank joins."""
    only: int | None
    """The number of the instance, if all of these ranks join the same one."""


class VectorisedWalk(PartOfMachine):
    """Executes all ranks of a machine, task group by task group."""

    def __init__(self, machine: MachineState, ranks: Sequence[Ranks], steps: int) -> None:
        super().__init__(machine)
        self.ranks, self.steps = ranks, steps
        self.finished = machine.env.event()
        self._left_in_first = sum(len(each.task_group.shape.segments) * len(each.classes) for each in ranks)
        """Segments of the first step, each once for every rank, that have not ended."""
        self._remaining = steps * self._left_in_first
        """The same of all steps."""
        self.repeats = False
        """Whether all steps after the first are known to repeat it; see [Note: equal steps] in `repeated_step`."""
        self._further_begun_s = math.inf
        """Earliest start, by the clock, of a collective of a step after the first."""
        self._further_sends = False
        """Whether a collective of a step after the first has begun to send by the clock."""
        self._ahead = Counter[CollectiveInstance]()
        """How often each collective was counted ahead of the clock in steps after the first."""
        self._ready: deque[tuple[Ranks, int, Segment, Ints]] = deque()
        self._joined: dict[tuple[int, int], _Joined] = {}
        """By `id` of the ranks and number of the segment with which they join."""
        self._names: dict[TaskId, int] = {}
        """Number of each collective."""
        self._arrivals: dict[tuple[int, int, int], _Arrivals] = {}
        """By step, number of the collective, and number of the instance."""
        self._numbers: dict[tuple[int, Instances], tuple[Ints, int | None]] = {}
        self._delays: dict[Instances, Floats | None] = {}
        self._transfers: dict[CollectiveInstance, PreparedTransfer | None] = {}
        self._known: dict[tuple[int, int], _KnownTimes] = {}
        """By step and number of the collective."""

    def run(self) -> None:
        """Execute all steps; raise RuntimeError if they cannot end."""
        for each in self.ranks:
            for stream in each.task_group.shape.streams.values():
                if not stream[0].after:
                    self._ready.append((each, 0, stream[0], each.everybody))
        self._run_ready()
        self.machine.env.run(until=self.finished)
        if self.repeats:
            return
        end_s = max(float(now_s.max()) for each in self.ranks for now_s in each.now_s.values())
        if end_s > self.machine.env.now:
            self.machine.env.run(until=self.machine.env.at(end_s))

    def _run_ready(self) -> None:
        """Execute segments that are ready, up to the next collectives."""
        while not self.repeats:
            if not self._left_in_first and self.steps > 1:
                self._left_in_first = -1  # it is tried once
                self._repeat_first_step()
            elif self._ready:
                self._begin(*self._ready.popleft())
            else:
                break
        if not self._remaining and not self.finished.triggered:
            self.finished.succeed()

    def _repeat_first_step(self) -> None:
        """Complete all further steps from the first, if they repeat it."""
        machine = self.machine
        is_begun = self._further_sends or self._further_begun_s < machine.env.now
        if is_begun or any(
            instance.schedule.group_bytes for several in machine.arranged.all for instance in several
        ):  # what passes shaped links at once depends on the step before
            return
        found = repeated_step(self.ranks, self)
        if found is None:
            return
        starts_s = found.step_s * np.arange(1, self.steps)[:, None, None]
        for ranks, times in zip(self.ranks, found.times, strict=True):
            ranks.began_s[1:], ranks.ended_s[1:] = starts_s + times.began_s, starts_s + times.ended_s
            ranks.wait_s[1:], ranks.awaited[1:] = starts_s + times.wait_s, times.awaited
        for instance, in_step in Counter(chain.from_iterable(machine.instances.values())).items():
            self._count(instance, (self.steps - 1) * in_step - self._ahead[instance])
        self.repeats, self._remaining = True, 0

    def _begin(self, ranks: Ranks, step: int, segment: Segment, members: Ints) -> None:
        """Add up the times of a segment's tasks, up to a collective."""
        some = ranks.index_of(members)
        now_s = ranks.now_s[segment.stream][some]
        if segment.after:
            now_s = self._dependencies_end(ranks, step, segment, some, now_s)
        if segment.issues:
            now_s = self._issue(ranks, step, segment, some, now_s)
        elif places := segment.computed:
            now_s = self._compute(ranks, step, places, some, now_s)
        if segment.communication is None:
            self._end(ranks, step, segment, members, now_s)
            return
        ranks.began_s[step, segment.tasks[-1], some] = now_s
        self._arrive(ranks, step, segment, members, now_s)

    def _compute(self, ranks: Ranks, step: int, places: Sequence[int], some: Index, now_s: Floats) -> Floats:
        """Add up the times of consecutive tasks, one after another as for a rank alone; return the end of the last."""
        began_s, ended_s = ranks.began_s[step], ranks.ended_s[step]
        if len(places) > MOST_ONE_BY_ONE:
            rows = ranks.rows_of(places, some)
            times_s = np.add.accumulate(np.concatenate([now_s[None], ranks.duration_s[rows]]))
            began_s[rows], ended_s[rows] = times_s[:-1], times_s[1:]
            last_s: Floats = times_s[-1]
            return last_s
        for place in places:
            began_s[place, some] = now_s
            now_s = now_s + ranks.duration_s[place, some]
            ended_s[place, some] = now_s
        return now_s

    def _issue(self, ranks: Ranks, step: int, segment: Segment, some: Index, now_s: Floats) -> Floats:
        """Add up the times of a segment's tasks, some of which the host issues; return the end of the last one before
        a collective.
        """
        for place in segment.tasks:
            task = ranks.task_group.tasks[place]
            if task.communication is not None:
                break
            ranks.began_s[step, place, some] = began_s = now_s
            if ranks.takes_time[place]:
                now_s = now_s + ranks.duration_s[place, some]
            if task.issue is not None:  # as in `MachineState.issued_s`
                host_s = ranks.task_group.host_s[place, ranks.columns][some]
                ranks.issued_s[some] = (ranks.issued_s[some] if task.issue.goes_on else began_s) + host_s
                now_s = np.maximum(now_s, ranks.issued_s[some])
            ranks.ended_s[step, place, some] = now_s
        return now_s

    def _dependencies_end(self, ranks: Ranks, step: int, segment: Segment, some: Index, now_s: Floats) -> Floats:
        """Return the times at which ranks may start a segment, given the ends of its dependencies on other streams,
        which are all known.
        """
        ends_s = [ranks.ended_s[step, ranks.place[each], some] for each in segment.after]
        latest_s = reduce(np.maximum, ends_s)
        if segment.stream == "compute":
            waits = latest_s > now_s
            if waits.any():
                late = len(ends_s) - 1 - np.argmax(np.greater(ends_s[::-1], now_s), axis=0) if len(ends_s) > 1 else 0
                ranks.wait_s[step, segment.tasks[0], some] = now_s
                ranks.awaited[step, segment.tasks[0], some] = np.where(waits, late, -1)
        return np.maximum(latest_s, now_s)

    def _end(self, ranks: Ranks, step: int, segment: Segment, members: Ints, now_s: Floats | float) -> None:
        """End a segment, and make ready the segments for which it was the last pending dependency."""
        ranks.now_s[segment.stream][ranks.index_of(members)] = now_s
        self._remaining -= len(members)
        if not step:
            self._left_in_first -= len(members)
        stream = ranks.task_group.shape.streams[segment.stream]
        last = segment is stream[-1]
        following = stream[0] if last else stream[segment.number - stream[0].number + 1]
        if step + last < self.steps:
            self._release(ranks, step + last, following, members)
        for number in ranks.task_group.shape.waiting[segment.number]:
            self._release(ranks, step, ranks.task_group.shape.segments[number], members)

    def _release(self, ranks: Ranks, step: int, segment: Segment, members: Ints) -> None:
        """Count down a pending dependency of a segment; ranks for which it was the last one are ready."""
        ready = ranks.release(step, segment, members)
        if len(ready):
            self._ready.append((ranks, step, segment, ready))

    def _joined_collective(self, ranks: Ranks, segment: Segment) -> _Joined:
        """Return the collective that a segment ends with."""
        key = (id(ranks), segment.number)
        if key not in self._joined:
            collective = segment.communication
            assert collective is not None
            name, instances = self._names.setdefault(collective, len(self._names)), self.machine.instances[collective]
            numbers, only = self._numbers_of(ranks, instances)
            self._joined[key] = _Joined(name, instances, self._delays_of(instances), numbers, only)
        return self._joined[key]

    def _arrive(self, ranks: Ranks, step: int, segment: Segment, members: Ints, now_s: Floats) -> None:
        """Record the arrival of ranks at a collective; the last arrivals start it."""
        joined = self._joined_collective(ranks, segment)
        if joined.delays_s is not None and len(joined.instances) > 1:
            self._arrive_at_known(joined, ranks, step, segment, members, now_s)
            return
        if joined.only is not None:
            self._join(joined, joined.only, ranks, step, segment, members, now_s)
            return
        numbers = joined.numbers[members]
        for number in distinct(numbers).tolist():
            inside = numbers == number
            self._join(joined, number, ranks, step, segment, members[inside], now_s[inside])

    def _join(
        self,
        joined: _Joined,
        number: int,
        ranks: Ranks,
        step: int,
        segment: Segment,
        members: Ints,
        now_s: Floats,
    ) -> None:
        """Record the arrival of ranks at an instance of a collective; the last arrivals start it."""
        key, instance, delays_s = (step, joined.name, number), joined.instances[number], joined.delays_s
        arrivals = self._arrivals.get(key)
        if arrivals is None:
            arrivals = self._arrivals[key] = _Arrivals(len(instance.classes))
        arrivals.missing -= len(members)
        arrivals.latest_s = max(arrivals.latest_s, float(np.maximum.reduce(now_s)))
        arrivals.arrived.append((ranks, step, segment, members))
        if arrivals.missing:
            return
        del self._arrivals[key]
        if delays_s is None:
            self._start(instance, step, arrivals)
            return
        end_s = arrivals.latest_s
        for delay_s in delays_s[:, 0].tolist():  # as by the clock
            end_s += delay_s
        self._end_instance(arrivals, end_s)
        self._count(instance)
        self._ahead[instance] += step > 0

    @cached_property
    def _links_in_turn(self) -> frozenset[int]:
        return links_used_in_turn(self.machine)

    def count(self, collective: TaskId) -> int:
        """Return the number of instances of a collective."""
        return len(self.machine.instances[collective])

    def delays_s(self, collective: TaskId) -> Floats | None:
        """Return the delays of each instance of a collective (indexed by delay and instance); None if they depend on
        other traffic.
        """
        return self._delays_of(self.machine.instances[collective])

    def _delays_of(self, instances: Instances) -> Floats | None:
        if instances not in self._delays:
            found = [delays_of_collective(self.machine, each, self._links_in_turn) for each in instances]
            known = [each for each in found if each is not None]
            count = max(map(len, known), default=0)
            self._delays[instances] = (
                np.array([(*each, *(0.0,) * (count - len(each))) for each in known]).T
                if len(known) == len(found)
                else None
            )
        return self._delays[instances]

    def _arrive_at_known(
        self, joined: _Joined, ranks: Ranks, step: int, segment: Segment, members: Ints, now_s: Floats
    ) -> None:
        """Record the arrival of ranks at a collective of known duration. Instances that are complete end at once, ahead
        of the clock.
        """
        key = (step, joined.name)
        if key not in self._known:
            assert joined.delays_s is not None
            self._known[key] = _KnownTimes(joined.instances, joined.delays_s)
        known, numbers = self._known[key], joined.numbers[members]
        known.arrived.append((ranks, segment, members, numbers))
        if not known.join(numbers, now_s):
            return
        ends_s, arrived, known.arrived = known.ends_s(), known.arrived, []
        for others, theirs, some, places in arrived:
            complete = known.missing[places] == 0
            if complete.all():
                done, end_s = some, ends_s[places]
            else:
                known.arrived.append((others, theirs, some[~complete], places[~complete]))
                done, end_s = some[complete], ends_s[places[complete]]
            if len(done):
                others.ended_s[step, theirs.tasks[-1], others.index_of(done)] = end_s
                self._end(others, step, theirs, done, end_s)
        if not known.missing.any():
            del self._known[key]
            for instance in joined.instances:
                self._count(instance)
                self._ahead[instance] += step > 0

    def _count(self, instance: CollectiveInstance, times: int = 1) -> None:
        """Count the bytes of a collective that was not carried out by the clock."""
        for stage in instance.schedule.stages:
            self.machine.network.count(stage, times)
            self.machine.count_bytes(stage, times)

    def instance_of(self, ranks: Ranks, collective: TaskId) -> Ints:
        """Return the number of the collective instance in which each class takes part."""
        return self._numbers_of(ranks, self.machine.instances[collective])[0]

    def _numbers_of(self, ranks: Ranks, instances: Instances) -> tuple[Ints, int | None]:
        """Return the number of the instance in which each class takes part; and that of all, if it is the same one."""
        key = (id(ranks), instances)
        if len(instances) == 1:
            return np.zeros(len(ranks.classes), np.int64), 0
        if key not in self._numbers:
            of_class = {each.index: number for number, instance in enumerate(instances) for each in instance.classes}
            numbers = [of_class[each] for each in ranks.classes.tolist()]
            self._numbers[key] = np.array(numbers), numbers[0] if len(set(numbers)) == 1 else None
        return self._numbers[key]

    # By the clock -----------------------------------------------------------------------------------------------------

    def _start(self, instance: CollectiveInstance, step: int, arrivals: _Arrivals) -> None:
        """Carry out a collective whose last member has arrived."""
        start_s = max(arrivals.latest_s, float(self.machine.env.now))
        if step:
            self._further_begun_s = min(self._further_begun_s, start_s)
        if instance not in self._transfers:
            self._transfers[instance] = prepared_transfer(self.machine, instance)
        known = self._transfers[instance]
        if known is None:
            self.machine.env.process(self._run_instance(instance, step, start_s, arrivals))
            return
        transfer = partial(self._transfer, instance, step, known, arrivals)
        self.machine.env.call(reduce(add, known[0], start_s), transfer)

    def _transfer(
        self, instance: CollectiveInstance, step: int, known: PreparedTransfer, arrivals: _Arrivals, _event: object
    ) -> None:
        """Send the bytes of a collective."""
        if self.repeats:
            return
        self._further_sends |= step > 0
        for stage in instance.schedule.stages:
            self.machine.network.count(stage)
        _, prepared, reduction_s = known
        carry_prepared(self.machine, prepared, reduction_s, partial(self._transferred, instance, arrivals))

    def _transferred(self, instance: CollectiveInstance, arrivals: _Arrivals) -> None:
        for stage in instance.schedule.stages:
            self.machine.count_bytes(stage)
        self._end_instance(arrivals, float(self.machine.env.now))
        self._run_ready()

    def _run_instance(
        self, instance: CollectiveInstance, step: int, start_s: float, arrivals: _Arrivals
    ) -> Generator[simpy.Event, Any, None]:
        """Carry out a collective of several stages."""
        env = self.machine.env
        if start_s > env.now:
            yield env.at(start_s)
        if self.repeats:
            return
        self._further_sends |= step > 0
        yield from carry_out(self.machine, instance)
        self._end_instance(arrivals, float(env.now))
        self._run_ready()

    def _end_instance(self, arrivals: _Arrivals, end_s: float) -> None:
        for ranks, step, segment, members in arrivals.arrived:
            ranks.ended_s[step, segment.tasks[-1], ranks.index_of(members)] = end_s
            self._end(ranks, step, segment, members, end_s)

    # Outcome ----------------------------------------------------------------------------------------------------------

    def blocked_ranks(self) -> list[str]:
        """Return a line for each rank of a deadlock: the rank, its collective, and a rank that does not join this."""
        classes, texts = self.machine.classes, []
        named = list(self._names)
        waiting = [
            (self.machine.instances[named[name]][number], arrivals.arrived)
            for (_, name, number), arrivals in self._arrivals.items()
        ]
        for (step, _), known in self._known.items():
            for number, instance in enumerate(known.instances):
                inside = [(ranks, segment, some[places == number]) for ranks, segment, some, places in known.arrived]
                waiting.append((instance, [(ranks, step, segment, some) for ranks, segment, some in inside]))
        for instance, arrived_parts in waiting:
            arrived = {int(each) for ranks, _, _, members in arrived_parts for each in ranks.classes[members]}
            if not arrived:
                continue
            missing = sorted(each.representative for each in instance.classes if each.index not in arrived)
            cause = f"for rank {', '.join(map(str, missing))}"
            for ranks, _, segment, members in arrived_parts:
                task = ranks.task_group.tasks[segment.tasks[-1]].label
                for index in ranks.classes[members].tolist():
                    rank = classes[index].representative
                    texts.append((rank, f"rank {rank} ({segment.stream}) at {task!r}, {cause}"))
        return [text for _, text in sorted(texts or self._unmet_dependencies())]

    def _unmet_dependencies(self) -> list[tuple[int, str]]:
        """Return the tasks that wait for tasks of the same rank that never run."""
        texts = []
        for ranks in self.ranks:
            for stream, segments in ranks.task_group.shape.streams.items():
                waits = np.array([ranks.is_pending(step, each) for step in range(self.steps) for each in segments])
                for i, index in enumerate(ranks.classes.tolist()):
                    left = np.flatnonzero(waits[:, i])
                    task = ranks.task_group.tasks[segments[left[0] % len(segments)].tasks[0]] if len(left) else None
                    if task is not None and task.after:
                        rank, after = (
                            self.machine.classes[index].representative,
                            ", ".join(repr(each.label) for each in task.after),
                        )
                        texts.append((rank, f"rank {rank} ({stream}) at {task.label!r}, after {after}"))
        return texts

    def ends_s(self) -> list[list[float]]:
        """Return the end times of each class's steps."""
        by_class: dict[int, list[float]] = {}
        for ranks in self.ranks:
            last = ranks.task_group.shape.streams["compute"][-1].tasks[-1]
            by_class |= dict(zip(ranks.classes.tolist(), ranks.ended_s[:, last].T.tolist(), strict=True))
        return [by_class[index] for index in sorted(by_class)]

    def task_spans(self) -> list[TaskSpan]:
        """Return the busy intervals of each class's streams."""
        spans: list[TaskSpan] = []
        for ranks in self.ranks:
            names = [self.machine.classes[index].representative for index in ranks.classes.tolist()]
            for step in range(self.steps):
                for place, task in enumerate(ranks.task_group.tasks):
                    for i in np.flatnonzero(ranks.awaited[step, place] >= 0).tolist():
                        awaited = task.after[int(ranks.awaited[step, place, i])]
                        wait = ("exposed_communication", float(ranks.wait_s[step, place, i]))
                        end_s = float(ranks.began_s[step, place, i])
                        spans.append(TaskSpan(names[i], task.stream, task.id, *wait, end_s, awaited))
                    began_s, ended_s = ranks.began_s[step, place], ranks.ended_s[step, place]
                    for i in np.flatnonzero(ended_s > began_s).tolist():
                        span = (task.stream, task.id, task.phase, float(began_s[i]), float(ended_s[i]))
                        spans.append(TaskSpan(names[i], *span))
        return sorted(spans, key=lambda span: span.end_s)

    def peaks(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the memory peak of each class, by category."""
        program, steps = self.machine.program, self.steps
        for each in self.ranks:
            held = program.once(group_peaks_of, each.task_group, steps)
            peaks = held.peaks(each.began_s, each.ended_s, each.columns)
            yield from zip(each.classes.tolist(), peaks, strict=True)

    def phases(self, ends_s: Sequence[Sequence[float]], _step: int) -> list[dict[str, float]]:
        """Return each class's phases between its two `ends_s`, as `result.typical_phases` does."""
        by_class: dict[int, dict[str, float]] = {}
        for ranks in self.ranks:
            start_s, end_s = np.array([ends_s[index] for index in ranks.classes.tolist()]).T
            seconds = self._phase_times(ranks, start_s, end_s)
            rows = np.array([seconds[phase] for phase in PHASES])
            rows = rows * ((end_s - start_s) / sum(rows))
            for index, row in zip(ranks.classes.tolist(), rows.T.tolist(), strict=True):
                by_class[index] = dict(zip(PHASES, row, strict=True))
        return [by_class[index] for index in sorted(by_class)]

    def _phase_times(self, ranks: Ranks, start_s: Floats, end_s: Floats) -> dict[str, Floats]:
        """Return the time of ranks in each phase between two times; gaps are idle."""
        places, rows_of = ranks.task_group.shape.once(_rows_by_phase, self.steps)
        began_s, ended_s, there = self._compute_intervals(ranks, places)
        left_s, right_s = np.clip(began_s, start_s, end_s), np.clip(ended_s, start_s, end_s)
        busy_until_s = np.maximum.accumulate(np.concatenate([start_s[None], np.where(there, right_s, start_s)]))
        idle_s = np.where(there, np.maximum(0.0, left_s - busy_until_s[:-1]), 0.0)
        spent_s = np.where(there, right_s - left_s, 0.0)
        seconds = {phase: spent_s[rows].sum(axis=0) for phase, rows in rows_of.items()}
        seconds["idle"] += idle_s.sum(axis=0) + (end_s - busy_until_s[-1])
        return seconds

    def _compute_intervals(self, ranks: Ranks, places: Sequence[int]) -> tuple[Floats, Floats, Any]:
        """Return the intervals of the compute stream in order, as three arrays: begins, ends, and whether each exists.

        Each task, at one of `places` in the step, is preceded by the interval of its wait.
        """
        began_s, ended_s = ranks.began_s[:, places], ranks.ended_s[:, places]
        waited = ranks.awaited[:, places] >= 0
        shape = (2 * self.steps * len(places), len(ranks.classes))
        begins_s = np.stack([np.where(waited, ranks.wait_s[:, places], began_s), began_s], axis=2).reshape(shape)
        ends_s = np.stack([began_s, ended_s], axis=2).reshape(shape)
        there = np.stack([waited, ended_s > began_s], axis=2).reshape(shape)
        return begins_s, ends_s, there


def _rows_by_phase(shape: TaskShape, steps: int) -> tuple[list[int], Mapping[str, Ints]]:
    """Return the places of the compute stream's tasks in a step, and for each phase the indices of its intervals.

    Each task has two intervals, its wait and its execution; see `_compute_intervals`.
    """
    places = [place for place, stream in enumerate(shape.stream_of) if stream == "compute"]
    phases = np.array([["exposed_communication", shape.phases[place]] for place in places] * steps).ravel()
    return places, {phase: np.flatnonzero(phases == phase) for phase in PHASES}


def vectorised_walk_of(machine: MachineState, steps: int) -> VectorisedWalk:
    """Return the vectorised walk over all of a machine's classes."""
    task_groups = machine.program.once(task_groups_of, machine.shared)
    column = {role: (task_group, place) for task_group in task_groups for place, role in enumerate(task_group.roles)}
    inside: dict[TaskGroup, list[tuple[int, int]]] = defaultdict(list)
    for each in machine.classes:
        task_group, place = column[machine.roles[each.index]]
        inside[task_group].append((each.index, place))
    ranks = [
        Ranks(task_group, [index for index, _ in places], [place for _, place in places], steps)
        for task_group, places in inside.items()
    ]
    return VectorisedWalk(machine, ranks, steps)
