"""Spans on a clock, and the times at which steps ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gssim.result import PHASES, Span, phases_of


@dataclass(frozen=True)
class Mark:
    """A span as it was recorded: its ends are moments of the clock, or events of a GPU."""

    label: str
    phase: str
    began: Any
    ended: Any
    group: Any = None
    """The process group with which it communicates, if it does."""


class Timeline:
    """Spans of one rank: on the CPU by `clock`, wall-clock if none is given; events on a CUDA stream."""

    def __init__(self, rank: int, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self.rank, self.cuda, self._clock = rank, device.type == "cuda", clock
        self._marks: list[Mark] = []
        self._ends: list[Any] = []
        self._pauses: list[tuple[Any, Any]] = []
        self.step_mark = 0
        """How many spans there were when the step began: what `phases_since` takes."""
        self.watch: Callable[[Any], None] | None = None
        """Told of every moment that is marked, when it is."""

    def _now(self) -> Any:
        now: Any
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = self._clock() if self._clock else time.perf_counter()
        if self.watch:
            self.watch(now)
        return now

    @contextmanager
    def span(self, label: str, phase: str, group: Any = None) -> Iterator[None]:
        """Record what goes on inside as a span of the compute stream; `group`: with whom that communicates."""
        began = self._now()
        yield
        self._marks.append(Mark(label, phase, began, self._now(), group))

    def mark(self) -> Any:
        """Return the present, for `between`."""
        return self._now()

    def between(self, label: str, phase: str, began: Any, ended: Any | None = None, *, group: Any = None) -> None:
        """Record a span from a mark until now or until another mark."""
        self._marks.append(Mark(label, phase, began, ended if ended is not None else self._now(), group))

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
        zero = marks[0].began
        spans = [self._span(mark, lambda moment: self._since(zero, moment)) for mark in marks]
        return phases_of(spans, start_s=min(s.start_s for s in spans), end_s=max(s.end_s for s in spans))

    def _span(self, mark: Mark, at: Callable[[Any], float]) -> Span:
        return Span(self.rank, "compute", mark.label, mark.phase, at(mark.began), at(mark.ended))

    def read(self) -> tuple[list[Span], list[float]]:
        """Return all spans and ends of steps since `restart`, in seconds from it; the first end is its own."""
        if self.cuda:
            torch.cuda.synchronize()
        zero = self._ends[0]
        pauses = [(self._since(zero, began), self._since(zero, ended)) for began, ended in self._pauses]

        def at(mark: Any) -> float:
            time_s = self._since(zero, mark)
            return time_s - sum(ended - began for began, ended in pauses if ended <= time_s)

        return [self._span(mark, at) for mark in self._marks], [at(end) for end in self._ends]

    def step(self, number: int) -> tuple[float, float, list[Mark], list[Span]]:
        """Return start, end, marks and spans of a step since `restart`, on the clock of all of a machine's ranks.

        A pause between it and the step before is no part of it.
        """
        zero = self._ends[0]
        zero_s = self._zero_s()
        start, end = (self._since(zero, moment) for moment in self._ends[number : number + 2])
        paused = [self._since(zero, ended) for _, ended in self._pauses]
        start = max([start, *(ended for ended in paused if ended < end)])
        found = [(mark, self._span(mark, lambda moment: self._since(zero, moment))) for mark in self._marks]
        inside = [(mark, span) for mark, span in found if span.end_s > start and span.start_s < end]
        spans = [span._replace(start_s=span.start_s + zero_s, end_s=span.end_s + zero_s) for _, span in inside]
        return start + zero_s, end + zero_s, [mark for mark, _ in inside], spans

    def marks_since(self, mark: int) -> list[Mark]:
        """Return the spans that have ended since there were `mark`, as they were recorded."""
        return self._marks[mark:]

    def _zero_s(self) -> float:
        """Return when the first step that counts began, on the host's clock."""
        zero = self._ends[0]
        if not self.cuda:
            return float(zero)
        now = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        now.record()
        torch.cuda.synchronize()
        return time.perf_counter() - self._since(zero, now)

    def _since(self, zero: Any, mark: Any) -> float:
        return zero.elapsed_time(mark) / 1e3 if self.cuda else mark - zero
