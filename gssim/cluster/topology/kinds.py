"""What a cluster file says of its wiring: a few lines for each usual kind.

A link's `latency_s` is the time of an empty message from one device to another over this kind of link, software
included. Where a switch stands between them, each of the two links has half of it.

How many devices, other nodes and links a topology has: reckoned before any of them is made.
"""

from functools import partial
from math import ceil, prod
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from gssim.cluster.presets import expanded
from gssim.limits import excess
from gssim.units import BytesPerSecond, Count, PositiveFloat, PositiveInt, Seconds, spec

CUBE_MESH_DEVICES, CUBE_MESH_LINKS = 8, 6
"""Devices of a hybrid cube mesh, and NVLinks of each of them."""


@spec
class LinkType:
    """A kind of link: a table, or the name of a preset."""

    bandwidth_bytes_per_s: BytesPerSecond
    """Of one direction; there are always both."""
    latency_s: Seconds
    """Of an empty message from device to device."""
    source: str
    """Where the numbers are from."""


NamedLink = Annotated[LinkType, BeforeValidator(partial(expanded, "links"))]


@spec
class Group:
    """Some devices of one type."""

    device: str
    """A key of `device_types`."""
    count: PositiveInt
    """How many."""


@spec
class Ring:
    """Every device is linked to the next, the last to the first."""

    kind: Literal["ring"]
    """The form of this table."""
    devices: tuple[Group, ...]
    """In rank order."""
    devices_per_host: PositiveInt = 1
    """So many in a row share a host."""
    link: NamedLink
    """Between neighbours."""


@spec
class FullyConnected:
    """Every device has a link of its own to every other."""

    kind: Literal["fully-connected"]
    """The form of this table."""
    devices: tuple[Group, ...]
    """In rank order."""
    devices_per_host: PositiveInt = 1
    """So many in a row share a host."""
    link: NamedLink
    """Between any two."""


@spec
class Switch:
    """Every device is linked to one switch that never blocks."""

    kind: Literal["switch"]
    """The form of this table."""
    devices: tuple[Group, ...]
    """In rank order."""
    devices_per_host: PositiveInt = 1
    """So many in a row share a host."""
    link: NamedLink
    """From a device to the switch and back."""


@spec
class Torus:
    """A grid whose opposite sides meet."""

    kind: Literal["torus"]
    """The form of this table."""
    device: str
    """A key of `device_types`."""
    shape: tuple[PositiveInt, ...]
    """Devices along each dimension. Along a dimension of two, neighbours share one link, not two."""
    host_shape: tuple[PositiveInt, ...] | None = None
    """Block of devices that one host drives; absent: one."""
    link: NamedLink | None = None
    """Of all dimensions."""
    dimension_links: tuple[NamedLink, ...] = ()
    """One for each dimension, in the place of `link`."""

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
            raise ValueError(f"host_shape = {list(block)}: blocks of it do not fill shape = {list(self.shape)}")


@spec
class ServerGroup:
    """Servers that are built alike."""

    count: PositiveInt
    """How many servers."""
    device: str
    """A key of `device_types`."""
    devices: PositiveInt
    """In each server."""
    inside: Literal["nvswitch", "pcie", "cube-mesh", "none"] = "none"
    """What joins the devices of a server."""
    inside_link: NamedLink | None = None
    """All that one device has: of a cube mesh, its six NVLinks together."""
    nics: Count = 0
    """Network cards of each server, shared evenly by its devices in rank order."""
    nic_link: NamedLink | None = None
    """From one network card to the fabric."""
    pcie_link: NamedLink | None = None
    """From a device to its network card and to the host's memory."""
    host_memory: bool = False
    """Whether the host's memory is a node of its own."""

    def __post_init__(self) -> None:
        """Refuse a server whose parts do not fit."""
        if (self.inside == "none") != (self.inside_link is None):
            raise ValueError(f"inside_link: {'none is used' if self.inside_link else 'missing'} with {self.inside!r}")
        if self.inside == "none" and self.devices > 1 and not self.nics:
            raise ValueError("inside = 'none': several devices without network cards cannot reach each other")
        if self.inside == "cube-mesh" and self.devices != CUBE_MESH_DEVICES:
            raise ValueError(f"devices = {self.devices}: a cube-mesh joins {CUBE_MESH_DEVICES}")
        if self.nics and self.devices % self.nics:
            raise ValueError(f"nics = {self.nics}: cannot be shared evenly by {self.devices} devices")
        for key, needed in (("nic_link", self.nics), ("pcie_link", self.nics or self.host_memory)):
            if bool(needed) != (getattr(self, key) is not None):
                raise ValueError(f"{key}: {'missing' if needed else 'there is nothing that uses it'}")


@spec
class OneSwitch:
    """One switch for all servers, that never blocks."""

    kind: Literal["switch"]
    """The form of this table."""


@spec
class LeafSpine:
    """Leaf switches for the servers, each of them linked to every spine: a fat tree of two levels."""

    kind: Literal["leaf-spine"]
    """The form of this table."""
    servers_per_leaf: PositiveInt
    """Servers of a group: they share a leaf, or as many leafs as they have network cards if `rails`."""
    spines: Count
    """None: rails that only meet inside the servers."""
    rails: bool = False
    """Whether card k of every server of a group goes to the group's leaf k."""
    oversubscription: PositiveFloat = 1.0
    """Bandwidth of a leaf's servers over that of its links to the spines."""
    hop_latency_s: Seconds = 0.5e-6
    """Of each link between leaf and spine (0.5 us: assumed, a switch and its cable)."""


@spec
class Servers:
    """Servers with several devices each, and the fabric between them."""

    kind: Literal["servers"]
    """The form of this table."""
    servers: tuple[ServerGroup, ...]
    """In rank order."""
    fabric: Annotated[OneSwitch | LeafSpine, Field(discriminator="kind")] | None = None
    """Absent: a single server."""

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
    """Part of a cluster at a place of its own."""

    name: str
    """Which no other site has."""
    topology: Annotated[Switch | Servers, Field(discriminator="kind")]
    """How it is wired."""

    def __post_init__(self) -> None:
        """Refuse a site that has nothing to link a gateway to."""
        if isinstance(self.topology, Servers) and self.topology.fabric is None:
            raise ValueError("topology.fabric: missing; a site's gateway is linked to its switches")


@spec
class Sites:
    """Sites whose gateways are linked pairwise over a wide-area network."""

    kind: Literal["sites"]
    """The form of this table."""
    sites: tuple[Site, ...]
    """In rank order."""
    link: NamedLink
    """Between two gateways; a gateway reaches its site's uppermost switches as fast, in no time."""

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
