"""Errors and rank agreement by group of competing scenarios, such as all plans for one model on one cluster.

For each group and for all together: equality of collectives, errors of memory and time, and whether predictions rank
the plans as measured. Two plans whose measured times differ by less than their noise are not ranked.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import inf
from typing import Any

import polars as pl

from analysis.compare.table import sweep_group, told_apart
from gssim.result import Result
from gssim.scenario.sweep import SEPARATOR

ALL = "all"
UNNAMED = "unnamed"
FEWEST_RANKED = 3
"""Fewest scenarios with a rank correlation: that of two is 1 or -1, no more than the order of the pair."""

ERRORS = (
    "peak_error_ratio",
    "step_time_error_ratio",
    "naive_compute_error_ratio",
    "naive_link_error_ratio",
    "exposed_communication_error_of_step_ratio",
)
"""Columns of a comparison of which the groups have error statistics."""


def error_column(column: str, statistic: str) -> str:
    """Return the name of the column with a statistic of an error column.

    >>> error_column("peak_error_ratio", "max")
    'peak_error_max_ratio'
    """
    return f"{column.removesuffix('_ratio')}_{statistic}_ratio"


STATISTICS = ("median", "p90", "max")
GROUP_COLUMNS = {
    "group": pl.String,
    "n": pl.Int64,
    "collectives_equal": pl.Int64,
    **{error_column(column, statistic): pl.Float64 for column in ERRORS for statistic in STATISTICS},
    "noise_median_ratio": pl.Float64,
    "pairs": pl.Int64,
    "pairs_right": pl.Int64,
    "spearman": pl.Float64,
    "choices": pl.Int64,
    "best_right": pl.Int64,
    "predicted_best": pl.String,
    "measured_best": pl.String,
}
"""The columns of groups.csv, in order."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Errors:
    """Statistics of absolute errors; None where there are none."""

    median: float | None
    p90: float | None
    max: float | None


@dataclass(frozen=True)
class Order:
    """Agreement of predicted and measured order of the scenarios of a group."""

    pairs: int
    """Number of pairs whose measured times differ by more than the noise of both."""
    pairs_right: int
    """Number of these that are predicted in the measured order."""
    spearman: float | None
    """Rank correlation of predicted and measured times; None for fewer than `FEWEST_RANKED`, or where all are equal."""
    predicted_best: str | None
    """Name of the scenario that is predicted to be fastest, controls (threshold inf) left out."""
    measured_best: str | None
    best_right: bool | None
    """Whether both are the same, or equal within noise; None for fewer than two candidates."""


def group_of(result: Result) -> str:
    """Return a scenario's group: the part of its name before `--`, else its cluster and model."""
    group = sweep_group(result).strip()
    if group:
        return group
    workload = result.scenario.get("workload", {})
    parts = [_name(result.scenario.get("cluster")), _name(workload.get("model"))]
    return ", ".join(part for part in parts if part) or UNNAMED


def groups_of(results: Sequence[Result]) -> list[str]:
    """Return the group of each scenario; groups whose scenarios differ in model or batch are one for each of these.

    Steps of fewer samples are faster whatever the plan, so they are not compared with others.
    """
    workloads = [result.scenario.get("workload") or {} for result in results]
    return told_apart(
        [group_of(result) for result in results],
        [_name(workload.get("model")) or UNNAMED for workload in workloads],
        [f"batch {workload.get('global_batch_size')}" for workload in workloads],
        [f"{workload.get('sequence_length')} tokens" for workload in workloads],
    )


def variant_of(name: str) -> str:
    """Return the part of a scenario's name after its group.

    >>> variant_of("two-sites--gs"), variant_of("demo")
    ('gs', 'demo')
    """
    return name.partition(SEPARATOR)[2] or name


def best_in_words(group: Row, *, of: str) -> tuple[str, bool]:
    """Return which plan of a group is predicted to be fastest and whether it was, in words, and whether it was not.

    Of all groups together: in how many of them the prediction is right; `of`: what stands between the two numbers.
    """
    if not group["choices"]:
        return "", False
    if group["group"] == ALL:
        return f"right in {group['best_right']}{of}{group['choices']}", False
    predicted, measured = (variant_of(group[f"{side}_best"]) for side in ("predicted", "measured"))
    if predicted == measured:
        return f"{predicted}: right", False
    if group["best_right"]:
        return f"{predicted}: as fast as {measured}", False
    return f"{predicted}: wrong, {measured}", True


def _name(table: Any) -> str:
    return str(table.get("name") or "") if isinstance(table, dict) else ""


def group_table(comparison: pl.DataFrame) -> pl.DataFrame:
    """Return one row per group of a `comparison.compare` table, by name, then one of all (`group` = "all").

    `choices` counts the groups with at least two candidates, `best_right` those whose best plan is predicted right.
    """
    members: dict[str, list[Row]] = {}
    for row in comparison.iter_rows(named=True):
        members.setdefault(row["group"], []).append(row)
    lines: list[Row] = []
    for group, rows in sorted(members.items()):
        order = order_of(rows)
        choice = {"choices": int(order.best_right is not None), "best_right": int(order.best_right or False)}
        lines.append({"group": group, **_error_summary(rows), **asdict(order), **choice})
    counted = ("pairs", "pairs_right", "choices", "best_right")
    totals = {column: sum(line[column] for line in lines) for column in counted}
    everything = {"group": ALL, **_error_summary(list(comparison.iter_rows(named=True))), **totals}
    return pl.DataFrame([*lines, everything], schema=GROUP_COLUMNS)


def _error_summary(rows: Sequence[Row]) -> Row:
    """Return the columns of a group that summarise collectives, errors and noise."""
    summary: Row = {"n": len(rows), "collectives_equal": sum(row["collectives_equal"] for row in rows)}
    for column in ERRORS:
        errors = asdict(errors_of([row[column] for row in rows]))
        summary |= {error_column(column, statistic): errors[statistic] for statistic in STATISTICS}
    return summary | {"noise_median_ratio": errors_of([row["noise_ratio"] for row in rows]).median}


def errors_of(ratios: Sequence[float | None]) -> Errors:
    """Return median, 90th percentile (linearly interpolated) and maximum of the absolute error ratios.

    >>> errors_of([0.1, -0.2, None, 0.3])
    Errors(median=0.2, p90=0.28, max=0.3)
    """
    sizes = pl.Series([abs(ratio) for ratio in ratios if ratio is not None], dtype=pl.Float64)
    return Errors(*(sizes.quantile(part, interpolation="linear") for part in (0.5, 0.9, 1.0)))


def order_of(rows: Sequence[Row]) -> Order:
    """Return the agreement of predicted and measured order of the scenarios of a group."""
    distinguishable = [(a, b) for a, b in combinations(rows, 2) if differ(a, b)]
    pairs_right = 0
    for a, b in distinguishable:
        predicted_s = a["step_time_predicted_s"] - b["step_time_predicted_s"]
        pairs_right += predicted_s * (a["step_time_measured_s"] - b["step_time_measured_s"]) > 0  # a tie is no order
    candidates = [row for row in rows if row["threshold"] != inf]
    first = min(candidates, key=lambda row: row["step_time_predicted_s"], default=None)
    fastest = min(candidates, key=lambda row: row["step_time_measured_s"], default=None)
    choice = len(candidates) > 1 and first is not None and fastest is not None
    return Order(
        pairs=len(distinguishable),
        pairs_right=pairs_right,
        spearman=spearman([(row["step_time_predicted_s"], row["step_time_measured_s"]) for row in rows]),
        predicted_best=None if first is None else first["name"],
        measured_best=None if fastest is None else fastest["name"],
        best_right=not differ(first, fastest) if choice and first and fastest else None,
    )


def differ(a: Row, b: Row) -> bool:
    """Return whether two measured step times differ by more than the noise of both; unknown noise counts as 0."""
    apart_s: float = abs(a["step_time_measured_s"] - b["step_time_measured_s"])
    return apart_s > _noise_s(a) + _noise_s(b)


def _noise_s(row: Row) -> float:
    return float((row["noise_ratio"] or 0.0) * row["step_time_measured_s"])


def spearman(times_s: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation of (predicted, measured) pairs; None where it is undefined.

    >>> spearman([(1.0, 1.1), (2.0, 2.4), (3.0, 2.3)])
    0.5
    """
    predicted, measured = ([pair[i] for pair in times_s] for i in (0, 1))
    if len(times_s) < FEWEST_RANKED or len(set(predicted)) == 1 or len(set(measured)) == 1:
        return None
    correlation = pl.select(pl.corr(pl.Series(predicted), pl.Series(measured), method="spearman")).item()
    return round(float(correlation), 12)


WORST_SHOWN = 10


def worst_of(rows: Sequence[Row], most: int = WORST_SHOWN) -> list[Row]:
    """Return the rows with the largest step time errors, the largest first."""
    return sorted(rows, key=lambda row: -abs(row["step_time_error_ratio"] or 0.0))[:most]


# Targets --------------------------------------------------------------------------------------------------------------

RANKED_FROM = 8
"""Fewest scenarios of a group whose rank correlation is part of the target."""


@dataclass(frozen=True)
class Target:
    """A figure with its required and its reached value."""

    what: str
    asked: float
    """Required value, in the unit of `found`."""
    at_least: bool
    """Whether `asked` is a lower bound; else it is an upper bound."""
    found: float | None
    """Reached value; None where the results do not determine it."""
    n: int
    """Number of scenarios, pairs or groups that the figure is taken over."""
    of: str
    """Noun for `n`."""
    ratio: bool = True
    """Whether the figure is shown in percent."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where the reached value is unknown."""
        if self.found is None:
            return None
        return self.found >= self.asked if self.at_least else self.found <= self.asked


def targets(groups: pl.DataFrame) -> list[Target]:
    """Return the targets, with the values reached in a `groups.group_table`."""
    *parts, whole = groups.iter_rows(named=True)
    assert whole["group"] == ALL
    n = whole["n"]
    correlations = [row["spearman"] for row in parts if row["n"] >= RANKED_FROM and row["spearman"] is not None]
    return [
        _share("collectives equal", 1.0, whole["collectives_equal"], n, "scenarios"),
        *(_error("peak memory error", "peak_error_ratio", statistic, asked, whole) for statistic, asked in PEAK),
        *(_error("step time error", "step_time_error_ratio", statistic, asked, whole) for statistic, asked in STEP),
        _share("pairs in the measured order", 0.95, whole["pairs_right"], whole["pairs"], "pairs beyond noise"),
        Target(
            f"least Spearman of groups of {RANKED_FROM} or more",
            0.9,
            True,
            min(correlations, default=None),
            len(correlations),
            "groups",
            ratio=False,
        ),
        _share("best plan predicted, but for noise", 0.9, whole["best_right"], whole["choices"], "groups"),
    ]


PEAK = (("median", 0.01), ("max", 0.04))
STEP = (("median", 0.05), ("p90", 0.12), ("max", 0.20))


def _share(what: str, asked: float, count: int, n: int, of: str) -> Target:
    return Target(what, asked, True, count / n if n else None, n, of)


def _error(what: str, column: str, statistic: str, asked: float, whole: dict[str, Any]) -> Target:
    word = {"median": "median", "p90": "90th percentile", "max": "largest"}[statistic]
    return Target(f"{what}, {word}", asked, False, whole[error_column(column, statistic)], whole["n"], "scenarios")
