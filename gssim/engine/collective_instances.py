"""Which groups come together for each collective of a program, and how it is carried out among them.

Groups that are alike meet as one: all of them start when the last of their members comes, and end together. See
[Note: groups] in `classes`; that their networks are alike shows once all that crosses these is known, so that groups
are told apart, and everything is arranged anew, until nothing is left to tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import simpy

from gssim.cache import Same, Shared
from gssim.cluster import Cluster, Conditions, applied
from gssim.collectives import Communication, Hops, Stage
from gssim.collectives.algorithms import SINGLE_FLOWS
from gssim.engine.selection import Scheduled, Scheduler
from gssim.engine.symmetry import Classes, Groups, RankClass, classes_of, families_of
from gssim.network import Network, Router, codes
from gssim.program import Program
from gssim.units import Ints


@dataclass(frozen=True, eq=False)
class Meeting:
    """A collective of groups that are alike: the classes that take part, and the way in which it is carried out."""

    communication: Communication
    scheduled: Scheduled
    classes: tuple[RankClass, ...]

    @property
    def is_message(self) -> bool:
        """Whether it is a message from rank to rank."""
        return self.communication.kind == "send"

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """Classes of ranks that receive in the first stage, where others do not; none: all do."""
        if self.communication.kind not in ONE_WAY or not self.scheduled.stages:
            return ()
        targets = self.scheduled.stages[0].hops.target
        return tuple(each.index for each in self.classes if np.isin(each.members, targets).any())


ONE_WAY = ("send", "broadcast")
"""Kinds in which some ranks only send at first."""


@dataclass(frozen=True, eq=False)
class Arranged:
    """A program's ranks in classes, its collectives in meetings, and the network that they use."""

    classes: tuple[RankClass, ...]
    meetings: Mapping[str, tuple[Meeting, ...]]
    """By label; one for each class of groups."""
    network: Network


def router_of(cluster: Cluster, conditions: Conditions, shared: Shared) -> Router:
    """Return the routes over a cluster's links under the conditions' faults."""
    return shared.once(
        "router",
        (Same(cluster), conditions.faults),
        lambda: Router(applied(cluster.wiring, conditions) if conditions.faults else cluster.wiring, shared.large),
    )


def scheduler_of(cluster: Cluster, router: Router, ranks: int, shared: Shared) -> Scheduler:
    """Return what finds the ways of carrying out collectives among the first devices of a cluster."""
    place = (Same(cluster), Same(router), ranks)
    return shared.once("scheduler", place, lambda: Scheduler(cluster, router, ranks, shared))


def arrange(
    env: simpy.Environment,
    cluster: Cluster,
    program: Program,
    *,
    router: Router,
    conditions: Conditions,
    shared: Shared,
    unfolded: bool = False,
) -> Arranged:
    """Return the classes, meetings and network of a program."""
    scheduler = scheduler_of(cluster, router, len(program.role_of), shared)
    kinds = {groups: scheduler.kinds(groups) for groups in families_of(program)}
    ways = _Ways(scheduler, Choice(router, conditions))
    while True:
        classes = classes_of(cluster, program, kinds=kinds, unfolded=unfolded)
        meetings = _meetings(program, classes, ways)
        stages = [stage for each in meetings.values() for meeting in each for stage in meeting.scheduled.stages]
        network = Network(env, router, stages, conditions=conditions, unfolded=unfolded, shared=shared)
        finer = {} if unfolded else _told_apart(kinds, meetings, network, router)
        if not finer:
            return Arranged(classes.ranks, meetings, network)
        kinds |= finer


class Choice:
    """Of several ways to carry out a collective, the one that is fastest on idle links."""

    def __init__(self, router: Router, conditions: Conditions) -> None:
        self.router, self.conditions = router, conditions

    def best(self, options: Sequence[Scheduled]) -> Scheduled:
        """Return the fastest option."""
        if len(options) == 1:
            return options[0]
        stages = [stage for option in options for stage in option.stages]
        network = Network(simpy.Environment(), self.router, stages, conditions=self.conditions)
        return min(options, key=lambda option: option.alone_s(network))


class _Ways:
    """How groups carry out collectives: worked out for the first of those that are alike, the same in the others."""

    def __init__(self, scheduler: Scheduler, choice: Choice) -> None:
        self.scheduler, self.choice = scheduler, choice
        self._chosen: dict[Any, Scheduled] = {}
        self._spread: dict[tuple[int, Groups], tuple[Hops, Hops]] = {}

    def of(self, communication: Communication, groups_in_all: int) -> Scheduled:
        """Return the way for all groups of a collective, which are alike; equal collectives share it.

        `groups_in_all`: how many carry it out, those that are not like these included; together they may have too many
        flows to follow each.
        """
        alone = replace(communication, beside=()) if communication.beside else communication
        told = replace(alone, pair_bytes=()) if alone.pair_bytes else alone
        key = (told, id(alone.pair_bytes))  # matrices are shared, and large
        if key not in self._chosen:
            self._chosen[key] = self.choice.best(self.scheduler.candidates(alone))
        chosen = self._chosen[key]
        if groups_in_all == 1:
            return chosen
        stages = [
            replace(stage, coupled=stage.coupled or stage.hops.count * groups_in_all > SINGLE_FLOWS)
            for stage in chosen.stages
        ]
        groups = communication.groups
        return replace(chosen, stages=tuple(self._in_every(s, groups) if communication.beside else s for s in stages))

    def _in_every(self, stage: Stage, groups: Groups) -> Stage:
        key = (id(stage.hops), groups)
        if key not in self._spread:
            self._spread[key] = (stage.hops, stage.hops.in_every(np.array(groups)))
        return replace(stage, hops=self._spread[key][1])


def _meetings(program: Program, classes: Classes, ways: _Ways) -> dict[str, tuple[Meeting, ...]]:
    parts: dict[Groups, list[tuple[Groups, tuple[RankClass, ...]]]] = {}
    found = {}
    known: dict[Communication, tuple[Meeting, ...]] = {}
    for label, communication in program.communications.items():
        alike = None if communication.pair_bytes else known.get(communication)  # matrices take long to compare
        if alike is None:
            groups = communication.groups
            if groups not in parts:
                parts[groups] = [(part, _members(part, classes.ranks)) for part in _parts(groups, classes.groups)]
            each = [(_of_part(communication, part), members) for part, members in parts[groups]]
            alike = tuple(Meeting(part, ways.of(part, len(groups)), members) for part, members in each)
            if not communication.pair_bytes:
                known[communication] = alike
        found[label] = alike
    return found


def _of_part(communication: Communication, groups: Groups) -> Communication:
    """Return a collective of some of its groups alone."""
    if communication.groups == groups:
        return communication
    return replace(communication, group=groups[0], beside=groups[1:])


def _parts(groups: Groups, classes: Mapping[Groups, Ints]) -> list[Groups]:
    """Return groups by class, those of the first one first."""
    if len(groups) == 1:
        return [groups]
    colour = classes[groups].tolist()
    return [tuple(g for g, c in zip(groups, colour, strict=True) if c == each) for each in dict.fromkeys(colour)]


def _members(groups: Groups, classes: Sequence[RankClass]) -> tuple[RankClass, ...]:
    """Return the classes of the groups' members; each is of members alone."""
    inside = {rank for group in groups for rank in group}
    return tuple(each for each in classes if each.representative in inside)


def _told_apart(
    kinds: Mapping[Groups, Ints], meetings: Mapping[str, tuple[Meeting, ...]], network: Network, router: Router
) -> dict[Groups, Ints]:
    """Return finer kinds of groups, for the families in which some that met as one are not alike in the network."""
    place = {groups: {group: i for i, group in enumerate(groups)} for groups in kinds}
    family_of = {group: groups for groups in kinds for group in groups}
    found: dict[Groups, Ints] = {}
    seen = set()
    for each in meetings.values():
        for meeting in each:
            groups = meeting.communication.groups
            for stage in meeting.scheduled.stages if len(groups) > 1 else ():
                key = (id(stage.hops), stage.coupled)
                if key in seen or not stage.hops.count:
                    continue
                seen.add(key)
                marks = _marks(stage, len(groups), network, router)
                if marks.any():
                    family = family_of[groups[0]]
                    before = found.get(family, kinds[family])
                    after = before * (int(marks.max()) + 1)
                    after[[place[family][group] for group in groups]] += marks
                    found[family] = np.unique(after, return_inverse=True)[1]
    return found


def _marks(stage: Stage, groups: int, network: Network, router: Router) -> Ints:
    """Return numbers that tell groups apart: by the classes of their sessions, and when their hops arrive."""
    sessions = np.sort(network.folded.colours[id(stage.hops), stage.coupled].reshape(groups, -1), axis=1)
    on = router.bundle(stage.hops) if stage.coupled else router.of(stage.hops)
    late = codes(on.latency_s).reshape(groups, -1)
    rows = np.column_stack([sessions, late])
    _, first, index = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first, kind="stable"), kind="stable")[index.ravel()]  # the first group's is 0
