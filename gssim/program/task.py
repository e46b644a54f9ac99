"""Tasks of a rank, the program of a training step, and the gradient buckets and micro-batches that tasks refer to."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from gssim.cluster import Curve
from gssim.collectives import Communication
from gssim.memory import NOTHING, Footprint
from gssim.workload import LayerInstance, Parameter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a rank: computes for `duration_s`, or takes part in the collective `communication`."""

    label: str
    phase: str
    stream: str = "compute"
    duration_s: float = 0.0
    communication: str | None = None
    after: tuple[str, ...] = ()
    need: Footprint = NOTHING
    after_pauses: Curve | None = None
    """Extra compute time of this task and of those after it, as a function of the seconds waited before."""
    issue: "Issue | None" = None

    def renamed(self, label: str, communication: str | None, after: tuple[str, ...]) -> "Task":
        """Return a copy with another label, collective and dependencies (`dataclasses.replace` takes several times as
        long).

        >>> later = Task("a", "forward", duration_s=2.0).renamed("a 1", None, ("start",))
        >>> later.label, later.after, later.duration_s
        ('a 1', ('start',), 2.0)
        """
        return Task(
            label,
            self.phase,
            self.stream,
            self.duration_s,
            communication,
            after,
            self.need,
            self.after_pauses,
            self.issue,
        )


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
    communications: dict[str, Communication]
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

    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of `make`, computed once per key and kept for the lifetime of the program."""
        if key not in self._memo:
            self._memo[key] = make()
        value: T = self._memo[key]
        return value

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
    def suffix(self) -> str:
        """Suffix of its task labels."""
        return f" micro-batch {self.index}" if self.count > 1 else ""
