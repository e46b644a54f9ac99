"""Instances of a program's collectives: which equal groups carry one out together, and by which schedule.

Equal groups form one instance: they all start when the last of their members arrives, and end together. See [Note:
groups] in `symmetry`. Whether groups see equal networks is known only once all traffic that crosses these networks is.
Groups that turn out to differ are then separated and everything is arranged again, until the classes are stable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from gssim.cluster import Cluster, Conditions, applied, contention_groups
from gssim.collectives import Communication, Hops, Stage
from gssim.collectives.algorithms import SINGLE_FLOWS
from gssim.engine.selection import CollectiveSchedule, Scheduler
from gssim.engine.symmetry import Classes, Groups, RankClass, classes_of, repeated_groups
from gssim.execution.cache import Same, Shared
from gssim.network import Clock, Network, Router, codes
from gssim.program import Program
from gssim.units import Ints, distinct_with_places, kinds_of_rows


@dataclass(frozen=True, eq=False)
class CollectiveInstance:
    """A collective of equal groups: the classes that take part, and its schedule."""

    communication: Communication
    schedule: CollectiveSchedule
    classes: tuple[RankClass, ...]

    @property
    def is_message(self) -> bool:
        """Whether it is a point-to-point message."""
        return self.communication.kind == "send"

    @cached_property
    def class_numbers(self) -> frozenset[int]:
        """Indices of the classes that take part."""
        return frozenset(each.index for each in self.classes)

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """Classes of the ranks that receive in the first stage, if other ranks only send; empty if all ranks
        receive.
        """
        if self.communication.kind not in ONE_WAY_KINDS or not self.schedule.stages:
            return ()
        targets = self.schedule.stages[0].hops.target
        return tuple(each.index for each in self.classes if np.isin(each.members, targets).any())

    @cached_property
    def pairs(self) -> Mapping[tuple[int, int, int], Stage]:
        """Messages of an all-to-all that starts pair by pair, each when its two ranks have arrived; empty: all start at
        once.

        Keys are the sender's class, the receiver's class, and how many places the receiver follows the sender in the
        group. See [Note: pairs] in `rendezvous`.
        """
        own = self.communication.carried_kind == "all-to-all" and self.schedule.notices and not self.schedule.measured
        if not own or not 1 < len(self.classes) <= MAX_PAIRED or len(self.schedule.stages) != 1:
            return {}
        (stage,) = self.schedule.stages
        groups, hops = np.array(self.communication.groups), stage.hops
        if stage.coupled or hops.count > MAX_PAIRED * (MAX_PAIRED - 1) * len(groups):
            return {}
        place, index = np.full((2, int(groups.max()) + 1), -1)
        place[groups] = np.arange(groups.shape[1])
        for each in self.classes:
            index[each.members] = each.index
        apart = (place[hops.target] - place[hops.source]) % groups.shape[1]
        keys = np.column_stack([index[hops.source], index[hops.target], apart])
        found: dict[tuple[int, int, int], Stage] = {}
        for source, target, places in np.unique(keys, axis=0).tolist():
            inside = np.flatnonzero((keys == (source, target, places)).all(axis=1))
            some = Hops(hops.source[inside], hops.target[inside], hops.weight[inside])
            found[source, target, places] = replace(stage, hops=some)
        return found


ONE_WAY_KINDS = ("send", "broadcast")
"""Kinds in whose first stage some ranks only send."""
MAX_PAIRED = 8
"""Largest number of unequal ranks whose all-to-alls are simulated pair by pair; with more, all messages start
at once.
"""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A program's rank classes and collective instances, and the network that they use."""

    classes: tuple[RankClass, ...]
    instances: Mapping[int, tuple[CollectiveInstance, ...]]
    """For each distinct collective (by `id`), its instances: one for each class of groups."""
    network: Network
    equal: Mapping[Communication, tuple[CollectiveInstance, ...]]
    """Instances by value of the collective, for collectives without a matrix of pairs."""

    def of(self, communication: Communication) -> tuple[CollectiveInstance, ...]:
        """Return the instances of a collective."""
        found = self.instances.get(id(communication))
        return self.equal[communication] if found is None else found

    @cached_property
    def all(self) -> Sequence[tuple[CollectiveInstance, ...]]:
        """The instances of each distinct collective."""
        return list({id(several): several for several in self.instances.values()}.values())


def router_of(cluster: Cluster, conditions: Conditions, shared: Shared) -> Router:
    """Return the router over a cluster's links under the conditions' faults."""
    return shared.once(
        "router",
        (Same(cluster), conditions.faults),
        lambda: Router(applied(cluster.wiring, conditions) if conditions.faults else cluster.wiring, shared.large),
    )


def scheduler_of(cluster: Cluster, router: Router, ranks: int, shared: Shared) -> Scheduler:
    """Return the scheduler of collectives among the first devices of a cluster."""
    place = (Same(cluster), Same(router), ranks)
    return shared.once("scheduler", place, lambda: Scheduler(cluster, router, ranks, shared))


def arrange(
    env: Clock,
    cluster: Cluster,
    program: Program,
    *,
    router: Router,
    conditions: Conditions,
    shared: Shared,
    unfolded: bool = False,
) -> Arrangement:
    """Return the classes, collective instances and network of a program.

    Programs with the same roles and collectives share classes and instances, for example programs that differ only in
    the number of micro-batches.
    """
    new: list[Network] = []

    def arranged() -> _Shared:
        found, network = _arrangement(env, cluster, program, router, conditions, shared, unfolded)
        new.append(network)
        return found

    matrices = any(each.pair_bytes for each, _ in program.exchanges)  # comparing matrices takes long
    distinct = () if matrices else tuple(dict.fromkeys(each for each, _ in program.exchanges))
    key = (Same(cluster), Same(router), conditions, program.role_of, distinct, unfolded)
    found = arranged() if matrices else shared.once("arrangement", key, arranged, most=MAX_ARRANGEMENTS)
    instances = {
        id(each): found.instances[id(each)] if each.pair_bytes else found.equal[each] for each, _ in program.exchanges
    }
    network = (
        new[0]
        if new
        else Network(env, router, _stages_of(instances), conditions=conditions, unfolded=unfolded, shared=shared)
    )
    return Arrangement(found.classes.ranks, instances, network, found.equal)


MAX_ARRANGEMENTS = 4
Instances = dict[int, tuple[CollectiveInstance, ...]]
"""By identity of the collective."""


@dataclass(frozen=True, eq=False)
class _Shared:
    """The part of an arrangement that programs with the same roles and collectives share."""

    classes: Classes
    instances: Instances
    equal: Mapping[Communication, tuple[CollectiveInstance, ...]]
    """Instances of the collectives that are not matrices, by value."""


def _arrangement(
    env: Clock,
    cluster: Cluster,
    program: Program,
    router: Router,
    conditions: Conditions,
    shared: Shared,
    unfolded: bool,
) -> tuple[_Shared, Network]:
    """Return the classes and instances of a program, and the network that they use."""
    scheduler = scheduler_of(cluster, router, len(program.role_of), shared)
    scheduler.route_rings(list(dict.fromkeys(each.groups for each, _ in program.exchanges)))
    kinds = {groups: scheduler.kinds(groups) for groups in repeated_groups(program)}
    schedules = _ScheduleCache(scheduler, Choice(router, conditions))
    by_place: tuple[Groups, ...] = ()
    while True:
        by_kinds = tuple((groups, tuple(kind.tolist())) for groups, kind in kinds.items())
        key = (Same(program), contention_groups(cluster), by_kinds, by_place, unfolded)
        found = partial(classes_of, cluster, program, kinds=kinds, by_place=by_place, unfolded=unfolded)
        classes = shared.once("classes", key, found, most=MAX_ARRANGEMENTS)
        instances, equal = _instances(program, classes, schedules)
        # all-to-alls that start pair by pair, of which some members are taken for equal
        unequal = [
            communication.groups
            for communication, _ in program.exchanges
            for each in instances[id(communication)]
            if each.pairs and len(each.classes) < len(communication.group) <= MAX_PAIRED
        ]
        if unequal:
            by_place = (*by_place, *dict.fromkeys(unequal))
            continue
        stages = _stages_of(instances)
        network = Network(env, router, stages, conditions=conditions, unfolded=unfolded, shared=shared)
        finer_kinds = {} if unfolded else _refined_kinds(kinds, instances, network, router)
        if not finer_kinds:
            return _Shared(classes, instances, equal), network
        kinds |= finer_kinds


def _stages_of(instances: Instances) -> list[Stage]:
    distinct = {id(several): several for several in instances.values()}.values()
    return [
        stage
        for several in distinct
        for instance in several
        for stage in (*instance.schedule.stages, *instance.pairs.values())
    ]


class Choice:
    """Chooses, of several schedules of a collective, the one that is fastest on idle links."""

    def __init__(self, router: Router, conditions: Conditions) -> None:
        self.router, self.conditions = router, conditions

    def best(self, options: Sequence[CollectiveSchedule]) -> CollectiveSchedule:
        """Return the fastest option."""
        if len(options) == 1:
            return options[0]
        stages = [stage for option in options for stage in option.stages]
        network = Network(Clock(), self.router, stages, conditions=self.conditions)
        return min(options, key=lambda option: option.alone_s(network))


class _ScheduleCache:
    """Schedules of collectives, computed for the first of equal groups and repeated for the others."""

    def __init__(self, scheduler: Scheduler, choice: Choice) -> None:
        self.scheduler, self.choice = scheduler, choice
        self._chosen: dict[Any, CollectiveSchedule] = {}

    def of(self, communication: Communication, groups_in_all: int) -> CollectiveSchedule:
        """Return the schedule of a collective for all of its (equal) groups; equal collectives share it.

        `groups_in_all`: number of all groups that carry it out, including unequal ones; if they have too many flows
        together, flows are not simulated one by one.
        """
        alone = communication.of_groups(communication.group) if communication.beside else communication
        compared = replace(alone, pair_bytes=()) if alone.pair_bytes else alone
        key = (compared, id(alone.pair_bytes))  # matrices are shared, and large
        if key not in self._chosen:
            self._chosen[key] = self.choice.best(self.scheduler.candidates(alone))
        chosen = self._chosen[key]
        if groups_in_all == 1:
            return chosen
        stages = [
            replace(
                stage,
                hops=self.scheduler.in_every(stage.hops, communication.groups) if communication.beside else stage.hops,
                coupled=stage.coupled or stage.hops.count * groups_in_all > SINGLE_FLOWS,
            )
            for stage in chosen.stages
        ]
        return replace(chosen, stages=tuple(stages))


def _instances(
    program: Program, classes: Classes, schedules: _ScheduleCache
) -> tuple[dict[int, tuple[CollectiveInstance, ...]], dict[Communication, tuple[CollectiveInstance, ...]]]:
    """Return the instances of a program's distinct collectives by identity, and by value."""
    parts: dict[Groups, list[tuple[Groups, tuple[RankClass, ...]]]] = {}
    instances: dict[int, tuple[CollectiveInstance, ...]] = {}
    by_communication: dict[Communication, tuple[CollectiveInstance, ...]] = {}
    represented = {each.representative: each for each in classes.ranks}
    for communication, _ in program.exchanges:
        alike = (
            None if communication.pair_bytes else by_communication.get(communication)
        )  # matrices take long to compare
        if alike is None:
            groups = communication.groups
            if groups not in parts:
                parts[groups] = []
                colours = classes.groups[groups].tolist() if len(groups) > 1 else [0]
                for colour in dict.fromkeys(colours):
                    part = tuple(group for group, own in zip(groups, colours, strict=True) if own == colour)
                    first = sorted(represented.keys() & chain.from_iterable(part))
                    parts[groups].append((part, tuple([represented[rank] for rank in first])))
            equal = []
            for part, members in parts[groups]:
                own = communication if part == groups else communication.of_groups(*part)
                equal.append(CollectiveInstance(own, schedules.of(own, len(groups)), members))
            alike = tuple(equal)
            if not communication.pair_bytes:
                by_communication[communication] = alike
        instances[id(communication)] = alike
    return instances, by_communication


def _refined_kinds(
    kinds: Mapping[Groups, Ints],
    instances: Mapping[int, tuple[CollectiveInstance, ...]],
    network: Network,
    router: Router,
) -> dict[Groups, Ints]:
    """Return finer kinds of groups: groups of one instance that differ in the network are separated."""
    place = {groups: {group: i for i, group in enumerate(groups)} for groups in kinds}
    collection_of = {group: groups for groups in kinds for group in groups}
    refined: dict[Groups, Ints] = {}
    seen = set()
    for several in instances.values():
        for instance in several:
            groups = instance.communication.groups
            for stage in instance.schedule.stages if len(groups) > 1 else ():
                key = (id(stage.hops), stage.coupled)
                if key in seen or not stage.hops.count:
                    continue
                seen.add(key)
                classes_of_groups = _session_classes(stage, len(groups), network, router)
                if classes_of_groups.any():
                    collection = collection_of[groups[0]]
                    before = refined.get(collection, kinds[collection])
                    after = before * (int(classes_of_groups.max()) + 1)
                    after[[place[collection][group] for group in groups]] += classes_of_groups
                    refined[collection] = distinct_with_places(after)[1]
    return refined


def _session_classes(stage: Stage, groups: int, network: Network, router: Router) -> Ints:
    """Return a class for each group: equal for groups with equal classes of sessions and equal hop latencies."""
    sessions = np.sort(network.folded.colours[id(stage.hops), stage.coupled].reshape(groups, -1), axis=1)
    on = router.bundle(stage.hops) if stage.coupled else router.of(stage.hops)
    late = codes(on.latency_s).reshape(groups, -1)
    return kinds_of_rows(np.column_stack([sessions, late]))[0]  # the first group's is 0
