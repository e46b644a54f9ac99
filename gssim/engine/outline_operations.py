"""Operations of outlines: what each class of pipeline ranks does in a step, and how long its chunks take.

The tasks of a role become operations on streams, which all its classes share. The templates of its chunks are priced
for each class, as a whole or in sections. `merged_classes` finds classes that do the same at the same times, and
`outline_walk` executes the operations.

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
between collectives ([Note: fast path] in `fast_path`) and only compute streams allocate memory.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Literal, NamedTuple

from gssim.collectives import Communication
from gssim.engine.collective_instances import CollectiveInstance
from gssim.engine.fast_path import are_independent
from gssim.engine.memory_tracker import allocates_beside_compute
from gssim.engine.rendezvous import PreparedTransfer, delays_of_collective, prepared_transfer
from gssim.engine.state import MachineState, PartOfMachine
from gssim.execution.cache import Same
from gssim.program import (
    Awaited,
    Chunk,
    Name,
    Outline,
    Part,
    Parts,
    Posted,
    Program,
    Route,
    Task,
    TaskId,
    Template,
    name_of,
)


class Piece(NamedTuple):
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


class PricedTemplate(NamedTuple):
    """Time and collectives of a chunk's template on a class of ranks."""

    delays_s: tuple[float, ...]
    seconds: Mapping[str, float]
    """Time in each phase of a step."""
    pieces: tuple[Piece, ...]
    """The template's tasks, if some wait for the host; these are then executed, and `delays_s` is empty."""
    instances: Mapping[CollectiveInstance, int]
    """Its collectives, and how often it carries out each."""


class Operation(NamedTuple):
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
    pieces: tuple[Piece, ...]
    """The time of a task on the compute stream."""
    collective: int
    """Number of the collective that it joins; -1: none."""
    phase: str


class _Section(NamedTuple):
    """A section of a template: tasks that are priced as one, or a single task that is executed in simulated time."""

    task: Task
    """The single task; or one that stands for several: it has their last one's identity, and waits as the first does.
    """
    template: Template | None = None
    """The tasks that it stands for."""


def _sections(template: Template, alone: Callable[[Task], bool]) -> Sequence[_Section]:
    """Return a template cut into sections; an empty sequence if it cannot be cut.

    It is cut at each task that cannot be priced, and wherever the compute stream and such a task wait for each other.
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


class _Waits:
    """What others wait for in parts of an outline, the slots of these tasks and parts, and the streams of tasks."""

    def __init__(self, parts: Parts, before: "_Waits | None" = None) -> None:
        self.stream_of: dict[TaskId, str] = dict(before.stream_of) if before else {}
        """Streams of the tasks that are in no chunk."""
        self.slot_of: dict[Name, int] = dict(before.slot_of) if before else {}
        """Slot of each task or part that others wait for."""
        self.stream_of.update([(task.id, task.stream) for task in parts.plain])
        self.parts: Parts = parts
        inside, every = list(self._give_slots(parts)), chain(before.parts if before else (), parts)
        chunks = {part.last: part for part in every if isinstance(part, Chunk)} if inside else {}
        self.inside_chunks: bool = not all(each in chunks for each in inside) or (
            before is not None and before.inside_chunks
        )
        """Whether another stream waits for a task that is not the last of its chunk."""
        for each in inside:
            if each in chunks:
                self.slot_of[each] = self.slot_of.setdefault(chunks[each], self.slot_of[each])

    def _give_slots(self, parts: Parts) -> Iterator[TaskId]:
        """Give a slot to each task for which another waits; yield the tasks inside chunks among them.

        Tasks of the compute stream need not wait for chunks on it, which end before them.
        """
        slots = self.slot_of
        for part in parts:
            if isinstance(part, Chunk):
                continue
            for name in part.after:
                if isinstance(name, TaskId) and name not in self.stream_of:
                    if part.stream == "compute":
                        continue
                    yield name
                slots.setdefault(name, len(slots))


def _waits_in(_program: Program, parts: Same) -> _Waits:
    assert isinstance(parts.value, Parts)
    return _Waits(parts.value)


class _Role:
    """A role's tasks as operations by stream."""

    def __init__(self, program: Program, tasks: Outline) -> None:
        self.schedule, self.further = tasks.schedule, tasks.further
        self.templates = self.schedule.templates | self.further.templates
        """By identity."""
        self._first = program.once(_waits_in, Same(self.schedule))
        self._all = _Waits(self.further, self._first)
        self.waits_inside_chunks = self._all.inside_chunks
        """Whether another stream waits for a task that is not the last of its chunk."""

    def operations(
        self, chunks: "_PricedChunks", number: Callable[[Task | Posted], int], known: "dict[Hashable, _OperationWriter]"
    ) -> tuple[dict[str, list[Operation]], int]:
        """Return the operations of each stream, and the number of slots.

        `number`: gives the number of the collective that a task joins. `known`: what was written for the schedules of
        earlier roles. A role whose other tasks wait for the same parts of an equal schedule repeats that.
        """
        further = tuple(islice(self._all.slot_of.items(), len(self._first.slot_of), None))
        key = (id(self.schedule), chunks.key, further)
        if key not in known:
            written = _OperationWriter(defaultdict(list), dict(self._all.slot_of), dict(self._all.stream_of))
            written.streams["compute"] = []
            for part in self.schedule:
                written.add(part, chunks, number)
            known[key] = written
        written = known[key].copy_for_role(self._all.stream_of)
        for part in self.further:
            written.add(part, chunks, number)
        return written.streams, len(written.slots)


class _PricedChunks(NamedTuple):
    """How the chunks of a role are executed: templates as a whole, cut into sections, or not at all."""

    whole: Collection[int]
    """`id`s of the templates that are priced as a whole."""
    idle: Collection[int]
    """`id`s of those that take no time."""
    cut: Mapping[int, Sequence[_Section]]
    """The sections of templates that are priced in sections, by `id`."""
    numbers: Mapping[int, int]
    """Numbers of priced templates, by `id`."""

    @property
    def key(self) -> Hashable:
        """All of it as a part of a key; templates and sections live as long as what is cached by it."""
        cut = tuple([(template, id(sections)) for template, sections in self.cut.items()])
        return frozenset(self.whole), frozenset(self.idle), cut, tuple(self.numbers.items())


class _OperationWriter(NamedTuple):
    """The operations of a role's streams, which `add` appends part by part."""

    streams: dict[str, list[Operation]]
    slots: dict[Name, int]
    stream_of: dict[TaskId, str]

    def copy_for_role(self, stream_of: Mapping[TaskId, str]) -> "_OperationWriter":
        """Return a copy, to be continued with the tasks of another role, whose streams are given."""
        streams = defaultdict(list, {name: list(operations) for name, operations in self.streams.items()})
        return _OperationWriter(streams, dict(self.slots), {**self.stream_of, **stream_of})

    def add(self, part: Part, chunks: _PricedChunks, number: Callable[[Task | Posted], int]) -> None:
        """Add the operations of a part."""
        slots, compute = self.slots, self.streams["compute"]
        if isinstance(part, Task):
            self._add_tasks([part], number)
            return
        slot = slots.get(part, -1)
        if isinstance(part, Posted):
            (before,) = part.after
            self.streams[part.route.stream].append(Operation((slots[before],), slot, -1, (), number(part), part.phase))
        elif isinstance(part, Awaited):
            messages = tuple([slots[each] for each in reversed(part.after)])
            compute.append(Operation(messages, slot, -1, (), -1, part.phase))
        elif id(part.template) not in chunks.whole:
            sections = chunks.cut.get(id(part.template), ())
            tasks = part.with_ids([each.task for each in sections]) if sections else part.tasks
            if slot >= 0:
                slots[tasks[-1].id] = slot
            templates = [-1 if each.template is None else chunks.numbers[id(each.template)] for each in sections]
            self._add_tasks(tasks, number, templates)
        elif slot >= 0 or id(part.template) not in chunks.idle:
            compute.append(Operation((), slot, chunks.numbers[id(part.template)], (), -1, ""))

    def _add_tasks(
        self, tasks: Sequence[Task], number: Callable[[Task | Posted], int], templates: Sequence[int] = ()
    ) -> None:
        """Add the operations of tasks, and slots for those that they wait for.

        `templates`: for each task, the number of the template for which it stands; -1 if it is a task of its own. Empty
        if all are.
        """
        streams, slots, stream_of = self
        for each in (each for task in tasks for each in task.after):
            slots.setdefault(each, len(slots))
        stream_of.update((task.id, task.stream) for task in tasks if task.id in slots)
        for task, template in zip(tasks, templates or repeat(-1), strict=False):
            slot = slots.get(task.id, -1)
            others = [each for each in task.after if stream_of.get(each, "compute") != task.stream]  # not its own
            after = tuple([slots[each] for each in reversed(others)])
            collective = -1 if task.communication is None else number(task)
            pieces: tuple[Piece, ...] = ()
            if collective < 0 and (task.duration_s or task.issue is not None):
                host_s, goes_on = (task.issue.host_s, task.issue.goes_on) if task.issue else (None, False)
                pieces = (Piece((task.duration_s,), host_s, goes_on, task.phase),)
            if after or slot >= 0 or collective >= 0 or template >= 0 or pieces:
                streams[task.stream].append(Operation(after, slot, template, pieces, collective, task.phase))


class RoleOperations(NamedTuple):
    """The operations of ranks with the same program in a step: the times of templates, and the order in each stream."""

    priced: Mapping[int, Sequence[PricedTemplate]]
    """Times of its templates, by class (index) and number of the template."""
    streams: Mapping[str, Sequence[Operation]]
    slots: int


def can_walk_outlines(machine: MachineState) -> bool:
    """Return whether a machine's program consists of outlines that meet the conditions of [Note: outline]."""
    program = machine.program
    if not all(isinstance(tasks, Outline) for tasks in program.tasks):
        return False
    if any(instance.schedule.notices for several in machine.arranged.all for instance in several):
        return False
    roles = range(len(program.tasks))
    return (
        are_independent(machine)
        and not any(program.once(allocates_beside_compute, role) for role in roles)
        and not any(program.once(_role_of, role).waits_inside_chunks for role in roles)
    )


def _role_of(program: Program, role: int) -> _Role:
    tasks = program.tasks[role]
    assert isinstance(tasks, Outline)
    return _Role(program, tasks)


class OutlineOperations(PartOfMachine):
    """Operations of all classes of a machine in a step of its outlines, prepared for the walk."""

    def __init__(self, machine: MachineState) -> None:
        super().__init__(machine)
        self._transfers: dict[CollectiveInstance, PreparedTransfer | None] = {}
        self._instances: dict[int, dict[int, tuple[int, CollectiveInstance]]] = {}
        """For each collective (by `id`) and class: the number of its instance, and the instance."""
        self._numbers: dict[Hashable, int] = {}
        """Numbers of collectives that are not a pipeline's messages, by identity."""
        self._numbers_of_messages: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)
        """Numbers of pipelines' messages, by `Route.identity`, and then by micro-batch."""
        self._numbers_of_end: dict[int, dict[Hashable, int]] = {}
        """Values of `_numbers_of_messages` by `id` of a route: the two ends of a message have routes of their own."""
        self.instances_of_number: list[Mapping[int, tuple[int, CollectiveInstance]]] = []
        """For each collective by number, and each class: the number of its instance, and the instance."""
        self._owner_of_link = self._link_owners()
        self._own_links: dict[int, frozenset[int]] = {}
        """For each class, the classes of links that only its compute stream uses."""
        self._delays_s: dict[CollectiveInstance, tuple[float, ...] | None] = {}
        """Delays of collectives of one class; see `_alone_delays`."""
        self._kept: list[Sequence[_Section]] = []
        """All sections, to whose templates operations refer by `id`."""
        self._written: dict[Hashable, _OperationWriter] = {}
        """Operations of the schedules of roles."""
        by_role: dict[int, list[int]] = defaultdict(list)
        for each in machine.classes:
            by_role[machine.roles[each.index]].append(each.index)
        self.roles = [self._operations_of(number, indices) for number, indices in by_role.items()]

    def transfer(self, instance: CollectiveInstance) -> PreparedTransfer | None:
        """Return the cached transfer of an instance on idle links; None if its time there is not known beforehand."""
        if instance not in self._transfers:
            self._transfers[instance] = prepared_transfer(self.machine, instance)
        return self._transfers[instance]

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

        for exchange, other in _collectives_at_once(self.machine.program.tasks, is_of_one_class):
            others = [self._links_of(each) for each in arranged.of(other)] if other is not None else []
            for one in arranged.of(exchange):
                if other is None or not all(map(self._links_of(one).isdisjoint, others)):
                    found.add(id(one))
        return found

    def _links_of(self, instance: CollectiveInstance) -> frozenset[int]:
        return frozenset().union(*(self.machine.network.folded.of(stage).links for stage in instance.schedule.stages))

    def _alone_delays(self, instance: CollectiveInstance, index: int) -> tuple[float, ...] | None:
        """Return the delays of a collective of only one class, on links of its own; None for other collectives."""
        if len(instance.classes) > 1:
            return None
        if index not in self._own_links:
            self._own_links[index] = frozenset(link for link, owner in self._owner_of_link.items() if owner == index)
        if instance not in self._delays_s:
            self._delays_s[instance] = delays_of_collective(self.machine, instance, self._own_links[index])
        return self._delays_s[instance]

    def _priced(self, template: Template, index: int, *, added_up: bool) -> PricedTemplate | None:
        """Return a template's time for a class; None if it is not the same at all times.

        `added_up`: whether tasks that do not wait for the host may become a row of delays. Classes whose collectives
        take equally long share what is added up, also in programs of other numbers of micro-batches.
        """
        joined = template.exchanges
        instances = [self._instances_of(exchange)[index][1] for exchange, _ in joined]
        delays_s = [self._alone_delays(each, index) for each in instances]
        if None in delays_s:
            return None
        times = self.machine.shared.large.once(
            ("priced template", Same(template), added_up, tuple(delays_s)),
            lambda: _times_of(template, [each for each in delays_s if each is not None], added_up=added_up),
            weight=lambda _: len(template.tasks),
        )
        if times is None:
            return None
        counted: dict[CollectiveInstance, int] = {}
        for (_, times_joined), instance in zip(joined, instances, strict=True):
            counted[instance] = counted.get(instance, 0) + times_joined
        return PricedTemplate(*times, counted)

    def _instances_of(self, exchange: Communication) -> Mapping[int, tuple[int, CollectiveInstance]]:
        if id(exchange) not in self._instances:
            several = self.machine.arranged.of(exchange)
            self._instances[id(exchange)] = {
                each.index: (number, instance) for number, instance in enumerate(several) for each in instance.classes
            }
        return self._instances[id(exchange)]

    def _operations_of(self, role_number: int, indices: Sequence[int]) -> RoleOperations:
        """Return a role's operations, and times of its templates for each of its classes."""
        role = self.machine.program.once(_role_of, role_number)
        priced: dict[int, dict[int, PricedTemplate]] = {index: {} for index in indices}
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
            self._kept.append(sections)
            # their tasks are executed one by one, so that times add up as if these were in no section
            if all([each.template is None or is_priced(each.template, added_up=False) for each in sections]):
                cut[key] = sections
        idle = {
            key
            for key in whole
            if not any(own.delays_s or own.pieces or own.instances for own in (priced[i][key] for i in indices))
        }
        numbers = {key: number for number, key in enumerate(priced[indices[0]])}
        chunks = _PricedChunks(whole, idle, cut, numbers)
        streams, slots = role.operations(chunks, self._number, self._written)
        return RoleOperations({index: list(own.values()) for index, own in priced.items()}, streams, slots)

    def _sections_of(self, template: Template, indices: Sequence[int]) -> Sequence[_Section]:
        """Return a template's sections that take the same time at all times for each of some classes; none if it cannot
        be cut.
        """
        joined = {
            id(exchange): [(index, self._instances_of(exchange)[index][1]) for index in indices]
            for exchange, _ in template.exchanges
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
        # equal sections are the same objects, whose times and operations are worked out once
        like = ("sections", Same(template), tuple(is_alone.values()))
        found = partial(_sections, template, lambda task: is_alone[id(task.exchange)])
        return self.machine.shared.large.once(like, found, weight=lambda _: len(template.tasks))

    def _number(self, task: Task | Posted) -> int:
        """Return the number of the collective that a task joins."""
        name: Hashable
        if isinstance(task, Posted):
            numbers, name = self._numbers_of_route(task.route), task.micro_batch
        else:
            numbers, name = self._numbers, task.communication
        number = numbers.get(name)
        if number is None:
            assert task.exchange is not None
            number = numbers[name] = len(self.instances_of_number)
            self.instances_of_number.append(self._instances_of(task.exchange))
        return number

    def _numbers_of_route(self, route: Route) -> dict[Hashable, int]:
        """Return the numbers of the messages of a route, by micro-batch: its other end has the same."""
        numbers = self._numbers_of_end.get(id(route))
        if numbers is None:
            numbers = self._numbers_of_messages[route.identity]
            self._numbers_of_end[id(route)] = numbers
        return numbers


def _collectives_at_once(
    by_role: Iterable[Sequence[Task]], counts: Callable[[Communication], bool]
) -> Iterator[tuple[Communication, Communication | None]]:
    """Yield each counted collective beside the compute stream, with every collective that the rank joins before the
    compute stream waits for it; paired with None if it is not waited for in this step.
    """
    after: dict[int, Mapping[Name, Communication]] = {}
    """Collectives that are not waited for yet at the end of a schedule, by its `id`."""
    for tasks in by_role:
        assert isinstance(tasks, Outline)
        going = dict(after.get(id(tasks.schedule), {}))
        if id(tasks.schedule) not in after:
            yield from _overlapping_collectives(tasks.schedule, going, counts)
            after[id(tasks.schedule)] = dict(going)
        yield from _overlapping_collectives(tasks.further, going, counts)
        yield from ((each, None) for each in going.values())


def _overlapping_collectives(
    parts: Parts, going: dict[Name, Communication], counts: Callable[[Communication], bool]
) -> Iterator[tuple[Communication, Communication]]:
    """Yield each counted collective beside the compute stream, with every one that is joined before it is waited for.

    `going`: the collectives in flight, by name. The caller passes those in flight before the parts; when the iteration
    ends, it holds those in flight after them.
    """
    joined = (each for each in parts.distinct if not isinstance(each, Chunk) and each.stream != "compute")
    if not going and not any(each.exchange is not None and counts(each.exchange) for each in joined):
        return
    met: set[tuple[int, int]] = set()
    for part in parts:
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


_Times = tuple[tuple[float, ...], Mapping[str, float], tuple[Piece, ...]]
"""The first fields of `PricedTemplate`."""


def _times_of(template: Template, delays_s: Sequence[tuple[float, ...]], *, added_up: bool) -> _Times | None:
    """Return the times of a template whose collectives, in the order of their first tasks, take some delays on their
    own; None if these run beside one another. `added_up`: see `OutlineOperations`.
    """
    exchanges = dict.fromkeys(id(task.exchange) for task in template.tasks if task.exchange is not None)
    pieces = _pieces_of(template, dict(zip(exchanges, delays_s, strict=True)))
    if pieces is None:
        return None
    in_all_s, seconds = _total_delays_and_times(pieces)
    if not added_up or any(piece.host_s is not None for piece in pieces):
        return (), seconds, pieces
    return in_all_s, seconds, ()


def _pieces_of(template: Template, delays_s: Mapping[int, tuple[float, ...]]) -> tuple[Piece, ...] | None:
    """Return a template's tasks with their times; None if collectives run beside one another.

    `delays_s`: those of its collectives, by `id`.
    """
    pieces: list[Piece] = []
    beside: TaskId | None = None  # collective beside the compute stream that has not been waited for yet
    for task in template.tasks:
        if task.exchange is None:
            if beside in task.after:
                pieces.append(Piece((), None, False, "exposed_communication", "ends"))  # as in the walk's `_must_wait`
                beside = None
            host_s, goes_on = (task.issue.host_s, task.issue.goes_on) if task.issue else (None, False)
            pieces.append(Piece((task.duration_s,) if task.duration_s else (), host_s, goes_on, task.phase))
            continue
        if beside is not None:
            return None
        beside = task.id if task.stream != "compute" else None
        own_s = delays_s[id(task.exchange)]
        pieces.append(Piece(own_s, None, False, task.phase, "" if beside is None else "begins"))
    return tuple(pieces)


def _total_delays_and_times(pieces: Iterable[Piece]) -> tuple[tuple[float, ...], Mapping[str, float]]:
    """Return the delays of pieces in sequence, and their time by phase, without host times.

    >>> work = Piece((2.0,), None, False, "forward")
    >>> gather = Piece((3.0,), None, False, "exposed_communication", "begins")
    >>> _total_delays_and_times([gather, work, gather._replace(delays_s=(), beside="ends"), work])
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
