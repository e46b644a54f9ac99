"""Spans on a clock, and the times at which steps ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gssim.result import PHASES, Span, phases_of


class Timeline:
    """Spans of one rank: on the CPU by `clock`, wall-clock if none is given; events on a CUDA stream."""

    def __init__(self, rank: int, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self.rank, self.cuda, self._clock = rank, device.type == "cuda", clock
        self._marks: list[tuple[str, str, str, Any, Any]] = []
        self._ends: list[Any] = []
        self._pauses: list[tuple[Any, Any]] = []
        self.step_mark = 0
        """How many spans there were when the step began: what `phases_since` takes."""

    def _now(self) -> Any:
        if not self.cuda:
            return self._clock() if self._clock else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, label: str, phase: str) -> Iterator[None]:
        """Record what goes on inside as a span of the compute stream."""
        began = self._now()
        yield
        self._marks.append(("compute", label, phase, began, self._now()))

    def mark(self) -> Any:
        """Return the present, for `between`."""
        return self._now()

    def between(self, label: str, phase: str, began: Any, ended: Any | None = None) -> None:
        """Record a span from a mark until now or until another mark."""
        self._marks.append(("compute", label, phase, began, ended if ended is not None else self._now()))

    def restart(self) -> None:
        """Forget all spans; the first step that counts begins now."""
        self._marks, self._ends, self._pauses, self.step_mark = [], [self._now()], [], 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what goes on inside, between two steps: its spans, and the time that it takes."""
        marks, began = len(self._marks), self._now()
        yield
        del self._marks[marks:]
        self._pauses.append((began, self._now()))

    def end_step(self) -> None:
        """Note the end of a step."""
        self._ends.append(self._now())
        self.step_mark = len(self._marks)

    @property
    def spans_so_far(self) -> int:
        """How many spans have ended: what `phases_since` takes."""
        return len(self._marks)

    def phases_since(self, mark: int) -> dict[str, float]:
        """Return the seconds of each phase in the spans that have ended since there were `mark`; waits for a GPU."""
        marks = self._marks[mark:]
        if self.cuda:
            torch.cuda.synchronize()
        if not marks:
            return dict.fromkeys(PHASES, 0.0)
        zero = marks[0][3]
        times = [(self._since(zero, began), self._since(zero, ended)) for _, _, _, began, ended in marks]
        spans = [
            Span(self.rank, stream, label, phase, began_s, ended_s)
            for (stream, label, phase, _, _), (began_s, ended_s) in zip(marks, times, strict=True)
        ]
        return phases_of(spans, start_s=min(began for began, _ in times), end_s=max(ended for _, ended in times))

    def read(self) -> tuple[list[Span], list[float]]:
        """Return all spans and ends of steps since `restart`, in seconds from it; the first end is its own."""
        if self.cuda:
            torch.cuda.synchronize()
        zero = self._ends[0]
        pauses = [(self._since(zero, began), self._since(zero, ended)) for began, ended in self._pauses]

        def at(mark: Any) -> float:
            time_s = self._since(zero, mark)
            return time_s - sum(ended - began for began, ended in pauses if ended <= time_s)

        spans = [
            Span(self.rank, stream, label, phase, at(began), at(ended))
            for stream, label, phase, began, ended in self._marks
        ]
        return spans, [at(end) for end in self._ends]

    def _since(self, zero: Any, mark: Any) -> float:
        return zero.elapsed_time(mark) / 1e3 if self.cuda else mark - zero
