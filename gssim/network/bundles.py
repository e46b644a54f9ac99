"""Loads of links by many messages that progress together, computed by target instead of message by message.

The paths are those of `routes`: with the fewest links and, among these, with the least latency; equal paths share the
traffic equally. But here all messages to one target form one flow: at every node, the share of a link is the fraction
of the best paths from there that use it. So the work grows with targets times links instead of with pairs.
"""

from dataclasses import dataclass

import numpy as np

from gssim.cluster.topology import Wiring
from gssim.collectives import Hops, summed
from gssim.errors import UserError
from gssim.units import Floats, Ints, distinct

TARGETS_AT_ONCE = 128
PAIR_LINKS = 500
"""Number of links per target for which the search takes as long as that for one pair's paths (measured)."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Loads of links by hops that progress together, summed by group."""

    group: Ints
    link: Ints
    load: Floats
    """Bytes per byte of the stage's size."""
    latency_s: Floats
    """Latency of each hop's path. For an `Exchange`, the mean in each group, weighted by bytes."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Links on best paths, each of which leads one link closer to its target; a place is node * targets + target."""

    link: Ints
    here: Ints
    there: Ints


@dataclass(frozen=True, eq=False)
class Adjacency:
    """Links indexed by the node at one of their ends."""

    starts: Ints
    link: Ints

    def of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return the links of each of `nodes`, one after another, and the number of each."""
        degree = self.starts[nodes + 1] - self.starts[nodes]
        return self.link[runs(self.starts[nodes], degree)], degree


def adjacency(end: Ints, nodes: int) -> Adjacency:
    """Return the links indexed by the node at their `end`."""
    order = np.argsort(end, kind="stable")
    return Adjacency(np.r_[0, np.cumsum(np.bincount(end, minlength=nodes))], order)


def runs(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start+1, ... of every run, one after another.

    >>> runs(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    total = int(lengths.sum())
    offsets = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(total) - offsets + np.repeat(starts, lengths)


def is_worthwhile(wiring: Wiring, hops: Hops) -> bool:
    """Return whether bundling hops is less work than routing each."""
    return hops.count * PAIR_LINKS > hops.receivers * wiring.links


@dataclass(frozen=True, eq=False)
class _Ways:
    """The best paths of some hops of a group, independent of the hops' weights."""

    group: int
    hops: Ints
    at: Ints
    """Place of each hop's source."""
    places: int
    levels: tuple[Steps, ...]
    """Steps by level, ordered by distance from the targets."""
    shares: tuple[Floats, ...]
    """Fraction of a place's flow that takes each step."""


@dataclass(frozen=True, eq=False)
class Paths:
    """The best paths of hops, independent of their weights."""

    ways: tuple[_Ways, ...]
    latency_s: Floats
    """Latency of each hop's path."""

    @property
    def steps(self) -> int:
        """Number of stored steps."""
        return len(self.latency_s) + sum(len(level.link) for ways in self.ways for level in ways.levels)


def paths_of(wiring: Wiring, into: Adjacency, hops: Hops) -> Paths:
    """Return the best paths of `hops`; `into`: the links indexed by their targets.

    Assumes that a target is in one group only. Raises UserError if no path leads from one end to the other.
    """
    group = np.zeros(len(hops.source), np.int64) if hops.group is None else hops.group
    order = np.lexsort((hops.target, group))
    latency_s = np.zeros(len(order))
    all_ways: list[_Ways] = []
    for number in range(int(group.max(initial=-1)) + 1):
        members = order[group[order] == number]
        targets = distinct(hops.target[members])
        for start in range(0, len(targets), TARGETS_AT_ONCE):
            some = targets[start : start + TARGETS_AT_ONCE]
            first, last = np.searchsorted(hops.target[members], [some[0], some[-1] + 1])
            all_ways.append(_toward(wiring, into, some, hops, members[first:last], number, latency_s))
    return Paths(tuple(all_ways), latency_s)


def _toward(
    wiring: Wiring, into: Adjacency, targets: Ints, hops: Hops, batch: Ints, group: int, latency_s: Floats
) -> _Ways:
    """Return the paths of the hops of `batch`, all to some of `targets`, and write their latencies to `latency_s`."""
    width = len(targets)
    at = hops.source[batch] * width + np.searchsorted(targets, hops.target[batch])
    front, places = targets * width + np.arange(width), wiring.nodes * width
    levels, paths, took_s = searched(wiring.source, wiring.latency_s, into, front, width, places, at)
    unreached = batch[np.isinf(took_s[at])]
    if len(unreached):
        source, target = (wiring.names[end[unreached[0]]] for end in (hops.source, hops.target))
        raise UserError(f"cluster.links: there is no path of links from {source} to {target}")
    latency_s[batch] = took_s[at]
    shares = tuple(paths[steps.there] / paths[steps.here] for steps in levels)
    return _Ways(group, batch, at, places, tuple(levels), shares)


def carried(wiring: Wiring, paths: Paths, weight: Floats) -> Bundle:
    """Return the loads of links by hops of the given weights on their paths."""
    loads: dict[int, Floats] = {}
    for ways in paths.ways:
        load = loads.setdefault(ways.group, np.zeros(wiring.links))
        load += _load(wiring, ways, weight[ways.hops])
    groups, links, used_loads = [], [], []
    for number, load in loads.items():
        used = np.flatnonzero(load)
        groups.append(np.full(len(used), number))
        links.append(used)
        used_loads.append(load[used])
    return Bundle(np.concatenate(groups), np.concatenate(links), np.concatenate(used_loads), paths.latency_s)


def _load(wiring: Wiring, ways: _Ways, weight: Floats) -> Floats:
    """Return the load of every link by some hops of the given weights."""
    flow = summed(ways.at, weight, ways.places)
    load = np.zeros(wiring.links)
    for steps, share in zip(reversed(ways.levels), reversed(ways.shares), strict=True):
        through = flow[steps.here] * share
        load += summed(steps.link, through, wiring.links)
        flow += summed(steps.there, through, len(flow))
    return load


def searched(
    source: Ints, latency_s: Floats, into: Adjacency, front: Ints, width: int, places: int, wanted: Ints
) -> tuple[list[Steps], Floats, Floats]:
    """Return the steps of the best paths, by level away from the targets, and each place's number of paths and latency.

    `source`, `latency_s`: values of each link; `into`: the links indexed by their targets; `front`: places of the
    targets; `width`: number of targets per node. The search ends once all `wanted` places are reached.
    """
    took_s, paths = np.full(places, np.inf), np.zeros(places)
    took_s[front], paths[front] = 0.0, 1.0
    levels: list[Steps] = []
    while len(front) and np.isinf(took_s[wanted]).any():
        link, degree = into.of(front // width)
        there = np.repeat(front, degree)
        here = source[link] * width + there % width
        new = np.isinf(took_s[here])
        link, there, here = link[new], there[new], here[new]
        reach_s = took_s[there] + latency_s[link]
        np.minimum.at(took_s, here, reach_s)
        best = reach_s <= took_s[here] * (1 + 1e-12) + 1e-18
        levels.append(Steps(link[best], here[best], there[best]))
        paths += summed(here[best], paths[there[best]], places)
        front = distinct(here)
    return levels, paths, took_s
