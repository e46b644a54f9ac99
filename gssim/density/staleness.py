"""How far behind the parameters are that ranks compute with, where owners publish only what has moved far enough."""

from collections.abc import Mapping, Sequence

import numpy as np

from gssim.gradients import GradientStatistics


def staleness_steps(movements: Sequence[float], threshold: float) -> float:
    """Return by how many steps of training the parameters lag with which gradients are computed after some steps.

    `movements`: by how much owners' parameters moved in each of them. Nobody hears of it until they have moved by the
    threshold; from then on what is not told lies evenly between 0 and the threshold:

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
    """Return by how much the mean element moves in each of the first steps; `elements`: of each tensor.

    It is what was published in a step at whatever threshold, threshold times fraction, the most of them: at a threshold
    far above a step's movement v an element is told of every threshold / v steps, and in dense training's first steps
    all of them at once, at one of the lower thresholds. Between sampled steps it goes with their logarithm.
    """
    thresholds, sampled = np.array(statistics.publish_thresholds), np.array(statistics.sampled_steps)
    told = np.zeros(len(sampled))
    for name, count in elements.items():
        blocks = np.array(statistics.changes[name].blocks)  # blocks, sampled steps, thresholds
        told += count * (blocks * thresholds).max(axis=2).mean(axis=0)
    told /= sum(elements.values())
    found: list[float] = np.interp(np.log1p(np.arange(steps)), np.log1p(sampled), told).tolist()
    return found
