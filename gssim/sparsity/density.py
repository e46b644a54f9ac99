"""Density of thresholded pushes and publications: fractions of elements that reach a threshold, from statistics.

Statistics are sampled at some steps and interpolated in between, over the logarithm of the step, because training
changes gradients ever more slowly. Two values are interpolated: the logarithm of the scale of |g|, on a curve, and the
fraction of elements that reach a threshold in units of that scale, linearly, so that a higher threshold never has a
higher density. Dropped gradients change the training and so later gradients. Statistics are therefore measured under
thresholds too, and their densities are interpolated in the logarithm of the threshold.

Without error feedback the density is the tail of |g|. With error feedback it is the rate at which elements reach the
threshold including their residuals. That rate is measured at a grid of thresholds: it depends on the correlation of an
element's gradients over steps, which the distribution of a single step's gradients does not contain.

The density of a relative threshold depends on the shape of the distribution of magnitudes, not on their scale. It is
measured at a grid of multiples of the mean, with and without error feedback. Thresholds for a target density follow
each step's gradients: a tensor sends the target fraction, or everything that is not zero if that is less.

The module also interpolates between sampled steps (`Moment`), and computes the staleness of parameters under
thresholded publication (`staleness_steps`).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import TypeVar

import numpy as np

from gssim.errors import UserError
from gssim.plan import Publish, Push
from gssim.units import Floats, Ints
from gssim.workload.gradient_statistics import (
    EDGES_PER_DECADE,
    LOWEST_DECADE,
    BlockTrace,
    GradientStatistics,
    RankTrace,
    Sketch,
    TensorTrace,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Moment:
    """Position of a step between two sampled steps, or between the first step and the first sampled one."""

    before: int
    """Index of the last sampled step before this one; -1 stands for the first step."""
    after: int
    weight: float
    """Weight of the value at `after`."""
    around: tuple[int, ...]
    """Indices of the sampled steps used for the curve: the two neighbours, and the next one on either side, if any."""
    times: tuple[float, ...]
    """Logarithms of 1 + step, for `around`."""

    def of(self, values: Sequence[T], first: T | None = None) -> list[T]:
        """Return the values at the steps before and after; `first`: value at the first step."""
        return [self._at(values, first, sampled) for sampled in (self.before, self.after)]

    def all_of(self, values: Sequence[T], first: T | None = None) -> list[T]:
        """Return the values at the steps in `around`."""
        return [self._at(values, first, sampled) for sampled in self.around]

    def _at(self, values: Sequence[T], first: T | None, sampled: int) -> T:
        return values[max(0, sampled)] if sampled >= 0 or first is None else first

    def mixed(self, pair: Sequence[float]) -> float:
        """Return the interpolation between two values, linear in their logarithms."""
        return mixed(pair[0], pair[1], self.weight)

    def curved(self, values: Sequence[float]) -> float:
        """Return the interpolation between the two middle values of `values` (for `around`), on a smooth curve.

        Training changes gradients fast at first and then ever more slowly, so straight lines between sampled steps lie
        above such a curve. The curve is the monotone cubic interpolation of the values' logarithms over that of 1 +
        step. Source: Fritsch and Butland, A Method for Constructing Local Monotone Piecewise Cubic Interpolants, SIAM
        J. Sci. Stat. Comput. 5 (1984), with Brodlie's weights.

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
        """Return the slope of the curve at the point shared by the interval from `at` and its neighbour `beside`."""
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
        """Return the width and the slope of an interval."""
        width = self.times[at + 1] - self.times[at]
        return width, math.log(values[at + 1] / values[at]) / width if width > 0 else 0.0


@lru_cache(maxsize=256)
def moment_of(sampled_steps: tuple[int, ...], step: float, first_step: int = 0) -> Moment:
    """Return the position of a step among the sampled ones; values are constant after the last of these."""
    after = bisect_left(sampled_steps, step)
    if after == len(sampled_steps) or sampled_steps[after] == step:
        exact = min(after, len(sampled_steps) - 1)
        return Moment(exact, exact, 0.0, (exact,), (math.log1p(sampled_steps[exact]),))
    before = after - 1
    around = tuple(range(max(before - 1, min(before, 0)), min(after + 2, len(sampled_steps))))
    times = tuple(math.log1p(sampled_steps[index] if index >= 0 else first_step) for index in around)
    start, end = times[around.index(before)], times[around.index(after)]
    at = max(start, math.log1p(max(0, step)))
    return Moment(before, after, (at - start) / (end - start) if end > start else 1.0, around, times)


def mixed(a: float, b: float, weight: float) -> float:
    """Return the interpolation between `a` and `b`: in their logarithms if neither is 0, else linear.

    >>> mixed(1.0, 4.0, 0.5), mixed(0.0, 4.0, 0.5)
    (2.0, 2.0)
    """
    return float(a ** (1 - weight) * b**weight) if a > 0 and b > 0 else (1 - weight) * a + weight * b


_NORMAL = NormalDist()
_ALMOST_ALL = 1 - 1e-6


def push_ratios(
    statistics: GradientStatistics,
    push: Push,
    *,
    samples: float,
    tensor: str,
    step: int,
    part: float = 1.0,
    lag_steps: float = 0.0,
    own: tuple[float, float] = (0.0, 0.0),
) -> "Ratios":
    """Return the densities of `push_density` by block, for any range of the tensor.

    `lag_steps`: by how many steps the parameters used for gradients lag behind; see `staleness_steps`. `own`: the range
    that the rank itself owns, as fractions of the tensor's elements.
    """
    if push.threshold is None or not push.selects or step < push.warmup_steps:
        return EVERYTHING
    if samples == 0 or part == 0 or math.isinf(push.threshold):  # a gradient of zeros, or an infinite threshold
        return SILENCE
    view = _View(statistics, samples, tensor, bool(push.error_feedback), lag_steps)
    if push.kind == "target-density":
        return _at_target(view, push, step, part)
    if push.kind == "relative":
        multiple = push.threshold
        if push.error_feedback and own[0] < own[1]:
            multiple = view.multiple_beside(multiple, step, *own)
        return view.relative_ratio(multiple, step)
    return view.sent_ratio(push.threshold, step, part)


def publish_ratios(statistics: GradientStatistics, publish: Publish, *, tensor: str, step: int) -> "Ratios":
    """Return the fractions of a tensor's elements that are published at a step, by block, for any range of it."""
    if not publish.threshold:
        return EVERYTHING
    if math.isinf(publish.threshold):
        return SILENCE
    moment, grid = moment_of(statistics.sampled_steps, step), statistics.publish_thresholds
    rows = [moment.all_of(block) for block in statistics.changes[tensor].blocks]
    threshold = publish.threshold / (statistics.transfer.scale_ratio if statistics.transfer else 1.0)
    return Ratios(tuple(moment.curved(_on_grid(grid, block, threshold)) for block in rows))


def traces_of(statistics: GradientStatistics, samples: float, *, error_feedback: bool = False) -> tuple[RankTrace, ...]:
    """Return the traces whose samples per rank are nearest (in ratio) to `samples`, in order of rising threshold.

    Of traces that were trained under a threshold, only those with (or without) error feedback are returned, if any
    exist.
    """
    nearest = min((trace.samples for trace in statistics.traces), key=lambda n: abs(math.log(n / samples)))
    near = sorted((t for t in statistics.traces if t.samples == nearest), key=lambda t: t.threshold)
    return tuple(t for t in near if not t.threshold or t.error_feedback == error_feedback) or tuple(near)


def _clipped(ratio: float) -> float:
    return min(1.0, max(0.0, ratio))


@dataclass(frozen=True, slots=True)
class Ratios:
    """Densities of a tensor's blocks, all of which are equally large."""

    values: tuple[float, ...]
    below: tuple[float, ...] = ()
    """Densities in a run under a lower threshold, for interpolation; empty: none."""
    weight: float = 0.0
    """Weight of `values` relative to `below`."""

    def over(self, first: float, last: float) -> float:
        """Return the density of the tensor's range from `first` to `last`, as fractions of its elements.

        >>> Ratios((0.25, 0.75)).over(0.0, 1.0), Ratios((0.25, 0.75)).over(0.5, 1.0)
        (0.5, 0.75)
        """
        high = _over_range(self.values, first, last)
        return mixed(_over_range(self.below, first, last), high, self.weight) if self.below else high


EVERYTHING, SILENCE = Ratios((1.0,)), Ratios((0.0,))


class Ranges:
    """Ranges of tensors, as fractions of their elements, whose densities are computed all at once.

    `tensor`: index of each range's tensor. Everything that does not depend on densities is computed once for all steps.

    >>> ranges = Ranges(np.array([0, 0, 1]), np.array([0.0, 0.5, 0.0]), np.array([1.0, 1.0, 0.5]))
    >>> ranges.densities([Ratios((0.25, 0.75)), SILENCE]).tolist()
    [0.5, 0.75, 0.0]
    """

    def __init__(self, tensor: Ints, first: Floats, last: Floats) -> None:
        self.tensor, self.first, self.last = tensor, first, last
        self._parts: dict[tuple[int, ...], tuple[Ints, Ints, Floats]] = {}
        """By number of blocks: arrays of range, block (numbered over all tensors), and overlap in blocks."""

    def densities(self, ratios: Sequence[Ratios]) -> Floats:
        """Return the density of each range, given those of every tensor; equal to `Ratios.over` to the last digit."""
        high = self._over([each.values for each in ratios])
        if not any(each.below for each in ratios):
            return high
        low = self._over([each.below or each.values for each in ratios])
        mixtures: dict[tuple[int, float, float], float] = {}
        for place, key in enumerate(zip(self.tensor.tolist(), low.tolist(), high.tolist(), strict=True)):
            tensor, below, above = key
            if ratios[tensor].below:
                if key not in mixtures:
                    mixtures[key] = mixed(below, above, ratios[tensor].weight)
                high[place] = mixtures[key]
        return high

    def _over(self, values: Sequence[Sequence[float]]) -> Floats:
        """Return, for each range, the mean of the values of its blocks."""
        counts = tuple(map(len, values))
        if counts not in self._parts:
            self._parts[counts] = self._parts_of(counts)
        owner, block, inside = self._parts[counts]
        flat, ranges = np.array([value for each in values for value in each]), len(self.tensor)
        if len(owner) == ranges:  # every range lies in one block
            return np.asarray(flat[block], dtype=np.float64)
        parts = np.bincount(owner, minlength=ranges)
        sent = np.bincount(owner, weights=flat[block] * inside, minlength=ranges)
        means = sent / np.bincount(owner, weights=inside, minlength=ranges)
        alone = parts[owner] == 1
        means[owner[alone]] = flat[block[alone]]  # exact, so all ranges inside a block are equal
        return np.asarray(means, dtype=np.float64)

    def _parts_of(self, counts: Sequence[int]) -> tuple[Ints, Ints, Floats]:
        count, offset = np.array(counts)[self.tensor], np.r_[0, np.cumsum(counts)][self.tensor]
        begin, end = self.first * count, self.last * count
        start, stop = begin.astype(np.int64), np.minimum(count, np.ceil(end)).astype(np.int64)
        single = (count == 1) | (self.last <= self.first)
        start, stop = np.where(single, 0, start), np.where(single, 1, stop)
        lengths = stop - start
        owner = np.repeat(np.arange(len(lengths)), lengths)
        local = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + start[owner]
        inside = np.maximum(0.0, np.minimum(end[owner], local + 1) - np.maximum(begin[owner], local))
        return owner, offset[owner] + local, inside


ACCUMULATED_RATIOS = (0.5, 64.0)
"""Between which multiples of the mean gradient the mean accumulated one is sought. Beyond these, an own range without
residuals hardly counts."""
MULTIPLES, BISECTIONS = 4, 12
"""Thresholds between which the mean accumulated gradient is interpolated, and halvings with which each is found."""
LEAST_RATIO = 1e-3
"""Least part of a threshold that is left of it where almost all of a tensor is the rank's own."""


class _View:
    """Densities of one tensor's gradient on ranks with some number of samples, with or without error feedback."""

    def __init__(
        self, statistics: GradientStatistics, samples: float, tensor: str, error_feedback: bool, lag_steps: float
    ) -> None:
        self.statistics, self.grid, self.error_feedback = statistics, statistics.feedback_thresholds, error_feedback
        self.lag_steps = lag_steps
        traces = traces_of(statistics, samples, error_feedback=error_feedback)
        self.thresholds = [trace.threshold for trace in traces]
        self.tensors = [trace.tensors[tensor] for trace in traces]
        # with fewer samples, the gradients' common part stays the same, and the variance of their noise grows
        correlations = self.tensors[0].correlations
        common = _clipped(fmean(correlations)) if correlations else 1.0
        self.scale = math.sqrt(common + (1 - common) * (traces[0].samples / samples))
        self.density_ratio = 1.0
        if statistics.transfer is not None:
            self.scale *= statistics.transfer.scale_ratio
            self.density_ratio = statistics.transfer.density_ratio

    def moment(self, step: int) -> Moment:
        """Return the position of a step among the sampled ones."""
        sampled = self.statistics.sampled_steps
        least = min(step, sampled[0]) if self.error_feedback else 0  # residuals accumulate even if parameters are old
        return moment_of(sampled, max(least, step - self.lag_steps), self.statistics.first_step)

    def sent_ratio(self, threshold: float, step: int, part: float) -> "Ratios":
        """Return the fraction of the gradient's entries whose magnitude reaches a threshold.

        `part`: the tensor's, of the gradient that a rank computes.
        """
        return self._under(threshold, threshold, self._with_feedback if self.error_feedback else _reached, step, part)

    def untouched_ratio(self, threshold: float, step: int, part: float) -> "Ratios":
        """Return the fraction that reaches a threshold in the trace with the lowest threshold, without residuals."""
        level = threshold / (part * self.scale)
        return Ratios(tuple(_reached(each, level, self.moment(step)) for each in self.tensors[0].blocks))

    def relative_ratio(self, multiple: float, step: int) -> "Ratios":
        """Return the fraction that reaches a multiple of the tensor's mean magnitude."""
        ratios = self._relative(multiple, step).values
        return Ratios(tuple(min(1.0, self.density_ratio * ratio) for ratio in ratios))

    def multiple_beside(self, multiple: float, step: int, first: float, last: float) -> float:
        """Return the multiple of the mean magnitude that a threshold under error feedback has in a tensor of other
        ranks', if on this rank, which owns the range from `first` to `last`, it is `multiple` times the mean.

        An own range has no residual. If it has the part f of the elements and gradients of mean g, and without it they
        were accumulated to the mean a, of the whole tensor A, the rank's mean is A - f (a - g). A follows from the
        threshold whose density was measured to be that of a multiple of A, and rises with the multiple; of a, see
        `_accumulated_over`.
        """
        moment, blocks, size = self.moment(step), self.tensors[0].blocks, last - first
        means = [self.scale * moment.curved([s.mean for s in moment.all_of(block.sketches)]) for block in blocks]
        whole, own = (_over_range(means, *ends) for ends in ((0.0, 1.0), (first, last)))
        if not self.grid or not whole:
            return multiple
        least = 1 - size * max(1.0, own / whole)  # blocks of small gradients accumulate more of them than others
        multiples = np.geomspace(multiple * max(LEAST_RATIO, least), multiple, MULTIPLES)
        needed = []
        for each in multiples.tolist():
            threshold = self._threshold_of(each, whole, step)
            accumulated = max(whole, threshold / each)
            of_own = _accumulated_over(means, accumulated, threshold, first, last)
            needed.append(multiple * max(LEAST_RATIO, 1 - size * (of_own - own) / accumulated))
        # where a multiple is what is needed for it; what is needed falls with it
        return float(np.exp(np.interp(0.0, np.log(multiples / np.minimum.accumulate(needed)), np.log(multiples))))

    def _threshold_of(self, multiple: float, gradient: float, step: int) -> float:
        """Return the threshold that as many elements reach with their residuals as reach a multiple of the mean."""
        wanted = self._relative(multiple, step).over(0.0, 1.0)
        low, high = (math.log(multiple * gradient * ratio) for ratio in ACCUMULATED_RATIOS)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            sent = self.sent_ratio(math.exp(middle), step, 1.0).over(0.0, 1.0)
            low, high = (middle, high) if sent > wanted else (low, middle)
        return math.exp(low)

    def _relative(self, multiple: float, step: int) -> "Ratios":
        """Return the fractions that reach a multiple of the mean in the training of the statistics."""
        moment, grid = self.moment(step), self.statistics.multiples
        if not grid:
            raise UserError(f"statistics of {self.statistics.model}: relative thresholds were not measured")
        ratios = []
        for block in self.tensors[0].blocks:
            rows = [
                row.feedback_ratios if self.error_feedback else row.sent_ratios for row in moment.all_of(block.relative)
            ]
            ratios.append(moment.curved(_on_grid(grid, rows, multiple)))
        return Ratios(tuple(ratios))

    def _under(
        self,
        threshold: float,
        level: float,
        fraction: Callable[[BlockTrace, float, Moment], float],
        step: int,
        part: float,
    ) -> "Ratios":
        """Return the values interpolated between the runs whose thresholds are closest below and above this one."""
        moment, level = self.moment(step), level / (part * self.scale)

        def values(tensor: TensorTrace) -> tuple[float, ...]:
            return tuple(fraction(block, level, moment) for block in tensor.blocks)

        above = min(bisect_left(self.thresholds, threshold), len(self.thresholds) - 1)
        high = values(self.tensors[above])
        if above == 0 or self.thresholds[above] < threshold:
            return Ratios(high)
        weight = _between(threshold, self.thresholds[above - 1], self.thresholds[above])
        return Ratios(high, values(self.tensors[above - 1]), weight)

    def _with_feedback(self, block: BlockTrace, level: float, moment: Moment) -> float:
        """Return the fraction of a block's elements that reach a level, with their residuals under that threshold."""
        sketches, rows = moment.all_of(block.sketches), [row.sent_ratios for row in moment.all_of(block.feedback)]
        if level < self.grid[0]:
            ratios = [self._below_grid(sketch, row[0], level) for sketch, row in zip(sketches, rows, strict=True)]
        else:
            ratios = _on_grid(self.grid, rows, level)
        if moment.before < 0 and block.first is not None:  # no residuals at the first step
            ratios[0] = _tail(block.first, level)
        return moment.curved(ratios)

    def _below_grid(self, sketch: Sketch, sent_ratio: float, level: float) -> float:
        """Return the fraction that reaches a level below the lowest measured one, at which `sent_ratio` was sent.

        Of the gradients below the level, residuals carry as large a part over it as there.
        """
        reached, lowest = _tail(sketch, level), _tail(sketch, self.grid[0])
        carried = max(0.0, sent_ratio - lowest) / (1 - lowest) if lowest < 1 else 0.0
        return reached + (1 - reached) * carried


def _accumulated_over(means: Sequence[float], accumulated: float, threshold: float, first: float, last: float) -> float:
    """Return the mean accumulated magnitude of a tensor's range, given that of the tensor and its blocks' gradients.

    A residual is independent of the new gradient. Residuals are the same multiple of every block's gradients, up to
    half of the threshold: the mean of what accumulates evenly until it is sent.

    >>> [round(_accumulated_over([3.0, 12.0], 9.0, threshold, 0.0, 0.5), 2) for threshold in (8.0, 20.0)]
    [5.0, 3.6]
    """

    def values(factor: float) -> list[float]:
        return [math.hypot(mean, min(mean * factor, threshold / 2)) for mean in means]

    low, high = 0.0, max(1.0, threshold / 2 / min((mean for mean in means if mean), default=1.0))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(values(middle)) < accumulated else (low, middle)
    return _over_range(values(high), first, last)


def _at_target(view: _View, push: Push, step: int, part: float) -> "Ratios":
    """Return the density at a step under thresholds that follow the gradients towards a target density.

    Thresholds are estimated every `reestimate_steps` and scaled in between, so that a sample of the bucket reaches the
    target. Assumes that the tensors of a bucket drift alike between two estimates.
    """
    assert push.threshold is not None
    # the first thresholded step has no residuals yet
    ratio = view.untouched_ratio if step == push.warmup_steps else view.sent_ratio
    low, high = math.log(1e-12), math.log(1e4)
    for _ in range(30):  # bisection for the level that the target fraction of the whole tensor reaches
        middle = (low + high) / 2
        ratios = ratio(math.exp(middle), step, part)
        low, high = (middle, high) if ratios.over(0.0, 1.0) > push.threshold else (low, middle)
    return ratios


def _between(threshold: float, low: float, high: float) -> float:
    """Return the weight of `high` at `threshold`, in logarithms; dense training counts as a decade below."""
    floor = low or high / 10
    return _clipped(math.log(threshold / floor) / math.log(high / floor))


def _over_range(values: Sequence[float], first: float, last: float) -> float:
    """Return the mean of the values of equally large blocks over a range."""
    if len(values) == 1 or last <= first:
        return values[0]
    begin, end, sent, whole = first * len(values), last * len(values), 0.0, 0.0
    blocks = range(int(begin), min(len(values), math.ceil(end)))
    if len(blocks) == 1:  # exact, so all ranges inside a block are equal
        return values[blocks[0]]
    for i in blocks:
        inside = max(0.0, min(end, i + 1) - max(begin, i))
        sent += values[i] * inside
        whole += inside
    return sent / whole


def _reached(block: BlockTrace, level: float, moment: Moment) -> float:
    """Return the fraction of a block's elements with |g| >= level."""
    a, b = moment.of(block.sketches, block.first)
    if not (a.rms and b.rms):
        return moment.mixed([_tail(a, level), _tail(b, level)])
    rms = moment.curved([sketch.rms for sketch in moment.all_of(block.sketches, block.first)])
    return moment.mixed([_tail(a, level * a.rms / rms), _tail(b, level * b.rms / rms)])


def _tail(sketch: Sketch, level: float) -> float:
    """Return the fraction of numbers that are at least `level`.

    Take, for that fraction (of the numbers that are not 0), the quantile of a normal distribution. Between two edges it
    is interpolated as a power of the level: exact for a normal distribution, approximate for heavier tails.
    """
    ratios = sketch.tail_ratios
    position = (math.log10(level) - LOWEST_DECADE) * EDGES_PER_DECADE - sketch.first_edge
    at = math.floor(position)
    if position <= 0:
        return ratios[0]
    if at >= len(ratios):
        return 0.0
    high = ratios[at + 1] if at + 1 < len(ratios) else 0.0
    return ratios[0] * _powered(ratios[at] / ratios[0], high / ratios[0], position - at) if ratios[0] else 0.0


def _on_grid(grid: Sequence[float], rows: Sequence[Sequence[float]], threshold: float) -> list[float]:
    """Return each row's density at a threshold from those at a grid, interpolated (and extrapolated) as in `_tail`."""
    if len(grid) == 1:
        return [row[0] for row in rows]
    at = min(max(bisect_right(grid, threshold) - 1, 0), len(grid) - 2)
    weight = math.log(threshold / grid[at]) / math.log(grid[at + 1] / grid[at])
    return [_powered(row[at], row[at + 1], weight) for row in rows]


def _powered(low: float, high: float, weight: float) -> float:
    """Return the interpolation at `weight` from one ratio to a smaller one."""
    if high <= 0 or high >= low:
        return low + _clipped(weight) * (high - low)
    quantile = _quantile(min(low, _ALMOST_ALL)) ** (1 - weight) * _quantile(high) ** weight
    return 2 * _NORMAL.cdf(-quantile)


@lru_cache(maxsize=2**14)
def _quantile(ratio: float) -> float:
    """Return the magnitude that a fraction of normal numbers exceeds; bisections ask for it repeatedly."""
    return -_NORMAL.inv_cdf(ratio / 2)


def staleness_steps(movements: Sequence[float], threshold: float) -> float:
    """Return by how many training steps the parameters used for gradients lag behind after some steps.

    `movements`: distances by which owners' parameters moved in each of these steps. Nothing is published until they
    have moved by the threshold. From then on, unpublished changes are evenly distributed between 0 and the threshold:

        M(t) = v(0) + ... + v(t - 1);   lag = t, where M(t) < threshold;   else M(t) - M(t - lag) = threshold / 2

    Assumes that all elements move as the mean one does.

    >>> [staleness_steps([1.0] * 10, threshold) for threshold in (0.0, 4.0, 16.0)]
    [0.0, 2.0, 10.0]
    """
    steps, moved = len(movements), np.r_[0.0, np.cumsum(movements)]
    if moved[-1] < threshold:
        return float(steps)
    return float(steps - np.interp(moved[-1] - threshold / 2, moved, np.arange(steps + 1)))


def movements(statistics: GradientStatistics, elements: Mapping[str, int], *, steps: int) -> list[float]:
    """Return the distance by which the mean element moves in each of the first steps; `elements`: those of each tensor.

    The distance follows from what was published: for each threshold, the threshold times the published fraction; the
    largest of these counts. At a threshold far above a step's movement v, an element is published every threshold / v
    steps. In the first steps of dense training, all elements reach one of the lower thresholds at once. Between sampled
    steps, distances are interpolated over the logarithm of 1 + step.
    """
    thresholds, sampled = np.array(statistics.publish_thresholds), np.array(statistics.sampled_steps)
    told = np.zeros(len(sampled))
    for name, count in elements.items():
        blocks = np.array(statistics.changes[name].blocks)  # blocks, sampled steps, thresholds
        told += count * (blocks * thresholds).max(axis=2).mean(axis=0)
    told /= sum(elements.values())
    ratios: list[float] = np.interp(np.log1p(np.arange(steps)), np.log1p(sampled), told).tolist()
    return ratios
