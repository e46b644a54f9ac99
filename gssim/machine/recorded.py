"""What one rank holds, as it changes: for a trace."""

from collections.abc import Callable

from gssim.machine.held import Memory
from gssim.memory import Footprint


class Recorded(Memory):
    """What one rank holds, and how it came to that."""

    def __init__(self, held: dict[str, float], now_s: Callable[[], float]) -> None:
        super().__init__(held)
        self.now_s = now_s
        self.log: list[tuple[float, dict[str, float]]] = [(now_s(), dict(held))]
        """From which time on it holds what, by category; while a task runs, what it holds at its worst moment."""

    def begin(self, stream: str, need: Footprint) -> None:
        """Hold a task's worst moment while it runs."""
        super().begin(stream, need)
        self._note()

    def end(self, stream: str) -> None:
        """Keep what the task leaves."""
        super().end(stream)
        self._note()

    def _note(self) -> None:
        level = dict(self.held)
        for part in self._transient.values():
            for category, size in part.peak:
                level[category] = level.get(category, 0.0) + size
        self.log.append((self.now_s(), level))
