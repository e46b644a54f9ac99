"""Layout of a cluster's drawing: positions of nodes and boxes in inches; repeated parts are left out and counted."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, cos, pi, prod, sin

import networkx as nx
import numpy as np

from gssim.cluster import Cluster
from gssim.cluster.topology import FullyConnected, LeafSpine, Ring, ServerGroup, Servers, Sites, Switch, Torus, Wiring

ALL_SERVERS, SHOWN_SERVERS, SHOWN_OF_ONE_KIND = 8, 2, 4
SHOWN_SPINES, SHOWN_AROUND, SHOWN_ALONG = 8, 24, 16
LABELLED_LINKS, LABELLED_NODES = 16, 80


@dataclass(frozen=True)
class Node:
    """A device or switch in the picture: its centre, size and label (`below`: label under it)."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str = ""
    points: float = 7.0
    below: str = ""


@dataclass(frozen=True)
class Box:
    """A frame around nodes: a server, host or site."""

    left: float
    bottom: float
    right: float
    top: float
    text: str = ""
    kind: str = "server"


@dataclass
class Layout:
    """Positions of everything in the picture."""

    nodes: dict[str, Node] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    ends: list[tuple[tuple[float, float], tuple[float, float]]] = field(default_factory=list)
    """Links that leave the picture, as (start, end)."""
    hidden: set[frozenset[str]] = field(default_factory=set)
    """Pairs of nodes whose link is not drawn as a line, but as two of `ends`."""
    notes: list[tuple[float, float, str]] = field(default_factory=list)
    planes: list[list[tuple[float, float]]] = field(default_factory=list)
    """Outlines of a 3-D torus's planes."""
    labelled: bool = False
    """Whether every link carries its rate."""

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, bottom, right and top of the picture, in the units of `nodes`."""
        xs = [x for n in self.nodes.values() for x in (n.x - n.width / 2, n.x + n.width / 2)]
        ys = [y for n in self.nodes.values() for y in (n.y - n.height / 2 - 0.17 * bool(n.below), n.y + n.height / 2)]
        xs += [x for b in self.boxes for x in (b.left, b.right)] + [x for ends in self.ends for x, _ in ends]
        ys += [y for b in self.boxes for y in (b.bottom, b.top)] + [y for ends in self.ends for _, y in ends]
        return min(xs), min(ys), max(xs), max(ys)

    def add(self, other: "Layout", x: float, y: float) -> None:
        """Add another layout, moved by (x, y)."""
        for name, n in other.nodes.items():
            self.nodes[name] = Node(n.x + x, n.y + y, n.width, n.height, n.kind, n.text, n.points, n.below)
        self.boxes += [Box(b.left + x, b.bottom + y, b.right + x, b.top + y, b.text, b.kind) for b in other.boxes]
        self.ends += [((a + x, b + y), (c + x, d + y)) for (a, b), (c, d) in other.ends]
        self.hidden |= other.hidden
        self.planes += [[(a + x, b + y) for a, b in corners] for corners in other.planes]
        self.notes += [(a + x, b + y, text) for a, b, text in other.notes]


# Layouts -------------------------------------------------------------------------------------------------------------


def layout_of(cluster: Cluster) -> Layout:
    """Return the layout of a cluster."""
    names = [device.name for device in cluster.devices]
    match cluster.topology:
        case Ring() | FullyConnected() | Switch():
            return _around(names, "switch" if isinstance(cluster.topology, Switch) else None)
        case Torus(shape=shape) if len(shape) == 1:
            return _around(names, None)
        case Torus(shape=shape) if len(shape) <= 3:
            return _grid(cluster.topology)
        case Servers():
            return _servers(cluster.topology, cluster.wiring, "", big=sum(_shown(cluster.topology)) <= 2)
        case Sites():
            return _sites(cluster.topology, cluster.wiring)
        case _:
            return _free(cluster)


def _around(names: Sequence[str], middle: str | None, prefix: str = "") -> Layout:
    """Return devices on a circle, with a switch in the middle if there is one.

    The first is at the top. In a site, which has a `prefix`, all are turned by half a place, so that the link to the
    site's gateway passes between two.
    """
    layout = Layout()
    shown = names if len(names) <= SHOWN_AROUND else names[: SHOWN_AROUND - 1]
    places = len(shown) + (len(shown) < len(names))
    radius = max(1.5, 0.62 * places / (2 * pi))
    first = pi / 2 - (pi / places if prefix else 0.0)
    for i, name in enumerate(shown):
        angle = first - 2 * pi * i / places
        node = Node(radius * cos(angle), radius * sin(angle), 0.46, 0.46, "device", _number(name), 9)
        layout.nodes[name] = node
    if len(shown) < len(names):
        angle = first + 2 * pi / places
        text = f"\u2026\n{len(names) - len(shown):,} more"
        layout.notes.append((radius * cos(angle), radius * sin(angle), text))
    if middle:
        layout.nodes[prefix + middle] = Node(0, 0, 0.9, 0.5, "switch", middle, 9)
    return layout


def _number(name: str) -> str:
    """Return the number at the end of a name: `3` of `server0/gpu3`."""
    return name.rpartition("/")[2].lstrip("abcdefghijklmnopqrstuvwxyz")


def _grid(topology: Torus) -> Layout:
    """Return a torus as a grid, a third dimension as planes one above the other."""
    layout = Layout()
    shape = tuple(min(n, SHOWN_ALONG) for n in topology.shape)
    depth, rows, columns = (1,) * (3 - len(shape)) + shape
    size, pitch = (0.34, 0.5) if max(shape) > 4 else (0.44, 0.72)
    slant = (0.5 * pitch, 0.5 * pitch) if depth > 1 else (0.0, pitch)
    wide = pitch if depth == 1 else 1.7 * pitch
    plane = rows * slant[1] + 0.35 * pitch

    def middle(z: float, y: float, x: float) -> tuple[float, float]:
        return x * wide - y * slant[0], -y * slant[1] - z * plane

    for place in np.ndindex(depth, rows, columns):
        name = "chip" + ".".join(str(i) for i in place[3 - len(shape) :])
        text = name.removeprefix("chip") if size > 0.4 else ""
        layout.nodes[name] = Node(*middle(*place), size, size * (0.62 if depth > 1 else 1), "device", text, 6.5)
    _wrap(layout, topology, (depth, rows, columns), middle)
    for z in range(depth if depth > 1 else 0):
        corners = [(-0.45, -0.45), (-0.45, columns - 0.55), (rows - 0.55, columns - 0.55), (rows - 0.55, -0.45)]
        layout.planes.append([middle(z, y, x) for y, x in corners])
    left_out = prod(topology.shape) - prod(shape)
    if left_out:
        _, bottom, right, _ = layout.extent
        sizes = " \u00d7 ".join(f"{n:,}" for n in topology.shape)
        layout.notes.append((right / 2, bottom - 0.3, f"\u2026 {left_out:,} more of {sizes}"))
    if depth == 1 and topology.host_shape:
        high, wide = topology.host_shape
        edge = 0.44 * pitch
        for row, column in np.ndindex(ceil(rows / high), ceil(columns / wide)):
            left, top = column * wide * pitch - edge, -row * high * pitch + edge
            right, bottom = left + (wide - 1) * pitch + 2 * edge, top - (high - 1) * pitch - 2 * edge
            layout.boxes.append(Box(left, bottom, right, top, kind="host"))
    return layout


def _wrap(
    layout: Layout,
    topology: Torus,
    shape: tuple[int, int, int],
    middle: Callable[[float, float, float], tuple[float, float]],
) -> None:
    """Add a stub wherever a link leaves the grid for the opposite side."""
    flat = 3 - len(topology.shape)
    whole = (1,) * (3 - len(topology.shape)) + topology.shape
    for axis, (shown, length) in enumerate(zip(shape, whole, strict=True)):
        if length < 3:
            continue  # along an axis of two devices there is one link, which is in the grid
        reach = 0.3 if axis == 0 else 0.62
        for place in np.ndindex(shape):
            for step in [-reach] * (place[axis] == 0) + [reach] * (place[axis] == shown - 1):
                z, y, x = (i + step * (k == axis) for k, i in enumerate(place))
                layout.ends.append((middle(*place), middle(z, y, x)))
            if place[axis] == 0:
                last = (*place[:axis], length - 1, *place[axis + 1 :])
                layout.hidden.add(frozenset("chip" + ".".join(map(str, at[flat:])) for at in (place, last)))


def _shown(topology: Servers) -> list[int]:
    """Return the number of drawn servers of each group."""
    counts = [group.count for group in topology.servers]
    most = SHOWN_SERVERS if len(counts) > 1 else SHOWN_OF_ONE_KIND
    return counts if sum(counts) <= ALL_SERVERS else [min(count, most) for count in counts]


def _servers(topology: Servers, wiring: Wiring, prefix: str, *, big: bool) -> Layout:
    """Return servers in a row, their leafs above them and the spines on top."""
    layout = Layout()
    x, first = 0.0, 0
    for group, shown in zip(topology.servers, _shown(topology), strict=True):
        for number in range(first, first + shown):
            server = _server(group, f"{prefix}server{number}", big=big)
            left, _, right, _ = server.extent
            layout.add(server, x - left, 0)
            x += right - left + 0.22
        if shown < group.count:
            like = f"\u2026\n{group.count - shown:,} more\nlike these\n\u2026"
            height = _server(group, "", big=big).boxes[0].top
            layout.boxes.append(Box(x, 0, x + 0.95, height, like, "more"))
            x += 0.95 + 0.22
        x += 0.25
        first += group.count
    if topology.fabric is not None:
        _switches(layout, topology, wiring, prefix)
    return layout


def _server(group: ServerGroup, name: str, *, big: bool) -> Layout:
    """Return one server: from top to bottom its network cards, devices, NVSwitch or PCIe, the host's memory."""
    layout = Layout()
    pitch, points = (0.62, 8.0) if big else (0.2, 6.0)
    places = [(i * pitch, 0.0) for i in range(group.devices)]
    if group.inside == "cube-mesh":  # devices 0, 3, 7 and 4 on the nearer face
        wide, tall = 2.4 * pitch, 1.6 * pitch
        left = [(0.0, 2 * tall), (wide, 1.45 * tall), (wide, 0.55 * tall), (0.0, 0.0)]
        places = left + [(3 * wide - x, y) for x, y in left]
    if group.devices == 1:
        pitch = max(pitch, 0.5)
    width = max(x for x, _ in places)
    low, high = min(y for _, y in places), max(y for _, y in places)
    for i, (x, y) in enumerate(places):
        text = f"GPU{i}" if big else ""
        layout.nodes[f"{name}/gpu{i}"] = Node(x, y, 0.8 * pitch, 0.8 * pitch, "device", text, points)
    gap = 1.25 * pitch if big else 0.36
    if group.host_memory and group.inside != "pcie":  # ports, and switches of several, between devices and memory
        shared = group.devices_per_memory_link
        for part, count in (("port", group.devices), ("uplink", group.devices // shared if shared > 1 else 0)):
            high += 0.5 * gap if count else 0.0
            for k in range(count):
                x = (k + 0.5) * (width + pitch) / count - pitch / 2
                layout.nodes[f"{name}/{part}{k}"] = Node(x, high, 0.4 * pitch, 0.12 * pitch, "pcie", "", points)
    for kind, text, x, y in _bars(group, width / 2, low - gap, high + gap):
        points_in = points + 1 if big else points
        words_in = len(text) * 0.6 * points_in / 72 + 0.1  # of few devices, the label is wider than they are
        long = max(width + 0.8 * pitch, words_in), 0.36 if big else 0.16
        layout.nodes[f"{name}/{kind}"] = Node(x, y, *long, kind, text, points_in)
        low, high = min(low, y), max(high, y)
    cards = high + gap
    for k in range(group.nics):
        x = (k + 0.5) * (width + pitch) / group.nics - pitch / 2
        text = f"NIC{k}" if big else ""
        layout.nodes[f"{name}/nic{k}"] = Node(x, cards, 0.68 * pitch, 0.42 * pitch, "nic", text, points - 1)
    edge = 0.45 * pitch if big else 0.16
    caption = 0.34 if big else 0.4
    kinds = f"{group.devices} \u00d7 {group.device}"
    title = f"{name}: {kinds}" if big else f"{name}\n{kinds}"
    top = cards if group.nics else high + edge
    words = (0.08 if big else 0.064) * max(map(len, title.split("\n"))) + 0.1  # of one device, its name is wider
    beside = max(edge + pitch / 2, (words - width) / 2)
    box = Box(-beside, low - (0.5 * pitch if big else edge) - caption, width + beside, top, title)
    layout.boxes.append(box)
    moved = Layout()
    moved.add(layout, 0, -box.bottom)
    return moved


def _bars(group: ServerGroup, x: float, below: float, above: float) -> list[tuple[str, str, float, float]]:
    """Return kind, label and position of a server's wide nodes: NVSwitch or PCIe below the devices, memory above."""
    bars: list[tuple[str, str, float, float]] = []
    if group.inside in ("nvswitch", "pcie"):
        bars.append((group.inside, {"nvswitch": "NVSwitch", "pcie": "PCIe"}[group.inside], x, below))
    if group.host_memory:
        bars.append(("memory", "host memory", x, above))
    return bars


def _switches(layout: Layout, topology: Servers, wiring: Wiring, prefix: str) -> None:
    """Add the leaf switches above the network cards that they connect, and the spines above the leafs."""
    served, places = defaultdict(list), defaultdict(list)
    for i, name in enumerate(wiring.names):
        places[name].append(i)
    for name, x in [(name, node.x) for name, node in layout.nodes.items() if node.kind == "nic"]:
        linked = {wiring.names[i] for i in wiring.target[np.isin(wiring.source, places[name])]}
        for other in linked - layout.nodes.keys():
            served[other].append(x)
    left, _, right, top = layout.extent
    leafs = sorted(served, key=lambda name: int(_number(name) or 0))
    width = min(1.15, (right - left) / max(1, len(leafs)) - 0.08)
    means = [float(np.mean(served[name])) for name in leafs]
    xs = means
    if any(b - a < width + 0.05 for a, b in pairwise(means)):
        xs = [left + (i + 0.5) * (right - left) / len(leafs) for i in range(len(leafs))]
    rise = 0.75 if len(leafs) == 1 else 1.0
    for name, x in zip(leafs, xs, strict=True):
        layout.nodes[name] = Node(x, top + rise, width, 0.3, "switch", name.removeprefix(prefix), 8)
    fabric = topology.fabric
    if not isinstance(fabric, LeafSpine):
        return
    every = [name.removeprefix(prefix) for name in wiring.names if name.startswith(prefix)]
    all_leafs = sum(name.startswith("leaf") for name in every)
    if all_leafs > len(leafs):
        text = f"\u2026 {all_leafs - len(leafs):,} more leafs"
        layout.notes.append((right + 0.75, top + rise, text))
    spines = min(fabric.spines, SHOWN_SPINES)
    for i in range(spines):
        x = left + (i + 0.5) * (right - left) / spines
        width = min(1.0, (right - left) / spines - 0.08)
        layout.nodes[f"{prefix}spine{i}"] = Node(x, top + rise + 1.1, width, 0.3, "switch", f"spine{i}", 8)
    if fabric.spines > spines:
        text = f"\u2026 {fabric.spines - spines:,} more spines"
        layout.notes.append((right + 0.75, top + rise + 1.1, text))


def _sites(topology: Sites, wiring: Wiring) -> Layout:
    """Return sites side by side, each a large box with its gateway on top."""
    layout = Layout()
    big = sum(sum(_shown(s.topology)) if isinstance(s.topology, Servers) else 1 for s in topology.sites) <= 2
    x = 0.0
    parts = []
    for site in topology.sites:
        prefix = f"{site.name}/"
        if isinstance(site.topology, Servers):
            part = _servers(site.topology, wiring, prefix, big=big)
        else:
            groups = site.topology.devices
            names = [f"{prefix}device{i}" for i in range(sum(group.count for group in groups))]
            part = _around(names, "switch", prefix)
        parts.append((site.name, part))
    height = max(part.extent[3] - part.extent[1] for _, part in parts)
    for name, part in parts:
        left, bottom, right, _ = part.extent
        layout.add(part, x - left, -bottom)
        middle = x + (right - left) / 2
        layout.nodes[f"{name}/gateway"] = Node(middle, height + 0.85, 1.1, 0.34, "gateway", "gateway", 9)
        layout.boxes.append(Box(x - 0.25, -0.5, x + right - left + 0.25, height + 0.85, f"site {name}", "site"))
        x += right - left + 2.3
    return layout


def _free(cluster: Cluster) -> Layout:
    """Return the layout of an arbitrary cluster, whose distances approximate those in the graph."""
    names = cluster.wiring.names
    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(names)
    wiring = cluster.wiring
    graph.add_edges_from((names[a], names[b]) for a, b in zip(wiring.source, wiring.target, strict=True))
    places = nx.kamada_kawai_layout(graph) if len(names) > 2 else {n: (2.0 * i, 0.0) for i, n in enumerate(names)}
    scale = 1.15 * len(names) ** 0.5 if len(names) > 2 else 1.7
    few = len(names) <= LABELLED_NODES
    layout = Layout(labelled=len(wiring.source) <= 2 * LABELLED_LINKS)
    for device in cluster.devices:
        x, y = (scale * float(c) for c in places[device.name])
        below = f"{device.type}\non host {device.host}" if few else ""
        text = device.name if few else ""
        width = max(0.5, 0.085 * len(text) + 0.16)
        layout.nodes[device.name] = Node(x, y, width, 0.42 if few else 0.2, "device", text, 8.5, below)
    for name in cluster.switches:
        x, y = (scale * float(c) for c in places[name])
        width = max(0.7, 0.09 * len(name) + 0.2)
        layout.nodes[name] = Node(x, y, width if few else 0.3, 0.42 if few else 0.2, "switch", name if few else "", 9)
    return layout
