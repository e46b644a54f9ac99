"""Paired statistics over seeds: mean difference or ratio of two variants, with its confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a figure over a few seeds."""

    mean: float
    sd: float
    """Standard deviation over seeds (n - 1)."""
    n: int


@dataclass(frozen=True)
class Effect:
    """The mean of paired differences (or ratios), with its confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    def differs_from(self, value: float) -> bool:
        """Return whether the interval excludes `value`."""
        return not self.low <= value <= self.high


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, sd=1.0, n=3)
    """
    return Spread(fmean(values), stdev(values) if len(values) > 1 else math.nan, len(values))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Effect:
    """Return values - reference, pair by pair: the mean, and its 95 % interval by Student's t distribution.

    A seed affects both values of a pair (same initial parameters, same batches), so that differences vary less than the
    figures themselves. Assumes normal differences. Source: Student 1908, "The probable error of a mean".

    >>> effect = paired_difference([2.0, 3.5, 4.5], [1.0, 2.0, 3.0])
    >>> round(effect.mean, 3), round(effect.low, 3), round(effect.high, 3)
    (1.333, 0.616, 2.05)
    """
    from scipy.stats import t

    differences = [a - b for a, b in zip(values, reference, strict=True)]
    change = spread(differences)
    half = float(t.ppf((1 + CONFIDENCE) / 2, change.n - 1)) * change.sd / math.sqrt(change.n)
    return Effect(change.mean, change.mean - half, change.mean + half, change.n)


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Effect:
    """Return values / reference, pair by pair: the geometric mean, and its interval from that of the logarithms.

    >>> paired_ratio([2.0, 2.0], [1.0, 1.0])
    Effect(mean=2.0, low=2.0, high=2.0, n=2)
    """
    logs = paired_difference([math.log(value) for value in values], [math.log(value) for value in reference])
    return Effect(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)
