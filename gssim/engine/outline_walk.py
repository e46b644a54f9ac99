"""The walk of outlines: executes pipeline ranks, whose tasks repeat for every micro-batch, one chunk at a time.

[Note: outline] Between two messages, a pipeline rank runs a chunk (see [Note: chunks] in `program.task`): tasks of its
own, and collectives of its tensor group, some of them beside its tasks. If no other traffic of the program can cross
the links of such a collective, it always takes the same time, and so does the chunk. The chunk is then priced once, as
a row of delays, which are added one after another as the clock would add them. The condition holds if the collective
has one class of ranks, which makes all users of its links run one after another, and one session of flows. The
messages, the collectives after the schedule, and all others inside chunks run in simulated time: they start when the
last of their members arrives, on links that they may share. A chunk with such collectives is cut at these, and the
sections between them are priced once. That is so where ranks of pipelines divide sequences: they exchange keys and
values a few times in each layer, over links that messages cross too, between many collectives of the tensor group.

Like the vectorised walk, this is exact (but for rounding where collectives run beside tasks) if ranks are independent
between collectives ([Note: ahead] in `fast_path`) and only compute streams allocate memory.

[Note: repeated step] Suppose all ranks have ended their first step, and so far no rank has done anything in the second
but wait. Then the second step begins as the first did: that ranks wait already does not make them meet others earlier.
It takes as long from the latest end as the first step took from its beginning, and so do all later steps. Only ranks
that ended earlier wait longer for their first message. Most pipelines behave so, as their first stage ends last.

[Note: merged classes] Classes of one role often differ in nothing but the links that their reduction of gradients
crosses: the ends of a ring or a tree, and the ranks inside. Suppose that their chunks take equally long, that each
joins every collective with the same other classes, or with classes that are merged too, and that these collectives take
equally long on idle links. Then all of them do the same at the same times, as long as collectives that begin together
end together. They are executed as one, but with the collectives of each class, so that the network is simulated as it
would be without merging. If two of these collectives end at different times, because other traffic shares the links of
only one, the program is run again without merging.

[Note: merged roles] Ranks of one stage that own different tensors (ZeRO-1) have different roles, which differ only in
how long their updates take. Classes of such roles are merged too. At and after the first task that takes different
times, the compute stream has a time for each role, until a collective that all of them join, or a wait, makes the
times equal again. Streams that wait for such a task, and then join collectives, go on at the latest of these times.
That is right if each instance of these collectives has members of all the merged roles, by which classes are told
apart. If unequal times have other consequences, the program is run again without merging.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import repeat
from math import inf
from operator import add
from typing import Any, Literal, NamedTuple

import simpy

from gssim.collectives import Communication
from gssim.engine.collective_instances import CollectiveInstance
from gssim.engine.fast_path import is_independent
from gssim.engine.memory_tracker import allocates_beside_compute
from gssim.engine.rendezvous import (
    PreparedTransfer,
    call_at,
    carry_out,
    carry_prepared,
    delays_of_collective,
    prepared_transfer,
)
from gssim.engine.state import MachineState
from gssim.program import (
    Awaited,
    Chunk,
    MessageName,
    Name,
    Outline,
    Posted,
    Program,
    Task,
    TaskId,
    Template,
    name_of,
    parts_of,
)
from gssim.result import PHASES


class _Piece(NamedTuple):
    """A task of a class of ranks, or a collective beside its compute stream, with the times that it takes."""

    delays_s: tuple[float, ...]
    """Seconds, to be added one after another."""
    host_s: float | None
    """Host time to issue the task; None if the task does not wait for the host."""
    goes_on: bool
    """`Issue.goes_on` of the task."""
    phase: str
    beside: Literal["", "begins", "ends"] = ""
    """For a collective beside the compute stream: whether it begins here (and takes `delays_s`), or is waited
    for here.
    """


class _Priced(NamedTuple):
    """A template's time for a class of ranks."""

    delays_s: tuple[float, ...]
    seconds: Mapping[str, float]
    """By phase."""
    pieces: tuple[_Piece, ...]
    """The template's tasks, if some wait for the host; these are then executed, and `delays_s` is empty."""
    instances: tuple[CollectiveInstance, ...]


class _Operation(NamedTuple):
    """One item of a stream of a role: a task or a chunk. All classes of the role share it."""

    after: tuple[int, ...]
    """Slots of the tasks on other streams that it waits for, the last of these first: as a rule it ends last, so that
    it is waited for once, and not each of many messages one after another.
    """
    slot: int
    """Slot in which its end is stored for tasks that wait for it; -1: none do."""
    template: int
    """Number of the chunk's template among those of the role that are priced; its time differs between classes; -1: the
    operation is a task.
    """
    pieces: tuple[_Piece, ...]
    """The time of a task on the compute stream."""
    collective: int
    """Number of the collective that it joins; -1: none."""
    phase: str


@dataclass(eq=False)
class _Rank:
    """Progress of merged classes of ranks through the steps; see [Note: merged classes]."""

    index: int
    """Index of the first of the classes."""
    classes: Sequence[int]
    """Indices of all of them."""
    role_of: Mapping[int, int]
    """For each of them, the place of its role among those of `unequal`; see [Note: merged roles]."""
    unequal: Mapping[int, Sequence[tuple[_Piece, ...]]]
    """Times, for each role, of the tasks on the compute stream that do not take equally long, by place there."""
    priced: Sequence[_Priced]
    """Times of its chunks, by number of the template."""
    slots: int
    steps: int
    known_s: Mapping[str, float]
    """Seconds that the compute stream spends in chunks, by phase; the same in every step."""
    instances: Sequence[CollectiveInstance]
    """Collectives inside a step's chunks, of all its classes, each listed as often as it is carried out."""
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
        self.ended_s = [[None] * self.slots for _ in range(self.steps)]
        self.seconds = [[dict.fromkeys(PHASES, 0.0) | dict(self.known_s)] for _ in range(self.steps)]

    def seconds_of(self, index: int, step: int) -> Mapping[str, float]:
        """Return the seconds by phase of one of the classes in a step."""
        several = self.seconds[step]
        return several[self.role_of[index]] if len(several) > 1 else several[0]

    def has_all_roles(self, instance: CollectiveInstance) -> bool:
        """Return whether classes of all the merged roles join an instance."""
        joined = {role for index, role in self.role_of.items() if index in instance.class_numbers}
        return joined == set(self.role_of.values())


@dataclass(frozen=True, eq=False)
class _JointInstances:
    """Instances of a collective that the same `_Rank`s join, each for some of its merged classes."""

    instances: tuple[CollectiveInstance, ...]
    ranks: int
    """Number of `_Rank`s that join."""


@dataclass(eq=False, slots=True)
class _Carried:
    """Progress of joint instances, which began together."""

    streams: Sequence["_Stream"]
    left: int
    """Number of instances that have not ended."""
    end_s: float = inf
    """Time at which the first ended."""


class UnequalClassesError(Exception):
    """Merged classes did not do the same at the same times; see [Note: merged classes] and [Note: merged roles]."""


@dataclass(eq=False, slots=True)
class _Stream:
    """Progress of one stream of merged classes of ranks."""

    rank: _Rank
    computes: bool
    operations: Sequence[_Operation]
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
            chunk = self.rank.priced[each.template] if each.template >= 0 else None
            if each.pieces or (chunk is not None and (chunk.delays_s or chunk.pieces)):
                return None
        return "exposed_communication"

    @property
    def is_issued_ahead(self) -> bool:
        """Whether the host issues the stream's first task of a step right after the last one of the step before."""
        priced = self.rank.priced
        pieces = (priced[each.template].pieces if each.template >= 0 else each.pieces for each in self.operations)
        return next((piece.goes_on for several in pieces for piece in several if piece.host_s is not None), False)


class _Section(NamedTuple):
    """A section of a template: tasks that are priced as one, or a single task that is executed in simulated time."""

    task: Task
    """The single task; or one that stands for several: it has their last one's identity, and waits as the first does.
    """
    template: Template | None = None
    """The tasks that it stands for."""


def _sections(template: Template, alone: Callable[[Task], bool]) -> Sequence[_Section]:
    """Return a template cut at the tasks that cannot be priced, and where the compute stream and these wait for each
    other; an empty sequence if it cannot be cut.

    `alone`: whether a task's collective takes the same time at all times, if no other task uses its links meanwhile.

    >>> first, gather, last = TaskId("forward", layer="a"), TaskId("gather-keys"), TaskId("forward", layer="b")
    >>> own = Task(first, "forward", duration_s=1.0), Task(last, "forward", duration_s=2.0, after=(gather,))
    >>> sum_up = Task(TaskId("all-reduce"), "exposed_communication", communication=TaskId("all-reduce"))
    >>> keys = Task(gather, "exposed_communication", "ring", communication=gather, after=(first,))
    >>> parts = _sections(Template((sum_up, own[0], keys, own[1])), lambda task: task is sum_up)
    >>> [(part.task.label, len(part.template.tasks) if part.template else None) for part in parts]
    [('forward a', 2), ('all-gather keys', None), ('forward b', 1)]
    """
    simulated = {task.id: task.stream for task in template.tasks if task.communication is not None and not alone(task)}
    awaited = {each for task in template.tasks if task.id in simulated for each in task.after}
    groups: list[list[Task]] = [[]]
    for task in template.tasks:
        if task.id in simulated or any(each in simulated for each in task.after):
            groups.append([])
        groups[-1].append(task)
        if task.id in simulated or task.id in awaited:
            groups.append([])
    sections: list[_Section] = []
    for tasks in filter(None, groups):
        first, last = tasks[0], tasks[-1]
        if first.id in simulated:
            sections.append(_Section(first))
        elif _is_in_turn(tasks, set(simulated.values())):
            after = tuple([each for each in first.after if each in simulated])
            sections.append(_Section(Task(last.id, last.phase, after=after), Template(tuple(tasks))))
        else:
            return ()
    return sections


def _is_in_turn(tasks: Sequence[Task], other_streams: Collection[str]) -> bool:
    """Return whether each collective of some tasks beside the compute stream begins after the task before it, has a
    stream other than those given, and is waited for before the next one begins.
    """
    beside: TaskId | None = None  # collective beside the compute stream that has not been waited for yet
    before: TaskId | None = None
    for task in tasks:
        if task.stream == "compute":
            if beside in task.after:
                beside = None
        elif beside is not None or before not in task.after or task.stream in other_streams:
            return False
        else:
            beside = task.id
        before = task.id
    return beside is None


class _Role:
    """A role's tasks as operations by stream."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.parts = parts_of(tasks)
        self.templates = {id(part.template): part.template for part in self.parts if isinstance(part, Chunk)}
        """By identity."""
        self.stream_of = {part.id: part.stream for part in self.parts if isinstance(part, Task)}
        """Streams of the tasks that are in no chunk."""
        self.slot_of: dict[Name, int] = {}
        """Slot of each task or part that others wait for."""
        inside: list[TaskId] = []
        """Tasks of chunks that are waited for on other streams; on its own, a chunk ends before what follows it."""
        for part in self.parts:
            if isinstance(part, Chunk):
                continue
            for name in part.after:
                if isinstance(name, TaskId) and name not in self.stream_of:
                    if part.stream == "compute":
                        continue
                    inside.append(name)
                self.slot_of.setdefault(name, len(self.slot_of))
        chunks = {part.last: part for part in self.parts if isinstance(part, Chunk)} if inside else {}
        self.waits_inside_chunks = not all(each in chunks for each in inside)
        """Whether another stream waits for a task that is not the last of its chunk."""
        for each in inside:
            if each in chunks:
                self.slot_of[each] = self.slot_of.setdefault(chunks[each], self.slot_of[each])

    def operations(
        self,
        whole: Collection[int],
        idle: Collection[int],
        cut: Mapping[int, Sequence[_Section]],
        numbers: Mapping[int, int],
        number: Callable[[Task | Posted], int],
    ) -> tuple[dict[str, list[_Operation]], int]:
        """Return the operations of each stream, and the number of slots.

        `whole`: `id`s of the templates that are priced as a whole; `idle`: of those that take no time. `cut`: the
        sections of templates that are priced in sections, by `id`. `numbers`: of priced templates, by `id`. `number`:
        gives the number of the collective that a task joins.
        """
        streams: dict[str, list[_Operation]] = defaultdict(list)
        compute = streams["compute"] = []
        slots, stream_of = dict(self.slot_of), dict(self.stream_of)
        for part in self.parts:
            slot = slots.get(name_of(part), -1)
            if isinstance(part, Posted):
                (before,) = part.after
                streams[part.stream].append(_Operation((slots[before],), slot, -1, (), number(part), part.phase))
            elif isinstance(part, Awaited):
                messages = tuple([slots[each] for each in reversed(part.after)])
                compute.append(_Operation(messages, slot, -1, (), -1, part.phase))
            elif isinstance(part, Task):
                self._add([part], streams, number, slots, stream_of)
            elif id(part.template) not in whole:
                sections = cut.get(id(part.template), ())
                tasks = part.with_ids([each.task for each in sections]) if sections else part.tasks
                if slot >= 0:
                    slots[tasks[-1].id] = slot
                templates = [-1 if each.template is None else numbers[id(each.template)] for each in sections]
                self._add(tasks, streams, number, slots, stream_of, templates)
            elif slot >= 0 or id(part.template) not in idle:
                compute.append(_Operation((), slot, numbers[id(part.template)], (), -1, ""))
        return streams, len(slots)

    @staticmethod
    def _add(
        tasks: Sequence[Task],
        streams: dict[str, list[_Operation]],
        number: Callable[[Task | Posted], int],
        slots: dict[Name, int],
        stream_of: dict[TaskId, str],
        templates: Sequence[int] = (),
    ) -> None:
        """Add the operations of tasks, and slots for those that they wait for.

        `templates`: for each task, the number of the template for which it stands; -1 if it is a task of its own. Empty
        if all are.
        """
        for each in (each for task in tasks for each in task.after):
            slots.setdefault(each, len(slots))
        stream_of.update((task.id, task.stream) for task in tasks if task.id in slots)
        for task, template in zip(tasks, templates or repeat(-1), strict=False):
            slot = slots.get(task.id, -1)
            others = [each for each in task.after if stream_of.get(each, "compute") != task.stream]  # not its own
            after = tuple([slots[each] for each in reversed(others)])
            collective = -1 if task.communication is None else number(task)
            pieces: tuple[_Piece, ...] = ()
            if collective < 0 and (task.duration_s or task.issue is not None):
                host_s, goes_on = (task.issue.host_s, task.issue.goes_on) if task.issue else (None, False)
                pieces = (_Piece((task.duration_s,), host_s, goes_on, task.phase),)
            if after or slot >= 0 or collective >= 0 or template >= 0 or pieces:
                streams[task.stream].append(_Operation(after, slot, template, pieces, collective, task.phase))


class _Operations(NamedTuple):
    """What the classes of a role do in a step."""

    priced: Mapping[int, Sequence[_Priced]]
    """Times of its templates, by class (index) and number of the template."""
    streams: Mapping[str, Sequence[_Operation]]
    slots: int

    @property
    def first_after_schedule(self) -> int:
        """Place on the compute stream of the first operation after all chunks."""
        places = [place for place, each in enumerate(self.streams["compute"]) if each.template >= 0]
        return places[-1] + 1 if places else 0

    def unequal_to(self, other: "_Operations") -> Collection[int] | None:
        """Return the places of tasks on the compute stream, all after the chunks, that do not take the same time in
        another role; None if anything else differs, other than the times of chunks.
        """
        beside = [name for name in self.streams if name != "compute"]
        if self.slots != other.slots or list(self.streams) != list(other.streams):
            return None
        if any(self.streams[name] != other.streams[name] for name in beside):
            return None
        if any(each.pieces for name in beside for each in self.streams[name]):
            return None
        own, others, last = self.streams["compute"], other.streams["compute"], self.first_after_schedule
        if len(own) != len(others) or own[:last] != others[:last]:
            return None
        unequal = [place for place in range(last, len(own)) if own[place] != others[place]]
        return unequal if all([_differs_in_time(own[place], others[place]) for place in unequal]) else None


def can_walk_outlines(machine: MachineState) -> bool:
    """Return whether a machine's program consists of outlines that meet the conditions of [Note: outline]."""
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

    def __init__(self, machine: MachineState, steps: int, *, merges_classes: bool = True) -> None:
        self.machine, self.steps, self.env, self.merges_classes = machine, steps, machine.env, merges_classes
        self.finished = machine.env.event()
        self._ready: deque[_Stream] = deque()
        self._is_running = False
        """Whether ready streams are being executed, so that what they end makes others ready without recursion."""
        self._met: dict[tuple[int, int, _JointInstances], list[_Stream]] = {}
        """Streams that have arrived at a collective, by step, collective and joint instances."""
        self._times: list[dict[CollectiveInstance, int]] = [defaultdict(int) for _ in range(steps)]
        """How often each instance was carried out in each step; instances that count themselves are in `_counted`."""
        self._counted: dict[CollectiveInstance, int] = defaultdict(int)
        """How often each instance that counts its own bytes was carried out in the first step."""
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
        self._prepared: dict[CollectiveInstance, PreparedTransfer | None] = {}
        self._instances: dict[int, dict[int, tuple[int, CollectiveInstance]]] = {}
        """For each collective (by `id`) and class: the number of its instance, and the instance."""
        self._numbers: dict[TaskId | MessageName, int] = {}
        self._instances_of_number: list[Mapping[int, tuple[int, CollectiveInstance]]] = []
        """`_instances` by number of the collective."""
        self._joint_instances: list[Mapping[int, _JointInstances]] = []
        """Instances that each class (by index) joins, by number of the collective."""
        self._owner_of_link = self._link_owners()
        self._own_links: dict[int, frozenset[int]] = {}
        """For each class, the classes of links that only its compute stream uses."""
        self._delays_s: dict[CollectiveInstance, tuple[float, ...] | None] = {}
        """Delays of collectives of one class; see `_alone_delays`."""
        self._kept: list[_Section] = []
        """All sections, to whose templates operations refer by `id`."""
        self.ranks, self._streams = self._made()
        self._left = self._in_first = len(self._streams)

    # Preparation ------------------------------------------------------------------------------------------------------

    def _link_owners(self) -> dict[int, int]:
        """Return, for each class of links, the class of ranks whose uses of it follow one another; -1 if there
        is none.
        """
        machine = self.machine
        owners: dict[int, int] = {}
        beside = self._beside_others()
        for several in machine.arranged.all:
            for instance in several:
                alone = len(instance.classes) == 1 and id(instance) not in beside
                owner = instance.classes[0].index if alone else -1
                for stage in instance.schedule.stages:
                    for group in machine.network.folded.of(stage).groups:
                        for link in group.links:
                            owners[link] = owner if owners.get(link, owner) == owner else -1
        return owners | dict.fromkeys(machine.network.busy_links, -1)

    def _beside_others(self) -> set[int]:
        """Return the `id`s of collectives of one class that may overlap with others of the class on the same links.

        These run beside the compute stream, which does not wait for them before it joins the others.
        """
        arranged, found = self.machine.arranged, set[int]()
        of_one_class: dict[int, bool] = {}
        """By `id` of the collective."""

        def is_of_one_class(exchange: Communication) -> bool:
            if id(exchange) not in of_one_class:
                of_one_class[id(exchange)] = all(len(each.classes) == 1 for each in arranged.of(exchange))
            return of_one_class[id(exchange)]

        for tasks in self.machine.program.tasks:
            for exchange, other in _collectives_at_once(tasks, is_of_one_class):
                others = [self._links_of(each) for each in arranged.of(other)] if other is not None else []
                for one in arranged.of(exchange):
                    if other is None or not all(map(self._links_of(one).isdisjoint, others)):
                        found.add(id(one))
        return found

    def _links_of(self, instance: CollectiveInstance) -> frozenset[int]:
        return frozenset().union(*(self.machine.network.folded.of(stage).links for stage in instance.schedule.stages))

    def _prepare(self, instance: CollectiveInstance) -> PreparedTransfer | None:
        """Return the cached transfer of an instance on idle links; None if its time there is not known beforehand."""
        if instance not in self._prepared:
            self._prepared[instance] = prepared_transfer(self.machine, instance)
        return self._prepared[instance]

    def _alone_delays(self, instance: CollectiveInstance, index: int) -> tuple[float, ...] | None:
        """Return the delays of a collective of only one class, on links of its own; None for other collectives."""
        if len(instance.classes) > 1:
            return None
        if index not in self._own_links:
            self._own_links[index] = frozenset(link for link, owner in self._owner_of_link.items() if owner == index)
        if instance not in self._delays_s:
            self._delays_s[instance] = delays_of_collective(self.machine, instance, self._own_links[index])
        return self._delays_s[instance]

    def _pieces(
        self, template: Template, index: int
    ) -> tuple[tuple[_Piece, ...], tuple[CollectiveInstance, ...]] | None:
        """Return a template's tasks with their times for a class, and its collectives; None if they do not take the
        same time at all times.
        """
        pieces, instances = [], []
        beside: TaskId | None = None  # collective beside the compute stream that has not been waited for yet
        for task in template.tasks:
            if task.communication is None:
                if beside in task.after:
                    pieces.append(_Piece((), None, False, "exposed_communication", "ends"))  # as in `_must_wait`
                    beside = None
                host_s, goes_on = (task.issue.host_s, task.issue.goes_on) if task.issue else (None, False)
                pieces.append(_Piece((task.duration_s,) if task.duration_s else (), host_s, goes_on, task.phase))
                continue
            assert task.exchange is not None
            _, instance = self._instances_of(task.exchange)[index]
            instances.append(instance)
            delays_s = self._alone_delays(instance, index)
            if delays_s is None or beside is not None:
                return None
            beside = task.id if task.stream != "compute" else None
            pieces.append(_Piece(delays_s, None, False, task.phase, "" if beside is None else "begins"))
        return tuple(pieces), tuple(instances)

    def _priced(self, template: Template, index: int, *, added_up: bool) -> _Priced | None:
        """Return a template's time for a class; None if it is not the same at all times.

        `added_up`: whether tasks that do not wait for the host may become a row of delays.
        """
        found = self._pieces(template, index)
        if found is None:
            return None
        pieces, instances = found
        delays_s, seconds = _added_up(pieces)
        if not added_up or any(piece.host_s is not None for piece in pieces):
            return _Priced((), seconds, pieces, instances)
        return _Priced(delays_s, seconds, (), instances)

    def _instances_of(self, exchange: Communication) -> Mapping[int, tuple[int, CollectiveInstance]]:
        if id(exchange) not in self._instances:
            several = self.machine.arranged.of(exchange)
            self._instances[id(exchange)] = {
                each.index: (number, instance) for number, instance in enumerate(several) for each in instance.classes
            }
        return self._instances[id(exchange)]

    def _made(self) -> tuple[list[_Rank], list[_Stream]]:
        """Return the classes and their streams in their initial state."""
        machine, ranks, streams = self.machine, [], []
        by_role: dict[int, list[int]] = defaultdict(list)
        for each in machine.classes:
            by_role[machine.roles[each.index]].append(each.index)
        made = [self._operations_of(number, indices) for number, indices in by_role.items()]
        priced = {index: own for each in made for index, own in each.priced.items()}
        operations_of = {index: each for each in made for index in each.priced}
        merged = self._merged(made)
        for role in made:
            counts = Counter(each.template for each in role.streams["compute"] if each.template >= 0)
            for classes in dict.fromkeys(merged[index] for index in role.priced if merged[index][0] in role.priced):
                seconds: dict[str, float] = defaultdict(float)
                instances: list[CollectiveInstance] = []
                for template, count in counts.items():
                    instances += [each for index in classes for each in priced[index][template].instances] * count
                    own = priced[classes[0]][template]
                    for phase, value in own.seconds.items() if not own.pieces else ():
                        seconds[phase] += count * value
                roles = list({id(operations_of[index]): operations_of[index] for index in classes}.values())
                role_of = {
                    index: place for place, each in enumerate(roles) for index in classes if index in each.priced
                }
                unequal, own_priced = _unequal_pieces(roles), priced[classes[0]]
                rank = _Rank(
                    classes[0], classes, role_of, unequal, own_priced, role.slots, self.steps, seconds, instances
                )
                ranks.append(rank)
                streams += [_Stream(rank, name == "compute", several) for name, several in role.streams.items()]
        return sorted(ranks, key=lambda rank: rank.index), streams

    def _operations_of(self, role_number: int, indices: Sequence[int]) -> _Operations:
        """Return a role's operations, and times of its templates for each of its classes."""
        role = self.machine.program.once(_role_of, role_number)
        priced: dict[int, dict[int, _Priced]] = {index: {} for index in indices}
        whole: set[int] = set()
        cut: dict[int, Sequence[_Section]] = {}

        def is_priced(template: Template, *, added_up: bool) -> bool:
            found = [one for index in indices if (one := self._priced(template, index, added_up=added_up)) is not None]
            if len(found) < len(indices):
                return False
            for index, one in zip(indices, found, strict=True):
                priced[index][id(template)] = one
            return True

        for key, template in role.templates.items():
            if is_priced(template, added_up=True):
                whole.add(key)
                continue
            sections = self._sections_of(template, indices)
            self._kept += sections
            # their tasks are executed one by one, so that times add up as if these were in no section
            if all([each.template is None or is_priced(each.template, added_up=False) for each in sections]):
                cut[key] = sections
        idle = {
            key
            for key in whole
            if not any(own.delays_s or own.pieces or own.instances for own in (priced[i][key] for i in indices))
        }
        numbers = {key: number for number, key in enumerate(priced[indices[0]])}
        streams, slots = role.operations(whole, idle, cut, numbers, self._number)
        return _Operations({index: list(own.values()) for index, own in priced.items()}, streams, slots)

    def _sections_of(self, template: Template, indices: Sequence[int]) -> Sequence[_Section]:
        """Return a template's sections that take the same time at all times for each of some classes; none if it cannot
        be cut.
        """
        joined = {
            id(exchange): [(index, self._instances_of(exchange)[index][1]) for index in indices]
            for exchange in (task.exchange for task in template.tasks)
            if exchange is not None
        }
        is_alone = {
            key: all([self._alone_delays(each, index) is not None for index, each in several])
            for key, several in joined.items()
        }
        links: dict[bool, set[int]] = {True: set(), False: set()}
        for key, several in joined.items():
            links[is_alone[key]].update(*(self._links_of(each) for _, each in several))
        if not links[True].isdisjoint(links[False]):
            return ()  # a collective that is simulated crosses a link of this class on its way over links of others
        return _sections(template, lambda task: is_alone[id(task.exchange)])

    def _merged(self, roles: Sequence[_Operations]) -> Sequence[tuple[int, ...]]:
        """Return, for each class, those that it is merged with, itself included, and set up what they join; see
        [Note: merged classes] and [Note: merged roles].

        Classes are coloured by operations and times of templates, then by the colours with which they join collectives,
        until no more of them differ.
        """
        first: list[Hashable] = list(range(len(self.machine.classes)))
        role_of, unlike = list(first), set[int]()
        times = _times_of_classes(roles)
        alike = _alike(roles, times) if self.merges_classes else ()
        for number, (role, (first_role, unequal)) in enumerate(zip(roles, alike, strict=False)):
            unlike.update(_collectives_after(role, unequal))
            for index in role.priced:
                first[index], role_of[index] = (first_role, times[index]), number
        colours, distinct = _numbered(first), {id(each): each for each in self._instances_of_number}
        is_alone = max(colours) + 1 == len(colours)  # each class
        ids = {id(self._instances_of_number[number]) for number in unlike}
        shapes = dict.fromkeys((self._shape(each), key in ids) for key, each in (() if is_alone else distinct.items()))
        while True:
            met: list[list[Hashable]] = [[colour] for colour in colours]
            for shape, by_roles in shapes:
                for indices, kind in shape:
                    joining = ((colours[index], role_of[index] if by_roles else 0) for index in indices)
                    members = frozenset(joining), kind
                    for index in indices:
                        met[index].append(members)
            finer = _numbered(map(tuple, met))
            if max(finer) == max(colours):
                break
            colours = finer
        joint = {key: _joint_instances_of(by_class, colours) for key, by_class in distinct.items()}
        self._joint_instances = [joint[id(each)] for each in self._instances_of_number]
        return [tuple([index for index, other in enumerate(colours) if other == colour]) for colour in colours]

    def _shape(self, by_class: Mapping[int, tuple[int, CollectiveInstance]]) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return the classes of each instance of a collective, and a number that is equal if they take as long on
        idle links, as far as that is known beforehand.
        """
        instances = dict(by_class.values())
        times: list[Hashable] = []
        for each in instances.values():
            known = self._prepare(each)
            if known is None:
                times.append(None)
                continue
            delays_s, prepared, reduction_s = known
            sizes = None if prepared.sizes is None else prepared.sizes.tobytes()
            times.append((delays_s, sizes, prepared.processor_s, reduction_s))
        classes = [tuple([each.index for each in instance.classes]) for instance in instances.values()]
        return tuple(zip(classes, _numbered(times), strict=True))

    def _number(self, task: Task | Posted) -> int:
        """Return the number of the collective that a task joins."""
        name = task.communication
        assert name is not None
        assert task.exchange is not None
        if name not in self._numbers:
            self._numbers[name] = len(self._instances_of_number)
            self._instances_of_number.append(self._instances_of(task.exchange))
        return self._numbers[name]

    # Execution --------------------------------------------------------------------------------------------------------

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
        rank, operations = stream.rank, stream.operations
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
                    delays_s, _, pieces, _ = rank.priced[template]
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
        """Check whether all steps after the first repeat it, once all streams that ended it before the last one have
        gone on for as long as they need not wait.
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
        _wait(stream, "exposed_communication", latest_s)
        stream.is_apart = is_apart
        return False

    def _arrive(self, stream: _Stream, collective: int) -> None:
        """Let merged classes join a collective, by its number; the last arrival starts it."""
        joint = self._joint_instances[collective][stream.rank.index]
        if stream.is_apart and not all(map(stream.rank.has_all_roles, joint.instances)):
            raise UnequalClassesError
        key = (stream.step, collective, joint)
        streams = self._met.setdefault(key, [])
        streams.append(stream)
        if len(streams) == joint.ranks:
            del self._met[key]
            self._start(joint.instances, streams, max([each.now_s for each in streams]))

    def _start(self, instances: Sequence[CollectiveInstance], streams: Sequence[_Stream], start_s: float) -> None:
        """Carry out joint instances, starting at their last arrival."""
        known, step = self._prepare(instances[0]), streams[0].step  # equal for all instances
        ended = partial(self._end, streams)
        if len(instances) > 1:
            ended = partial(self._end_one, _Carried(streams, len(instances)))
        if step:
            self._further_s = min(self._further_s, start_s if known is not None else 0.0)  # it rules out repetition
        if known is None:
            for each in instances:
                self._counted[each] += not step
                self.env.process(self._carry_out(each, start_s, ended))
            return
        times = self._times[step]
        for each in instances:
            times[each] += 1
        begin_s = reduce(add, known[0], start_s)
        transfer = partial(self._transfer, instances, ended)
        if begin_s > self.env.now:
            call_at(self.env, begin_s, transfer)
        else:
            transfer()

    def _transfer(self, instances: Sequence[CollectiveInstance], ended: Callable[[], None]) -> None:
        """Carry the bytes of prepared instances from now on; `ended` is called at the end of each."""
        for each in instances:
            known = self._prepared[each]
            assert known is not None
            _, prepared, reduction_s = known
            carry_prepared(self.machine, prepared, reduction_s, ended)

    def _carry_out(
        self, instance: CollectiveInstance, start_s: float, ended: Callable[[], None]
    ) -> Generator[simpy.Event, Any, None]:
        """Carry out a collective of several stages."""
        if start_s > self.env.now:
            yield self.env.at(start_s)
        yield from carry_out(self.machine, instance)
        ended()

    def _end_one(self, carried: _Carried) -> None:
        """End one of several instances that began together."""
        carried.left -= 1
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
            times.update(of_step)
        for rank in self.ranks:
            for instance, count in Counter(rank.instances).items():
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
        rank_of = {index: rank for rank in self.ranks for index in rank.classes}
        return [rank_of[index] for index in range(len(rank_of))]


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """Return the number of each value among the distinct ones."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _unequal_pieces(roles: Sequence[_Operations]) -> Mapping[int, Sequence[tuple[_Piece, ...]]]:
    """Return the pieces, for each of some merged roles, of the tasks on the compute stream that do not take equally
    long, by place there.
    """
    if len(roles) == 1:
        return {}
    of_places = zip(*([each.pieces for each in role.streams["compute"]] for role in roles), strict=True)
    return {place: pieces for place, pieces in enumerate(of_places) if len(set(pieces)) > 1}


def _differs_in_time(one: _Operation, other: _Operation) -> bool:
    """Return whether two tasks are equal but for the times that they take on the device and on the host."""
    own, its = (
        each._replace(
            pieces=tuple(
                [piece._replace(delays_s=(), host_s=None if piece.host_s is None else 0.0) for piece in each.pieces]
            )
        )
        for each in (one, other)
    )
    return own == its


def _times_of_classes(roles: Sequence[_Operations]) -> Mapping[int, int]:
    """Return a number for each class (index), equal if their chunks take the same times."""
    indices = [index for role in roles for index in role.priced]
    times = (
        tuple([(each.delays_s, tuple(each.seconds.items()), each.pieces) for each in own])
        for role in roles
        for own in role.priced.values()
    )
    return dict(zip(indices, _numbered(times), strict=True))


def _alike(roles: Sequence[_Operations], times: Mapping[int, int]) -> Sequence[tuple[int, Collection[int]]]:
    """Return, for each role, the number of the first one to which it is equal but for the times of tasks after the
    schedule, and the places of all these tasks among those roles; see [Note: merged roles].

    `times`: those of `_times_of_classes`; roles of which no classes have equal ones are not compared.
    """
    places: dict[int, set[int]] = {}
    found: list[int] = []
    for number, role in enumerate(roles):
        for first, unequal in places.items():
            is_as_fast = not {times[index] for index in role.priced}.isdisjoint(map(times.get, roles[first].priced))
            if is_as_fast and (more := roles[first].unequal_to(role)) is not None:
                unequal.update(more)
                found.append(first)
                break
        else:
            places[number] = set()
            found.append(number)
    return [(first, places[first]) for first in found]


def _collectives_after(role: _Operations, places: Collection[int]) -> Iterator[int]:
    """Yield the numbers of the collectives of a role that come after any of some tasks on the compute stream."""
    if not places:
        return
    late = {each.slot for each in role.streams["compute"][min(places) :]} - {-1}
    for name, operations in role.streams.items():
        waits = (place for place, each in enumerate(operations) if not late.isdisjoint(each.after))
        first = min(places) if name == "compute" else next(waits, len(operations))
        yield from (each.collective for each in operations[first:] if each.collective >= 0)


def _joint_instances_of(
    by_class: Mapping[int, tuple[int, CollectiveInstance]], colours: Sequence[int]
) -> Mapping[int, _JointInstances]:
    """Return the joint instances of each class at a collective; `by_class`: number and instance that it joins."""
    joined: dict[frozenset[int], dict[int, CollectiveInstance]] = defaultdict(dict)
    for number, instance in by_class.values():
        joined[frozenset([colours[each.index] for each in instance.classes])][number] = instance
    by_colour = {
        colour: joint
        for members, several in joined.items()
        for joint in [_JointInstances(tuple(several.values()), len(members))]
        for colour in members
    }
    return {index: by_colour[colours[index]] for index in by_class}


def _collectives_at_once(
    tasks: Sequence[Task], counts: Callable[[Communication], bool]
) -> Iterator[tuple[Communication, Communication | None]]:
    """Yield each counted collective beside the compute stream, with every collective that the rank joins before the
    compute stream waits for it; paired with None if it is not waited for in this step.
    """
    going: dict[Name, Communication] = {}
    met: set[tuple[int, int]] = set()
    for part in parts_of(tasks):
        if not isinstance(part, Chunk) and part.stream == "compute":
            for name in part.after:
                going.pop(name, None)
        for each in going.values():
            key = (id(each), id(part.template if isinstance(part, Chunk) else part.exchange))
            if key not in met:
                met.add(key)
                others = (
                    part.template.collectives.values() if isinstance(part, Chunk) else filter(None, [part.exchange])
                )
                yield from ((each, other) for other in others)
        exchange = None if isinstance(part, Chunk) or part.stream == "compute" else part.exchange
        if exchange is not None and counts(exchange):
            going[name_of(part)] = exchange
    yield from ((each, None) for each in going.values())


def _added_up(pieces: Iterable[_Piece]) -> tuple[tuple[float, ...], Mapping[str, float]]:
    """Return the delays of pieces in sequence, and their time by phase, without host times.

    >>> work = _Piece((2.0,), None, False, "forward")
    >>> gather = _Piece((3.0,), None, False, "exposed_communication", "begins")
    >>> _added_up([gather, work, gather._replace(delays_s=(), beside="ends"), work])
    ((2.0, 1.0, 2.0), {'forward': 4.0, 'exposed_communication': 1.0})
    """
    delays_s: list[float] = []
    seconds: dict[str, float] = defaultdict(float)
    beside_s = 0.0
    for piece in pieces:
        if piece.beside == "begins":
            beside_s = sum(piece.delays_s)
            continue
        own_s = piece.delays_s
        if piece.beside == "ends":
            own_s = (beside_s,) if beside_s else ()
        delays_s += own_s
        seconds[piece.phase] += sum(own_s)
        beside_s = max(0.0, beside_s - sum(own_s))
    return tuple(delays_s), dict(seconds)


def _wait(stream: _Stream, phase: str, until_s: float) -> None:
    """Advance a stream to the end of a wait, at which all its roles still are; it counts as a phase."""
    if stream.computes:
        began_s = stream.apart_s or repeat(stream.now_s)
        for seconds, role_s in zip(stream.rank.seconds[stream.step], began_s, strict=False):
            seconds[phase] += until_s - role_s
    stream.now_s, stream.apart_s, stream.is_apart = until_s, [], False


def _after_pieces(stream: _Stream, pieces: Sequence[_Piece]) -> float:
    """Return the (latest) end of a stream's next task or chunk, given in pieces, and add its time to its phases."""
    rank, step = stream.rank, stream.step
    several = rank.unequal.get(stream.place) if stream.computes else None
    if several is None and (not stream.computes or len(rank.seconds[step]) == 1):
        now_s, seconds = stream.now_s, rank.seconds[step][0] if stream.computes else None
        for piece in pieces:
            now_s = _after_piece(rank, piece, now_s, seconds)
        return now_s
    roles = 1 + max(rank.role_of.values())
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


def _after_piece(rank: _Rank, piece: _Piece, began_s: float, seconds: dict[str, float] | None) -> float:
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
