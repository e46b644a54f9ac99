"""Accuracy targets for the predictions of a whole matrix, and the values that were reached."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.compare.groups import ALL, error_column

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
