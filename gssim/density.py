"""What a threshold makes of measured gradient statistics: the fraction of elements that reach it.

Without error feedback this is the tail of |g|. Between sampled steps the shape of the distribution is interpolated and
its scale is the measured one; along the logarithm of |g| the tail is interpolated linearly. What a threshold drops
changes the training and with it later gradients, so statistics are taken under several thresholds, and the densities
that they give are interpolated in the logarithm of the threshold.
"""

import math
from collections.abc import Sequence

import numpy as np

from gssim.gradients import SKETCH_EDGES, GradientStatistics, RankTrace, TensorTrace
from gssim.plan import Publish, Push

_LOG_EDGES = np.log10(np.array(SKETCH_EDGES))


def traces_of(statistics: GradientStatistics, samples: int) -> tuple[RankTrace, ...]:
    """Return the traces taken with the samples per rank nearest (in ratio) to `samples`, by rising threshold."""
    nearest = min((trace.samples for trace in statistics.traces), key=lambda n: abs(math.log(n / samples)))
    return tuple(sorted((t for t in statistics.traces if t.samples == nearest), key=lambda t: t.threshold))


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

    >>> from gssim.gradients import RankTrace, TensorTrace
    >>> tail = tuple(1.0 if edge <= 1 else 0.0 for edge in SKETCH_EDGES)
    >>> trace = RankTrace(samples=1, tensors={"w": TensorTrace(rms=(2.0,), tail_ratios=(tail,))})
    >>> statistics = GradientStatistics(model="m", precision="fp32", optimizer="sgd", learning_rate=1.0, seed=0,
    ...     global_batch_size=1, sampled_steps=(0,), traces=(trace,), source="doctest")
    >>> [push_density(statistics, Push(threshold=t), samples=1, tensor="w", step=0) for t in (0, 1.9, 4.0)]
    [1.0, 1.0, 0.0]
    """
    if push.threshold is None or not push.selects or step < push.warmup_steps:
        return 1.0
    if samples == 0 or part == 0:  # a gradient of zeros
        return 0.0
    threshold = push.threshold / part
    traces = traces_of(statistics, samples)
    above = next((i for i, trace in enumerate(traces) if trace.threshold >= threshold), len(traces) - 1)
    high = _density_under(traces[above], statistics.sampled_steps, tensor, step, threshold)
    if above == 0 or traces[above].threshold < threshold:
        return high
    low = _density_under(traces[above - 1], statistics.sampled_steps, tensor, step, threshold)
    weight = _between(threshold, traces[above - 1].threshold, traces[above].threshold)
    return low ** (1 - weight) * high**weight if low and high else (1 - weight) * low + weight * high


def publish_density(
    statistics: GradientStatistics, publish: Publish, *, tensor: str, step: int, first: float = 0.0, last: float = 1.0
) -> float:
    """Return the fraction of a tensor's elements whose |master - published| reaches the threshold after `step`.

    What is not sent stays in that difference. `first`, `last`: the range of the tensor, as fractions of its elements.
    """
    if not publish.threshold:
        return 1.0
    raise NotImplementedError("statistics of parameter changes")


def union_density(
    statistics: GradientStatistics,
    push: Push,
    *,
    ranks: int,
    samples: int,
    tensor: str,
    step: int,
    part: float = 1.0,
    first: float = 0.0,
    last: float = 1.0,
) -> float:
    """Return the fraction of a tensor's elements that at least one of `ranks` ranks sends: d for one, at most 1."""
    density = push_density(
        statistics, push, samples=samples, tensor=tensor, step=step, part=part, first=first, last=last
    )
    return density if ranks == 1 else 1 - (1 - density) ** ranks


def _between(threshold: float, low: float, high: float) -> float:
    """Return how far `threshold` is from `low` to `high` in logarithm; dense training counts as a decade below."""
    floor = low or high / 10
    return min(1.0, max(0.0, math.log(threshold / floor) / math.log(high / floor)))


def _density_under(trace: RankTrace, sampled_steps: Sequence[int], tensor: str, step: int, threshold: float) -> float:
    """Return the density of `threshold` in the gradients of one training run."""
    rms = trace.tensors[tensor].rms[step]
    if rms <= 0:
        return 0.0
    tail = _tail_at(trace.tensors[tensor], sampled_steps, step)
    position = math.log10(threshold / rms)
    if position < _LOG_EDGES[0]:
        return float(tail[0])
    return float(np.interp(position, _LOG_EDGES, tail, right=0.0))


def _tail_at(trace: TensorTrace, sampled_steps: Sequence[int], step: int) -> np.ndarray:
    later = next((i for i, s in enumerate(sampled_steps) if s >= step), len(sampled_steps) - 1)
    if sampled_steps[later] <= step or later == 0:
        return np.array(trace.tail_ratios[later])
    before, after = sampled_steps[later - 1], sampled_steps[later]
    weight = (step - before) / (after - before)
    return (1 - weight) * np.array(trace.tail_ratios[later - 1]) + weight * np.array(trace.tail_ratios[later])
