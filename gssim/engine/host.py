"""Hosts whose devices slow each other down while they compute and communicate.

[Note: first end] Whenever the load of a host changes, all compute that is under way there is planned anew. So of the
ends that are planned together only the first is scheduled: when it comes, the load changes, and the others are planned
anew before they come.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from gssim.cluster import DeviceType
from gssim.cluster.contention import communicating_excess
from gssim.network import Clock


class Load(NamedTuple):
    """Load that running collectives put on a device's processor, which slows down its compute."""

    busy_share: float
    """Fraction of the time for which communication occupies a processor."""
    handled_bytes_per_s: float
    """Bytes sent and received per second."""


NO_LOAD = Load(0, 0)


class _Compute:
    """Some compute of a device that is under way. Processes wait for its end as for an event of SimPy's."""

    __slots__ = (
        "callbacks",
        "device",
        "end_s",
        "neighbours_excess",
        "planned_s",
        "rank_class",
        "remaining_s",
        "slowdown",
        "version",
    )
    _ok, _value = True, None

    def __init__(self, rank_class: int, alone_s: float, device: DeviceType) -> None:
        self.callbacks: list[Callable[[Any], object]] | None = []
        self.rank_class, self.device = rank_class, device
        self.neighbours_excess = device.neighbour_slowdown_ratio - 1
        self.remaining_s = alone_s
        """Time that it still takes alone, from `planned_s` on."""
        self.planned_s = self.end_s = 0.0
        self.slowdown = 1.0
        self.version = 0
        """How often it was planned; ENDED once it has ended."""


ENDED = -1


class Host:
    """Devices that share a host. A device computes slower while others compute, and while it communicates itself.

    Equal ranks are one class, which stands for all of its members on this host. In the lab a `Host` is one core that
    devices share; `core_share` is then the fraction of its time that a device of each class gets.
    """

    def __init__(
        self,
        env: Clock,
        devices: int,
        members: dict[int, int],
        *,
        coupled: bool,
        core_share: dict[int, float] | None = None,
    ) -> None:
        self.env, self.devices, self.members, self.coupled = env, devices, members, coupled
        self.core_share = core_share
        self.computing: dict[int, int] = {}
        """By class: number of its streams that are computing (several streams may compute at once)."""
        self.communicating: dict[int, dict[Load, int]] = defaultdict(dict)
        """By class: running collectives, counted by their load."""
        self._loads: dict[int, Load] = {}
        """By class: total load of its collectives; absent without any."""
        self._ratios: dict[int, float] = {}
        """By class: `_communicating_ratio` at the current load."""
        self._under_way: list[_Compute] = []
        """Compute that a change of the host's load slows down or speeds up, in the order in which it was planned."""

    def compute(self, rank_class: int, alone_s: float, device: DeviceType, *, refill_s: float = 0.0) -> Iterable[Any]:
        """Begin `alone_s` of compute, slowed by the current load of the host; return the events to wait for.

        `refill_s`: the part of that time that refills the caches after a pause.
        """
        if alone_s <= 0:
            return ()
        self.computing[rank_class] = self.computing.get(rank_class, 0) + 1
        self._change()
        own = _Compute(rank_class, alone_s, device)
        self._plan([own])
        return (own,)

    def _change(self) -> None:
        """Plan all compute that is under way anew, after whatever else was due at this instant before."""
        if self._under_way:
            changed, self._under_way = self._under_way, []
            self.env.call(self.env.now, partial(self._advance, changed))

    def _advance(self, changed: Sequence[_Compute], _event: object) -> None:
        """Let compute that has not ended wait for what is due at this instant."""
        left = [each for each in changed if each.version != ENDED]
        if not left:
            return
        if self.env.is_idle_now:
            self._plan_anew(left)
        else:
            self.env.call(self.env.now, partial(self._plan_anew, left))

    def _plan_anew(self, left: Sequence[_Compute], _event: object = None) -> None:
        """Reduce the remaining compute by what was done since it was planned, and plan it anew."""
        now_s = self.env.now
        for each in left:
            left_s = each.remaining_s - (now_s - each.planned_s) / each.slowdown
            each.remaining_s = left_s if left_s > 0.0 else 0.0
        self._plan(left)

    def _plan(self, several: Sequence[_Compute]) -> None:
        """Schedule the ends of compute at the current load; see [Note: first end]."""
        now_s, computing, loads, first_s = self.env.now, self._computing(), self._loads, inf
        for each in several:
            slowdown = 1 + each.neighbours_excess * self._others(each.rank_class, computing)
            if each.rank_class in loads:
                slowdown *= self._communicating_ratio(each.rank_class, each.device)
            each.slowdown, each.planned_s = slowdown, now_s
            each.version += 1
            each.end_s = end_s = now_s + each.remaining_s * slowdown
            if end_s < first_s:
                first_s = end_s
        self._under_way += several
        for each in several:
            if each.end_s == first_s:
                self.env.call(first_s, partial(self._end, each, each.version))

    def _end(self, compute: _Compute, version: int, _event: object) -> None:
        """End compute, unless it was planned anew since."""
        if compute.version != version:
            return
        compute.version = ENDED
        if compute in self._under_way:
            self._under_way.remove(compute)
        if self.env.is_idle_now:
            self._go_on(compute)
        else:
            self.env.call(self.env.now, partial(self._go_on, compute))

    def _go_on(self, compute: _Compute, _event: object = None) -> None:
        """Resume the process that waits for the end of a compute."""
        self.computing[compute.rank_class] -= 1
        if not self.computing[compute.rank_class]:
            del self.computing[compute.rank_class]
        self._change()
        callbacks, compute.callbacks = compute.callbacks, None
        assert callbacks is not None
        for each in callbacks:
            each(compute)

    def _computing(self) -> float:
        """Return how many devices compute now; if they share a core, the sum of their shares."""
        if self.core_share is not None:
            return sum([self.members[each] * self.core_share[each] for each in self.computing])
        return sum([self.members[each] for each in self.computing])

    def _others(self, rank_class: int, computing: float) -> float:
        """Return the fraction of the other devices that compute now; `computing`: see `_computing`.

        On a shared core, devices take turns, and the slow-down comes from refilling the caches after another device's
        turn. A device with a smaller share than this one interrupts fewer of its turns. A device with a larger share,
        or several devices, interrupt each turn at most once (assumed).
        """
        if self.core_share is not None:
            own = self.core_share[rank_class]
            return min(1.0, (computing - own) / own)
        return (computing - 1) / max(1, self.devices - 1)

    def _communicating_ratio(self, rank_class: int, device: DeviceType) -> float:
        """Return the time of a class's compute beside its collectives, relative to that without them."""
        ratio = self._ratios.get(rank_class)
        if ratio is None:
            ratio = self._ratios[rank_class] = 1 + communicating_excess(device, *self._loads[rank_class])
        return ratio

    def _load(self, rank_class: int) -> Load:
        """Return the total load of the class's collectives."""
        return self._loads.get(rank_class, NO_LOAD)

    def communicate(self, rank_class: int, load: Load, change: int) -> None:
        """Add `change` running collectives of such a load to the class."""
        before = self._load(rank_class)
        under_way = self.communicating[rank_class]
        under_way[load] = under_way.get(load, 0) + change
        if not under_way[load]:
            del under_way[load]
        if under_way:
            shares, rates = ([each[i] * count for each, count in under_way.items()] for i in range(2))
            self._loads[rank_class] = Load(sum(shares), sum(rates))
        else:
            self._loads.pop(rank_class, None)
        self._ratios.pop(rank_class, None)
        if self.coupled and self._load(rank_class) != before:
            self._change()
