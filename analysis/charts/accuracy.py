"""Chart of predicted against measured step time and peak memory, with the line of equality."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log, log10
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from analysis.charts.drawing import (
    BYTE_UNITS,
    LABEL_GAP_IN,
    LABEL_POINTS,
    LOG_FROM_RATIO,
    STYLE,
    TIME_UNITS,
    add_axes,
    in_order,
    label_width_in,
    mark,
    new_figure,
    percent,
    plain,
    point_labels,
    unit_for,
    wrapped,
    write_heading,
)

TITLE = "How close does the simulator come to what was measured?"
MOST_LABELLED = 25
NOTE_STEP_IN = 0.19
"""Distance of two lines of notes."""
LEAST_WIDE_IN = 8.2
"""Width of the title, and of the legend of naive predictions."""
STACKED_IN = 1.75
"""Distance of panels that stand one above the other: the upper one's legend, the lower one's title."""
WORST_LABELLED = 8
LEAST_LABELLED_RATIO = 0.0005
"""Among many points, an error below this (written as 0.0 %) has no label."""
LARGE_IN = 5.0
"""Side of a panel with more points than can be labelled."""


@dataclass(frozen=True)
class Quantity:
    """The quantity of one panel of the predicted-versus-measured chart, with its columns and tolerances."""

    title: str
    axis: str
    predicted: str
    measured: str
    error: str
    tolerance: float
    tolerances: tuple[float, float]
    """Targets for many scenarios: for half of them, and for all."""
    units: tuple[tuple[str, float], ...]


STEP_TIME = Quantity(
    "Time of one step",
    "step time",
    "step_time_predicted_s",
    "step_time_measured_s",
    "step_time_error_ratio",
    0.10,
    (0.05, 0.20),
    TIME_UNITS,
)
PEAK_MEMORY = Quantity(
    "Peak memory (worst-predicted rank)",
    "peak memory",
    "peak_predicted_bytes",
    "peak_measured_bytes",
    "peak_error_ratio",
    0.02,
    (0.01, 0.04),
    BYTE_UNITS,
)


COLUMN_IN = 0.6
"""Width of a legend's column beside its labels: mark, and space between columns."""
NAIVE = (("naive_compute_s", "x", "compute only"), ("naive_link_s", "+", "compute, then bytes over the slowest link"))
"""Naive predictions of the step time: column, mark, description."""


def predicted_vs_measured(comparison: pl.DataFrame) -> Figure:
    """Return two panels, step time and peak memory; a point on the diagonal is an exact prediction.

    If there are more than `MOST_LABELLED` scenarios, only those with the largest errors have labels.
    """
    labels = point_labels(comparison)
    large = len(labels) > MOST_LABELLED
    with mpl.rc_context(STYLE):
        side_in = LARGE_IN if large else max(4.4, LABEL_GAP_IN * (len(labels) + 1))
        label_in = 0.04 * side_in + 0.15 + max((label_width_in(f"{label}  (+100.0 %)") for label in labels), default=0)
        left_in, bottom_in = 0.85, 2.05
        quantities = [each for each in (STEP_TIME, PEAK_MEMORY) if _is_compared(comparison, each)] or [STEP_TIME]
        # side by side; of many points, whose labels are long, one above the other
        across_in, down_in = (0.0, side_in + STACKED_IN) if large else (left_in + side_in + label_in, 0.0)
        across_in, down_in = ((len(quantities) - 1) * step_in for step_in in (across_in, down_in))
        width_in = max(LEAST_WIDE_IN, left_in + side_in + label_in + across_in)
        note = (
            "Above the line the prediction is too high, below it too low. "
            "In brackets: predicted / measured \u2212\u00a01"
            + (f"; of {len(labels)} points the worst {WORST_LABELLED}" if large else "")
            + ", bold where it leaves the grey band."
            + "".join(f" No {each.axis} was measured." for each in (STEP_TIME, PEAK_MEMORY) if each not in quantities)
        )
        notes = wrapped(note, width_in - left_in - 0.2)
        top_in = 1.2 + NOTE_STEP_IN * max(0, len(notes) - 2)
        height_in = bottom_in + side_in + top_in + down_in
        figure = new_figure(width_in, height_in)
        for i, quantity in enumerate(quantities):
            left, bottom = left_in + i * across_in, bottom_in + (len(quantities) - 1 - i) * down_in
            axes = add_axes(figure, (left, bottom, side_in, side_in))
            _diagonal_panel(axes, comparison, labels, quantity, side_in)
        write_heading(figure, TITLE, notes, notes_in=0.6, step_in=NOTE_STEP_IN, x_in=left_in)
        methods = in_order(comparison["method"].to_list())
        column_in = COLUMN_IN + max(label_width_in(plain(method)) for method in methods)
        figure.legend(
            handles=[Line2D([], [], linestyle="", label=plain(method), **mark(method)) for method in methods],
            title="method of the plan",
            loc="lower left",
            bbox_to_anchor=(left_in / width_in, 0.08 / height_in),
            ncols=max(1, min(len(methods), 8, int((width_in - left_in) / column_in))),
            frameon=False,
            borderaxespad=0,
            alignment="left",
        )
    return figure


def _is_compared(comparison: pl.DataFrame, quantity: Quantity) -> bool:
    """Return whether any scenario has both a predicted and a measured value of the quantity."""
    columns = (quantity.measured, quantity.predicted, quantity.error)
    return comparison.select(pl.all_horizontal(pl.col(columns).is_not_null()).any()).item() is True


def _diagonal_panel(
    axes: Axes, comparison: pl.DataFrame, labels: Sequence[str], quantity: Quantity, side_in: float
) -> None:
    needed = (quantity.measured, quantity.predicted, quantity.error)
    named = zip(labels, comparison.iter_rows(named=True), strict=True)
    rows = [(label, row) for label, row in named if all(row[column] is not None for column in needed)]
    large = len(labels) > MOST_LABELLED
    tolerances = quantity.tolerances if large else (quantity.tolerance,)
    halves = "half " if large else ""
    axes.set_title(f"{quantity.title}: {halves}{', all '.join(map(_within, tolerances))}?", loc="left")
    if not rows:
        axes.set_axis_off()
        return
    unit, factor = unit_for(max(row[column] for _, row in rows for column in needed[:2]), quantity.units)
    points = [(row[quantity.measured] / factor, row[quantity.predicted] / factor) for _, row in rows]
    limits, logarithmic = _square(axes, points, tolerances[-1])
    for tolerance, colour in zip(reversed(tolerances), ("0.94", "0.87")[-len(tolerances) :], strict=True):
        axes.fill_between(
            limits,
            [value * (1 - tolerance) for value in limits],
            [value * (1 + tolerance) for value in limits],
            color=colour,
            linewidth=0,
            zorder=1,
            label=_within(tolerance),
        )
    axes.plot(limits, limits, color="0.25", linewidth=1, zorder=2, label="prediction = measurement")
    for (x, y), (_, row) in zip(points, rows, strict=True):
        axes.plot(x, y, linestyle="", zorder=4, **mark(row["method"], 6.5 if large else 8))
    if quantity is STEP_TIME:
        _noise_bars(axes, points, [row for _, row in rows])
        _naive_marks(axes, [row for _, row in rows], factor, limits)
    errors = [row[quantity.error] for _, row in rows]
    texts = [
        (f"{plain(label)}  ({percent(error)})", abs(error) > tolerances[-1])
        for (label, _), error in zip(rows, errors, strict=True)
    ]
    shown = sorted(range(len(rows)), key=lambda i: -abs(errors[i]))[: WORST_LABELLED if large else None]
    shown = [i for i in shown if not large or abs(errors[i]) >= LEAST_LABELLED_RATIO]
    placed = ([points[i] for i in shown], [texts[i] for i in shown])
    _label_points(axes, *placed, limits, logarithmic, LABEL_GAP_IN / side_in)
    axes.set_xlabel(f"measured {quantity.axis} ({unit})")
    axes.set_ylabel(f"predicted {quantity.axis} ({unit})")
    below = (0, -0.62 / side_in)
    axes.legend(loc="upper left", bbox_to_anchor=below, ncols=2, frameon=False, borderaxespad=0, fontsize=LABEL_POINTS)


def _noise_bars(axes: Axes, points: Sequence[tuple[float, float]], rows: Sequence[dict[str, Any]]) -> None:
    """Draw the noise of the measurements as error bars, where any scenario was measured more than once."""
    if not any(row["repeats"] > 1 for row in rows):
        return
    x, y = zip(*points, strict=True)
    noise = [(row["noise_ratio"] or 0.0) * place for row, place in zip(rows, x, strict=True)]
    axes.errorbar(
        x, y, xerr=noise, linestyle="", ecolor="0.35", elinewidth=1, capsize=2, zorder=3, label="range of the repeats"
    )


def _naive_marks(axes: Axes, rows: Sequence[dict[str, Any]], factor: float, limits: tuple[float, float]) -> None:
    """Draw the naive predictions in grey; the legend counts those outside of the panel."""
    for column, marker, what in NAIVE:
        known = [row for row in rows if row[column] is not None]
        points = [(row["step_time_measured_s"] / factor, row[column] / factor) for row in known]
        inside = [point for point in points if limits[0] <= point[1] <= limits[1]]
        outside = len(points) - len(inside)
        if points:
            axes.plot(
                *(zip(*inside, strict=True) if inside else ((), ())),
                linestyle="",
                marker=marker,
                markersize=5,
                color="0.6",
                zorder=2.5,
                label=f"naive: {what}" + (f" ({outside} outside)" if outside else ""),
            )


def _square(axes: Axes, points: Sequence[tuple[float, float]], tolerance: float) -> tuple[tuple[float, float], bool]:
    """Set the same limits, ticks and scale on both axes; return (limits, whether they are logarithmic).

    The limits are wide enough for the tolerance band to be visible, however close together the points are.
    """
    values = [value for point in points for value in point]
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > LOG_FROM_RATIO
    if logarithmic:
        margin = (high / low) ** 0.08
        limits = (low / margin, high * margin)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks: Any = FixedLocator(log_ticks(*limits))
    else:
        margin = max(0.08 * (high - low), (4 * tolerance * (high + low) - (high - low)) / 2) or 1.0
        limits = (max(0.0, low - margin), high + margin)
        ticks = MaxNLocator(6).tick_values(*limits)
        ticks = FixedLocator([tick for tick in ticks if limits[0] <= tick <= limits[1]])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(limits)
    axes.set_ylim(limits)
    axes.grid(color="0.9", linewidth=0.6)
    return limits, logarithmic


def log_ticks(low: float, high: float) -> list[float]:
    """Return the round numbers (1, 2, 5 times powers of ten) between two limits.

    >>> log_ticks(0.09, 3)
    [0.1, 0.2, 0.5, 1.0, 2.0]
    """
    powers = range(floor(log10(low)), floor(log10(high)) + 1)
    # dividing by a power of ten keeps 0.1, 0.2, ... the nearest floats
    ticks = [digit * 10.0**power if power >= 0 else digit / 10.0**-power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _within(tolerance: float) -> str:
    return f"within \u00b1{tolerance:.0%}".replace("%", " %")


def _label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[tuple[str, bool]],
    limits: tuple[float, float],
    logarithmic: bool,
    gap: float,
) -> None:
    """Write the labels (text, bold) in a column right of the panel, ordered by height and joined to their points."""
    scale = log if logarithmic else float
    low, high = map(scale, limits)
    order = sorted(range(len(points)), key=lambda i: (points[i][1], points[i][0]))
    heights = spread([(scale(points[i][1]) - low) / (high - low) for i in order], gap)
    for i, height in zip(order, heights, strict=True):
        axes.annotate(
            texts[i][0],
            fontweight="bold" if texts[i][1] else "normal",
            xy=points[i],
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_POINTS,
            annotation_clip=False,
            zorder=3,
            arrowprops={
                "arrowstyle": "-",
                "color": "0.55",
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Return ascending `positions`, moved as little as needed to be `gap` apart and, where there is room, in 0..1.

    Points that are too close become one block around their mean (pool adjacent violators on position - i * gap).

    >>> [round(x, 3) for x in spread([0.5, 0.5, 0.9], 0.1)]
    [0.45, 0.55, 0.9]
    """
    blocks: list[tuple[float, int]] = []  # (mean of position - i * gap, number of labels)
    for i, position in enumerate(positions):
        mean, size = position - i * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    top = 1 - (len(positions) - 1) * gap
    starts = [max(0.0, min(mean, top)) for mean, size in blocks for _ in range(size)]
    return [start + i * gap for i, start in enumerate(starts)]
