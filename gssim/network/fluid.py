"""Fluid simulation of flows with max-min fair rates, recomputed whenever a flow begins or ends; no packets."""

import math
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import simpy

from gssim.cluster import Conditions, ends_of
from gssim.cluster.lab_links import head_start_s
from gssim.collectives import Hops, Stage
from gssim.execution.cache import Shared
from gssim.network.clock import Clock
from gssim.network.folding import Folded, Sessions, fold
from gssim.network.routes import Router
from gssim.network.transfers import JointSessions, JointTransfer, Prepared, Transfer, transfer_of
from gssim.units import Bools, Floats, Ints, distinct_with_places

NOWHERE = -1


def limited_rates(session: Ints, link: Ints, load: Floats, capacity: Floats, *, sessions: int) -> tuple[Floats, Ints]:
    """Return the max-min fair rate of each session over links of the given capacities, and the link that limits it.

    Entry e means that a session at rate r uses `load[e] * r` of link `link[e]`. The load is 1 for a flow, less if the
    flow is split over equal paths, more if several messages that progress together cross the same link. A session on no
    link has an infinite rate. Progressive filling: all rates grow together; when a link is full, its sessions stop
    growing. Source: Bertsekas & Gallager 1992, "Data Networks", section 6.5.2.

    The limiting link of a session is a full link on which no session is faster; `NOWHERE` for a session that crosses
    none.

    >>> entries = np.array([0, 1, 1]), np.array([0, 0, 1]), np.ones(3)
    >>> [found.tolist() for found in limited_rates(*entries, np.array([10.0, 2.0]), sessions=2)]
    [[8.0, 2.0], [0, 1]]
    """
    rates = np.zeros(sessions)
    limit = np.full(sessions, NOWHERE)
    growing = np.zeros(sessions, dtype=bool)
    counts = load > 0
    session, link, load = session[counts], link[counts], load[counts]
    growing[session] = True
    rates[~growing] = np.inf
    left = capacity.astype(float)
    while len(session):  # the entries of sessions that grow
        demand = np.bincount(link, weights=load, minlength=len(left))
        used = np.flatnonzero(demand)
        share = np.maximum(0.0, left[used]) / demand[used]
        step = share.min()
        rates[growing] += step
        left[used] -= step * demand[used]
        full = np.zeros(len(left), dtype=bool)
        full[used] = share <= step * (1 + 1e-12)
        stops = full[link]
        growing[session[stops]] = False
        limit[session[stops]] = link[stops]
        goes_on = growing[session]
        session, link, load = session[goes_on], link[goes_on], load[goes_on]
    return rates, limit


def first_change_s(transfers: Sequence[tuple[Floats, Ints, Ints, Ints]], *, links: int, slack_s: float) -> float:
    """Return the time until a session ends on a link that limits others that continue; infinite if there is none.

    Until then no rate changes. `transfers`: for each, the remaining time of its sessions, the link that limits each
    session, and the session and the link of every entry.
    """
    until_s, change_s = np.full(links, -np.inf), math.inf  # by link: time until which it limits a session
    for lasts_s, limit, _, _ in transfers:
        limited = limit != NOWHERE
        np.maximum.at(until_s, limit[limited], lasts_s[limited])
    for lasts_s, _, session, link in transfers:
        ends_s = lasts_s[session]
        matters = (until_s[link] > ends_s + slack_s) & (ends_s > 0)
        change_s = min(change_s, float(ends_s[matters].min(initial=math.inf)))
    return change_s


class Pace(NamedTuple):
    """Times and factors that a backend adds to the time of a stage on its links."""

    factor: float = 1.0
    """Time per byte relative to that on the bare links."""
    latency: bool = True
    """Whether the latencies of links are added."""
    processor_s: float = 0.0
    """Processor time of the ends for the bytes. It overlaps with the transfer; the longer of the two counts."""
    message_s: float = 0.0
    """Time of every message in addition to its path's latency."""
    notices: bool = False
    """Whether messages wait for receivers' notices; a notice takes as long as an empty message."""
    lead_s: float = 0.0
    """Time since the first receives were posted."""
    group_bytes: int = 0
    """Size of segment groups on shaped links (see [Note: head start] in `cluster`); 0 for wires."""
    saved_s: float = 0.0
    """Time by which the wait before the first byte is shorter."""
    occupied_s: float = 0.0
    """Processor time of sender and receiver, in addition to that for the bytes."""


class Network:
    """The links of a cluster in simulated time, folded into classes, and the bytes that each class has carried.

    Background traffic of `conditions` is simulated here; its faults are already in the router's wiring.
    """

    def __init__(
        self,
        env: Clock,
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
        self.active: list[Transfer | JointTransfer] = []
        self._starting: list[Transfer | JointTransfer] = []
        """Transfers that start now, to which rates are given together."""
        self._started = 0
        """How many transfers have started."""
        self.left_s: dict[int, float] = {}
        """Time at which the last session on a link ended."""
        self._queued: dict[Sessions, simpy.Event] = {}
        """By sessions whose messages wait for notices: the end of the last message that was handed over."""
        self._handled_s: dict[Sessions, float] = {}
        """Time until which the processors of sessions' ends are busy with the bytes of earlier messages."""
        self._alone: dict[Sessions, tuple[Floats, Ints]] = {}
        """Cached rate and limiting link of single sessions without any other traffic."""
        self._known_alone: dict[Sessions, tuple[float, int]] = {}
        """`_alone` as plain numbers."""
        self._crossing = [0] * len(self.capacity)
        """How many active transfers cross each link."""
        self._of_whole: dict[tuple[Sessions, ...], Sequence[tuple[float, int]]] = {}
        """Cached rate and limiting link of each of several single sessions, none of which has ended."""
        for stage, stream in zip(streams, conditions.traffic, strict=True):
            self._start_stream(stage, stream.bytes_per_s)

    @cached_property
    def _widest(self) -> float:
        """Largest capacity of the used links."""
        return float(self.folded.capacity.max(initial=0.0)) or 1.0

    @cached_property
    def _proportions(self) -> bytes:
        """Capacities of these links relative to the largest, as a cache key."""
        return (self.folded.capacity / self._widest).tobytes()

    def _start_stream(self, stage: Stage, bytes_per_s: float) -> None:
        """Start endless background traffic, whose rate is limited by an extra link of its own."""
        (group,) = self.folded.of(stage).groups
        own = len(self.capacity)
        self.capacity = np.append(self.capacity, bytes_per_s)
        self._crossing.append(0)
        limited = replace(
            group,
            session=np.append(group.session, 0),
            link=np.append(group.link, own),
            load=np.append(group.load, 1.0),
            own_load=np.append(group.own_load, 1.0),
        )
        self._start(limited, np.full(1, np.inf), lambda: None)
        self._begin()

    def alone_s(self, stage: Stage, pace: Pace | None = None) -> float:
        """Return the time of a stage on idle links."""
        alone = copy(self)
        alone.env, alone.active, alone._starting = Clock(), [], []
        alone._crossing = [0] * len(self.capacity)
        alone.carried, alone.left_s, alone._queued, alone._handled_s = self.carried.copy(), {}, {}, {}
        alone.env.run(until=alone.env.process(alone.carry(stage, pace)))
        return float(alone.env.now)

    def wait_s(self, stage: Stage, pace: Pace) -> float:
        """Return how long the bytes of a stage wait at most for latencies and notices."""
        stage_bytes = stage.size_bytes * stage.stretch_ratio * pace.factor
        groups = self.folded.of(stage).groups
        return max((self._wait_s(stage, group, group.unit_bytes * stage_bytes, pace) for group in groups), default=0.0)

    def latency_s(self, stage: Stage) -> float:
        """Return the longest latency of a stage's paths."""
        return max((group.latency_s for group in self.folded.of(stage).groups), default=0.0)

    def count(self, stage: Stage, times: int = 1) -> None:
        """Count the bytes of a stage on the links that it crosses."""
        traffic = self.folded.of(stage)
        self.carried[traffic.carried_link] += traffic.carried * (times * stage.size_bytes)

    @property
    def busy_links(self) -> frozenset[int]:
        """Classes of links that transfers cross now."""
        return frozenset(link for transfer in self.active for link in transfer.links)

    def prepared(self, stage: Stage, pace: Pace) -> Prepared | None:
        """Return a stage prepared for `start`; None if its time is not known beforehand.

        That is so if its sessions start at several times, or if earlier traffic matters (notices, segments of shaped
        links).
        """
        groups = self.folded.of(stage).groups
        if len(groups) > 1 or pace.notices or pace.group_bytes:
            return None
        if not groups:
            return Prepared(0.0, None, None, 0.0)
        (group,) = groups
        stage_bytes = stage.size_bytes * stage.stretch_ratio * pace.factor
        sizes = group.unit_bytes * stage_bytes
        wait_s = self._wait_s(stage, group, sizes, pace)
        if not sizes.any():
            return Prepared(wait_s, None, None, 0.0)
        return Prepared(wait_s, group if len(group.link) else None, sizes, pace.processor_s, stage_bytes, group)

    def start(self, prepared: Prepared, then: Callable[[], object]) -> None:
        """Start the sessions of a stage now; `then` is called when they have all ended."""
        assert prepared.sessions is not None
        assert prepared.sizes is not None
        self._start(prepared.sessions, prepared.sizes, then)

    def joint(self, several: Sequence[Prepared]) -> JointSessions | None:
        """Return prepared stages for `start_joint`; None if less than two are equal and on links of their own."""

        def rates_of(sessions: tuple[Sessions, ...]) -> Sequence[tuple[float, int]]:
            return [self._rate_alone(sessions[0])] if len(sessions) == 1 else self._rates_of_whole(sessions)

        return JointSessions.of(several, rates_of)

    def start_joint(self, joint: JointSessions, ended: Callable[[int], object], *, is_last: bool = False) -> None:
        """Start several stages now; `ended` is called with how many have ended, whenever some have.

        `is_last`: whether the current call of the clock does nothing else after this.
        """
        now_s, first = self.env.now, self._started
        self._started += len(joint.several)
        others = sorted(set(range(len(joint.several))).difference(*joint.groups))
        self._start_now(
            JointTransfer(joint, ended, now_s, first),
            *(transfer_of(joint.several[place], partial(ended, 1), now_s, first + place) for place in others),
            is_last=is_last,
        )

    def on_idle_links_s(self, prepared: Prepared) -> float:
        """Return the time of a stage's sessions on links that nothing else uses, until the last session ends.

        Rates are proportional to the capacities. So the time is simulated once for all sizes, and for all clusters
        whose links have the same proportions.
        """
        sessions, sizes = prepared.sessions, prepared.sizes
        if sessions is None or sizes is None:
            return 0.0
        if len(sizes) == 1:
            rate, _ = self._rates([sessions])
            return float(sizes[0] / rate[0])
        # bytes that the widest link could carry in the time of a stage of one byte
        widest_bytes: float = self.folded.rates.once(
            (sessions, self._proportions),
            lambda: self._last_end_s([(sessions, sessions.unit_bytes, 0.0)], widest=1.0),
            weight=lambda _: 1,
        )
        return widest_bytes * prepared.stage_bytes / self._widest

    def stage_on_idle_links_s(self, stage: Stage, pace: Pace) -> float:
        """Return the time of a stage whose sessions begin at several times, on links that nothing else uses.

        It must have no notices and no shaped links. The result equals `alone_s` except for rounding.
        """
        stage_bytes, end_s = stage.size_bytes * stage.stretch_ratio * pace.factor, 0.0
        moving: list[tuple[Sessions, Floats, float]] = []
        for group in self.folded.of(stage).groups:
            sizes = group.unit_bytes * stage_bytes
            wait_s = self._wait_s(stage, group, sizes, pace)
            if not sizes.any():
                end_s = max(end_s, wait_s)
                continue
            end_s = max(end_s, wait_s + pace.processor_s)
            if len(group.link):
                moving.append((group, sizes, wait_s))
        return max(end_s, self._last_end_s(moving)) if moving else end_s

    def _last_end_s(self, groups: Sequence[tuple[Sessions, Floats, float]], *, widest: float | None = None) -> float:
        """Return the time at which the last session ends, on links that nothing else uses.

        `groups`: for each, its sessions, the bytes of each session, and the time at which they begin. `widest`: as of
        `_rates`.
        """
        sessions = [each for each, _, _ in groups]
        session, (places, index), _, _ = self._together(sessions)
        link = places[index]
        remaining = np.concatenate([sizes for _, sizes, _ in groups])
        begin_s = np.concatenate([np.full(len(sizes), start_s) for _, sizes, start_s in groups])
        now_s, last_begin_s = 0.0, float(begin_s.max())
        while True:
            going, next_s = remaining > 0, math.inf
            if now_s < last_begin_s:
                waiting = going & (begin_s > now_s)
                going, next_s = going & ~waiting, float(begin_s[waiting].min(initial=math.inf))
            if not going.any():
                if math.isinf(next_s):
                    return now_s
                now_s = next_s
                continue
            rates, limit = self._rates(sessions, going, widest=widest)
            lasts_s = np.zeros(len(remaining))
            np.divide(remaining, rates, out=lasts_s, where=going)
            longest_s = step_s = float(lasts_s.max())
            slack_s = 1e-12 * longest_s
            if lasts_s.min(where=lasts_s > 0, initial=math.inf) + slack_s < longest_s:  # else all end together
                entries = [(lasts_s, limit, session, link)]
                step_s = min(longest_s, first_change_s(entries, links=len(self.capacity), slack_s=slack_s))
            begins = next_s - now_s <= step_s
            step_s = min(step_s, next_s - now_s)
            carried = np.where(going, rates * step_s, 0.0)
            remaining = np.where(going & (lasts_s <= step_s + slack_s), 0.0, np.maximum(remaining - carried, 0.0))
            now_s = next_s if begins else now_s + step_s

    def carry(self, stage: Stage, pace: Pace | None = None) -> Generator[Any, Any, None]:
        """Simulate a stage, including the backend's additions to its time."""
        self.count(stage)
        traffic, pace = self.folded.of(stage), pace or Pace()
        ends = []
        for group in traffic.groups:
            sizes = group.unit_bytes * (stage.size_bytes * stage.stretch_ratio * pace.factor)
            wait_s = self._wait_s(stage, group, sizes, pace)
            delayed = self._delayed(group, sizes, wait_s, pace, stage)
            if len(traffic.groups) == 1:
                yield from delayed
                return
            ends.append(self.env.process(delayed))
        if ends:
            yield self.env.all_of(ends)

    def _wait_s(self, stage: Stage, group: Sessions, sizes: Floats, pace: Pace) -> float:
        """Return the time that sessions wait for latencies and notices beyond what transfers on idle links hide."""
        if not pace.latency:
            return 0.0
        latency_s = group.latency_s + pace.message_s
        transfer_s = ahead_s = 0.0
        if (stage.hidden_ratio or pace.group_bytes) and len(group.link):
            transfer_s, link = self._longest(group, sizes, coupled=stage.coupled)
            if pace.group_bytes:
                ahead_s = head_start_s(float(self.capacity[link]), pace.group_bytes)
                ahead_s = min(ahead_s, transfer_s / max(1.0, stage.steps))
        notice_s = latency_s if pace.notices else 0.0
        wait_s = stage.wait_s(
            latency_s,
            notice_s=notice_s,
            lead_s=pace.lead_s,
            transfer_s=max(pace.processor_s, transfer_s),
            head_start_s=ahead_s,
        )
        return max(0.0, wait_s - pace.saved_s) if pace.saved_s else wait_s

    def _longest(self, group: Sessions, sizes: Floats, *, coupled: bool) -> tuple[float, int]:
        """Return the time of the longest session on idle links, and the link that limits it.

        Coupled hops form one session for each group of ranks; on idle links, only one group's session counts.
        """
        rates, limit = self._rates([group.of_one if coupled else group])
        times_s = sizes / rates
        longest = int(times_s.argmax())
        return float(times_s[longest]), int(limit[longest])

    def _delayed(
        self, group: Sessions, sizes: Floats, wait_s: float, pace: Pace, stage: Stage
    ) -> Generator[Any, Any, None]:
        if pace.notices and stage.hops.are_mutual:  # notices go behind the bytes of what the same ranks carry already
            before = self._queued.get(group)
            if before is not None and not before.processed:
                yield before
        if wait_s:
            yield self.env.timeout(wait_s)
        if sizes.any():
            yield from self._transferred(group, sizes, pace, stage)

    def _transferred(self, group: Sessions, sizes: Floats, pace: Pace, stage: Stage) -> Generator[Any, Any, None]:
        """Carry the bytes of sessions whose waits are over, and let their ends handle them."""
        end = self.env.event()
        if pace.notices:
            before, self._queued[group] = self._queued.get(group), end
            # the connection of two ranks sends whole messages one after another
            if not stage.coupled and before is not None and not before.processed:
                yield before
        handled = self._handled(group, pace.processor_s + pace.occupied_s)
        if len(group.link):
            if pace.group_bytes:
                sizes = self._let_through(group, sizes, pace.group_bytes, coupled=stage.coupled)
            if not pace.group_bytes or sizes.any():
                done = self.env.event()
                self._start(group, sizes, done.succeed)
                yield done
        end.succeed()
        if pace.group_bytes:
            self.left_s |= dict.fromkeys(group.links, self.env.now)
        if handled is not None:
            yield handled

    def _handled(self, group: Sessions, processor_s: float) -> simpy.Event | None:
        """Return the event at which the ranks have handled a stage's bytes; None if that takes no time.

        One thread of a rank handles the stages of a collective one after another.
        """
        if not processor_s:
            return None
        return self.env.timeout(self.handled_after_s(group, processor_s))

    def handled_after_s(self, sessions: Sessions, processor_s: float) -> float:
        """Return the time from now until the ends of sessions have handled their bytes, and let later ones wait."""
        now_s: float = self.env.now
        waits_s = max(0.0, self._handled_s.get(sessions, 0.0) - now_s)
        self._handled_s[sessions] = now_s + waits_s + processor_s
        return waits_s + processor_s

    def _let_through(self, group: Sessions, sizes: Floats, group_bytes: int, *, coupled: bool) -> Floats:
        """Return the bytes that remain after an idle shaped link has passed a burst at once.

        The link's tokens accumulate while nothing crosses it, up to a head start.
        """
        longest_s, link = self._longest(group, sizes, coupled=coupled)
        if any(link in transfer.links for transfer in (*self.active, *self._starting)):
            return sizes
        ahead_s = head_start_s(float(self.capacity[link]), group_bytes)
        ahead_s = min(ahead_s, self.env.now - self.left_s.get(link, -math.inf))
        return np.asarray(sizes * max(0.0, 1 - ahead_s / longest_s), dtype=np.float64)

    def _start(self, group: Sessions, sizes: Floats, then: Callable[[], object]) -> None:
        self._started += 1
        self._start_now(Transfer(group, sizes, then, self.env.now, self._started - 1))

    def _start_now(self, *transfers: Transfer | JointTransfer, is_last: bool = False) -> None:
        """Let transfers begin once all that start at this instant are known; `is_last`: as of `start_joint`."""
        is_first = not self._starting
        self._starting += transfers
        if is_first:
            if is_last and self.env.is_idle_now:
                self._begin()
            else:
                self.env.call(self.env.now, self._begin)

    def _begin(self, _event: object = None) -> None:
        """Give rates to the transfers that start now, to those that touch one another together."""
        begun, self._starting = self._starting, []
        self.active += begun
        for transfer in begun:
            self._cross(transfer, +1)
        starting = begun if all(map(self._is_alone, begun)) else self._split_joint(begun)
        several: list[JointTransfer | list[Transfer]] = []
        while starting:
            last = starting[-1]
            if isinstance(last, JointTransfer):
                several.append(last)
                starting.pop()
                continue
            together = self._touching(last)
            several.append(together)
            if len(together) == 1:
                starting.pop()
            else:
                starting = [each for each in starting if each not in together]
        for each in reversed(several):  # of those that end at one instant, the first to start ends first
            if isinstance(each, JointTransfer):
                self._go_jointly(each)
            elif len(each) == 1 and each[0].single:
                self._go_alone(each[0])
            else:
                self._share(each)

    def _split_joint(self, begun: Sequence[Transfer | JointTransfer]) -> list[Transfer | JointTransfer]:
        """Split the joint transfers whose links others cross; return those that begin now, split likewise."""
        parts: dict[int, Sequence[Transfer]] = {}
        now = set(map(id, begun))
        for each in self.active:
            if isinstance(each, JointTransfer) and not self._is_alone(each):
                parts[id(each)] = each.split(version=0 if id(each) in now else 1)
                self._cross(each, -1)
                for part in parts[id(each)]:
                    self._cross(part, +1)
        several = [[part for each in some for part in parts.get(id(each), (each,))] for some in (self.active, begun)]
        self.active, now_begun = (sorted(some, key=attrgetter("number")) for some in several)
        return now_begun

    def _go_jointly(self, transfer: JointTransfer) -> None:
        """Schedule the end of a joint transfer.

        If other transfers have split it into parts by then, only the parts end whose rates they have not changed (whose
        `version` is still 1).
        """

        def ended(_event: object) -> None:
            if not transfer.parts:
                self._leave(transfer)
                transfer.ended(transfer.joint.sessions)
            for first, *others in transfer.parts:
                if others:
                    self._wake([first, *others], [1] * (1 + len(others)))
                elif first.version == 1:
                    self._end(first)
                    first.then()

        self.env.call(self.env.now + transfer.lasts_s, ended)

    def _go_alone(self, transfer: Transfer) -> None:
        """Schedule the end of a session that is alone on its links; it is void if another session begins before.

        The clock's rounding is below the slack of `settle`, so no bytes remain at that time.
        """
        transfer.share_alone(*self._rate_alone(transfer.sessions))
        transfer.version += 1
        version = transfer.version
        last_s = transfer.lasts_alone_s()
        if math.isinf(last_s):
            return  # only background traffic, which never ends

        def ended(_event: object) -> None:
            if version == transfer.version:
                self._end(transfer)
                transfer.then()

        self.env.call(self.env.now + last_s, ended)

    def _end(self, transfer: Transfer) -> None:
        transfer.version += 1
        self._leave(transfer)

    def _leave(self, transfer: Transfer | JointTransfer) -> None:
        self.active.remove(transfer)
        self._cross(transfer, -1)

    def _cross(self, transfer: Transfer | JointTransfer, change: int) -> None:
        crossing = self._crossing
        for link in transfer.links:
            crossing[link] += change

    def _is_alone(self, transfer: Transfer | JointTransfer) -> bool:
        """Return whether no other active transfer crosses the links of one."""
        crossing = self._crossing
        return all([crossing[link] == 1 for link in transfer.links])

    def _touching(self, transfer: Transfer) -> list[Transfer]:
        """Return the transfers that share links with this one, or with others that do."""
        if self._is_alone(transfer):
            return [transfer]
        # joint transfers share no links, or they would have been split
        rest = [each for each in self.active if isinstance(each, Transfer)]
        touching, links = [transfer], transfer.link_bits
        while near := [each for each in rest if each.link_bits & links and each is not transfer]:
            touching += near
            rest = [each for each in rest if each not in near]
            for each in near:
                links |= each.link_bits
        return touching

    def _rate_alone(self, sessions: Sessions) -> tuple[float, int]:
        """Return the rate of a single session on idle links, and the link that limits it."""
        known = self._known_alone.get(sessions)
        if known is None:
            rates, limit = self._rates([sessions])
            known = self._known_alone[sessions] = float(rates[0]), int(limit[0])
        return known

    def _rates(
        self, groups: Sequence[Sessions], going: Bools | None = None, *, widest: float | None = None
    ) -> tuple[Floats, Ints]:
        """Return the fair rates of all sessions of the groups, one after another, and the links that limit them.

        `going`: which of the sessions have not ended; None: all. `widest`: the rate of the widest link, if not the
        actual one: what is cached for all clusters of the same proportions must not depend, by rounding, on the one
        that is simulated first.
        """
        if len(groups) == 1 and len(groups[0].unit_bytes) == 1:
            only = groups[0]
            if only not in self._alone:
                shares = self.capacity[only.link] / only.load
                fullest = int(shares.argmin())
                self._alone[only] = shares[fullest : fullest + 1], only.link[fullest : fullest + 1]
            return self._alone[only]
        if going is not None and going.all():
            going = None
        mask = b"" if going is None else going.tobytes()
        rates, limit = self.folded.rates.once(
            (tuple(groups), mask, self._proportions),
            lambda: self._proportional_rates(groups, going),
            weight=lambda rates_and_limits: len(rates_and_limits[0]),
        )
        return rates * (self._widest if widest is None else widest), limit

    def _proportional_rates(self, groups: Sequence[Sessions], going: Bools | None) -> tuple[Floats, Ints]:
        """Return the rates for capacities relative to the widest link, which are proportional to the actual ones."""
        session, (places, link), load, sessions = self._together(groups)
        if going is not None:
            unfinished = going[session]
            session, link, load = session[unfinished], link[unfinished], load[unfinished]
        rates, limit = limited_rates(session, link, load, self.capacity[places] / self._widest, sessions=sessions)
        return rates, np.where(limit == NOWHERE, NOWHERE, places[limit])

    def _together(self, groups: Sequence[Sessions]) -> tuple[Ints, tuple[Ints, Ints], Floats, int]:
        """Return the entries (pairs of a session and a link) of several groups, numbered as those of one group.

        These are: the session of each entry; the distinct links, and the place of each entry's link among them; the
        load of each entry; and the number of sessions.
        """
        if len(groups) == 1:
            return groups[0].session, groups[0].places, groups[0].load, len(groups[0].unit_bytes)
        starts = np.cumsum([0, *(len(group.unit_bytes) for group in groups)])
        session = np.concatenate([g.session + start for g, start in zip(groups, starts, strict=False)])
        load = np.concatenate([group.load for group in groups])
        places, link = distinct_with_places(np.concatenate([group.link for group in groups]))
        return session, (places, link), load, int(starts[-1])

    def _share(self, transfers: Sequence[Transfer]) -> None:
        """Set the fair rate of every session and schedule its next change."""
        now_s = self.env.now
        for transfer in transfers:
            transfer.advance(now_s)
        if all([each.single and each.remaining[0] > 0 for each in transfers]):
            rates_of_whole = self._rates_of_whole(tuple([each.sessions for each in transfers]))
            for transfer, alone in zip(transfers, rates_of_whole, strict=True):
                transfer.share_alone(*alone)
            self._plan(transfers)
            return
        unfinished = np.concatenate([each.unfinished for each in transfers])
        rates, limit = self._rates([each.sessions for each in transfers], unfinished)
        start = 0
        for transfer in transfers:
            end = start + len(transfer.remaining)
            transfer.share(rates[start:end], limit[start:end])
            start = end
        self._plan(transfers)

    def _rates_of_whole(self, sessions: tuple[Sessions, ...]) -> Sequence[tuple[float, int]]:
        """Return the rate and the limiting link of single sessions that have not ended."""
        if sessions not in self._of_whole:
            rates, limit = self._rates(sessions)
            self._of_whole[sessions] = list(zip(rates.tolist(), limit.tolist(), strict=True))
        return self._of_whole[sessions]

    def _plan(self, transfers: Sequence[Transfer]) -> None:
        """Schedule the next end of a transfer, or of a session whose link others can use; rates stay until then."""
        for transfer in transfers:
            transfer.version += 1
        versions = [transfer.version for transfer in transfers]
        if all([transfer.single for transfer in transfers]):
            first_s = min([transfer.lasts_alone_s() for transfer in transfers])  # no rate changes before one ends
        else:
            lasts_s = [transfer.lasts_s() for transfer in transfers]
            first_s = min(float(rest_s.max()) for rest_s in lasts_s)
            first_s = min(first_s, self._changes_s(transfers, lasts_s))
        if math.isinf(first_s):
            return  # only background traffic, which never ends
        self.env.call(self.env.now + first_s, lambda _event: self._wake(transfers, versions))

    def _changes_s(self, transfers: Sequence[Transfer], lasts_s: Sequence[Floats]) -> float:
        """Return the time until a session ends on a link that limits others which go on; infinite if there is none."""
        slack_s = 1e-12 + 2 * math.ulp(self.env.now)
        if len(transfers) == 1:
            (own_s,) = lasts_s
            if len(own_s) == 1 or own_s.min(where=own_s > 0, initial=math.inf) + slack_s >= own_s.max():
                return math.inf  # a single session, or all end together, as those of a ring of equal parts do
        entries = [
            (last_s, np.asarray(transfer.limit), transfer.sessions.session, transfer.sessions.link)
            for transfer, last_s in zip(transfers, lasts_s, strict=True)
        ]
        return first_change_s(entries, links=len(self.capacity), slack_s=slack_s)

    def _wake(self, transfers: Sequence[Transfer], versions: Sequence[int]) -> None:
        for transfer, version in zip(transfers, versions, strict=True):
            if version == transfer.version:  # otherwise the flows have changed since, and this wake-up is void
                self._change(transfer)

    def _change(self, transfer: Transfer) -> None:
        """End the sessions that are over, and recompute the rates of others that their links limit."""
        touched, now_s = self._touching(transfer), self.env.now
        for other in touched:
            other.advance(now_s)
        freed = [other.settle(now_s) for other in touched]
        left: list[Transfer] = []
        ended: list[Transfer] = []
        for other in touched:
            if other.is_over:
                self._end(other)
                ended.append(other)
            else:
                left.append(other)
        if left and self._are_limited_by(freed, left):
            self._share(left)
        elif left:  # all other sessions keep their rates: their limiting links are as full as before
            self._plan(left)
        for other in ended:  # once the others go on, since what follows may begin new transfers
            other.then()

    def _are_limited_by(self, freed: Sequence[Ints], transfers: Sequence[Transfer]) -> bool:
        """Return whether one of the links that were freed limits an unfinished session."""
        is_freed = np.zeros(len(self.capacity) + 1, dtype=bool)  # the last mark is for `NOWHERE`
        for links in freed:
            if len(links):
                is_freed[links] = True
        return any([each.is_limited_by(is_freed) for each in transfers])
