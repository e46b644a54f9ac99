"""Printed form of a comparison: one line per scenario; of a large matrix its groups, worst lines and targets."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from analysis.compare.comparison import medians
from analysis.compare.groups import ALL, Target, best_in_words, error_column, targets, worst_of
from gssim.result import PHASES
from gssim.terminal import fits_width, plain_console
from gssim.units import human_bytes, human_seconds, signed_percent

PIPE_WIDTH = 120
DIFFERENCES_SHOWN = 4
DIFFERING_SHOWN = 10
"""Most scenarios whose differing collectives are printed."""
MOST_LINES = 25
"""Most scenarios that are all printed; of more, only the worst."""


def print_comparison(comparison: pl.DataFrame, groups: pl.DataFrame) -> None:
    """Print a comparison: one line per scenario, differing collectives, median errors.

    If there are more than `MOST_LINES` scenarios, it prints the groups, and the lines with the largest errors.
    """
    out = console()
    rows = list(comparison.iter_rows(named=True))
    large = len(rows) > MOST_LINES
    shown = worst_of(rows) if large else rows
    if large:
        out.print(f"the {len(shown)} of {len(rows)} step times that are predicted worst; all are in comparison.csv")
    _print_rows(out, shown)
    differing = [row for row in rows if not row["collectives_equal"]]
    for row in differing[:DIFFERING_SHOWN]:
        differences = row["collectives_difference"].split("; ")
        for difference in differences[:DIFFERENCES_SHOWN]:
            out.print(f"{row['name']}: collectives: {difference}")
        if len(differences) > DIFFERENCES_SHOWN:
            more = len(differences) - DIFFERENCES_SHOWN
            out.print(f"{row['name']}: collectives: {more} more in comparison.csv")
    if len(differing) > DIFFERING_SHOWN:
        out.print(f"collectives of {len(differing) - DIFFERING_SHOWN} more scenarios differ: see comparison.csv")
    if not large and (worst := worst_explained(rows)):
        out.print(worst)
    thresholded = [row for row in rows if row["speed_up_over"] is not None]
    if thresholded and not large:
        _print_effects(out, thresholded)
    if large or (len(groups) > 2 and groups["n"][:-1].max() != 1):  # the last line is of all
        _print_groups(out, list(groups.iter_rows(named=True)))
        out.print(_target_table(targets(groups)))
    parts = [f"{m.what} {100 * m.error_ratio:.1f} % (n = {m.n})" for m in medians(comparison)]
    equal = len(rows) - len(differing)
    out.print(f"median |error|: {', '.join(parts)}; collectives equal in {equal} of {len(rows)}")


def console() -> Console:
    """Return the console for tables: as wide as the terminal, or `PIPE_WIDTH` where output is piped."""
    return plain_console(PIPE_WIDTH)


def figure_table(names: Sequence[Column], heads: Sequence[str], *after: Column) -> Table:
    """Return an empty table: columns of names, one of figures for each of `heads`, and others."""
    figures = (Column(head, justify="right", no_wrap=True) for head in heads)
    return Table(*names, *figures, *after, box=SIMPLE_HEAD, padding=0, show_edge=False)


def _print_groups(out: Console, groups: Sequence[dict[str, Any]]) -> None:
    """Print errors and rank agreement by group, then the meaning of the columns."""

    def size(column: str, statistic: str) -> Callable[[dict[str, Any]], str]:
        return lambda group: _size(group[error_column(column, statistic)])

    def naive(column: str) -> Callable[[dict[str, Any]], str]:
        names = [error_column(column, statistic) for statistic in ("median", "p90")]
        return lambda group: " / ".join(
            "" if group[name] is None else f"{100 * group[name]:.0f}" for name in names
        ).strip(" /")

    columns: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("\nn", lambda group: str(group["n"])),
        (
            "collec-\ntives",
            lambda group: (
                "equal" if group["collectives_equal"] == group["n"] else f"{group['collectives_equal']}/{group['n']}"
            ),
        ),
        ("peak %\nmedian", size("peak_error_ratio", "median")),
        ("\nmax", size("peak_error_ratio", "max")),
        ("step %\nmedian", size("step_time_error_ratio", "median")),
        ("\np90", size("step_time_error_ratio", "p90")),
        ("\nmax", size("step_time_error_ratio", "max")),
        ("noise\n%", lambda group: _size(group["noise_median_ratio"])),
        ("compute\nonly %", naive("naive_compute_error_ratio")),
        ("slowest\nlink %", naive("naive_link_error_ratio")),
        ("Spear-\nman", lambda group: "" if group["spearman"] is None else f"{group['spearman']:.2f}"),
        ("pairs in\norder", lambda group: f"{group['pairs_right']}/{group['pairs']}" if group["pairs"] else ""),
    )
    table = figure_table(
        [Column("group", overflow="fold", min_width=12)],
        [head for head, _ in columns],
        Column("best plan predicted", overflow="fold", min_width=9),
    )
    for group in groups:
        figures = (figure(group) for _, figure in columns)
        style = "bold" if group["group"] == ALL else None
        table.add_row(group["group"], *figures, best_in_words(group, of="/")[0], style=style)
    out.print(table)
    out.print(
        "Sizes of errors. Noise: of the measurements, \u00b1 (median). Compute only, slowest link: naive predictions, "
        "median / p90. Pairs in order: of those that differ by more than noise, predicted in the measured order."
    )


def _target_table(targets: Sequence[Target]) -> Table:
    table = figure_table([Column("asked of the whole matrix")], ("asked", "found", "of"), Column(""))
    for target in targets:
        table.add_row(
            target.what,
            f"{'>=' if target.at_least else '<='} {_figure(target, target.asked)}",
            "" if target.found is None else _figure(target, target.found),
            f"{target.n} {target.of}",
            "met" if target.met else "unknown" if target.met is None else Text("not met", "bold"),
        )
    return table


def _figure(target: Target, value: float) -> str:
    return f"{100 * value:.1f} %" if target.ratio else f"{value:.2f}"


def _size(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f}"


def _print_effects(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the speed-up of thresholds with density and change of loss, and the control that pushes nothing."""
    table = figure_table(
        [Column("thresholds", overflow="fold", min_width=12), Column("dense run")],
        ("density\npredicted", "\nmeasured", "speed\npredicted", "\nmeasured", "change of\nlast loss"),
    )
    for row in rows:
        change = row["loss_change_measured_ratio"]
        table.add_row(
            f"{row['name']} (control)" if row["threshold"] == math.inf else row["name"],
            row["speed_up_over"],
            _densities(row, "predicted"),
            _densities(row, "measured"),
            f"{row['speed_up_predicted_ratio']:.2f}",
            f"{row['speed_up_measured_ratio']:.2f}",
            "" if change is None else f"{signed_percent(change)} %",
        )
    console.print(table)
    if not any(row["threshold"] == math.inf for row in rows):
        console.print("no control: what learning without any push gives is unknown (plan.push.threshold = inf)")


def _densities(row: dict[str, Any], side: str) -> str:
    """Return the density of pushed gradients and, where a threshold decides it, that of published parameters."""
    pushed, published = (row[f"{exchange}_density_{side}"] for exchange in ("push", "publish"))
    shown = ["all" if pushed is None else f"{100 * pushed:.2g} %"]
    return " / ".join(shown if published is None else [*shown, f"{100 * published:.2g} %"])


STEP = ("step\npredicted", "\nmeasured", "error\n%")
PEAK = ("peak\npredicted", "\nmeasured", "error\n%")


def _print_rows(out: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each scenario; where that is too wide, step times and memory one below the other."""
    repeated = any(row["repeats"] > 1 for row in rows)
    plan, step = ("thres-\nhold",), (*STEP, *(("noise\n%",) if repeated else ()))
    memory = (*PEAK, "collec-\ntives", "payload\nerror %")
    cells = [_cells(row, repeated=repeated) for row in rows]
    times = len(plan) + len(step)
    whole = _rows_table(rows, (*plan, *step, *memory), cells)
    if fits_width(out, whole) or out.width >= PIPE_WIDTH:
        out.print(whole)
        return
    out.print(_rows_table(rows, (*plan, *step), [each[:times] for each in cells]))
    out.print(_rows_table(rows, memory, [each[times:] for each in cells]))


def _rows_table(rows: Sequence[dict[str, Any]], heads: Sequence[str], cells: Sequence[Sequence[Text | str]]) -> Table:
    table = figure_table([Column("name", overflow="fold", min_width=12), Column("method", no_wrap=True)], heads)
    for row, values in zip(rows, cells, strict=True):
        table.add_row(row["name"], row["method"], *values)
    return table


def _cells(row: dict[str, Any], *, repeated: bool) -> list[Text | str]:
    return [
        "" if row["threshold"] is None else f"{row['threshold']:g}",
        shown(human_seconds(row["step_time_predicted_s"])),
        shown(human_seconds(row["step_time_measured_s"])),
        _percent(row["step_time_error_ratio"]),
        *([_size(row["noise_ratio"])] if repeated else []),
        _bytes(row["peak_predicted_bytes"]),
        _bytes(row["peak_measured_bytes"]),
        _percent(row["peak_error_ratio"]),
        "equal" if row["collectives_equal"] else Text("differ", "bold"),
        _percent(row["payload_error_ratio"]),
    ]


EXPLAINED_RATIO = 0.03
"""A step time with a smaller error needs no explanation."""


def worst_explained(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line on the step time that is predicted worst: what is sent, how much, and in which phases it differs.

    Empty if all are within `EXPLAINED_RATIO`.
    """
    worst = max(rows, key=lambda row: abs(row["step_time_error_ratio"]), default=None)
    if worst is None or abs(worst["step_time_error_ratio"]) < EXPLAINED_RATIO:
        return ""
    differences = {
        phase: worst[f"{phase}_predicted_s"] - worst[f"{phase}_measured_s"]
        for phase in PHASES
        if worst.get(f"{phase}_predicted_s") is not None and worst.get(f"{phase}_measured_s") is not None
    }
    least_s = 0.05 * max(map(abs, differences.values()))
    largest = sorted(
        ((by, phase) for phase, by in differences.items() if abs(by) > least_s), key=lambda each: -abs(each[0])
    )
    signs = [
        f"{phase.replace('_', ' ')} {'+' if by > 0 else '-'}{shown(human_seconds(abs(by)))}" for by, phase in largest
    ]
    what = "the collectives are equal" if worst["collectives_equal"] else "the collectives differ"
    peak = worst["peak_error_ratio"]
    memory = "its memory is not measured" if peak is None else f"the peak is {signed_percent(peak)} % off"
    return (
        f"predicted worst: {worst['name']}, step {signed_percent(worst['step_time_error_ratio'])} %: {what}, "
        f"{memory}; predicted less measured: {', '.join(signs)}"
    )


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else signed_percent(ratio)


def _bytes(size_bytes: float | None) -> str:
    return "" if size_bytes is None else shown(human_bytes(size_bytes))


def shown(quantity: str) -> str:
    """Return a quantity rounded to four digits, so that eleven columns fit a terminal: `212.05 ms` as `212.1 ms`."""
    number, unit = quantity.split(" ")
    return f"{float(number):#.4g}".rstrip(".") + f" {unit}" if "." in number else quantity
