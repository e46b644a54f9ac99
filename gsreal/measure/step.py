"""Timeline of a rank's spans, and one timed step of all ranks for a trace: spans, communication arrows and memory."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from gsreal.measure.memory import MemoryCounter, counting
from gsreal.run.rank import gather_json
from gssim.result import PHASES, Arrow, Held, Span, Step, arrows_among
from gssim.result.result import phases_of


@dataclass(frozen=True)
class Mark:
    """A recorded span: its ends are clock times, or events of a GPU."""

    label: str
    phase: str
    began: Any
    ended: Any
    group: Any = None
    """The process group with which it communicates, if any."""


class Timeline:
    """Spans of one rank: on the CPU by `clock`, wall-clock by default; events on a CUDA stream."""

    def __init__(self, rank: int, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self.rank, self.cuda, self._clock = rank, device.type == "cuda", clock
        self._marks: list[Mark] = []
        self._ends: list[Any] = []
        self._pauses: list[tuple[Any, Any]] = []
        self.step_mark = 0
        """Number of spans when the step began: argument of `phases_since`."""
        self.watch: Callable[[Any], None] | None = None
        """Called with every moment as it is marked."""

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
        """Record the body as a span of the compute stream; `group`: the ranks it communicates with."""
        began = self._now()
        yield
        self._marks.append(Mark(label, phase, began, self._now(), group))

    def mark(self) -> Any:
        """Return the current moment, for `between`."""
        return self._now()

    def between(self, label: str, phase: str, began: Any, ended: Any | None = None, *, group: Any = None) -> None:
        """Record a span from a mark until now or until another mark."""
        self._marks.append(Mark(label, phase, began, ended if ended is not None else self._now(), group))

    def restart(self) -> None:
        """Discard all spans; the first step that counts begins now."""
        self._marks, self._ends, self._pauses, self.step_mark = [], [self._now()], [], 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the body, between two steps: its spans and its duration."""
        marks, began = len(self._marks), self._now()
        yield
        del self._marks[marks:]
        self._pauses.append((began, self._now()))

    def end_step(self) -> None:
        """Record the end of a step."""
        self._ends.append(self._now())
        self.step_mark = len(self._marks)

    @property
    def spans_so_far(self) -> int:
        """Number of completed spans: argument of `phases_since`."""
        return len(self._marks)

    def phases_since(self, mark: int) -> dict[str, float]:
        """Return the seconds of each phase in the spans completed since there were `mark`; waits for a GPU."""
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

    def step(self, number: int, steps: int = 1) -> tuple[float, float, list[Mark], list[Span]]:
        """Return start, end, marks and spans of one or more steps since `restart`, on the clock of a machine's ranks.

        A pause between it and the step before is excluded.
        """
        zero = self._ends[0]
        zero_s = self._zero_s()
        start, end = (self._since(zero, moment) for moment in (self._ends[number], self._ends[number + steps]))
        paused = [self._since(zero, ended) for _, ended in self._pauses]
        start = max([start, *(ended for ended in paused if ended < end)])
        recorded = [(mark, self._span(mark, lambda moment: self._since(zero, moment))) for mark in self._marks]
        inside = [(mark, span) for mark, span in recorded if span.end_s > start and span.start_s < end]
        spans = [span._replace(start_s=span.start_s + zero_s, end_s=span.end_s + zero_s) for _, span in inside]
        return start + zero_s, end + zero_s, [mark for mark, _ in inside], spans

    def marks_since(self, mark: int) -> list[Mark]:
        """Return the spans completed since there were `mark`, as recorded."""
        return self._marks[mark:]

    def _zero_s(self) -> float:
        """Return the start of the first step that counts, on the host's clock."""
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


STAGE = re.compile(r"(forward|backward) stage (\d+) micro-batch (\d+)")
"""Labels of a pipeline stage's work: activations are sent to the next stage, and gradients to the one before."""


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, in seconds on its machine's clock."""

    device: str
    start_s: float
    end_s: float
    spans: list[Span]
    groups: list[tuple[int, ...]]
    """Ranks among which each span communicates; empty if it does not."""
    clock: str
    """Ranks with the same value share a clock."""
    held: list[tuple[float, int]]
    """(Time, peak bytes from then until the next); empty if memory cannot be counted."""


def median_step(ends_s: Sequence[float], which: Sequence[bool] | None = None) -> int:
    """Return the index of the step of median length on average over the ranks: the same one on each (a collective).

    `which`: whether each step counts; all by default.
    """
    every = gather_json(list(ends_s))
    steps = zip(*(pairwise(each) for each in every), strict=True)
    lengths = [fmean(after - before for before, after in pairs) for pairs in steps]
    counted = [step for step in range(len(lengths)) if which is None or which[step]]
    return sorted(counted, key=lambda step: (lengths[step], step))[len(counted) // 2]


def step_of_rank(
    timeline: Timeline,
    number: int,
    *,
    device: str,
    counter: MemoryCounter,
    again: Callable[[], object],
    steps: int = 1,
) -> RankStep:
    """Return a step since `restart`, or several; their memory is that of `again`, which runs as many untimed steps.

    Between two moments that are marked in both, the memory is the peak of the untimed step there.
    """
    start_s, end_s, marks, spans = timeline.step(number, steps)
    before = timeline.spans_so_far
    with _record_peaks(timeline, counter) as peaks:
        again()
    there = timeline.marks_since(before)
    return RankStep(
        device=device,
        start_s=start_s,
        end_s=end_s,
        spans=spans,
        groups=[_ranks(mark.group) for mark in marks],
        clock=_clock(),
        held=_held(peaks, there, marks, spans, start_s),
    )


@contextmanager
def _record_peaks(timeline: Timeline, counter: MemoryCounter) -> Iterator[list[tuple[Any, int]]]:
    """Yield a list that is filled with each moment marked inside, and the peak since the one before it."""
    peaks: list[tuple[Any, int]] = []

    def note(moment: Any) -> None:
        peaks.append((moment, counter.peak()))
        counter.reset()

    if counter.method == "dispatch":  # that counts whole steps
        yield peaks
        return
    counter.reset()
    timeline.watch = note
    try:
        with counting():
            yield peaks
    finally:
        timeline.watch = None


def _held(
    peaks: Sequence[tuple[Any, int]], there: Sequence[Mark], here: Sequence[Mark], spans: Sequence[Span], start_s: float
) -> list[tuple[float, int]]:
    """Return (time, peak bytes), by the spans common to both steps; empty if these differ."""
    if not peaks or [mark.label for mark in there] != [mark.label for mark in here]:
        return []
    times_s = {}
    for mark, span in zip(there, spans, strict=True):
        times_s[id(mark.began)], times_s[id(mark.ended)] = span.start_s, span.end_s
    curve, since_s, most = [], start_s, 0
    for moment, peak in peaks:
        most = max(most, peak)
        if id(moment) in times_s:
            curve.append((since_s, most))
            since_s, most = times_s[id(moment)], 0
    return [*curve, (since_s, most)] if most else curve


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group))) if group is not None else ()


def _clock() -> str:
    """Return an identifier of this machine's clock: Linux counts seconds since boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"rank {dist.get_rank()}"


def combine_ranks(ranks: Sequence[RankStep]) -> Step:
    """Return one step of all ranks, starting when the last of them began it.

    Ranks on a machine with a clock of its own are shown as if they had begun it at that moment.
    """
    first = ranks[0].clock
    zero_s = max(each.start_s for each in ranks if each.clock == first)
    zeros_s = [zero_s if each.clock == first else each.start_s for each in ranks]
    spans = [
        span._replace(start_s=span.start_s - zero, end_s=span.end_s - zero)
        for each, zero in zip(ranks, zeros_s, strict=True)
        for span in each.spans
    ]
    groups = [group for each in ranks for group in each.groups]
    return Step(
        spans=spans,
        bounds_s={
            rank: (each.start_s - zero, each.end_s - zero)
            for rank, (each, zero) in enumerate(zip(ranks, zeros_s, strict=True))
        },
        arrows=[*_collective_arrows(spans, groups), *_stage_arrows(spans, groups)],
        held=[
            Held(rank, time_s - zero, float(size))
            for rank, (each, zero) in enumerate(zip(ranks, zeros_s, strict=True))
            for time_s, size in each.held
        ],
        names={rank: each.device for rank, each in enumerate(ranks)},
    )


def _collective_arrows(spans: Sequence[Span], groups: Sequence[tuple[int, ...]]) -> list[Arrow]:
    """Return arrows between spans of one label and group: the k-th of each member are the same collective."""
    met: dict[tuple[str, tuple[int, ...], int], list[int]] = defaultdict(list)
    seen: dict[tuple[str, tuple[int, ...], int], int] = defaultdict(int)
    for number, (span, group) in enumerate(zip(spans, groups, strict=True)):
        if group and not STAGE.fullmatch(span.label):
            met[span.label, group, seen[span.label, group, span.rank]].append(number)
            seen[span.label, group, span.rank] += 1
    whole = [(label, members) for (label, group, _), members in met.items() if len(members) == len(group)]
    return [arrow for label, members in whole for arrow in arrows_among(spans, members, label)]


def _stage_arrows(spans: Sequence[Span], groups: Sequence[tuple[int, ...]]) -> list[Arrow]:
    """Return arrows of a pipeline's messages, from stage to stage."""
    work: dict[tuple[str, int, str, tuple[int, ...]], int] = {}
    for number, (span, group) in enumerate(zip(spans, groups, strict=True)):
        match = STAGE.fullmatch(span.label)
        if match and group:
            work[match[1], int(match[2]), match[3], group] = number
    arrows = []
    for (phase, stage, micro_batch, group), number in work.items():
        next_stage, what = (stage + 1, "activation") if phase == "forward" else (stage - 1, "gradient")
        target = work.get((phase, next_stage, micro_batch, group))
        if target is not None and spans[target].rank != spans[number].rank:
            arrows.append(Arrow(f"send {what} of stage {stage} micro-batch {micro_batch}", number, target))
    return arrows
