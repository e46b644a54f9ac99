"""What one rank does at a time, and what all ranks do in a step."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from gssim.cluster import Curve
from gssim.collectives import Communication
from gssim.memory import (
    NOTHING,
    Footprint,
)

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
