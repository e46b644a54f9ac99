"""The walk of outlines: executes pipeline ranks, whose tasks repeat for every micro-batch, one chunk at a time.

It executes the operations of `outline_operations` (see [Note: outline] there): it adds up the delays of priced chunks,
and carries out messages and all other collectives in simulated time.

[Note: repeated step] Suppose all ranks have ended their first step, and so far no rank has done anything in the second
but wait. Then the second step begins as the first did: that ranks wait already does not make them meet others earlier.
It takes as long from the latest end as the first step took from its beginning, and so do all later steps. Only ranks
that ended earlier wait longer for their first message. Most pipelines behave so, as their first stage ends last.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import repeat
from math import inf
from operator import add
from typing import Any

import simpy

from gssim.engine.collective_instances import CollectiveInstance
from gssim.engine.merged_classes import JointInstances, MergedClasses, Merging
from gssim.engine.outline_operations import Operation, OutlineOperations, Piece
from gssim.engine.rendezvous import carry_out, carry_prepared
from gssim.engine.state import MachineState, PartOfMachine
from gssim.network import JointSessions, Prepared
from gssim.result import PHASES


@dataclass(eq=False)
class _Rank:
    """Progress of merged classes of ranks through the steps."""

    merged: MergedClasses
    steps: int
    index: int = field(init=False)
    """Index of the first of the classes."""
    ends_s: list[float] = field(default_factory=list)
    ended_s: list[list[float | None]] = field(init=False)
    """End of the task of each slot, by step."""
    seconds: list[list[dict[str, float]]] = field(init=False)
    """Seconds of the compute stream by phase, for each step: of all classes, or after an unequal task, of each role."""
    waiting: dict[tuple[int, int], list["_Stream"]] = field(default_factory=dict)
    issued_s: float = 0.0
    """Time at which the host had issued its latest task with an issue time."""
    issued_apart_s: list[float] = field(default_factory=list)
    """`issued_s` of each role, if these differ."""
    unequal_ends: set[tuple[int, int]] = field(default_factory=set)
    """Steps and slots of tasks that did not end at the same time for all roles; `ended_s` has the latest of them."""
    beside_s: float = 0.0
    """End of the latest collective beside the compute stream."""

    def __post_init__(self) -> None:
        """Make room for all steps."""
        self.index = self.merged.classes[0]
        self.ended_s = [[None] * self.merged.slots for _ in range(self.steps)]
        self.seconds = [[dict.fromkeys(PHASES, 0.0) | dict(self.merged.known_s)] for _ in range(self.steps)]

    def seconds_of(self, index: int, step: int) -> Mapping[str, float]:
        """Return the seconds by phase of one of the classes in a step."""
        several = self.seconds[step]
        return several[self.merged.role_of[index]] if len(several) > 1 else several[0]


@dataclass(eq=False, slots=True)
class _Carried:
    """Progress of joint instances, which began together."""

    streams: Sequence["_Stream"]
    left: int
    """Number of instances that have not ended."""
    end_s: float = inf
    """Time at which the first ended."""


class UnequalClassesError(Exception):
    """Merged classes did not do the same at the same times; see [Note: merged classes] and [Note: merged roles]
    in `merged_classes`.
    """


@dataclass(eq=False, slots=True)
class _Stream:
    """Progress of one stream of merged classes of ranks."""

    rank: _Rank
    computes: bool
    operations: Sequence[Operation]
    step: int = 0
    place: int = 0
    now_s: float = 0.0
    apart_s: list[float] = field(default_factory=list)
    """Time of each role on the compute stream, if these differ; `now_s` is then the latest."""
    is_apart: bool = False
    """Whether `now_s` is the latest of times that differ between roles."""

    @property
    def waits_first(self) -> str | None:
        """Phase of its wait at the beginning of a step; None if it does something at once."""
        for each in self.operations:
            if each.after or each.collective >= 0:
                return "exposed_communication" if each.after else each.phase
            chunk = self.rank.merged.priced[each.template] if each.template >= 0 else None
            if each.pieces or (chunk is not None and (chunk.delays_s or chunk.pieces)):
                return None
        return "exposed_communication"

    @property
    def is_issued_ahead(self) -> bool:
        """Whether the host issues the stream's first task of a step right after the last one of the step before."""
        priced = self.rank.merged.priced
        pieces = (priced[each.template].pieces if each.template >= 0 else each.pieces for each in self.operations)
        return next((piece.goes_on for several in pieces for piece in several if piece.host_s is not None), False)


class OutlineWalk(PartOfMachine):
    """Executes the outlines of all classes of a machine."""

    def __init__(self, machine: MachineState, steps: int, *, merges_classes: bool = True) -> None:
        super().__init__(machine)
        self.steps, self.env = steps, machine.env
        self.finished = machine.env.event()
        self._ready: deque[_Stream] = deque()
        self._is_running = False
        """Whether ready streams are being executed, so that what they end makes others ready without recursion."""
        self._met: dict[tuple[int, int, JointInstances], list[_Stream]] = {}
        """Streams that have arrived at a collective, by step, collective and joint instances."""
        self._times: list[dict[JointInstances, int]] = [defaultdict(int) for _ in range(steps)]
        """How often joint instances were carried out in each step; those that count themselves are in `_counted`."""
        self._counted: dict[JointInstances, int] = defaultdict(int)
        """How often those that count their own bytes were carried out in the first step."""
        self._joint: dict[JointInstances, JointSessions | None] = {}
        """The transfers of joint instances, if these are carried together; see [Note: joint transfers] in
        `gssim.network.transfers`.
        """
        self._first_end_s = 0.0
        """Latest end of a stream's first step."""
        self._further_s = inf
        """Earliest time, in any step after the first, at which a stream did something other than wait."""
        self._is_undecided = False
        """Whether all streams have ended the first step, and it is not known yet whether all others repeat that."""
        self._held: _Stream | None = None
        """The stream that ended the first step last, if no other ended it later; it goes on when that is known."""
        self.repeated_s: float | None = None
        """Duration of the first step, once all others are known to repeat it; see [Note: repeated step]."""
        self._operations = OutlineOperations(machine)
        merging = Merging.of(self._operations, merges_classes=merges_classes)
        self._joint_instances = merging.joint_instances
        ranks = [_Rank(each, steps) for each in merging.merged]
        self._streams = [
            _Stream(rank, name == "compute", several) for rank in ranks for name, several in rank.merged.streams.items()
        ]
        self.ranks = sorted(ranks, key=lambda rank: rank.index)
        self._left = self._in_first = len(self._streams)

    def run(self) -> None:
        """Execute all steps; raise RuntimeError if they cannot end."""
        self._ready.extend(self._streams)
        self._run_ready()
        self.env.run(until=self.finished)
        end_s = max(stream.now_s for stream in self._streams)
        if self.repeated_s is not None:
            self._repeat(self.repeated_s)
        elif end_s > self.env.now:
            self.env.run(until=self.env.at(end_s))
        for rank in self.ranks:
            rank.waiting.clear()  # streams of the next step: each refers to its rank; see [Note: no cycles] in `state`
        self._count_bytes()

    def _run_ready(self) -> None:
        if self._is_running:
            return
        self._is_running = True
        while self.repeated_s is None:
            if self._ready:
                self._advance(self._ready.popleft())
            elif self._is_undecided:
                self._compare_further_steps()
            else:
                break
        self._is_running = False
        if not self._left and not self.finished.triggered:
            self.finished.succeed()

    def _advance(self, stream: _Stream) -> None:
        """Execute a stream up to its next collective, or to a task that has not ended yet."""
        operations, priced = stream.operations, stream.rank.merged.priced
        place, now_s, step = stream.place, stream.now_s, stream.step
        while step < self.steps:
            while place < len(operations):
                after, slot, template, pieces, collective, _ = operations[place]
                if after:
                    stream.place, stream.now_s, stream.step = place, now_s, step
                    if self._must_wait(stream, after):
                        return
                    now_s = stream.now_s
                if collective >= 0:
                    stream.place, stream.now_s, stream.step = place, now_s, step
                    self._arrive(stream, collective)
                    return
                if template >= 0:
                    delays_s, _, pieces, _ = priced[template]
                    now_s = reduce(add, delays_s, now_s)
                if pieces:
                    stream.place, stream.now_s, stream.step = place, now_s, step
                    now_s = _after_pieces(stream, pieces)
                place += 1
                if slot >= 0:
                    self._end_task(stream, step, slot, now_s)
            place, step = 0, step + 1
            stream.place, stream.now_s, stream.step = place, now_s, step
            self._end_step(stream)
            if stream is self._held:
                return
        self._left -= 1

    def _end_task(self, stream: _Stream, step: int, slot: int, end_s: float) -> None:
        """Record the end of a task for which others may wait."""
        rank = stream.rank
        rank.ended_s[step][slot] = end_s
        if stream.is_apart:
            rank.unequal_ends.add((step, slot))
        self._ready.extend(rank.waiting.pop((step, slot), ()))

    def _end_step(self, stream: _Stream) -> None:
        """Record the end of a stream's step."""
        if stream.is_apart or (stream.computes and stream.rank.issued_apart_s and stream.is_issued_ahead):
            raise UnequalClassesError
        if stream.computes:
            stream.rank.ends_s.append(stream.now_s)
            stream.rank.issued_apart_s = []
        if stream.step > 1 or self.steps == 1:
            return
        if stream.waits_first is None:
            self._further_s = min(self._further_s, stream.now_s)
        self._first_end_s = max(self._first_end_s, stream.now_s)
        self._in_first -= 1
        if not self._in_first:
            self._is_undecided = True
            if stream.now_s == self._first_end_s:
                self._held = stream

    def _compare_further_steps(self) -> None:
        """End the walk if all further steps repeat the first one; else go on with the stream that ended it last.

        Called once the streams that ended the first step earlier have gone on as far as they can without waiting.
        """
        step_s = max(rank.ends_s[0] for rank in self.ranks)
        is_in_time = self._first_end_s <= step_s <= self._further_s
        self._is_undecided = False
        one_of_each = {
            id(stream.operations): stream for stream in self._streams
        }.values()  # a role's classes share them
        if is_in_time and not any(stream.is_issued_ahead for stream in one_of_each):
            self.repeated_s = step_s
            self.finished.succeed()
        elif self._held is not None:
            self._ready.append(self._held)
            self._held = None

    def _repeat(self, step_s: float) -> None:
        """Derive all further steps from the first; see [Note: repeated step]."""
        first_wait = {stream.rank.index: stream.waits_first for stream in self._streams if stream.computes}
        for rank in self.ranks:
            end_s, seconds = rank.ends_s[0], [dict(each) for each in rank.seconds[0]]
            rank.ends_s = [end_s + step * step_s for step in range(self.steps)]
            if end_s < step_s:
                phase = first_wait[rank.index]
                assert phase is not None, "it did nothing before the latest end"
                for each in seconds:
                    each[phase] += step_s - end_s
            rank.seconds[1:] = [seconds] * (self.steps - 1)
        further = Counter(self._times[0]) + Counter(self._counted)
        self._times[1:] = [further] * (self.steps - 1)

    def _must_wait(self, stream: _Stream, after: Sequence[int]) -> bool:
        """Advance a stream to the ends of tasks on other streams; return whether one of these has not ended yet."""
        rank, step, latest_s = stream.rank, stream.step, stream.now_s
        ended_s = rank.ended_s[step]
        for each in after:
            end_s = ended_s[each]
            if end_s is None:
                rank.waiting.setdefault((step, each), []).append(stream)
                return True
            latest_s = max(latest_s, end_s)
        is_apart = (stream.is_apart and latest_s == stream.now_s) or (
            bool(rank.unequal_ends) and any((step, each) in rank.unequal_ends for each in after)
        )
        if is_apart and stream.computes:
            raise UnequalClassesError
        if step and stream.operations[stream.place].collective < 0:
            self._further_s = min(self._further_s, latest_s)
        if latest_s > stream.now_s or stream.is_apart or stream.apart_s:
            _wait(stream, "exposed_communication", latest_s)
        stream.is_apart = is_apart
        return False

    def _arrive(self, stream: _Stream, collective: int) -> None:
        """Let merged classes join a collective, by its number; the last arrival starts it."""
        joint = self._joint_instances[collective][stream.rank.index]
        if stream.is_apart and not all(map(stream.rank.merged.has_all_roles, joint.instances)):
            raise UnequalClassesError
        key = (stream.step, collective, joint)
        streams = self._met.setdefault(key, [])
        streams.append(stream)
        if len(streams) == joint.ranks:
            del self._met[key]
            self._start(joint, streams, max([each.now_s for each in streams]))

    def _start(self, joint: JointInstances, streams: Sequence[_Stream], start_s: float) -> None:
        """Carry out joint instances, starting at their last arrival."""
        known, step = self._operations.transfer(joint.instances[0]), streams[0].step  # equal for all instances
        if step:
            self._further_s = min(self._further_s, start_s if known is not None else 0.0)  # it rules out repetition
        if known is None:
            self._counted[joint] += not step
            ended = self._completion_callback(joint, streams)
            for each in joint.instances:
                self.env.process(self._carry_out(each, start_s, ended))
            return
        self._times[step][joint] += 1
        begin_s = reduce(add, known[0], start_s)
        if begin_s > self.env.now:
            self.env.call(begin_s, partial(self._transfer, joint, streams))
        else:
            self._transfer(joint, streams)

    def _transfer(self, joint: JointInstances, streams: Sequence[_Stream], event: object = None) -> None:
        """Carry the bytes of prepared instances from now on; `event`: that of the clock, which calls this."""
        if joint not in self._joint:
            self._joint[joint] = self._joint_sessions(joint)
        sessions = self._joint[joint]
        if sessions is not None:
            carried = _Carried(streams, len(joint.instances))
            self.machine.network.start_joint(sessions, partial(self._end_some, carried), is_last=event is not None)
            return
        ended = self._completion_callback(joint, streams)
        for each in joint.instances:
            known = self._operations.transfer(each)
            assert known is not None
            _, prepared, reduction_s = known
            carry_prepared(self.machine, prepared, reduction_s, ended)

    def _completion_callback(self, joint: JointInstances, streams: Sequence[_Stream]) -> Callable[[], None]:
        """Return the callback for the end of one of the joint instances; that of the last one ends the collective."""
        if len(joint.instances) == 1:
            return partial(self._end, streams)
        return partial(self._end_some, _Carried(streams, len(joint.instances)), 1)

    def _joint_sessions(self, joint: JointInstances) -> JointSessions | None:
        """Return the sessions of joint instances, to be carried together; None if each needs a transfer of its own."""
        if len(joint.instances) == 1:
            return None
        several: list[Prepared] = []
        for each in joint.instances:
            known = self._operations.transfer(each)
            if known is None or known[2]:  # a reduction of received bytes follows
                return None
            several.append(known[1])
        return self.machine.network.joint(several)

    def _carry_out(
        self, instance: CollectiveInstance, start_s: float, ended: Callable[[], None]
    ) -> Generator[simpy.Event, Any, None]:
        """Carry out a collective of several stages."""
        if start_s > self.env.now:
            yield self.env.at(start_s)
        yield from carry_out(self.machine, instance)
        ended()

    def _end_some(self, carried: _Carried, count: int) -> None:
        """End some of several instances that began together."""
        carried.left -= count
        carried.end_s = min(carried.end_s, self.env.now)
        if carried.end_s < self.env.now:
            raise UnequalClassesError
        if not carried.left:
            self._end(carried.streams)

    def _end(self, streams: Sequence[_Stream]) -> None:
        """End a collective for its members, which then go on."""
        now_s = float(self.env.now)
        for stream in streams:
            joined = stream.operations[stream.place]
            _wait(stream, joined.phase, now_s)
            stream.place += 1
            if joined.slot >= 0:
                self._end_task(stream, stream.step, joined.slot, now_s)
            self._ready.append(stream)
        self._run_ready()

    # Outcome ----------------------------------------------------------------------------------------------------------

    def _count_bytes(self) -> None:
        """Count the bytes of all collectives that were carried out, for the report."""
        times = Counter[CollectiveInstance]()
        for of_step in self._times:
            for joint, count in of_step.items():
                for instance in joint.instances:
                    times[instance] += count
        for rank in self.ranks:
            for instance, count in rank.merged.instances.items():
                times[instance] += self.steps * count
        for instance, count in times.items():
            for stage in instance.schedule.stages:
                self.machine.network.count(stage, count)
                self.machine.count_bytes(stage, count)

    def phases(self, ends_s: Sequence[Sequence[float]], step: int) -> list[dict[str, float]]:
        """Return each class's phases in a step, between its two `ends_s`, as `result.typical_phases` does."""
        return [
            {phase: value * ((end_s - start_s) / sum(seconds.values())) for phase, value in seconds.items()}
            for (start_s, end_s), seconds in zip(
                ends_s, (rank.seconds_of(index, step) for index, rank in enumerate(self._by_class)), strict=True
            )
        ]

    def ends_s(self) -> Iterator[list[float]]:
        """Yield the end times of each class's steps."""
        return (rank.ends_s for rank in self._by_class)

    @property
    def _by_class(self) -> Sequence[_Rank]:
        """The rank that stands for each class."""
        rank_of = {index: rank for rank in self.ranks for index in rank.merged.classes}
        return [rank_of[index] for index in range(len(rank_of))]


def _wait(stream: _Stream, phase: str, until_s: float) -> None:
    """Advance a stream to the end of a wait, at which all its roles still are; it counts as a phase."""
    if stream.computes:
        began_s = stream.apart_s or repeat(stream.now_s)
        for seconds, role_s in zip(stream.rank.seconds[stream.step], began_s, strict=False):
            seconds[phase] += until_s - role_s
    stream.now_s, stream.apart_s, stream.is_apart = until_s, [], False


def _after_pieces(stream: _Stream, pieces: Sequence[Piece]) -> float:
    """Return the end (of several roles, the latest) of a stream's next task or chunk, in seconds of simulated time.

    The time of its pieces is added to the rank's phases.
    """
    rank, step = stream.rank, stream.step
    several = rank.merged.unequal.get(stream.place) if stream.computes else None
    if several is None and (not stream.computes or len(rank.seconds[step]) == 1):
        now_s, seconds = stream.now_s, rank.seconds[step][0] if stream.computes else None
        for piece in pieces:
            now_s = _after_piece(rank, piece, now_s, seconds)
        return now_s
    roles = 1 + max(rank.merged.role_of.values())
    if len(rank.seconds[step]) == 1:
        rank.seconds[step] = [dict(rank.seconds[step][0]) for _ in range(roles)]
    times_s, issued_s = stream.apart_s or [stream.now_s] * roles, rank.issued_apart_s or [rank.issued_s] * roles
    for role, seconds in enumerate(rank.seconds[step]):
        rank.issued_s = issued_s[role]
        for piece in pieces if several is None else several[role]:
            times_s[role] = _after_piece(rank, piece, times_s[role], seconds)
        issued_s[role] = rank.issued_s
    rank.issued_apart_s = issued_s if len(set(issued_s)) > 1 else []
    stream.is_apart = len(set(times_s)) > 1
    stream.apart_s = times_s if stream.is_apart else []
    return max(times_s)


def _after_piece(rank: _Rank, piece: Piece, began_s: float, seconds: dict[str, float] | None) -> float:
    """Return the end of a piece, and add its time to its phase; it may wait for the host: see
    `MachineState.issued_s`.
    """
    now_s = reduce(add, piece.delays_s, began_s)
    if piece.beside == "begins":
        rank.beside_s = now_s
        return began_s
    if piece.beside == "ends":
        now_s = max(began_s, rank.beside_s)
    if piece.host_s is not None:
        rank.issued_s = (rank.issued_s if piece.goes_on else began_s) + piece.host_s
        now_s = max(now_s, rank.issued_s)
    if seconds is not None:
        seconds[piece.phase] += now_s - began_s
    return now_s
