"""Folding of equivalent links and flows into classes by colour refinement, which keeps max-min rates exact.

Two links are in one class if they have the same capacity, and if for every class of flows the same number of flows
crosses each of them with the same shares. Two flows are in one class if they have the same size and latency, and cross
the same number of links of every class. Such a partition is equitable: all members of a class have the same max-min
rate, so one of them represents all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gssim.collectives import Exchange, Hops, Stage, summed
from gssim.execution.cache import Recent, Same, Shared
from gssim.network.routes import Router
from gssim.units import Floats, Ints, distinct, distinct_with_places

Marks = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Sessions:
    """The sessions of one stage that start together; each is one session, or one class of equal flows."""

    latency_s: float
    session: Ints
    link: Ints
    """Class of link."""
    load: Floats
    """Load on the link, as a multiple of the session's rate."""
    own_load: Floats
    """The load of only one session, if the entry's session stands for a class of several."""
    unit_bytes: Floats
    """Bytes of each session, per byte of the stage's size."""

    @cached_property
    def of_one(self) -> "Sessions":
        """The same sessions, without the load of the others of each class."""
        return self if np.array_equal(self.own_load, self.load) else replace(self, load=self.own_load)

    @cached_property
    def places(self) -> tuple[Ints, Ints]:
        """Classes of crossed links, and for every entry the index of its class among them."""
        classes, inverse = distinct_with_places(self.link)
        return classes, inverse

    @cached_property
    def links(self) -> frozenset[int]:
        """Classes of crossed links."""
        return frozenset(self.places[0].tolist())

    @cached_property
    def link_bits(self) -> int:
        """Classes of crossed links as the bits of a number: two of these are compared several times as fast as sets."""
        is_crossed = np.zeros(int(self.places[0].max(initial=0)) + 1, dtype=bool)
        is_crossed[self.places[0]] = True
        return int.from_bytes(np.packbits(is_crossed, bitorder="little").tobytes(), "little")


@dataclass(frozen=True, eq=False)
class Traffic:
    """The sessions of one set of hops, grouped by start time, and the load of each link class per byte of size."""

    groups: tuple[Sessions, ...]
    carried_link: Ints
    carried: Floats

    @cached_property
    def links(self) -> frozenset[int]:
        """Classes of links that the sessions cross."""
        return frozenset(self.carried_link.tolist())


MOST_RATES = 2**16
"""Largest size of the cache of rates, in sessions."""


@dataclass(frozen=True, eq=False)
class Folded:
    """Classes of links, and the traffic of every set of hops over them."""

    link_class: Ints
    """Class of each link; -1 if nothing crosses it."""
    capacity: Floats
    """Capacity of a link of each class."""
    traffic: dict[tuple[int, bool], Traffic]
    """Traffic by (id of the hops, coupled)."""
    colours: dict[tuple[int, bool], Ints]
    """Class of every session, by the same key. Coupled hops form one session per group; otherwise each hop is one."""
    first: Ints
    """First link of each class."""
    rates: Recent = field(default_factory=lambda: Recent(MOST_RATES))
    """Cache of max-min rates, by sessions, mask of unfinished sessions, and proportions of capacities; and of times of
    sessions on idle links, by sessions and proportions.
    """

    def with_rates(self, bandwidth_bytes_per_s: Floats) -> "Folded":
        """Return the same classes with other rates; links that are equally fast here must stay so."""
        return replace(self, capacity=bandwidth_bytes_per_s[self.first])

    def of(self, stage: Stage) -> Traffic:
        """Return the traffic of a stage."""
        return self.traffic[id(stage.hops), stage.coupled]


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Sessions of one set of hops over single links."""

    session: Ints
    link: Ints
    load: Floats
    unit_bytes: Floats
    latency_s: Floats

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return len(self.unit_bytes)


MOST_SESSIONS = 2**16
"""Largest set of hops that is cached."""


MOST_FOLDS = 32


def fold(router: Router, stages: Sequence[Stage], *, unfolded: bool, shared: Shared) -> Folded:
    """Return the classes of links and sessions of all stages; `unfolded`: each link and session is its own class."""
    hop_sets: dict[tuple[int, bool], tuple[Hops, bool]] = {}
    for stage in stages:
        hop_sets[id(stage.hops), stage.coupled] = (stage.hops, stage.coupled)
    if sum(hops.elements for hops, _ in hop_sets.values()) > MOST_SESSIONS:
        return _folded(router, hop_sets, unfolded)
    identities = ((Same(hops), coupled) for hops, coupled in hop_sets.values())
    key = (router.ways, router.equal_rates, unfolded, *identities)
    folded = shared.once("fold", key, lambda: _folded(router, hop_sets, unfolded), most=MOST_FOLDS)
    return folded.with_rates(router.wiring.bandwidth_bytes_per_s)


def _folded(router: Router, hop_sets: Mapping[tuple[int, bool], tuple[Hops, bool]], unfolded: bool) -> Folded:
    capacity = router.wiring.bandwidth_bytes_per_s
    router.bundle_ahead([hops for hops, coupled in hop_sets.values() if coupled and hops.count])
    patterns = [_pattern(router, hops, coupled) for hops, coupled in hop_sets.values()]
    if unfolded:
        links = np.arange(len(capacity))
        colours = [np.arange(pattern.sessions) for pattern in patterns]
    else:
        links, colours = _refined(patterns, capacity)
    used = np.zeros(len(capacity), dtype=bool)
    for pattern in patterns:
        used[pattern.link] = True
    classes, first, inverse = np.unique(np.where(used, links, -1), return_index=True, return_inverse=True)
    offset = int(classes[0] == -1) if len(classes) else 0
    link_class = inverse - offset
    representative = np.zeros(len(capacity), dtype=bool)
    representative[first[offset:]] = True
    traffic = _traffic(patterns, colours, link_class, representative) if patterns else []
    return Folded(
        link_class,
        capacity[first[offset:]],
        dict(zip(hop_sets, traffic, strict=True)),
        dict(zip(hop_sets, colours, strict=True)),
        first[offset:],
    )


def _pattern(router: Router, hops: Hops, coupled: bool) -> _Pattern:
    """Return the sessions of hops; cached, as thresholds change the messages of few of a plan's collectives."""
    key = ("pattern", router.ways, Same(hops), coupled)
    return router.kept.once(key, lambda: _new_pattern(router, hops, coupled), weight=lambda found: len(found.link))


def _new_pattern(router: Router, hops: Hops, coupled: bool) -> _Pattern:
    """Return the sessions of hops: one for each group if they progress together, otherwise one for each hop."""
    if coupled and isinstance(hops, Exchange):
        bundle, groups = router.bundle(hops), len(hops.groups)
        load, heaviest = bundle.load / hops.heaviest, np.full(groups, hops.heaviest)
        return _Pattern(bundle.group, bundle.link, load, heaviest, bundle.latency_s)
    if not coupled or not hops.count:
        on = router.of(hops)
        return _Pattern(on.flow, on.link, on.share, hops.weight, on.latency_s)
    group = np.zeros(hops.count, np.int64) if hops.group is None else hops.group
    groups, bundle = int(group[-1]) + 1, router.bundle(hops)
    heaviest = np.zeros(groups)
    np.maximum.at(heaviest, group, hops.weight)
    mean_s = summed(group, bundle.latency_s * hops.weight, groups) / summed(group, hops.weight, groups)
    load = bundle.load / heaviest[bundle.group]
    return _Pattern(bundle.group, bundle.link, load, heaviest, mean_s)


def codes(values: Floats) -> Ints:
    """Return an index for each distinct value; values that agree to twelve digits are equal.

    Only the first of each run of equal values is sorted: neighbouring links mostly carry as much as each other.
    """
    mantissa, exponent = np.frexp(values)
    rounded = np.ldexp(np.round(mantissa * 2.0**40), exponent - 40)
    begins = np.ones(len(rounded), dtype=bool)
    np.not_equal(rounded[1:], rounded[:-1], out=begins[1:])
    of_values: Ints = distinct_with_places(rounded[begins])[1][begins.cumsum() - 1]
    return of_values


def _mixed(values: Ints) -> Marks:
    """Return hashes of the values (splitmix64). Sums of these hashes tell multisets apart."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


class _Owners:
    """Sums of marks by owner, for owners that stay the same over many sums."""

    def __init__(self, owner: Ints, owners: int) -> None:
        self._order = np.argsort(owner, kind="stable")
        self._ends = np.cumsum(np.bincount(owner, minlength=owners))

    def summed(self, marks: Marks) -> Marks:
        """Return the sum of the marks of each owner, modulo 2^64."""
        total = np.zeros(len(marks) + 1, np.uint64)
        np.cumsum(marks[self._order], out=total[1:])
        return np.diff(total[self._ends], prepend=total[:1])


def _recoloured(colour: Ints, marks: Marks) -> Ints:
    """Return new colours, equal where both the old colours and the marks are equal."""
    both = _mixed(colour) * np.uint64(3) + _mixed(marks.view(np.int64))
    return distinct_with_places(both)[1]


def _refined(patterns: Sequence[_Pattern], capacity: Floats) -> tuple[Ints, list[Ints]]:
    """Return the colours of the links, and those of each pattern's sessions: the coarsest equitable partition.

    Only single flows can be merged; sessions of hops that progress together cannot.
    """
    starts = np.cumsum([0, *(pattern.sessions for pattern in patterns)])
    if not patterns or not starts[-1]:
        return codes(capacity), [np.zeros(0, np.int64) for _ in patterns]
    session = np.concatenate([p.session + start for p, start in zip(patterns, starts, strict=False)])
    link = np.concatenate([p.link for p in patterns])
    share = codes(np.concatenate([p.load for p in patterns]))
    sessions = _first_colours(patterns)
    links = codes(capacity)
    of_links, of_sessions = _Owners(link, len(links)), _Owners(session, len(sessions))
    while True:
        counts = int(sessions.max()), int(links.max())
        marks = _mixed(sessions[session] * (int(share.max()) + 1) + share)
        links = _recoloured(links, of_links.summed(marks))
        marks = _mixed(links[link] * (int(share.max()) + 1) + share)
        sessions = _recoloured(sessions, of_sessions.summed(marks))
        if (int(sessions.max()), int(links.max())) == counts:
            break
    return links, np.split(sessions, starts[1:-1])


def _first_colours(patterns: Sequence[_Pattern]) -> Ints:
    """Return the initial colours of sessions: by pattern, size and latency."""
    which = np.repeat(np.arange(len(patterns)), [p.sessions for p in patterns])
    size = codes(np.concatenate([p.unit_bytes for p in patterns]))
    late = codes(np.concatenate([p.latency_s for p in patterns]))
    colour = (which * (int(size.max()) + 1) + size) * (int(late.max()) + 1) + late
    return distinct_with_places(colour)[1]


def _traffic(
    patterns: Sequence[_Pattern], colours: Sequence[Ints], link_class: Ints, representative: NDArray[np.bool_]
) -> list[Traffic]:
    """Return each pattern's sessions by class; a class's load is read from one representative link of every link class.

    All patterns are gone through at once, as there are hundreds of few links each. Classes of sessions are numbered
    from pattern to pattern, so that a pattern's entries follow one another, in the order that they have by themselves.
    """
    firsts, session_classes = [], []
    for colour in colours:
        first = session_class = np.zeros(len(colour), np.int64)
        if len(colour) > 1:  # most patterns are one session, and looking for distinct ones takes long
            _, first, session_class = np.unique(colour, return_index=True, return_inverse=True)
        firsts.append(first)
        session_classes.append(session_class)
    counts = np.array([len(first) for first in firsts])
    starts, width = np.cumsum(counts) - counts, len(link_class) + 1
    link = np.concatenate([pattern.link for pattern in patterns])
    load = np.concatenate([pattern.load for pattern in patterns])
    parts = zip(patterns, session_classes, starts.tolist(), strict=True)
    session = np.concatenate([own[pattern.session] + start for pattern, own, start in parts])
    entries = np.flatnonzero(representative[link])
    places, inverse = distinct_with_places(session[entries] * width + link_class[link[entries]])
    loads = summed(inverse, load[entries], len(places))
    own_loads = loads / np.bincount(inverse, minlength=len(places))
    sessions, links = places // width, places % width
    unit_bytes = np.concatenate([pattern.unit_bytes[first] for pattern, first in zip(patterns, firsts, strict=True)])
    pattern_of = np.repeat(np.arange(len(patterns)), counts)
    carried_on, onto = distinct_with_places(pattern_of[sessions] * width + links)
    carried = summed(onto, loads * unit_bytes[sessions], len(carried_on))
    ends = np.searchsorted(sessions, starts + counts)
    carried_ends = np.searchsorted(carried_on // width, np.arange(len(patterns)), side="right")
    found, begin, carried_begin = [], 0, 0
    for number, (pattern, first, start) in enumerate(zip(patterns, firsts, starts.tolist(), strict=True)):
        own, on = slice(begin, int(ends[number])), slice(carried_begin, int(carried_ends[number]))
        own_sessions = (sessions[own] - start, links[own], loads[own], own_loads[own])
        groups = _groups(*own_sessions, pattern.unit_bytes[first], pattern.latency_s[first])
        found.append(Traffic(tuple(groups), carried_on[on] % width, carried[on]))
        begin, carried_begin = own.stop, on.stop
    return found


def _groups(
    session: Ints, link: Ints, load: Floats, own_load: Floats, unit_bytes: Floats, latency_s: Floats
) -> list[Sessions]:
    """Return the sessions grouped by latency, which is when they start."""
    latencies_s = latency_s if len(latency_s) == 1 else distinct(latency_s)
    if len(latencies_s) == 1:
        return [Sessions(float(latencies_s[0]), session, link, load, own_load, unit_bytes)]
    groups = []
    for late in latencies_s:
        members = np.flatnonzero(latency_s == late)
        inside = np.isin(session, members)
        local = np.searchsorted(members, session[inside])
        here = (link[inside], load[inside], own_load[inside])
        groups.append(Sessions(float(late), local, *here, unit_bytes[members]))
    return groups
