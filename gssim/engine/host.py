"""Hosts whose devices slow each other down while they compute and communicate, and a SimPy clock with exact times."""

from collections import Counter, defaultdict
from collections.abc import Generator
from heapq import heappush
from typing import Any, NamedTuple

import simpy
from simpy.events import NORMAL

from gssim.cluster import DeviceType
from gssim.cluster.contention import communicating_excess


class Clock(simpy.Environment):
    """A SimPy environment with events at absolute times.

    `timeout(time - now)` may miss `time` in the last digit.
    """

    def at(self, time_s: float) -> simpy.Event:
        """Return an event at a time that has not passed.

        >>> clock = Clock()
        >>> clock.run(until=clock.at(0.1)), clock.now
        (0.1, 0.1)
        """
        event = simpy.Event(self)
        event._ok, event._value = True, time_s
        heappush(self._queue, (time_s, NORMAL, next(self._eid), event))  # like SimPy's `schedule`
        return event

    def drop_events(self) -> None:
        """Drop the scheduled events, which form reference cycles with the clock."""
        self._queue.clear()


class Load(NamedTuple):
    """Load that running collectives put on a device's processor, which slows down its compute."""

    busy_share: float
    """Fraction of the time for which communication occupies a processor."""
    handled_bytes_per_s: float
    """Bytes sent and received per second."""


class Host:
    """Devices that share a host. A device computes slower while others compute, and while it communicates itself.

    Equal ranks are one class, which stands for all of its members on this host. In the lab a `Host` is one core that
    devices share; `core_share` is then the fraction of its time that a device of each class gets.
    """

    def __init__(
        self,
        env: simpy.Environment,
        devices: int,
        members: dict[int, int],
        *,
        coupled: bool,
        core_share: dict[int, float] | None = None,
    ) -> None:
        self.env, self.devices, self.members, self.coupled = env, devices, members, coupled
        self.core_share = core_share
        self.computing: Counter[int] = Counter()
        """By class: number of its streams that are computing (several streams may compute at once)."""
        self.communicating: dict[int, Counter[Load]] = defaultdict(Counter)
        """By class: running collectives, counted by their load."""
        self.changed = env.event()

    def _change(self) -> None:
        if self.changed.callbacks:  # without waiters, the event is kept for the next change
            self.changed.succeed()
            self.changed = self.env.event()

    def compute(
        self, rank_class: int, alone_s: float, device: DeviceType, *, refill_s: float = 0.0
    ) -> Generator[Any, Any, None]:
        """Take the simulated time of `alone_s` of compute, slowed by the current load of the host.

        `refill_s`: the part of that time that refills the caches after a pause.
        """
        if alone_s <= 0:
            return
        self.computing[rank_class] += 1
        self._change()
        remaining = alone_s
        ended = False
        while not ended:
            slowdown = 1 + (device.neighbour_slowdown_ratio - 1) * self._others(rank_class)
            if self.communicating[rank_class]:
                slowdown *= 1 + communicating_excess(device, *self._load(rank_class))
            began_s = self.env.now
            end = self.env.timeout(remaining * slowdown)
            yield self._first_of(end, self.changed)
            remaining = max(0.0, remaining - (self.env.now - began_s) / slowdown)
            ended = end.processed  # the clock decides, since `remaining` may never round to 0 late in a run
        self.computing[rank_class] -= 1
        if not self.computing[rank_class]:
            del self.computing[rank_class]
        self._change()

    def _first_of(self, *events: simpy.Event) -> simpy.Event:
        """Return an event that triggers with the first of `events`. (SimPy's own also collects their values.)"""
        woken = self.env.event()

        def wake(_event: simpy.Event) -> None:
            if not woken.triggered:
                woken.succeed()

        for event in events:
            assert event.callbacks is not None  # both are still pending
            event.callbacks.append(wake)
        return woken

    def _others(self, rank_class: int) -> float:
        """Return the fraction of the other devices that compute now.

        On a shared core, devices take turns, and the slow-down comes from refilling the caches after another device's
        turn. A device with a smaller share than this one interrupts fewer of its turns. A device with a larger share,
        or several devices, interrupt each turn at most once (assumed).
        """
        if self.core_share is not None:
            own = self.core_share[rank_class]
            computing_share = sum(self.members[each] * self.core_share[each] for each in self.computing)
            return min(1.0, (computing_share - own) / own)
        computing = sum(self.members[each] for each in self.computing)
        return (computing - 1) / max(1, self.devices - 1)

    def _load(self, rank_class: int) -> Load:
        """Return the total load of the class's collectives."""
        under_way = self.communicating[rank_class].items()
        shares, rates = ([load[i] * count for load, count in under_way] for i in range(2))
        return Load(sum(shares), sum(rates))

    def communicate(self, rank_class: int, load: Load, change: int) -> None:
        """Add `change` running collectives of such a load to the class."""
        before = self._load(rank_class)
        under_way = self.communicating[rank_class]
        under_way[load] += change
        if not under_way[load]:
            del under_way[load]
        if self.coupled and self._load(rank_class) != before:
            self._change()
