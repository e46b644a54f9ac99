"""Symmetry: classes of ranks that behave identically, of which one rank is simulated for all.

[Note: groups] Often many groups carry out the same collective independently (those along an axis of a mesh). Equal
groups are one class too. Two groups are equal if their members are equal, position by position, and their networks are
(`kinds`); two ranks are equal only if their groups are. So members of equal groups arrive at their collectives at the
same times, and these start together.

[Note: places] In an all-to-all whose messages start pair by pair (see [Note: pairs] in `rendezvous`), a rank leaves
when its own messages have arrived. When that is depends on its place in the group, so its members are not equal.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gssim.cluster import Cluster, DeviceType, contention_groups, has_contention
from gssim.program import Program
from gssim.units import Ints, distinct, distinct_with_places, kinds_of_rows


@dataclass(frozen=True, eq=False)
class RankClass:
    """Ranks that execute the same tasks at the same times."""

    index: int
    members: Ints
    host: str
    """First, by name, of the members' hosts; all classes that share a host agree on it. In the lab, a core."""
    on_host: int
    """Number of members on each of the members' hosts."""

    @cached_property
    def representative(self) -> int:
        """The first member."""
        return int(self.members[0])


def is_jittery(device: DeviceType) -> bool:
    """Return whether a device's speed varies randomly, so that no two of its ranks are equal."""
    return bool(device.step_jitter_ratio or device.task_jitter_ratio)


Groups = tuple[Sequence[int], ...]
"""Groups of equal size that carry out the same collective independently."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of ranks and of groups."""

    ranks: tuple[RankClass, ...]
    """By first member."""
    groups: Mapping[Groups, Ints]
    """For each tuple of several groups, the class of each group; see [Note: groups]."""


def classes_of(
    cluster: Cluster,
    program: Program,
    *,
    kinds: Mapping[Groups, Ints] | None = None,
    by_place: Collection[Groups] = (),
    unfolded: bool = False,
) -> Classes:
    """Return the classes of ranks with equal roles, memberships, groups and hosts.

    Ranks on devices whose speed varies randomly have classes of their own. Classes are found by colour refinement until
    it is stable: hosts and groups are coloured by their ranks' colours, then ranks by those of their hosts and groups.
    `kinds`: initial colours of groups; by default all are equal. `by_place`: groups whose members are unequal; see
    [Note: places].
    """
    ranks = len(program.role_of)
    roles = np.array(program.role_of, dtype=np.int64)
    devices = cluster.devices[:ranks]
    types = {device.type: cluster.device_types[device.type] for device in devices}
    if unfolded or any(is_jittery(each) for each in types.values()):
        roles = np.arange(ranks)
    names = contention_groups(cluster)[:ranks]
    hosts = np.unique(np.array(names), return_inverse=True)[1]
    repeated = repeated_groups(program)
    for groups in {each.groups for each, _ in program.exchanges}:
        if sum(map(len, groups)) < ranks:
            inside = np.isin(np.arange(ranks), np.concatenate([np.array(group) for group in groups]))
            roles = distinct_with_places(2 * roles + inside)[1]
    for groups in by_place:
        place = np.zeros(ranks, np.int64)
        place[np.array(groups)] = 1 + np.arange(len(groups[0]))
        roles = distinct_with_places(roles * (len(groups[0]) + 1) + place)[1]
    partitions = [(np.array(groups), (kinds or {}).get(groups, np.zeros(len(groups), np.int64))) for groups in repeated]
    coupled = any(has_contention(each) for each in types.values())
    while True:
        finer = _refined_by_host(roles, hosts) if coupled else roles
        for members, kind in partitions:
            colour = np.zeros(ranks, np.int64)
            colour[members] = 1 + _group_classes(finer, members, kind)[:, None]
            finer = distinct_with_places(finer * (len(members) + 1) + colour)[1]
        if finer.max(initial=0) == roles.max(initial=0) and len(distinct(finer)) == len(distinct(roles)):
            break
        roles = finer
    group_classes = {
        g: _group_classes(roles, members, kind) for g, (members, kind) in zip(repeated, partitions, strict=True)
    }
    return Classes(_rank_classes(names, roles, hosts), group_classes)


def repeated_groups(program: Program) -> list[Groups]:
    """Return the distinct tuples of groups, of all collectives with more than one group."""
    return list(dict.fromkeys(each.groups for each, _ in program.exchanges if each.beside))


def _group_classes(colour: Ints, members: Ints, kind: Ints) -> Ints:
    """Return a number for each group (a row of members), equal if the members' colours and the group's kind are
    equal.
    """
    return kinds_of_rows(np.column_stack([kind, colour[members]]))[0]


def _rank_classes(names: Sequence[str], colours: Ints, hosts: Ints) -> tuple[RankClass, ...]:
    """Return the classes of ranks of equal colours, by first member."""
    _, first, index = np.unique(colours, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    by_class = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index))
    classes = []
    for number, place in enumerate(order.tolist()):
        members = by_class[ends[place - 1] if place else 0 : ends[place]]
        on_host = int(np.count_nonzero(hosts[members] == hosts[members[0]])) if len(members) > 1 else 1
        host = min(names[rank] for rank in members.tolist())
        classes.append(RankClass(number, members, host, on_host))
    return tuple(classes)


def _refined_by_host(colour: Ints, hosts: Ints) -> Ints:
    """Return the ranks' colours refined by the multiset of colours on their host, until stable."""
    while True:
        order = np.lexsort((colour, hosts))
        groups = np.split(colour[order], np.cumsum(np.bincount(hosts))[:-1])
        kinds = {group: number for number, group in enumerate(dict.fromkeys(tuple(g.tolist()) for g in groups))}
        host_colour = np.array([kinds[tuple(group.tolist())] for group in groups])
        finer = distinct_with_places(colour * len(kinds) + host_colour[hosts])[1]
        if finer.max() == colour.max() and len(distinct(finer)) == len(distinct(colour)):
            return finer
        colour = finer
