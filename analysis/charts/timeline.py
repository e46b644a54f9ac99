"""Timeline chart of one step: the streams of each rank on one time axis, predicted above measured."""

from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.charts.drawing import LABEL_POINTS, STYLE, TIME_UNITS, label_width_in, new_figure, plain, unit_for
from analysis.charts.step_phases import DARK_PHASES, PHASE_COLOURS
from analysis.compare.timeline import Block, Step
from gssim.result import PHASES

MOST_RANKS = 8
LEFT_IN, PANEL_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.75, 9.0, 1.25, 1.45, 0.75
LANE_IN, STRIP_IN, GAP_IN, RANK_GAP_IN = 0.36, 0.2, 0.07, 0.3
"""Heights: of a compute stream, of another stream, and between sides and ranks."""
TEXT_MARGIN_IN = 0.1


def timeline(predicted: Step, measured: Step, *, names: tuple[str, str]) -> Figure:
    """Return the chart of one step; `names`: the names of both trace files."""
    ranks = sorted({*predicted.ranks, *measured.ranks})[:MOST_RANKS]
    sides = {"predicted": predicted, "measured": measured}
    heights_in = 0.0
    for rank in ranks:
        for step in sides.values():
            lanes_in = sum(LANE_IN if lane.stream == "compute" else STRIP_IN for lane in step.lanes_of(rank))
            heights_in += (lanes_in or LANE_IN) + GAP_IN
    panel_in = heights_in + RANK_GAP_IN * (len(ranks) - 1)
    with mpl.rc_context(STYLE):
        width_in, height_in = LEFT_IN + PANEL_IN + RIGHT_IN, TOP_IN + panel_in + BOTTOM_IN
        figure = new_figure(width_in, height_in)
        box = (LEFT_IN / width_in, BOTTOM_IN / height_in, PANEL_IN / width_in, panel_in / height_in)
        axes = figure.add_axes(box)
        _panel(axes, sides, ranks, panel_in)
        left_out = len({*predicted.ranks, *measured.ranks}) - len(ranks)
        _heading(figure, names, left_out)
    return figure


def _panel(axes: Axes, sides: dict[str, Step], ranks: list[int], panel_in: float) -> None:
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
    axes.set_axisbelow(True)


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
    bar: dict[str, Any] = {"y": y, "width": width, "left": left, "height": height, "align": "edge"}
    dark = block.phase in DARK_PHASES
    axes.barh(**bar, color="#DDBBCC" if faint else PHASE_COLOURS[block.phase], linewidth=0)
    if hatched:  # a patch has one colour for edge and hatching
        axes.barh(**bar, fill=False, linewidth=0, hatch="////", edgecolor="#FFFFFF50" if dark else "#00000028")
    axes.barh(**bar, fill=False, linewidth=0.5, edgecolor="0.2")
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


def _heading(figure: Figure, names: tuple[str, str], left_out: int) -> None:
    width_in, height_in = figure.get_size_inches()
    x = 0.15 / width_in
    title = "One step, predicted above measured: who does what, when, and waits for what?"
    figure.text(x, 1 - 0.32 / height_in, title, fontsize=14, fontweight="bold", va="center")
    note = f"Predicted (hatched): {names[0]}; measured: {names[1]}. Thin lines: streams beside the compute stream."
    if left_out:
        note += f" {left_out} more ranks are not drawn."
    figure.text(x, 1 - 0.62 / height_in, plain(note), va="center", color="0.25")
    swatches = [
        Patch(facecolor=PHASE_COLOURS[p], edgecolor="0.2", linewidth=0.6, label=p.replace("_", " "))
        for p in PHASES
        if p != "idle"
    ]
    figure.legend(
        handles=[*swatches, Patch(facecolor="white", edgecolor="0.2", linewidth=0.6, label="idle")],
        loc="upper left",
        bbox_to_anchor=(x, 1 - 0.8 / height_in),
        ncols=len(PHASES),
        frameon=False,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.4,
    )
