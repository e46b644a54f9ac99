"""Loads of links by an exchange among all members of a group, computed by blocks of the network instead of by pairs.

[Note: blocks] A block is a maximal part of the wiring that stays connected if any one of its nodes is removed (a
biconnected component). Two blocks share at most one node, and all paths from one to the other cross it. So a path with
the fewest links, or with the least latency, consists of such paths through blocks. What it loads inside a block depends
only on the nodes by which it enters and leaves, the block's ports. A server whose ports all lead to one switch is a
block, and so are the switches among themselves. The work then grows with the pairs of ports of each block instead of
the pairs of members. A torus, or servers whose ports lead to different switches, form one block whose ports are the
members.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gssim.cluster.topology import Wiring
from gssim.collectives import summed
from gssim.errors import UserError
from gssim.network import bundles
from gssim.network.bundles import Steps, adjacency, runs, searched
from gssim.units import Bools, Floats, Ints, distinct, kinds_of_rows


def biconnected_components(beside: Mapping[int, Iterable[int]]) -> Iterator[list[int]]:
    """Yield the nodes of each biconnected component with at least two nodes, found by depth-first search (Hopcroft,
    Tarjan 1973); a component comes after those that the search reaches through it.

    `beside`: the neighbours of every node.

    >>> [sorted(nodes) for nodes in biconnected_components({0: [1], 1: [0, 2, 3], 2: [1, 3], 3: [1, 2]})]
    [[1, 2, 3], [0, 1]]
    """
    number: dict[int, int] = {}
    """Order of discovery."""
    lowest: dict[int, int] = {}
    """Lowest number next to a node, or to those reached through it."""
    for root in beside:
        if root in number:
            continue
        number[root] = lowest[root] = len(number)
        path, open_nodes = [(root, iter(beside[root]), 0)], [root]
        while path:
            node, others, place = path[-1]
            for other in others:
                if other not in number:
                    number[other] = lowest[other] = len(number)
                    path.append((other, iter(beside[other]), len(open_nodes)))
                    open_nodes.append(other)
                    break
                lowest[node] = min(lowest[node], number[other])
            else:
                path.pop()
                if path:
                    before = path[-1][0]
                    lowest[before] = min(lowest[before], lowest[node])
                    if lowest[node] >= number[before]:
                        yield [before, *open_nodes[place:]]
                        del open_nodes[place:]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a wiring as trees: every node that is not a root is a port of one block above it.

    Ports are numbered: first the port of each node to the block above it, by node, then the upper port of every block.
    """

    above: Ints
    """Block above each node; -1: none."""
    upper: Ints
    """Upper node of each block."""

    @classmethod
    def of(cls, wiring: Wiring) -> "Blocks":
        """Return the trees of blocks of a wiring, each with an uppermost switch as its root."""
        # the first root is an uppermost switch, from which equal servers are equally far
        beside: dict[int, dict[int, None]] = {wiring.nodes - 1: {}}
        for source, target in zip(wiring.source.tolist(), wiring.target.tolist(), strict=True):
            beside.setdefault(source, {})[target] = None
            beside.setdefault(target, {})[source] = None
        found = [np.array(nodes, np.int64) for nodes in biconnected_components(beside)]
        sizes = np.array([len(nodes) for nodes in found], np.int64)
        node, block = np.concatenate([np.zeros(0, np.int64), *found]), np.repeat(np.arange(len(found)), sizes)
        above = np.full(wiring.nodes, -1)
        np.maximum.at(above, node, block)  # blocks are numbered so that a block comes after those below it
        upper = np.full(len(found), -1)
        is_upper = above[node] != block
        upper[block[is_upper]] = node[is_upper]
        for last in np.flatnonzero(upper < 0).tolist():  # the last block of each tree; any of its nodes may be the root
            upper[last] = found[last].max()
            above[upper[last]] = -1
        return cls(above, upper)

    @property
    def ports(self) -> int:
        """Number of ports."""
        return len(self.above) + len(self.upper)

    @cached_property
    def depth(self) -> Ints:
        """Depth of each block in its tree: the number of blocks between it and the root."""
        parents, depth = self.above[self.upper].tolist(), [0] * len(self.upper)
        for block in reversed(range(len(depth))):  # a block is found after those below it
            if parents[block] >= 0:
                depth[block] = depth[parents[block]] + 1
        return np.array(depth, np.int64)

    @cached_property
    def block(self) -> Ints:
        """Index of each port's block."""
        return np.concatenate([self.above, np.arange(len(self.upper))])

    def of_links(self, wiring: Wiring) -> Ints:
        """Return the index of the block that each link is in, in the order of `wiring`'s links."""
        source, target = self.above[wiring.source], self.above[wiring.target]
        return np.asarray(np.where((source == target) | (self.upper[target] == wiring.source), target, source))

    def port(self, node: Ints, block: Ints) -> Ints:
        """Return the ports of blocks at their nodes."""
        return np.asarray(np.where(self.above[node] == block, node, len(self.above) + block))


@dataclass(frozen=True, eq=False)
class Columns:
    """Loads of links by an exchange, linear in the bytes for its members. For each kind of sender, a matrix links x
    ports.

    Bytes sent to a port go to the members behind it: those on the other side of its node, or the node itself.
    """

    loads: tuple[Any, ...]
    """Sparse matrix for each kind of sender: load of each link if every sender of the kind sends one byte to a port."""
    latency_s: Floats
    """By kind and port: the latency within the port's block, summed over the kind's senders."""
    members: Any
    """Sparse matrix of ports by members, with ones for members behind a port (or, for some ports, for all others)."""
    is_all_but: Bools
    """For each port, whether its row in `members` marks all members but those behind it."""
    most_latency_s: float
    """An upper bound of the latency between any two members."""

    def carried(self, rows: Floats) -> Floats:
        """Return the load of every link, given the bytes of each kind of sender for every member."""
        to_ports = self._to_ports(rows)
        return np.asarray(sum(load @ column for load, column in zip(self.loads, to_ports, strict=True)))

    def latency_in_all_s(self, rows: Floats) -> float:
        """Return the sum over all pairs of members of bytes times latency."""
        return float((self._to_ports(rows) * self.latency_s).sum())

    def _to_ports(self, rows: Floats) -> Floats:
        """Return the bytes of each kind of sender for the members behind every port."""
        return _behind(self.members, self.is_all_but, rows)

    @property
    def elements(self) -> int:
        """Size in the cache, in elements."""
        entries = int(sum(load.nnz for load in self.loads) + self.members.nnz)
        return entries // 3  # an element of the cache counts as about 50 bytes


def _behind(members: Any, is_all_but: Bools, rows: Floats) -> Floats:
    """Return the sums of each row's values (by member) over the members behind every port."""
    sums, counts = (members @ rows.T).T, (members @ (rows != 0).astype(float).T).T
    others = rows.sum(axis=1, keepdims=True) - sums
    others[counts == np.count_nonzero(rows, axis=1)[:, None]] = 0.0  # exactly 0, without rounding errors
    return np.asarray(np.where(is_all_but, others, sums))


def columns_of(wiring: Wiring, blocks: Blocks, ranks: Ints, kind_of: Ints, kinds: int) -> Columns:
    """Return the loads of links by an exchange among ranks, per byte of its senders; senders fall into `kinds` kinds.

    Raises UserError if no path leads from one member to another.
    """
    from scipy.sparse import coo_array  # lazy: only large exchanges need it

    ports, members, is_all_but = _members_behind(wiring, blocks, ranks)
    depth = blocks.depth[blocks.block[ports]]
    senders = _behind(members, is_all_but, (kind_of == np.arange(kinds)[:, None]).astype(float))
    latency_s, most_s = np.zeros((kinds, len(ports))), np.zeros(int(depth.max(initial=0)) + 1)
    entries: list[list[tuple[Ints, Ints, Floats]]] = [[] for _ in range(kinds)]
    for crossing in _crossings(wiring, blocks, ports):
        unreached = np.flatnonzero(np.isinf(crossing.took_s))
        if len(unreached):
            ends = (crossing.source[unreached[0]], crossing.target[unreached[0]])
            behind = [(members[[end]].toarray()[0] > 0) != is_all_but[end] for end in ends]
            raise _unconnected(wiring, *(ranks[np.flatnonzero(each)[0]] for each in behind))
        np.maximum.at(most_s, depth[crossing.target], crossing.took_s)
        for kind in range(kinds):
            sent = senders[kind, crossing.source]
            latency_s[kind] += summed(crossing.target, sent * crossing.took_s, len(ports))
            entries[kind].append(crossing.loads(sent))
    loads = []
    for parts in entries:
        link, column, load = (np.concatenate(column) for column in zip(*parts, strict=True))
        loads.append(coo_array((load, (link, column)), shape=(wiring.links, len(ports))).tocsr())
    return Columns(tuple(loads), latency_s, members, is_all_but, float(most_s[0] + 2 * most_s[1:].sum()))


def latencies_beyond_s(
    wiring: Wiring,
    blocks: Blocks,
    ranks: Ints,
    kind_of: Ints,
    kinds: int,
    floor_s: float,
    latency_of: Callable[[Ints, Ints], Floats],
) -> Floats:
    """Return by how much the latencies of paths exceed a floor: for every member, sums over the senders of each kind.

    `latency_of`: function that returns the latencies of paths between pairs of nodes. Take members that are alone
    behind their ports, in blocks that have only such ports. If their distances to and from the same upper node agree,
    they are equally far from all other blocks. So paths are searched only between these classes of members, and inside
    blocks.
    """
    ports, members, _ = _members_behind(wiring, blocks, ranks)
    is_lower, member_at = ports < len(blocks.above), np.full(blocks.ports, -1)
    member_at[ranks] = np.arange(len(ranks))
    own, block = member_at[ports], blocks.block[ports]
    has_others = np.zeros(len(blocks.upper), dtype=bool)  # whether other members are behind a block's members
    has_others[block[is_lower & ((own < 0) | (np.diff(members.indptr) > 1))]] = True
    is_simple = is_lower & ~has_others[block]
    place = np.column_stack([-1.0 - np.arange(len(ranks)), np.zeros((len(ranks), 2))])
    """By member: the upper node, and the latency to and from it. Members without a class have a number of their own."""
    place[own[is_simple], 0] = blocks.upper[block[is_simple]]
    for crossing in _crossings(wiring, blocks, ports):
        for ends, others, column in ((crossing.source, crossing.target, 1), (crossing.target, crossing.source, 2)):
            inside = is_simple[ends] & ~is_lower[others]
            place[own[ends[inside]], column] = crossing.took_s[inside]
    class_of, first = kinds_of_rows(place)
    classes = place[first]
    some = np.arange(len(first))
    source, target = np.nonzero(some[:, None] != some)
    latency_s = np.zeros((len(first), len(first)))
    latency_s[source, target] = latency_of(ranks[first[source]], ranks[first[target]])
    same = (classes[:, :1] == classes[:, 0]) & (classes[:, 0] >= 0)
    latency_s = np.where(same, classes[:, 1:2] + classes[:, 2], latency_s)
    beyond_s = np.maximum(0.0, latency_s - floor_s)
    senders = summed(kind_of * len(first) + class_of, np.ones(len(ranks)), kinds * len(first)).reshape(kinds, -1)
    sums_s: Floats = (senders @ beyond_s)[:, class_of]
    simple = own[is_simple]
    sums_s[kind_of[simple], simple] -= beyond_s[class_of[simple], class_of[simple]]
    for crossing in _crossings(wiring, blocks, ports):  # between two members of a block, the path inside it counts
        inside = is_simple[crossing.source] & is_simple[crossing.target]
        sender, receiver = own[crossing.source[inside]], own[crossing.target[inside]]
        apart_s = np.maximum(0.0, crossing.took_s[inside] - floor_s) - beyond_s[class_of[sender], class_of[receiver]]
        np.add.at(sums_s, (kind_of[sender], receiver), apart_s)
    return sums_s


def _unconnected(wiring: Wiring, source: int, target: int) -> UserError:
    ends = f"from {wiring.names[source]} to {wiring.names[target]}"
    return UserError(f"cluster.links: there is no path of links {ends}")


def _members_behind(wiring: Wiring, blocks: Blocks, ranks: Ints) -> tuple[Ints, Any, Bools]:
    """Return the ports that separate members, by block, and the members behind each of them; see `Columns`."""
    from scipy.sparse import coo_array, vstack

    node, member, root = ranks, np.arange(len(ranks)), ranks.copy()
    rows, columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while len(member):
        root[member] = node
        has_above = blocks.above[node] >= 0
        node, member = node[has_above], member[has_above]
        block = blocks.above[node]
        rows += [node, len(blocks.above) + block]
        columns += [member, member]
        node = blocks.upper[block]
    others = np.flatnonzero(root != root[0])
    if len(others):
        raise _unconnected(wiring, ranks[0], ranks[others[0]])
    row, column = np.concatenate(rows), np.concatenate(columns)
    below = coo_array((np.ones(len(row)), (row, column)), shape=(blocks.ports, len(ranks))).tocsr()
    counts = np.diff(below.indptr)
    ports = np.flatnonzero((counts > 0) & ((np.arange(blocks.ports) < len(blocks.above)) | (counts < len(ranks))))
    ports = ports[np.argsort(blocks.block[ports], kind="stable")]
    is_upper, below = ports >= len(blocks.above), below[ports]
    # for few members, the difference from the sum over all members would lose digits
    few = np.flatnonzero(is_upper & (2 * counts[ports] > len(ranks)))
    if len(few):
        place = np.arange(len(ports))
        place[few] = len(ports) + np.arange(len(few))
        elsewhere: Any = coo_array(1.0 - below[few].toarray())
        below = vstack([below, elsewhere]).tocsr()[place]
        is_upper[few] = False
    return ports, below, is_upper


@dataclass(frozen=True, eq=False)
class _Crossings:
    """The best paths through some blocks, from all of their ports to some of them, the targets.

    A place is numbered port * width + number of the target.
    """

    source: Ints
    """Position of the port where each path begins."""
    target: Ints
    """Position of the port where it ends."""
    took_s: Floats
    at: Ints
    """Place where each path begins."""
    places: int
    levels: tuple[tuple[Steps, Floats], ...]
    """Steps, ordered by distance from the targets, and the fraction of a place's flow that takes each step."""
    links: Ints
    """For each link in the steps, the wiring's link."""
    first: Ints
    """For each port, the position of the first target in its block."""

    def loads(self, sent: Floats) -> tuple[Ints, Ints, Floats]:
        """Return (link, target, load) if `sent` bytes are sent over each path."""
        width = self.places // len(self.first)
        flow = summed(self.at, sent, self.places)
        links, targets, loads = [], [], []
        for steps, share in reversed(self.levels):
            through = flow[steps.here] * share
            used = np.flatnonzero(through)
            links.append(self.links[steps.link[used]])
            targets.append(self.first[steps.here[used] // width] + steps.here[used] % width)
            loads.append(through[used])
            flow += summed(steps.there, through, self.places)
        return np.concatenate(links), np.concatenate(targets), np.concatenate(loads)


def _crossings(wiring: Wiring, blocks: Blocks, used: Ints) -> Iterator[_Crossings]:
    """Yield the best paths between the `used` ports of every block; blocks of similar size are computed together."""
    block_of_link = blocks.of_links(wiring)
    ends = tuple(blocks.port(end, block_of_link) for end in (wiring.source, wiring.target))
    block, first, counts = np.unique(blocks.block[used], return_index=True, return_counts=True)
    sizes = np.ceil(np.log2(np.minimum(counts, bundles.TARGETS_AT_ONCE)))  # 0: a block with one port
    for size in distinct(sizes[sizes > 0]):
        for start in range(0, int(counts[sizes == size].max()), bundles.TARGETS_AT_ONCE):
            some = np.flatnonzero((sizes == size) & (counts > start))
            width = min(bundles.TARGETS_AT_ONCE, int(counts[some].max()) - start)
            place_of = np.full(len(blocks.upper) + 1, -1)  # the last entry is for nodes without a block above
            place_of[block[some]] = np.arange(len(some))
            ports = np.flatnonzero(place_of[blocks.block] >= 0)
            number = np.full(blocks.ports, -1)
            number[ports] = np.arange(len(ports))
            links = np.flatnonzero(place_of[block_of_link] >= 0)
            source, target = (number[end[links]] for end in ends)
            here, lengths = first[some], counts[some]
            widths = np.minimum(lengths - start, width)
            targets, slots = runs(here + start, widths), runs(np.zeros(len(some), np.int64), widths)
            front = number[used[targets]] * width + slots
            others = np.repeat(lengths, widths)
            begins, onto = runs(np.repeat(here, widths), others), np.repeat(np.arange(len(targets)), others)
            apart = begins != targets[onto]
            begins, onto = begins[apart], onto[apart]
            at = number[used[begins]] * width + slots[onto]
            places = len(ports) * width
            levels, paths, took_s = searched(
                source, wiring.latency_s[links], adjacency(target, len(ports)), front, width, places, at
            )
            shares = (paths[steps.there] / paths[steps.here] for steps in levels)
            yield _Crossings(
                begins,
                targets[onto],
                took_s[at],
                at,
                places,
                tuple(zip(levels, shares, strict=True)),
                links,
                here[place_of[blocks.block[ports]]] + start,
            )
