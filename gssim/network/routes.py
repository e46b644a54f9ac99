"""Which links a message takes: the paths of fewest links, of those the ones of least latency, shared equally.

Where queues stand in a network, and whether small messages must pass them.

[Note: queues] A sender's own port holds back what its link does not take at once, and lets small messages through (the
kernel's limits on what a connection may queue). A slower link farther on has no such means: all that the sender's fast
port lets out waits in the switch before it, in the order in which it came. A receiver's notice that goes the same way
waits for the data ahead of it, where a notice that goes from switch to switch on idle links takes no time to speak of.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gssim.cache import MOST_LARGE, Recent, Same
from gssim.cluster.topology import Wiring
from gssim.collectives import Exchange, Hops, summed
from gssim.errors import UserError
from gssim.network.bundles import (
    Adjacency,
    Bundle,
    Columns,
    adjacency,
    carried,
    columns_of,
    is_worthwhile,
    paths_of,
    runs,
)
from gssim.units import Bools, Floats, Ints, distinct


@dataclass(frozen=True, eq=False)
class Incidence:
    """Parts of flows on links: entry e says that a `share` of flow `flow[e]` crosses link `link[e]`; sorted by flow."""

    flow: Ints
    link: Ints
    share: Floats
    latency_s: Floats
    """Of each flow's path, a mean over equal paths."""


@dataclass(frozen=True, eq=False)
class _Level:
    """Where searches stand after some links: by pair and node, how many best paths lead there, at which latency."""

    key: Ints
    """pair * nodes + node, sorted."""
    paths: Floats
    latency_s: Floats
    parent: Ints
    """Of each step taken to get here: position in the level before."""
    child: Ints
    """Position here."""
    link: Ints


PAIRS_AT_ONCE = 2**16
"""Pairs whose paths are searched together: what a search holds grows with them."""


class Router:
    """Routes over a wiring, found for many pairs at once by searching from both ends."""

    def __init__(self, wiring: Wiring, kept: Recent | None = None) -> None:
        self.wiring, self.kept = wiring, kept or Recent(MOST_LARGE)
        self.nodes = len(wiring.names)
        self._out = adjacency(wiring.source, self.nodes)
        self._into = adjacency(wiring.target, self.nodes)
        links = (wiring.source, wiring.target, wiring.latency_s)
        self.ways = (self.nodes, hashlib.sha256(b"".join(each.tobytes() for each in links)).digest())
        """What routes hang on: equal where others differ in bandwidths alone."""

    @cached_property
    def equal_rates(self) -> bytes:
        """Which links are as fast as which others."""
        found = np.unique(self.wiring.bandwidth_bytes_per_s, return_inverse=True)[1]
        return hashlib.sha256(np.ascontiguousarray(found).tobytes()).digest()

    def of(self, hops: Hops) -> Incidence:
        """Return the links of all hops, found once for hops between the same ends."""
        key = ("hops", self.ways, Same(hops))
        return self.kept.once(key, lambda: self._between(hops), weight=lambda _: len(hops.source))

    def _between(self, hops: Hops) -> Incidence:
        key = ("ends", self.ways, hops.source.tobytes(), hops.target.tobytes())
        return self.kept.once(
            key, lambda: self.incidence(hops.source, hops.target), weight=lambda found: len(found.flow)
        )

    def bundle(self, hops: Hops) -> Bundle:
        """Return what links carry of hops that keep pace, found in whichever way is less work."""
        key = ("bundle", self.ways, Same(hops))
        return self.kept.once(key, lambda: self._bundle(hops), weight=lambda found: len(found.load))

    def _columns(self, exchange: Exchange) -> Columns:
        key = ("columns", self.ways, Same(exchange.every), exchange.kinds.tobytes())
        return self.kept.once(
            key, lambda: columns_of(self.wiring, self._into, exchange), weight=lambda found: found.elements
        )

    def latency_beyond_s(self, hops: Hops, floor_s: float) -> float:
        """Return by how much paths' latencies exceed a floor, the mean over what goes over them."""
        if not isinstance(hops, Exchange):
            beyond_s = np.maximum(0.0, self.bundle(hops).latency_s - floor_s)
            return float(np.average(beyond_s, weights=hops.weight)) if beyond_s.any() else 0.0
        key = ("latencies", self.ways, Same(hops.every), hops.kinds.tobytes(), floor_s)

        def found() -> Floats:
            beyond_s = np.maximum(0.0, self._columns(hops).latency_s - floor_s)
            np.fill_diagonal(beyond_s, 0.0)
            return np.array([beyond_s[hops.kinds == kind].sum(axis=0) for kind in range(len(hops.rows))])

        by_kind = self.kept.once(key, found, weight=lambda found: found.size)
        return hops.weighted(by_kind) / hops.weight_in_all

    def _bundle(self, hops: Hops) -> Bundle:
        if isinstance(hops, Exchange):
            load = self._columns(hops).carried(hops.rows)
            used = np.flatnonzero(load)
            return Bundle(np.zeros(len(used), np.int64), used, load[used], np.zeros(0))
        if not is_worthwhile(self.wiring, hops):
            return self._summed(hops)
        ends = (Same(hops.source), Same(hops.target), Same(hops.group))  # exchanges of other proportions have them too
        key = ("paths", self.ways, *ends)
        most = MOST_LARGE // 2  # however many steps there are, the hops themselves stay
        paths = self.kept.once(
            key, lambda: paths_of(self.wiring, self._into, hops), weight=lambda found: min(found.steps, most)
        )
        return carried(self.wiring, paths, hops.weight)

    def _summed(self, hops: Hops) -> Bundle:
        """Return the same from every hop's own path."""
        on, links = self.of(hops), self.wiring.links
        group = np.zeros(len(hops.source), np.int64) if hops.group is None else hops.group
        place, entry = np.unique(group[on.flow] * links + on.link, return_inverse=True)
        loads = summed(entry, on.share * hops.weight[on.flow], len(place))
        some = np.flatnonzero(loads)
        return Bundle(place[some] // links, place[some] % links, loads[some], on.latency_s)

    def rate_bytes_per_s(self, hops: Hops, weight: Floats) -> float:
        """Return at which rate a hop of weight 1 would go if all kept pace, alone on their links (0: left out)."""
        on = self.of(hops)
        load = summed(on.link, on.share * weight[on.flow], self.wiring.links)
        busy = np.flatnonzero(load)
        return float((self.wiring.bandwidth_bytes_per_s[busy] / load[busy]).min()) if len(busy) else math.inf

    def incidence(self, source: Ints, target: Ints) -> Incidence:
        """Return the links of every pair's paths; pairs that are listed twice are searched once.

        Raises UserError where no path leads from one end to the other.
        """
        keys, inverse = np.unique(source * self.nodes + target, return_inverse=True)
        parts = [keys[start : start + PAIRS_AT_ONCE] for start in range(0, max(1, len(keys)), PAIRS_AT_ONCE)]
        found = _joined([self._search(part // self.nodes, part % self.nodes) for part in parts])
        if len(keys) == len(source) and np.array_equal(inverse, np.arange(len(keys))):
            return found
        starts = np.searchsorted(found.flow, np.arange(len(keys) + 1))
        lengths = np.diff(starts)[inverse]
        flow = np.repeat(np.arange(len(source)), lengths)
        entry = runs(starts[:-1][inverse], lengths)
        return Incidence(flow, found.link[entry], found.share[entry], found.latency_s[inverse])

    def _search(self, source: Ints, target: Ints) -> Incidence:
        """Return the incidence of distinct pairs."""
        pairs = np.arange(len(source))
        ahead = [_start(pairs * self.nodes + source)]
        back = [_start(pairs * self.nodes + target)]
        latency_s = np.zeros(len(source))
        entries: list[tuple[Ints, Ints, Floats]] = []
        waiting = source != target
        for turn in range(2 * self.nodes):
            if not waiting.any():
                break
            if turn % 2 == 0:
                ahead.append(self._expand(ahead, waiting, self._out, self.wiring.target))
            else:
                back.append(self._expand(back, waiting, self._into, self.wiring.source))
            if not len(ahead[-1].key) or not len(back[-1].key):
                break
            met = _meet(ahead[-1], back[-1], self.nodes, len(source))
            if met is not None:
                waiting[met.pair] = False
                latency_s[met.pair] = met.latency_s
                entries.append(_trace(ahead, met.ahead, met.paths_on, met.total, self.nodes))
                entries.append(_trace(back, met.back, met.paths_back, met.total, self.nodes))
        if waiting.any():
            self._unreachable(source, target, int(np.flatnonzero(waiting)[0]))
        return _collected(entries, latency_s)

    def _unreachable(self, source: Ints, target: Ints, pair: int) -> None:
        names = self.wiring.names
        raise UserError(f"cluster.links: there is no path of links from {names[source[pair]]} to {names[target[pair]]}")

    def _expand(self, levels: list[_Level], waiting: NDArray[np.bool_], edges: Adjacency, ends: Ints) -> _Level:
        """Return the level that is one link farther, for the pairs that still wait."""
        level = levels[-1]
        alive = np.flatnonzero(waiting[level.key // self.nodes])
        node, pair = level.key[alive] % self.nodes, level.key[alive] // self.nodes
        link, degree = edges.of(node)
        parent = np.repeat(alive, degree)
        key = np.repeat(pair, degree) * self.nodes + ends[link]
        if len(levels) > 1:  # never back to where it came from
            new = ~_contains(levels[-2].key, key)
            parent, link, key = parent[new], link[new], key[new]
        return _merged(key, level, parent, link, self.wiring.latency_s)


def _joined(parts: list[Incidence]) -> Incidence:
    """Return the incidence of flows numbered on from part to part."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.latency_s) for part in parts)])
    return Incidence(
        np.concatenate([part.flow + start for part, start in zip(parts, starts, strict=False)]),
        np.concatenate([part.link for part in parts]),
        np.concatenate([part.share for part in parts]),
        np.concatenate([part.latency_s for part in parts]),
    )


def _start(key: Ints) -> _Level:
    none = np.zeros(0, np.int64)
    return _Level(key, np.ones(len(key)), np.zeros(len(key)), none, none, none)


def _contains(held: Ints, wanted: Ints) -> NDArray[np.bool_]:
    """Return which of `wanted` are in `held`, which is sorted."""
    if not len(held):
        return np.zeros(len(wanted), dtype=bool)
    place = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
    return np.asarray(held[place] == wanted)


def _merged(key: Ints, before: _Level, parent: Ints, link: Ints, link_latency_s: Floats) -> _Level:
    """Return steps that lead to the same place taken together; only those of least latency are kept."""
    reached, child = np.unique(key, return_inverse=True)
    took_s = before.latency_s[parent] + link_latency_s[link]
    best_s = np.full(len(reached), np.inf)
    np.minimum.at(best_s, child, took_s)
    kept = took_s <= best_s[child] * (1 + 1e-12) + 1e-18
    parent, child, link = parent[kept], child[kept], link[kept]
    paths = summed(child, before.paths[parent], len(reached))
    return _Level(reached, paths, best_s, parent, child, link)


@dataclass(frozen=True, eq=False)
class _Meeting:
    """Pairs whose two searches met: where, at which latency, over how many paths."""

    pair: Ints
    latency_s: Floats
    ahead: Ints
    """Positions in the level ahead."""
    back: Ints
    paths_on: Floats
    """Paths from there to the target."""
    paths_back: Floats
    total: Floats
    """Paths by pair, of all pairs."""


def _meet(ahead: _Level, back: _Level, nodes: int, pairs: int) -> _Meeting | None:
    common, a, b = np.intersect1d(ahead.key, back.key, assume_unique=True, return_indices=True)
    if not len(common):
        return None
    pair = common // nodes
    took_s = ahead.latency_s[a] + back.latency_s[b]
    best_s = np.full(pairs, np.inf)
    np.minimum.at(best_s, pair, took_s)
    kept = took_s <= best_s[pair] * (1 + 1e-12) + 1e-18
    a, b, pair = a[kept], b[kept], pair[kept]
    total = summed(pair, ahead.paths[a] * back.paths[b], pairs)
    done = distinct(pair)
    return _Meeting(done, best_s[done], a, b, back.paths[b], ahead.paths[a], total)


def _trace(levels: list[_Level], at: Ints, paths_on: Floats, total: Floats, nodes: int) -> tuple[Ints, Ints, Floats]:
    """Return (pair, link, share) of every step on a best path, from a meeting back to where the search began."""
    onward = np.zeros(len(levels[-1].key))
    onward[at] = paths_on
    flows, links, shares = [], [], []
    for before, level in zip(levels[-2::-1], levels[:0:-1], strict=True):
        through = before.paths[level.parent] * onward[level.child]
        used = np.flatnonzero(through)
        pair = level.key[level.child[used]] // nodes
        flows.append(pair)
        links.append(level.link[used])
        shares.append(through[used] / total[pair])
        onward = summed(level.parent, onward[level.child], len(before.key))
    return (
        np.concatenate(flows or [np.zeros(0, np.int64)]),
        np.concatenate(links or [np.zeros(0, np.int64)]),
        (np.concatenate(shares or [np.zeros(0)])),
    )


def _collected(entries: list[tuple[Ints, Ints, Floats]], latency_s: Floats) -> Incidence:
    flow = np.concatenate([np.zeros(0, np.int64), *(entry[0] for entry in entries)])
    order = np.argsort(flow, kind="stable")
    link = np.concatenate([np.zeros(0, np.int64), *(entry[1] for entry in entries)])[order]
    share = np.concatenate([np.zeros(0), *(entry[2] for entry in entries)])[order]
    return Incidence(flow[order], link, share, latency_s)


AS_BUSY = 0.99
"""Links that are as busy as the busiest, but for rounding."""


def notices_queue(router: Router, hops: Hops) -> bool:
    """Return whether notices of hops that keep pace wait in queues of what others of these hops carry.

    That is where a link holds up hops whose senders have faster ports, and the notice of another hop that is held up as
    much goes over that link too.
    """
    on = router.of(hops)
    slow = _busiest(router, hops)
    own = router.wiring.source[on.link] == hops.source[on.flow]
    held_at_port = _any(on.flow, slow[on.link] & own, hops.count)
    in_network = slow[on.link] & ~held_at_port[on.flow]
    if not in_network.any():
        return False
    held = _any(on.flow, slow[on.link], hops.count)
    back = router.of(Hops(hops.target, hops.source, hops.weight))
    queues = _any(on.link, in_network, router.wiring.links)
    return bool((queues[back.link] & held[back.flow]).any())


def _busiest(router: Router, hops: Hops) -> Bools:
    """Return of every link whether it takes longest for what the hops carry."""
    on, rates = router.of(hops), router.wiring.bandwidth_bytes_per_s
    took: Floats = summed(on.link, on.share * hops.weight[on.flow], router.wiring.links) / rates
    return np.asarray(took >= AS_BUSY * took.max(initial=0.0)) & (took > 0)


def _any(owner: Ints, marks: Bools, owners: int) -> Bools:
    """Return of every owner whether one of its entries is marked."""
    found = np.zeros(owners, dtype=bool)
    found[owner[marks]] = True
    return found
