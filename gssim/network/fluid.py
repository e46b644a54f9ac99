"""Flows over links in simulated time: fluid, max-min fair, re-solved when one begins or ends; never packets.

Max-min fair shares of links.
"""

import math
from collections.abc import Generator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import simpy

from gssim.cache import Shared
from gssim.cluster import Conditions, ends_of, head_start_s
from gssim.collectives import Hops, Stage
from gssim.network.folding import Folded, Sessions, fold
from gssim.network.routes import Router
from gssim.units import Floats, Ints

NOWHERE = -1


def max_min_rates(session: Ints, link: Ints, load: Floats, capacity: Floats, *, sessions: int) -> Floats:
    """Return the max-min fair rate of each session over links of the given capacities; see `limited_rates`.

    >>> entries = np.array([0, 1, 1]), np.array([0, 0, 1]), np.ones(3)
    >>> max_min_rates(*entries, np.array([10.0, 2.0]), sessions=2).tolist()
    [8.0, 2.0]
    """
    return limited_rates(session, link, load, capacity, sessions=sessions)[0]


def limited_rates(session: Ints, link: Ints, load: Floats, capacity: Floats, *, sessions: int) -> tuple[Floats, Ints]:
    """Return the max-min fair rate of each session over links of the given capacities, and the link that limits it.

    Entry e says that a session at rate r takes `load[e] * r` of link `link[e]`: 1 for a flow, less where it is split
    over equal paths, more where several messages that keep pace cross the same link. Sessions on no link at all have
    an infinite rate. Progressive filling: all rates grow together; where a link is full, its sessions stop growing.
    Source: Bertsekas & Gallager 1992, "Data Networks", section 6.5.2.

    A session is limited by a link that is full, on which none is faster; `NOWHERE`: it crosses none.

    >>> entries = np.array([0, 1, 1]), np.array([0, 0, 1]), np.ones(3)
    >>> [found.tolist() for found in limited_rates(*entries, np.array([10.0, 2.0]), sessions=2)]
    [[8.0, 2.0], [0, 1]]
    """
    rates = np.zeros(sessions)
    limit = np.full(sessions, NOWHERE)
    growing = np.zeros(sessions, dtype=bool)
    growing[session[load > 0]] = True
    rates[~growing] = np.inf
    left = capacity.astype(float)
    while growing.any():
        active = growing[session]
        demand = np.bincount(link[active], weights=load[active], minlength=len(left))
        used = demand > 0
        share = np.full(len(left), np.inf)
        share[used] = np.maximum(0.0, left[used]) / demand[used]
        step = share.min()
        rates[growing] += step
        left[used] -= step * demand[used]
        full = share <= step * (1 + 1e-12)
        stopped = np.flatnonzero(active & full[link] & (load > 0))
        growing[session[stopped]] = False
        limit[session[stopped]] = link[stopped]
    return rates, limit


NEGLIGIBLE_BYTES = 1e-9


@dataclass(frozen=True, slots=True)
class Pace:
    """What a backend adds to what links take of a stage."""

    factor: float = 1.0
    """Time of a byte over that on the bare links."""
    latency: bool = True
    """Whether latencies of links count."""
    processor_s: float = 0.0
    """What the ends are busy with the bytes while these are under way; it ends no sooner."""
    message_s: float = 0.0
    """What every message takes beside its path's latency."""
    notices: bool = False
    """Whether messages wait for receivers' notices, which take as long as messages without bytes."""
    lead_s: float = 0.0
    """How long ago the first receives were posted."""
    group_bytes: int = 0
    """Of segments that shaped links let pass together (see [Note: head start] in `cluster`); wires have none."""


class _Transfer:
    """Sessions that began together: what remains of each, at which rate it goes, and the event that ends them all."""

    __slots__ = ("done", "going", "last_s", "limit", "links", "rate", "remaining", "sessions", "version")

    def __init__(self, sessions: Sessions, remaining: Floats, done: simpy.Event, now_s: float) -> None:
        self.sessions, self.remaining, self.done, self.last_s = sessions, remaining, done, now_s
        self.rate: Floats
        self.going = remaining > 0
        self.limit: Ints
        """The link that limits each session's rate."""
        self.links = sessions.links
        self.version = 0

    def advance(self, now_s: float) -> None:
        """Let every session carry what it could since the last change."""
        if now_s > self.last_s:
            going = self.remaining > 0
            left = self.remaining[going] - self.rate[going] * (now_s - self.last_s)
            self.remaining[going] = np.maximum(left, 0.0)  # it may have ended since
            self.last_s = now_s

    def settle(self, now_s: float) -> list[int]:
        """End what the clock cannot tell from ended; return the links that this frees."""
        slack_s = 1e-12 + 2 * math.ulp(now_s)
        ended = self.going & (self.remaining <= self.rate * slack_s + NEGLIGIBLE_BYTES)
        if not ended.any():
            return []
        self.remaining[ended] = 0.0
        self.going = self.going & ~ended
        found: list[int] = self.sessions.link[ended[self.sessions.session]].tolist()
        return found

    def lasts_s(self) -> Floats:
        """Return how long each session still goes at its rate; 0 for those that have ended."""
        found = np.zeros(len(self.remaining))
        np.divide(self.remaining, self.rate, out=found, where=self.remaining > 0)
        return found

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not self.remaining.any()

    def is_limited_by(self, links: frozenset[int]) -> bool:
        """Return whether one of some links limits the rate of a session that still goes."""
        return not links.isdisjoint(self.limit[self.remaining > 0].tolist())


class Network:
    """The links of a cluster in simulated time, equal ones taken together, and the bytes that each of them carried.

    Of `conditions`, other traffic is simulated here; faults are in the router's wiring already.
    """

    def __init__(
        self,
        env: simpy.Environment,
        router: Router,
        stages: Sequence[Stage],
        *,
        conditions: Conditions | None = None,
        unfolded: bool = False,
        shared: Shared | None = None,
    ) -> None:
        self.env = env
        conditions = conditions or Conditions()
        self.wiring = router.wiring
        streams = [Stage(Hops.of([(*ends, 1.0)]), 1.0) for ends in ends_of(self.wiring, conditions)]
        self.folded: Folded = fold(router, [*stages, *streams], unfolded=unfolded, shared=shared or Shared())
        self.capacity = self.folded.capacity
        self.carried = np.zeros(len(self.capacity))
        self.active: list[_Transfer] = []
        self.left_s: dict[int, float] = {}
        """When links were left by the last that crossed them."""
        self._alone: dict[Sessions, tuple[Floats, Ints]] = {}
        """The rate of what is one session where nothing else goes, and the link that limits it."""
        for stage, stream in zip(streams, conditions.traffic, strict=True):
            self._keep_up(stage, stream.bytes_per_s)

    @cached_property
    def _widest(self) -> float:
        """The largest capacity of the cluster's links that are used."""
        return float(self.folded.capacity.max(initial=0.0)) or 1.0

    @cached_property
    def _proportions(self) -> bytes:
        """What the capacities of these links are to one another."""
        return (self.folded.capacity / self._widest).tobytes()

    def _keep_up(self, stage: Stage, bytes_per_s: float) -> None:
        """Let others' traffic flow for ever; a link of its own, as wide as its rate, keeps it from taking more."""
        (group,) = self.folded.of(stage).groups
        own = len(self.capacity)
        self.capacity = np.append(self.capacity, bytes_per_s)
        limited = replace(
            group,
            session=np.append(group.session, 0),
            link=np.append(group.link, own),
            load=np.append(group.load, 1.0),
        )
        self._begun(limited, np.full(1, np.inf))

    def alone_s(self, stage: Stage, pace: Pace | None = None) -> float:
        """Return the time of a stage on idle links."""
        alone = copy(self)
        alone.env, alone.active, alone.carried, alone.left_s = simpy.Environment(), [], self.carried.copy(), {}
        alone.env.run(until=alone.env.process(alone.carry(stage, pace)))
        return float(alone.env.now)

    def count(self, stage: Stage) -> None:
        """Count the bytes of a stage on the links that it crosses."""
        traffic = self.folded.of(stage)
        self.carried[traffic.carried_link] += traffic.carried * stage.size_bytes

    def carry(self, stage: Stage, pace: Pace | None = None) -> Generator[Any, Any, None]:
        """Take the simulated time of a stage, at the backend's pace."""
        self.count(stage)
        traffic, pace = self.folded.of(stage), pace or Pace()
        ends = []
        for group in traffic.groups:
            sizes = group.unit_bytes * (stage.size_bytes * stage.stretch_ratio * pace.factor)
            wait_s = self._wait_s(stage, group, sizes, pace)
            if len(traffic.groups) == 1:
                yield from self._delayed(group, sizes, wait_s, pace)
                return
            ends.append(self.env.process(self._delayed(group, sizes, wait_s, pace)))
        if ends:
            yield self.env.all_of(ends)

    def _wait_s(self, stage: Stage, group: Sessions, sizes: Floats, pace: Pace) -> float:
        """Return how long sessions wait for latencies and notices that no transfer hides: on idle links, at least."""
        if not pace.latency:
            return 0.0
        latency_s = group.latency_s + pace.message_s
        transfer_s = ahead_s = 0.0
        if (stage.hidden_ratio or pace.group_bytes) and len(group.link):
            transfer_s, link = self._longest(group, sizes)
            if pace.group_bytes:
                ahead_s = head_start_s(float(self.capacity[link]), pace.group_bytes)
                ahead_s = min(ahead_s, transfer_s / max(1.0, stage.steps))
        notice_s = latency_s if pace.notices else 0.0
        return stage.wait_s(
            latency_s,
            notice_s=notice_s,
            lead_s=pace.lead_s,
            transfer_s=max(pace.processor_s, transfer_s),
            head_start_s=ahead_s,
        )

    def _longest(self, group: Sessions, sizes: Floats) -> tuple[float, int]:
        """Return how long the longest session takes on idle links, and the link that limits it."""
        rates, limit = self._rates([group])
        times_s = sizes / rates
        longest = int(times_s.argmax())
        return float(times_s[longest]), int(limit[longest])

    def _delayed(self, group: Sessions, sizes: Floats, wait_s: float, pace: Pace) -> Generator[Any, Any, None]:
        if wait_s:
            yield self.env.timeout(wait_s)
        if not sizes.any():
            return
        busy = self.env.timeout(pace.processor_s) if pace.processor_s else None
        if len(group.link) and pace.group_bytes:
            sizes = self._let_through(group, sizes, pace.group_bytes)
        if len(group.link) and sizes.any():
            yield self._begun(group, sizes)
        if pace.group_bytes:
            self.left_s |= dict.fromkeys(group.links, self.env.now)
        if busy is not None:
            yield busy

    def _let_through(self, group: Sessions, sizes: Floats, group_bytes: int) -> Floats:
        """Return what is left of bytes when a shaped link has let through at once what it has tokens for.

        They gather while nothing crosses it: as long as a head start lasts, at most.
        """
        took_s, link = self._longest(group, sizes)
        if any(link in transfer.links for transfer in self.active):
            return sizes
        ahead_s = head_start_s(float(self.capacity[link]), group_bytes)
        ahead_s = min(ahead_s, self.env.now - self.left_s.get(link, -math.inf))
        return np.asarray(sizes * max(0.0, 1 - ahead_s / took_s), dtype=np.float64)

    def _begun(self, group: Sessions, sizes: Floats) -> simpy.Event:
        transfer = _Transfer(group, sizes.copy(), self.env.event(), self.env.now)
        self.active.append(transfer)
        together = self._touching(transfer)
        if len(together) == len(sizes) == 1:
            self._go_alone(transfer)
        else:
            self._share(together)
        return transfer.done

    def _go_alone(self, transfer: _Transfer) -> None:
        """Plan the end of one session that has its links for itself, which holds if no other comes before.

        What the clock rounds is less than what `settle` takes for ended, so that nothing is left to add up then.
        """
        transfer.rate, transfer.limit = self._rates([transfer.sessions])
        transfer.version += 1
        version = transfer.version
        last_s = float(transfer.remaining[0] / transfer.rate[0])
        if math.isinf(last_s):
            return  # others' traffic alone, which never ends

        def ended(_event: simpy.Event) -> None:
            if version == transfer.version:
                self._end(transfer)

        wake = self.env.timeout(last_s)
        assert wake.callbacks is not None
        wake.callbacks.append(ended)

    def _end(self, transfer: _Transfer) -> None:
        transfer.version += 1
        self.active.remove(transfer)
        transfer.done.succeed()

    def _touching(self, transfer: _Transfer) -> list[_Transfer]:
        """Return the transfers that share links with this one, or with others that do."""
        found, rest = [transfer], [other for other in self.active if other is not transfer]
        links = set(transfer.links)
        grown = True
        while grown:
            near = [other for other in rest if not links.isdisjoint(other.links)]
            grown = bool(near)
            found += near
            rest = [other for other in rest if other not in near]
            for other in near:
                links |= other.links
        return found

    def _rates(self, groups: Sequence[Sessions], going: Sequence[Any] | None = None) -> tuple[Floats, Ints]:
        """Return the fair rates of all sessions of the groups, one after another, and the links that limit them."""
        if len(groups) == 1 and len(groups[0].unit_bytes) == 1:
            only = groups[0]
            if only not in self._alone:
                shares = self.capacity[only.link] / only.load
                fullest = int(shares.argmin())
                self._alone[only] = shares[fullest : fullest + 1], only.link[fullest : fullest + 1]
            return self._alone[only]
        if going is not None and all(each.all() for each in going):
            going = None
        mask = b"" if going is None else np.concatenate(going).tobytes()
        rates, limit = self.folded.rates.once(
            (tuple(groups), mask, self._proportions),
            lambda: self._proportional_rates(groups, going),
            weight=lambda found: len(found[0]),
        )
        return rates * self._widest, limit

    def _proportional_rates(self, groups: Sequence[Sessions], going: Sequence[Any] | None) -> tuple[Floats, Ints]:
        """Return the same where the widest link has capacity 1: so it is at whatever rate."""
        session, (places, link), load, sessions = self._together(groups)
        if going is not None:
            kept = np.concatenate(going)[session]
            session, link, load = session[kept], link[kept], load[kept]
        rates, limit = limited_rates(session, link, load, self.capacity[places] / self._widest, sessions=sessions)
        return rates, np.where(limit == NOWHERE, NOWHERE, places[limit])

    def _together(self, groups: Sequence[Sessions]) -> tuple[Ints, tuple[Ints, Ints], Floats, int]:
        """Return groups as one: sessions, classes of links and of every entry which of these it is, loads, how many."""
        if len(groups) == 1:
            return groups[0].session, groups[0].places, groups[0].load, len(groups[0].unit_bytes)
        starts = np.cumsum([0, *(len(group.unit_bytes) for group in groups)])
        session = np.concatenate([g.session + start for g, start in zip(groups, starts, strict=False)])
        load = np.concatenate([group.load for group in groups])
        places, link = np.unique(np.concatenate([group.link for group in groups]), return_inverse=True)
        return session, (places, link), load, int(starts[-1])

    def _share(self, transfers: Sequence[_Transfer]) -> None:
        """Give every session its fair rate and plan when that changes."""
        now_s = self.env.now
        for transfer in transfers:
            transfer.advance(now_s)
        rates, limit = self._rates([t.sessions for t in transfers], [t.remaining > 0 for t in transfers])
        start = 0
        for transfer in transfers:
            end = start + len(transfer.remaining)
            transfer.rate, transfer.limit = rates[start:end], limit[start:end]
            start = end
        self._plan(transfers)

    def _plan(self, transfers: Sequence[_Transfer]) -> None:
        """Plan when a transfer is over, or a session ends that leaves room to others: until then all rates stay."""
        for transfer in transfers:
            transfer.version += 1
        versions = [transfer.version for transfer in transfers]
        lasts_s = [transfer.lasts_s() for transfer in transfers]
        first_s = min(float(each.max()) for each in lasts_s)
        changes_s = self._changes_s(transfers, lasts_s)
        first_s = min(first_s, changes_s)
        if math.isinf(first_s):
            return  # others' traffic alone, which never ends
        wake = self.env.timeout(first_s)
        assert wake.callbacks is not None
        wake.callbacks.append(lambda _event: self._wake(transfers, versions))

    def _changes_s(self, transfers: Sequence[_Transfer], lasts_s: Sequence[Floats]) -> float:
        """Return in what time a session ends on a link that limits others, which go on: infinite where none does."""
        if len(transfers) == 1 and len(lasts_s[0]) == 1:
            return math.inf  # there are no others
        until_s = np.full(len(self.capacity), -np.inf)  # from now, by link: how long it limits somebody
        for transfer, last_s in zip(transfers, lasts_s, strict=True):
            limited = transfer.limit != NOWHERE
            np.maximum.at(until_s, transfer.limit[limited], last_s[limited])
        slack_s, found_s = 1e-12 + 2 * math.ulp(self.env.now), math.inf
        for transfer, last_s in zip(transfers, lasts_s, strict=True):
            ends_s = last_s[transfer.sessions.session]
            matters = (until_s[transfer.sessions.link] > ends_s + slack_s) & (ends_s > 0)
            found_s = min(found_s, float(ends_s[matters].min(initial=math.inf)))
        return found_s

    def _wake(self, transfers: Sequence[_Transfer], versions: Sequence[int]) -> None:
        for transfer, version in zip(transfers, versions, strict=True):
            if version == transfer.version:  # else it was planned before the flows changed
                self._woken(transfer)

    def _woken(self, transfer: _Transfer) -> None:
        touched = self._touching(transfer)
        for each in touched:
            each.advance(self.env.now)
        freed = frozenset(link for each in touched for link in each.settle(self.env.now))
        left: list[_Transfer] = []
        for each in touched:
            if each.is_over:
                self._end(each)
            else:
                left.append(each)
        if any(each.is_limited_by(freed) for each in left):
            self._share(left)
        elif left:  # all that still go are as fast as before: what limits them is as full as it was
            self._plan(left)
