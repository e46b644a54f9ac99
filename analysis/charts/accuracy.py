"""How far predictions are from measurements: points beside the line of equality."""

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
    in_order,
    label_width_in,
    mark,
    new_figure,
    percent,
    plain,
    point_labels,
    unit_for,
)


@dataclass(frozen=True)
class Quantity:
    """What one panel of the predicted-versus-measured chart shows."""

    title: str
    axis: str
    predicted: str
    measured: str
    error: str
    tolerance: float
    units: tuple[tuple[str, float], ...]


STEP_TIME = Quantity(
    "Time of one step: within \u00b110 %?",
    "step time",
    "step_time_predicted_s",
    "step_time_measured_s",
    "step_time_error_ratio",
    0.10,
    TIME_UNITS,
)
PEAK_MEMORY = Quantity(
    "Peak memory (worst-predicted rank): within \u00b12 %?",
    "peak memory",
    "peak_predicted_bytes",
    "peak_measured_bytes",
    "peak_error_ratio",
    0.02,
    BYTE_UNITS,
)


def predicted_vs_measured(comparison: pl.DataFrame) -> Figure:
    """Return two panels, step time and peak memory; a point on the diagonal is a prediction that is right."""
    labels = point_labels(comparison)
    with mpl.rc_context(STYLE):
        side_in = max(4.4, LABEL_GAP_IN * (len(labels) + 1))
        label_in = 0.04 * side_in + 0.15 + max((label_width_in(f"{label}  (+100.0 %)") for label in labels), default=0)
        left_in, bottom_in, top_in = 0.85, 1.5, 1.2
        panel_in = left_in + side_in + label_in
        width_in, height_in = 2 * panel_in, bottom_in + side_in + top_in
        figure = new_figure(width_in, height_in)
        for i, quantity in enumerate((STEP_TIME, PEAK_MEMORY)):
            box = ((left_in + i * panel_in) / width_in, bottom_in / height_in, side_in / width_in, side_in / height_in)
            _diagonal_panel(figure.add_axes(box), comparison, labels, quantity, side_in)
        title = "How close does the simulator come to what was measured?"
        note = (
            "Above the line the prediction is too high, below it too low. "
            "In brackets: predicted / measured \u2212 1, bold where it leaves the grey band."
        )
        figure.text(left_in / width_in, 1 - 0.32 / height_in, title, fontsize=14, fontweight="bold", va="center")
        figure.text(left_in / width_in, 1 - 0.62 / height_in, note, color="0.25", va="center")
        methods = in_order(comparison["method"].to_list())
        figure.legend(
            handles=[Line2D([], [], linestyle="", label=plain(method), **mark(method)) for method in methods],
            title="method of the plan",
            loc="lower left",
            bbox_to_anchor=(left_in / width_in, 0.08 / height_in),
            ncols=max(1, min(len(methods), 8)),
            frameon=False,
            borderaxespad=0,
            alignment="left",
        )
    return figure


def _diagonal_panel(
    axes: Axes, comparison: pl.DataFrame, labels: Sequence[str], quantity: Quantity, side_in: float
) -> None:
    columns = [quantity.measured, quantity.predicted, quantity.error, "method"]
    rows = [
        (label, *row)
        for label, row in zip(labels, comparison.select(columns).iter_rows(), strict=True)
        if None not in row
    ]
    axes.set_title(quantity.title, loc="left")
    if not rows:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    unit, factor = unit_for(max(value for row in rows for value in row[1:3]), quantity.units)
    points = [(measured / factor, predicted / factor) for _, measured, predicted, _, _ in rows]
    limits, logarithmic = _square(axes, points, quantity.tolerance)
    _band(axes, limits, quantity.tolerance)
    for (x, y), row in zip(points, rows, strict=True):
        axes.plot(x, y, linestyle="", zorder=4, **mark(row[4]))
    texts = [(f"{plain(label)}  ({percent(error)})", abs(error) > quantity.tolerance) for label, _, _, error, _ in rows]
    _label_points(axes, points, texts, limits, logarithmic, LABEL_GAP_IN / side_in)
    axes.set_xlabel(f"measured {quantity.axis} ({unit})")
    axes.set_ylabel(f"predicted {quantity.axis} ({unit})")
    below = (0, -0.62 / side_in)
    axes.legend(loc="upper left", bbox_to_anchor=below, ncols=2, frameon=False, borderaxespad=0, fontsize=LABEL_POINTS)


def _square(axes: Axes, points: Sequence[tuple[float, float]], tolerance: float) -> tuple[tuple[float, float], bool]:
    """Give both axes the same limits, ticks and scale; return (limits, whether they are logarithmic).

    Limits are so wide that the band of the tolerance stays a band, however close the points are together.
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
    axes.set_axisbelow(True)
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


def _band(axes: Axes, limits: tuple[float, float], tolerance: float) -> None:
    line = list(limits)
    axes.fill_between(
        line,
        [value * (1 - tolerance) for value in line],
        [value * (1 + tolerance) for value in line],
        color="0.87",
        linewidth=0,
        zorder=1,
        label=f"within \u00b1{tolerance:.0%}".replace("%", " %"),
    )
    axes.plot(line, line, color="0.25", linewidth=1, zorder=2, label="prediction = measurement")


def _label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[tuple[str, bool]],
    limits: tuple[float, float],
    logarithmic: bool,
    gap: float,
) -> None:
    """Write the labels (text, bold) in a column right of the panel, by height of their points and tied to them."""
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
    """Return ascending `positions` moved as little as it takes to be `gap` apart and, where there is room, in 0..1.

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
