"""Lower bounds of collectives: their time for the ranks that take part, and the busy time of the links they cross.

[Note: received] The messages of gloo's all-to-alls begin pair by pair; see [Note: pairs] in `gssim.engine.rendezvous`.
Those between other ranks may be over when a late rank arrives, so a rank's bound counts only what it receives itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gssim import collectives
from gssim.collectives import Communication, Hops, Stage
from gssim.engine import CollectiveSchedule, router_of, scheduler_of
from gssim.execution.cache import Recent, Same, Shared
from gssim.scenario import Scenario
from gssim.units import Floats

MAX_GROUPS = 32
"""If a collective has more groups, only the first ones are bounded: all would take longer than it saves."""


@dataclass(frozen=True, eq=False)
class CollectiveBound:
    """Lower bounds of one collective of one group; they also hold if others share its links."""

    alone_s: float
    """Time from the arrival of the last member to the collective's end."""
    links_s: Floats
    """Busy time of each link."""


@dataclass(frozen=True, eq=False)
class _OfGroups:
    """Lower bounds of one collective that several groups carry out."""

    taken: Mapping[Sequence[int], CollectiveBound]
    """By group; only the first ones, see `MAX_GROUPS`."""
    links_s: Floats
    """Busy time of each link, by all of these groups together."""
    received_s: dict[int, float] = field(default_factory=dict)
    """Time of each rank that has been asked for; see [Note: received]."""


MOST_MATRICES = 1024
"""Number of collectives whose bounds are kept of those whose bytes depend on the data: hardly any of these repeat."""


class CollectiveBounds:
    """Bounds of collectives among the ranks of a scenario, each computed once."""

    def __init__(self, scenario: Scenario, shared: Shared) -> None:
        self.cluster = scenario.cluster
        self.router = router_of(scenario.cluster, scenario.network, shared)
        self.scheduler = scheduler_of(scenario.cluster, self.router, scenario.ranks, shared)
        self.links = self.router.wiring.links
        self._taken: dict[Communication, CollectiveBound] = {}
        self._of_all: dict[Communication, _OfGroups] = {}
        self._of_matrices = Recent(MOST_MATRICES)

    def alone_s(self, communication: Communication, rank: int) -> float:
        """Return the least time of a collective for the group of `rank`, in seconds."""
        known = self._of(communication)
        group = next((group for group in known.taken if rank in group), None)
        if group is None:
            return 0.0
        if communication.carried_kind != "all-to-all":
            return known.taken[group].alone_s
        if rank not in known.received_s:
            alone = replace(communication, beside=(), group=group)
            ways = self.scheduler.candidates(alone)
            known.received_s[rank] = min(
                self.received_s(way, [_received(stage, rank) for stage in way.stages])
                if way.notices and not way.measured
                else self.of_way(way).alone_s
                for way in ways
            )
        return known.received_s[rank]

    def received_s(self, scheduled: CollectiveSchedule, messages: Sequence[Stage]) -> float:
        """Return the least time of messages that begin pair by pair, at once; see [Note: received]."""
        busy_s = sum((self._stage_s(stage) for stage in messages), np.zeros(self.links))
        return scheduled.least_fixed_s() + scheduled.factor * float(busy_s.max(initial=0.0)) if busy_s.any() else 0.0

    def links_s(self, communications: Iterable[tuple[Communication, int]]) -> Floats:
        """Return the busy time of each link for all groups of some collectives, each with its number of repetitions."""
        found = np.zeros(self.links)
        for communication, count in communications:
            found += count * self._of(communication).links_s
        return found

    def _of(self, communication: Communication) -> _OfGroups:
        """Return the bounds of a collective by group, and of all its groups together.

        Those whose bytes depend on the data are compared by identity: matrices take long to compare, and few repeat.
        """

        def bounded() -> _OfGroups:
            alone = replace(communication, beside=())
            taken = {group: self._of_group(replace(alone, group=group)) for group in communication.groups[:MAX_GROUPS]}
            return _OfGroups(taken, np.sum([each.links_s for each in taken.values()], axis=0))

        if communication.data_dependent:
            return self._of_matrices.once(Same(communication), bounded, weight=lambda _: 1)
        if communication not in self._of_all:
            self._of_all[communication] = bounded()
        return self._of_all[communication]

    def _of_group(self, communication: Communication) -> CollectiveBound:
        found = None if communication.data_dependent else self._taken.get(communication)
        if found is None:
            ways = [self.of_way(each) for each in self.scheduler.candidates(communication)]
            alone_s = min(each.alone_s for each in ways)
            found = CollectiveBound(alone_s, np.min([each.links_s for each in ways], axis=0))
            if not communication.data_dependent:
                self._taken[communication] = found
        return found

    def of_way(self, scheduled: CollectiveSchedule) -> CollectiveBound:
        """Return the bound of one schedule: no stage ends before its busiest link has carried all of its bytes."""
        busy_s = np.zeros(self.links)
        if scheduled.measured:
            return CollectiveBound(scheduled.fixed_s, busy_s)
        alone_s = scheduled.least_fixed_s()
        for stage in scheduled.stages:
            stage_s = self._stage_s(stage) * scheduled.factor
            busy_s += stage_s
            alone_s += float(stage_s.max(initial=0.0))
            alone_s += collectives.reduction_s(self.cluster, stage.reduced_bytes)
        return CollectiveBound(alone_s, busy_s)

    def _stage_s(self, stage: Stage) -> Floats:
        """Return the busy time of links for the bytes of a stage."""
        hops, links = stage.hops, self.links
        if not len(hops.source):
            return np.zeros(links)
        if stage.coupled:
            bundle = self.router.bundle(hops)
            load = collectives.summed(bundle.link, bundle.load, links)
        else:
            on = self.router.of(hops)
            load = collectives.summed(on.link, on.share * hops.weight[on.flow], links)
        return load * (stage.size_bytes * stage.stretch_ratio) / self.router.wiring.bandwidth_bytes_per_s


def _received(stage: Stage, rank: int) -> Stage:
    """Return the messages of a stage that a rank receives."""
    hops, own = stage.hops, stage.hops.target == rank
    return replace(stage, hops=Hops(hops.source[own], hops.target[own], hops.weight[own]))
