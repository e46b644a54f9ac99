"""Communication that compute waits for, predicted against measured, group by group."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.charts.drawing import (
    LABEL_POINTS,
    STYLE,
    TIME_UNITS,
    in_order,
    mark,
    new_figure,
    percent,
    plain,
    unit_for,
)
from analysis.charts.placing import place_labels
from analysis.groups import variant_of

EXPOSED_TITLE = "Does the simulator see what compute waits for?"
FEWEST_APART = 3
"""Scenarios of the largest group, from which on each group has a panel of its own."""
ACROSS, SIDE_IN, LEFT_IN, TOP_IN, BELOW_IN, BOTTOM_IN, RIGHT_IN = 4, 2.7, 0.8, 1.35, 0.95, 0.55, 0.35
LABELLED, LABELLED_FROM_RATIO = 2, 0.05
"""So many of a panel have a label, if they are off by more than so much of a step."""

Row = dict[str, Any]


def exposed_communication(comparison: pl.DataFrame) -> Figure | None:
    """Return a panel for each group, a point for each scenario; None where nothing was waited for."""
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
    height_in = TOP_IN + down * (SIDE_IN + BELOW_IN) + BOTTOM_IN
    with mpl.rc_context(STYLE):
        figure = new_figure(width_in, height_in)
        for i, (group, members) in enumerate(sorted(groups.items())):
            left = LEFT_IN + i % across * (LEFT_IN + SIDE_IN)
            bottom = height_in - TOP_IN - (i // across + 1) * SIDE_IN - i // across * BELOW_IN
            box = (left / width_in, bottom / height_in, SIDE_IN / width_in, SIDE_IN / height_in)
            _panel(figure.add_axes(box), group, members)
        _heading(figure, in_order([row["method"] for row in rows]))
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
    axes.set_axisbelow(True)
    axes.set_title(plain(group), loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(f"measured ({unit})")
    axes.set_ylabel(f"predicted ({unit})")
    _labels(axes, rows, factor)


def _labels(axes: Axes, rows: Sequence[Row], factor: float) -> None:
    """Name the points that cost the prediction most of a step."""
    errors = {i: row["exposed_communication_error_of_step_ratio"] or 0.0 for i, row in enumerate(rows)}
    worst = sorted(errors, key=lambda i: -abs(errors[i]))[:LABELLED]
    named = [i for i in worst if abs(errors[i]) > LABELLED_FROM_RATIO]
    points = [(measured / factor, predicted / factor) for measured, predicted in map(_sides, rows)]
    texts = [f"{variant_of(rows[i]['name'])} {percent(errors[i])}" for i in named]
    place_labels(axes, [points[i] for i in named], texts, points)


def _heading(figure: Figure, methods: Sequence[str]) -> None:
    width_in, height_in = figure.get_size_inches()
    x = 0.15 / width_in
    figure.text(x, 1 - 0.32 / height_in, EXPOSED_TITLE, fontsize=14, fontweight="bold", va="center")
    note = (
        "Exposed communication in one step, mean over ranks. Above the line the prediction is too high. "
        f"Named: the worst {LABELLED} of a panel,"
    )
    more = f"by how much of a measured step they are off, where that is more than {LABELLED_FROM_RATIO:.0%}.".replace(
        "%", " %"
    )
    for i, line in enumerate((note, more)):
        figure.text(x, 1 - (0.6 + 0.2 * i) / height_in, line, color="0.25", va="center", fontsize=LABEL_POINTS)
    figure.legend(
        handles=[Line2D([], [], linestyle="", label=plain(method), **mark(method)) for method in methods],
        title="method of the plan",
        loc="lower left",
        bbox_to_anchor=(x, 0.12 / height_in),
        ncols=max(1, min(len(methods), int(width_in / 0.95))),
        frameon=False,
        borderaxespad=0,
        alignment="left",
    )
