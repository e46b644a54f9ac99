"""Chart of step time and density against the threshold, setting by setting, with dense plans for comparison."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.charts.drawing import (
    LABEL_POINTS,
    STYLE,
    TIME_UNITS,
    Chart,
    add_axes,
    log_axis_with_ends,
    on_axis,
    unit_for,
)
from analysis.charts.sweeps.panels import (
    CONTROL,
    NO_CONTROL,
    Look,
    Size,
    density_words,
    looks_of,
    points_only,
    sheet,
    subset_note,
    threshold_words,
    value_axis,
)
from analysis.sweep_tables import (
    THRESHOLD,
    Layout,
    Place,
    Row,
    SweepTable,
    best_gain,
    by_plan,
    by_setting,
    is_control,
    is_dense,
    is_thresholded,
    layout_of,
    representative,
    thresholds,
)

TITLE = "At which threshold is a step faster than dense training?"
TITLE_OF_MANY = "At which threshold is a step faster than dense training, and on which network?"
SIZE = Size(wide=3.1, high=2.2, left=0.85, right=0.45, above=0.5, below=1.75)
DENSITY_IN, BETWEEN_IN = 0.85, 0.14
MOST_PANELS, MOST_PAGES = 12, 4
TRANSFERRED = (
    " Shaded: error band of gradient statistics, which were not measured on the model but transferred from small ones."
)
MOST_SAID = 12
"""Most settings that are described in the text alternative."""
ENDS_RATIO = 5.0
"""Distance, as a factor, of 0 and infinity from the least and the largest threshold on the axis."""


def step_time_by_threshold(table: SweepTable) -> list[Chart]:
    """Return charts of at most `MOST_PANELS` settings each, sampled over the sweep; none where no threshold varies."""
    layout = layout_of(table)
    settings = {
        place: rows for place, rows in by_setting(table.fitting, layout).items() if len(_finite(thresholds(rows))) > 1
    }
    drawn = representative(list(settings), MOST_PANELS * MOST_PAGES)
    pages = [drawn[i : i + MOST_PANELS] for i in range(0, len(drawn), MOST_PANELS)]
    looks = looks_of(table, layout)
    charts = []
    for number, page in enumerate(pages):
        name = "step_time_by_threshold" + (f"-{number + 1}" if number else "")
        where = subset_note(len(drawn), len(settings))
        where += f" Page {number + 1} of {len(pages)}." if len(pages) > 1 else ""
        charts.append(_chart(name, {place: settings[place] for place in page}, layout, looks, where))
    return charts


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if 0 < value < inf]


def _chart(name: str, settings: dict[Place, list[Row]], layout: Layout, looks: dict[Place, Look], where: str) -> Chart:
    rows = [row for members in settings.values() for row in members]
    controlled = any(is_control(row) for row in rows)
    title = TITLE_OF_MANY if len(settings) > 1 else TITLE
    note = (
        "Predicted. "
        + (
            "No plan without a threshold is in this table. "
            if all(map(is_thresholded, rows))
            else "Horizontal lines: plans without a threshold; of the dense ones nothing is dropped. "
        )
        + "Below each panel: the part of off-shard gradients that a threshold lets through. Change of loss: not "
        "measured; a prediction has none. "
        + ("Asterisk: the control, of which nothing is pushed." if controlled else NO_CONTROL)
        + (TRANSFERRED if any(row.get("step_time_low_s") is not None for row in rows) else "")
        + where
    )
    with mpl.rc_context(STYLE):
        titles = [layout.setting_label(place) for place in settings]
        figure, boxes = sheet(
            titles, SIZE, across=3, heading=title, note=note, legend=_legend(rows, layout, looks, controlled)
        )
        ends = _ends(thresholds(rows))
        for (left, bottom, wide, high), members in zip(boxes, settings.values(), strict=True):
            axes = add_axes(figure, (left, bottom, wide, high))
            _times(axes, members, layout, looks, ends)
            below = add_axes(figure, (left, bottom - BETWEEN_IN - DENSITY_IN, wide, DENSITY_IN))
            _densities(below, members, layout, looks, ends)
    return Chart(name, title, figure, _words(settings, layout))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    finite = _finite(values)
    return finite[0] / (ENDS_RATIO if 0.0 in values else 1.0), finite[-1] * (ENDS_RATIO if inf in values else 1.0)


def _times(axes: Axes, rows: list[Row], layout: Layout, looks: dict[Place, Look], ends: tuple[float, float]) -> None:
    unit, factor = unit_for(max(row["step_time_s"] for row in rows), TIME_UNITS)
    shown = ("step_time_s", "step_time_low_s", "step_time_high_s")
    value_axis(axes, [row[key] / factor for row in rows for key in shown if row.get(key) is not None])
    for place, members in by_plan(rows, layout).items():
        whole = [row for row in members if not is_thresholded(row)]
        if whole:
            y = min(row["step_time_s"] for row in whole) / factor
            axes.axhline(y, color=looks[place]["color"], linestyle=looks[place]["linestyle"], linewidth=1.4, zorder=2)
            axes.plot(
                1.0, y, transform=axes.get_yaxis_transform(), clip_on=False, zorder=4, **points_only(looks[place])
            )
        draw_band(axes, members, looks[place], ends, "step_time", lambda value: value / factor)
        _line(axes, members, looks[place], ends, lambda row: row["step_time_s"] / factor)
    axes.set_ylabel(f"step time ({unit})")
    _threshold_axis(axes, rows, ends, labelled=False)
    axes.grid(color="0.9", linewidth=0.6)


LINEAR_FROM_RATIO = 0.05
"""Least density above zero from which the axis of densities is linear; a logarithmic one has too few labels there."""


def _densities(
    axes: Axes, rows: list[Row], layout: Layout, looks: dict[Place, Look], ends: tuple[float, float]
) -> None:
    sparse = [row for row in rows if row["push_density_ratio"] is not None]
    densities = [row["push_density_ratio"] for row in sparse]
    least = min((density for density in densities if density > 0), default=0.01)
    floor = 0.0 if least >= LINEAR_FROM_RATIO else max(least / 2.5, 1e-6)
    for place, members in by_plan(sparse, layout).items():
        draw_band(axes, members, looks[place], ends, "push_density", lambda value: 100 * max(value, floor))
        _line(axes, members, looks[place], ends, lambda row: max(100 * row["push_density_ratio"], 100 * floor))
    if floor:
        axes.set_yscale("log")
        axes.set_ylim(100 * floor / 1.5, 200)
        beside = 100 * floor * (3 / floor) ** 0.2  # labels are a fifth of the axis apart
        ticks = [value for value in (0.0001, 0.001, 0.01, 0.1, 1, 10, 100) if value > beside]
        zero = [100 * floor] if 0.0 in densities else []  # only a plan that pushes nothing is drawn where "0" stands
        axes.yaxis.set_major_locator(FixedLocator([*zero, *ticks[::-1][:: 1 + len(ticks) // 4]]))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: "0" if zero and value < 101 * floor else f"{value:g}")
        )
    else:
        axes.set_ylim(0, 108)
        axes.yaxis.set_major_locator(FixedLocator([0, 50, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("pushed (%)")
    _threshold_axis(axes, rows, ends, labelled=True)
    axes.set_xlabel("threshold on |gradient|")
    axes.grid(color="0.9", linewidth=0.6)


ENDS_OF_BANDS = {
    "step_time": ("step_time_low_s", "step_time_high_s"),
    "push_density": ("push_density_low_ratio", "push_density_high_ratio"),
}


def draw_band(
    axes: Axes, members: Sequence[Row], look: Look, ends: tuple[float, float], kind: str, y_of: Callable[[float], float]
) -> None:
    """Shade a plan's range, where its gradient statistics were transferred from other models."""
    low, high = ENDS_OF_BANDS[kind]
    banded = sorted(
        (row for row in members if row.get(low) is not None and row[THRESHOLD] is not None),
        key=lambda row: row[THRESHOLD],
    )
    banded = [row for row in banded if not is_control(row)]
    x = [on_axis(row[THRESHOLD], ends) for row in banded]
    edges = [[y_of(row[end]) for row in banded] for end in (low, high)]
    axes.fill_between(x, edges[0], edges[1], color=look["color"], alpha=0.18, linewidth=0, zorder=1)


def _line(axes: Axes, members: Sequence[Row], look: Look, ends: tuple[float, float], y_of: Any) -> None:
    """Draw a thresholded plan: a line through its thresholds, and its control as a mark."""
    sparse = sorted(
        (row for row in members if is_thresholded(row) and row[THRESHOLD] is not None), key=lambda row: row[THRESHOLD]
    )
    line = [row for row in sparse if not is_control(row)]
    style = {**look, "markersize": 5.5, "linewidth": 1.4, "markeredgecolor": "white", "markeredgewidth": 0.5}
    axes.plot([on_axis(row[THRESHOLD], ends) for row in line], [y_of(row) for row in line], zorder=3, **style)
    for row in sparse:
        if is_control(row):
            axes.plot(on_axis(row[THRESHOLD], ends), y_of(row), zorder=4, clip_on=False, **CONTROL)


def _threshold_axis(axes: Axes, rows: list[Row], ends: tuple[float, float], *, labelled: bool) -> None:
    """Set up a logarithmic axis with 0 and infinity at its ends."""
    values = thresholds(rows)
    finite = _finite(values)
    most = 5
    shown = finite if len(finite) <= most else [value for value in finite if f"{value:e}"[0] == "1"]
    shown = shown if 1 < len(shown) <= most else finite[:: max(1, (len(finite) - 1) // (most - 1))]
    ticks = {on_axis(value, ends): threshold_words(value) for value in shown}
    if 0.0 in values:
        ticks[ends[0]] = "0"
    if inf in values:
        ticks[ends[1]] = "\u221e"
    log_axis_with_ends(axes, ticks if labelled else dict.fromkeys(ticks, ""), ends)
    axes.tick_params(axis="x", labelsize=LABEL_POINTS - 0.5)


def _legend(rows: list[Row], layout: Layout, looks: dict[Place, Look], controlled: bool) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = []
    for place, members in by_plan(rows, layout).items():
        dense = any(map(is_dense, members))
        label = layout.plan_label(place)
        if dense and any(map(is_thresholded, members)):
            words = f"{label}: by threshold, and dense"
        else:
            words = f"{label} (dense)" if dense else label
        entries.append((Line2D([], [], markersize=6, linewidth=1.4, **looks[place]), words))
    if controlled:
        entries.append((Line2D([], [], **CONTROL), "nothing pushed (control)"))
    return entries


def _words(settings: dict[Place, list[Row]], layout: Layout) -> str:
    sentences = []
    for place, rows in list(settings.items())[:MOST_SAID]:
        gain = best_gain(rows)
        if gain is not None:
            setting, threshold = layout.setting_label(place), gain.thresholded[THRESHOLD]
            dense, sparse = (layout.plan_label(layout.plan_of(row)) for row in (gain.dense, gain.thresholded))
            at = "" if threshold is None else f" at threshold {threshold:g}"  # none: of what is published alone
            sentences.append(
                f"{f'{setting}: ' if setting else ''}at best {gain.speed_up_ratio:.2f} times the speed of the fastest "
                f"dense plan ({dense}), by {sparse}{at} with "
                f"{density_words(gain.thresholded)}"
            )
    return (
        f"Line chart, {len(settings)} panel{'s' if len(settings) > 1 else ''}: predicted step time against the "
        "threshold, "
        f"with plans without one as horizontal lines and density below. {'. '.join(sentences)}."
    )
