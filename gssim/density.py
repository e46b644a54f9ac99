"""What a threshold makes of measured gradient statistics: the fraction of elements that reach it.

Without error feedback this is the tail of |g|. Between sampled steps the shape of the distribution is interpolated and
its scale is the measured one; along the logarithm of |g| the tail is interpolated linearly.
"""

import math
from collections.abc import Sequence

import numpy as np

from gssim.gradients import SKETCH_EDGES, GradientStatistics, RankTrace, TensorTrace

_LOG_EDGES = np.log10(np.array(SKETCH_EDGES))


def nearest_trace(statistics: GradientStatistics, samples: int) -> RankTrace:
    """Return the trace taken with the number of samples per rank that is nearest (in ratio) to `samples`."""
    return min(statistics.traces, key=lambda trace: abs(math.log(trace.samples / samples)))


def push_density(statistics: GradientStatistics, *, samples: int, tensor: str, step: int, threshold: float) -> float:
    """Return the fraction of a tensor's elements with |g| >= threshold at `step`, on a rank with `samples` samples.

    A rank without samples has a gradient of zeros, of which only a threshold of 0 sends any.

    >>> from gssim.gradients import RankTrace, TensorTrace
    >>> tail = tuple(1.0 if edge <= 1 else 0.0 for edge in SKETCH_EDGES)
    >>> trace = RankTrace(samples=1, tensors={"w": TensorTrace(rms=(2.0,), tail_ratios=(tail,))})
    >>> statistics = GradientStatistics(model="m", precision="fp32", optimizer="sgd", learning_rate=1.0, seed=0,
    ...     global_batch_size=1, sampled_steps=(0,), traces=(trace,), source="doctest")
    >>> [push_density(statistics, samples=1, tensor="w", step=0, threshold=t) for t in (0, 1.9, 4.0)]
    [1.0, 1.0, 0.0]
    """
    if threshold <= 0:
        return 1.0
    if samples == 0:
        return 0.0
    trace = nearest_trace(statistics, samples).tensors[tensor]
    rms = trace.rms[step]
    if rms <= 0:
        return 0.0
    tail = _tail_at(trace, statistics.sampled_steps, step)
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


def message_bytes(*, elements: float, sent: float, value_bytes: int, index_bytes: int, encoding: str) -> float:
    """Return the bytes of one thresholded message: `sent` of `elements` values, in the smaller or the given encoding.

    >>> message_bytes(elements=1000, sent=100, value_bytes=4, index_bytes=4, encoding="auto")
    800.0
    >>> message_bytes(elements=1000, sent=900, value_bytes=4, index_bytes=4, encoding="auto")
    4000.0
    """
    dense, coo = float(elements * value_bytes), float(sent * (value_bytes + index_bytes))
    return {"auto": min(dense, coo), "coo": coo, "dense": dense}[encoding]
