"""Exchanges between pairs: all with all, one with one, and with partners at doubling distances."""

import hashlib

import numpy as np

from gssim.collectives.algorithms.members import Members, made_once
from gssim.collectives.communication import Communication
from gssim.collectives.pairs import Exchange, Pairs
from gssim.collectives.stage import Hops, Stage
from gssim.shared import Same

SINGLE_FLOWS = 2**14
"""Exchanges of more flows are one session, whose flows keep pace and end together: exact where one kind of link is the
bottleneck of all, as in exchanges among equals; else a lower bound, for every link is then busy until the end."""


@made_once
def _pairs(members: Members) -> Hops:
    """Return a hop for every ordered pair of members."""
    source, target = np.nonzero(~np.eye(members.count, dtype=bool))
    return Hops(members.ranks[source], members.ranks[target], np.ones(len(source)))


def direct(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Everybody sends to everybody at once; an all-reduce is a reduce-scatter and an all-gather."""
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
    """Everybody sends to everybody what there is for them; exchanges in the same proportions share their hops."""
    pairs, many = communication.pair_bytes, members.count * (members.count - 1) > SINGLE_FLOWS
    if many and isinstance(pairs, Pairs) and pairs.most and pairs.kind_count < members.count // 4:
        return (Stage(_exchange(members, pairs), pairs.most, coupled=True),)
    matrix = np.array(pairs, dtype=float)
    np.fill_diagonal(matrix, 0.0)
    most = float(matrix.max()) or 1.0
    matrix /= most

    def made() -> Hops:
        source, target = np.nonzero(matrix)
        if len(source) == members.count * (members.count - 1):  # nobody is left out: all such have the same ends
            every = _pairs(members)
            return Hops(every.source, every.target, matrix[source, target])
        return Hops(members.ranks[source], members.ranks[target], matrix[source, target])

    key = ("exchange", Same(members), hashlib.sha256(matrix.tobytes()).digest())
    hops = members.kept.once(key, made, weight=lambda hops: len(hops.source))
    return (Stage(hops, most, coupled=len(hops.source) > SINGLE_FLOWS),)


def _exchange(members: Members, pairs: Pairs) -> Exchange:
    """Return the hops of many members, most of whom send the same; those in the same proportions once."""
    rows = np.array(pairs.rows, dtype=float) / pairs.most
    key = ("exchange", Same(members), hashlib.sha256(rows.tobytes()).digest(), tuple(pairs.kinds))
    return members.kept.once(
        key,
        lambda: Exchange(_pairs(members), members.ranks, rows, np.array(pairs.kinds)),
        weight=lambda hops: hops.elements,
    )


def send(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """The first member sends to the second."""
    return (Stage(_link(members), communication.size_bytes),)


@made_once
def _link(members: Members) -> Hops:
    return Hops.of([(int(members.ranks[0]), int(members.ranks[1]), 1.0)])


def halving_doubling(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Exchange of halves with partners at half the distance each time, then back (Thakur, Rabenseifner, Gropp 2005).

    Members beyond a power of two hand theirs to a partner first, and get the result from it at the end; only for an
    all-reduce, as parts of other collectives would be of two sizes then.
    """
    size = communication.size_bytes
    power = 2 ** (members.count.bit_length() - 1)
    extra = members.count - power
    if extra and communication.kind != "all-reduce":
        raise ValueError(f"halving-doubling of {communication.kind} needs a power of two members")
    halving: list[Stage] = []
    doubling: list[Stage] = []
    part = size
    for hops in _exchange_hops(members, power):
        part /= 2
        halving.append(Stage(hops, part, reduced_bytes=part))
        doubling.insert(0, Stage(hops, part))
    stages = {"all-reduce": [*halving, *doubling], "reduce-scatter": halving, "all-gather": doubling}
    found = stages[communication.kind]
    if extra:
        into, out = _fold_hops(members, power)
        found = [Stage(into, size, reduced_bytes=size), *found, Stage(out, size)]
    return tuple(found)


@made_once
def _exchange_hops(members: Members, power: int) -> tuple[Hops, ...]:
    positions = np.arange(power)
    found = []
    distance = power // 2
    while distance:
        found.append(Hops(members.ranks[positions], members.ranks[positions ^ distance], np.ones(power)))
        distance //= 2
    return tuple(found)


@made_once
def _fold_hops(members: Members, power: int) -> tuple[Hops, Hops]:
    extra, partner = members.ranks[power:], members.ranks[: members.count - power]
    ones = np.ones(len(extra))
    return Hops(extra, partner, ones), Hops(partner, extra, ones)
