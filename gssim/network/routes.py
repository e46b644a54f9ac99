"""Routing: paths with the fewest links, then the least latency; equal paths share traffic. And queues on slow links.

[Note: queues] A sender's own port holds back data that its link cannot transmit yet, and lets small messages pass (the
kernel's limits on a connection's queue). A slower link farther along the path cannot do so: all data that the sender's
fast port transmits waits in the switch before that link, in order of arrival. A receiver's notice on the same path
waits for the data ahead of it. On idle links, a notice takes almost no time from switch to switch.

While a port transmits a message of S bytes at rate u, the slower link behind it, of rate d, carries only S d/u of them.
So a notice waits for at most S (1 - d/u) bytes: 1 - d/u of the message's time on the slow link, which is nothing if
both are equally fast. A faster port thus makes a ring slower, by at most one message.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gssim.cluster.topology import Wiring
from gssim.collectives import Exchange, Hops, Members, summed
from gssim.errors import UserError
from gssim.execution.cache import MOST_LARGE, Recent, Same
from gssim.network.blocks import Blocks, Columns, columns_of, latencies_beyond_s
from gssim.network.bundles import (
    Adjacency,
    Bundle,
    Paths,
    adjacency,
    carried,
    is_worthwhile,
    paths_of,
    runs,
)
from gssim.units import Bools, Floats, Ints, distinct, distinct_with_places


@dataclass(frozen=True, eq=False)
class Incidence:
    """Links of flows: in entry e, a `share` of flow `flow[e]` crosses link `link[e]`; sorted by flow."""

    flow: Ints
    link: Ints
    share: Floats
    latency_s: Floats
    """Latency of each flow's path; the mean over equal paths."""

    @cached_property
    def _starts(self) -> Ints:
        """First entry of each flow, and the end of the last one's."""
        return np.searchsorted(self.flow, np.arange(len(self.latency_s) + 1))

    def of_flows(self, flows: Ints) -> "Incidence":
        """Return the incidence of some of the flows, in that order; they may be repeated."""
        starts = self._starts[flows]
        lengths = self._starts[flows + 1] - starts
        entry = runs(starts, lengths)
        flow = np.repeat(np.arange(len(flows)), lengths)
        return Incidence(flow, self.link[entry], self.share[entry], self.latency_s[flows])


@dataclass(frozen=True, eq=False)
class _Level:
    """Frontier of the searches after some links: for each pair and node, number and latency of the best paths to it."""

    key: Ints
    """pair * nodes + node, sorted."""
    paths: Floats
    latency_s: Floats
    parent: Ints
    """For each step taken to get here, its position in the previous level."""
    child: Ints
    """For each step, its position in this level."""
    link: Ints


@dataclass(frozen=True, eq=False)
class _Known:
    """Pairs whose paths have been searched, as source * nodes + target, sorted; and their paths."""

    pairs: Ints
    paths: Incidence

    def of(self, pairs: Ints) -> Incidence | None:
        """Return the paths of some pairs; None if one of them is not known."""
        places = self.places(pairs)
        return None if places is None else self.paths.of_flows(places)

    def places(self, pairs: Ints) -> Ints | None:
        """Return the places of some pairs among these; None if one of them is not known."""
        places = np.searchsorted(self.pairs, pairs)
        is_known = (places < len(self.pairs)).all() and (self.pairs[places] == pairs).all()
        return places if is_known else None

    def without(self, pairs: Ints) -> Ints:
        """Return the pairs that are not known."""
        return pairs[~np.isin(pairs, self.pairs, assume_unique=True)]

    def among(self, pairs: Ints) -> "_Known":
        """Return those of some distinct pairs that are known."""
        known = np.intersect1d(pairs, self.pairs, assume_unique=True)
        return _Known(known, self.paths.of_flows(np.searchsorted(self.pairs, known)))

    def joined(self, other: "_Known") -> "_Known":
        """Return these pairs and others, which differ from them."""
        pairs = np.concatenate([self.pairs, other.pairs])
        order = np.argsort(pairs)
        return _Known(pairs[order], _joined([self.paths, other.paths]).of_flows(order))


PAIRS_AT_ONCE = 2**16
"""Number of pairs whose paths are searched together; the search's memory is proportional to it."""
MOST_BUNDLED_AHEAD = 2**9
"""Largest number of hops in a set whose load of links is computed together with that of others."""
MOST_RECENT_PAIRS = 2**15
"""Largest number of pairs whose paths a router remembers beside those that were searched ahead."""
MOST_LATEST_PAIRS = 2**8
"""Largest number of pairs that are kept apart from the others that a router remembers, so that few new ones do not copy
them all: about the square root of their largest number."""
NONE = np.zeros(0, np.int64)


class Router:
    """Routes over a wiring, searched for many pairs at once by a bidirectional breadth-first search."""

    def __init__(self, wiring: Wiring, kept: Recent | None = None) -> None:
        self.wiring, self.kept = wiring, kept or Recent(MOST_LARGE)
        self.nodes = len(wiring.names)
        self._out = adjacency(wiring.source, self.nodes)
        self._into = adjacency(wiring.target, self.nodes)
        links = (wiring.source, wiring.target, wiring.latency_s)
        self.ways = (self.nodes, hashlib.sha256(b"".join(column.tobytes() for column in links)).digest())
        """Cache key of the routes, equal for wirings that differ only in bandwidths."""
        self._ahead = self._recent = self._latest = _Known(NONE, _collected([], np.zeros(0)))
        """Pairs that were searched ahead, those of recent searches, and the last of these."""

    @cached_property
    def equal_rates(self) -> bytes:
        """Cache key of which links are equally fast."""
        rate_class = np.unique(self.wiring.bandwidth_bytes_per_s, return_inverse=True)[1]
        return hashlib.sha256(np.ascontiguousarray(rate_class).tobytes()).digest()

    def of(self, hops: Hops) -> Incidence:
        """Return the links of all hops, cached by the hops' ends."""
        key = ("hops", self.ways, Same(hops))
        return self.kept.once(key, lambda: self._between(hops), weight=lambda _: len(hops.source))

    def _between(self, hops: Hops) -> Incidence:
        key = ("ends", self.ways, hops.source.tobytes(), hops.target.tobytes())
        return self.kept.once(
            key, lambda: self.incidence(hops.source, hops.target), weight=lambda found: len(found.flow)
        )

    def bundle(self, hops: Hops) -> Bundle:
        """Return the load of links by hops that progress together, computed by the cheaper of two methods."""
        key = ("bundle", self.ways, Same(hops))
        return self.kept.once(key, lambda: self._bundle(hops), weight=lambda found: len(found.load))

    def bundle_ahead(self, several: Iterable[Hops]) -> None:
        """Compute the bundles of many small sets of hops at once, which takes much less time than one after another:
        `bundle` then looks them up.
        """
        new: list[Hops] = []
        for hops in several:
            is_small = hops.count <= MOST_BUNDLED_AHEAD and not isinstance(hops, Exchange)
            if is_small and ("bundle", self.ways, Same(hops)) not in self.kept and not is_worthwhile(self.wiring, hops):
                new.append(hops)
        at_once = PAIRS_AT_ONCE // MOST_BUNDLED_AHEAD
        for start in range(0, len(new), at_once):
            self._bundle_at_once(new[start : start + at_once])

    def _bundle_at_once(self, several: Sequence[Hops]) -> None:
        groups = [np.zeros(hops.count, np.int64) if hops.group is None else hops.group for hops in several]
        first = np.cumsum([0, *(int(group[-1]) + 1 for group in groups)])
        group = np.concatenate([own + start for own, start in zip(groups, first, strict=False)])
        source, target, weight = (
            np.concatenate(column) for column in zip(*((h.source, h.target, h.weight) for h in several), strict=True)
        )
        whole = self._added_up(self.incidence(source, target), weight, group)
        ends, hop = np.searchsorted(whole.group, first).tolist(), 0
        for number, hops in enumerate(several):
            own, inside = slice(hop, hop + hops.count), slice(ends[number], ends[number + 1])
            found = Bundle(
                whole.group[inside] - first[number], whole.link[inside], whole.load[inside], whole.latency_s[own]
            )
            self.kept.keep(("bundle", self.ways, Same(hops)), found, weight=len(found.load))
            hop = own.stop

    @cached_property
    def _blocks(self) -> Blocks:
        return self.kept.once(
            ("blocks", self.ways), lambda: Blocks.of(self.wiring), weight=lambda found: found.ports // 3
        )

    def _columns(self, exchange: Exchange, members: Members) -> Columns:
        key = ("columns", self.ways, Same(members), len(exchange.rows), exchange.kinds.tobytes())
        return self.kept.once(
            key,
            lambda: columns_of(self.wiring, self._blocks, members.ranks, exchange.kinds, len(exchange.rows)),
            weight=lambda found: found.elements,
        )

    def latencies_s(self, hops: Hops) -> Floats:
        """Return the latency of each hop's path, computed by the cheaper of two methods."""
        if is_worthwhile(self.wiring, hops):
            return self._paths(hops).latency_s
        ahead = self._ahead.places(hops.source * self.nodes + hops.target)
        return self.of(hops).latency_s if ahead is None else self._ahead.paths.latency_s[ahead]

    def latency_beyond_s(self, hops: Hops, floor_s: float) -> float:
        """Return by how much the latencies of the hops' paths exceed a floor, as a weighted mean; for an exchange in
        several groups, only over the first group.
        """
        if not isinstance(hops, Exchange):
            beyond_s = np.maximum(0.0, self.latencies_s(hops) - floor_s)
            return float(np.average(beyond_s, weights=hops.weight)) if beyond_s.any() else 0.0
        if self._columns(hops, hops.members).most_latency_s <= floor_s:
            return 0.0
        key = ("latencies", self.ways, Same(hops.members), hops.kinds.tobytes(), floor_s)
        by_kind = self.kept.once(key, lambda: self._sums_beyond_s(hops, floor_s), weight=lambda sums: sums.size)
        return hops.weighted(by_kind) / hops.weight_in_all

    def _sums_beyond_s(self, exchange: Exchange, floor_s: float) -> Floats:
        def latency_of(source: Ints, target: Ints) -> Floats:
            return paths_of(self.wiring, self._into, Hops(source, target, np.ones(len(source)))).latency_s

        ranks, kinds = exchange.members.ranks, len(exchange.rows)
        return latencies_beyond_s(self.wiring, self._blocks, ranks, exchange.kinds, kinds, floor_s, latency_of)

    def _bundle(self, hops: Hops) -> Bundle:
        if isinstance(hops, Exchange):
            columns = [self._columns(hops, members) for members in hops.groups]
            load = np.array([each.carried(hops.rows) for each in columns])
            mean_s = [each.latency_in_all_s(hops.rows) / hops.weight_in_all for each in columns]
            group, link = np.nonzero(load)
            return Bundle(group, link, load[group, link], np.array(mean_s))
        if not is_worthwhile(self.wiring, hops):
            return self._summed(hops)
        return carried(self.wiring, self._paths(hops), hops.weight)

    def _paths(self, hops: Hops) -> Paths:
        """Return the best paths of hops; exchanges that differ only in proportions share them."""
        key = ("paths", self.ways, Same(hops.source), Same(hops.target), Same(hops.group))
        most = MOST_LARGE // 2  # so that the hops themselves stay cached, however many steps there are
        return self.kept.once(
            key, lambda: paths_of(self.wiring, self._into, hops), weight=lambda found: min(found.steps, most)
        )

    def _summed(self, hops: Hops) -> Bundle:
        """Return the bundle as the sum over every hop's own path."""
        group = np.zeros(len(hops.source), np.int64) if hops.group is None else hops.group
        return self._added_up(self.of(hops), hops.weight, group)

    def _added_up(self, on: Incidence, weight: Floats, group: Ints) -> Bundle:
        links = self.wiring.links
        place, entry = distinct_with_places(group[on.flow] * links + on.link)
        loads = summed(entry, on.share * weight[on.flow], len(place))
        some = np.flatnonzero(loads)
        return Bundle(place[some] // links, place[some] % links, loads[some], on.latency_s)

    def rate_bytes_per_s(self, hops: Hops, weight: Floats) -> float:
        """Return the rate of a hop of weight 1 if all progress together, alone on links; weight 0 leaves one out."""
        return float(self._rates(self.of(hops), weight, 1)[0])

    def rates_of_equal(self, source: Ints, target: Ints, weights: Sequence[Floats]) -> list[Floats]:
        """Return `rate_bytes_per_s` of several sets of hops (rows), each alone, for each weight of a set's hops."""
        on = self.incidence(source.ravel(), target.ravel())
        return [self._rates(on, np.tile(weight, len(source)), len(source)) for weight in weights]

    def _rates(self, on: Incidence, weight: Floats, sets: int) -> Floats:
        """Return the rate of a hop of weight 1 in each of several sets with equally many hops."""
        links, hops = self.wiring.links, max(1, len(weight) // sets)
        places, place = distinct_with_places(on.flow // hops * links + on.link)
        load = summed(place, on.share * weight[on.flow], len(places))
        rates, busy = np.full(sets, math.inf), load > 0
        some = places[busy]
        np.minimum.at(rates, some // links, self.wiring.bandwidth_bytes_per_s[some % links] / load[busy])
        return rates

    def incidence(self, source: Ints, target: Ints) -> Incidence:
        """Return the links on every pair's paths. Pairs are searched only once: collectives from different roots, say,
        have most of them in common.

        Raises UserError if no path leads from one end to the other.
        """
        pairs = source * self.nodes + target
        for known in (self._ahead, self._recent):
            found = known.of(pairs)
            if found is not None:
                return found
        keys, inverse = distinct_with_places(pairs)
        if len(keys) > MOST_RECENT_PAIRS:
            return self._searched(keys).paths.of_flows(inverse)
        return self._remembered(keys).paths.of_flows(inverse)

    def _remembered(self, pairs: Ints) -> _Known:
        """Return the paths of distinct pairs, sorted, and remember them; if these are too many, instead of others."""
        new = self._latest.without(self._recent.without(pairs))
        if len(self._recent.pairs) + len(self._latest.pairs) + len(new) > MOST_RECENT_PAIRS:
            self._recent, self._latest = self._searched(pairs), self._latest.among(NONE)
            return self._recent
        found = self._searched(new)
        self._latest = self._latest.joined(found)
        if len(self._latest.pairs) > MOST_LATEST_PAIRS:
            self._recent, self._latest = self._recent.joined(self._latest), self._latest.among(NONE)
        if len(new) == len(pairs):
            return found
        return self._recent.among(pairs).joined(self._latest.among(pairs))

    def search_ahead(self, source: Ints, target: Ints) -> None:
        """Search the paths of many pairs at once, which takes much less time than a search for each of many small sets
        of them: `incidence` then looks them up.

        Raises UserError where no path leads from one end to the other.
        """
        self._ahead = self._searched(distinct(source * self.nodes + target))

    def _searched(self, pairs: Ints) -> _Known:
        """Return the paths of distinct pairs, given as source * nodes + target and sorted."""
        parts = [pairs[start : start + PAIRS_AT_ONCE] for start in range(0, max(1, len(pairs)), PAIRS_AT_ONCE)]
        return _Known(pairs, _joined([self._search(part // self.nodes, part % self.nodes) for part in parts]))

    def _search(self, source: Ints, target: Ints) -> Incidence:
        """Return the incidence of distinct pairs."""
        pairs = np.arange(len(source))
        forward = [_start(pairs * self.nodes + source)]
        backward = [_start(pairs * self.nodes + target)]
        latency_s = np.zeros(len(source))
        entries: list[tuple[Ints, Ints, Floats]] = []
        waiting = source != target
        for turn in range(2 * self.nodes):
            if not waiting.any():
                break
            if turn % 2 == 0:
                forward.append(self._expand(forward, waiting, self._out, self.wiring.target))
            else:
                backward.append(self._expand(backward, waiting, self._into, self.wiring.source))
            if not len(forward[-1].key) or not len(backward[-1].key):
                break
            met = _meet(forward[-1], backward[-1], self.nodes, len(source))
            if met is not None:
                waiting[met.pair] = False
                latency_s[met.pair] = met.latency_s
                entries.append(_trace(forward, met.forward, met.paths_on, met.total, self.nodes))
                entries.append(_trace(backward, met.backward, met.paths_back, met.total, self.nodes))
        if waiting.any():
            pair, names = int(np.flatnonzero(waiting)[0]), self.wiring.names
            ends = f"from {names[source[pair]]} to {names[target[pair]]}"
            raise UserError(f"cluster.links: there is no path of links {ends}")
        return _collected(entries, latency_s)

    def _expand(self, levels: list[_Level], waiting: NDArray[np.bool_], edges: Adjacency, ends: Ints) -> _Level:
        """Return the level that is one link farther, for the pairs whose two searches have not met yet."""
        level = levels[-1]
        alive = np.flatnonzero(waiting[level.key // self.nodes])
        node, pair = level.key[alive] % self.nodes, level.key[alive] // self.nodes
        link, degree = edges.of(node)
        parent = np.repeat(alive, degree)
        key = np.repeat(pair, degree) * self.nodes + ends[link]
        if len(levels) > 1:  # do not step back to the previous level
            before = levels[-2].key
            place = np.minimum(np.searchsorted(before, key), max(0, len(before) - 1))
            new = before[place] != key if len(before) else np.ones(len(key), dtype=bool)
            parent, link, key = parent[new], link[new], key[new]
        return _merged(key, level, parent, link, self.wiring.latency_s)


def _joined(parts: list[Incidence]) -> Incidence:
    """Return the incidence of all parts, with flows numbered consecutively."""
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


def _merged(key: Ints, before: _Level, parent: Ints, link: Ints, link_latency_s: Floats) -> _Level:
    """Return the level reached by some steps. Steps to the same place are merged; those of least latency are kept."""
    reached, child = distinct_with_places(key)
    step_s = before.latency_s[parent] + link_latency_s[link]
    best_s, best = _least(step_s, child, len(reached))
    parent, child, link = parent[best], child[best], link[best]
    paths = summed(child, before.paths[parent], len(reached))
    return _Level(reached, paths, best_s, parent, child, link)


def _least(values_s: Floats, group: Ints, groups: int) -> tuple[Floats, Bools]:
    """Return the least value of each group, and which values equal their group's but for rounding."""
    best_s = np.full(groups, np.inf)
    np.minimum.at(best_s, group, values_s)
    return best_s, values_s <= best_s[group] * (1 + 1e-12) + 1e-18


@dataclass(frozen=True, eq=False)
class _Meeting:
    """Pairs whose two searches met: the places where they met, and the latencies and numbers of their best paths."""

    pair: Ints
    latency_s: Floats
    forward: Ints
    """Positions in the forward level."""
    backward: Ints
    """Positions in the backward level."""
    paths_on: Floats
    """Number of best paths from the place to the target."""
    paths_back: Floats
    total: Floats
    """Number of paths of each pair."""


def _meet(forward: _Level, backward: _Level, nodes: int, pairs: int) -> _Meeting | None:
    common, a, b = np.intersect1d(forward.key, backward.key, assume_unique=True, return_indices=True)
    if not len(common):
        return None
    pair = common // nodes
    path_s = forward.latency_s[a] + backward.latency_s[b]
    best_s, best = _least(path_s, pair, pairs)
    a, b, pair = a[best], b[best], pair[best]
    total = summed(pair, forward.paths[a] * backward.paths[b], pairs)
    done = distinct(pair)
    return _Meeting(done, best_s[done], a, b, backward.paths[b], forward.paths[a], total)


def _trace(levels: list[_Level], at: Ints, paths_on: Floats, total: Floats, nodes: int) -> tuple[Ints, Ints, Floats]:
    """Return (pair, link, share) of every step on a best path, from the meeting place back to the start."""
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


def queued_ratio(router: Router, hops: Hops) -> float:
    """Return the longest time for which a notice of hops that progress together waits in a queue behind the data of
    other such hops, relative to the time in which the busiest link carries its data; see [Note: queues].

    Each hop carries one message in that time. A link's queue takes in a message as fast as the sender's port transmits
    it, and so has its remainder left when the port has finished. A notice of a hop that waits for slower links for only
    a part of the time makes up for the rest of it.
    """
    on, wiring = router.of(hops), router.wiring
    busy_s: Floats = summed(on.link, on.share * hops.weight[on.flow], wiring.links) / wiring.bandwidth_bytes_per_s
    busy_ratio = busy_s / max(busy_s.max(initial=0.0), np.finfo(float).tiny)
    own = wiring.source[on.link] == hops.source[on.flow]
    port_ratio, limit_ratio, queue_ratio = np.zeros(hops.count), np.zeros(hops.count), np.zeros(wiring.links)
    np.maximum.at(port_ratio, on.flow[own], busy_ratio[on.link[own]])
    np.maximum.at(limit_ratio, on.flow, busy_ratio[on.link])
    np.maximum.at(queue_ratio, on.link, busy_ratio[on.link] - port_ratio[on.flow])
    back = router.of(Hops(hops.target, hops.source, hops.weight))
    waits_ratio = queue_ratio[back.link] - (1.0 - limit_ratio[back.flow])
    return float(waits_ratio.max(initial=0.0))
