"""Algorithms of collectives other than rings and trees: direct, send, halving-doubling, hierarchical, and torus."""

import hashlib
import math

import numpy as np

from gssim.collectives.communication import Communication, Exchange, Pairs
from gssim.collectives.stage import Hops, Members, Stage, cached_hops
from gssim.execution.cache import Same

SINGLE_FLOWS = 2**14
"""Largest number of flows (with those of groups that exchange at once) that are simulated one by one. A larger exchange
is one session, whose flows progress and end together. That is exact if one kind of link is the bottleneck of all flows,
as in exchanges among equals; otherwise it is a lower bound, because every link is then busy until the end."""


@cached_hops
def _pairs(members: Members) -> Hops:
    """Return a hop for every ordered pair of members."""
    source, target = np.nonzero(~np.eye(members.count, dtype=bool))
    return Hops(members.ranks[source], members.ranks[target], np.ones(len(source)))


def direct(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """All members send to all others at once. An all-reduce is a reduce-scatter followed by an all-gather."""
    if communication.pair_bytes:
        return direct_uneven(members, communication)
    n = members.count
    part = communication.size_bytes / n
    many = n * (n - 1) > SINGLE_FLOWS
    exchange = Stage(_pairs(members), part, coupled=many)
    reduced = (n - 1) * part
    reduce = Stage(_pairs(members), part, coupled=many, reduced_bytes=reduced)
    stages = {"all-reduce": (reduce, exchange), "reduce-scatter": (reduce,)}
    return stages.get(communication.kind, (exchange,))


def direct_uneven(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """All members send parts of unequal sizes to all others; exchanges in the same proportions share their hops."""
    pairs = communication.pair_bytes
    rows = len(pairs.rows if isinstance(pairs, Pairs) else pairs)
    key = ("uneven exchange", Same(members), Same(pairs), communication.at_once)
    return members.kept.once(key, lambda: _uneven(members, communication), weight=lambda _: rows * members.count)


def _uneven(members: Members, communication: Communication) -> tuple[Stage, ...]:
    pairs, pair_count = communication.pair_bytes, members.count * (members.count - 1)
    many = pair_count * communication.at_once > SINGLE_FLOWS
    if many and isinstance(pairs, Pairs) and pairs.most and pairs.kind_count < members.count // 4:
        return (Stage(_exchange(members, pairs), pairs.most, coupled=True),)
    matrix = np.array(pairs, dtype=float)
    np.fill_diagonal(matrix, 0.0)
    most = float(matrix.max()) or 1.0
    matrix /= most

    def uneven_hops() -> Hops:
        source, target = np.nonzero(matrix)
        if len(source) == members.count * (members.count - 1):  # every pair sends: the ends are always the same
            every = _pairs(members)
            return Hops(every.source, every.target, matrix[source, target])
        return Hops(members.ranks[source], members.ranks[target], matrix[source, target])

    key = ("exchange", Same(members), hashlib.sha256(matrix.tobytes()).digest())
    hops = members.kept.once(key, uneven_hops, weight=lambda hops: len(hops.source))
    return (Stage(hops, most, coupled=len(hops.source) * communication.at_once > SINGLE_FLOWS),)


def _exchange(members: Members, pairs: Pairs) -> Exchange:
    """Return the hops among many members that fall into a few kinds of senders; cached by proportions."""
    rows = pairs.arrays[0] / pairs.most
    key = ("exchange", Same(members), hashlib.sha256(rows.tobytes()).digest(), pairs.arrays[1].tobytes())
    return members.kept.once(
        key,
        lambda: Exchange(members, rows, pairs.arrays[1]),
        weight=lambda hops: hops.elements,
    )


def send(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """The first member sends to the second."""
    return (Stage(_first_pair(members), communication.size_bytes),)


_first_pair = cached_hops(lambda members: Hops.of([(int(members.ranks[0]), int(members.ranks[1]), 1.0)]))


def halving_doubling(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Exchange halves with partners at half the distance each time, then back (Thakur, Rabenseifner, Gropp 2005).

    Members beyond a power of two send their data to a partner first, and get the result from it at the end. Only an
    all-reduce allows that; other collectives would then have parts of two sizes.
    """
    size = communication.size_bytes
    power = 2 ** (members.count.bit_length() - 1)
    extra = members.count - power
    if extra and communication.kind != "all-reduce":
        raise ValueError(f"halving-doubling of {communication.kind} needs a power of two members")
    halving: list[Stage] = []
    doubling: list[Stage] = []
    part = size
    into, *exchanges, out = _exchange_hops(members, power)
    for hops in exchanges:
        part /= 2
        halving.append(Stage(hops, part, reduced_bytes=part))
        doubling.insert(0, Stage(hops, part))
    stages = {"all-reduce": [*halving, *doubling], "reduce-scatter": halving, "all-gather": doubling}
    chosen = stages[communication.kind]
    if extra:
        chosen = [Stage(into, size, reduced_bytes=size), *chosen, Stage(out, size)]
    return tuple(chosen)


@cached_hops
def _exchange_hops(members: Members, power: int) -> tuple[Hops, ...]:
    """Return the pairwise exchanges of halving-doubling, at halving distances.

    They are preceded by the hops from the members beyond a power of two to their partners, and followed by the hops
    back.
    """
    extra, partner = members.ranks[power:], members.ranks[: members.count - power]
    ones = np.ones(len(extra))
    positions = np.arange(power)
    exchanges = []
    distance = power // 2
    while distance:
        exchanges.append(Hops(members.ranks[positions], members.ranks[positions ^ distance], np.ones(power)))
        distance //= 2
    return (Hops(extra, partner, ones), *exchanges, Hops(partner, extra, ones))


def hierarchical(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Reduce-scatter inside every host, all-reduce each part between hosts, then all-gather inside."""
    inside, between = _levels(members)
    size = communication.size_bytes
    g, k = len(inside.target) // max(1, len(members.blocks[0])), len(members.blocks[0])
    reduce = Stage(inside, (g - 1) / g * size, steps=g - 1, reduced_bytes=(g - 1) / g * size)
    gather = Stage(inside, (g - 1) / g * size, steps=g - 1)
    turns = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}[communication.kind]
    added = 0.0 if communication.kind == "all-gather" else (k - 1) / k * size / g
    across = Stage(between, turns * (k - 1) / k * size / g, steps=turns * (k - 1), reduced_bytes=added)
    stages = {
        "all-reduce": (reduce, across, gather),
        "reduce-scatter": (reduce, across),
        "all-gather": (across, gather),
    }
    return tuple(stage for stage in stages[communication.kind] if len(stage.hops.source) and stage.size_bytes)


@cached_hops
def _levels(members: Members) -> tuple[Hops, Hops]:
    """Return a ring inside every host, and a ring over the hosts for each local rank."""
    starts, sizes = members.blocks
    if len(set(sizes.tolist())) != 1:
        raise ValueError("a hierarchical collective needs as many members on every host")
    g, k = int(sizes[0]), len(starts)
    grid = np.arange(g * k).reshape(k, g)
    return (
        Hops(members.ranks[grid.ravel()], members.ranks[np.roll(grid, -1, axis=1).ravel()], np.ones(g * k)),
        Hops(members.ranks[grid.ravel()], members.ranks[np.roll(grid, -1, axis=0).ravel()], np.ones(g * k)),
    )


def torus(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Dimension by dimension, two rings in opposite directions at once, each with half of it (Jouppi et al. 2020)."""
    return _by_dimension(members, communication, both=True)


def one_way_torus(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Dimension by dimension, rings in one direction."""
    return _by_dimension(members, communication, both=False)


def _by_dimension(members: Members, communication: Communication, *, both: bool) -> tuple[Stage, ...]:
    scattering: list[Stage] = []
    gathering: list[Stage] = []
    part = communication.size_bytes
    for size, hops in _dimension_hops(members, both):
        carried = (size - 1) / size * part
        scattering.append(Stage(hops, carried, steps=size - 1, reduced_bytes=carried))
        gathering.insert(0, Stage(hops, carried, steps=size - 1))
        part /= size
    stages = {"all-reduce": [*scattering, *gathering], "reduce-scatter": scattering, "all-gather": gathering}
    return tuple(stages[communication.kind])


@cached_hops
def _dimension_hops(members: Members, both: bool) -> tuple[tuple[int, Hops], ...]:
    if math.prod(members.shape) != members.count:
        raise ValueError("a torus algorithm needs a group that fills a torus")
    grid = np.arange(members.count).reshape(members.shape)
    dimensions = []
    for axis, size in enumerate(members.shape):
        if size == 1:
            continue
        ahead, behind = np.roll(grid, -1, axis=axis).ravel(), np.roll(grid, 1, axis=axis).ravel()
        targets = (ahead, behind) if both else (ahead,)
        source = members.ranks[np.tile(grid.ravel(), len(targets))]
        target = members.ranks[np.concatenate(targets)]
        dimensions.append((size, Hops(source, target, np.full(len(source), 1 / len(targets)))))
    return tuple(dimensions)
