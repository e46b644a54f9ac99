"""Tasks of a rank, the program of a training step, and the gradient buckets and micro-batches that tasks refer to."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, cast

from gssim.cluster import Curve
from gssim.collectives import Communication
from gssim.memory import NOTHING, Footprint, in_sequence
from gssim.workload import LayerInstance, Parameter

P = ParamSpec("P")
T = TypeVar("T")


Operation = Literal[
    "forward",
    "recompute",
    "backward",
    "gradient-norm",
    "clip",
    "unscale",
    "optimizer",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "copy-to-host",
    "copy-to-device",
    "compress",
    "factor",
    "decompress",
    "outer",
    "inner-steps",
    "broadcast-buffers",
    "broadcast-parameters",
    "all-gather-parameters",
    "parameters",
    "collect",
    "threshold",
    "counts",
    "push",
    "add",
    "free",
    "publish",
    "publish-in-node",
    "activation",
    "gradient",
    "messages",
    "share-compute-times",
    "gather-sequence",
    "scatter-sequence",
    "count-rows",
    "dispatch",
    "combine",
    "exchange-heads",
    "rotate",
    "attend",
    "sum-gradients",
    "load-batch",
    "step-begin",
    "forward-begin",
    "forward-end",
    "backward-end",
    "backward-callback",
    "publish-begin",
    "other",
]
"""What a task does, or serves.

`activation`, `gradient`: the message of a pipeline that carries one. `...-begin`, `...-end` and `backward-callback`:
moments of a step. `gather-sequence`, `scatter-sequence`: of tensors whose sequences tensor ranks divide among them;
`exchange-heads`: of parts of sequences for parts of heads; `rotate`, `attend`: of keys and values in a ring, and the
block of attention to those that have come; `sum-gradients`: of gradients of what they run on these parts.
`count-rows`, `dispatch`, `combine`: of rows that ranks send to the experts of others, and back. `copy-to-host`,
`copy-to-device`: of state that is kept in the host's memory. `parameters`:
updated tensors that ZeRO-1 broadcasts, all together. `outer`: the synchronization of parameters that ends an outer
step; `inner-steps`: `part` steps before it, which a rank does alone. `load-batch`: what a training loop does in a step
besides forward, backward and update. `other`: in a program written by hand, whose
labels are `layer`."""
Action = Literal[
    "",
    "issue",
    "cast",
    "issue-cast",
    "accumulate",
    "copy-in",
    "copy-out",
    "take",
    "begin",
    "post",
    "threshold",
    "counts",
    "put",
    "wait",
    "hand-over",
    "await",
    "send",
    "receive",
    "release",
    "return",
    "overlap",
]
"""What a task does for the operation that it serves; empty: it is the operation itself."""
Pass = Literal["", "forward", "recompute", "backward"]

PASSES: Mapping[str, Literal["forward", "recompute", "backward"]] = {"f": "forward", "r": "recompute", "b": "backward"}
"""Passes through a layer by their letters in traces."""
BACKWARD: frozenset[Operation] = frozenset({"recompute", "backward", "backward-end", "backward-callback"})
"""Operations that are parts of the backward itself."""

_OPERATION_TEXTS: Mapping[Operation, str] = {
    "broadcast-buffers": "broadcast buffers",
    "broadcast-parameters": "broadcast parameters",
    "all-gather-parameters": "all-gather parameters",
    "publish-in-node": "publish",
    "outer": "outer step",
    "inner-steps": "inner steps",
    "gradient-norm": "gradient norm",
    "clip": "clip gradients",
    "unscale": "unscale gradients",
    "messages": "",
    "share-compute-times": "share compute times",
    "gather-sequence": "all-gather sequence",
    "scatter-sequence": "reduce-scatter sequence",
    "count-rows": "count rows",
    "exchange-heads": "all-to-all",
    "sum-gradients": "all-reduce partial gradients",
    "load-batch": "load batch",
    "step-begin": "begin",
    "forward-begin": "forward begin",
    "forward-end": "forward end",
    "backward-end": "backward end",
    "backward-callback": "backward callback",
    "publish-begin": "publish begin",
    "other": "",
}
"""In labels, where it is not the name itself."""
_ACTION_TEXTS: Mapping[Action, str] = {
    "issue-cast": "issue cast",
    "copy-in": "copy in",
    "copy-out": "copy out",
    "wait": "wait for",
    "hand-over": "hand over",
    "await": "for",
}


_DURING_FIRST: frozenset[Operation] = frozenset(
    {
        "all-reduce",
        "gather-sequence",
        "scatter-sequence",
        "exchange-heads",
        "rotate",
        "attend",
        "dispatch",
        "combine",
    }
)
"""Operations whose labels name the pass before the layer."""
_NUMBERED: frozenset[Operation] = frozenset({"broadcast-buffers", "all-gather-parameters", "inner-steps"})
"""Operations that are numbered, not divided into parts."""


class TaskId(NamedTuple):
    """Identity of a task within a rank, or of a collective within a program: what it does, to what, and when.

    A collective has the fields of the tasks that join it, and those that distinguish it from other groups' (`place`,
    `samples`, `group`).
    """

    op: Operation
    action: Action = ""
    layer: str = ""
    """Layer, FSDP2 unit or tensor."""
    bucket: int | None = None
    part: int | None = None
    """Index among the parts of one operation; of a layer's pass, None for the first."""
    during: Pass = ""
    """Pass through the layer to which it belongs, where there is one in several; empty also in the forward."""
    place: int | None = None
    """First place in the nodes of those whose collective it is, where others have their own."""
    samples: int | None = None
    """Samples of the ranks whose collective it is, where others have their own."""
    micro_batch: int | None = None
    """None where a step has one."""
    stage: int | None = None
    """Of a message, the stage that produces it; else the stage of a rank that has several."""
    group: Sequence[int] | None = None
    """Ranks whose collective it is, where other parts of the model have their own."""
    messages: "tuple[TaskId, ...]" = ()
    """Messages that it waits for."""
    inner: bool = False
    """Whether it is of an inner step that a trace shows before an outer one."""
    step: int | None = None
    """Step of a period, from 1, where a program is of a whole one."""

    def at(self, *, micro_batch: int | None = None, stage: int | None = None) -> "TaskId":
        """Return the same operation in a micro-batch, or of a stage.

        >>> TaskId("backward", layer="h.0", part=1).at(micro_batch=2).label
        'backward h.0 part 1 micro-batch 2'
        """
        number = self.micro_batch if micro_batch is None else micro_batch
        return TaskId._make((*self[:8], number, self.stage if stage is None else stage, *self[10:]))

    def in_step(self, *, step: int) -> "TaskId":
        """Return the same operation in a step of a period; a fragment's exchange goes on behind several, and has none.

        >>> TaskId("optimizer").in_step(step=3).label, TaskId("outer", bucket=0).in_step(step=3).label
        ('optimizer step 3', 'outer step bucket 0')
        """
        return self if self.op == "outer" and not self.action else self._replace(step=step)

    def serving(self, action: Action) -> "TaskId":
        """Return the identity of the task that does something for this one.

        >>> TaskId("all-gather", layer="h.0", during="backward").serving("copy-out").label
        'copy out all-gather h.0 backward'
        """
        return TaskId(self.op, action, *self[2:])

    @property
    def label(self) -> str:
        """Text shown in traces, timelines and messages: the same as in a real run's trace. It is never taken apart.

        >>> TaskId("all-reduce", layer="h.0", during="backward", part=1, samples=4, group=range(0, 8, 2)).label
        'all-reduce backward h.0 part 1 of 4 samples of ranks 0-6 by 2'
        >>> sent = TaskId("activation", stage=0, micro_batch=3)
        >>> sent.serving("send").label, TaskId("messages", "await", messages=(sent,)).label
        ('send activation of stage 0 micro-batch 3', 'for activation of stage 0 micro-batch 3')
        """
        return " ".join(filter(None, (*self._what(), *self._whose())))

    @property
    def general_labels(self) -> tuple[str, ...]:
        """Labels that distinguish less than its own, those that distinguish most first.

        >>> TaskId("push", bucket=2, micro_batch=1).general_labels
        ('push bucket 2', 'push')
        """
        general = (
            TaskId(*self[:7], stage=self.stage if self.op in ("activation", "gradient") else None),
            TaskId(self.op, self.action, bucket=self.bucket),
            TaskId(self.op, self.action, stage=self.stage),
        )
        return tuple(label for label in dict.fromkeys(each.label for each in general) if label != self.label)

    def _what(self) -> Iterator[str]:
        """Yield what it does, to what."""
        yield _ACTION_TEXTS.get(self.action, self.action)
        yield _OPERATION_TEXTS.get(self.op, self.op)
        before = self.op in _DURING_FIRST
        if before:
            yield self.during
        yield self.layer
        if self.bucket is not None:
            yield f"bucket {self.bucket}"
        if self.part is not None:
            yield f"{self.part}" if self.op in _NUMBERED else f"part {self.part}"
        if not before:
            yield self.during
        if self.op == "publish-in-node":
            yield "in the node"
        yield ", ".join(message.label for message in self.messages)

    def _whose(self) -> Iterator[str]:
        """Yield when it does it, and with whom."""
        is_message = self.op in ("activation", "gradient")
        if is_message:
            yield f"of stage {self.stage}"
        if self.place is not None:
            yield f"of place {self.place}"
        if self.samples is not None:
            yield f"of {self.samples} samples"
        if self.micro_batch is not None:
            yield f"micro-batch {self.micro_batch}"
        if self.stage is not None and not is_message:
            yield f"stage {self.stage}"
        group = self.group
        if isinstance(group, range) and len(group) > 2:
            yield f"of ranks {group[0]}-{group[-1]}" + (f" by {group.step}" if group.step > 1 else "")
        elif group is not None:
            yield f"of ranks {', '.join(map(str, group))}"
        if self.inner:
            yield "(inner step)"
        if self.step is not None:
            yield f"step {self.step}"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a rank: computes for `duration_s`, or takes part in the collective `communication`."""

    id: TaskId
    phase: str
    stream: str = "compute"
    duration_s: float = 0.0
    communication: TaskId | None = None
    after: tuple[TaskId, ...] = ()
    """Tasks of other streams that it waits for, and of its own that precede it."""
    need: Footprint = NOTHING
    after_pauses: Curve | None = None
    """Extra compute time of this task and of those after it, as a function of the seconds waited before."""
    issue: "Issue | None" = None
    exchange: Communication | None = field(default=None, compare=False, repr=False)
    """The collective itself, from which a program's `communications` are collected."""

    @property
    def label(self) -> str:
        """Text shown for it; see `TaskId.label`."""
        return self.id.label

    def renamed(
        self, new_id: TaskId, communication: TaskId | None, after: tuple[TaskId, ...], exchange: Communication | None
    ) -> "Task":
        """Return a copy with another identity, collective and dependencies (`dataclasses.replace` takes several times
        as long).

        >>> later = Task(TaskId("forward"), "forward", duration_s=2.0).renamed(TaskId("backward"), None, (), None)
        >>> later.label, later.duration_s
        ('backward', 2.0)
        """
        return Task(
            new_id,
            self.phase,
            self.stream,
            self.duration_s,
            communication,
            after,
            self.need,
            self.after_pauses,
            self.issue,
            exchange,
        )


def collective_task(
    own: TaskId,
    exchange: Communication,
    stream: str = "compute",
    *,
    communication: TaskId | None = None,
    after: tuple[TaskId, ...] = (),
    need: Footprint = NOTHING,
) -> Task:
    """Return the task that takes part in a collective; `communication`: its identity, if it is not the task's own."""
    return Task(
        own,
        "exposed_communication",
        stream,
        communication=communication or own,
        after=after,
        need=need,
        exchange=exchange,
    )


def with_ids(tasks: Sequence[Task], new_id: Callable[[TaskId], TaskId]) -> list[Task]:
    """Return tasks with other identities, of themselves, their collectives and their dependencies."""
    new_ids = {task.id: new_id(task.id) for task in tasks}
    result = []
    for task in tasks:
        joined, after = task.communication, task.after
        if joined is not None:
            joined = new_ids.get(joined) or new_id(joined)
        if after:
            after = tuple([new_ids.get(each) or new_id(each) for each in after])
        result.append(task.renamed(new_ids[task.id], joined, after, task.exchange))
    return result


@dataclass(frozen=True, slots=True)
class Issue:
    """Launch time of a GPU task on its host: the task cannot end before the host has issued it."""

    host_s: float
    goes_on: bool
    """Whether the host issues it right after the task before; else the host begins when the device does."""


# Chunks --------------------------------------------------------------------------------------------------------------
#
# [Note: chunks] A rank of a pipeline runs the forward and the backward of a stage once for every micro-batch, and only
# the identities of their tasks differ. They are lowered once, as a `Template`; a rank's tasks are an `Outline`, which
# names the templates in the order in which they run. What reads single tasks sees them all: they are made when they are
# first asked for. What counts with templates (memory, bytes, the walk of `engine.outline_walk`) does not ask.


@dataclass(frozen=True, eq=False)
class Template:
    """Tasks without micro-batch and stage: of the compute stream, and collectives beside it that these wait for."""

    tasks: tuple[Task, ...]

    @cached_property
    def need(self) -> Footprint:
        """Memory of all tasks, one after another; without their events."""
        return in_sequence([task.need for task in self.tasks])

    @cached_property
    def collectives(self) -> Mapping[TaskId, Communication]:
        """Collectives of the tasks."""
        return _collectives_of(self.tasks)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The tasks of a template for one micro-batch."""

    template: Template
    micro_batch: int | None
    """None where a step has one."""
    stage: int | None
    """None for a rank that has one."""

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks, with the micro-batch and the stage in their identities."""
        return with_ids(self.template.tasks, partial(TaskId.at, micro_batch=self.micro_batch, stage=self.stage))

    @property
    def last(self) -> TaskId:
        """Identity of the last task."""
        return self.template.tasks[-1].id.at(micro_batch=self.micro_batch, stage=self.stage)


def can_be_template(tasks: Sequence[Task]) -> bool:
    """Return whether tasks wait for one another alone, and only those of the compute stream allocate memory."""
    own = {task.id for task in tasks}
    awaited = {each for task in tasks for each in task.after}
    return awaited <= own and all(
        task.stream == "compute" or (task.id in awaited and not task.need.peak_bytes and not task.need.kept)
        for task in tasks
    )


class Outline(Sequence[Task]):
    """A rank's tasks, of which chunks are stored once; see [Note: chunks].

    >>> work = Template((Task(TaskId("forward", layer="h.0"), "forward"),))
    >>> outline = Outline([Task(TaskId("step-begin"), "idle"), Chunk(work, 0, None), Chunk(work, 1, None)])
    >>> len(outline), outline[2].label
    (3, 'forward h.0 micro-batch 1')
    """

    def __init__(self, parts: Iterable["Task | Chunk"]) -> None:
        self.parts = tuple(parts)

    @cached_property
    def _tasks(self) -> tuple[Task, ...]:
        return tuple(chain.from_iterable((part,) if isinstance(part, Task) else part.tasks for part in self.parts))

    @cached_property
    def _length(self) -> int:
        return sum(1 if isinstance(part, Task) else len(part.template.tasks) for part in self.parts)

    def __len__(self) -> int:
        """Return the number of tasks."""
        return self._length

    def __getitem__(self, place: Any) -> Any:
        """Return a task, or some."""
        return self._tasks[place]

    def __iter__(self) -> Iterator[Task]:
        """Return an iterator over all tasks."""
        return iter(self._tasks)

    def __eq__(self, other: object) -> bool:
        """Return whether the tasks are equal to those of another sequence."""
        return isinstance(other, Sequence) and self._tasks == tuple(other)

    def __hash__(self) -> int:
        """Return equal hashes for equal tasks."""
        return hash(self._tasks)


def parts_of(tasks: Sequence[Task]) -> Sequence[Task | Chunk]:
    """Return the parts of an outline, or the tasks themselves."""
    return tasks.parts if isinstance(tasks, Outline) else tasks


def unnumbered(tasks: Sequence[Task]) -> Iterator[Task]:
    """Yield the tasks of an outline, those of chunks without micro-batch and stage, which takes much less time."""
    for part in parts_of(tasks):
        if isinstance(part, Task):
            yield part
        else:
            yield from part.template.tasks


def each_once(tasks: Sequence[Task]) -> Iterable[Task]:
    """Return the tasks of an outline, those of each template once."""
    if not isinstance(tasks, Outline):
        return tasks
    templates = {id(part.template): part.template for part in tasks.parts if isinstance(part, Chunk)}
    plain = [part for part in tasks.parts if isinstance(part, Task)]
    return chain(plain, *(template.tasks for template in templates.values()))


def _collectives_of(tasks: Iterable[Task]) -> dict[TaskId, Communication]:
    """Return the collectives in which tasks take part, in the order of the tasks."""
    found: dict[TaskId, Communication] = {}
    for task in tasks:
        if task.communication is not None and task.communication not in found:
            assert task.exchange is not None
            found[task.communication] = task.exchange
    return found


class Collectives(Mapping[TaskId, Communication]):
    """The collectives in which the tasks of ranks take part, by identity, in the order of the tasks."""

    def __init__(self, by_rank: Sequence[Sequence[Task]]) -> None:
        self._by_rank = by_rank

    @cached_property
    def _all(self) -> dict[TaskId, Communication]:
        return _collectives_of(chain.from_iterable(self._by_rank))

    def __getitem__(self, name: TaskId) -> Communication:
        """Return a collective."""
        return self._all[name]

    def __iter__(self) -> Iterator[TaskId]:
        """Return an iterator over the identities."""
        return iter(self._all)

    def __len__(self) -> int:
        """Return the number of collectives."""
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        """Return whether the collectives are equal to those of another mapping."""
        return isinstance(other, Mapping) and self._all == dict(other)

    def __hash__(self) -> int:
        """Return equal hashes for the same tasks."""
        return id(self)

    @cached_property
    def counted(self) -> Sequence[tuple[Communication, int]]:
        """Distinct collectives, and how many of each there are.

        Roles that take part in the same chunks' collectives have templates that name the same ones; where templates
        have only some of their names in common, all tasks are looked at.
        """
        plain: dict[TaskId, Communication] = {}
        order: dict[int, Communication] = {}
        chunks: dict[tuple[TaskId, ...], _Repeated] = {}
        of_template: dict[int, _Repeated] = {}
        for part in chain.from_iterable(map(parts_of, self._by_rank)):
            if isinstance(part, Chunk):
                if id(part.template) not in of_template:
                    own = part.template.collectives
                    of_template[id(part.template)] = chunks.setdefault(tuple(own), _Repeated(own, set()))
                    order |= {id(each): each for each in chunks[tuple(own)].collectives.values()}
                of_template[id(part.template)].places.add((part.micro_batch, part.stage))
            elif part.communication is not None and part.communication not in plain:
                assert part.exchange is not None
                plain[part.communication] = part.exchange
                order[id(part.exchange)] = part.exchange
        if _overlap(plain, chunks.values()):
            return _counted(self._all.values())
        counts: Counter[int] = Counter(map(id, plain.values()))
        for repeated in chunks.values():
            for communication in repeated.collectives.values():
                counts[id(communication)] += len(repeated.places)
        return [(communication, counts[number]) for number, communication in order.items()]


class _Repeated(NamedTuple):
    """The collectives of templates that name the same ones, and the micro-batches and stages that have them."""

    collectives: Mapping[TaskId, Communication]
    places: set[tuple[int | None, int | None]]


def _overlap(plain: Iterable[TaskId], chunks: Iterable[_Repeated]) -> bool:
    """Return whether a collective is named by chunks of templates with other ones, or by a single task too."""
    known: dict[TaskId, set[tuple[int | None, int | None]]] = defaultdict(set)
    for repeated in chunks:
        for name in repeated.collectives:
            if not known[name].isdisjoint(repeated.places):
                return True
            known[name] |= repeated.places
    places = ((TaskId._make((*each[:8], None, None, *each[10:])), (each.micro_batch, each.stage)) for each in plain)
    return any(name in known and place in known[name] for name, place in places)


def _counted(communications: Iterable[Communication]) -> Sequence[tuple[Communication, int]]:
    """Return distinct communications, compared by identity, and the number of each."""
    several = list(communications)
    distinct = {id(each): each for each in several}
    return [(distinct[number], count) for number, count in Counter(map(id, several)).items()]


@dataclass(frozen=True)
class Program:
    """One training step of every rank: tasks, the collectives that they name, and persistent memory.

    Where ranks synchronize fragments of the parameters (`policies.in_fragments`), all steps of a period.
    Ranks with equal inputs have one role, and are lowered once.
    """

    tasks: Sequence[Sequence[Task]]
    """By role: tuples, or an `Outline`."""
    communications: Mapping[TaskId, Communication]
    persistent: tuple[dict[str, float], ...]
    """By role."""
    push_density: float | None = None
    publish_density: float | None = None
    on_host: tuple[dict[str, float], ...] = ()
    """What is kept in the host's memory, by role; empty: nothing."""
    roles: tuple[int, ...] = ()
    """Role of each rank; empty: every rank has its own."""
    tensors: tuple[Callable[[], Mapping[str, tuple[float, ...]]], ...] = field(default=(), compare=False)
    """Functions that return the bytes of each persistent tensor by category, by role; empty: each category is one
    tensor.
    """

    _values: dict[Hashable, object] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, function: Callable[Concatenate["Program", P], T], *arguments: P.args, **_none: P.kwargs) -> T:
        """Return the value of a function of the program, computed once and kept as long as the program."""
        key = (function, arguments)
        if key not in self._values:
            self._values[key] = function(self, *arguments, **_none)
        return cast(T, self._values[key])

    @cached_property
    def exchanges(self) -> Sequence[tuple[Communication, int]]:
        """Distinct collectives, compared by identity, and the number of each in a step."""
        named = self.communications
        return named.counted if isinstance(named, Collectives) else _counted(named.values())

    @cached_property
    def communicating_groups(self) -> Collection[frozenset[int]]:
        """Groups of several ranks that its collectives are between, each once."""
        families = {each.groups for each, _ in self.exchanges}
        return {frozenset(group) for groups in families for group in groups if len(group) > 1}

    @cached_property
    def uneven(self) -> Mapping[TaskId, Communication]:
        """Collectives of parts or pairs of unequal sizes."""
        if not any(each.pair_bytes or each.part_bytes for each, _ in self.exchanges):
            return {}
        return {name: each for name, each in self.communications.items() if each.pair_bytes or each.part_bytes}

    @cached_property
    def role_of(self) -> tuple[int, ...]:
        """Role of each rank."""
        return self.roles or tuple(range(len(self.tasks)))


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are communicated together, in the order in which they become ready."""

    index: int
    members: tuple[tuple[LayerInstance, Parameter], ...]

    @cached_property
    def elements(self) -> int:
        """Number of gradient elements."""
        return sum(parameter.elements for _, parameter in self.members)

    @property
    def of_experts(self) -> bool:
        """Whether its parameters are of experts that ranks divide: no bucket has others beside them."""
        return self.members[0][1].of_experts

    def place(self, member: int) -> tuple[int, int]:
        """Return (layer, position) in the backward pass at which a member is ready."""
        instance, parameter = self.members[member]
        return instance.index + parameter.ready.layer_offset, parameter.ready.position

    @property
    def complete(self) -> tuple[int, int]:
        """(Layer, position) in the backward pass at which the last member is ready."""
        return self.place(-1)

    @property
    def started(self) -> tuple[int, int]:
        """(Layer, position) in the backward pass at which the first member is ready."""
        return self.place(0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of each member in the bucket, in elements."""
        return tuple(accumulate((parameter.elements for _, parameter in self.members[:-1]), initial=0))

    def inside(self, first: int, last: int) -> Iterator[tuple[LayerInstance, Parameter, int, int]]:
        """Yield each member that overlaps elements [first, last), with the half-open range of its own elements."""
        for member in range(max(0, bisect_right(self.starts, first) - 1), len(self.members)):
            start = self.starts[member]
            if start >= last:
                break
            instance, parameter = self.members[member]
            begin, end = max(start, first) - start, min(start + parameter.elements, last) - start
            if begin < end:
                yield instance, parameter, begin, end


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a rank's samples."""

    index: int = 0
    count: int = 1
    sends_gradients: bool = True
    """Whether gradients are communicated after this micro-batch, if the plan communicates them at all."""
    sent_before: bool = False
    """Whether the gradients of earlier micro-batches were communicated in theirs."""

    @property
    def first(self) -> bool:
        """Whether it is the first micro-batch of the step."""
        return self.index == 0

    @property
    def accumulates(self) -> bool:
        """Whether its gradients are added to whole gradients of earlier micro-batches."""
        return self.index > 0 and not self.sent_before

    @property
    def number(self) -> int | None:
        """Its index in identities of tasks; None where it is the only one."""
        return self.index if self.count > 1 else None
