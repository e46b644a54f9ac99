"""Where a step lies among those that were looked at, and what lies between their values."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Moment:
    """Where a step lies between two sampled ones, or between the first step and the first sampled one."""

    before: int
    """Which of the sampled steps is the last before it; -1: the first step."""
    after: int
    weight: float
    """Of the value at `after`."""
    around: tuple[int, ...]
    """Which sampled steps tell how values change there: these two, and the next on either side where there is one."""
    times: tuple[float, ...]
    """Of `around`: logarithms of 1 + step."""

    def of(self, values: Sequence[T], first: T | None = None) -> list[T]:
        """Return what there is for each of the two; `first`: for the first step."""
        return [self._at(values, first, each) for each in (self.before, self.after)]

    def all_of(self, values: Sequence[T], first: T | None = None) -> list[T]:
        """Return what there is for each of `around`."""
        return [self._at(values, first, each) for each in self.around]

    def _at(self, values: Sequence[T], first: T | None, sampled: int) -> T:
        return values[max(0, sampled)] if sampled >= 0 or first is None else first

    def mixed(self, pair: Sequence[float]) -> float:
        """Return what lies between two values, straight."""
        return mixed(pair[0], pair[1], self.weight)

    def curved(self, values: Sequence[float]) -> float:
        """Return what lies between the two values in the middle of those for `around`, on a curve without corners.

        Training changes gradients fast at first and ever more slowly: straight lines from one sampled step to the next
        lie above such a curve. It is the cubic one, over the logarithm of 1 + step, of the values' logarithms, that
        rises and falls only where they do. Source: Fritsch and Butland, A Method for Constructing Local Monotone
        Piecewise Cubic Interpolants, SIAM J. Sci. Stat. Comput. 5 (1984), with Brodlie's weights.

        >>> steps = (0, 1, 3, 7)  # halves of the way each, in the logarithm of 1 + step
        >>> moment_of(steps, 2).curved([1.0, 0.5, 0.25, 0.125]) == moment_of(steps, 2).mixed([0.5, 0.25])
        True
        >>> moment_of(steps, 2).curved([8.0, 0.5, 0.25, 0.25]) < moment_of(steps, 2).mixed([0.5, 0.25])
        True
        """
        if self.before == self.after:
            return values[self.around.index(self.before)]
        at = self.around.index(self.before)
        low, high = values[at : at + 2]
        width = self.times[at + 1] - self.times[at]
        if low <= 0 or high <= 0 or width <= 0:
            return mixed(low, high, self.weight)
        rise = math.log(high / low)
        starts, ends = (self._slope(values, at, beside) * width for beside in (at - 1, at + 1))
        weight, rest = self.weight, 1 - self.weight
        bend = weight * rest * (rest * (starts - rise) + weight * (rise - ends))
        return low * math.exp(weight * rise + bend)

    def _slope(self, values: Sequence[float], at: int, beside: int) -> float:
        """Return the slope of the curve where the stretch that begins `at` meets the one that begins `beside` it."""
        width, slope = self._chord(values, at)
        if beside not in range(len(values) - 1) or not (values[beside] > 0 and values[beside + 1] > 0):
            return slope
        other_width, other = self._chord(values, beside)
        if other_width <= 0:
            return slope
        if slope * other <= 0:
            return 0.0
        return 3 * (width + other_width) / ((width + 2 * other_width) / slope + (2 * width + other_width) / other)

    def _chord(self, values: Sequence[float], at: int) -> tuple[float, float]:
        """Return how wide a stretch is, and how steep."""
        width = self.times[at + 1] - self.times[at]
        return width, math.log(values[at + 1] / values[at]) / width if width > 0 else 0.0


def moment_of(sampled_steps: Sequence[int], step: float, first_step: int = 0) -> Moment:
    """Return where the step lies among the sampled ones; after the last, all is as it was there."""
    after = bisect_left(sampled_steps, step)
    if after == len(sampled_steps):
        return Moment(after - 1, after - 1, 0.0, (after - 1,), (math.log1p(sampled_steps[-1]),))
    before = after - 1
    around = tuple(range(max(before - 1, min(before, 0)), min(after + 2, len(sampled_steps))))
    times = tuple(math.log1p(sampled_steps[each] if each >= 0 else first_step) for each in around)
    start, end = times[around.index(before)], times[around.index(after)]
    at = max(start, math.log1p(max(0, step)))
    return Moment(before, after, (at - start) / (end - start) if end > start else 1.0, around, times)


def mixed(a: float, b: float, weight: float) -> float:
    """Return what lies between `a` and `b`: in logarithm, where neither is 0.

    >>> mixed(1.0, 4.0, 0.5), mixed(0.0, 4.0, 0.5)
    (2.0, 2.0)
    """
    return float(a ** (1 - weight) * b**weight) if a > 0 and b > 0 else (1 - weight) * a + weight * b
