"""What a threshold makes of measured gradient statistics: the fraction of elements that reach it.

Statistics are taken at some of the steps. Between these the scale of |g| is interpolated in its logarithm, and so is
the fraction of elements that reach a threshold in units of that scale, both over the logarithm of the step, for
training changes gradients ever more slowly: the scale on a curve, the fraction straight, so that no higher threshold
is ever told to send more. What a threshold drops changes the training and with it later gradients, so
statistics are taken under thresholds too, and the densities that they give are interpolated in the logarithm of the
threshold.

Without error feedback the density is the tail of |g|. With it, it is the rate at which elements come to reach the
threshold with all that was not sent before; it is measured at a grid of thresholds, for it depends on how steadily each
element's gradient points one way, which no distribution of one step's gradients tells.

What a relative threshold sends depends on how magnitudes are distributed, not on their scale: it is measured at a grid
of multiples of the mean, with error feedback and without. One that is estimated for a target density is an absolute one
until it is estimated again: of the first step's gradients at first, then of what has gathered under the one before.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from gssim.density.moment import Moment, mixed, moment_of
from gssim.density.union import united
from gssim.gradients import (
    EDGES_PER_DECADE,
    HELD_LEVELS,
    LOWEST_DECADE,
    BlockTrace,
    FeedbackDensity,
    GradientStatistics,
    RankTrace,
    Sketch,
    TensorTrace,
)
from gssim.plan import Publish, Push
from gssim.units import UserError

_NORMAL = NormalDist()
_SMALLEST = 1e-300
_ALMOST_ALL = 1 - 1e-6


def push_density(
    statistics: GradientStatistics,
    push: Push,
    *,
    samples: int,
    tensor: str,
    step: int,
    part: float = 1.0,
    first: float = 0.0,
    last: float = 1.0,
) -> float:
    """Return the fraction of a tensor's elements that a rank with `samples` samples sends under `push` at `step`.

    `part`: what is thresholded is this part of the rank's mean gradient over its samples. `first`, `last`: the range of
    the tensor that is meant, as fractions of its elements.

    >>> from gssim.gradients import SKETCH_EDGES, BlockTrace, RankTrace, Sketch, TensorTrace
    >>> sketch = Sketch(mean=1.0, rms=1.0, tail_ratios=tuple(float(edge < 2) for edge in SKETCH_EDGES))
    >>> trace = RankTrace(samples=1, tensors={"w": TensorTrace(blocks=(BlockTrace(sketches=(sketch,)),))})
    >>> statistics = GradientStatistics(model="m", precision="fp32", optimizer="sgd", learning_rate=1.0, seed=0,
    ...     global_batch_size=1, steps=1, sampled_steps=(0,), traces=(trace,), source="doctest")
    >>> [push_density(statistics, Push(threshold=t), samples=1, tensor="w", step=0) for t in (0, 1.0, 4.0)]
    [1.0, 1.0, 0.0]
    """
    ratios = push_ratios(statistics, push, samples=samples, tensor=tensor, step=step, part=part)
    return ratios.over(first, last)


def push_ratios(
    statistics: GradientStatistics,
    push: Push,
    *,
    samples: int,
    tensor: str,
    step: int,
    part: float = 1.0,
    lag_steps: float = 0.0,
) -> "Ratios":
    """Return what `push_density` does, of any range of the tensor.

    `lag_steps`: by how much the parameters lag behind that gradients are taken at; see `staleness_steps`.
    """
    if push.threshold is None or not push.selects or step < push.warmup_steps:
        return EVERYTHING
    if samples == 0 or part == 0 or math.isinf(push.threshold):  # a gradient of zeros, or a push that is silent
        return SILENCE
    view = _View(statistics, samples, tensor, bool(push.error_feedback), lag_steps)
    if push.kind == "target-density":
        return _reestimated(view, push, step, part)
    if push.kind == "relative":
        return view.relative_ratio(push.threshold, step)
    return view.sent_ratio(push.threshold, step, part)


def publish_density(
    statistics: GradientStatistics, publish: Publish, *, tensor: str, step: int, first: float = 0.0, last: float = 1.0
) -> float:
    """Return the fraction of a tensor's elements whose |master - published| reaches the threshold after `step`.

    What is not sent stays in that difference. `first`, `last`: the range of the tensor, as fractions of its elements.
    """
    return publish_ratios(statistics, publish, tensor=tensor, step=step).over(first, last)


def publish_ratios(statistics: GradientStatistics, publish: Publish, *, tensor: str, step: int) -> "Ratios":
    """Return what `publish_density` does, of any range of the tensor."""
    if not publish.threshold:
        return EVERYTHING
    if math.isinf(publish.threshold):
        return SILENCE
    moment, grid = moment_of(statistics.sampled_steps, step), statistics.publish_thresholds
    rows = [moment.all_of(block) for block in statistics.changes[tensor].blocks]
    return Ratios(tuple(moment.curved([_on_grid(grid, row, publish.threshold) for row in block]) for block in rows))


def union_density(
    statistics: GradientStatistics, sent: float, *, ranks: int, samples: int, tensor: str, step: int
) -> float:
    """Return the fraction of a tensor's elements that at least one of `ranks` alike ranks sends; see `united`.

    `sent`: what one of them sends, by `push_density`.
    """
    trace = traces_of(statistics, samples)[0].tensors[tensor]
    moment = moment_of(statistics.sampled_steps, step)
    mean = fmean(moment.mixed([s.mean for s in moment.of(block.sketches)]) for block in trace.blocks)
    square = fmean(moment.mixed([s.rms**2 for s in moment.of(block.sketches)]) for block in trace.blocks)
    correlation = _clipped(fmean(moment.of(trace.correlations))) if trace.correlations else 0.0
    return united(sent, ranks=ranks, mean_to_rms=mean / math.sqrt(square) if square else 1.0, correlation=correlation)


def traces_of(statistics: GradientStatistics, samples: int, *, error_feedback: bool = False) -> tuple[RankTrace, ...]:
    """Return the traces taken with the samples per rank nearest (in ratio) to `samples`, by rising threshold.

    Of those that were trained under a threshold, the ones with error feedback or without it, where there are any.
    """
    nearest = min((trace.samples for trace in statistics.traces), key=lambda n: abs(math.log(n / samples)))
    near = sorted((t for t in statistics.traces if t.samples == nearest), key=lambda t: t.threshold)
    return tuple(t for t in near if not t.threshold or t.error_feedback == error_feedback) or tuple(near)


def _clipped(ratio: float) -> float:
    return min(1.0, max(0.0, ratio))


@dataclass(frozen=True, slots=True)
class Ratios:
    """The fractions that are sent of a tensor's blocks of equal size."""

    values: tuple[float, ...]
    below: tuple[float, ...] = ()
    """The same in a run under a lower threshold: what is meant lies between."""
    weight: float = 0.0
    """Of `values`, where there is something below."""

    def over(self, first: float, last: float) -> float:
        """Return the fraction that is sent of the tensor's range from `first` to `last`, as fractions of its elements.

        >>> Ratios((0.25, 0.75)).over(0.0, 1.0), Ratios((0.25, 0.75)).over(0.5, 1.0)
        (0.5, 0.75)
        """
        high = _over_range(self.values, first, last)
        return mixed(_over_range(self.below, first, last), high, self.weight) if self.below else high


EVERYTHING, SILENCE = Ratios((1.0,)), Ratios((0.0,))


class _View:
    """One tensor's gradient as ranks with a number of samples see it, with or without error feedback."""

    def __init__(
        self, statistics: GradientStatistics, samples: int, tensor: str, error_feedback: bool, lag_steps: float
    ) -> None:
        self.statistics, self.grid, self.error_feedback = statistics, statistics.feedback_thresholds, error_feedback
        self.lag_steps = lag_steps
        traces = traces_of(statistics, samples, error_feedback=error_feedback)
        self.thresholds = [trace.threshold for trace in traces]
        self.tensors = [trace.tensors[tensor] for trace in traces]
        self.scale = _scale(self.tensors[0], traces[0].samples / samples)

    def moment(self, step: int) -> Moment:
        """Return where a step lies between those that were looked at."""
        sampled = self.statistics.sampled_steps
        least = min(step, sampled[0]) if self.error_feedback else 0  # what is kept gathers, however old parameters are
        return moment_of(sampled, max(least, step - self.lag_steps), self.statistics.first_step)

    def sent_ratio(self, threshold: float, step: int, part: float) -> "Ratios":
        """Return the fraction that reaches an absolute threshold."""
        return self._under(threshold, threshold, self._with_feedback if self.error_feedback else _reached, step, part)

    def held_ratio(self, level: float, threshold: float, step: int, part: float) -> "Ratios":
        """Return the fraction that would reach a level, where the threshold was another one until then."""
        factor = level / threshold

        def found(block: BlockTrace, scaled: float, moment: Moment) -> float:
            return self._held(block, scaled / factor, factor, moment)

        return self._under(threshold, level, found, step, part)

    def untouched_ratio(self, threshold: float, step: int, part: float) -> "Ratios":
        """Return the fraction that reaches an absolute threshold where none was before."""
        level = threshold / (part * self.scale)
        return Ratios(tuple(_reached(each, level, self.moment(step)) for each in self.tensors[0].blocks))

    def relative_ratio(self, multiple: float, step: int) -> "Ratios":
        """Return the fraction that reaches a multiple of the tensor's mean magnitude."""
        moment, grid = self.moment(step), self.statistics.multiples
        if not grid:
            raise UserError(f"statistics of {self.statistics.model}: relative thresholds were not looked at")
        ratios = []
        for block in self.tensors[0].blocks:
            rows = [
                row.feedback_ratios if self.error_feedback else row.sent_ratios for row in moment.all_of(block.relative)
            ]
            ratios.append(moment.curved([_on_grid(grid, row, multiple) for row in rows]))
        return Ratios(tuple(ratios))

    def _under(
        self,
        threshold: float,
        level: float,
        found: Callable[[BlockTrace, float, Moment], float],
        step: int,
        part: float,
    ) -> "Ratios":
        """Return the values between those in the runs under the two thresholds next to this one."""
        moment, level = self.moment(step), level / (part * self.scale)

        def values(tensor: TensorTrace) -> tuple[float, ...]:
            return tuple(found(block, level, moment) for block in tensor.blocks)

        above = min(bisect_left(self.thresholds, threshold), len(self.thresholds) - 1)
        high = values(self.tensors[above])
        if above == 0 or self.thresholds[above] < threshold:
            return Ratios(high)
        weight = _between(threshold, self.thresholds[above - 1], self.thresholds[above])
        return Ratios(high, values(self.tensors[above - 1]), weight)

    def _with_feedback(self, block: BlockTrace, level: float, moment: Moment) -> float:
        return self._held(block, level, 1.0, moment)

    def _held(self, block: BlockTrace, level: float, factor: float, moment: Moment) -> float:
        """Return the fraction of a block that reaches `factor` times a level that was the threshold until then."""
        pairs = zip(moment.all_of(block.sketches), moment.all_of(block.feedback), strict=True)
        ratios = [self._held_at(sketch, row, level, factor) for sketch, row in pairs]
        if moment.before < 0 and block.first is not None:  # at the first step nothing has gathered yet
            ratios[0] = _tail(block.first, factor * level)
        return moment.curved(ratios)

    def _held_at(self, sketch: Sketch, row: FeedbackDensity, level: float, factor: float) -> float:
        if level < self.grid[0]:  # feedback matters ever less
            more = row.sent_ratios[0] / max(_tail(sketch, self.grid[0]), _SMALLEST)
            return min(1.0, float(_tail(sketch, factor * level) * more ** (level / self.grid[0])))
        sent = _on_grid(self.grid, row.sent_ratios, level)
        return sent if factor == 1 else self._tail_of_held(row, level, sent, factor)

    def _tail_of_held(self, row: FeedbackDensity, level: float, sent: float, factor: float) -> float:
        by_level = [_on_grid(self.grid, each, level) for each in zip(*row.held_ratios, strict=True)]
        known = sorted([*zip(HELD_LEVELS, by_level, strict=True), (1.0, sent)])
        return _on_grid([each for each, _ in known], [ratio for _, ratio in known], factor)


def _scale(tensor: TensorTrace, ratio: float) -> float:
    """Return how much larger gradients are over `ratio` times fewer samples.

    What two ranks' gradients have in common stays, and the noise's variance grows as samples become fewer.
    """
    common = _clipped(fmean(tensor.correlations)) if tensor.correlations else 1.0
    return math.sqrt(common + (1 - common) * ratio)


def _reestimated(view: _View, push: Push, step: int, part: float) -> "Ratios":
    """Return the density at `step` under thresholds that are estimated from time to time, to send a fraction then.

    With error feedback the estimate is of what has gathered under the one before: that is gone through from the start,
    or from four estimates ago.
    """
    assert push.threshold is not None
    since, target = (step - push.warmup_steps) % push.reestimate_steps, push.threshold
    latest = step - since
    earliest = max(push.warmup_steps, latest - (3 * push.reestimate_steps if view.error_feedback else 0))
    threshold: float | None = None
    for at in range(earliest, latest + 1, push.reestimate_steps):
        reaching = _estimate(view, push, at, threshold, part)
        threshold = _reached_by(reaching, target)
    assert threshold is not None
    return reaching(threshold) if since == 0 else view.sent_ratio(threshold, step, part)


def _estimate(view: _View, push: Push, step: int, threshold: float | None, part: float) -> Callable[[float], "Ratios"]:
    """Return the fraction that reaches a level when the threshold is estimated; `threshold`: until then."""
    if step == push.warmup_steps:
        return lambda level: view.untouched_ratio(level, step, part)
    if threshold is None or not view.error_feedback:
        return lambda level: view.sent_ratio(level, step, part)
    return lambda level: view.held_ratio(level, threshold, step, part)


def _reached_by(reaching: Callable[[float], "Ratios"], target: float) -> float:
    """Return the level that a fraction of the whole tensor reaches."""
    return _root(lambda level: reaching(level).over(0.0, 1.0) - target)


def _root(falling: Callable[[float], float]) -> float:
    """Return where a falling function of a threshold turns negative."""
    low, high = math.log(1e-12), math.log(1e4)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(math.exp(middle)) > 0 else (low, middle)
    return math.exp(middle)


def _between(threshold: float, low: float, high: float) -> float:
    """Return how far `threshold` is from `low` to `high` in logarithm; dense training counts as a decade below."""
    floor = low or high / 10
    return _clipped(math.log(threshold / floor) / math.log(high / floor))


def _over_range(values: Sequence[float], first: float, last: float) -> float:
    """Return the mean over the range of what blocks of equal size have."""
    if len(values) == 1 or last <= first:
        return values[0]
    begin, end, sent, whole = first * len(values), last * len(values), 0.0, 0.0
    blocks = range(int(begin), min(len(values), math.ceil(end)))
    if len(blocks) == 1:  # to the last digit, so that all ranges inside a block are alike
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
    """Return the fraction of numbers of at least `level`.

    Between two edges, the quantile of a normal distribution that belongs to the fraction (of the numbers that are not
    0) is a power of the level: exact for a normal distribution, and near it for those with heavier tails.
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


def _on_grid(grid: Sequence[float], ratios: Sequence[float], threshold: float) -> float:
    """Return what is sent at a threshold, of what is at a grid's: between these as in `_tail`, and beyond."""
    at = min(max(bisect_right(grid, threshold) - 1, 0), max(0, len(grid) - 2))
    if len(grid) == 1:
        return ratios[0]
    weight = math.log(threshold / grid[at]) / math.log(grid[at + 1] / grid[at])
    return _powered(ratios[at], ratios[at + 1], weight)


def _powered(low: float, high: float, weight: float) -> float:
    """Return the ratio at `weight` on the way from one ratio to the next, smaller one."""
    if high <= 0 or high >= low:
        return low + _clipped(weight) * (high - low)
    quantiles = [-_NORMAL.inv_cdf(ratio / 2) for ratio in (min(low, _ALMOST_ALL), high)]
    found = quantiles[0] ** (1 - weight) * quantiles[1] ** weight
    return 2 * _NORMAL.cdf(-found)
