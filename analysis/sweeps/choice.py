"""Which points of a setting are worth choosing: fronts, and the fastest with and without a threshold.

What is thresholded trains by other gradients than what is dense, so it never simply wins: fronts are told apart, and a
speed beside dense training stands beside the density that it was had for.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from analysis.sweeps.table import THRESHOLD, Row, is_control, is_dense


def front(rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float]) -> list[Row]:
    """Return the rows than which no other is as good in both and better in one, by ascending x; of equals the first.

    >>> [row["n"] for row in front([{"n": 1}, {"n": 2}], lambda row: row["n"], lambda row: row["n"])]
    [1]
    """
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (x(row), y(row))):
        if not best or y(row) < y(best[-1]):
            best.append(row)
    return best


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the row with the shortest step; None where there is none."""
    return min(rows, key=lambda row: row["step_time_s"], default=None)


@dataclass(frozen=True)
class Winner:
    """Who is faster at one threshold: the fastest thresholded plan, or the fastest dense one."""

    thresholded: Row
    dense: Row

    @property
    def speed_up_ratio(self) -> float:
        """Of the thresholded plan over the dense one: above 1, the threshold wins."""
        return float(self.dense["step_time_s"] / self.thresholded["step_time_s"])


def winner(rows: Sequence[Row], threshold: float) -> Winner | None:
    """Return who wins among rows of one setting that fit; None where one side is missing."""
    sparse = fastest(row for row in rows if not is_dense(row) and row.get(THRESHOLD) == threshold)
    dense = fastest(row for row in rows if is_dense(row))
    return Winner(sparse, dense) if sparse is not None and dense is not None else None


def best_gain(rows: Sequence[Row]) -> Winner | None:
    """Return the thresholded plan of one setting that is fastest beside the fastest dense one, controls left out."""
    sparse = fastest(row for row in rows if not is_dense(row) and not is_control(row))
    dense = fastest(row for row in rows if is_dense(row))
    return Winner(sparse, dense) if sparse is not None and dense is not None else None


def thresholds(rows: Iterable[Row]) -> list[float]:
    """Return the thresholds of thresholded rows, ascending."""
    return sorted({row[THRESHOLD] for row in rows if not is_dense(row) and row.get(THRESHOLD) is not None})
