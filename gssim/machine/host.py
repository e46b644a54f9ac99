"""Hosts whose devices slow each other down."""

from collections import Counter, defaultdict
from collections.abc import Generator
from typing import Any

import simpy


class Host:
    """Devices that share a host: each computes slower while the others compute, and while it communicates itself.

    Equal ranks are one class, which stands for as many devices as it has members on this host.
    """

    def __init__(self, env: simpy.Environment, devices: int, members: dict[int, int], *, coupled: bool) -> None:
        self.env, self.devices, self.members, self.coupled = env, devices, members, coupled
        self.computing: set[int] = set()
        self.communicating: dict[int, Counter[float]] = defaultdict(Counter)
        """By class: collectives under way, by the part of their time for which they keep a processor busy."""
        self.changed = env.event()

    def _change(self) -> None:
        self.changed.succeed()
        self.changed = self.env.event()

    def compute(
        self, rank_class: int, alone_s: float, *, neighbour_ratio: float, communicating_ratio: float
    ) -> Generator[Any, Any, None]:
        """Take the simulated time of `alone_s` of compute under what else goes on at the host."""
        if alone_s <= 0:
            return
        self.computing.add(rank_class)
        self._change()
        remaining = alone_s
        ended = False
        while not ended:
            slowdown = 1 + (neighbour_ratio - 1) * self._others(rank_class)
            slowdown *= 1 + (communicating_ratio - 1) * self._busy_share(rank_class)
            began_s = self.env.now
            end = self.env.timeout(remaining * slowdown)
            yield self._first_of(end, self.changed)
            remaining = max(0.0, remaining - (self.env.now - began_s) / slowdown)
            ended = end.processed  # the clock decides: late in a run `remaining` may never round to 0
        self.computing.discard(rank_class)
        self._change()

    def _first_of(self, *events: simpy.Event) -> simpy.Event:
        """Return an event that comes with the first of others; SimPy's own also collects what they bring."""
        woken = self.env.event()

        def wake(_event: simpy.Event) -> None:
            if not woken.triggered:
                woken.succeed()

        for event in events:
            assert event.callbacks is not None  # both are yet to come
            event.callbacks.append(wake)
        return woken

    def _others(self, rank_class: int) -> float:
        """Return which part of the other devices computes now."""
        computing = sum(self.members[each] for each in self.computing)
        return (computing - 1) / max(1, self.devices - 1)

    def _busy_share(self, rank_class: int) -> float:
        """Return for which part of the time the class's collectives keep a processor busy, 1 at most."""
        return min(1.0, sum(share * count for share, count in self.communicating[rank_class].items()))

    def communicate(self, rank_class: int, busy_share: float, change: int) -> None:
        """Note that the class has `change` more collectives under way that keep a processor busy for `busy_share`."""
        before = self._busy_share(rank_class)
        under_way = self.communicating[rank_class]
        under_way[busy_share] += change
        if not under_way[busy_share]:
            del under_way[busy_share]
        if self.coupled and self._busy_share(rank_class) != before:
            self._change()
