"""Kinds of topologies in cluster files (ring, switch, torus, servers, sites), and the sizes of such topologies.

A link's `latency_s` is the time of an empty message from one device to another over this kind of link, including
software. If a switch is between them, each of the two links has half of it.
"""

from functools import partial
from math import ceil, prod
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from gssim.cluster.presets import expanded
from gssim.units import BytesPerSecond, Count, PositiveFloat, PositiveInt, Seconds, excess, spec

CUBE_MESH_DEVICES, CUBE_MESH_LINKS = 8, 6
"""Number of devices of a hybrid cube mesh, and of NVLinks of each of them."""


@spec
class LinkType:
    """A kind of link: a table, or the name of a preset."""

    bandwidth_bytes_per_s: BytesPerSecond
    """Bandwidth of each direction."""
    latency_s: Seconds
    """Latency of an empty message from device to device."""
    source: str
    """Source of the numbers."""


NamedLink = Annotated[LinkType, BeforeValidator(partial(expanded, "links"))]


@spec
class Group:
    """Some devices of one type."""

    device: str
    """A key of `device_types`."""
    count: PositiveInt
    """Number of devices."""


@spec
class Ring:
    """Every device is linked to the next, the last to the first."""

    kind: Literal["ring"]
    """The form of this table."""
    devices: tuple[Group, ...]
    """The devices, in rank order."""
    devices_per_host: PositiveInt = 1
    """Number of consecutive devices that share a host."""
    link: NamedLink
    """The link between adjacent devices."""


@spec
class FullyConnected:
    """Every device has a link of its own to every other."""

    kind: Literal["fully-connected"]
    """The form of this table."""
    devices: tuple[Group, ...]
    """The devices, in rank order."""
    devices_per_host: PositiveInt = 1
    """Number of consecutive devices that share a host."""
    link: NamedLink
    """The link between any two devices."""


@spec
class Switch:
    """Every device is linked to one non-blocking switch."""

    kind: Literal["switch"]
    """The form of this table."""
    devices: tuple[Group, ...]
    """The devices, in rank order."""
    devices_per_host: PositiveInt = 1
    """Number of consecutive devices that share a host."""
    link: NamedLink
    """The link between a device and the switch, alike in both directions."""


@spec
class Torus:
    """A grid of devices with wrap-around links."""

    kind: Literal["torus"]
    """The form of this table."""
    device: str
    """A key of `device_types`."""
    shape: tuple[PositiveInt, ...]
    """Devices along each dimension. Along a dimension of two, the devices share one link, not two."""
    host_shape: tuple[PositiveInt, ...] | None = None
    """Block of devices of one host; absent: one device."""
    link: NamedLink | None = None
    """Link of all dimensions."""
    dimension_links: tuple[NamedLink, ...] = ()
    """One for each dimension, instead of `link`."""

    @property
    def links(self) -> tuple[LinkType, ...]:
        """The link of each dimension."""
        return self.dimension_links or (self.link,) * len(self.shape) if self.link else self.dimension_links

    def __post_init__(self) -> None:
        """Refuse hosts that do not tile the grid, and dimensions without links."""
        if bool(self.link) == bool(self.dimension_links):
            raise ValueError("link: either this or dimension_links is needed")
        if self.dimension_links and len(self.dimension_links) != len(self.shape):
            raise ValueError(f"dimension_links: {len(self.shape)} dimensions, but {len(self.dimension_links)} links")
        block = self.host_shape
        if not self.shape:
            raise ValueError("shape: at least one dimension is needed")
        if block and (len(block) != len(self.shape) or any(n % b for n, b in zip(self.shape, block, strict=True))):
            raise ValueError(f"host_shape = {list(block)}: does not tile shape = {list(self.shape)}")


@spec
class ServerGroup:
    """Identical servers."""

    count: PositiveInt
    """Number of servers."""
    device: str
    """A key of `device_types`."""
    devices: PositiveInt
    """Number of devices in each server."""
    inside: Literal["nvswitch", "pcie", "cube-mesh", "none"] = "none"
    """Interconnect of the devices of a server."""
    inside_link: NamedLink | None = None
    """Total of all links of one device; in a cube mesh, of its six NVLinks."""
    nics: Count = 0
    """Network cards of each server, shared evenly by its devices in rank order."""
    nic_link: NamedLink | None = None
    """The link between a network card and the fabric."""
    pcie_link: NamedLink | None = None
    """Link between a device and its network card, and between a device and the host's memory."""
    host_memory: bool = False
    """Whether the host's memory is a node of its own, called HOST/memory."""
    devices_per_memory_link: PositiveInt = 1
    """Number of consecutive devices that share one link to the host's memory, behind a PCIe switch. Each has a port of
    its own there, which its network card uses too. With `inside = "pcie"`, all devices of a server share one link."""

    def __post_init__(self) -> None:
        """Refuse inconsistent parts of a server."""
        if (self.inside == "none") != (self.inside_link is None):
            raise ValueError(f"inside_link: {'none is used' if self.inside_link else 'missing'} with {self.inside!r}")
        if self.inside == "none" and self.devices > 1 and not self.nics:
            raise ValueError("inside = 'none': several devices without network cards cannot reach each other")
        if self.inside == "cube-mesh" and self.devices != CUBE_MESH_DEVICES:
            raise ValueError(
                f"devices = {self.devices}: a cube-mesh joins {CUBE_MESH_DEVICES}; for a part of one, "
                "inside = 'nvswitch' with the rate of a device's links to the others"
            )
        if self.devices % self.devices_per_memory_link:
            raise ValueError(
                f"devices_per_memory_link = {self.devices_per_memory_link}: does not divide {self.devices} devices"
            )
        if self.devices_per_memory_link > 1 and (not self.host_memory or self.inside == "pcie"):
            raise ValueError("devices_per_memory_link: not used; leave it out")
        if self.nics and self.devices % self.nics:
            raise ValueError(f"nics = {self.nics}: cannot be shared evenly by {self.devices} devices")
        for key, needed in (("nic_link", self.nics), ("pcie_link", self.nics or self.host_memory)):
            if bool(needed) != (getattr(self, key) is not None):
                raise ValueError(f"{key}: {'missing' if needed else 'not used; leave it out'}")


@spec
class OneSwitch:
    """One non-blocking switch for all servers."""

    kind: Literal["switch"]
    """The form of this table."""


@spec
class LeafSpine:
    """Leaf switches for the servers, each linked to every spine: a fat tree of two levels."""

    kind: Literal["leaf-spine"]
    """The form of this table."""
    servers_per_leaf: PositiveInt
    """Number of servers in a group. They share one leaf or, with `rails`, as many leafs as each has network cards."""
    spines: Count
    """Number of spines; 0: rails that are connected only inside the servers."""
    rails: bool = False
    """Whether card k of every server of a group is linked to the group's leaf k."""
    oversubscription: PositiveFloat = 1.0
    """Bandwidth of a leaf's links to servers, relative to that of its links to the spines."""
    hop_latency_s: Seconds = 0.5e-6
    """Latency of each link between leaf and spine (0.5 us: assumed, a switch and its cable)."""


@spec
class Servers:
    """Servers with several devices each, and the fabric between them."""

    kind: Literal["servers"]
    """The form of this table."""
    servers: tuple[ServerGroup, ...]
    """The servers, in the rank order of their devices."""
    fabric: Annotated[OneSwitch | LeafSpine, Field(discriminator="kind")] | None = None
    """Interconnect of the servers; absent: a single server."""

    def __post_init__(self) -> None:
        """Refuse servers that are not connected."""
        if not self.servers:
            raise ValueError("servers: at least one is needed")
        count, nics = sum(group.count for group in self.servers), {group.nics for group in self.servers}
        if self.fabric is None:
            if count > 1:
                raise ValueError(f"fabric: missing; {count} servers need one")
            return
        if 0 in nics:
            raise ValueError("servers: nics = 0: a server without network cards cannot reach the fabric")
        if isinstance(self.fabric, LeafSpine):
            rails, several = self.fabric.rails, count > self.fabric.servers_per_leaf
            if rails and len(nics) > 1:
                raise ValueError(f"fabric.rails: servers have {sorted(nics)} nics; rails need equally many")
            if not self.fabric.spines and (several or (rails and any(g.inside == "none" for g in self.servers))):
                raise ValueError("fabric.spines = 0: the leafs would not be connected")


@spec
class Site:
    """A part of a cluster at its own location, such as a data center."""

    name: str
    """Name, unique among the sites."""
    topology: Annotated[Switch | Servers, Field(discriminator="kind")]
    """Topology of the site."""

    def __post_init__(self) -> None:
        """Refuse a site without switches to which its gateway could be linked."""
        if isinstance(self.topology, Servers) and self.topology.fabric is None:
            raise ValueError(
                'topology.fabric: missing; a site\'s gateway is linked to its switches: fabric = { kind = "switch" }'
            )


@spec
class Sites:
    """Sites whose gateways are linked pairwise over a wide-area network."""

    kind: Literal["sites"]
    """The form of this table."""
    sites: tuple[Site, ...]
    """The sites, in the rank order of their devices."""
    link: NamedLink
    """Link between two gateways. A gateway's links to its site's uppermost switches are as fast, without latency."""

    def __post_init__(self) -> None:
        """Refuse sites that share a name."""
        names = [site.name for site in self.sites]
        if len(set(names)) < max(2, len(names)):
            raise ValueError(f"sites = {names}: at least two with different names are needed")


Topology = Annotated[
    Ring | FullyConnected | Switch | Torus | Servers | Sites,
    Field(discriminator="kind"),
]


class Size(NamedTuple):
    """Numbers of a topology's devices, other nodes and links."""

    devices: int
    switches: int
    """Switches, network cards and other nodes that are no devices."""
    links: int
    """Directed links."""


def size_of(topology: Topology) -> Size:
    """Return an upper bound on a topology's size, computed without building it.

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
    nodes = 0  # of each server: network cards, a joint switch, the host's memory, and ports and switches before it
    for group in topology.servers:
        nodes += group.count * (group.nics + 2 + (2 * group.devices if group.host_memory else 0))
    links = 0
    for group in topology.servers:  # at most: inside a server, to its network cards, from these to the fabric
        inside = 16 if group.inside == "cube-mesh" else group.devices
        links += 2 * group.count * (inside + (4 if group.host_memory else 2) * group.devices + group.nics * 2)
    fabric = topology.fabric
    if not isinstance(fabric, LeafSpine):
        return Size(devices, nodes + 1, links)
    rails = max(1, *(group.nics for group in topology.servers)) if fabric.rails else 1
    leafs = ceil(sum(group.count for group in topology.servers) / fabric.servers_per_leaf) * rails
    return Size(devices, nodes + leafs + fabric.spines, links + 2 * leafs * fabric.spines)


def check_size(topology: Topology) -> None:
    """Raise ValueError where a topology is larger than the limits allow."""
    for name, size in size_of(topology)._asdict().items():
        if (why := excess(name, size)) is not None:
            raise ValueError(f"topology: {why}")
