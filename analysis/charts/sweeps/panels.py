"""Common layout of a sweep's charts: equal panels under one heading with one legend, and the style of each plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from analysis.charts.accuracy import log_ticks
from analysis.charts.drawing import (
    LABEL_POINTS,
    LOG_FROM_RATIO,
    MARKS,
    add_axes,
    label_width_in,
    new_figure,
    plain,
    wrapped,
)
from analysis.study.findings import percentage
from analysis.sweep_tables import Layout, Place, Row, SweepTable, by_plan, is_compressed

Look = dict[str, Any]
CONTROL: Look = {"marker": (8, 2, 0), "color": "black", "linestyle": "", "markersize": 9, "markeredgewidth": 1.4}
"""An asterisk, which no method has."""
NO_CONTROL = "No control here: a plan that pushes nothing (threshold = inf)."


def looks_of(table: SweepTable, layout: Layout) -> dict[Place, Look]:
    """Return mark, colour and line style of each plan: those of its method, or unique ones for plans of one method."""
    plans = list(by_plan(table.answered, layout))
    methods = [place[0] for place in plans]
    if len(set(methods)) == len(methods) and all(method in MARKS for method in methods):
        pairs = [MARKS[str(method)] for method in methods]
    else:
        pairs = [(MARKERS[i % len(MARKERS)], COLOURS[i % len(COLOURS)]) for i in range(len(plans))]
    return {
        place: {"marker": marker, "color": colour, "linestyle": LINES[i % len(LINES)]}
        for i, (place, (marker, colour)) in enumerate(zip(plans, pairs, strict=True))
    }


def points_only(look: Look, **changes: Any) -> Look:
    """Return a look without its line."""
    size = 10 if look["marker"] == "*" else 7
    return {**look, "linestyle": "", "markersize": size, "markeredgewidth": 0.9} | changes


def density_words(row: Row) -> str:
    """Return the densities of push and (where it has a threshold) publish, as text."""
    pushed, published = row["push_density_ratio"], row.get("publish_density_ratio")
    if is_compressed(row):
        return "compressed or periodic"
    words = "all pushed" if pushed is None else f"{percentage(pushed)} pushed"
    return words if published is None else f"{words}, {percentage(published)} published"


def threshold_words(value: float) -> str:
    """Return a threshold as text.

    >>> threshold_words(2.5e-4), threshold_words(1e-3), threshold_words(inf)
    ('2.5e\u22124', '1e\u22123', '\u221e')
    """
    if value == inf:
        return "\u221e"
    if 0.1 <= value < 1000:
        return f"{value:g}"
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e\u2212").replace("e+0", "e")


def listed(words: Sequence[str], most: int = 4) -> str:
    """Return words as an enumeration, at most `most` of them."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


TITLE_POINTS = 14.0
TITLE_LINE_IN, NOTE_LINE_IN, LEGEND_LINE_IN = 0.27, 0.2, 0.235
EDGE_IN = 0.15
LEAST_WIDTH_IN = 7.0
LINES = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 2.5)), (0, (8, 3)))
"""Line styles, distinguishable in grey."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A00", "#882255")
"""Okabe & Ito 2008, "Color Universal Design", and two darker ones."""


@dataclass(frozen=True)
class Size:
    """Size of a panel and of the margins around it, in inches."""

    wide: float
    high: float
    left: float = 0.85
    right: float = 0.25
    above: float = 0.45
    below: float = 0.6


def sheet(
    titles: Sequence[str],
    size: Size,
    *,
    across: int,
    heading: str,
    note: str,
    legend: Sequence[tuple[Artist, str]] = (),
) -> tuple[Figure, list[tuple[float, float, float, float]]]:
    """Return a figure and the box of each panel in inches (left, bottom, width, height); empty titles take no room."""
    if not any(titles):
        size = replace(size, above=0.15)
    across = max(1, min(across, len(titles)))
    down = -(-len(titles) // across)
    step_in = (size.left + size.wide + size.right, size.above + size.high + size.below)
    named_in = max((HANDLE_IN + label_width_in(name) + BETWEEN_IN for _, name in legend), default=0.0)
    width_in = max(across * step_in[0], LEAST_WIDTH_IN, named_in + 2 * EDGE_IN)
    room_in = width_in - 2 * EDGE_IN
    head, notes = wrapped(heading, room_in, TITLE_POINTS), wrapped(note, room_in)
    rows = _legend_rows(legend, room_in)
    top_in = 0.2 + TITLE_LINE_IN * len(head) + NOTE_LINE_IN * len(notes) + 0.12
    bottom_in = LEGEND_LINE_IN * len(rows) + (0.2 if rows else 0.05)
    height_in = top_in + down * step_in[1] + bottom_in
    figure = new_figure(width_in, height_in)
    y = height_in - 0.2
    for line in head:
        _write(figure, line, y, fontsize=TITLE_POINTS, fontweight="bold")
        y -= TITLE_LINE_IN
    for line in notes:
        _write(figure, line, y, color="0.25")
        y -= NOTE_LINE_IN
    _legend(figure, rows)
    boxes = []
    for i, _ in enumerate(titles):
        left = i % across * step_in[0] + size.left
        bottom = height_in - top_in - i // across * step_in[1] - size.above - size.high
        boxes.append((left, bottom, size.wide, size.high))
    for title, (left, bottom, wide, high) in zip(titles, boxes, strict=True):
        if not title:
            continue
        lines = wrapped(title, wide + size.right, 10)
        text = "\n".join([lines[0], " ".join(lines[1:])] if len(lines) > 2 else lines)
        place: dict[str, Any] = {"x": left / width_in, "y": (bottom + high + 0.08) / height_in}
        figure.text(**place, s=plain(text), fontsize=10, fontweight="bold", va="bottom")
    return figure, boxes


BAR_IN = 0.3


def bar_sheet(
    titles: Sequence[str],
    bars: Sequence[Sequence[tuple[str, str]]],
    wide_in: float,
    *,
    heading: str,
    note: str,
    legend: Sequence[tuple[Artist, str]],
) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels of horizontal bars, `wide_in` inches wide, and the axes of each.

    `bars`: of each panel, the bars' labels and the texts at their ends.
    """
    labels_in = max(label_width_in(label) for panel in bars for label, _ in panel)
    texts_in = max(label_width_in(text) for panel in bars for _, text in panel)
    size = Size(wide_in, BAR_IN * max(map(len, bars)), left=labels_in + 0.35, right=texts_in + 0.3, below=0.65)
    figure, boxes = sheet(titles, size, across=2, heading=heading, note=note, legend=legend)
    used_in = [BAR_IN * len(panel) for panel in bars]
    return figure, [
        add_axes(figure, (left, bottom + high - used, wide, used))
        for (left, bottom, wide, high), used in zip(boxes, used_in, strict=True)
    ]


def frame_bars(axes: Axes, labels: Sequence[str], longest: float, name: str) -> None:
    """Label the axes of horizontal bars, the first at the top; `name`: of the quantity, which ends at `longest`."""
    axes.set_yticks(range(len(labels)), [plain(label) for label in labels], fontsize=LABEL_POINTS)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, longest or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(name)
    axes.grid(axis="x", color="0.9", linewidth=0.6)


def swatch(colour: str, hatch: str, *, dark: bool) -> Patch:
    """Return the legend's mark of a part of stacked bars; the hatching of a dark one is white."""
    return Patch(facecolor=colour, edgecolor="white" if dark and hatch else "0.25", hatch=hatch, linewidth=0.6)


def subset_note(drawn: int, there: int, things: str = "settings") -> str:
    """Return a sentence on how many settings are drawn; empty where all are.

    >>> subset_note(9, 1200), subset_note(3, 3)
    (' 9 of 1,200 settings, spread over the sweep.', '')
    """
    return f" {drawn:,} of {there:,} {things}, spread over the sweep." if drawn < there else ""


def _write(figure: Figure, text: str, y_in: float, **look: Any) -> None:
    width_in, height_in = figure.get_size_inches()
    figure.text(EDGE_IN / width_in, y_in / height_in, plain(text), va="center", **look)


HANDLE_IN, BETWEEN_IN = 0.52, 0.25


def _legend_rows(legend: Sequence[tuple[Artist, str]], room_in: float) -> list[list[tuple[Artist, str]]]:
    """Return entries in rows that are as wide as the sheet."""
    rows: list[list[tuple[Artist, str]]] = []
    used_in = room_in
    for entry in legend:
        wide_in = HANDLE_IN + label_width_in(entry[1]) + BETWEEN_IN
        if used_in + wide_in > room_in or not rows:
            rows.append([])
            used_in = 0.0
        rows[-1].append(entry)
        used_in += wide_in
    return rows


def _legend(figure: Figure, rows: Sequence[Sequence[tuple[Artist, str]]]) -> None:
    """Draw each entry as a legend of its own, since the entries of one legend are aligned in columns."""
    width_in, height_in = figure.get_size_inches()
    for i, row in enumerate(rows):
        y_in = 0.08 + LEGEND_LINE_IN * (len(rows) - 1 - i)
        x_in = EDGE_IN
        for handle, label in row:
            figure.legend(
                handles=[handle],
                labels=[plain(label)],
                loc="lower left",
                bbox_to_anchor=(x_in / width_in, y_in / height_in),
                frameon=False,
                borderaxespad=0,
                borderpad=0,
                fontsize=LABEL_POINTS,
                handlelength=2.8,
                handletextpad=0.6,
            )
            x_in += HANDLE_IN + label_width_in(label) + BETWEEN_IN


def log_axis(axis: Any, limits: tuple[float, float]) -> None:
    """Set round numbers as ticks of a logarithmic axis, written without powers of ten."""
    ticks = log_ticks(*limits)
    while len(ticks) > 7:
        ticks = [tick for tick in ticks if f"{tick:e}"[0] == "1"] if len(ticks) < 24 else ticks[::3]
        if len(ticks) > 7:
            ticks = ticks[::2]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_words(value)))


def tick_words(value: float) -> str:
    """Return a value at a tick of a logarithmic axis as text.

    >>> [tick_words(value) for value in (0.02, 500, 1e4, 2e5, 1e6)]
    ['0.02', '500', '10 k', '200 k', '1 M']
    """
    if value < 1e4:
        return f"{value:g}"
    factor, unit = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0])
    return f"{value / factor:g} {unit}"


def value_axis(axes: Axes, values: Sequence[float], *, y: bool = True, zero: bool = True) -> None:
    """Scale an axis for these values: from zero, or logarithmic where they span more than `LOG_FROM_RATIO`."""
    axis, scale, limit = (
        (axes.yaxis, axes.set_yscale, axes.set_ylim) if y else (axes.xaxis, axes.set_xscale, axes.set_xlim)
    )
    low, high = min(values), max(values)
    if low > 0 and high / low > LOG_FROM_RATIO:
        limits = (low / (high / low) ** 0.06, high * (high / low) ** 0.08)
        scale("log")
        limit(*limits)
        log_axis(axis, limits)
    else:
        start = 0.0 if zero else low
        room = high - start or abs(high) or 1.0  # all may be equal
        limit(0.0 if zero else low - 0.08 * room, high + 0.12 * room)
        if not y:
            axis.set_major_locator(MaxNLocator(5))  # labels of six characters are not to touch each other
