"""All charts of a comparison, and what they show in words.

All charts of a study, and what they show in words.
"""

import re
from collections.abc import Sequence
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from analysis.charts import convergence
from analysis.charts.accuracy import MOST_LABELLED, predicted_vs_measured
from analysis.charts.accuracy import TITLE as ACCURACY
from analysis.charts.drawing import Chart, percent
from analysis.charts.rivals import TITLE as RIVALS
from analysis.charts.rivals import rivals
from analysis.charts.step_phases import EXPOSED_TITLE as EXPOSED
from analysis.charts.step_phases import TITLE as PHASES
from analysis.charts.step_phases import exposed_communication, longest_phase, phases
from analysis.compare.groups import worst_of
from analysis.study.findings import Findings, interval, percentage
from analysis.study.rows import Row
from analysis.study.study import Study


def study_charts(study: Study, rows: Sequence[Row], found: Findings) -> list[Chart]:
    """Return quality against threshold, bytes and time, and by step."""
    losses = "; ".join(map(_loss, rows))
    sent = "; ".join(f"{row.name} {row.sent_bytes / 1e6:.3g} MB" for row in rows)
    times = "; ".join(f"{row.name} {row.step_time_s.mean:.3g} s measured" for row in rows)
    return [
        Chart(
            "loss_against_threshold",
            convergence.QUALITY_TITLE,
            convergence.against_threshold(study, rows, found),
            f"Scatter charts of held-out quality against threshold and density. {found.quality}. Losses: {losses}.",
        ),
        Chart(
            "loss_against_bytes",
            convergence.BYTES_TITLE,
            convergence.against_bytes(study, rows, found),
            f"Scatter charts of held-out quality against bytes sent. {found.bytes}. Sent by a rank in a step: {sent}.",
        ),
        Chart(
            "loss_against_time",
            convergence.TIME_TITLE,
            convergence.against_time(study, rows, found),
            f"Scatter charts of held-out quality against step time. {found.time}. Times of a step: {times}.",
        ),
        Chart(
            "loss_by_step",
            convergence.STEP_TITLE,
            convergence.by_step(study, rows, found),
            f"Line charts of held-out loss and of density by step. {found.density or found.quality}.",
        ),
    ]


def _loss(row: Row) -> str:
    change = "" if row.loss_change is None else f", change from dense {interval(row.loss_change)}"
    density = "all pushed" if row.density is None else f"{percentage(row.density)} pushed"
    return f"{row.name} ({density}) {row.loss.mean:.3f}{change}"


Columns = dict[str, Any]


def comparison_charts(comparison: pl.DataFrame, rival_table: pl.DataFrame) -> list[Chart]:
    """Return the charts of a `compare.compare` table and a `rivals.rival_table`; of a large one, phases by group."""
    rows = list(comparison.iter_rows(named=True))
    accuracy = Chart("predicted_vs_measured", ACCURACY, predicted_vs_measured(comparison), _accuracy_words(rows))
    waiting, gains = exposed_communication(comparison), rivals(rival_table)
    return [
        accuracy,
        *_phase_charts(comparison),
        *([Chart("exposed_communication", EXPOSED, waiting, _exposed_words(rows))] if waiting is not None else []),
        *([Chart("gs_against_dense", RIVALS, gains, _rival_words(rival_table))] if gains is not None else []),
    ]


def _phase_charts(comparison: pl.DataFrame) -> list[Chart]:
    """Return the phases of all scenarios; of many, those of the worst, and of each group in a picture of its own."""
    if len(comparison) <= MOST_LABELLED:
        return [_phase_chart("phases", comparison)]
    worst = worst_of(list(comparison.iter_rows(named=True)))
    rows = pl.DataFrame(worst, schema=comparison.schema)
    note = f"The {len(rows)} of {len(comparison)} whose step times are predicted worst."
    charts = [_phase_chart("phases", rows, note=note)]
    for group in comparison["group"].unique().sort().to_list():
        members = comparison.filter(pl.col("group") == group)
        charts.append(_phase_chart(f"phases-{_slug(group)}", members, note=f"{group}."))
    return charts


def _phase_chart(name: str, rows: pl.DataFrame, *, note: str = "") -> Chart:
    figure: Figure = phases(rows, note=note)
    lines = [f"{row['name']}: {longest_phase(row)}" for row in rows.iter_rows(named=True)]
    words = f"Stacked bars of a step's phases, predicted above measured. {note} Longest phase of {'; '.join(lines)}."
    return Chart(name, PHASES, figure, " ".join(words.split()))


def _accuracy_words(rows: list[Columns]) -> str:
    return (
        f"Scatter chart of predicted against measured values of {len(rows)} scenarios, with a band around equality. "
        + _spread_words(rows, "step_time_error_ratio", "Step time")
        + _spread_words(rows, "peak_error_ratio", "Peak memory")
    ).strip()


def _spread_words(rows: list[Columns], column: str, what: str) -> str:
    known = [row for row in rows if row[column] is not None]
    if not known:
        return ""
    sizes = sorted(abs(row[column]) for row in known)
    worst = max(known, key=lambda row: abs(row[column]))
    middle = 100 * (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
    return f"{what}: median error {middle:.1f} %, the largest {percent(worst[column])} ({worst['name']}). "


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


def _slug(text: str) -> str:
    """Return text as a part of a file's name.

    >>> _slug("lab: two hosts, gpt")
    'lab-two-hosts-gpt'
    """
    return re.sub(r"[^\w.]+", "-", text).strip("-")
