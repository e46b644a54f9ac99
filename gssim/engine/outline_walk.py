"""The walk of outlines: ranks of pipelines, whose tasks repeat for every micro-batch, with one step for each chunk.

[Note: outline] Between two messages a rank of a pipeline runs a chunk (see [Note: chunks] in `program.task`): tasks of
its own and collectives of its tensor group. Where no other traffic of the program can cross the links of such a
collective, it takes the same time whenever it begins, and so does the chunk: it is priced once, as a row of delays,
which are added one after another as the clock would add them. That holds if the collective has one class of ranks, on
whose compute stream all users of its links run one after another, and one session of flows. Chunks of other collectives
are taken apart into their tasks. What is left are messages and the collectives after the schedule, which take part in
simulated time: they start when the last of their members arrives, on links that they may share.

Like the vectorised walk, it is exact where ranks are independent between collectives ([Note: ahead] in `fast_path`) and
only compute streams allocate memory.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import simpy

from gssim import collectives
from gssim.collectives import Communication
from gssim.engine.collective_instances import CollectiveInstance
from gssim.engine.fast_path import is_independent
from gssim.engine.memory_tracker import allocates_beside_compute
from gssim.engine.rendezvous import carry_out
from gssim.network import Prepared
from gssim.program import Chunk, Outline, Program, Task, TaskId, Template, parts_of
from gssim.result import PHASES

if TYPE_CHECKING:
    from gssim.engine.machine import Machine


class _Piece(NamedTuple):
    """A task, or a chunk of a class, with the times that it takes."""

    delays_s: tuple[float, ...]
    """Added one after another."""
    host_s: float | None
    """Time of the host to issue it; None: it does not wait for the host."""
    goes_on: bool
    """See `Issue`."""
    phase: str


class _Priced(NamedTuple):
    """A template's time for a class of ranks."""

    delays_s: tuple[float, ...]
    seconds: Mapping[str, float]
    """By phase."""
    pieces: tuple[_Piece, ...]
    """Its tasks, where some wait for the host: then these count, and not the sums."""
    instances: tuple[CollectiveInstance, ...]


class _Operation(NamedTuple):
    """One step of a stream."""

    after: tuple[int, ...]
    """Slots of tasks of other streams that it waits for."""
    slot: int
    """Its own slot, where others wait for it; -1: none."""
    template: int
    """Number of the chunk's template; -1: a task."""
    task: Task | None
    meeting: int
    """Number of the collective that it joins; -1: none."""


@dataclass(eq=False)
class _Rank:
    """A class of ranks on its way through the steps."""

    index: int
    slots: int
    priced: Mapping[int, _Priced]
    """By number of the template."""
    steps: int
    ends_s: list[float] = field(default_factory=list)
    ended_s: list[list[float | None]] = field(init=False)
    """By step and slot."""
    seconds: list[dict[str, float]] = field(init=False)
    """Time of the compute stream by step and phase."""
    waiting: dict[tuple[int, int], list["_Stream"]] = field(default_factory=lambda: defaultdict(list))
    issued_s: float = 0.0
    """Time at which the host had issued its latest task with an issue time."""
    instance_of: dict[int, tuple[int, CollectiveInstance]] = field(default_factory=dict)
    """By number of the collective."""

    def __post_init__(self) -> None:
        """Make room for all steps."""
        self.ended_s = [[None] * self.slots for _ in range(self.steps)]
        self.seconds = [dict.fromkeys(PHASES, 0.0) for _ in range(self.steps)]


@dataclass(eq=False, slots=True)
class _Stream:
    """A stream of a class of ranks."""

    rank: _Rank
    name: str
    operations: Sequence[_Operation]
    step: int = 0
    place: int = 0
    now_s: float = 0.0


class _Role:
    """A role's tasks as operations by stream."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.parts = parts_of(tasks)
        names = (each for part in self.parts if isinstance(part, Task) for each in part.after)
        self.slot_of: dict[TaskId, int] = {}
        for name in names:
            self.slot_of.setdefault(name, len(self.slot_of))
        self.stream_of: dict[int, str] = {}
        """Stream of the task of each slot."""
        self.templates: dict[int, Template] = {}
        """By identity."""
        for part in self.parts:
            if isinstance(part, Chunk):
                self.templates[id(part.template)] = part.template
            elif part.id in self.slot_of:
                self.stream_of[self.slot_of[part.id]] = part.stream

    @property
    def waits_inside_chunks(self) -> bool:
        """Whether a task waits for one that is not at the end of a chunk."""
        last = {part.last for part in self.parts if isinstance(part, Chunk)}
        return any(slot not in self.stream_of and name not in last for name, slot in self.slot_of.items())

    def operations(self, whole: Callable[[Template], bool], number: Callable[[Task], int]) -> dict[str, Any]:
        """Return the operations of each stream; `whole`: whether a template is priced as a whole."""
        streams: dict[str, list[_Operation]] = defaultdict(list)
        streams["compute"] = []
        for part in self.parts:
            if isinstance(part, Task):
                self._add(streams, part, number)
            elif whole(part.template):
                slot = self.slot_of.get(part.last, -1)
                streams["compute"].append(_Operation((), slot, id(part.template), None, -1))
            else:
                for task in part.tasks:
                    self._add(streams, task, number)
        return streams

    def _add(self, streams: dict[str, list[_Operation]], task: Task, number: Callable[[Task], int]) -> None:
        after = [self.slot_of[each] for each in task.after]
        after = [slot for slot in after if self.stream_of.get(slot, "compute") != task.stream]  # else in its own order
        slot = self.slot_of.get(task.id, -1)
        meeting = -1 if task.communication is None else number(task)
        if after or slot >= 0 or meeting >= 0 or task.duration_s or task.issue is not None:
            streams[task.stream].append(_Operation(tuple(after), slot, -1, task, meeting))


def can_walk_outlines(machine: "Machine") -> bool:
    """Return whether a machine's program is made of outlines that can be walked; see [Note: outline]."""
    program = machine.program
    if not all(isinstance(tasks, Outline) for tasks in program.tasks):
        return False
    if any(instance.schedule.notices for several in machine.arranged.all for instance in several):
        return False
    roles = range(len(program.tasks))
    return (
        all(is_independent(machine, each.index) for each in machine.classes)
        and not any(program.once(allocates_beside_compute, role) for role in roles)
        and not any(program.once(_role_of, role).waits_inside_chunks for role in roles)
    )


def _role_of(program: Program, role: int) -> _Role:
    return _Role(program.tasks[role])


class OutlineWalk:
    """Executes the outlines of all classes of a machine."""

    def __init__(self, machine: "Machine", steps: int) -> None:
        self.machine, self.steps, self.env = machine, steps, machine.env
        self.finished = machine.env.event()
        self._ready: deque[_Stream] = deque()
        self._met: dict[tuple[int, int, int], tuple[list[_Stream], list[float]]] = {}
        """Streams at a collective, and when they arrived, by step, collective and instance."""
        self._times: dict[CollectiveInstance, int] = defaultdict(int)
        """Number of times that an instance was carried out, without those that count themselves."""
        self._prepared: dict[CollectiveInstance, tuple[tuple[float, ...], Prepared, float] | None] = {}
        self._numbers: dict[TaskId, int] = {}
        self._exchanges: list[Communication] = []
        """By number of the collective."""
        self._owner_of_link = self._link_owners()
        self.ranks, self._streams = self._made()
        self._left = len(self._streams)

    # Preparation ------------------------------------------------------------------------------------------------------

    def _link_owners(self) -> dict[int, int]:
        """Return, for each class of links, the class of ranks on whose compute stream all of its users run; -1: none."""
        machine, owners = self.machine, {}
        beside: set[int] = set()
        for tasks in machine.program.tasks:
            for part in parts_of(tasks):
                if isinstance(part, Task) and part.exchange is not None and part.stream != "compute":
                    beside |= set(map(id, machine.arranged.of(part.exchange)))
        for several in machine.arranged.all:
            for instance in several:
                alone = len(instance.classes) == 1 and id(instance) not in beside
                owner = instance.classes[0].index if alone else -1
                for stage in instance.schedule.stages:
                    for group in machine.network.folded.of(stage).groups:
                        for link in group.links:
                            owners[link] = owner if owners.get(link, owner) == owner else -1
        return owners | dict.fromkeys(machine.network.busy_links, -1)

    def _prepare(self, instance: CollectiveInstance) -> tuple[tuple[float, ...], Prepared, float] | None:
        """Return the delays before an instance's transfer, the transfer, and the time of the reduction behind it; None
        where it has several stages or groups of sessions.
        """
        if instance not in self._prepared:
            self._prepared[instance] = self._newly_prepared(instance)
        return self._prepared[instance]

    def _newly_prepared(self, instance: CollectiveInstance) -> tuple[tuple[float, ...], Prepared, float] | None:
        schedule, network = instance.schedule, self.machine.network
        first = (schedule.fixed_s,) if schedule.fixed_s else ()
        if schedule.measured or not schedule.stages:
            return first, Prepared(0.0, None, None, 0.0), 0.0
        if len(schedule.stages) > 1:
            return None
        (stage,) = schedule.stages
        prepared = network.prepared(stage, schedule.pace(stage))
        if prepared is None:
            return None
        reduction_s = collectives.reduction_s(self.machine.cluster, stage.reduced_bytes)
        return (*first, prepared.wait_s) if prepared.wait_s else first, prepared, reduction_s

    def _alone_delays(self, instance: CollectiveInstance, index: int) -> tuple[float, ...] | None:
        """Return the delays of a collective that only one class takes part in, on links of its own; None elsewhere."""
        known = self._prepare(instance)
        if known is None or len(instance.classes) > 1:
            return None
        first, prepared, reduction_s = known
        last = (reduction_s,) if reduction_s else ()
        if prepared.sessions is None:
            return (*first, prepared.processor_s, *last) if prepared.processor_s else (*first, *last)
        if any(self._owner_of_link[link] != index for link in prepared.sessions.links):
            return None
        alone_s = self.machine.network.single_session_s(prepared)
        return None if alone_s is None else (*first, max(alone_s, prepared.processor_s), *last)

    def _priced(self, template: Template, index: int) -> _Priced | None:
        """Return a template's time for a class; None where that is not the same at all times."""
        pieces, instances = [], []
        for task in template.tasks:
            if task.communication is None:
                host_s, goes_on = (task.issue.host_s, task.issue.goes_on) if task.issue else (None, False)
                delays_s: tuple[float, ...] | None = (task.duration_s,) if task.duration_s else ()
            else:
                assert task.exchange is not None
                _, instance = self._instance_of(task.exchange, index)
                instances.append(instance)
                host_s, goes_on, delays_s = None, False, self._alone_delays(instance, index)
            if delays_s is None:
                return None
            pieces.append(_Piece(delays_s, host_s, goes_on, task.phase))
        seconds: dict[str, float] = defaultdict(float)
        for piece in pieces:
            seconds[piece.phase] += sum(piece.delays_s)
        delays = tuple(delay_s for piece in pieces for delay_s in piece.delays_s)
        issued = tuple(pieces) if any(piece.host_s is not None for piece in pieces) else ()
        return _Priced(delays, dict(seconds), issued, tuple(instances))

    def _instance_of(self, exchange: Communication, index: int) -> tuple[int, CollectiveInstance]:
        """Return the number, and the instance, of a collective in which a class takes part."""
        for number, instance in enumerate(self.machine.arranged.of(exchange)):
            if any(each.index == index for each in instance.classes):
                return number, instance
        raise RuntimeError(f"class {index} takes part in no instance of {exchange.kind}")

    def _made(self) -> tuple[list[_Rank], list[_Stream]]:
        """Return the classes and their streams at the beginning."""
        machine, ranks, streams = self.machine, [], []
        by_role: dict[int, list[int]] = defaultdict(list)
        for each in machine.classes:
            by_role[machine.roles[each.index]].append(each.index)
        for role_number, indices in by_role.items():
            role = machine.program.once(_role_of, role_number)
            priced: dict[int, dict[int, _Priced]] = {index: {} for index in indices}
            for key, template in role.templates.items():
                found = [self._priced(template, index) for index in indices]
                for index, each in zip(indices, found, strict=True):
                    if each is not None and None not in found:
                        priced[index][key] = each
            known = priced[indices[0]]
            operations = role.operations(lambda template, known=known: id(template) in known, self._number)
            for index in indices:
                rank = _Rank(index, len(role.slot_of), priced[index], self.steps)
                ranks.append(rank)
                streams += [_Stream(rank, name, own) for name, own in operations.items()]
        return sorted(ranks, key=lambda rank: rank.index), streams

    def _number(self, task: Task) -> int:
        """Return the number of the collective that a task joins."""
        name = task.communication
        assert name is not None
        assert task.exchange is not None
        if name not in self._numbers:
            self._numbers[name] = len(self._exchanges)
            self._exchanges.append(task.exchange)
        return self._numbers[name]

    # Execution --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Execute all steps; raise RuntimeError where they cannot end."""
        self._ready.extend(self._streams)
        self._run_ready()
        self.env.run(until=self.finished)
        end_s = max(stream.now_s for stream in self._streams)
        if end_s > self.env.now:
            self.env.run(until=self.env.at(end_s))
        self._count_bytes()

    def _run_ready(self) -> None:
        while self._ready:
            self._advance(self._ready.popleft())
        if not self._left and not self.finished.triggered:
            self.finished.succeed()

    def _advance(self, stream: _Stream) -> None:
        """Execute a stream up to its next collective, or to a task that is not over yet."""
        rank, operations, step = stream.rank, stream.operations, stream.step
        computes = stream.name == "compute"
        while True:
            if stream.place == len(operations):
                if computes:
                    rank.ends_s.append(stream.now_s)
                stream.place, stream.step = 0, step + 1
                step += 1
                if step == self.steps:
                    self._left -= 1
                    return
                continue
            after, slot, template, task, meeting = operations[stream.place]
            if after:
                ended_s, latest_s = rank.ended_s[step], stream.now_s
                for each in after:
                    end_s = ended_s[each]
                    if end_s is None:
                        rank.waiting[step, each].append(stream)
                        return
                    latest_s = max(latest_s, end_s)
                if computes:
                    rank.seconds[step]["exposed_communication"] += latest_s - stream.now_s
                stream.now_s = latest_s
            if meeting >= 0:
                self._arrive(stream, meeting)
                return
            if template >= 0:
                priced = rank.priced[template]
                if priced.pieces:
                    for piece in priced.pieces:
                        self._add_piece(stream, piece)
                else:
                    stream.now_s = reduce(add, priced.delays_s, stream.now_s)
                    for phase, seconds in priced.seconds.items():
                        rank.seconds[step][phase] += seconds
            elif task is not None and (task.duration_s or task.issue is not None):
                host_s, goes_on = (task.issue.host_s, task.issue.goes_on) if task.issue else (None, False)
                self._add_piece(stream, _Piece((task.duration_s,), host_s, goes_on, task.phase))
            self._pass(stream, slot)

    def _add_piece(self, stream: _Stream, piece: _Piece) -> None:
        """Add the time of a task, which may wait for the host that issues it, as in `Machine.issued_s`."""
        rank, began_s = stream.rank, stream.now_s
        now_s = reduce(add, piece.delays_s, began_s)
        if piece.host_s is not None:
            rank.issued_s = (rank.issued_s if piece.goes_on else began_s) + piece.host_s
            now_s = max(now_s, rank.issued_s)
        if stream.name == "compute":
            rank.seconds[stream.step][piece.phase] += now_s - began_s
        stream.now_s = now_s

    def _pass(self, stream: _Stream, slot: int) -> None:
        """Go on to the next operation, and wake the streams that waited for this one."""
        stream.place += 1
        if slot >= 0:
            rank = stream.rank
            rank.ended_s[stream.step][slot] = stream.now_s
            self._ready.extend(rank.waiting.pop((stream.step, slot), ()))

    def _arrive(self, stream: _Stream, meeting: int) -> None:
        """Let a class join a collective; the last arrival starts it."""
        rank = stream.rank
        if meeting not in rank.instance_of:
            rank.instance_of[meeting] = self._instance_of(self._exchanges[meeting], rank.index)
        number, instance = rank.instance_of[meeting]
        key = (stream.step, meeting, number)
        if key not in self._met:
            self._met[key] = ([], [])
        streams, arrived_s = self._met[key]
        streams.append(stream)
        arrived_s.append(stream.now_s)
        if len(streams) == len(instance.classes):
            del self._met[key]
            self._start(instance, streams, max(arrived_s))

    def _start(self, instance: CollectiveInstance, streams: Sequence[_Stream], start_s: float) -> None:
        """Carry out a collective from its last arrival on."""
        known = self._prepare(instance)
        if known is None:
            self.env.process(self._carry_out(instance, streams, start_s))
            return
        self._times[instance] += 1
        first, prepared, reduction_s = known
        begin_s = reduce(add, first, start_s)
        begin = partial(self._transfer, prepared, reduction_s, streams)
        if begin_s > self.env.now:
            _call(self.env.at(begin_s), begin)
        else:
            begin()

    def _transfer(self, prepared: Prepared, reduction_s: float, streams: Sequence[_Stream]) -> None:
        """Start the bytes of a collective."""
        busy_until_s = self.env.now + prepared.processor_s
        end = partial(self._transferred, busy_until_s, reduction_s, streams)
        if prepared.sessions is None:
            end()
        else:
            _call(self.machine.network.start(prepared), end)

    def _transferred(self, busy_until_s: float, reduction_s: float, streams: Sequence[_Stream]) -> None:
        """End a collective once processors are done with its bytes, and have reduced them."""
        end_s = max(self.env.now, busy_until_s)
        if reduction_s:
            end_s += reduction_s
        if end_s > self.env.now:
            _call(self.env.at(end_s), partial(self._end, streams))
        else:
            self._end(streams)

    def _carry_out(
        self, instance: CollectiveInstance, streams: Sequence[_Stream], start_s: float
    ) -> Generator[simpy.Event, Any, None]:
        """Carry out a collective of several stages."""
        if start_s > self.env.now:
            yield self.env.at(start_s)
        yield from carry_out(self.machine, instance)
        self._end(streams)

    def _end(self, streams: Sequence[_Stream]) -> None:
        """Release the members of a collective."""
        now_s = float(self.env.now)
        for stream in streams:
            task = stream.operations[stream.place].task
            assert task is not None
            if stream.name == "compute":
                stream.rank.seconds[stream.step][task.phase] += now_s - stream.now_s
            stream.now_s = now_s
            self._pass(stream, stream.operations[stream.place].slot)
            self._ready.append(stream)
        self._run_ready()

    # Outcome ----------------------------------------------------------------------------------------------------------

    def _count_bytes(self) -> None:
        """Count the bytes of all collectives that were carried out."""
        times = self._times
        for stream in self._streams:
            for operation in stream.operations:
                if operation.template >= 0:
                    for instance in stream.rank.priced[operation.template].instances:
                        times[instance] += self.steps
        for instance, count in times.items():
            for stage in instance.schedule.stages:
                self.machine.network.count(stage, count)
                self.machine.count_bytes(stage, count)

    def phases(self, ends_s: Sequence[Sequence[float]]) -> list[dict[str, float]]:
        """Return each class's phases in the last step, between its two `ends_s`, as `result.typical_phases` does."""
        return [
            {phase: value * ((end_s - start_s) / sum(rank.seconds[1].values())) for phase, value in rank.seconds[1].items()}
            for rank, (start_s, end_s) in zip(self.ranks, ends_s, strict=True)
        ]

    def ends_s(self) -> Iterator[list[float]]:
        """Yield the end times of each class's steps."""
        return (rank.ends_s for rank in self.ranks)


def _call(event: simpy.Event, function: Callable[[], None]) -> None:
    """Call a function when an event takes place."""
    assert event.callbacks is not None
    event.callbacks.append(lambda _event: function())
