"""A core of the lab's machine, on which emulated devices compute in turns.

[Note: turns] `gsreal lab` slows a device down to a share of a core's time (`gsreal/lab/throttle.cpp`): after each
millisecond of CPU time the rank sleeps to make up for its share. So some compute takes longer or shorter than its mean
by up to one sleep, depending on where in its turn the rank is, and longer if another rank has the core at that moment.
Over a step both effects average out. Where ranks meet in a layer's exchange they do not: the earlier rank waits for the
later one. Measured on four ranks with 0.4 of a core each, plans that exchange inside layers took 7 to 16 % longer than
the mean times of their layers predict, about half of it because of turns; other plans took 2 % longer.
"""

from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from gssim.cluster import DeviceType
from gssim.cluster.contention import communicating_excess
from gssim.engine.host import Host
from gssim.network import Clock

TURN_S = 0.001
"""CPU time after which a device sleeps: `kPeriod` of the lab's throttle."""
LEAST_SLEEP_S, MOST_CREDIT_S = 0.00005, 0.02
"""Shortest sleep, and the most time of waiting for the core that is subtracted from later sleeps: `kLeastSleep` and
`kMostCredit` of the throttle.
"""
ROUNDING_S = 1e-9
"""Times below this count as 0: the throttle counts in nanoseconds."""


class SharedCore(Host):
    """A core whose devices compute in turns; see [Note: turns].

    A turn is not interrupted; the next turn goes to the device that asked first. After a turn of t seconds of CPU time,
    a device with a share s of the core's time owes t * (1 / s - 1) seconds of sleep, minus the time that it waited for
    the core. If another device has computed since its last turn, a device first refills its caches. If r is the
    slowdown of its compute beside a neighbour, that takes TURN_S * (1 - 1 / r) of a turn, so that each of two equal
    devices that compute all the time takes r times as long.
    """

    def __init__(self, env: Clock, members: dict[int, int], *, core_share: dict[int, float], seed: int) -> None:
        super().__init__(env, len(members), members, coupled=True, core_share=core_share)
        self._share = core_share
        self._is_taken = False
        """Whether a device has the core."""
        self._waiting: deque[simpy.Event] = deque()
        """Events that begin the next turns, in the order in which devices asked for them."""
        self._latest: int | None = None
        """Class that had the latest turn."""
        random = np.random.default_rng([seed, *members])
        self._computed_s = {each: TURN_S * float(random.random()) for each in members}
        """By class: CPU time since the device last slept."""
        self._debt_s = dict.fromkeys(members, 0.0)
        """By class: sleep that the device owes; negative: credit for time that it waited too long."""
        self._refill_s = dict.fromkeys(members, 0.0)
        """By class: CPU time of its next turns that still goes into refilling its caches."""

    def compute(
        self, rank_class: int, alone_s: float, device: DeviceType, *, refill_s: float = 0.0
    ) -> Generator[Any, Any, None]:
        """Take the simulated time of `alone_s` of compute, in turns.

        A communication load that begins counts from the next turn on. Caches are refilled only once after a pause in
        which another device computed: the pause's own `refill_s` counts towards that.
        """
        share, env = self._share[rank_class], self.env
        left_s, refilled_s = alone_s * share, refill_s * share
        woken = False  # whether this stream resumed from a timeout of its own
        while left_s > ROUNDING_S:
            if owed_s := self._owed_sleep_s(rank_class):
                yield env.timeout(owed_s)
                self._debt_s[rank_class], woken = 0.0, True
            asked_s = env.now
            if not (woken and self._begins_turn_at_once()):
                yield self._request_turn()
            self._debt_s[rank_class] = max(self._debt_s[rank_class] - (env.now - asked_s), -MOST_CREDIT_S)
            if self._latest not in (None, rank_class):
                emptied_s = TURN_S * (1 - 1 / device.neighbour_slowdown_ratio)
                self._refill_s[rank_class] = max(0.0, emptied_s - refilled_s)
                refilled_s = 0.0
            self._latest = rank_class
            slowdown = 1.0
            if self.communicating[rank_class]:
                slowdown += communicating_excess(device, *self._load(rank_class))
            refill_s = min(self._refill_s[rank_class], left_s)  # no longer than the compute that needs the caches
            turn_s = min(refill_s + left_s * slowdown, TURN_S - self._computed_s[rank_class])
            yield env.timeout(turn_s)
            woken = True
            self._computed_s[rank_class] += turn_s
            self._refill_s[rank_class] -= min(refill_s, turn_s)
            left_s -= max(0.0, turn_s - refill_s) / slowdown
            self._end_turn()

    def _begins_turn_at_once(self) -> bool:
        """Begin a turn without an event if the core is free and no event is due now; return whether it has begun."""
        if self._is_taken or self._waiting or not self.env.is_idle_now:
            return False
        self._is_taken = True
        return True

    def _request_turn(self) -> simpy.Event:
        """Return the event with which a turn of the calling device begins, which is queued."""
        turn = self.env.event()
        self._waiting.append(turn)
        self._begin_turn()
        return turn

    def _begin_turn(self, _ended: simpy.Event | None = None) -> None:
        """Give the core to the device that asked first, unless another one has it."""
        if self._waiting and not self._is_taken:
            self._is_taken = True
            self._waiting.popleft().succeed()

    def _end_turn(self) -> None:
        """End a turn. The next one begins after the events that are already due now."""
        self._is_taken = False
        if self._waiting:
            ended = self.env.event()
            assert ended.callbacks is not None
            ended.callbacks.append(self._begin_turn)
            ended.succeed()

    def _owed_sleep_s(self, rank_class: int) -> float:
        """Return the sleep that is due for a class: 0 within a turn, or if it owes less than `LEAST_SLEEP_S`."""
        if self._computed_s[rank_class] < TURN_S - ROUNDING_S:
            return 0.0
        self._debt_s[rank_class] += self._computed_s[rank_class] * (1 / self._share[rank_class] - 1)
        self._computed_s[rank_class] = 0.0
        owed_s = self._debt_s[rank_class]
        return owed_s if owed_s >= LEAST_SLEEP_S else 0.0
