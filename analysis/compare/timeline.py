"""One step as two traces tell it, predicted and measured: what each rank did when, in blocks that can be compared.

The traces are those of `--trace` (Chrome's format). A prediction knows layers and a measurement phases: so layers of
one phase that follow each other become one block. Waits keep their names, which are the same on both sides.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gssim.errors import UserError
from gssim.files import read_json
from gssim.result import PHASES, Span

NO_TRACE = "not a trace as `gssim run --trace` and `gsreal run --trace` write them"
WAITING = "exposed_communication"
JOINED_RATIO = 0.002
"""Of a step: blocks of one kind that are no further apart are one; a line of the picture is wider."""


@dataclass(frozen=True)
class Block:
    """A stretch of time in which a stream did one thing."""

    label: str
    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Lane:
    """What a stream of a rank did in one step, in order of time; blocks of the compute stream do not overlap."""

    rank: int
    stream: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Step:
    """One step of all ranks, from 0 to `time_s`."""

    time_s: float
    lanes: tuple[Lane, ...]
    scenario_id: str | None = None
    """Absent where the trace does not say what it is of."""
    source: str | None = None
    """The same."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the trace shows."""
        return tuple(sorted({lane.rank for lane in self.lanes}))

    def lanes_of(self, rank: int) -> tuple[Lane, ...]:
        """Return the streams of a rank, the compute stream last."""
        lanes = [lane for lane in self.lanes if lane.rank == rank]
        return tuple(sorted(lanes, key=lambda lane: (lane.stream == "compute", lane.stream)))


def read_step(path: Path) -> Step:
    """Return the step in a trace file; raise UserError where there is none."""
    data = _read(path)
    spans, about = _spans_of(data, path), data.get("otherData", {})
    time_s, source = about.get("step_time_s"), about.get("source")
    if source != "simulated" or not isinstance(time_s, float):
        time_s = max(span.end_s for span in spans)  # a measured step ends with its last span
    return replace(step_of(spans, time_s), scenario_id=about.get("scenario_id"), source=source)


def step_of(spans: Sequence[Span], time_s: float) -> Step:
    """Return the step of spans, from 0 to `time_s`; what reaches beyond is cut, what is not in it left out."""
    streams: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        start_s, end_s = max(0.0, span.start_s), min(time_s, span.end_s)
        if end_s > start_s:
            streams[span.rank, span.stream].append(span._replace(start_s=start_s, end_s=end_s))
    return Step(
        time_s,
        tuple(
            Lane(rank, stream, tuple(joined(uncovered(own) if stream == "compute" else own, JOINED_RATIO * time_s)))
            for (rank, stream), own in sorted(streams.items())
        ),
    )


def named_alike(step: Step, other: Step) -> Step:
    """Return a step in which what the other step calls by a shorter name has that name: layers are not told apart.

    `all-gather blocks.0` becomes `all-gather` where the other step has that.
    """
    names = {block.label for lane in other.lanes for block in lane.blocks}

    def alike(block: Block) -> Block:
        words = block.label.split(" ")
        shorter = (" ".join(words[:count]) for count in range(len(words), 0, -1))
        return replace(block, label=next((name for name in shorter if name in names), block.label))

    lanes = tuple(replace(lane, blocks=tuple(map(alike, lane.blocks))) for lane in step.lanes)
    return replace(step, lanes=lanes)


def uncovered(spans: Iterable[Span]) -> list[Span]:
    """Return spans cut where others begin inside them: of those that nest, the one that began last counts.

    >>> outer, inner = (Span(0, "compute", name, name, *times) for name, times in (("a", (0, 9)), ("b", (4, 6))))
    >>> [(span.label, span.start_s, span.end_s) for span in uncovered([outer, inner])]
    [('a', 0, 4), ('b', 4, 6), ('a', 6, 9)]
    """
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    edges = sorted({edge for span in ordered for edge in (span.start_s, span.end_s)})
    found = []
    active: list[Span] = []
    upcoming = 0
    for left, right in pairwise(edges):
        while upcoming < len(ordered) and ordered[upcoming].start_s <= left:
            active.append(ordered[upcoming])
            upcoming += 1
        active = [span for span in active if span.end_s > left]
        if active:
            found.append(active[-1]._replace(start_s=left, end_s=right))
    return found


def joined(spans: Sequence[Span], gap_s: float) -> list[Block]:
    """Return spans as blocks; those of one kind that follow within `gap_s` are one.

    On the compute stream the kind is the phase, and what is waited for; on other streams every span is a block.
    """
    blocks: list[Block] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        named = span.stream != "compute" or span.phase == WAITING
        label = span.label if named else span.phase
        before = blocks[-1] if blocks and span.stream == "compute" else None
        if before and (before.label, before.phase) == (label, span.phase) and span.start_s - before.end_s <= gap_s:
            blocks[-1] = replace(before, end_s=span.end_s)
        else:
            blocks.append(Block(label, span.phase, span.start_s, span.end_s))
    return blocks


def _read(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("otherData", {}), dict):
        raise UserError(f"{path}: {NO_TRACE}")
    return data


def _spans_of(data: dict[str, Any], path: Path) -> list[Span]:
    try:
        events = data["traceEvents"]
        names = [event for event in events if event["ph"] == "M"]
        streams = {
            (event["pid"], event["tid"]): event["args"]["name"] for event in names if event["name"] == "thread_name"
        }
        ranks = {event["pid"]: _rank(event["args"]["name"]) for event in names if event["name"] == "process_name"}
        zero_s = float(data.get("otherData", {}).get("step_start_s", 0.0))
        spans = [_span(event, ranks, streams, zero_s) for event in events if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: {NO_TRACE}") from None
    if not spans:
        raise UserError(f"{path}: the trace has no spans")
    unknown = sorted({span.phase for span in spans} - set(PHASES))
    if unknown:
        raise UserError(f"{path}: traceEvents: cat = {unknown[0]!r}: unknown phase; allowed: {', '.join(PHASES)}")
    return spans


def _rank(process_name: str) -> int:
    """Return the rank that a process is named after: `rank 0`, or `rank 0: a100`."""
    return int(process_name.removeprefix("rank ").partition(":")[0])


def _span(event: dict[str, Any], ranks: dict[int, int], streams: dict[tuple[int, int], str], zero_s: float) -> Span:
    start_s = event["ts"] * 1e-6 - zero_s
    stream = streams[event["pid"], event["tid"]]
    return Span(ranks[event["pid"]], stream, event["name"], event["cat"], start_s, start_s + event["dur"] * 1e-6)
