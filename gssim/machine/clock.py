"""Simulated time that can be waited for by the clock, not only by what is left until then."""

from heapq import heappush

import simpy
from simpy.events import NORMAL


class Clock(simpy.Environment):
    """An environment with events at given times.

    A timeout of `time - now` does not end at `time` to the last digit.
    """

    def at(self, time_s: float) -> simpy.Event:
        """Return an event at a time that has not passed.

        >>> clock = Clock()
        >>> clock.run(until=clock.at(0.1)), clock.now
        (0.1, 0.1)
        """
        event = simpy.Event(self)
        event._ok, event._value = True, time_s
        heappush(self._queue, (time_s, NORMAL, next(self._eid), event))  # as its own `schedule` does
        return event
