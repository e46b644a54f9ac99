"""What one rank holds while a program runs."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gssim.memory import NOTHING, Footprint

if TYPE_CHECKING:
    from gssim.program import Task


NOISE_BYTES = 1e-3
"""Expected sizes of messages are fractions, and what is taken and given back of these in another order leaves rounding
errors: less than this is nothing."""


class Memory:
    """What one rank holds: by category, and at its worst moment."""

    def __init__(self, held: dict[str, float]) -> None:
        self.held = held
        self.peak_bytes = 0.0
        self.peak: dict[str, float] = {}
        self._transient: dict[str, Footprint] = {}
        self._held_bytes = sum(held.values())

    def begin(self, stream: str, need: Footprint) -> None:
        """Hold a task's worst moment while it runs."""
        self._transient[stream] = need
        total = self._held_bytes + sum([part.peak_bytes for part in self._transient.values()])
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak = dict(self.held)
            for part in self._transient.values():
                for category, size in part.peak:
                    self.peak[category] = self.peak.get(category, 0.0) + size

    def end(self, stream: str) -> None:
        """Keep what the task leaves."""
        need = self._transient[stream]
        self._transient[stream] = NOTHING
        for category, size in need.kept:
            self._keep(category, size)

    def _keep(self, category: str, size_bytes: float) -> None:
        held = self.held.get(category, 0.0) + size_bytes
        self.held[category] = held if abs(held) > NOISE_BYTES else 0.0
        self._held_bytes += size_bytes

    def through(self, tasks: "Iterable[Task]") -> "Memory":
        """Return itself after tasks of the compute stream, one after another."""
        beside = sum(part.peak_bytes for stream, part in self._transient.items() if stream != "compute")
        for task in tasks:
            need = task.need
            if self._held_bytes + beside + need.peak_bytes > self.peak_bytes:
                self.begin("compute", need)
            for category, size in need.kept:
                self._keep(category, size)
        self._transient["compute"] = NOTHING
        return self
