"""What one rank does at a time, and what all ranks do in a step."""

from dataclasses import dataclass

from gssim.collectives import Communication
from gssim.memory import (
    NOTHING,
    Footprint,
)


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


@dataclass(frozen=True)
class Program:
    """One step of every rank, the collectives that its tasks name, and what each rank holds all the time."""

    tasks: tuple[tuple[Task, ...], ...]
    communications: dict[str, Communication]
    persistent: tuple[dict[str, float], ...]
    push_density: float | None = None
