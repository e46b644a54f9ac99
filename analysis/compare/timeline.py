"""One training step read from a Chrome trace (`--trace`), as blocks of time by rank and stream.

A predicted trace has layers and a measured one has phases; to make them comparable, consecutive layers of one phase are
merged into one block. Waits keep their names, which are the same on both sides.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gssim.errors import UserError
from gssim.execution.files import read_json
from gssim.result import MEASURED_PHASES, Span
from gssim.result.result import innermost

NO_TRACE = "not a trace as `gssim run --trace` and `gsreal run --trace` write them"
WAITING = "exposed_communication"
JOINED_RATIO = 0.002
"""Blocks of one kind are merged if the gap between them is at most this fraction of a step: a line is wider."""


@dataclass(frozen=True)
class Block:
    """An interval of time in which a stream did one kind of work."""

    label: str
    phase: str
    start_s: float
    end_s: float
    general_labels: tuple[str, ...] = ()
    """Labels that distinguish less; see `Span`."""


@dataclass(frozen=True)
class Lane:
    """The blocks of one stream of a rank in one step, in order of time; those of the compute stream do not overlap."""

    rank: int
    stream: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Step:
    """One step of all ranks, from 0 to `time_s`."""

    time_s: float
    lanes: tuple[Lane, ...]
    scenario_id: str | None = None
    """Absent where the trace does not state it."""
    source: str | None = None
    """`simulated` or `measured`; absent where the trace does not state it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the trace, ascending."""
        return tuple(sorted({lane.rank for lane in self.lanes}))

    def lanes_of(self, rank: int) -> tuple[Lane, ...]:
        """Return the streams of a rank, the compute stream last."""
        lanes = [lane for lane in self.lanes if lane.rank == rank]
        return tuple(sorted(lanes, key=lambda lane: (lane.stream == "compute", lane.stream)))


def read_step(path: Path) -> Step:
    """Return the step in a trace file; raise UserError where there is none."""
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("otherData", {}), dict):
        raise UserError(f"{path}: {NO_TRACE}")
    spans, metadata = _spans_of(data, path), data.get("otherData", {})
    time_s, source = metadata.get("step_time_s"), metadata.get("source")
    if source != "simulated" or not isinstance(time_s, float):
        time_s = max(span.end_s for span in spans)  # a measured step ends with its last span
    return replace(step_of(spans, time_s), scenario_id=metadata.get("scenario_id"), source=source)


def step_of(spans: Sequence[Span], time_s: float) -> Step:
    """Return the step from 0 to `time_s`; spans are clipped to it, and those outside are dropped."""
    streams: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        start_s, end_s = max(0.0, span.start_s), min(time_s, span.end_s)
        if end_s > start_s:
            streams[span.rank, span.stream].append(span._replace(start_s=start_s, end_s=end_s))
    lanes = []
    for (rank, stream), own in sorted(streams.items()):
        blocks = merged_blocks(flattened(own) if stream == "compute" else own, JOINED_RATIO * time_s)
        lanes.append(Lane(rank, stream, tuple(blocks)))
    return Step(time_s, tuple(lanes))


def with_common_labels(step: Step, other: Step) -> Step:
    """Return the step with the labels that the other step has, which may not distinguish layers.

    `all-gather blocks.0` becomes `all-gather` where the other step has that.
    """
    names = {block.label for lane in other.lanes for block in lane.blocks}

    def common(block: Block) -> Block:
        labels = (block.label, *block.general_labels)
        return replace(block, label=next((label for label in labels if label in names), block.label))

    lanes = tuple(replace(lane, blocks=tuple(map(common, lane.blocks))) for lane in step.lanes)
    return replace(step, lanes=lanes)


def flattened(spans: Iterable[Span]) -> list[Span]:
    """Return nested spans as disjoint ones: at every time, the span that began last.

    >>> outer, inner = (Span(0, "compute", name, name, *times) for name, times in (("a", (0, 9)), ("b", (4, 6))))
    >>> [(span.label, span.start_s, span.end_s) for span in flattened([outer, inner])]
    [('a', 0, 4), ('b', 4, 6), ('a', 6, 9)]
    """
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    edges = sorted({edge for span in ordered for edge in (span.start_s, span.end_s)})
    pieces = innermost(ordered, edges)
    return [span._replace(start_s=left, end_s=right) for left, right, span in pieces if span is not None]


def merged_blocks(spans: Sequence[Span], gap_s: float) -> list[Block]:
    """Return spans as blocks; consecutive spans of one kind within `gap_s` of each other are merged.

    On the compute stream the kind is the phase, or the label of a wait; on other streams every span is a block.
    """
    blocks: list[Block] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        named = span.stream != "compute" or span.phase == WAITING
        label = span.label if named else span.phase
        before = blocks[-1] if blocks and span.stream == "compute" else None
        if before and (before.label, before.phase) == (label, span.phase) and span.start_s - before.end_s <= gap_s:
            blocks[-1] = replace(before, end_s=span.end_s)
        else:
            blocks.append(Block(label, span.phase, span.start_s, span.end_s, span.general_labels if named else ()))
    return blocks


def _spans_of(data: dict[str, Any], path: Path) -> list[Span]:
    try:
        events = data["traceEvents"]
        names = [event for event in events if event["ph"] == "M"]
        streams = {
            (event["pid"], event["tid"]): event["args"]["name"] for event in names if event["name"] == "thread_name"
        }
        ranks = {  # a process is named `rank 0`, or `rank 0: a100`
            event["pid"]: int(event["args"]["name"].removeprefix("rank ").partition(":")[0])
            for event in names
            if event["name"] == "process_name"
        }
        zero_s = float(data.get("otherData", {}).get("step_start_s", 0.0))
        spans = []
        for event in events:
            if event["ph"] == "X":
                process, start_s = event["pid"], event["ts"] * 1e-6 - zero_s
                end_s = start_s + event["dur"] * 1e-6
                stream, label, phase = map(str, (streams[process, event["tid"]], event["name"], event["cat"]))
                general = tuple(map(str, event.get("args", {}).get("general_labels", ())))
                spans.append(Span(ranks[process], stream, label, phase, start_s, end_s, general))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: {NO_TRACE}") from None
    if not spans:
        raise UserError(f"{path}: the trace has no spans")
    unknown = sorted({span.phase for span in spans} - set(MEASURED_PHASES))
    if unknown:
        raise UserError(
            f"{path}: traceEvents: cat = {unknown[0]!r}: unknown phase; allowed: {', '.join(MEASURED_PHASES)}"
        )
    return spans
