"""The charts of a comparison, each with its description in words.

Drawn here: the step time of Gradient Sharding relative to DDP and ZeRO-2, with density and change of loss.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.charts.accuracy import MOST_LABELLED, predicted_vs_measured
from analysis.charts.accuracy import TITLE as ACCURACY
from analysis.charts.drawing import (
    LABEL_POINTS,
    MARKS,
    STYLE,
    Chart,
    add_axes,
    label_width_in,
    new_figure,
    percent,
    plain,
    wrapped,
    write_heading,
)
from analysis.charts.step_phases import EXPOSED_TITLE as EXPOSED
from analysis.charts.step_phases import TITLE as PHASES
from analysis.charts.step_phases import exposed_communication, longest_phase, phases
from analysis.compare.groups import variant_of, worst_of
from analysis.compare.rivals import DENSE

Columns = dict[str, Any]


def comparison_charts(comparison: pl.DataFrame, rival_table: pl.DataFrame) -> list[Chart]:
    """Return the charts of a `compare.compare` table and a `rivals.rival_table`; of a large one, phases by group."""
    rows = list(comparison.iter_rows(named=True))
    words = (
        f"Scatter chart of predicted against measured values of {len(rows)} scenarios, with a band around equality. "
        + _error_words(rows, "step_time_error_ratio", "Step time")
        + _error_words(rows, "peak_error_ratio", "Peak memory")
    )
    accuracy = Chart("predicted_vs_measured", ACCURACY, predicted_vs_measured(comparison), words.strip())
    exposed, against_dense = exposed_communication(comparison), rivals(rival_table)
    charts = [accuracy, *_phase_charts(comparison)]
    if exposed is not None:
        charts.append(Chart("exposed_communication", EXPOSED, exposed, _exposed_words(rows)))
    if against_dense is not None:
        charts.append(Chart("gs_against_dense", RIVALS, against_dense, _rival_words(rival_table)))
    return charts


def _phase_charts(comparison: pl.DataFrame) -> list[Chart]:
    """Return the chart of phases of all scenarios; of many, one of the worst, and one for each group."""
    if len(comparison) <= MOST_LABELLED:
        return [_phase_chart("phases", comparison)]
    worst = worst_of(list(comparison.iter_rows(named=True)))
    rows = pl.DataFrame(worst, schema=comparison.schema)
    note = f"The {len(rows)} of {len(comparison)} whose step times are predicted worst."
    charts = [_phase_chart("phases", rows, note=note)]
    for group in comparison["group"].unique().sort().to_list():
        members = comparison.filter(pl.col("group") == group)
        slug = re.sub(r"[^\w.]+", "-", group).strip("-")  # part of a file's name
        charts.append(_phase_chart(f"phases-{slug}", members, note=f"{group}."))
    return charts


def _phase_chart(name: str, rows: pl.DataFrame, *, note: str = "") -> Chart:
    figure: Figure = phases(rows, note=note)
    lines = [f"{row['name']}: {longest_phase(row)}" for row in rows.iter_rows(named=True)]
    words = f"Stacked bars of a step's phases, predicted above measured. {note} Longest phase of {'; '.join(lines)}."
    return Chart(name, PHASES, figure, " ".join(words.split()))


def _error_words(rows: list[Columns], column: str, quantity: str) -> str:
    """Return a sentence on the median and the largest error of a quantity."""
    known = [row for row in rows if row[column] is not None]
    if not known:
        return ""
    sizes = sorted(abs(row[column]) for row in known)
    worst = max(known, key=lambda row: abs(row[column]))
    middle = 100 * (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
    return f"{quantity}: median error {middle:.1f} %, the largest {percent(worst[column])} ({worst['name']}). "


def _exposed_words(rows: list[Columns]) -> str:
    known = [row for row in rows if row["exposed_communication_error_of_step_ratio"] is not None]
    words = f"Scatter charts, one a group, of predicted against measured exposed communication, {len(known)} scenarios."
    if not known:
        return words
    worst = max(known, key=lambda row: abs(row["exposed_communication_error_of_step_ratio"]))
    error = percent(worst["exposed_communication_error_of_step_ratio"])
    return f"{words} Furthest off: {worst['name']}, {error} of a step."


def _rival_words(table: pl.DataFrame) -> str:
    rows = list(table.iter_rows(named=True))
    faster = [row for row in rows if row["step_time_ratio_measured"] < 1]
    best = min(
        (row for row in rows if not row["control"]), key=lambda row: row["step_time_ratio_measured"], default=None
    )
    words = (
        "Dot chart of Gradient Sharding's step time as a multiple of DDP's and ZeRO-2's, predicted and measured, with "
        f"density and change of loss beside it. Measured to be faster in {len(faster)} of {len(rows)} comparisons."
    )
    if best is None:
        return words
    pushed = best["push_density_measured"]
    change = best["loss_change_measured_ratio"]
    return (
        f"{words} Fastest: {best['name']}, {1 / best['step_time_ratio_measured']:.2f} times the speed of "
        f"{best['rival']}, "
        f"with {'all' if pushed is None else f'{100 * pushed:.2g} %'} pushed and a loss that changed by "
        f"{'not measured' if change is None else percent(change)}."
    )


# Gradient Sharding against dense rivals -------------------------------------------------------------------------------

RIVALS = "Where does Gradient Sharding win, and where does it lose?"
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
        axes = add_axes(figure, (left_in, BOTTOM_IN, PANEL_IN, ROW_IN * len(lines)))
        _panel(axes, lines)
        _columns(axes, lines)
        _heading(figure, notes)
    return figure


def _lines(rows: Sequence[Row]) -> list[Line]:
    """Return a heading for each group, then its scenarios, the fastest first."""
    lines: list[Line] = []
    for group, members in groupby(rows, key=lambda row: row["group"]):
        scenarios = [list(of_scenario) for _, of_scenario in groupby(members, key=lambda row: row["scenario_id"])]
        lines.append((group, []))
        scenarios.sort(key=lambda of_scenario: of_scenario[0]["step_time_ratio_measured"])
        lines.extend((_label(of_scenario[0]), of_scenario) for of_scenario in scenarios)
    return lines


def _label(row: Row) -> str:
    name = variant_of(row["name"])
    return f"{name} (control)" if row["control"] else name


def _panel(axes: Axes, lines: Sequence[Line]) -> None:
    rows = [row for _, of_line in lines for row in of_line]
    ratios = [row[f"step_time_ratio_{side}"] for row in rows for side in ("predicted", "measured")]
    limits = (min(0.8, *ratios) / 1.12, max(1.25, *ratios) * 1.12)
    axes.set_xscale("log")
    axes.set_xlim(limits)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.axvspan(limits[0], 1, color="0.94", linewidth=0, zorder=0)
    axes.axvline(1, color="0.25", linewidth=1, zorder=1)
    for y, (_, of_line) in enumerate(lines):
        axes.axhline(y, color="0.88" if of_line else "none", linewidth=0.6, zorder=0.5)
        for row in of_line:
            _pair(axes, y + (APART if row["rival_method"] == "zero2" else -APART if len(of_line) > 1 else 0), row)
    axes.set_yticks(range(len(lines)), [plain(label) for label, _ in lines], fontsize=LABEL_POINTS)
    for tick, (_, of_line) in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("normal" if of_line else "bold")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if limits[0] <= tick <= limits[1]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="x", color="0.88", linewidth=0.6)
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
        for y, (_, of_line) in enumerate(lines):
            if of_line:
                text = _cells(of_line[0])[i]
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
    write_heading(figure, RIVALS, notes, notes_in=0.62, step_in=NOTE_IN)
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
        bbox_to_anchor=(0.15 / width_in, 0.3 / height_in),
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
