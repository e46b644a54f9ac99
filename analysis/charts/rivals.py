"""Chart of Gradient Sharding's step time relative to DDP and ZeRO-2, with density and change of loss."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.charts.drawing import LABEL_POINTS, MARKS, STYLE, label_width_in, new_figure, percent, plain, wrapped
from analysis.compare.groups import variant_of
from analysis.compare.rivals import DENSE

TITLE = "Where does Gradient Sharding win, and where does it lose?"
PANEL_IN, ROW_IN, TOP_IN, BOTTOM_IN, COLUMN_IN = 5.2, 0.3, 1.1, 1.2, 1.25
NOTE_IN = 0.2
"""Height of a line of the note."""
TICKS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
APART = 0.17
"""Vertical offset of two rivals in one row, in rows."""

Row = dict[str, Any]
Line = tuple[str, list[Row]]
"""A label and one table row for each rival; no rows for the heading of a group."""


def rivals(table: pl.DataFrame) -> Figure | None:
    """Return the chart of a `rivals.rival_table`, one line per GS scenario; None for an empty table."""
    if table.is_empty():
        return None
    lines = _lines(list(table.iter_rows(named=True)))
    with mpl.rc_context(STYLE):
        left_in = 0.35 + max(label_width_in(label) for label, _ in lines)
        width_in = left_in + PANEL_IN + 3 * COLUMN_IN + 0.3
        rival = "DDP's" if table["rival_method"].unique().to_list() == ["ddp"] else "DDP's and ZeRO-2's"
        note = (
            f"Time of a step beside {rival} for the same training, predicted and measured; what was pushed and "
            "published, and the loss of the last steps beside dense training's, as measured. " + _controls(table)
        )
        notes = wrapped(note, width_in - 0.3)
        height_in = TOP_IN + NOTE_IN * len(notes) + ROW_IN * len(lines) + BOTTOM_IN
        figure = new_figure(width_in, height_in)
        box = (left_in / width_in, BOTTOM_IN / height_in, PANEL_IN / width_in, ROW_IN * len(lines) / height_in)
        axes = figure.add_axes(box)
        _panel(axes, lines)
        _columns(axes, lines)
        _heading(figure, notes)
    return figure


def _lines(rows: Sequence[Row]) -> list[Line]:
    """Return a heading for each group, then its scenarios, the fastest first."""
    lines: list[Line] = []
    for group, members in groupby(rows, key=lambda row: row["group"]):
        scenarios = [list(found) for _, found in groupby(members, key=lambda row: row["scenario_id"])]
        lines.append((group, []))
        scenarios.sort(key=lambda found: found[0]["step_time_ratio_measured"])
        lines.extend((_label(found[0]), found) for found in scenarios)
    return lines


def _label(row: Row) -> str:
    name = variant_of(row["name"])
    return f"{name} (control)" if row["control"] else name


def _panel(axes: Axes, lines: Sequence[Line]) -> None:
    rows = [row for _, found in lines for row in found]
    ratios = [row[f"step_time_ratio_{side}"] for row in rows for side in ("predicted", "measured")]
    limits = (min(0.8, *ratios) / 1.12, max(1.25, *ratios) * 1.12)
    axes.set_xscale("log")
    axes.set_xlim(limits)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.axvspan(limits[0], 1, color="0.94", linewidth=0, zorder=0)
    axes.axvline(1, color="0.25", linewidth=1, zorder=1)
    for y, (_, found) in enumerate(lines):
        axes.axhline(y, color="0.88" if found else "none", linewidth=0.6, zorder=0.5)
        for row in found:
            _pair(axes, y + (APART if row["rival_method"] == "zero2" else -APART if len(found) > 1 else 0), row)
    axes.set_yticks(range(len(lines)), [plain(label) for label, _ in lines], fontsize=LABEL_POINTS)
    for tick, (_, found) in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("normal" if found else "bold")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if limits[0] <= tick <= limits[1]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="x", color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("time of a step, as a multiple of the rival's")
    for x, text, side in ((0.99, "faster than the rival ", "right"), (1.01, " slower", "left")):
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": side, "va": "bottom", "color": "0.3"}
        axes.annotate(text, (x, 1.0), **place, fontsize=LABEL_POINTS, annotation_clip=False)


def _pair(axes: Axes, y: float, row: Row) -> None:
    """Draw one rival: predicted (hollow) and measured (filled, with its noise), joined."""
    marker, colour = MARKS[row["rival_method"]]
    measured, predicted = row["step_time_ratio_measured"], row["step_time_ratio_predicted"]
    noise = row["noise_ratio"] * measured
    axes.plot([measured, predicted], [y, y], color=colour, linewidth=1, alpha=0.6, zorder=2)
    axes.errorbar(measured, y, xerr=noise, linestyle="", ecolor="0.3", elinewidth=0.9, capsize=2, zorder=3)
    style: dict[str, Any] = {
        "marker": marker,
        "markersize": 6,
        "linestyle": "",
        "color": colour,
        "markeredgewidth": 1.1,
    }
    axes.plot(measured, y, zorder=4, **style)
    axes.plot(predicted, y, zorder=4, markerfacecolor="white", **style)


COLUMNS = ("pushed", "published", "change of loss")


def _columns(axes: Axes, lines: Sequence[Line]) -> None:
    """Write densities and change of loss right of the panel."""
    for i, header in enumerate(COLUMNS):
        x = 1 + (i + 0.95) * COLUMN_IN / PANEL_IN
        place: dict[str, Any] = {"ha": "right", "fontsize": LABEL_POINTS, "annotation_clip": False}
        axes.annotate(header, (x, 1.0), xycoords="axes fraction", va="bottom", fontweight="bold", color="0.2", **place)
        for y, (_, found) in enumerate(lines):
            if found:
                text = _cells(found[0])[i]
                axes.annotate(text, (x, y), xycoords=axes.get_yaxis_transform(), va="center", **place)


def _cells(row: Row) -> tuple[str, str, str]:
    change = row["loss_change_measured_ratio"]
    return (_density(row, "push"), _density(row, "publish"), "not known" if change is None else percent(change))


def _density(row: Row, exchange: str) -> str:
    """Return the measured density as text; `all` without a threshold."""
    density = row[f"{exchange}_density_measured"]
    return "all" if density is None else f"{100 * density:.2g} %"


def _heading(figure: Figure, notes: Sequence[str]) -> None:
    width_in, height_in = figure.get_size_inches()
    x = 0.15 / width_in
    figure.text(x, 1 - 0.32 / height_in, TITLE, fontsize=14, fontweight="bold", va="center")
    for i, note in enumerate(notes):
        figure.text(x, 1 - (0.62 + NOTE_IN * i) / height_in, plain(note), color="0.25", va="center")
    looks: dict[str, dict[str, Any]] = {
        f"beside {method}": {"marker": MARKS[method][0], "color": MARKS[method][1]} for method in DENSE
    }
    looks |= {
        "measured, \u00b1 noise": {"marker": "o", "color": "0.3"},
        "predicted": {"marker": "o", "color": "0.3", "markerfacecolor": "white"},
    }
    handles = [Line2D([], [], linestyle="", markersize=6, label=label, **look) for label, look in looks.items()]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(x, 0.3 / height_in),
        ncols=4,
        frameon=False,
        borderaxespad=0,
    )


def _controls(table: pl.DataFrame) -> str:
    """Return a sentence on the groups without a control, the run in which nothing is pushed."""
    without = [group for (group,), rows in table.group_by("group", maintain_order=True) if not rows["control"].any()]
    if not without:
        return "Control: nothing is pushed."
    if len(without) == table["group"].n_unique():
        return "No control: what learning without any push gives is unknown."
    return f"No control in {', '.join(map(str, without))}."
