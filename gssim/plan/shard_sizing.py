"""Sizes of the ranks' shards of parameters and optimizer state: by memory, or by the least cost to the step.

[Note: owners] In data-parallel Gradient Sharding a rank's share of the parameters determines the state that it holds
and updates, and its traffic; its compute is determined by its share of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gssim.units import Floats, Ints

DIGITS = 9
"""Decimals of shares: solvers of other versions may differ in those beyond."""


class InfeasibleError(ValueError):
    """The shares do not fit: `excess_bytes` too many on `rank`, or on all together where that is None."""

    def __init__(self, rank: int | None, excess_bytes: float) -> None:
        super().__init__(f"{excess_bytes:.0f} bytes too many on {'all ranks' if rank is None else f'rank {rank}'}")
        self.rank, self.excess_bytes = rank, excess_bytes


def memory_shares(
    *, capacity_bytes: Sequence[float], held_bytes: Sequence[float], whole_bytes: float
) -> tuple[float, ...]:
    """Return the shares that make the fullest rank least full: all ranks equally full, relative to their capacity.

    `held_bytes`: memory of each rank that does not depend on its share; `whole_bytes`: memory of a share of 1 (above
    0). Minimises

        max over i of (held_i + s_i * whole) / capacity_i,   where s_i >= 0 and the shares sum to 1

    by filling: at a level of fullness y a rank takes max(0, y * capacity_i - held_i), and y is where these sum to the
    whole. Ranks that are fuller from the start take nothing. Raises InfeasibleError where the level exceeds 1.

    >>> memory_shares(capacity_bytes=[80, 40], held_bytes=[10, 10], whole_bytes=40)
    (0.75, 0.25)
    """
    capacity, held = np.array(capacity_bytes, float), np.array(held_bytes, float)
    _refuse_overfull(capacity, held, whole_bytes)
    order = np.argsort(held / capacity, kind="stable")  # the emptiest ranks begin to take shards first
    levels = (whole_bytes + np.cumsum(held[order])) / np.cumsum(capacity[order])  # if the first ones share it all
    taking = int(np.argmin(levels))  # a further one would take a negative share
    taken = np.zeros(len(capacity))
    first = order[: taking + 1]
    taken[first] = levels[taking] * capacity[first] - held[first]
    return _normalised(taken)


def _refuse_overfull(capacity: Floats, held: Floats, whole_bytes: float) -> None:
    """Raise InfeasibleError where a rank is too full without any share, or all have too little left for the whole."""
    fullest = int(np.argmax(held - capacity))
    if held[fullest] > capacity[fullest]:
        raise InfeasibleError(fullest, float(held[fullest] - capacity[fullest]))
    excess = whole_bytes - float(np.sum(capacity - held))
    if excess > 0:
        raise InfeasibleError(None, excess)


@dataclass(frozen=True)
class OwnerTimes:
    """Times for all of the parameters on each rank, in seconds; a share of them takes that share of the time."""

    push_out_s: tuple[float, ...]
    """Seconds to send all gradients over the rank's outgoing links."""
    push_in_s: tuple[float, ...]
    """Seconds to receive all gradients of one other rank over its incoming links."""
    update_s: tuple[float, ...]
    """Seconds to update all parameters."""
    publish_out_s: tuple[float, ...]
    """Seconds to send all parameters to the next rank of the ring, over the rank's outgoing links."""
    publish_in_s: tuple[float, ...]
    """Seconds to receive them from the previous rank, over its incoming links."""


def import_solver() -> None:
    """Import what `cost_shares` and the rates of its links need: processes that are forked later have it already."""
    import scipy.optimize
    import scipy.sparse.csgraph  # noqa: F401


@lru_cache(maxsize=64)
def cost_shares(times: OwnerTimes, *, most: tuple[float, ...]) -> tuple[float, ...]:
    """Return the shares with the least `owner_time_s`, rank i's being at most `most[i]`, as its memory allows.

    A linear programme: minimise P + U + G, each at least every term of its maximum, where 0 <= s_i <= most_i and the
    shares sum to 1. Of equally good shares, those that differ least from even ones are taken (a second programme).
    Assumes that a rank's memory is proportional to its share, and that the parts of a step do not overlap. Raises
    InfeasibleError (in shares, not bytes) where `most` sums to less than 1.
    """
    from scipy.sparse import block_array, csr_array, hstack, identity  # lazy: keeps `import gssim` fast

    limits = np.clip(np.array(most, float), 0.0, 1.0)
    if limits.sum() < 1:
        raise InfeasibleError(None, float(1 - limits.sum()))
    terms = _terms(times)
    scale = float(max(terms.constant.max(), np.abs(terms.slope).max())) or 1.0  # unit of time, for conditioning
    rows, ranks = np.arange(len(terms.rank)), len(limits)
    above = csr_array((terms.slope / scale, (rows, terms.rank)), shape=(len(rows), ranks))
    parts = csr_array((-np.ones(len(rows)), (rows, terms.part)), shape=(len(rows), PARTS))
    below = -terms.constant / scale
    share_bounds = [(0.0, float(limit)) for limit in limits]
    objective = np.array([0.0] * ranks + [1.0] * PARTS)
    bounds = [*share_bounds, *[(0.0, None)] * PARTS]
    cheapest = _solved(objective, hstack([above, parts]), below, bounds, ranks=ranks)
    if cheapest is None:
        raise RuntimeError("the linear programme for shard sizes has no solution")
    best = float(objective @ cheapest)
    # second programme, closest to even at the same time: one more variable, the largest difference
    itself, one = identity(ranks), csr_array(np.ones((ranks, 1)))
    rows_of: list[list[Any]] = [
        [above, parts, None],
        [itself, None, -one],
        [-itself, None, -one],
        [None, csr_array(np.ones((1, PARTS))), csr_array((1, 1))],
    ]
    nearest: Any = block_array(rows_of)
    objective = np.array([0.0] * (ranks + PARTS) + [1.0])
    for slack in SLACKS:
        limit = [best * (1 + slack) + 1e-3 * slack]
        below_all = np.concatenate([below, np.full(ranks, 1 / ranks), np.full(ranks, -1 / ranks), limit])
        solution = _solved(objective, nearest, below_all, [*bounds, (0.0, None)], ranks=ranks)
        if solution is not None:
            return _normalised(solution[:ranks])
    return _normalised(cheapest[:ranks])


def owner_time_s(times: OwnerTimes, shares: Sequence[float]) -> float:
    """Return the part of a step that depends on the shares: the longest push, then update, then publication of a rank.

    Of M ranks, whose links carry both directions at once, with s_i their shares:

        P = max of (1 - s_i) * push_out_i          all but its own part is sent
                   s_i * (M - 1) * push_in_i       its part arrives from each of the others
        U = max of s_i * update_i
        G = max of (1 - s_i+1) * publish_out_i     in a ring all parts but the next rank's own are sent,
                   (1 - s_i) * publish_in_i        all but its own arrive,
                   s_i * (sum of the hops but the one to i)    and a part is forwarded M - 1 times

    where a hop takes the longer of its sender's outgoing and its receiver's incoming time.

    >>> even = OwnerTimes(*[(1.0, 1.0)] * 5)
    >>> owner_time_s(even, [0.5, 0.5]), owner_time_s(even, [0.75, 0.25])
    (1.5, 2.25)
    """
    terms = _terms(times)
    values = terms.slope * np.array(shares, float)[terms.rank] + terms.constant
    return float(sum(values[terms.part == part].max() for part in range(PARTS)))


SLACKS = (1e-9, 1e-7, 1e-5)
"""By how much of the least cost the evenest shares may exceed it: the solver's own minimum is exact to 1e-7 only, and
it may find nothing within less."""
PARTS = 3
"""Push, update and publication."""


class _Terms(NamedTuple):
    """The terms of the maxima, each of one rank's share: `slope * share + constant`."""

    rank: Ints
    slope: Floats
    constant: Floats
    part: Ints
    """Index of the maximum: push, update or publication."""


def _terms(times: OwnerTimes) -> _Terms:
    push_out, push_in, update = (np.array(s, float) for s in (times.push_out_s, times.push_in_s, times.update_s))
    sends, receives = np.array(times.publish_out_s, float), np.array(times.publish_in_s, float)
    ranks, zeros = np.arange(len(push_out)), np.zeros(len(push_out))
    hop_to = np.maximum(np.roll(sends, 1), receives)  # the hop that ends at a rank
    forwarded = hop_to.sum() - hop_to if len(push_out) > 1 else zeros
    terms = [
        (ranks, -push_out, push_out, 0),
        (ranks, (len(push_out) - 1) * push_in, zeros, 0),
        (ranks, update, zeros, 1),
        (np.roll(ranks, -1), -sends, sends, 2),
        (ranks, -receives, receives, 2),
        (ranks, forwarded, zeros, 2),
    ]
    rank, slope, constant = (np.concatenate([term[column] for term in terms]) for column in range(3))
    part = np.repeat(np.array([term[3] for term in terms]), len(push_out))
    return _Terms(rank.astype(np.int64), slope, constant, part)


def _solved(objective: Floats, above: Any, below: Floats, bounds: Sequence[Any], *, ranks: int) -> Floats | None:
    """Return the minimum's variables under `above @ x <= below`, the first ones, the shares, summing to 1.

    None where the solver finds none.
    """
    from scipy.optimize import linprog

    whole = np.zeros((1, len(objective)))
    whole[0, :ranks] = 1.0
    solution = linprog(objective, A_ub=above, b_ub=below, A_eq=whole, b_eq=[1.0], bounds=bounds, method="highs")
    return None if solution.x is None else np.asarray(solution.x, dtype=np.float64)


def _normalised(parts: Floats) -> tuple[float, ...]:
    """Return parts as shares, rounded."""
    rounded = np.round(np.maximum(parts, 0.0) / np.maximum(parts, 0.0).sum(), DIGITS)
    return tuple((rounded / rounded.sum()).tolist())
