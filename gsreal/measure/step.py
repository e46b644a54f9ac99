"""One timed step, as a trace shows it: what each rank did, with whom, and what it held."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist

from gsreal.measure.memory import MemoryCounter
from gsreal.measure.timeline import Mark, Timeline
from gsreal.rank import everybodys
from gssim.result import Span
from gssim.trace import Arrow, Held, Step, arrows_among

STAGE = re.compile(r"(forward|backward) stage (\d+) micro-batch (\d+)")
"""What a pipeline's stages call their work: activations go to the next stage, and gradients to the one before."""


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, in seconds on its machine's clock."""

    device: str
    start_s: float
    end_s: float
    spans: list[Span]
    groups: list[tuple[int, ...]]
    """Of each span: the ranks among which it communicates; none: it does not."""
    clock: str
    """Ranks that say the same here share a clock."""
    held: list[tuple[float, int]]
    """From when on it holds how many bytes at most, until the next; empty where that cannot be counted."""


def middle_step(ends_s: Sequence[float]) -> int:
    """Return which step is of median length on average over the ranks: the same one on each, all of which call this."""
    every = everybodys(list(ends_s))
    steps = zip(*(pairwise(each) for each in every), strict=True)
    lengths = [fmean(after - before for before, after in pairs) for pairs in steps]
    return sorted(range(len(lengths)), key=lambda step: (lengths[step], step))[len(lengths) // 2]


def rank_step(
    timeline: Timeline, number: int, *, device: str, counter: MemoryCounter, again: Callable[[], object]
) -> RankStep:
    """Return a step since `restart`; memory is that of another one, `again`, which is not timed.

    Between two moments that are marked in both, a rank holds what the other step held there at most.
    """
    start_s, end_s, marks, spans = timeline.step(number)
    before = timeline.spans_so_far
    with _watched(timeline, counter) as peaks:
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
def _watched(timeline: Timeline, counter: MemoryCounter) -> Iterator[list[tuple[Any, int]]]:
    """Yield what becomes a list: each moment that is marked inside, and the peak since the one before it."""
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
        yield peaks
    finally:
        timeline.watch = None


def _held(
    peaks: Sequence[tuple[Any, int]], there: Sequence[Mark], here: Sequence[Mark], spans: Sequence[Span], start_s: float
) -> list[tuple[float, int]]:
    """Return from when on how much was held, by the spans that both steps have; none where they have not the same."""
    if not peaks or [mark.label for mark in there] != [mark.label for mark in here]:
        return []
    times_s = {}
    for mark, span in zip(there, spans, strict=True):
        times_s[id(mark.began)], times_s[id(mark.ended)] = span.start_s, span.end_s
    found, since_s, most = [], start_s, 0
    for moment, peak in peaks:
        most = max(most, peak)
        if id(moment) in times_s:
            found.append((since_s, most))
            since_s, most = times_s[id(moment)], 0
    return [*found, (since_s, most)] if most else found


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group))) if group is not None else ()


def _clock() -> str:
    """Return what names this machine's clock: Linux counts seconds since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"rank {dist.get_rank()}"


def step_of(ranks: Sequence[RankStep]) -> Step:
    """Return one step of all ranks, from when the last of them began it.

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
        arrows=[*_of_collectives(spans, groups), *_of_stages(spans, groups)],
        held=[
            Held(rank, time_s - zero, float(size))
            for rank, (each, zero) in enumerate(zip(ranks, zeros_s, strict=True))
            for time_s, size in each.held
        ],
        names={rank: each.device for rank, each in enumerate(ranks)},
    )


def _of_collectives(spans: Sequence[Span], groups: Sequence[tuple[int, ...]]) -> list[Arrow]:
    """Return arrows of spans of one label and group: the k-th of each member are the same collective."""
    met: dict[tuple[str, tuple[int, ...], int], list[int]] = defaultdict(list)
    seen: dict[tuple[str, tuple[int, ...], int], int] = defaultdict(int)
    for number, (span, group) in enumerate(zip(spans, groups, strict=True)):
        if group and not STAGE.fullmatch(span.label):
            met[span.label, group, seen[span.label, group, span.rank]].append(number)
            seen[span.label, group, span.rank] += 1
    whole = [(label, members) for (label, group, _), members in met.items() if len(members) == len(group)]
    return [arrow for label, members in whole for arrow in arrows_among(spans, members, label)]


def _of_stages(spans: Sequence[Span], groups: Sequence[tuple[int, ...]]) -> list[Arrow]:
    """Return arrows of a pipeline's messages, from stage to stage."""
    work: dict[tuple[str, int, str, tuple[int, ...]], int] = {}
    for number, (span, group) in enumerate(zip(spans, groups, strict=True)):
        found = STAGE.fullmatch(span.label)
        if found and group:
            work[found[1], int(found[2]), found[3], group] = number
    arrows = []
    for (phase, stage, micro_batch, group), number in work.items():
        next_stage, what = (stage + 1, "activation") if phase == "forward" else (stage - 1, "gradient")
        target = work.get((phase, next_stage, micro_batch, group))
        if target is not None and spans[target].rank != spans[number].rank:
            arrows.append(Arrow(f"send {what} of stage {stage} micro-batch {micro_batch}", number, target))
    return arrows
