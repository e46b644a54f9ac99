"""Ranks that cannot be told apart, taken together: one is simulated for all of its class."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gssim.cluster import Cluster, DeviceType
from gssim.program import Program
from gssim.units import Ints


@dataclass(frozen=True, eq=False)
class RankClass:
    """Ranks that do the same at the same times."""

    index: int
    members: Ints
    host: str
    """First by name of those that members are on: the same for all classes that meet on a host."""
    on_host: int
    """How many members each of their hosts has."""

    @cached_property
    def representative(self) -> int:
        """The first member."""
        return int(self.members[0])


def is_coupled(device: DeviceType) -> bool:
    """Return whether other devices of its host, or its own communication, change a device's pace."""
    return device.neighbour_slowdown_ratio != 1 or device.communicating_slowdown_ratio != 1


def is_jittery(device: DeviceType) -> bool:
    """Return whether chance changes a device's pace, so that no two ranks are alike."""
    return bool(device.step_jitter_ratio or device.task_jitter_ratio)


def rank_classes(cluster: Cluster, program: Program, *, unfolded: bool = False) -> tuple[RankClass, ...]:
    """Return the classes of ranks, by first member: equal role, equal memberships, and hosts that are alike.

    Ranks of devices that vary by chance stand alone. Refined until stable: a host's colour is made of its ranks', and
    theirs of it.
    """
    ranks = len(program.role_of)
    roles = np.array(program.role_of, dtype=np.int64)
    devices = cluster.devices[:ranks]
    types = {device.type: cluster.device_types[device.type] for device in devices}
    if unfolded or any(is_jittery(each) for each in types.values()):
        roles = np.arange(ranks)
    for group in {each.group for each in program.communications.values() if len(each.group) < ranks}:
        inside = np.isin(np.arange(ranks), np.array(group))
        roles = np.unique(2 * roles + inside, return_inverse=True)[1]
    hosts = np.unique(np.array([device.host for device in devices]), return_inverse=True)[1]
    if any(is_coupled(each) for each in types.values()):
        roles = _refined(roles, hosts)
    _, first, index = np.unique(roles, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    by_class = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index))
    found = []
    for number, place in enumerate(order.tolist()):
        members = by_class[ends[place] - np.count_nonzero(index == place) : ends[place]]
        on_host = int(np.count_nonzero(hosts[members] == hosts[members[0]]))
        host = min(devices[rank].host for rank in members.tolist())
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
        if finer.max() == colour.max() and len(np.unique(finer)) == len(np.unique(colour)):
            return finer
        colour = finer
