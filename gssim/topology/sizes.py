"""How many devices, other nodes and links a topology has: reckoned before any of them is made."""

from math import ceil, prod
from typing import NamedTuple

from gssim.limits import excess
from gssim.topology.kinds import FullyConnected, LeafSpine, Ring, ServerGroup, Servers, Sites, Switch, Topology, Torus


class Size(NamedTuple):
    """Numbers of what a topology has."""

    devices: int
    switches: int
    """Switches, network cards and other nodes that are no devices."""
    links: int
    """In one direction each."""


def size_of(topology: Topology) -> Size:
    """Return how much a topology stands for, at most.

    >>> link = {"bandwidth_bytes_per_s": 1e9, "latency_s": 0, "source": "example"}
    >>> size_of(FullyConnected(kind="fully-connected", devices=({"device": "a", "count": 4},), link=link))
    Size(devices=4, switches=0, links=12)
    """
    match topology:
        case Ring() | FullyConnected() | Switch():
            devices = sum(group.count for group in topology.devices)
            switched = isinstance(topology, Switch)
            links = devices * (devices - 1) if isinstance(topology, FullyConnected) else 2 * devices
            return Size(devices, int(switched), links)
        case Torus():
            devices = prod(topology.shape)
            return Size(devices, 0, 2 * len(topology.shape) * devices)
        case Servers():
            return _size_of_servers(topology)
        case Sites():
            parts = [size_of(site.topology) for site in topology.sites]
            sums = [sum(numbers) for numbers in zip(*parts, strict=True)]
            count = len(topology.sites)
            return Size(sums[0], sums[1] + count, sums[2] + 2 * sums[1] + count * (count - 1))


def _size_of_servers(topology: Servers) -> Size:
    devices = sum(group.count * group.devices for group in topology.servers)
    nodes = sum(group.count * (group.nics + 2) for group in topology.servers)  # a joint switch and the host's memory
    links = sum(2 * group.count * _links_of_server(group) for group in topology.servers)
    fabric = topology.fabric
    if not isinstance(fabric, LeafSpine):
        return Size(devices, nodes + 1, links)
    rails = max(1, *(group.nics for group in topology.servers)) if fabric.rails else 1
    leafs = ceil(sum(group.count for group in topology.servers) / fabric.servers_per_leaf) * rails
    return Size(devices, nodes + leafs + fabric.spines, links + 2 * leafs * fabric.spines)


def _links_of_server(group: ServerGroup) -> int:
    """Return how many links a server has at most: inside, to its network cards, from these to the fabric."""
    inside = 16 if group.inside == "cube-mesh" else group.devices
    return inside + 2 * group.devices + group.nics * 2


def check_size(topology: Topology) -> None:
    """Raise ValueError where a topology is larger than the limits allow."""
    for name, size in size_of(topology)._asdict().items():
        if (why := excess(name, size)) is not None:
            raise ValueError(f"topology: {why}")
