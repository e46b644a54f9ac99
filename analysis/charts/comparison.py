"""All charts of a comparison, by file name."""

import re

import polars as pl
from matplotlib.figure import Figure

from analysis.charts.accuracy import MOST_LABELLED, predicted_vs_measured
from analysis.charts.exposed import exposed_communication
from analysis.charts.rivals import rivals
from analysis.charts.step_phases import phases
from analysis.groups import worst_of


def comparison_figures(comparison: pl.DataFrame, rival_table: pl.DataFrame) -> dict[str, Figure]:
    """Return the charts of a `compare.compare` table and a `rivals.rival_table`; of a large one, phases by group."""
    figures: dict[str, Figure | None] = {
        "predicted_vs_measured.png": predicted_vs_measured(comparison),
        **_phase_figures(comparison),
        "exposed_communication.png": exposed_communication(comparison),
        "gs_against_dense.png": rivals(rival_table),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _phase_figures(comparison: pl.DataFrame) -> dict[str, Figure]:
    """Return the phases of all scenarios; of many, those of the worst, and of each group in a picture of its own."""
    if len(comparison) <= MOST_LABELLED:
        return {"phases.png": phases(comparison)}
    worst = worst_of(list(comparison.iter_rows(named=True)))
    rows = pl.DataFrame(worst, schema=comparison.schema)
    note = f"The {len(rows)} of {len(comparison)} whose step times are predicted worst."
    figures = {"phases.png": phases(rows, note=note)}
    for group in comparison["group"].unique().sort().to_list():
        figures[f"phases-{_slug(group)}.png"] = phases(comparison.filter(pl.col("group") == group), note=f"{group}.")
    return figures


def _slug(text: str) -> str:
    """Return text as a part of a file's name.

    >>> _slug("lab: two hosts, gpt")
    'lab-two-hosts-gpt'
    """
    return re.sub(r"[^\w.]+", "-", text).strip("-")
