"""Ranks that cannot be told apart, taken together: one is simulated for all of its class.

[Note: groups] Where many groups carry out the same collective, each for itself (those along an axis of a mesh), the
ones that are alike are taken together too. Groups are alike where their members are, place by place, and their
networks (what `kinds` says). Ranks are, where their groups are. So members of groups that are alike come to their
collectives at the same times, and these start together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gssim.cluster import Cluster, DeviceType, contention_groups, has_contention
from gssim.program import Program
from gssim.units import Ints, distinct


@dataclass(frozen=True, eq=False)
class RankClass:
    """Ranks that do the same at the same times."""

    index: int
    members: Ints
    host: str
    """First by name of those that members are on: the same for all classes that meet on a host. In the lab, a core."""
    on_host: int
    """How many members each of their hosts has."""

    @cached_property
    def representative(self) -> int:
        """The first member."""
        return int(self.members[0])


def is_jittery(device: DeviceType) -> bool:
    """Return whether chance changes a device's pace, so that no two ranks are alike."""
    return bool(device.step_jitter_ratio or device.task_jitter_ratio)


Groups = tuple[Sequence[int], ...]
"""Groups that carry out the same collective, each for itself; all are as large."""


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of ranks, and with them those of groups."""

    ranks: tuple[RankClass, ...]
    """By first member."""
    groups: Mapping[Groups, Ints]
    """Class of each of the groups that there are several of; see [Note: groups]."""


def classes_of(
    cluster: Cluster, program: Program, *, kinds: Mapping[Groups, Ints] | None = None, unfolded: bool = False
) -> Classes:
    """Return the classes of ranks: equal role, equal memberships, groups that are alike, and hosts that are alike.

    Ranks of devices that vary by chance stand alone. Refined until stable: a host's colour, and a group's, is made of
    its ranks', and theirs of it. `kinds`: what tells groups apart beside their members; by default nothing does.
    """
    ranks = len(program.role_of)
    roles = np.array(program.role_of, dtype=np.int64)
    devices = cluster.devices[:ranks]
    types = {device.type: cluster.device_types[device.type] for device in devices}
    if unfolded or any(is_jittery(each) for each in types.values()):
        roles = np.arange(ranks)
    names = contention_groups(cluster)[:ranks]
    hosts = np.unique(np.array(names), return_inverse=True)[1]
    several = families_of(program)
    for groups in {each.groups for each in program.communications.values()}:
        if sum(map(len, groups)) < ranks:
            inside = np.isin(np.arange(ranks), np.concatenate([np.array(group) for group in groups]))
            roles = np.unique(2 * roles + inside, return_inverse=True)[1]
    partitions = [(np.array(groups), (kinds or {}).get(groups, np.zeros(len(groups), np.int64))) for groups in several]
    coupled = any(has_contention(each) for each in types.values())
    while True:
        finer = _refined(roles, hosts) if coupled else roles
        for members, kind in partitions:
            colour = np.zeros(ranks, np.int64)
            colour[members] = 1 + _alike(finer, members, kind)[:, None]
            finer = np.unique(finer * (len(members) + 1) + colour, return_inverse=True)[1]
        if finer.max(initial=0) == roles.max(initial=0) and len(distinct(finer)) == len(distinct(roles)):
            break
        roles = finer
    found = {g: _alike(roles, members, kind) for g, (members, kind) in zip(several, partitions, strict=True)}
    return Classes(_rank_classes(names, roles, hosts), found)


def families_of(program: Program) -> list[Groups]:
    """Return the groups of every collective that more than one carries out, each family once."""
    return list(dict.fromkeys(each.groups for each in program.communications.values() if each.beside))


def _alike(colour: Ints, members: Ints, kind: Ints) -> Ints:
    """Return a number for each group (a row of members): equal where its members' colours and its kind are."""
    rows = np.column_stack([kind, colour[members]])
    return np.asarray(np.unique(rows, axis=0, return_inverse=True)[1], dtype=np.int64).ravel()


def _rank_classes(names: Sequence[str], colours: Ints, hosts: Ints) -> tuple[RankClass, ...]:
    """Return the classes of ranks of equal colours, by first member."""
    _, first, index = np.unique(colours, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    by_class = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index))
    found = []
    for number, place in enumerate(order.tolist()):
        members = by_class[ends[place - 1] if place else 0 : ends[place]]
        on_host = int(np.count_nonzero(hosts[members] == hosts[members[0]]))
        host = min(names[rank] for rank in members.tolist())
        found.append(RankClass(number, members, host, on_host))
    return tuple(found)


def _refined(colour: Ints, hosts: Ints) -> Ints:
    """Return the ranks' colours, told apart by the multiset of colours on their host until that changes nothing."""
    while True:
        order = np.lexsort((colour, hosts))
        groups = np.split(colour[order], np.cumsum(np.bincount(hosts))[:-1])
        kinds = {group: number for number, group in enumerate(dict.fromkeys(tuple(g.tolist()) for g in groups))}
        host_colour = np.array([kinds[tuple(group.tolist())] for group in groups])
        finer = np.unique(colour * len(kinds) + host_colour[hosts], return_inverse=True)[1]
        if finer.max() == colour.max() and len(distinct(finer)) == len(distinct(colour)):
            return finer
        colour = finer
