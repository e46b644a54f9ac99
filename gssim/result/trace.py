"""Export of one step as a Chrome trace for Perfetto: spans of all ranks, arrows for waits, and memory over time.

The format is Chrome's JSON ("Trace Event Format", in the catapult project's documentation): complete events (`X`) for
spans, flow events (`s`, `f`) for arrows, counters (`C`), instants (`i`) and metadata (`M`).
[Note: times] Perfetto drops events before time 0, and spans that overlap without nesting. So times begin at the first
event, and are multiples of 1/8 microsecond, which are exact in binary and whole nanoseconds.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gssim.result.result import Result, Span

TICKS_PER_S = 8_000_000
TICKS_PER_US = 8
STREAMS = ("compute", "communication", "host")
"""Order in which streams are shown; all others follow, by name."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A dependency between spans: a message from the first to the second, or a wait of the second for the first."""

    label: str
    source: int
    """Index of the span in the step."""
    target: int


@dataclass(frozen=True, slots=True)
class Held:
    """Allocated memory of a rank from `time_s` until the rank's next entry."""

    rank: int
    time_s: float
    total_bytes: float
    by_category_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes by category, which sum to the total; empty if not known."""


@dataclass(frozen=True)
class Step:
    """One step of all ranks; times are in seconds since the last rank began the step."""

    spans: Sequence[Span]
    bounds_s: Mapping[int, tuple[float, float]]
    """Start and end of the step on each rank."""
    arrows: Sequence[Arrow] = ()
    held: Sequence[Held] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """Name of a rank, shown beside its number."""


def arrows_among(spans: Sequence[Span], members: Sequence[int], label: str) -> list[Arrow]:
    """Return the arrows of one collective: from the member that arrived last to each member that waited for it.

    `members`: indices of the members' spans. A member whose span ended before the last arrival has not waited.

    >>> spans = [Span(rank, "compute", "all-reduce", "exposed_communication", rank, 5.0) for rank in range(3)]
    >>> [(arrow.source, arrow.target) for arrow in arrows_among(spans, [0, 1, 2], "all-reduce")]
    [(2, 0), (2, 1)]
    """
    last = max(members, key=lambda number: (spans[number].start_s, spans[number].rank))
    return [
        Arrow(label, last, number)
        for number in members
        if number != last and spans[number].end_s >= spans[last].start_s and spans[number].rank != spans[last].rank
    ]


def chrome_trace(step: Step, result: Result) -> str:
    """Return a step as Chrome-trace JSON: a process for each rank, a thread for each of its streams, times in us.

    `result`: Result of the step's run. `otherData` identifies it, contains it in full if it was measured, and gives the
    start of the step on the time axis, and the time of a simulated step.
    """
    return json.dumps(_trace(step, result)) + "\n"


def _trace(step: Step, result: Result) -> dict[str, Any]:
    events = _Events(step)
    about = {key: getattr(result, key) for key in ("source", "scenario_id", "calibration_id", "step_time_s")}
    about["name"] = result.scenario.get("name")
    if result.source == "simulated" and (result.periods is not None or result.step_times_s):
        # the trace shows a whole period or, of unequal steps, one of them, and the Result has their mean or median
        about["step_time_s"] = max(end_s for _, end_s in step.bounds_s.values())
    if result.source == "measured":
        about["result"] = result.to_dict()  # so that the trace alone can be compared
    about["step_start_s"] = -events.zero / TICKS_PER_S
    every = [*events.names(), *events.spans(), *events.flows(), *events.counters()]
    return {"traceEvents": every, "displayTimeUnit": "ms", "otherData": about}


def _ticks(time_s: float) -> int:
    return round(time_s * TICKS_PER_S)


def _place(stream: str) -> tuple[int, str]:
    return (STREAMS.index(stream) if stream in STREAMS else len(STREAMS), stream)


def process_of(rank: int) -> int:
    """Return the process id of a rank in a trace; 0 would be the idle process of the machine.

    >>> process_of(0)
    1
    """
    return rank + 1


def _placed(spans: Sequence[Span]) -> dict[int, tuple[int, int]]:
    """Return the first and last tick of each span, by number, in order of thread and time; see [Note: times].

    If two spans overlap without nesting, the earlier one ends where the later one begins. This agrees with the count of
    phases, in which the span that began last is the active one.
    """
    lanes: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, span in enumerate(spans):
        lanes[span.rank, span.stream].append(number)
    ticks = {number: (_ticks(span.start_s), _ticks(span.end_s)) for number, span in enumerate(spans)}
    placed: dict[int, tuple[int, int]] = {}
    for lane in sorted(lanes, key=lambda lane: (lane[0], _place(lane[1]))):
        ordered = sorted(lanes[lane], key=lambda number: (ticks[number][0], -ticks[number][1], number))
        enclosing: list[int] = []
        for number in ordered:
            start, end = ticks[number]
            while enclosing and placed[enclosing[-1]][1] <= start:
                enclosing.pop()
            while enclosing and placed[enclosing[-1]][1] < end:
                outer = enclosing.pop()
                placed[outer] = (placed[outer][0], start)
            placed[number] = (start, end)
            enclosing.append(number)
    return placed


class _Events:
    """A step's events in the file. `threads`: id of each rank's stream.

    Perfetto identifies threads by their ids only, so these are unique over all ranks. They also differ from process
    ids, which would denote main threads.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        times_s = [span.start_s for span in step.spans] + [began_s for began_s, _ in step.bounds_s.values()]
        self.zero = min(map(_ticks, times_s), default=0)
        """Tick at which the file's time begins."""
        streams = {(span.rank, span.stream) for span in step.spans} | {(rank, STREAMS[0]) for rank in step.bounds_s}
        first = process_of(max((rank for rank, _ in streams), default=0)) + 1
        in_order = sorted(streams, key=lambda stream: (stream[0], _place(stream[1])))
        self.threads = {stream: first + number for number, stream in enumerate(in_order)}
        self.placed = _placed(step.spans)

    def _us(self, ticks: int) -> float:
        return (ticks - self.zero) / TICKS_PER_US

    def names(self) -> Iterable[dict[str, Any]]:
        """Yield the names of processes and threads, and their order."""
        for rank in sorted({rank for rank, _ in self.threads}):
            pid = process_of(rank)
            label = self.step.names.get(rank)
            name = f"rank {rank}: {label}" if label else f"rank {rank}"
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank}}
        for (rank, stream), tid in self.threads.items():
            place = {"pid": process_of(rank), "tid": tid}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": stream}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}

    def spans(self) -> Iterable[dict[str, Any]]:
        """Yield all spans, and the moments at which each rank's step begins and ends."""
        for number, (start, end) in self.placed.items():
            span = self.step.spans[number]
            yield {
                "ph": "X",
                "name": span.label,
                "cat": span.phase,
                "pid": process_of(span.rank),
                "tid": self.threads[span.rank, span.stream],
                "ts": self._us(start),
                "dur": (end - start) / TICKS_PER_US,
                **({"args": {"general_labels": list(span.general_labels)}} if span.general_labels else {}),
            }
        for rank, bounds_s in sorted(self.step.bounds_s.items()):
            place = {"pid": process_of(rank), "tid": self.threads[rank, STREAMS[0]]}
            for name, time_s in zip(("step begins", "step ends"), bounds_s, strict=True):
                yield {"ph": "i", "name": name, "cat": "step", "s": "p", **place, "ts": self._us(_ticks(time_s))}

    def flows(self) -> Iterable[dict[str, Any]]:
        """Yield both ends of each arrow. It starts when both spans are active, or else at the end of the first one."""
        number = 0
        for arrow in self.step.arrows:
            (source_start, source_end), (start, end) = self.placed[arrow.source], self.placed[arrow.target]
            if source_end <= source_start or end <= start or end <= source_start:
                continue  # not visible
            number += 1
            # inside the span: an event at its end would be outside
            leaves = min(source_end - 1, max(source_start, start))
            arrives = min(end - 1, max(start, leaves))
            for phase, which, ticks in (("s", arrow.source, leaves), ("f", arrow.target, arrives)):
                span = self.step.spans[which]
                event = {"ph": phase, "name": arrow.label, "cat": "arrow", "id": number, "pid": process_of(span.rank)}
                event |= {"tid": self.threads[span.rank, span.stream], "ts": self._us(ticks)}
                yield event | ({"bp": "e"} if phase == "f" else {})

    def counters(self) -> Iterable[dict[str, Any]]:
        """Yield allocated memory: the total, under the same name in predictions and measurements, and if known by
        category.
        """
        shown: dict[int, dict[str, None]] = defaultdict(dict)
        for held in self.step.held:
            shown[held.rank] |= {category: None for category, size in sorted(held.by_category_bytes.items()) if size}
        for held in self.step.held:
            event = {"ph": "C", "pid": process_of(held.rank), "tid": self.threads[held.rank, STREAMS[0]]}
            event["ts"] = self._us(max(_ticks(held.time_s), self.zero))
            yield event | {"name": "memory", "args": {"allocated_bytes": held.total_bytes}}
            if shown[held.rank]:
                sizes = {f"{name}_bytes": held.by_category_bytes.get(name, 0.0) for name in shown[held.rank]}
                yield event | {"name": "memory by category", "args": sizes}
