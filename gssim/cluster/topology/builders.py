"""Devices, switches and directed links of a cluster as arrays: builders of each topology, and links from a list."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from math import prod
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter

from gssim.cluster.topology.kinds import (
    CUBE_MESH_LINKS,
    FullyConnected,
    Group,
    LeafSpine,
    LinkType,
    OneSwitch,
    Ring,
    ServerGroup,
    Servers,
    Sites,
    Switch,
    Topology,
    Torus,
)
from gssim.units import Floats, Ints, distinct


@dataclass(frozen=True, eq=False)
class Wiring:
    """The directed links of a cluster as arrays, one row each; at most one link from a node to another."""

    names: tuple[str, ...]
    """Names of the nodes: devices in rank order, then switches."""
    source: Ints
    """Index of the node where each link begins."""
    target: Ints
    """Index of the node where it ends."""
    bandwidth_bytes_per_s: Floats
    latency_s: Floats

    @property
    def nodes(self) -> int:
        """Number of devices and switches."""
        return len(self.names)

    @property
    def links(self) -> int:
        """Number of directed links."""
        return len(self.source)


@dataclass(frozen=True, eq=False)
class BuiltTopology:
    """A topology as devices, switches and links."""

    devices: tuple[tuple[str, str, str], ...]
    """Name, type and host of each device, in rank order."""
    switches: tuple[str, ...]
    wire: Callable[[], Wiring]
    """Function that creates the links, on demand: there may be a million, and callers may need only the devices."""
    tops: tuple[str, ...] = ()
    """The uppermost switches; a site's gateway is linked to these."""

    @cached_property
    def wiring(self) -> Wiring:
        """The links."""
        return self.wire()


@dataclass(frozen=True)
class Links:
    """Links in both directions between the nodes `a[i]` and `b[i]`."""

    a: Ints
    b: Ints
    bandwidth_bytes_per_s: Floats | float
    latency_s: float


class Connection(Protocol):
    """An explicit link, such as `gssim.cluster.cluster.Link`."""

    @property
    def between(self) -> tuple[str, str]: ...  # noqa: D102
    @property
    def bandwidth_bytes_per_s(self) -> float: ...  # noqa: D102
    @property
    def latency_s(self) -> float: ...  # noqa: D102
    @property
    def directed(self) -> bool: ...  # noqa: D102


def wiring_of_links(names: Sequence[str], links: Iterable[Connection]) -> Wiring:
    """Return explicit links as a wiring: in both directions unless directed, parallel links merged.

    Parallel links are merged into one, with the sum of their bandwidths and the latency of the fastest.
    """
    place = {name: i for i, name in enumerate(names)}
    edges: dict[tuple[int, int], tuple[float, float]] = {}
    for link in links:
        source, target = place[link.between[0]], place[link.between[1]]
        for edge in [(source, target)] if link.directed else [(source, target), (target, source)]:
            bandwidth, latency_s = edges.get(edge, (0.0, link.latency_s))
            edges[edge] = (bandwidth + link.bandwidth_bytes_per_s, min(latency_s, link.latency_s))
    ends = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    rates = np.array(list(edges.values()), dtype=np.float64).reshape(-1, 2)
    return _frozen(tuple(names), ends[:, 0], ends[:, 1], rates[:, 0], rates[:, 1])


def wired(names: tuple[str, ...], parts: Sequence[Links]) -> Wiring:
    """Return the wiring of links in both directions: for each part, all links one way, then the other."""

    def joined(arrays: list[Any], dtype: type) -> Any:
        return np.concatenate([np.empty(0, dtype), *arrays])

    def spread(values: Floats | float, links: int) -> Floats:
        return np.tile(np.broadcast_to(np.asarray(values, dtype=np.float64), (links,)), 2)

    return _frozen(
        names,
        joined([end for part in parts for end in (part.a, part.b)], np.int64),
        joined([end for part in parts for end in (part.b, part.a)], np.int64),
        joined([spread(part.bandwidth_bytes_per_s, len(part.a)) for part in parts], np.float64),
        joined([spread(part.latency_s, len(part.a)) for part in parts], np.float64),
    )


def _frozen(names: tuple[str, ...], *columns: Any) -> Wiring:
    arrays = [np.ascontiguousarray(column) for column in columns]
    for array in arrays:
        array.flags.writeable = False  # shared by all users of the cluster
    return Wiring(names, *arrays)


Ends = tuple[Ints, Ints]
MOST_KEPT = 64
"""Number of cached topologies: about as many as a sweep of rates cycles through."""

CUBE_MESH = {
    **dict.fromkeys([(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], 2),
    **dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], 1),
}
"""NVLinks between two GPUs of a DGX-1V.

Source: NVIDIA 2017, "DGX-1 with Tesla V100 system architecture", and the output of `nvidia-smi topo -m` there.
"""


@lru_cache(maxsize=MOST_KEPT)
def build(topology: Topology) -> BuiltTopology:
    """Return the devices, switches and links of a topology; equal topologies share one result.

    >>> link = {"bandwidth_bytes_per_s": "10 GB/s", "latency_s": "2 us", "source": "example"}
    >>> ring = Ring(kind="ring", devices=(Group(device="a", count=3),), link=LinkType(**link))
    >>> build(ring).wiring.source.tolist(), build(ring).wiring.target.tolist()
    ([0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 2])
    """
    match topology:
        case Ring() | FullyConnected():
            return _direct(topology)
        case Switch():
            return _switched(topology)
        case Torus():
            return _torus(topology)
        case Servers():
            return _servers(topology)
        case Sites():
            return _sites(topology)


def _direct(topology: Ring | FullyConnected) -> BuiltTopology:
    """Build a ring, or a complete graph.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms", for the sufficiency of a ring.
    """
    devices = _grouped(topology.devices, topology.devices_per_host)
    count, link = len(devices), topology.link

    def wire() -> Wiring:
        a, b = _adjacent((count,), 0) if isinstance(topology, Ring) else np.triu_indices(count, 1)
        part = Links(a.astype(np.int64), b.astype(np.int64), link.bandwidth_bytes_per_s, link.latency_s)
        return wired(_names(devices), [part])

    return BuiltTopology(devices, (), wire)


def _switched(topology: Switch) -> BuiltTopology:
    """Build a star: one crossbar in the middle, as a single NVSwitch or Ethernet switch."""
    devices = _grouped(topology.devices, topology.devices_per_host)
    count, link = len(devices), topology.link
    part = Links(np.arange(count), np.full(count, count), link.bandwidth_bytes_per_s, link.latency_s / 2)
    return BuiltTopology(devices, ("switch",), lambda: wired((*_names(devices), "switch"), [part]), ("switch",))


def _torus(topology: Torus) -> BuiltTopology:
    """Build a torus of any dimension, ranks in row-major order.

    Source: Jouppi et al. 2020, "A domain-specific supercomputer for training deep neural networks" (TPU v2 and v3:
    2-D); Jouppi et al. 2023, "TPU v4" (3-D).
    """
    shape = topology.shape
    block = topology.host_shape or (1,) * len(shape)
    places = list(np.ndindex(*shape))
    hosts = [".".join(str(i // b) for i, b in zip(place, block, strict=True)) for place in places]
    devices = tuple(
        (f"chip{'.'.join(map(str, place))}", topology.device, f"host{host}")
        for place, host in zip(places, hosts, strict=True)
    )
    parts = [
        Links(*_adjacent(shape, axis), link.bandwidth_bytes_per_s, link.latency_s)
        for axis, link in enumerate(topology.links)
    ]
    return BuiltTopology(devices, (), lambda: wired(_names(devices), parts))


def _adjacent(shape: tuple[int, ...], axis: int) -> Ends:
    """Return the ends of a torus's links along a dimension: from each place to the next.

    >>> [ends.tolist() for ends in _adjacent((2, 3), 1)]
    [[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]]
    """
    grid = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    links = shape[axis] if shape[axis] > 2 else shape[axis] - 1  # two places share one link, a single one has none
    here = grid.take(range(links), axis).ravel()
    return here, np.roll(grid, -1, axis).take(range(links), axis).ravel()


def _grouped(groups: Sequence[Group], devices_per_host: int) -> tuple[tuple[str, str, str], ...]:
    types = [group.device for group in groups for _ in range(group.count)]
    return tuple((f"device{i}", kind, f"host{i // devices_per_host}") for i, kind in enumerate(types))


def _names(devices: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    return tuple(name for name, _, _ in devices)


def _servers(topology: Servers) -> BuiltTopology:
    """Build servers one after another, then the fabric that joins their network cards."""
    devices: list[tuple[str, str, str]] = []
    inner: list[str] = []
    ranks = sum(group.count * group.devices for group in topology.servers)
    parts: list[Links] = []
    nics: list[_Nics] = []
    first = 0
    for group in topology.servers:
        node_names = _inner_nodes(group)
        numbers = range(first, first + group.count)
        shape = (group.count, group.devices)
        gpus = len(devices) + np.arange(prod(shape)).reshape(shape)
        nodes = ranks + len(inner) + np.arange(group.count * len(node_names)).reshape(group.count, len(node_names))
        devices += [(f"server{s}/gpu{i}", group.device, f"server{s}") for s in numbers for i in range(group.devices)]
        inner += [f"server{s}/{name}" for s in numbers for name in node_names]
        parts += _inside(group, gpus, dict(zip(node_names, nodes.T, strict=True)))
        cards = nodes[:, [node_names.index(f"nic{k}") for k in range(group.nics)]].ravel()
        servers = np.repeat(np.array(numbers), group.nics)
        nics.append(_Nics(cards, servers, np.tile(np.arange(group.nics), group.count), group.nic_link))
        first += group.count
    fabric, links = _fabric(topology, nics, ranks + len(inner))
    switches = (*inner, *fabric)
    tops = tuple(name for name in fabric if name.startswith("spine")) or tuple(fabric)
    return BuiltTopology(tuple(devices), switches, lambda: wired((*_names(devices), *switches), [*parts, *links]), tops)


def _inner_nodes(group: ServerGroup) -> list[str]:
    """Return the names of a server's nodes other than devices."""
    joint = [group.inside] if group.inside in ("nvswitch", "pcie") else []
    memory = ["memory"] if group.host_memory else []
    if group.host_memory and group.inside != "pcie":
        memory += [f"port{i}" for i in range(group.devices)]
        shared = group.devices_per_memory_link
        memory += [f"uplink{k}" for k in range(group.devices // shared if shared > 1 else 0)]
    return [*joint, *(f"nic{k}" for k in range(group.nics)), *memory]


def _inside(group: ServerGroup, gpus: Ints, nodes: dict[str, Ints]) -> list[Links]:
    """Return the links inside servers; `gpus` by server and index, `nodes` by name and server.

    NVSwitch: each GPU has its whole NVLink bandwidth to a crossbar. Sources: NVIDIA 2020, "DGX A100 system
    architecture"; NVIDIA 2022, "H100 tensor core GPU architecture".
    """
    parts = []
    joint = nodes.get(group.inside)
    if joint is not None and group.inside_link is not None:
        link = group.inside_link
        both = np.broadcast_to(joint[:, None], gpus.shape)
        parts.append(Links(gpus.ravel(), both.ravel(), link.bandwidth_bytes_per_s, link.latency_s / 2))
    if group.inside == "cube-mesh" and group.inside_link is not None:
        # a hybrid cube mesh (DGX-1V) of single and double NVLinks, six for each GPU
        link = group.inside_link
        one = link.bandwidth_bytes_per_s / CUBE_MESH_LINKS
        parts += [Links(gpus[:, a], gpus[:, b], count * one, link.latency_s) for (a, b), count in CUBE_MESH.items()]
    if group.pcie_link is None:
        return parts
    bandwidth_bytes_per_s, half_s = group.pcie_link.bandwidth_bytes_per_s, group.pcie_link.latency_s / 2
    root = nodes.get("pcie")
    ends = [root] if root is not None else list(gpus.T)
    if group.host_memory and root is None:  # a device reaches its network card and the host's memory through one port
        ends = [nodes[f"port{i}"] for i in range(group.devices)]
        parts += [Links(gpu, port, bandwidth_bytes_per_s, 0.0) for gpu, port in zip(gpus.T, ends, strict=True)]
    for k in range(group.nics):
        users = range(k * group.devices // group.nics, (k + 1) * group.devices // group.nics)
        joined = ends if root is not None else [ends[user] for user in users]
        parts += [Links(end, nodes[f"nic{k}"], bandwidth_bytes_per_s, half_s) for end in joined]
    if not group.host_memory:
        return parts
    shared = group.devices_per_memory_link
    if shared > 1:
        uplinks = [nodes[f"uplink{k}"] for k in range(group.devices // shared)]
        parts += [Links(port, uplinks[i // shared], bandwidth_bytes_per_s, 0.0) for i, port in enumerate(ends)]
        ends = uplinks
    parts += [Links(end, nodes["memory"], bandwidth_bytes_per_s, half_s) for end in ends]
    return parts


@dataclass(frozen=True)
class _Nics:
    """The network cards of a group of servers, one after another."""

    nodes: Ints
    server: Ints
    number: Ints
    link: LinkType | None


def _fabric(topology: Servers, groups: Sequence[_Nics], first: int) -> tuple[list[str], list[Links]]:
    """Return the switches of the fabric, numbered from node `first`, and their links."""
    fabric = topology.fabric
    if fabric is None:
        return [], []
    ports = [(nics, nics.link) for nics in groups if nics.link is not None]
    if isinstance(fabric, OneSwitch):
        return ["switch"], [_to_leafs(nics.nodes, np.full(len(nics.nodes), first), link) for nics, link in ports]
    return _leaf_spine(fabric, ports, first)


def _to_leafs(nodes: Ints, leafs: Ints, link: LinkType) -> Links:
    return Links(nodes, leafs, link.bandwidth_bytes_per_s, link.latency_s / 2)


def _leaf_spine(
    fabric: LeafSpine, ports: Sequence[tuple[_Nics, LinkType]], first: int
) -> tuple[list[str], list[Links]]:
    """Return the leafs and spines of a two-level fat tree, and their links.

    Sources: Leiserson 1985, "Fat-trees"; Al-Fares, Loukissas & Vahdat 2008, "A scalable, commodity data center network
    architecture". Rails: NVIDIA 2022, "Doubling all2all performance with NCCL 2.12"; without spines: Wang et al. 2023,
    "Optimized network architectures for large language model training with billions of parameters" (rail-only).
    """
    rails = 1 + max(int(nics.number.max()) for nics, _ in ports) if fabric.rails else 1
    placed = [
        (nics.server // fabric.servers_per_leaf * rails + (nics.number if fabric.rails else 0), link, nics)
        for nics, link in ports
    ]
    leafs = 1 + max(int(leaf.max()) for leaf, _, _ in placed)
    down_bytes_per_s = sum(np.bincount(leaf, minlength=leafs) * link.bandwidth_bytes_per_s for leaf, link, _ in placed)
    links = [_to_leafs(nics.nodes, first + leaf, link) for leaf, link, nics in placed]
    if fabric.spines:
        up = np.asarray(down_bytes_per_s) / (fabric.oversubscription * fabric.spines)
        below = np.repeat(np.arange(leafs), fabric.spines)
        above = np.tile(np.arange(fabric.spines), leafs)
        links.append(Links(first + below, first + leafs + above, up[below], fabric.hop_latency_s))
    return [*(f"leaf{i}" for i in range(leafs)), *(f"spine{i}" for i in range(fabric.spines))], links


def _sites(topology: Sites) -> BuiltTopology:
    """Build sites: for each, its devices and switches, prefixed with the site's name, and a gateway.

    Source: for rates and delays of such links, Yuan et al. 2022, "Decentralized training of foundation models in
    heterogeneous environments".
    """
    built = [(site.name, build(site.topology)) for site in topology.sites]
    devices = tuple((f"{s}/{n}", kind, f"{s}/{host}") for s, part in built for n, kind, host in part.devices)
    switches = [f"{s}/{name}" for s, part in built for name in (*part.switches, "gateway")]
    names = (*_names(devices), *switches)

    def wire() -> Wiring:
        return wired(names, _links_of_sites(topology, {name: i for i, name in enumerate(names)}, built))

    return BuiltTopology(devices, tuple(switches), wire)


def _links_of_sites(topology: Sites, place: dict[str, int], built: Sequence[tuple[str, BuiltTopology]]) -> list[Links]:
    """Return the links inside and between sites; `place`: index of each node by its name."""
    parts = []
    for s, part in built:
        index = np.array([place[f"{s}/{name}"] for name in part.wiring.names], dtype=np.int64)
        half = part.wiring.source < part.wiring.target  # each link exists in both directions
        wires = part.wiring
        ends = index[wires.source[half]], index[wires.target[half]]
        parts += [
            Links(ends[0][same], ends[1][same], wires.bandwidth_bytes_per_s[half][same], float(latency_s))
            for latency_s in distinct(wires.latency_s[half])
            for same in [wires.latency_s[half] == latency_s]
        ]
        tops = np.array([place[f"{s}/{name}"] for name in part.tops])
        gateway = np.full(len(tops), place[f"{s}/gateway"])
        parts.append(Links(tops, gateway, topology.link.bandwidth_bytes_per_s, 0.0))
    gateways = [place[f"{s}/gateway"] for s, _ in built]
    pairs = np.array(list(combinations(gateways, 2)), dtype=np.int64)
    parts.append(Links(pairs[:, 0], pairs[:, 1], topology.link.bandwidth_bytes_per_s, topology.link.latency_s))
    return parts


RATES = frozenset({"oversubscription", "hop_latency_s"})
"""Keys that are rates: like the rates of links, they are not part of a topology's structure."""

_ANY: TypeAdapter[Any] = TypeAdapter(Topology)


def structure_of(topology: Topology) -> dict[str, Any]:
    """Return a topology's structure without rates, sources and names: equal for topologies that differ only in these.

    Device types are numbered in the order in which ranks first use them.
    """
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(kind for _, kind, _ in build(topology).devices))}
    data: dict[str, Any] = _structure(_ANY.dump_python(topology, mode="json", exclude_defaults=True), kinds)
    return data


def _structure(data: Any, kinds: dict[str, int]) -> Any:
    if isinstance(data, list):
        return [_structure(item, kinds) for item in data]
    if not isinstance(data, dict):
        return data
    kept = {key: value for key, value in data.items() if not key.endswith("link") and key not in RATES | {"name"}}
    return {key: kinds[value] if key == "device" else _structure(value, kinds) for key, value in kept.items()}
