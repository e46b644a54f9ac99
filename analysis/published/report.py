"""Scores of published figures as a table for people, and as JSON."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from analysis.published.score import BYTES_PER_PARAMETER, UTILISATION, Errors, Scored, Scores, SourceScore
from gssim.console import plain_console

PIPE_WIDTH = 140


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows on stderr how many rows are done, of how many."""
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, rows: bar.update(task, completed=done, total=rows)


def as_json(scores: Scores) -> dict[str, Any]:
    """Return all scores as plain data, every row's figures with them."""
    return {
        "baseline": {"utilisation_ratio": UTILISATION, "bytes_per_parameter": BYTES_PER_PARAMETER},
        "sources": [
            {
                "source": each.source,
                "step_time": asdict(each.step) if each.step else None,
                "memory": {metric: asdict(errors) for metric, errors in each.memory.items()},
                "rank_agreement": asdict(each.agreement),
                "calibration_rows": list(each.calibration),
                "skipped": each.skipped,
                "skipped_rows": dict(each.skipped_rows),
                "rows": [_row(row) for row in each.rows],
            }
            for each in scores.sources
        ],
        "refused_files": list(scores.refused),
        "interrupted": scores.interrupted,
    }


def _row(row: Scored) -> dict[str, Any]:
    metric = row.run.memory_metric
    return {
        "id": row.identity,
        "calibration": row.calibration,
        "measured_step_time_s": row.run.step_s,
        "predicted_step_time_s": row.prediction.step_s,
        "memory_metric": metric,
        "measured_memory_bytes": row.run.memory_bytes,
        "predicted_memory_bytes": getattr(row.prediction, f"{metric}_bytes") if metric else None,
    }


def print_scores(scores: Scores) -> None:
    """Print a line for each source and quantity, then what was skipped and why."""
    console = plain_console(PIPE_WIDTH, highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("source", overflow="fold", min_width=40)
    table.add_column("figure")
    for header in (
        "n",
        "mean\n%",
        "median\n%",
        "max\n%",
        "baseline's\nmedian %",
        "pairs in\norder",
        "calibrated\non rows",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for each in scores.sources:
        for cells in _lines(each):
            table.add_row(*cells)
    console.print(table)
    console.print(
        f"baseline: 6 x parameters x tokens / (GPUs x peak x {UTILISATION}); {BYTES_PER_PARAMETER} bytes a parameter",
    )
    for each in scores.sources:
        if each.calibration:
            rows = ", ".join(each.calibration)
            console.print(f"calibrated on, and not scored, of {each.source}: {rows}")
    for each in scores.sources:
        for reason, count in sorted(each.skipped.items(), key=lambda item: -item[1]):
            console.print(f"skipped {count} of {each.source}: {reason}")


def _lines(each: SourceScore) -> list[tuple[str, ...]]:
    order = f"{each.agreement.agreeing}/{each.agreement.pairs}" if each.agreement.pairs else "-"
    lines = [_cells(each.source, "step time", each.step, order, str(len(each.calibration)))] if each.step else []
    lines += [_cells(each.source, f"memory, {metric}", errors, "", "") for metric, errors in each.memory.items()]
    return lines


def _cells(source: str, figure: str, errors: Errors, order: str, calibrated: str) -> tuple[str, ...]:
    shown = (errors.mean, errors.median, errors.maximum, errors.baseline_median)
    return (source, figure, str(errors.n), *(f"{100 * value:.1f}" for value in shown), order, calibrated)
