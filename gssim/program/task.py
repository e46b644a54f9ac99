"""Tasks of a rank, the program of a training step, and the gradient buckets and micro-batches that tasks refer to."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, cast

from gssim.cluster import Curve
from gssim.collectives import Communication
from gssim.memory import NOTHING, Footprint
from gssim.workload import LayerInstance, Parameter

P = ParamSpec("P")
T = TypeVar("T")


Operation = Literal[
    "forward",
    "recompute",
    "backward",
    "gradient-norm",
    "clip",
    "optimizer",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "compress",
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
    "sum-gradients",
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
`sum-gradients`: of gradients of what they run on these parts. `parameters`: updated tensors that ZeRO-1 broadcasts, all
together. `outer`: the synchronization of parameters that ends an outer step; `inner-steps`: `part` steps before it,
which a rank does alone. `other`: in a program written by hand, whose labels are `layer`."""
Action = Literal[
    "",
    "issue",
    "cast",
    "issue-cast",
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
    "messages": "",
    "share-compute-times": "share compute times",
    "gather-sequence": "all-gather sequence",
    "scatter-sequence": "reduce-scatter sequence",
    "sum-gradients": "all-reduce partial gradients",
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

    def at(self, *, micro_batch: int | None = None, stage: int | None = None) -> "TaskId":
        """Return the same operation in a micro-batch, or of a stage.

        >>> TaskId("backward", layer="h.0", part=1).at(micro_batch=2).label
        'backward h.0 part 1 micro-batch 2'
        """
        number = self.micro_batch if micro_batch is None else micro_batch
        return TaskId._make((*self[:8], number, self.stage if stage is None else stage, *self[10:]))

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
        before = self.op in ("all-reduce", "gather-sequence", "scatter-sequence")
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
        if self.group is not None:
            yield f"of {_ranks_text(self.group)}"
        if self.inner:
            yield "(inner step)"


def _ranks_text(group: Sequence[int]) -> str:
    if isinstance(group, range) and len(group) > 2:
        return f"ranks {group[0]}-{group[-1]}" + (f" by {group.step}" if group.step > 1 else "")
    return f"ranks {', '.join(map(str, group))}"


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


@dataclass(frozen=True)
class Program:
    """One training step of every rank: tasks, the collectives that they name, and persistent memory.

    Ranks with equal inputs have one role, and are lowered once.
    """

    tasks: tuple[tuple[Task, ...], ...]
    """By role."""
    communications: dict[TaskId, Communication]
    persistent: tuple[dict[str, float], ...]
    """By role."""
    push_density: float | None = None
    publish_density: float | None = None
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
