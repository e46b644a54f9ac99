"""What one rank does at a time, and what all ranks do in a step.

What of a step travels together, and what is taken at a time: buckets of gradients, and micro-batches of samples.
"""

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
    """One thing that a rank does: compute for `duration_s`, or take part in `communication`."""

    label: str
    phase: str
    stream: str = "compute"
    duration_s: float = 0.0
    communication: str | None = None
    after: tuple[str, ...] = ()
    need: Footprint = NOTHING
    after_pauses: Curve | None = None
    """How much longer compute takes, this and what follows, after so many seconds of waiting."""
    issue: "Issue | None" = None

    def renamed(self, label: str, communication: str | None, after: tuple[str, ...]) -> "Task":
        """Return the same under another name, naming others (`dataclasses.replace` takes several times as long).

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
    """What a GPU's host takes to issue a piece of compute that is not done sooner, whatever the device waits for."""

    host_s: float
    goes_on: bool
    """Whether the host came from issuing the piece before; else it begins when the device does."""


@dataclass(frozen=True)
class Program:
    """One step of every rank, the collectives that its tasks name, and what each rank holds all the time.

    Ranks of equal inputs have one role, and are lowered once.
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
    """What tells of what is persistent the bytes of each tensor; empty: each category is one. By role."""

    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns, which is called if this key is new: what follows from the program lives as long
        as it does.
        """
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    @cached_property
    def role_of(self) -> tuple[int, ...]:
        """Role of each rank."""
        return self.roles or tuple(range(len(self.tasks)))


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together, in the order in which they become ready."""

    index: int
    members: tuple[tuple[LayerInstance, Parameter], ...]

    @cached_property
    def elements(self) -> int:
        """Number of gradient elements."""
        return sum(parameter.elements for _, parameter in self.members)

    def place(self, member: int) -> tuple[int, int]:
        """Return (layer, position) of the backward at which the given member is ready."""
        instance, parameter = self.members[member]
        return instance.index + parameter.ready.layer_offset, parameter.ready.position

    @property
    def complete(self) -> tuple[int, int]:
        """Where in the backward the last member is ready: (layer, position)."""
        return self.place(-1)

    @property
    def started(self) -> tuple[int, int]:
        """Where in the backward the first member is ready."""
        return self.place(0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each member's elements begin."""
        return tuple(accumulate((parameter.elements for _, parameter in self.members[:-1]), initial=0))

    def inside(self, first: int, last: int) -> Iterator[tuple[LayerInstance, Parameter, int, int]]:
        """Give each member that has elements in [first, last), with the half-open range of its own that are there."""
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
    """One of the parts in which a rank's samples are taken."""

    index: int = 0
    count: int = 1
    leaves: bool = True
    """Whether gradients leave the device in it, where the plan lets them leave at all."""
    left: bool = False
    """Whether those of the micro-batches before have left in theirs."""

    @property
    def first(self) -> bool:
        """Whether no other comes before it in the step."""
        return self.index == 0

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients of the micro-batches before are there, to which its own are added."""
        return self.index > 0 and not self.left

    @property
    def suffix(self) -> str:
        """What its labels end in."""
        return f" micro-batch {self.index}" if self.count > 1 else ""
