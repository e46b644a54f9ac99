"""Collectives as rendezvous: each starts when its last member has come, and is done for all at once."""

import math
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import simpy

from gssim import collectives
from gssim.engine.collective_instances import Meeting

if TYPE_CHECKING:
    from gssim.engine.machine import Machine


class Rendezvous:
    """A collective that starts when its last member has come, and is done for all at once."""

    def __init__(self, machine: "Machine", meeting: Meeting) -> None:
        self.machine, self.meeting = machine, meeting
        self.missing = {each.index for each in meeting.classes}
        self.came_s: dict[int, float] = {}
        self.leaves_s = math.inf
        """When the first byte is on its way: the first receives' notices have come."""
        self.done = machine.env.event()

    def post(self, rank_class: int) -> None:
        """Note when a member comes; its notice may have to wait, and it arrives only then."""
        self.came_s[rank_class] = self.machine.env.now

    def arrive(self, rank_class: int) -> simpy.Event:
        """Return the event at which the collective is done; the last arrival starts it."""
        self.missing.discard(rank_class)
        self.came_s.setdefault(rank_class, self.machine.env.now)
        if not self.missing:
            self.leaves_s = self.machine.env.now + max(0.0, self._notice_s() - self._lead_s())
            self.machine.env.process(self._run())
        return self.done

    def _notice_s(self) -> float:
        """Return how long the notice of a message's receive is under way; 0 where there are none."""
        scheduled = self.meeting.scheduled
        if not scheduled.notices or not self.meeting.receivers:
            return 0.0
        empty = replace(scheduled.stages[0], size_bytes=0.0)
        return self.machine.network.alone_s(empty, replace(scheduled.pace(empty), notices=False))

    def _lead_s(self) -> float:
        """Return how long all that receive in the first stage have been here: when they came, they posted that."""
        receivers = self.meeting.receivers
        return self.machine.env.now - max(self.came_s[each] for each in receivers) if receivers else 0.0

    def _run(self) -> Generator[Any, Any, None]:
        yield from carry_out(self.machine, self.meeting, lead_s=self._lead_s())
        self.done.succeed()


def carry_out(machine: "Machine", meeting: Meeting, *, lead_s: float = 0.0) -> Generator[Any, Any, None]:
    """Take the simulated time of a collective; `lead_s`: how long ago its first receives were posted."""
    scheduled, env = meeting.scheduled, machine.env
    machine.note_communication(meeting, +1)
    if scheduled.fixed_s:
        yield env.timeout(scheduled.fixed_s)
    for stage in scheduled.stages:
        if scheduled.measured:
            machine.network.count(stage)
            continue
        yield from machine.network.carry(stage, scheduled.pace(stage, lead_s=lead_s))
        lead_s = 0.0
        reduction_s = collectives.reduction_s(machine.cluster, stage.reduced_bytes)
        if reduction_s:
            yield env.timeout(reduction_s)
    for stage in scheduled.stages:
        machine.note_bytes(stage)
    machine.note_communication(meeting, -1)
