"""The set of charts of a comparison, each with its description in words."""

import re
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from analysis.charts.accuracy import MOST_LABELLED, predicted_vs_measured
from analysis.charts.accuracy import TITLE as ACCURACY
from analysis.charts.drawing import Chart, percent
from analysis.charts.rivals import TITLE as RIVALS
from analysis.charts.rivals import rivals
from analysis.charts.step_phases import EXPOSED_TITLE as EXPOSED
from analysis.charts.step_phases import TITLE as PHASES
from analysis.charts.step_phases import exposed_communication, longest_phase, phases
from analysis.compare.groups import worst_of

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
