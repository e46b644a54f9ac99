"""Algorithms of collectives, each from members of a group to stages of hops.

Members are given by their ranks and hosts. Hops are made once for an algorithm and group (sizes only scale them), so
that a model of a hundred layers costs no more than one. Time of every algorithm on idle links: `closed_forms`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from gssim.collectives.communication import Communication
from gssim.collectives.stage import Hops, Stage, summed
from gssim.units import Floats, Ints

CHUNK_BYTES = 2**19
"""Piece that a pipelined chain passes on before it has the next (NCCL's 512 KiB slices)."""


@dataclass(frozen=True, eq=False)
class Members:
    """A group and where its members are. Compared by identity: made once for a group."""

    ranks: Ints
    hosts: Ints
    """Host of each member, as a number."""
    shape: tuple[int, ...] = ()
    """Of the torus that the group fills in row-major order; empty: it is none."""
    multirail: bool = False
    """Rings enter and leave a host by every one of its devices in turn (NCCL's channels), not by one alone."""
    inside: Hops | None = None
    """Rings inside the hosts, between positions, weights summing to 1 for each sender: where links between devices
    make some orders better than others. Absent: in order of rank."""

    @property
    def count(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    @cached_property
    def blocks(self) -> tuple[Ints, Ints]:
        """First position and number of the members of each host, in order; one block each where hosts are mixed."""
        starts = np.flatnonzero(np.r_[True, self.hosts[1:] != self.hosts[:-1]])
        if len(starts) > len(np.unique(self.hosts)):
            starts = np.arange(self.count)
        return starts, np.diff(np.r_[starts, self.count])


SINGLE_FLOWS = 2**14
"""Exchanges of more flows are one session, whose flows keep pace and end together: exact where one kind of link is the
bottleneck of all, as in exchanges among equals; else a lower bound, for every link is then busy until the end."""

made_once = lru_cache(maxsize=64)
"""Hops of the groups of recent simulations are kept."""

Algorithm = Callable[[Members, Communication], tuple[Stage, ...]]


@made_once
def ring_hops(members: Members, direction: int) -> Hops:
    """Return a ring over all members, in rank order; with several rails, as many rings, each with its part.

    Ring c enters host k by its device c-k, visits all devices in turn and leaves by the last one's rail, so that every
    device of a host sends on every rail: each local hop carries all rings but those that leave there.
    """
    n = members.count
    starts, sizes = members.blocks
    if not members.multirail or len(starts) == n or (len(starts) == 1 and members.inside is None):
        order = np.arange(n)
        return Hops(members.ranks[order], members.ranks[(order + direction) % n], np.ones(n))
    local = members.inside or _in_rank_order(starts, sizes)
    rings = int(sizes.max())
    exits, entries = _crossings(starts, sizes, rings)
    stays = 1 - np.bincount(exits, minlength=n) / rings
    source = np.r_[local.source, exits]
    target = np.r_[local.target, entries]
    weight = np.r_[local.weight * stays[local.source], np.full(len(exits), 1 / rings)]
    if direction < 0:
        source, target = target, source
    return Hops(members.ranks[source], members.ranks[target], weight)


def _in_rank_order(starts: Ints, sizes: Ints) -> Hops:
    """Return a ring inside every host, between positions."""
    block = np.repeat(np.arange(len(starts)), sizes)
    source = np.flatnonzero(sizes[block] > 1)
    inside = block[source]
    target = starts[inside] + (source - starts[inside] + 1) % sizes[inside]
    return Hops(source, target, np.ones(len(source)))


def _crossings(starts: Ints, sizes: Ints, rings: int) -> tuple[Ints, Ints]:
    """Return the positions at which every ring leaves a host, and at which it enters the next."""
    none = np.zeros(0, np.int64)
    if len(starts) == 1:
        return none, none
    hosts = np.repeat(np.arange(len(starts)), rings)
    ring = np.tile(np.arange(rings), len(starts))
    following = (hosts + 1) % len(starts)
    turn = ring - hosts - 1
    entering = turn % sizes[following]
    if rings % sizes[0]:  # else rings that come back on another's rail would enter host 0 unevenly
        entering = np.where(following == 0, ring % sizes[0], entering)
    return starts[hosts] + turn % sizes[hosts], starts[following] + entering


def _ring(members: Members, size_bytes: float, *, turns: int, reduces: bool = False) -> Stage:
    """Return `turns` (1 or 2) rounds about the ring, each of n-1 steps with an n-th of the size.

    gloo reduces towards lower ranks and gathers towards higher ones (backend-facts 1); NCCL's rings have one direction.
    """
    n = members.count
    direction = -1 if reduces and not members.multirail else 1
    return Stage(
        ring_hops(members, direction),
        turns * (n - 1) / n * size_bytes,
        steps=turns * (n - 1),
        reduced_bytes=(n - 1) / n * size_bytes if reduces else 0.0,
    )


def ring_all_reduce(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Reduce-scatter, then all-gather round the same ring (Patarasuk & Yuan 2009)."""
    return (_ring(members, communication.size_bytes, turns=2, reduces=True),)


def ring_reduce_scatter(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Each part goes once round the ring and is added to on its way."""
    return (_ring(members, communication.size_bytes, turns=1, reduces=True),)


def ring_all_gather(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Each part goes once round the ring."""
    return (_ring(members, communication.size_bytes, turns=1),)


def ring_all_to_all(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Every message is passed on by the neighbours between: n(n-1)/2 steps of an n-th of the size."""
    n = members.count
    steps = n * (n - 1) / 2
    return (Stage(ring_hops(members, 1), steps / n * communication.size_bytes, steps=steps),)


def store_and_forward(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Ring of unequal parts, each passed on once it has come whole: in step r, member i sends the part of member i-r.

    What gsreal's ring of point-to-point messages does; a reduce-scatter is the same, backwards. Without parts they are
    equal, and all steps are one stage.
    """
    n = members.count
    backwards = communication.carried_kind == "reduce-scatter-v"
    if not communication.part_bytes:
        return (_ring(members, communication.size_bytes, turns=1, reduces=backwards),)
    parts = np.array(communication.part_bytes, dtype=float)
    positions = np.arange(n)
    stages = []
    for step in range(n - 1):
        sent = parts[(positions + step + 1 if backwards else positions - step) % n]
        senders = np.flatnonzero(sent)
        targets = (senders + (-1 if backwards else 1)) % n
        hops = Hops(members.ranks[senders], members.ranks[targets], sent[senders])
        stages.append(Stage(hops, 1.0, coupled=False, reduced_bytes=float(sent.max()) if backwards else 0.0))
    return tuple(stages)


def pipelined_ring(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Ring of unequal parts in small pieces: every link carries all parts but its receiver's (D.1, v-variants)."""
    parts = np.array(communication.part_bytes, dtype=float)
    n = members.count
    receivers = (np.arange(n) + 1) % n
    carried = parts.sum() - parts[receivers]
    some = np.flatnonzero(carried)
    hops = Hops(members.ranks[some], members.ranks[receivers[some]], carried[some])
    if communication.kind == "reduce-scatter-v":
        hops = Hops(hops.target, hops.source, hops.weight)
    reduced = float(carried.max()) if communication.kind == "reduce-scatter-v" else 0.0
    return (Stage(hops, 1.0, steps=n - 1, reduced_bytes=reduced),)


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
    """Everybody sends to everybody what there is for them."""
    matrix = np.array(communication.pair_bytes, dtype=float)
    np.fill_diagonal(matrix, 0.0)
    source, target = np.nonzero(matrix)
    hops = Hops(members.ranks[source], members.ranks[target], matrix[source, target])
    return (Stage(hops, 1.0, coupled=len(source) > SINGLE_FLOWS),)


def send(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """The first member sends to the second."""
    return (Stage(_link(members), communication.size_bytes),)


@made_once
def _link(members: Members) -> Hops:
    return Hops.of([(int(members.ranks[0]), int(members.ranks[1]), 1.0)])


def binomial(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Broadcast in which every holder sends to one more in each step; a reduce is the same, backwards."""
    stages = [Stage(hops, communication.size_bytes) for hops in _binomial_hops(members)]
    if communication.kind != "reduce":
        return tuple(stages)
    size = communication.size_bytes
    backwards = [Stage(hops, size, reduced_bytes=size) for hops in _backwards(members)]
    return tuple(backwards)


@made_once
def _binomial_hops(members: Members) -> tuple[Hops, ...]:
    found, reach = [], 1
    while reach < members.count:
        senders = np.arange(min(reach, members.count - reach))
        found.append(Hops(members.ranks[senders], members.ranks[senders + reach], np.ones(len(senders))))
        reach *= 2
    return tuple(found)


@made_once
def _backwards(members: Members) -> tuple[Hops, ...]:
    return tuple(Hops(hops.target, hops.source, hops.weight) for hops in reversed(_binomial_hops(members)))


def chain(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Broadcast (or reduce) along all members in chunks: each passes on what it has while more comes.

    t = (n - 2 + k) * (latency + chunk / bandwidth), of k chunks (D.1, pipelined broadcast).
    """
    n, size = members.count, communication.size_bytes
    chunks = max(1, math.ceil(size / CHUNK_BYTES))
    steps = n - 2 + chunks
    backwards = communication.kind == "reduce"
    reduced = size if backwards else 0.0
    stretch = steps / chunks
    return (Stage(_chain_hops(members, backwards), size, steps=steps, stretch_ratio=stretch, reduced_bytes=reduced),)


@made_once
def _chain_hops(members: Members, backwards: bool) -> Hops:
    first, second = members.ranks[:-1], members.ranks[1:]
    source, target = (second, first) if backwards else (first, second)
    return Hops(source, target, np.ones(len(first)))


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


def double_tree(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """All-reduce up and down two binary trees at once, each with half: who is inside one tree is a leaf of the other.

    Source: Sanders, Speck, Traff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; within
    a host the devices form a chain to the one that is in the tree, another one in each ring of rails, as in NCCL.
    """
    hops, depth = _tree_hops(members)
    size = communication.size_bytes
    return (Stage(hops, size, steps=2 * depth, reduced_bytes=2 * size),)


def _parents(n: int) -> list[int]:
    """Return the parent of each node of a binary tree whose odd nodes are leaves; -1 at the root, node 0."""
    found = [-1]
    for node in range(1, n):
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        found.append(up if up < n else node ^ bit)
    return found


def tree_depth(n: int) -> int:
    """Return how many hops the farthest node of the binary tree over n nodes is from its root.

    >>> tree_depth(8), tree_depth(5), tree_depth(1)
    (3, 3, 0)
    """
    return math.ceil(math.log2(n)) if n > 1 else 0


@made_once
def _tree_hops(members: Members) -> tuple[Hops, int]:
    starts, sizes = members.blocks
    hosts = len(starts)
    parents = _parents(hosts)
    mirrored = [hosts - 1 - i if hosts % 2 == 0 else (i + 1) % hosts for i in range(hosts)]
    back = [mirrored.index(i) for i in range(hosts)] if hosts < 64 else list(np.argsort(mirrored))
    edges = [(i, up) for i, up in enumerate(parents) if up >= 0]
    edges += [(int(back[i]), int(back[up])) for i, up in edges]
    rails = int(sizes.max()) if members.multirail and hosts > 1 else 1
    pairs: list[tuple[int, int, float]] = []
    for rail in range(rails):
        heads = [int(start + rail % size) for start, size in zip(starts, sizes, strict=True)]
        pairs += [(heads[i], heads[up], 0.5 / rails) for i, up in edges]
        for start, size, head in zip(starts, sizes, heads, strict=True):
            order = [int(start + (head - start + j) % size) for j in range(size)]
            pairs += [(order[j + 1], order[j], 1 / rails) for j in range(size - 1)]
    upwards = Hops.of([(int(members.ranks[a]), int(members.ranks[b]), w) for a, b, w in pairs])
    both = Hops(
        np.r_[upwards.source, upwards.target], np.r_[upwards.target, upwards.source], np.tile(upwards.weight, 2)
    )
    return both, tree_depth(hosts) + int(sizes.max()) - 1


def hierarchical(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Reduce-scatter inside every host, all-reduce of each part between hosts, all-gather inside (D.1)."""
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


@made_once
def _levels(members: Members) -> tuple[Hops, Hops]:
    """Return a ring inside every host, and a ring over the hosts for each place inside them."""
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
    """Dimension by dimension, round rings in both directions at once, each with half (Jouppi et al. 2020)."""
    return _by_dimension(members, communication, both=True)


def one_way_torus(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """Dimension by dimension, round rings in one direction."""
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


@made_once
def _dimension_hops(members: Members, both: bool) -> tuple[tuple[int, Hops], ...]:
    if math.prod(members.shape) != members.count:
        raise ValueError("a torus algorithm needs a group that fills a torus")
    grid = np.arange(members.count).reshape(members.shape)
    found = []
    for axis, size in enumerate(members.shape):
        if size == 1:
            continue
        ahead, behind = np.roll(grid, -1, axis=axis).ravel(), np.roll(grid, 1, axis=axis).ravel()
        targets = (ahead, behind) if both else (ahead,)
        source = members.ranks[np.tile(grid.ravel(), len(targets))]
        target = members.ranks[np.concatenate(targets)]
        found.append((size, Hops(source, target, np.full(len(source), 1 / len(targets)))))
    return tuple(found)


def in_switch(members: Members, communication: Communication) -> tuple[Stage, ...]:
    """All-reduce inside the switch (NVLink SHARP): every device sends its tensor up, and its part of the sum to all."""
    return (Stage(ring_hops(members, 1), (1 + 1 / members.count) * communication.size_bytes, steps=2),)


ALGORITHMS: dict[tuple[str, str], Algorithm] = {
    ("ring", "all-reduce"): ring_all_reduce,
    ("ring", "reduce-scatter"): ring_reduce_scatter,
    ("ring", "all-gather"): ring_all_gather,
    ("ring", "all-to-all"): ring_all_to_all,
    ("ring", "all-gather-v"): store_and_forward,
    ("ring", "reduce-scatter-v"): store_and_forward,
    ("pipelined-ring", "all-gather-v"): pipelined_ring,
    ("pipelined-ring", "reduce-scatter-v"): pipelined_ring,
    ("ring-all-reduce", "reduce-scatter"): ring_all_reduce,
    ("direct", "all-reduce"): direct,
    ("direct", "reduce-scatter"): direct,
    ("direct", "all-gather"): direct,
    ("direct", "all-to-all"): direct,
    ("direct", "all-to-all-v"): direct_uneven,
    ("direct", "send"): send,
    ("binomial", "broadcast"): binomial,
    ("binomial", "reduce"): binomial,
    ("chain", "broadcast"): chain,
    ("chain", "reduce"): chain,
    ("halving-doubling", "all-reduce"): halving_doubling,
    ("halving-doubling", "reduce-scatter"): halving_doubling,
    ("halving-doubling", "all-gather"): halving_doubling,
    ("double-tree", "all-reduce"): double_tree,
    ("in-switch", "all-reduce"): in_switch,
    ("hierarchical", "all-reduce"): hierarchical,
    ("hierarchical", "reduce-scatter"): hierarchical,
    ("hierarchical", "all-gather"): hierarchical,
    ("torus", "all-reduce"): torus,
    ("torus", "reduce-scatter"): torus,
    ("torus", "all-gather"): torus,
    ("one-way-torus", "all-reduce"): one_way_torus,
    ("one-way-torus", "reduce-scatter"): one_way_torus,
    ("one-way-torus", "all-gather"): one_way_torus,
}
"""By (algorithm, kind)."""


def algorithms_for(kind: str) -> Sequence[str]:
    """Return the names of the algorithms that there are for a kind."""
    return [name for name, each in ALGORITHMS if each == kind]


def carried_by_rank(hops: Hops, ranks: int) -> tuple[Floats, Floats]:
    """Return what each rank sends and receives for each byte of the size."""
    sent = summed(hops.source, hops.weight, ranks)
    return sent, summed(hops.target, hops.weight, ranks)
