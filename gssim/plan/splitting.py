"""Integer splits of a batch, elements, tensors or layers among ranks."""

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from gssim.units import Floats


def even(parts: int) -> tuple[float, ...]:
    """Return `parts` equal shares.

    >>> even(4)
    (0.25, 0.25, 0.25, 0.25)
    """
    return (1.0 / parts,) * parts


def proportional(weights: Sequence[float]) -> tuple[float, ...]:
    """Return shares proportional to `weights` (not all zero).

    >>> proportional([3, 1])
    (0.75, 0.25)
    """
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def split(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers that sum to `total` and follow `shares`: largest remainders, ties to the lower rank.

    >>> split(10, [0.5, 0.25, 0.25])
    (5, 3, 2)
    """
    if shares and min(shares) == max(shares):  # even shares of many ranks: nothing to sort
        whole, extra = divmod(total, len(shares))
        return (whole + 1,) * extra + (whole,) * (len(shares) - extra)
    exact = [share * total for share in shares]
    parts = [int(value + 1e-9) for value in exact]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def ranges(total: int, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Return each rank's half-open range of `total` elements.

    >>> ranges(10, [0.7, 0.3])
    ((0, 7), (7, 10))
    """
    ends = tuple(accumulate(split(total, shares)))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


MANY_SAMPLES = 256
"""For more samples than this, most are assigned in one vectorised step."""


def balance_batch(
    total: int,
    *,
    sample_s: Sequence[float],
    least: int = 0,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return samples per rank that minimise the slowest rank's time, `samples * sample_s`.

    Greedy: each sample goes where it makes the smallest time, which is optimal for non-decreasing convex times. Every
    rank gets `least` samples at least and `most[i]` at most, which must leave room for the total.

    >>> balance_batch(6, sample_s=[1.0, 2.0])
    (4, 2)
    """
    samples = [least] * len(sample_s)
    if total > MANY_SAMPLES and min(sample_s) > 0:
        samples = _certain_samples(total, np.array(sample_s), samples, most)
    open_ranks = [rank for rank in range(len(samples)) if most is None or samples[rank] < most[rank]]
    heap = [((samples[rank] + 1) * sample_s[rank], rank) for rank in open_ranks]
    heapq.heapify(heap)
    for _ in range(total - sum(samples)):
        _, rank = heapq.heappop(heap)
        samples[rank] += 1
        if most is None or samples[rank] < most[rank]:
            heapq.heappush(heap, ((samples[rank] + 1) * sample_s[rank], rank))
    return tuple(samples)


def _certain_samples(total: int, sample_s: Floats, least: Sequence[int], most: Sequence[int] | None) -> list[int]:
    """Return samples that each rank is sure to get: all that end by a time by which at most `total` do.

    Bisects the time until fewer samples than ranks are left, or the time cannot be resolved any further.
    """
    samples = lowest = np.array(least, dtype=np.int64)
    limit = np.full(len(lowest), total, np.int64) if most is None else np.minimum(np.array(most, np.int64), total)
    limit = np.maximum(limit, lowest)
    early, late = 0.0, float((total * sample_s).max())
    for _ in range(64):
        middle = (early + late) / 2
        by_then = np.floor(middle / sample_s)
        by_then -= by_then * sample_s > middle  # the quotient may have been rounded up, or down
        by_then += (by_then + 1) * sample_s <= middle
        counts = np.clip(by_then, lowest, limit).astype(np.int64)
        if counts.sum() > total:
            late = middle
            continue
        early, samples = middle, counts
        if total - counts.sum() < len(counts):
            break
    return [int(count) for count in samples]


def greedy(sizes: Sequence[int], parts: int, groups: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the positions in `sizes` that each part gets: the largest first, each to the part with the least so far.

    `groups`: of each, the number of its group, whose members are all assigned before those of the next.
    Equal sizes stay in order, and of equally full parts the first gets the next: ZeRO-1's partition of whole tensors.
    Source: torch 2.13, distributed/optim/zero_redundancy_optimizer.py, _partition_parameters and _get_min_index.

    >>> greedy([2, 5, 3, 1], 2)
    ((1, 3), (2, 0))
    """
    positions: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for position in sorted(range(len(sizes)), key=lambda i: (groups[i] if groups else 0, -sizes[i])):
        filled, part = heap[0]
        positions[part].append(position)
        heapq.heapreplace(heap, (filled + sizes[position], part))
    return tuple(map(tuple, positions))


def balanced_stages(times_s: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the number of a chain's layers in each stage, in order: at least one, so that the slowest is fastest.

    `times_s[i][j]`: the time of layer j on the device of stage i. The least time of stages 0..i over layers 0..j is

        best(i, j) = min over k < j of max(best(i - 1, k), time of layers k..j on stage i)

    whose first part grows with k while the second shrinks, so that the best k only grows with j.

    >>> balanced_stages([[1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]])
    (4, 2)
    """
    layers = len(times_s[0])
    best: list[float] = [0.0] + [float("inf")] * layers
    ends: list[list[int]] = []
    for i, row in enumerate(times_s):
        upto = [0.0, *accumulate(row)]
        slowest, chosen = [float("inf")] * (layers + 1), [0] * (layers + 1)
        k = i
        for j in range(i + 1, layers + 1):
            while k + 1 < j and max(best[k + 1], upto[j] - upto[k + 1]) <= max(best[k], upto[j] - upto[k]):
                k += 1
            slowest[j], chosen[j] = max(best[k], upto[j] - upto[k]), k
        best = slowest
        ends.append(chosen)
    counts = []
    end = layers
    for chosen in reversed(ends):
        counts.append(end - chosen[end])
        end = chosen[end]
    return tuple(reversed(counts))


@lru_cache(maxsize=256)
def contiguous(sizes: tuple[int, ...], wanted: tuple[float, ...]) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges of `sizes`, one a part and in order, that minimise the largest ratio of sum to share.

    `wanted`: the parts' shares, positive. No part is empty: there must be as many sizes above 0 as parts. Dynamic
    programming: the optimum of the first parts over the first sizes, for every number of both.

    >>> contiguous((4, 1, 1, 2), (0.5, 0.5))
    ((0, 1), (1, 4))
    """
    ends = [0, *accumulate(sizes)]
    worst = [0.0] + [math.inf] * len(sizes)
    starts: list[list[int]] = []
    for share in wanted:
        best, best_start = [math.inf] * len(ends), [0] * len(ends)
        for last, end in enumerate(ends):  # the optimum whose last part ends there, and where that part starts
            for start in range(last - 1, -1, -1):
                ratio = (end - ends[start]) / share
                if ratio >= best[last]:
                    break
                if ratio and max(ratio, worst[start]) < best[last]:
                    best[last], best_start[last] = max(ratio, worst[start]), start
        worst = best
        starts.append(best_start)
    ranges, last = [], len(sizes)
    for chosen in reversed(starts):
        ranges.append((chosen[last], last))
        last = chosen[last]
    return tuple(reversed(ranges))


def shards_inside_experts(shapes: Sequence[Sequence[int]], *, replicas: int) -> bool:
    """Return whether each of a rank's experts is cut among the `replicas` ranks that hold them, not assigned whole.

    `shapes`: of the experts' parameters, whose first dimension counts the experts. They are cut, in the second
    dimension, where there are fewer experts than ranks, and that divides evenly. Source: torchtitan, apply_fsdp.

    >>> shards_inside_experts([(1, 64, 32), (1, 32, 64)], replicas=4)
    True
    >>> shards_inside_experts([(8, 64, 32), (8, 32, 64)], replicas=4)
    False
    """
    return all(len(shape) > 1 and replicas > shape[0] and shape[1] % replicas == 0 for shape in shapes)
