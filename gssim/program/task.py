"""Tasks of a rank, the program of a training step, and the gradient buckets and micro-batches that tasks refer to."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any, ClassVar, Literal, NamedTuple

from gssim.cluster import Curve
from gssim.collectives import Communication
from gssim.execution.cache import Source
from gssim.memory import NOTHING, Footprint, in_sequence
from gssim.workload import LayerInstance, Parameter

PassOperation = Literal["forward", "recompute", "backward", "backward-weights"]
UpdateOperation = Literal["gradient-norm", "clip", "unscale", "optimizer"]
ReplicaOperation = Literal["all-gather", "reduce-scatter", "all-reduce", "copy-to-host", "copy-to-device"]
CompressorOperation = Literal["compress", "factor", "decompress"]
PeriodOperation = Literal["outer", "inner-steps"]
BroadcastOperation = Literal["broadcast-buffers", "broadcast-parameters", "all-gather-parameters", "parameters"]
PushOperation = Literal["collect", "threshold", "counts", "push", "add", "free", "publish", "publish-in-node"]
PipelineOperation = Literal["activation", "gradient", "messages", "share-compute-times"]
SequenceOperation = Literal[
    "gather-sequence", "scatter-sequence", "exchange-heads", "gather-keys", "rotate", "attend", "sum-gradients"
]
ExpertOperation = Literal["count-rows", "dispatch", "combine"]
StepOperation = Literal["load-batch", "step-begin", "forward-begin", "forward-end", "backward-end", "publish-begin"]

Operation = Literal[
    PassOperation,
    UpdateOperation,
    ReplicaOperation,
    CompressorOperation,
    PeriodOperation,
    BroadcastOperation,
    PushOperation,
    PipelineOperation,
    SequenceOperation,
    ExpertOperation,
    StepOperation,
    "backward-callback",
    "other",
]
"""Operation that a task carries out, or that it serves (see `Action`).

`backward-weights`: the second part of a split backward. `activation`, `gradient`: the pipeline message that carries
one. `...-begin`, `...-end` and `backward-callback`: markers in a step. `gather-sequence`, `scatter-sequence`:
all-gather and reduce-scatter under sequence parallelism.
`exchange-heads`: the all-to-all between parts of the sequence and parts of the heads. `rotate`: the exchange of keys
and values in an attention ring; `gather-keys`: the all-gather that takes its place; `attend`: the attention to the keys
and values that have arrived. `sum-gradients`: the all-reduce of gradients of layers that run on such parts.
`count-rows`, `dispatch`, `combine`: the exchange of row counts, of rows to other ranks' experts, and of their results.
`copy-to-host`, `copy-to-device`: copies of offloaded state. `parameters`: all updated tensors that ZeRO-1 broadcasts,
together. `outer`: the synchronization of parameters that ends an outer step. `inner-steps`: the `part` inner steps
before it, in which a rank does not communicate. `load-batch`: the training loop's work in a step besides forward,
backward and update. `other`: a task of a program written by hand, with `layer` as its label."""
BufferAction = Literal["issue", "cast", "issue-cast", "accumulate", "copy-in", "copy-out", "take"]
PushAction = Literal["begin", "post", "threshold", "counts", "put", "wait", "hand-over", "await"]
MessageAction = Literal["send", "receive", "unpack", "release", "return", "overlap"]
Action = Literal["", BufferAction, PushAction, MessageAction]
"""What a task does for the operation that it serves; empty if the task is the operation itself."""
Pass = Literal["", PassOperation]

PASSES: Mapping[str, PassOperation] = {
    "f": "forward",
    "r": "recompute",
    "b": "backward",
    "i": "backward",
    "w": "backward-weights",
}
"""Names of the passes through a layer, by their letters in traces. A split backward's first part is the one that other
ranks wait for, and has the name of a whole one."""
BACKWARD: frozenset[Operation] = frozenset(
    {"recompute", "backward", "backward-weights", "backward-end", "backward-callback"}
)
"""Operations that belong to the backward itself."""

_OPERATION_TEXTS: Mapping[Operation, str] = {
    "broadcast-buffers": "broadcast buffers",
    "broadcast-parameters": "broadcast parameters",
    "all-gather-parameters": "all-gather parameters",
    "publish-in-node": "publish",
    "outer": "outer step",
    "inner-steps": "inner steps",
    "backward-weights": "backward weights",
    "gradient-norm": "gradient norm",
    "clip": "clip gradients",
    "unscale": "unscale gradients",
    "messages": "",
    "share-compute-times": "share compute times",
    "gather-sequence": "all-gather sequence",
    "scatter-sequence": "reduce-scatter sequence",
    "count-rows": "count rows",
    "exchange-heads": "all-to-all",
    "gather-keys": "all-gather keys",
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
"""Text of an operation in labels, where it differs from the operation's name."""
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
        "gather-keys",
        "rotate",
        "attend",
        "dispatch",
        "combine",
    }
)
"""Operations in whose labels the pass comes before the layer."""
_NUMBERED: frozenset[Operation] = frozenset({"broadcast-buffers", "all-gather-parameters", "inner-steps"})
"""Operations whose labels show `part` as a plain number, because they are not parts of one operation."""


class TaskId(NamedTuple):
    """Identity of a task within a rank, or of a collective within a program: what it does, to what, and when.

    The identity of a collective has the fields of the tasks that join it. If other groups carry out the same
    collective, it also has fields that distinguish the group (`place`, `samples`, `group`).
    """

    op: Operation
    action: Action = ""
    layer: str = ""
    """Layer, FSDP2 unit or tensor."""
    bucket: int | None = None
    part: int | None = None
    """Index among the parts of one operation. For parts of a layer's pass, the first has None."""
    during: Pass = ""
    """Pass through the layer in which an operation runs, for operations that run in several; some omit the forward."""
    place: int | None = None
    """First place (in a node) of the ranks that share the collective, if ranks of other places have collectives of
    their own."""
    samples: int | None = None
    """Samples per rank in the collective's group, if ranks with other numbers have collectives of their own."""
    micro_batch: int | None = None
    """Index of the micro-batch; None if the step has only one."""
    stage: int | None = None
    """Of a message, the stage that produces it; otherwise the task's stage, if its rank has several."""
    group: Sequence[int] | None = None
    """Ranks of the collective, if the ranks of other parts of the model have collectives of their own."""
    messages: "tuple[TaskId, ...]" = ()
    """Messages for which the task waits."""
    inner: bool = False
    """Whether the task belongs to an inner step that a trace shows before an outer one."""
    step: int | None = None
    """Step within the period, from 1, if the program covers a whole period."""

    def at(self, *, micro_batch: int | None = None, stage: int | None = None) -> "TaskId":
        """Return the same operation in a micro-batch, or of a stage.

        >>> TaskId("backward", layer="h.0", part=1).at(micro_batch=2).label
        'backward h.0 part 1 micro-batch 2'
        """
        number = self.micro_batch if micro_batch is None else micro_batch
        return TaskId._make((*self[:8], number, self.stage if stage is None else stage, *self[10:]))

    def in_step(self, *, step: int) -> "TaskId":
        """Return the same operation in a step of a period. The exchange of a fragment spans several steps, and gets
        none.

        >>> TaskId("optimizer").in_step(step=3).label, TaskId("outer", bucket=0).in_step(step=3).label
        ('optimizer step 3', 'outer step bucket 0')
        """
        return self if self.op == "outer" and not self.action else self._replace(step=step)

    def of_layer(self, layer: str) -> "TaskId":
        """Return the same operation of another layer.

        >>> TaskId("backward", layer="h.0", part=1).of_layer("h.1").label
        'backward h.1 part 1'
        """
        return TaskId._make((*self[:2], layer, *self[3:]))

    def of_group(self, group: Sequence[int]) -> "TaskId":
        """Return the same operation of a group of ranks.

        >>> TaskId("all-reduce", bucket=0).of_group((0, 4)).label
        'all-reduce bucket 0 of ranks 0, 4'
        """
        return TaskId._make((*self[:10], group, *self[11:]))

    def serving(self, action: Action) -> "TaskId":
        """Return the identity of a task that does `action` for this operation.

        >>> TaskId("all-gather", layer="h.0", during="backward").serving("copy-out").label
        'copy out all-gather h.0 backward'
        """
        return TaskId(self.op, action, *self[2:])

    @property
    def label(self) -> str:
        """Text shown in traces, timelines and messages: the same as in a real run's trace. Code never parses it.

        >>> TaskId("all-reduce", layer="h.0", during="backward", part=1, samples=4, group=range(0, 8, 2)).label
        'all-reduce backward h.0 part 1 of 4 samples of ranks 0-6 by 2'
        >>> sent = TaskId("activation", stage=0, micro_batch=3)
        >>> sent.serving("send").label, TaskId("messages", "await", messages=(sent,)).label
        ('send activation of stage 0 micro-batch 3', 'for activation of stage 0 micro-batch 3')
        """
        return " ".join(filter(None, (*self._what(), *self._whose())))

    @property
    def general_labels(self) -> tuple[str, ...]:
        """More general labels for this task (they distinguish it from fewer others), most specific first.

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
        """Yield the words that say what the task does, and to what."""
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
        """Yield the words that say when the task runs, and with which ranks."""
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


@dataclass(slots=True, unsafe_hash=True)
class Task:
    """One task of a rank: either computes for `duration_s`, or takes part in the collective `communication`.

    It is never changed, but not frozen either: a program has many thousands, and frozen ones take four times as long to
    create.
    """

    id: TaskId
    phase: str
    stream: str = "compute"
    duration_s: float = 0.0
    communication: TaskId | None = None
    after: tuple[TaskId, ...] = ()
    """Tasks that must end first: on other streams, or earlier on the task's own stream."""
    need: Footprint = NOTHING
    after_pauses: Curve | None = None
    """Extra compute time of this task and those after it, as a function of how many seconds the rank waited before."""
    issue: "Issue | None" = None
    exchange: Communication | None = field(default=None, compare=False, repr=False)
    """The collective itself, from which a program's `communications` are collected."""

    @property
    def label(self) -> str:
        """Text shown for the task; see `TaskId.label`."""
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


ELEMENTS_PER_TASK = 10
"""About how many elements of a large value take as much memory as a task."""


def collective_task(
    own: TaskId,
    exchange: Communication,
    stream: str = "compute",
    *,
    communication: TaskId | None = None,
    after: tuple[TaskId, ...] = (),
    need: Footprint = NOTHING,
) -> Task:
    """Return the task that takes part in a collective; `communication`: its identity, if not the task's."""
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
    """Return the tasks with every identity mapped by `new_id`: their own, their collectives' and dependencies'."""
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
    """Launch of a GPU task by its host, in `host_s` seconds: the task cannot end before the host has issued it."""

    host_s: float
    goes_on: bool
    """Whether the host issues the task right after the one before; if not, the host starts when the device does."""


# Chunks --------------------------------------------------------------------------------------------------------------
#
# [Note: chunks] A rank of a pipeline runs the forward and the backward of a stage once for every micro-batch, and only
# the identities of their tasks differ. They are lowered once, as a `Template`. A rank's tasks are an `Outline`, which
# lists the templates in the order in which they run. Code that reads single tasks sees them all; they are created on
# first access. Code that works with templates (memory, bytes, `engine.outline_operations`) never creates them.


@dataclass(frozen=True, eq=False)
class Template:
    """Tasks without micro-batch and stage: those of the compute stream, and collectives that they wait for."""

    tasks: tuple[Task, ...]

    @cached_property
    def need(self) -> Footprint:
        """Memory footprint of all tasks in sequence, without single events."""
        return in_sequence([task.need for task in self.tasks])

    @cached_property
    def collectives(self) -> Mapping[TaskId, Communication]:
        """Collectives of the tasks."""
        return _collectives_of(self.tasks)

    @cached_property
    def exchanges(self) -> Sequence[tuple[Communication, int]]:
        """Distinct collectives, compared by identity and in the order of their first tasks, and how many tasks join
        each.
        """
        return _count_distinct(task.exchange for task in self.tasks if task.exchange is not None)


@dataclass(slots=True, eq=False)
class Chunk:
    """The tasks of a template for one micro-batch."""

    template: Template
    micro_batch: int | None
    """Index of the micro-batch; None if the step has only one."""
    stage: int | None
    """Number of the stage, if its tasks have one in their identities."""

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks, with the micro-batch and the stage in their identities."""
        return self.with_ids(self.template.tasks)

    def with_ids(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Return tasks of the template with the micro-batch and the stage in their identities."""
        return with_ids(tasks, partial(TaskId.at, micro_batch=self.micro_batch, stage=self.stage))

    @property
    def last(self) -> TaskId:
        """Identity of the last task."""
        return self.template.tasks[-1].id.at(micro_batch=self.micro_batch, stage=self.stage)


# Messages of pipelines ------------------------------------------------------------------------------------------------
#
# [Note: messages of outlines] A rank of a pipeline posts thousands of messages, and waits for each; these differ in
# their micro-batch only. An outline lists what is posted (`Posted`) and what is waited for (`Awaited`) in place of
# tasks, which are made on first access like those of chunks. They name one another, and chunks, by reference.


@dataclass(frozen=True, eq=False)
class Route:
    """The way of a rank's messages from one stage to another; they differ in their micro-batch only."""

    kind: Literal["activation", "gradient"]
    stage: int
    """The stage that produces them."""
    exchange: Communication
    stream: str
    sends: bool
    """Whether the rank sends or receives them."""
    group: Sequence[int] | None = None
    """`TaskId.group` of their collectives."""

    @property
    def identity(self) -> Hashable:
        """A key that is equal for the two ends of a route, and for no other route."""
        return self.kind, self.stage, self.group


@dataclass(slots=True, eq=False)
class Posted:
    """A rank's end of a message between stages: the task that sends or receives it."""

    route: Route
    micro_batch: int | None
    after: "tuple[TaskId | Chunk | Awaited]"
    """The last thing that the rank's compute stream does before it posts the message."""

    phase: ClassVar[str] = "exposed_communication"
    duration_s: ClassVar[float] = 0.0
    issue: ClassVar[None] = None
    need: ClassVar[Footprint] = NOTHING

    @property
    def stream(self) -> str:
        """Stream of the messages of its route."""
        return self.route.stream

    @property
    def exchange(self) -> Communication:
        """The collective that carries the message."""
        return self.route.exchange

    @property
    def communication(self) -> "MessageName":
        """Name of the message, the same on both sides."""
        route = self.route
        return route.kind, route.stage, self.micro_batch, route.group

    @property
    def message(self) -> TaskId:
        """Identity of the message."""
        return TaskId(self.route.kind, stage=self.route.stage, micro_batch=self.micro_batch)

    @property
    def last(self) -> TaskId:
        """Identity of the task."""
        return self.message.serving("send" if self.route.sends else "receive")

    @property
    def tasks(self) -> Sequence[Task]:
        """The task."""
        message = self.message if self.route.group is None else self.message.of_group(self.route.group)
        (before,) = self.after
        after = (before if isinstance(before, TaskId) else before.last,)
        return (collective_task(self.last, self.exchange, self.stream, communication=message, after=after),)


@dataclass(slots=True, eq=False)
class Awaited:
    """A rank's wait for messages that it has posted."""

    after: tuple[Posted, ...]

    phase: ClassVar[str] = "exposed_communication"
    duration_s: ClassVar[float] = 0.0
    issue: ClassVar[None] = None
    need: ClassVar[Footprint] = NOTHING
    stream: ClassVar[str] = "compute"
    communication: ClassVar[None] = None
    exchange: ClassVar[None] = None

    @property
    def last(self) -> TaskId:
        """Identity of the task."""
        return TaskId("messages", "await", messages=tuple(each.message for each in self.after))

    @property
    def tasks(self) -> Sequence[Task]:
        """The task."""
        return (Task(self.last, self.phase, after=tuple(each.last for each in self.after)),)


MessageName = tuple[str, int, int | None, Sequence[int] | None]
"""Kind of a pipeline's message, the stage that produces it, its micro-batch, and `Route.group`."""
Part = Task | Chunk | Posted | Awaited
"""A part of an outline."""
Name = TaskId | Chunk | Posted | Awaited
"""What tasks and messages of an outline wait for: a task by its identity, or a part by reference."""


def name_of(part: Part) -> Name:
    """Return the name by which other tasks wait for a part of an outline: a task's identity, or the part itself."""
    return part.id if isinstance(part, Task) else part


def tasks_of(parts: Iterable[Part]) -> Iterator[Task]:
    """Yield the tasks of parts of an outline, one after another."""
    for part in parts:
        if isinstance(part, Task):
            yield part
        else:
            yield from part.tasks


def can_be_template(tasks: Sequence[Task]) -> bool:
    """Return whether tasks depend only on one another, and only compute tasks allocate memory."""
    own = {task.id for task in tasks}
    awaited = {each for task in tasks for each in task.after}
    return awaited <= own and all(
        task.stream == "compute" or (task.id in awaited and not task.need.peak_bytes and not task.need.kept)
        for task in tasks
    )


Place = tuple[int | None, int | None]
"""Micro-batch and stage of a part."""


class Parts(tuple[Part, ...]):
    """Parts of an outline, and what is derived from them: once for all outlines that have the same object.

    >>> work = Template((Task(TaskId("forward", layer="h.0"), "forward"),))
    >>> parts = Parts([Task(TaskId("step-begin"), "idle"), Chunk(work, 0, None), Chunk(work, 1, None)])
    >>> len(parts), parts.task_count, list(parts.templates.values()) == [work]
    (3, 3, True)
    """

    @cached_property
    def _distinct_and_places(self) -> tuple[Sequence[Task | Chunk | Posted], dict[int, list[Place]]]:
        distinct: list[Task | Chunk | Posted] = []
        places: dict[int, list[Place]] = {}
        for part in self:
            if isinstance(part, Chunk):
                alike, place = id(part.template), (part.micro_batch, part.stage)
            elif isinstance(part, Posted):
                alike, place = id(part.route), (part.micro_batch, None)
            else:
                if isinstance(part, Task):
                    distinct.append(part)
                continue
            if alike in places:
                places[alike].append(place)
            else:
                places[alike] = [place]
                distinct.append(part)
        return distinct, places

    @property
    def distinct(self) -> Sequence[Task | Chunk | Posted]:
        """Parts that are tasks, and of those that share a template or a route the first."""
        return self._distinct_and_places[0]

    @property
    def places(self) -> Mapping[int, Sequence[Place]]:
        """Where a template is run, or a message of a route posted, by `id` of the template or route."""
        return self._distinct_and_places[1]

    @cached_property
    def templates(self) -> dict[int, Template]:
        """Templates of the chunks, by `id`."""
        return {id(part.template): part.template for part in self.distinct if isinstance(part, Chunk)}

    @cached_property
    def plain(self) -> Sequence[Task]:
        """Parts that are tasks."""
        return [part for part in self.distinct if isinstance(part, Task)]

    @cached_property
    def without_messages(self) -> Sequence[Task | Chunk]:
        """Parts that are not a pipeline's messages."""
        return [part for part in self if isinstance(part, (Task, Chunk))]

    @cached_property
    def needs(self) -> Sequence[Footprint]:
        """Footprints of the parts that allocate or free memory, in order."""
        every = [part.need if isinstance(part, Task) else part.template.need for part in self.without_messages]
        return [need for need in every if need.peak_bytes or need.kept]

    @cached_property
    def task_count(self) -> int:
        """Number of tasks."""
        return sum([len(part.template.tasks) if isinstance(part, Chunk) else 1 for part in self])


class Outline(Sequence[Task]):
    """A rank's tasks, in which repeated chunks are stored once; see [Note: chunks].

    >>> work = Template((Task(TaskId("forward", layer="h.0"), "forward"),))
    >>> outline = Outline([Task(TaskId("step-begin"), "idle"), Chunk(work, 0, None), Chunk(work, 1, None)])
    >>> len(outline), outline[2].label
    (3, 'forward h.0 micro-batch 1')
    """

    def __init__(self, parts: Iterable[Part], *, schedule: Iterable[Part] = ()) -> None:
        self.schedule = schedule if isinstance(schedule, Parts) else Parts(schedule)
        """The first parts, by the same object in the outlines of all ranks that have these in common."""
        self.further = Parts(parts)
        """All others."""

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        return (*self.schedule, *self.further)

    @cached_property
    def _tasks(self) -> tuple[Task, ...]:
        return tuple(tasks_of(self.parts))

    def __len__(self) -> int:
        return self.schedule.task_count + self.further.task_count

    def __getitem__(self, place: Any) -> Any:
        return self._tasks[place]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._tasks == tuple(other)

    def __hash__(self) -> int:
        return hash(self._tasks)


def parts_of(tasks: Sequence[Task]) -> Sequence[Part]:
    """Return the parts of an outline; a plain sequence of tasks is returned as it is."""
    return tasks.parts if isinstance(tasks, Outline) else tasks


def without_messages(tasks: Sequence[Task]) -> Sequence[Task | Chunk]:
    """Return the parts of an outline (or the tasks) without a pipeline's messages, which take no memory."""
    if isinstance(tasks, Outline):
        return [*tasks.schedule.without_messages, *tasks.further.without_messages]
    return tasks


def needs_of(tasks: Sequence[Task]) -> Sequence[Footprint]:
    """Return the memory that tasks need one after another; that of a chunk's tasks, which repeat, is one footprint."""
    if isinstance(tasks, Outline):
        return [*tasks.schedule.needs, *tasks.further.needs]
    return [task.need for task in tasks if task.need.peak_bytes or task.need.kept]


def template_tasks(tasks: Sequence[Task]) -> Iterator[Task]:
    """Yield the tasks of an outline without a pipeline's messages.

    Tasks of chunks are those of the template, without micro-batch and stage, as it is much faster not to make others.
    """
    for part in without_messages(tasks):
        if isinstance(part, Task):
            yield part
        else:
            yield from part.template.tasks


def distinct_tasks(tasks: Sequence[Task]) -> Iterable[Task]:
    """Return the distinct tasks of an outline: each template's once, and none of the messages between stages."""
    if not isinstance(tasks, Outline):
        return tasks
    templates = tasks.schedule.templates | tasks.further.templates
    return chain(tasks.schedule.plain, tasks.further.plain, *(template.tasks for template in templates.values()))


def _distinct_parts(by_rank: Iterable[Sequence[Task]]) -> Iterator[Parts]:
    """Yield the parts of all ranks; a schedule that several outlines share comes only once."""
    seen = set[int]()
    for tasks in by_rank:
        if not isinstance(tasks, Outline):
            yield Parts(tasks)
            continue
        if id(tasks.schedule) not in seen:
            seen.add(id(tasks.schedule))
            yield tasks.schedule
        yield tasks.further


def _collectives_of(tasks: Iterable[Task]) -> dict[TaskId, Communication]:
    """Return the collectives in which tasks take part, in the order of the tasks."""
    found: dict[TaskId, Communication] = {}
    seen: dict[int, TaskId] = {}  # by identity: most ranks name a collective by the same object, hashed only once
    for task in tasks:
        name = task.communication
        if name is None or id(name) in seen:
            continue
        seen[id(name)] = name
        if name not in found:
            assert task.exchange is not None
            found[name] = task.exchange
    return found


class Collectives(Mapping[TaskId, Communication]):
    """The collectives in which the tasks of ranks take part, by identity, in the order of the tasks."""

    def __init__(self, by_rank: Sequence[Sequence[Task]]) -> None:
        self._by_rank = by_rank

    @cached_property
    def _all(self) -> dict[TaskId, Communication]:
        return _collectives_of(chain.from_iterable(self._by_rank))

    def __getitem__(self, name: TaskId) -> Communication:
        return self._all[name]

    def __iter__(self) -> Iterator[TaskId]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __hash__(self) -> int:
        return id(self)

    @cached_property
    def counted(self) -> Sequence[tuple[Communication, int]]:
        """Distinct collectives, and how often each occurs.

        They are counted by template: roles with chunks of the same collectives have templates that name the same ones.
        If two templates have only some of their names in common, all tasks are counted one by one.
        """
        if not any(isinstance(tasks, Outline) for tasks in self._by_rank):
            return _count_distinct(self._all.values())
        plain: dict[TaskId, Communication] = {}
        counts, order = Counter[int](), dict[int, Communication]()
        chunks: dict[tuple[TaskId, ...], _Repeated] = {}
        posted: dict[Hashable, set[Place]] = defaultdict(set)
        """By `Route.identity`: the messages of a route have the same names at its other end."""
        for parts in _distinct_parts(self._by_rank):
            for part in parts.distinct:
                if isinstance(part, Chunk):
                    exchanges = _repeat(part.template.collectives, parts.places[id(part.template)], chunks)
                    order |= {id(each): each for each in exchanges}
                elif isinstance(part, Posted):
                    exchange = part.route.exchange
                    new = set(parts.places[id(part.route)]) - posted[part.route.identity]
                    posted[part.route.identity] |= new
                    counts[id(exchange)] += len(new)
                    order |= {id(exchange): exchange} if new else {}
                elif part.communication is not None and part.communication not in plain:
                    assert part.exchange is not None
                    plain[part.communication] = part.exchange
                    order[id(part.exchange)] = part.exchange
        if _overlap(plain, chunks.values()):
            return _count_distinct(self._all.values())
        counts.update(map(id, plain.values()))
        for repeated in chunks.values():
            for communication in repeated.collectives.values():
                counts[id(communication)] += len(repeated.places)
        return [(communication, counts[number]) for number, communication in order.items()]


class _Repeated(NamedTuple):
    """The collectives of templates that name the same ones, and the (micro-batch, stage) pairs in which they run."""

    collectives: Mapping[TaskId, Communication]
    places: set[Place]


def _repeat(
    own: Mapping[TaskId, Communication], places: Iterable[Place], chunks: dict[tuple[TaskId, ...], _Repeated]
) -> Iterable[Communication]:
    """Add the places where a template runs; return its collectives: for equal templates the same objects."""
    if not own:
        return ()
    repeated = chunks.setdefault(tuple(own), _Repeated(own, set()))
    repeated.places.update(places)
    return repeated.collectives.values()


def _overlap(plain: Iterable[TaskId], chunks: Iterable[_Repeated]) -> bool:
    """Return whether a collective is also named by one task, or by chunks whose templates name other collectives."""
    known: dict[TaskId, set[Place]] = defaultdict(set)
    for repeated in chunks:
        for name in repeated.collectives:
            if not known[name].isdisjoint(repeated.places):
                return True
            known[name] |= repeated.places
    places = ((TaskId._make((*each[:8], None, None, *each[10:])), (each.micro_batch, each.stage)) for each in plain)
    return any(name in known and place in known[name] for name, place in places)


def _count_distinct(communications: Iterable[Communication]) -> Sequence[tuple[Communication, int]]:
    """Return distinct communications, compared by identity, and the number of each."""
    several = list(communications)
    distinct = {id(each): each for each in several}
    return [(distinct[number], count) for number, count in Counter(map(id, several)).items()]


@dataclass(frozen=True)
class Program(Source):
    """One training step of every rank: tasks, the collectives that they name, and persistent memory.

    Where ranks synchronize fragments of the parameters (`policies.in_fragments`), it covers all steps of a period.
    Ranks with equal inputs share one role and are lowered once.
    """

    tasks: Sequence[Sequence[Task]]
    """Tasks of each role: tuples, or an `Outline`."""
    communications: Mapping[TaskId, Communication]
    persistent: tuple[dict[str, float], ...]
    """Persistent bytes by category, for each role."""
    push_density: float | None = None
    publish_density: float | None = None
    on_host: tuple[dict[str, float], ...] = ()
    """Bytes kept in host memory by category, for each role; empty if there are none."""
    roles: tuple[int, ...] = ()
    """Role of each rank; empty: every rank has its own."""
    tensors: tuple[Callable[[], Mapping[str, tuple[float, ...]]], ...] = field(default=(), compare=False)
    """For each role, a function that returns the bytes of each persistent tensor by category; empty: each category is
    one tensor.
    """

    @cached_property
    def exchanges(self) -> Sequence[tuple[Communication, int]]:
        """Distinct collectives, compared by identity, and the number of each in a step."""
        named = self.communications
        return named.counted if isinstance(named, Collectives) else _count_distinct(named.values())

    @cached_property
    def communicating_groups(self) -> Collection[frozenset[int]]:
        """Groups of at least two ranks that communicate in the program's collectives, without duplicates."""
        families = {each.groups for each, _ in self.exchanges}
        return {frozenset(group) for groups in families for group in groups if len(group) > 1}

    @cached_property
    def uneven(self) -> Mapping[TaskId, Communication]:
        """Collectives in which ranks send or receive parts of unequal sizes. None are listed if no step's sizes depend
        on the data: nothing then needs their names, and pipelines that divide sequences have very many.
        """
        selects = self.push_density is not None or self.publish_density is not None
        if not selects and not any(each.data_dependent for each, _ in self.exchanges):
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

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Name of each member in the model."""
        return tuple(instance.name_of(parameter) for instance, parameter in self.members)

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
    """Whether earlier micro-batches communicated their own gradients."""

    def __hash__(self) -> int:
        """Return equal hashes for equal micro-batches: they are parts of many keys."""
        return self.index

    @property
    def first(self) -> bool:
        """Whether it is the first micro-batch of the step."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it is the last micro-batch of the step."""
        return self.index + 1 == self.count

    @property
    def accumulates(self) -> bool:
        """Whether its gradients are added to whole gradients that earlier micro-batches left."""
        return self.index > 0 and not self.sent_before

    @property
    def number(self) -> int | None:
        """Its index as shown in task identities; None if it is the only micro-batch."""
        return self.index if self.count > 1 else None
