"""How much of the sharded state each rank owns: as its memory allows, or as it costs the step least.

[Note: owners] In data-parallel Gradient Sharding a rank's share of the parameters decides what it must hold and update,
and what crosses its links; it does not decide how much it computes, which is its share of the batch
(gradient-sharding.md C.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gssim.units import Floats

DIGITS = 9
"""Of shares: solvers of other versions may differ in those behind."""


class Infeasible(ValueError):
    """The shares do not fit: `excess_bytes` too many on `rank`, or on all together where that is None."""

    def __init__(self, rank: int | None, excess_bytes: float) -> None:
        super().__init__(f"{excess_bytes:.0f} bytes too many on {'all ranks' if rank is None else f'rank {rank}'}")
        self.rank, self.excess_bytes = rank, excess_bytes


def memory_shares(
    *, capacity_bytes: Sequence[float], held_bytes: Sequence[float], whole_bytes: float
) -> tuple[float, ...]:
    """Return the shares that leave the fullest rank least full: all ranks as full, in proportion to their capacity.

    `held_bytes`: what each rank holds whatever its share; `whole_bytes`: what a share of 1 takes (above 0). Minimises

        max over i of (held_i + s_i * whole) / capacity_i,   where s_i >= 0 and the shares sum to 1

    by filling: at a level of fullness y a rank takes max(0, y * capacity_i - held_i), and y is where these sum to the
    whole. Ranks that are fuller from the start take nothing. Raises Infeasible where the level exceeds 1.

    >>> memory_shares(capacity_bytes=[80, 40], held_bytes=[10, 10], whole_bytes=40)
    (0.75, 0.25)
    """
    capacity, held = np.array(capacity_bytes, float), np.array(held_bytes, float)
    _refuse_overfull(capacity, held, whole_bytes)
    order = np.argsort(held / capacity, kind="stable")  # in which they begin to take
    levels = (whole_bytes + np.cumsum(held[order])) / np.cumsum(capacity[order])  # if the first ones share it all
    taking = int(np.argmin(levels))  # a further one would have to give back
    taken = np.zeros(len(capacity))
    first = order[: taking + 1]
    taken[first] = levels[taking] * capacity[first] - held[first]
    return _normalised(taken)


def _refuse_overfull(capacity: Floats, held: Floats, whole_bytes: float) -> None:
    """Raise Infeasible where a rank is too full without any share, or the whole does not fit in what all have left."""
    fullest = int(np.argmax(held - capacity))
    if held[fullest] > capacity[fullest]:
        raise Infeasible(fullest, float(held[fullest] - capacity[fullest]))
    excess = whole_bytes - float(np.sum(capacity - held))
    if excess > 0:
        raise Infeasible(None, excess)


@dataclass(frozen=True)
class OwnerTimes:
    """What all of the parameters would take on each rank, in seconds: a share of them takes its share of that."""

    push_out_s: Sequence[float]
    """To send all gradients, over the rank's way out."""
    push_in_s: Sequence[float]
    """To receive all gradients of one other rank, over its way in."""
    update_s: Sequence[float]
    """To update all parameters."""
    publish_out_s: Sequence[float]
    """To send all parameters to the next rank of the ring, over the rank's way out."""
    publish_in_s: Sequence[float]
    """To receive them from the one before, over its way in."""


def cost_shares(times: OwnerTimes, *, most: Sequence[float]) -> tuple[float, ...]:
    """Return the shares with the least `owner_time_s`, of which rank i's is at most `most[i]`: what its memory allows.

    A linear programme: minimise P + U + G, each at least every term of its maximum, where 0 <= s_i <= most_i and the
    shares sum to 1. Where many shares are as good, those that differ least from even ones are taken (a second one).
    Assumes that a rank's memory grows in proportion to its share, and that the parts of a step do not overlap. Raises
    Infeasible (in shares, not bytes) where `most` sums to less than 1.
    """
    limits = np.clip(np.array(most, float), 0.0, 1.0)
    if limits.sum() < 1:
        raise Infeasible(None, float(1 - limits.sum()))
    rows, constants, parts = _terms(times)
    scale = float(max(constants.max(), np.abs(rows).max())) or 1.0  # any unit of time
    rows, constants = rows / scale, constants / scale
    ranks = len(limits)
    # s, then P, U and G: rows @ s + constants <= the part that they belong to
    above = np.hstack([rows, -np.eye(3)[parts]])
    bounds = [*((0.0, float(limit)) for limit in limits), *[(0.0, None)] * 3]
    objective = np.array([0.0] * ranks + [1.0] * 3)
    found = _solved(objective, above, -constants, bounds)
    least = float(objective @ found)
    # as near to even as that allows
    near = np.zeros((2 * ranks + 1, ranks + 4))
    near[:ranks, :ranks], near[ranks:-1, :ranks] = np.eye(ranks), -np.eye(ranks)
    near[:-1, -1] = -1.0
    near[-1, :-1] = objective
    limit = [*[1 / ranks] * ranks, *[-1 / ranks] * ranks, least * (1 + 1e-9) + 1e-12]
    wider = np.vstack([np.hstack([above, np.zeros((len(above), 1))]), near])
    objective = np.array([0.0] * (ranks + 3) + [1.0])
    return _normalised(_solved(objective, wider, np.concatenate([-constants, limit]), [*bounds, (0.0, None)])[:ranks])


def owner_time_s(times: OwnerTimes, shares: Sequence[float]) -> float:
    """Return what of a step depends on the shares: the longest push, then update, then publication of any rank.

    Of M ranks, whose links carry both directions at once, with s_i their shares:

        P = max of (1 - s_i) * push_out_i          all but its own part goes out
                   s_i * (M - 1) * push_in_i       its part comes from each of the others
        U = max of s_i * update_i
        G = max of (1 - s_i+1) * publish_out_i     round a ring all parts but the next one's own go out,
                   (1 - s_i) * publish_in_i        all but its own come in,
                   s_i * (sum of the hops but the one to i)    and a part is handed on M - 1 times

    where a hop takes the longer of its sender's way out and its receiver's way in. Source: gradient-sharding.md A.3.

    >>> even = OwnerTimes(*[[1.0, 1.0]] * 5)
    >>> owner_time_s(even, [0.5, 0.5]), owner_time_s(even, [0.75, 0.25])
    (1.5, 2.25)
    """
    rows, constants, parts = _terms(times)
    terms = rows @ np.array(shares, float) + constants
    return float(sum(terms[parts == part].max() for part in range(3)))


def _terms(times: OwnerTimes) -> tuple[Floats, Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the terms of the three maxima as rows over the shares, their constants, and which maximum each is of."""
    out, come, update = (np.array(each, float) for each in (times.push_out_s, times.push_in_s, times.update_s))
    sends, receives = np.array(times.publish_out_s, float), np.array(times.publish_in_s, float)
    ranks = len(out)
    itself, following = np.eye(ranks), np.roll(np.eye(ranks), 1, axis=1)  # row i: the rank after i
    hop_to = np.maximum(np.roll(sends, 1), receives)  # the hop that ends at i
    handed_on = hop_to.sum() - hop_to if ranks > 1 else np.zeros(ranks)
    zeros = np.zeros(ranks)
    blocks = [
        (-itself * out[:, None], out, 0),
        (itself * ((ranks - 1) * come)[:, None], zeros, 0),
        (itself * update[:, None], zeros, 1),
        (-following * sends[:, None], sends, 2),
        (-itself * receives[:, None], receives, 2),
        (itself * handed_on[:, None], zeros, 2),
    ]
    rows, constants, parts = zip(*blocks, strict=True)
    return np.vstack(rows), np.concatenate(constants), np.repeat(parts, ranks)


def _solved(
    objective: Floats, above: Floats, limits: Floats | Sequence[float], bounds: Sequence[tuple[float, float | None]]
) -> Floats:
    """Return where a linear objective is least under `above @ x <= limits`, the first variables summing to 1."""
    from scipy.optimize import linprog  # here, for `import gssim` must stay quick
    from scipy.sparse import csr_array

    ranks = sum(end is not None for _, end in bounds)
    whole = np.zeros((1, len(objective)))
    whole[0, :ranks] = 1.0
    found = linprog(
        objective, A_ub=csr_array(above), b_ub=limits, A_eq=whole, b_eq=[1.0], bounds=bounds, method="highs"
    )
    if not found.success:
        raise RuntimeError(f"the shares' linear programme failed: {found.message}")
    solution: Floats = found.x
    return solution


def _normalised(parts: Floats) -> tuple[float, ...]:
    """Return parts as shares, rounded."""
    rounded = np.round(np.maximum(parts, 0.0) / np.maximum(parts, 0.0).sum(), DIGITS)
    return tuple((rounded / rounded.sum()).tolist())
