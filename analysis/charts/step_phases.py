"""Charts of one step: its phases as stacked bars, exposed communication by group, and the timeline of every rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.charts.drawing import (
    LABEL_POINTS,
    LOG_FROM_RATIO,
    STYLE,
    TIME_UNITS,
    add_axes,
    draw_bar,
    in_order,
    label_width_in,
    mark,
    new_figure,
    percent,
    place_labels,
    plain,
    point_labels,
    unit_for,
    wrapped,
    write_heading,
)
from analysis.compare.groups import variant_of
from analysis.compare.timeline import Block, Step
from gssim.result import EXPOSED_COPIES, MEASURED_PHASES, PHASES

EXPOSED_TITLE = "Does the simulator see what compute waits for?"
FEWEST_APART = 3
"""Size of the largest group from which on each group has a panel of its own."""
ACROSS, SIDE_IN, LEFT_IN, TOP_IN, BELOW_IN, BOTTOM_IN, RIGHT_IN = 4, 2.7, 0.8, 0.95, 0.95, 0.55, 0.35
NOTE_IN = 0.2
"""Height of a line of notes."""
LABELLED, LABELLED_FROM_RATIO = 2, 0.05
"""Most labels of a panel, and the least error of a labelled point, as a fraction of the step."""

Row = dict[str, Any]


def exposed_communication(comparison: pl.DataFrame) -> Figure | None:
    """Return a panel for each group, a point for each scenario; None where no communication is exposed."""
    rows = [row for row in comparison.iter_rows(named=True) if max(_sides(row)) > 0]
    if not rows:
        return None
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    if max(map(len, groups.values())) < FEWEST_APART:
        groups = {"all": rows}
    across = max(2, min(len(groups), ACROSS))
    down = -(-len(groups) // across)
    width_in = across * (LEFT_IN + SIDE_IN) + RIGHT_IN
    note = (
        "Exposed communication in one step, mean over ranks: what compute waits for, messages and slower ranks. Above "
        "the line the prediction is too high. Named: the "
        f"worst {LABELLED} of a panel, by how much of a measured step they are off, where that is more than "
        f"{100 * LABELLED_FROM_RATIO:.0f} %."
    )
    with mpl.rc_context(STYLE):
        notes = wrapped(note, width_in - 0.3, LABEL_POINTS)
        top_in = TOP_IN + NOTE_IN * len(notes)
        height_in = top_in + down * (SIDE_IN + BELOW_IN) + BOTTOM_IN
        figure = new_figure(width_in, height_in)
        for i, (group, members) in enumerate(sorted(groups.items())):
            left = LEFT_IN + i % across * (LEFT_IN + SIDE_IN)
            bottom = height_in - top_in - (i // across + 1) * SIDE_IN - i // across * BELOW_IN
            _panel(add_axes(figure, (left, bottom, SIDE_IN, SIDE_IN)), group, members)
        _heading(figure, in_order([row["method"] for row in rows]), notes)
    return figure


def _sides(row: Row) -> tuple[float, float]:
    """Return (measured, predicted) in s."""
    return (row["exposed_communication_measured_s"] or 0.0, row["exposed_communication_predicted_s"] or 0.0)


def _panel(axes: Axes, group: str, rows: Sequence[Row]) -> None:
    largest_s = max(max(_sides(row)) for row in rows)
    unit, factor = unit_for(largest_s, TIME_UNITS)
    limit = 1.1 * largest_s / factor
    axes.plot((0, limit), (0, limit), color="0.25", linewidth=1, zorder=2)
    for row in rows:
        measured, predicted = (side / factor for side in _sides(row))
        axes.plot(measured, predicted, linestyle="", zorder=4, clip_on=False, **mark(row["method"], 7))
    axes.set_xlim(0, limit)
    axes.set_ylim(0, limit)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_title(plain(group), loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(f"measured ({unit})")
    axes.set_ylabel(f"predicted ({unit})")
    _labels(axes, rows, factor)


def _labels(axes: Axes, rows: Sequence[Row], factor: float) -> None:
    """Label the points with the largest errors as a fraction of the step."""
    errors = {i: row["exposed_communication_error_of_step_ratio"] or 0.0 for i, row in enumerate(rows)}
    worst = sorted(errors, key=lambda i: -abs(errors[i]))[:LABELLED]
    named = [i for i in worst if abs(errors[i]) > LABELLED_FROM_RATIO]
    points = [(measured / factor, predicted / factor) for measured, predicted in map(_sides, rows)]
    texts = [f"{variant_of(rows[i]['name'])} {percent(errors[i])}" for i in named]
    place_labels(axes, [points[i] for i in named], texts, points)


def _heading(figure: Figure, methods: Sequence[str], notes: Sequence[str]) -> None:
    width_in, height_in = figure.get_size_inches()
    write_heading(figure, EXPOSED_TITLE, notes, notes_in=0.6, step_in=NOTE_IN, fontsize=LABEL_POINTS)
    figure.legend(
        handles=[Line2D([], [], linestyle="", label=plain(method), **mark(method)) for method in methods],
        title="method of the plan",
        loc="lower left",
        bbox_to_anchor=(0.15 / width_in, 0.12 / height_in),
        ncols=max(1, min(len(methods), int(width_in / 0.95))),
        frameon=False,
        borderaxespad=0,
        alignment="left",
    )


TITLE = "Where does a step's time go, and does the simulator see it?"

# Neighbours in a stack differ in lightness (L* 70, 46, 89, 71, 32, 91), not in hue alone.
PHASE_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "compression": "#F0E442",
    "optimizer": "#E69F00",
    "exposed_communication": "#882255",
    "idle": "#E4E4E4",
    EXPOSED_COPIES: "#CC79A7",
}
DARK_PHASES = frozenset({"backward", "exposed_communication"})
"""Hatched in white, the others in dark grey."""


def phases(comparison: pl.DataFrame, *, note: str = "") -> Figure:
    """Return stacked bars of a step's phases, for each scenario the predicted bar (hatched) above the measured one.

    Steps of very different length are in separate panels with their own axes. `note` says which scenarios are drawn.
    """
    labels = point_labels(comparison)
    rows = list(comparison.iter_rows(named=True))
    groups = magnitudes([max(_total_s(row, "predicted"), _total_s(row, "measured")) for row in rows])
    columns = {phase: (f"{phase}_predicted_s", f"{phase}_measured_s") for phase in MEASURED_PHASES}
    shown = [phase for phase, both in columns.items() if any(row.get(each) for row in rows for each in both)]
    with mpl.rc_context(STYLE):
        left_in = 0.3 + max(map(label_width_in, labels), default=0)
        bar_in, right_in = 6.6, 1.45
        notes = bool(note) + ("exposed_communication" in shown)
        top_in, between_in, bottom_in = 1.25 + NOTE_IN * notes, 0.85, 0.65
        heights_in = [0.68 * len(group) + 0.12 for group in groups]
        width_in = left_in + bar_in + right_in
        height_in = top_in + sum(heights_in) + between_in * (len(groups) - 1) + bottom_in
        figure = new_figure(width_in, height_in)
        bottom = height_in - top_in
        for group, panel_in in zip(groups, heights_in, strict=True):
            bottom -= panel_in
            axes = add_axes(figure, (left_in, bottom, bar_in, panel_in))
            _phase_panel(axes, [rows[i] for i in group], [labels[i] for i in group])
            bottom -= between_in
        _phase_heading(figure, note, shown, several=len(groups) > 1)
    return figure


def magnitudes(values: Sequence[float], ratio: float = LOG_FROM_RATIO) -> list[list[int]]:
    """Return the indices of `values` in groups of similar magnitude, largest first, in the original order within one.

    `ratio`: largest ratio of two values of a group.

    >>> magnitudes([0.1, 2.0, 0.3])
    [[1], [0, 2]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(values)), key=lambda i: -values[i]):
        if not groups or values[groups[-1][0]] > ratio * values[i]:
            groups.append([])
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def longest_phase(row: dict[str, Any]) -> str:
    """Return the longest phase of a step as text, measured and predicted."""
    longest = []
    for side in ("measured", "predicted"):
        total_s = _total_s(row, side)
        phase = max(PHASES, key=lambda phase: row[f"{phase}_{side}_s"] or 0.0)
        if total_s > 0:
            longest.append((side, phase.replace("_", " "), (row[f"{phase}_{side}_s"] or 0.0) / total_s))
    if len(longest) == 2 and longest[0][1] == longest[1][1]:
        return f"{longest[0][1]} ({100 * longest[0][2]:.0f} % measured, {100 * longest[1][2]:.0f} % predicted)"
    return ", ".join(f"{side} {phase} ({100 * ratio:.0f} %)" for side, phase, ratio in longest)


WAITS = "Exposed communication is what compute waits for: messages, and slower ranks."


def _phase_heading(figure: Figure, which: str, shown: Sequence[str], *, several: bool) -> None:
    notes = [*([which] if which else []), *([WAITS] if "exposed_communication" in shown else [])]
    note = "Top bar of a pair (hatched): predicted; bottom bar (plain): measured. Means over ranks."
    if several:
        note += " Mind the different time axes."
    write_heading(figure, TITLE, [*notes, note], notes_in=0.62, step_in=NOTE_IN)
    _phase_legend(figure, {phase: PHASE_COLOURS[phase] for phase in shown}, below_in=0.8 + NOTE_IN * len(notes))


def _phase_legend(figure: Figure, colours: Mapping[str, str], *, below_in: float) -> None:
    """Draw a legend of phases in one row, `below_in` below the upper edge."""
    width_in, height_in = figure.get_size_inches()
    figure.legend(
        handles=[
            Patch(facecolor=colour, edgecolor="0.2", linewidth=0.6, label=phase.replace("_", " "))
            for phase, colour in colours.items()
        ],
        loc="upper left",
        bbox_to_anchor=(0.15 / width_in, 1 - below_in / height_in),
        ncols=len(colours),
        frameon=False,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _phase_panel(axes: Axes, rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> None:
    longest_s = max(_total_s(row, side) for row in rows for side in ("predicted", "measured"))
    unit, factor = unit_for(longest_s, TIME_UNITS)
    for i, row in enumerate(rows):
        for side, y in (("predicted", i - 0.19), ("measured", i + 0.19)):
            left = 0.0
            for phase in MEASURED_PHASES:
                time = (row.get(f"{phase}_{side}_s") or 0.0) / factor
                if time > 0:
                    colour, hatch = PHASE_COLOURS[phase], "////" if side == "predicted" else ""
                    hatch_colour = "white" if phase in DARK_PHASES else "0.2"
                    place = {"y": y, "height": 0.36, "left": left, "width": time}
                    draw_bar(axes, colour, hatch=hatch, hatch_colour=hatch_colour, **place)
                left += time
            total = _total_s(row, side) / factor
            text = f"{side} {f'{total:#.3g}'.removesuffix('.')} {unit}"
            axes.annotate(text, (total, y), (5, 0), textcoords="offset points", va="center", annotation_clip=False)
    axes.set_yticks(range(len(rows)), [plain(label) for label in labels], fontweight="bold", fontsize=LABEL_POINTS)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 1.005 * longest_s / factor or 1.0)
    axes.set_xlabel(f"time of one step ({unit})")
    axes.grid(axis="x", color="0.9", linewidth=0.6)


def _total_s(row: dict[str, Any], side: str) -> float:
    return sum(row.get(f"{phase}_{side}_s") or 0.0 for phase in MEASURED_PHASES)


# Timeline -------------------------------------------------------------------------------------------------------------

MOST_RANKS = 8
TIMELINE_LEFT_IN, PANEL_IN, TIMELINE_RIGHT_IN, TIMELINE_TOP_IN, TIMELINE_BOTTOM_IN = 1.75, 9.0, 1.25, 1.45, 0.75
LANE_IN, STRIP_IN, GAP_IN, RANK_GAP_IN = 0.36, 0.2, 0.07, 0.3
"""Heights: of a compute stream, of another stream, and between sides and ranks."""
TEXT_MARGIN_IN = 0.1


def timeline(sides: Mapping[str, Step], *, names: Mapping[str, str]) -> Figure:
    """Return the chart of one step, predicted, measured or both; `names`: those of the trace files, by the same key."""
    all_ranks = sorted({rank for step in sides.values() for rank in step.ranks})
    ranks = all_ranks[:MOST_RANKS]
    heights_in = 0.0
    for rank in ranks:
        for step in sides.values():
            lanes_in = sum(LANE_IN if lane.stream == "compute" else STRIP_IN for lane in step.lanes_of(rank))
            heights_in += (lanes_in or LANE_IN) + GAP_IN
    panel_in = heights_in + RANK_GAP_IN * (len(ranks) - 1)
    with mpl.rc_context(STYLE):
        width_in = TIMELINE_LEFT_IN + PANEL_IN + TIMELINE_RIGHT_IN
        figure = new_figure(width_in, TIMELINE_TOP_IN + panel_in + TIMELINE_BOTTOM_IN)
        axes = add_axes(figure, (TIMELINE_LEFT_IN, TIMELINE_BOTTOM_IN, PANEL_IN, panel_in))
        _timeline_panel(axes, sides, ranks, panel_in)
        left_out = len(all_ranks) - len(ranks)
        drawn = {block.phase for step in sides.values() for lane in step.lanes for block in lane.blocks}
        _timeline_heading(figure, names, left_out, [phase for phase in MEASURED_PHASES if phase in drawn | {"idle"}])
    return figure


def _timeline_panel(axes: Axes, sides: Mapping[str, Step], ranks: list[int], panel_in: float) -> None:
    longest_s = max(step.time_s for step in sides.values())
    unit, factor = unit_for(longest_s, TIME_UNITS)
    axes.set_xlim(0, 1.003 * longest_s / factor)
    axes.set_ylim(panel_in, 0)
    y = 0.0
    for i, rank in enumerate(ranks):
        y += RANK_GAP_IN if i else 0.0
        if i:
            axes.axhline(y - RANK_GAP_IN / 2 - GAP_IN / 2, color="0.8", linewidth=0.8, xmin=-0.17, clip_on=False)
        top = y
        for side, step in sides.items():
            y = _side(axes, side, step, rank, y, (unit, factor)) + GAP_IN
        axes.text(-0.185, (top + y - GAP_IN) / 2, f"rank {rank}", **_outside(axes), ha="left", fontweight="bold")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time since the step began ({unit})")
    axes.grid(axis="x", color="0.9", linewidth=0.6)


def _outside(axes: Axes) -> dict[str, Any]:
    """Return the text style left or right of the panel: x as a fraction of its width, y in inches."""
    return {"transform": axes.get_yaxis_transform(), "va": "center", "clip_on": False}


def _side(axes: Axes, side: str, step: Step, rank: int, y: float, unit: tuple[str, float]) -> float:
    """Draw the lanes of a rank on one side, from height `y`; return the height at which they end."""
    name, factor = unit
    lanes = step.lanes_of(rank)
    if not lanes:
        text = (
            "not in this trace: of equal ranks one is simulated for all" if side == "predicted" else "not in this trace"
        )
        axes.text(0.01, y + LANE_IN / 2, text, **_outside(axes), color="0.4", fontstyle="italic")
        axes.text(-0.012, y + LANE_IN / 2, side, **_outside(axes), ha="right", color="0.25")
        return y + LANE_IN
    for lane in lanes:
        compute = lane.stream == "compute"
        height = LANE_IN if compute else STRIP_IN
        for block in lane.blocks:
            _block(axes, block, (y, height - 0.02), factor, hatched=compute and side == "predicted", faint=not compute)
        label = {"text": side if compute else lane.stream, "color": "0.25" if compute else "0.5"}
        axes.text(-0.012, y + height / 2, s=label["text"], color=label["color"], ha="right", **_outside(axes))
        if compute:
            end_s = max(block.end_s for block in lane.blocks)
            axes.text(1.008, y + height / 2, f"{end_s / factor:.4g} {name}", **_outside(axes), color="0.25")
        y += height
    return y


def _block(axes: Axes, block: Block, place: tuple[float, float], factor: float, *, hatched: bool, faint: bool) -> None:
    y, height = place
    left, width = block.start_s / factor, (block.end_s - block.start_s) / factor
    dark = block.phase in DARK_PHASES
    draw_bar(
        axes,
        "#DDBBCC" if faint else PHASE_COLOURS[block.phase],
        hatch="////" if hatched else "",
        hatch_colour="#FFFFFF50" if dark else "#00000028",
        edge_points=0.5,
        y=y,
        height=height,
        left=left,
        width=width,
        align="edge",
    )
    text = plain(block.label.replace("_", " "))
    room_in = PANEL_IN * width / axes.get_xlim()[1]
    if label_width_in(text) + TEXT_MARGIN_IN <= room_in:
        axes.text(
            left + width / 2,
            y + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=LABEL_POINTS - (1.5 if faint else 0),
            fontweight="normal" if faint else "bold",
            color="white" if dark and not faint else "0.1",
        )


def _timeline_heading(figure: Figure, names: Mapping[str, str], left_out: int, shown: Sequence[str]) -> None:
    title = f"One step, {' above '.join(names)}: who does what, when, and waits for what?"
    files = "; ".join(f"{side}{' (hatched)' * (side == 'predicted')}: {name}" for side, name in names.items())
    note = f"{files[0].upper()}{files[1:]}. Thin lines: streams beside the compute stream."
    note += " Of equal ranks one is drawn." if list(names) == ["predicted"] else ""
    if left_out:
        note += f" {left_out} more ranks are not drawn."
    write_heading(figure, title, [note], notes_in=0.62)
    colours = {phase: PHASE_COLOURS[phase] for phase in shown if phase != "idle"} | {"idle": "white"}
    _phase_legend(figure, colours, below_in=0.8)
