"""Rendezvous of collectives: a collective starts when its last member arrives, and ends for all members at once."""

import math
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import simpy

from gssim import collectives
from gssim.engine.collective_instances import CollectiveInstance

if TYPE_CHECKING:
    from gssim.engine.machine import Machine


class Rendezvous:
    """One execution of a collective: starts when its last member arrives, and ends for all at once."""

    def __init__(self, machine: "Machine", instance: CollectiveInstance) -> None:
        self.machine, self.instance = machine, instance
        self.missing = {each.index for each in instance.classes}
        self.arrived_s: dict[int, float] = {}
        self.first_byte_s = math.inf
        """Time at which the first byte is sent: the first receives' notices have arrived."""
        self.done = machine.env.event()

    def post(self, rank_class: int) -> None:
        """Record a member's post; its notice may be delayed, and the member arrives only then."""
        self.arrived_s[rank_class] = self.machine.env.now

    def arrive(self, rank_class: int) -> simpy.Event:
        """Return the event at which the collective is done; the last arrival starts it."""
        self.missing.discard(rank_class)
        self.arrived_s.setdefault(rank_class, self.machine.env.now)
        if not self.missing:
            self.first_byte_s = self.machine.env.now + max(0.0, self._notice_s() - self._lead_s())
            self.machine.env.process(self._run())
        return self.done

    def _notice_s(self) -> float:
        """Return the travel time of the notice of a message's receive; 0 without notices."""
        scheduled = self.instance.schedule
        if not scheduled.notices or not self.instance.receivers:
            return 0.0
        empty = replace(scheduled.stages[0], size_bytes=0.0)
        return self.machine.network.alone_s(empty, replace(scheduled.pace(empty), notices=False))

    def _lead_s(self) -> float:
        """Return the time since all receivers of the first stage posted their receives."""
        receivers = self.instance.receivers
        return self.machine.env.now - max(self.arrived_s[each] for each in receivers) if receivers else 0.0

    def _run(self) -> Generator[Any, Any, None]:
        yield from carry_out(self.machine, self.instance, lead_s=self._lead_s())
        self.done.succeed()


def carry_out(machine: "Machine", instance: CollectiveInstance, *, lead_s: float = 0.0) -> Generator[Any, Any, None]:
    """Take the simulated time of a collective; `lead_s`: time since its first receives were posted."""
    scheduled, env = instance.schedule, machine.env
    machine.set_communicating(instance, +1)
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
        machine.count_bytes(stage)
    machine.set_communicating(instance, -1)
