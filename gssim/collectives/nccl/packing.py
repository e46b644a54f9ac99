"""Packing of rings onto the direct links between the GPUs of a host, at the largest total rate."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import numpy as np

from gssim.cluster import Array

MAX_PACKED_RANKS = 8


def ring_packing(link_bytes_per_s: Sequence[Sequence[float]]) -> list[tuple[tuple[int, ...], float]]:
    """Return directed rings through all GPUs and their rates, with the largest total rate that the links allow.

    `link_bytes_per_s[i][j]` is the rate from GPU i to GPU j, in bytes/s of one direction, 0 without a link. A linear
    program over all Hamiltonian cycles maximises the sum of the rings' rates, with no link above its own rate. NCCL
    searches such rings too (`ncclTopoCompute`). Raises ValueError if no ring exists, or for more than 8 GPUs.

    >>> ring_packing([[0, 50e9], [50e9, 0]])
    [((0, 1), 50000000000.0)]
    """
    rates = np.asarray(link_bytes_per_s, dtype=np.float64)
    count = len(rates)
    if rates.shape != (count, count) or not 2 <= count <= MAX_PACKED_RANKS or (rates < 0).any():
        raise ValueError(f"links: must be a square of rates >= 0 for 2 to {MAX_PACKED_RANKS} GPUs, not {rates.shape}")
    cycles = _cycles(rates)
    if not cycles:
        raise ValueError(f"links: no ring passes through all {count} GPUs")
    exact = _cover(rates, cycles)
    if exact is not None:
        return exact
    links = {(int(i), int(j)): row for row, (i, j) in enumerate(np.argwhere(rates > 0))}
    uses = np.zeros((len(links), len(cycles)))
    for column, cycle in enumerate(cycles):
        uses[[links[link] for link in _links(cycle)], column] = 1.0
    # in units of the fastest link: the solver's tolerances are absolute
    fastest = rates.max()
    limits = np.array([rates[link] / fastest for link in links])
    from scipy.optimize import linprog  # lazy: keeps `import gssim` fast

    solution = linprog(-np.ones(len(cycles)), A_ub=uses, b_ub=limits, method="highs")
    return [(cycle, float(x * fastest)) for cycle, x in zip(cycles, np.asarray(solution.x), strict=True) if x > 1e-9]


def _links(cycle: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def _cycles(rates: Array) -> list[tuple[int, ...]]:
    """Return all Hamiltonian cycles over the links, each from GPU 0."""
    rest = np.array(list(permutations(range(1, len(rates)))), dtype=np.int64)
    orders = np.concatenate([np.zeros((len(rest), 1), np.int64), rest], axis=1)
    closed = (rates[orders, np.roll(orders, -1, axis=1)] > 0).all(axis=1)
    return [tuple(order) for order in orders[closed].tolist()]


COVER_STEPS = 10_000


def _cover(rates: Array, cycles: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], float]] | None:
    """Return rings that use up every link, if a short search finds them; such rings are optimal without a solver.

    The search is an exact cover, for GPUs that all have the same number of unit links in and out: it always takes a
    ring over the first unused link.
    """
    unit = float(rates[rates > 0].min())
    left = np.rint(rates / unit).astype(int)
    degrees = {*left.sum(axis=0).tolist(), *left.sum(axis=1).tolist()}
    if len(degrees) != 1 or not np.allclose(left * unit, rates):
        return None
    links = [_links(cycle) for cycle in cycles]
    steps = [COVER_STEPS]
    chosen = _covered(left.tolist(), links, steps)
    if chosen is None:
        return None
    counts = Counter(chosen)
    return [(cycles[number], count * unit) for number, count in sorted(counts.items())]


def _covered(left: list[list[int]], links: Sequence[list[tuple[int, int]]], steps: list[int]) -> list[int] | None:
    following = next((j for j, count in enumerate(left[0]) if count), None)
    if following is None:
        return []
    for number, ring in enumerate(links):
        steps[0] -= 1
        if steps[0] < 0:
            return None
        if ring[0] != (0, following) or any(not left[i][j] for i, j in ring):
            continue
        for i, j in ring:
            left[i][j] -= 1
        rest = _covered(left, links, steps)
        for i, j in ring:
            left[i][j] += 1
        if rest is not None:
            return [number, *rest]
    return None
