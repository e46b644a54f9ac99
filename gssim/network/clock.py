"""A SimPy clock with exact times, which calls functions without an event of SimPy's for each."""

import weakref
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

import simpy
from simpy.events import NORMAL


class _Call:
    """What the clock needs of an event, for a single callback."""

    __slots__ = ("callbacks",)
    _ok = True

    def __init__(self, callback: Callable[[Any], object]) -> None:
        self.callbacks: Sequence[Callable[[Any], object]] | None = (callback,)


class Clock(simpy.Environment):
    """A SimPy environment with events at absolute times.

    `timeout(time - now)` may miss `time` in the last digit.
    """

    _generators: weakref.WeakSet[Any] | None = None
    now = property(attrgetter("_now"))  # faster than SimPy's, which is read all the time

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

    def call(self, time_s: float, callback: Callable[[Any], object]) -> None:
        """Call a function with an event at a time that has not passed."""
        event: Any = _Call(callback)
        heappush(self._queue, (time_s, NORMAL, next(self._eid), event))

    @property
    def is_idle_now(self) -> bool:
        """Whether no further events are due at this instant."""
        return not self._queue or self._queue[0][0] > self._now

    def run(self, until: Any = None) -> Any:
        """Process events until one has been processed, as SimPy does, but without a call per event."""
        if not isinstance(until, simpy.Event) or until.callbacks is None:
            return super().run(until)
        queue = self._queue
        while queue and until.callbacks is not None:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
            for callback in callbacks:
                callback(event)
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value
        if until.callbacks is not None:
            raise RuntimeError("no events are left")
        return until.value

    def keep_track(self) -> None:
        """Note the generators of all processes from now on, so that `drop` ends them."""
        self._generators = weakref.WeakSet()

    def process(self, generator: Any) -> simpy.Process:
        """Return a process that runs a generator, as SimPy does."""
        if self._generators is not None:
            self._generators.add(generator)
        return super().process(generator)

    def drop(self) -> None:
        """Drop what forms reference cycles with the clock: the scheduled events, and the processes kept track of.

        In a run that is ended early, those wait for events that never come.
        """
        self._queue.clear()
        generators, self._generators = list(self._generators or ()), None
        for generator in generators:
            generator.close()
