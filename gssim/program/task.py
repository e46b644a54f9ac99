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
    cold: "Cold | None" = None


@dataclass(frozen=True)
class Cold:
    """What a pause does to a piece of compute: caches no longer hold what it works with."""

    piece: str
    """Its name; those of equal names, such as of several micro-batches, keep each other warm."""
    excess: Curve
    """How much longer it takes, over its time without a pause, by seconds that the device has waited since it ran."""

    def excess_ratio(self, pause_s: float) -> float:
        """Return what a pause adds, over the time without it.

        >>> Cold("forward head", Curve(sizes=(0.1, 0.2), values=(0.5, 0.75))).excess_ratio(0.05)
        0.25
        """
        return self.excess.at(min(pause_s, self.excess.sizes[-1]))


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
