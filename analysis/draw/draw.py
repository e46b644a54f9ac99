"""Drawing of a cluster: servers as boxes with their devices, switches above them, a torus as a grid.

`analysis.draw.layout` places the nodes; then every link between two drawn nodes is added. Kinds of device differ in
colour, hatching and label, kinds of link in width and dashes, so that both can be distinguished in grey.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, Polygon, Rectangle
from matplotlib.patheffects import Stroke

from analysis.charts.drawing import STYLE, new_figure, plain, write_heading
from analysis.draw.layout import Box, Layout, Node, layout_of
from gssim.cluster import Cluster
from gssim.cluster.topology import LeafSpine, Servers, Wiring
from gssim.units import human_bytes, human_seconds

# Colours: Okabe & Ito 2008, "Color Universal Design"; hatching and lightness differ from one to the next.
LOOKS = (
    ("#0072B2", ""),
    ("#E69F00", "////"),
    ("#56B4E9", "...."),
    ("#D55E00", "xxxx"),
    ("#F0E442", "\\\\\\\\"),
    ("#009E73", "++++"),
    ("#CC79A7", "oo"),
)
DARK = ("#0072B2", "#D55E00", "#009E73")
SWITCH_COLOURS = {"nvswitch": "#BFE3D0", "pcie": "0.88", "nic": "0.78", "memory": "0.93", "gateway": "0.35"}

LINES: dict[str, dict[str, Any]] = {
    "device and device": {"color": "#00704F", "linewidth": 1.5},
    "device and device, double": {  # a wide line with a white one in it
        "color": "#00704F",
        "linewidth": 4.5,
        "path_effects": [Stroke(), Stroke(linewidth=1.5, foreground="white")],
    },
    "device and NVSwitch": {"color": "#00704F", "linewidth": 2.0},
    "device and PCIe": {"color": "0.35", "linewidth": 1.4},
    "PCIe inside the server": {"color": "0.45", "linewidth": 0.8, "linestyle": (0, (1, 1.2))},
    "device and switch": {"color": "0.15", "linewidth": 1.2},
    "network card and switch": {"color": "0.15", "linewidth": 0.9},
    "leaf and spine": {"color": "0.45", "linewidth": 1.1, "linestyle": (0, (5, 1.5))},
    "switch and gateway": {"color": "0.15", "linewidth": 0.9, "linestyle": (0, (5, 1.5))},
    "wide-area network": {"color": "#B03000", "linewidth": 3.0, "linestyle": (0, (6, 1.2, 1, 1.2))},
}
WRAPPED: dict[str, Any] = {"color": "#00704F", "linewidth": 1.2, "linestyle": (0, (2, 1))}
MARGIN_IN = 0.35


# Links ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """A link between two drawn nodes, with its kind."""

    a: str
    b: str
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: str
    both_ways: bool


def wires_of(wiring: Wiring, nodes: dict[str, Node]) -> list[Wire]:
    """Return the links among the drawn nodes, both directions as one."""
    rows = np.array([i for i, name in enumerate(wiring.names) if name in nodes])
    inside = np.flatnonzero(np.isin(wiring.source, rows) & np.isin(wiring.target, rows))
    ends = {(int(wiring.source[i]), int(wiring.target[i])): i for i in inside}
    wires = []
    for (source, target), i in ends.items():
        back = (target, source) in ends
        if back and source > target:
            continue
        a, b = wiring.names[source], wiring.names[target]
        rates = (float(wiring.bandwidth_bytes_per_s[i]), float(wiring.latency_s[i]))
        wires.append(Wire(a, b, *rates, _kind(a, b, nodes), back))
    return _doubled(wires)


def _kind(a: str, b: str, nodes: dict[str, Node]) -> str:
    kinds = {nodes[a].kind, nodes[b].kind}
    if kinds == {"device"}:
        return "device and device"
    if kinds == {"gateway"}:
        return "wide-area network"
    if "gateway" in kinds:
        return "switch and gateway"
    if "nvswitch" in kinds:
        return "device and NVSwitch"
    if kinds == {"device", "pcie"}:
        return "device and PCIe"
    if kinds & {"pcie", "memory"} or kinds == {"device", "nic"}:
        return "PCIe inside the server"
    if "nic" in kinds:
        return "network card and switch"
    return "device and switch" if "device" in kinds else "leaf and spine"


def _doubled(wires: list[Wire]) -> list[Wire]:
    """Return the wires with double links of a cube mesh marked in their kind."""
    rates = defaultdict(set)
    for wire in wires:
        if wire.kind == "device and device":
            rates[wire.a.rpartition("/")[0]].add(wire.bandwidth_bytes_per_s)

    def kind(wire: Wire) -> str:
        server = wire.a.rpartition("/")[0]
        double = server and wire.kind == "device and device" and wire.bandwidth_bytes_per_s > 1.5 * min(rates[server])
        return f"{wire.kind}, double" if double else wire.kind

    return [replace(wire, kind=kind(wire)) for wire in wires]


def rate(bytes_per_s: float) -> str:
    """Return a bandwidth as text, in the decimal units of data sheets.

    >>> rate(2.4e11), rate(1.15e8)
    ('240 GB/s', '115 MB/s')
    """
    units = (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
    unit, factor = next(((unit, factor) for unit, factor in units if bytes_per_s >= factor), ("B/s", 1.0))
    return f"{bytes_per_s / factor:.3g} {unit}"


def _delay(time_s: float) -> str:
    number, unit = human_seconds(time_s).split(" ")
    return f"{float(number):.3g} {unit}"


def _rates(wires: Sequence[Wire]) -> str:
    """Return bandwidths and latencies of the links of one kind, as text."""
    bandwidths = list(dict.fromkeys(map(rate, sorted({wire.bandwidth_bytes_per_s for wire in wires}))))
    delays = sorted({wire.latency_s for wire in wires})
    shown = bandwidths if len(bandwidths) <= 4 else [bandwidths[0], "\u2026", bandwidths[-1]]
    delay = ", ".join([""] + [_delay(delay_s) for delay_s in delays[:1] if delay_s])
    if len(delays) > 1:
        delay = f", {_delay(delays[0])} to {_delay(delays[-1])}"
    return f"{' or '.join(shown).replace('or … or', 'to')} each way{delay}"


# Drawing -------------------------------------------------------------------------------------------------------------


def draw(cluster: Cluster, *, file: str = "") -> Figure:
    """Return the picture of a cluster; `file` is named in the heading."""
    layout = layout_of(cluster)
    wires = wires_of(cluster.wiring, layout.nodes)
    looks = {kind: LOOKS[i % len(LOOKS)] for i, kind in enumerate(dict.fromkeys(d.type for d in cluster.devices))}
    kinds = {device.name: device.type for device in cluster.devices if device.name in layout.nodes}
    with mpl.rc_context(STYLE | {"hatch.linewidth": 0.5}):
        entries = _legend(cluster, looks, wires, layout)
        width_in, left, bottom, height_in = _frame(layout, entries, cluster)
        figure = new_figure(width_in, height_in)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(left, left + width_in)
        axes.set_ylim(bottom, bottom + height_in)
        for corners in layout.planes:
            axes.add_patch(Polygon(corners, facecolor="0.93", edgecolor="0.6", linewidth=0.7, alpha=0.7, zorder=0))
        for box in layout.boxes:
            _box(axes, box)
        for wire in wires:
            _wire(axes, wire, layout)
        for start, end in layout.ends:
            axes.plot(*zip(start, end, strict=True), zorder=1, **WRAPPED)
        for name, node in layout.nodes.items():
            _node(axes, node, looks[kinds[name]] if name in kinds else None)
        for x, y, text in layout.notes:
            axes.text(x, y, plain(text), ha="center", va="center", fontsize=9.5, style="italic", color="0.25")
        _heading(figure, cluster, file)
        figure.legend(
            handles=entries,
            loc="lower left",
            bbox_to_anchor=(MARGIN_IN / width_in, 0.15 / height_in),
            frameon=False,
            borderaxespad=0,
            handlelength=3.2,
            labelspacing=0.55,
        )
    return figure


def _frame(layout: Layout, entries: Sequence[Any], cluster: Cluster) -> tuple[float, float, float, float]:
    """Return width, left, bottom and height of the picture in inches, with room for heading and legend."""
    left, bottom, right, top = layout.extent
    for x, _, text in layout.notes:
        half = 0.045 * max(map(len, text.splitlines()))
        left, right = min(left, x - half), max(right, x + half)
    texts = [*(0.075 * len(entry.get_label()) + 0.8 for entry in entries), 0.125 * len(cluster.name), 7.0]
    width = max(right - left + 2 * MARGIN_IN, max(texts) + 2 * MARGIN_IN)
    below, above = 0.23 * len(entries) + 0.5, 0.95
    middle = (left + right) / 2
    return width, middle - width / 2, bottom - below, top - bottom + below + above


def _heading(figure: Figure, cluster: Cluster, file: str) -> None:
    counts = Counter(device.type for device in cluster.devices)
    hosts = len({device.host for device in cluster.devices})
    devices = ", ".join(f"{count:,} \u00d7 {kind}" for kind, count in counts.items())
    note = f"{devices} on {hosts:,} host{'s' if hosts > 1 else ''}" + (f"   ({file})" if file else "")
    write_heading(figure, cluster.name, [note], notes_in=0.6, x_in=MARGIN_IN)


def _legend(cluster: Cluster, looks: dict[str, Any], wires: Sequence[Wire], layout: Layout) -> list[Any]:
    """Return the legend entries: kinds of device, kinds of link with their rates, open ends."""
    entries: list[Any] = []
    for kind, (colour, hatch) in looks.items():
        device = cluster.device_types[kind]
        peaks = ", ".join(f"{peak / 1e12:.3g} TFLOP/s {name}" for name, peak in device.peak_flop_per_s.items())
        text = f"{kind}: {human_bytes(device.memory_bytes)}, {peaks}"
        entries.append(Patch(facecolor=colour, hatch=hatch, edgecolor="0.1", linewidth=0.6, label=plain(text)))
    by_kind = defaultdict(list)
    for wire in wires:
        by_kind[wire.kind].append(wire)
    for kind, line in LINES.items():
        if kind in by_kind:
            text = f"{kind}: {_rates(by_kind[kind])}{_ratio(cluster, kind)}"
            entries.append(Line2D([], [], **line, label=text))
    if layout.ends:
        entries.append(Line2D([], [], **WRAPPED, label="open end: goes on at the opposite side"))
    if any(box.kind == "host" for box in layout.boxes):
        entries.append(Patch(facecolor="0.93", edgecolor="0.55", linewidth=0.8, label="driven by one host"))
    return entries


def _ratio(cluster: Cluster, kind: str) -> str:
    fabric = cluster.topology.fabric if isinstance(cluster.topology, Servers) else None
    if kind != "leaf and spine" or not isinstance(fabric, LeafSpine):
        return ""
    return f"; {fabric.oversubscription:g} : 1 oversubscribed" if fabric.oversubscription != 1 else "; full bisection"


def _box(axes: Axes, box: Box) -> None:
    look: dict[str, Any] = {
        "server": {"facecolor": "0.965", "edgecolor": "0.4", "linewidth": 0.9, "zorder": 0},
        "host": {"facecolor": "0.93", "edgecolor": "0.55", "linewidth": 0.8, "zorder": 0},
        "more": {"facecolor": "white", "edgecolor": "0.4", "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 0},
        "site": {"facecolor": "#FBF7EC", "edgecolor": "0.25", "linewidth": 1.4, "zorder": -1},
    }[box.kind]
    corner, size = (box.left, box.bottom), (box.right - box.left, box.top - box.bottom)
    round_by = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=round_by, mutation_aspect=1, **look))
    if box.kind == "more":
        middle = ((box.left + box.right) / 2, (box.bottom + box.top) / 2)
        axes.text(*middle, box.text, ha="center", va="center", fontsize=9, style="italic", color="0.25")
    elif box.kind == "site":
        # below everything: the gateway and its link are in the middle of the top
        place = ((box.left + box.right) / 2, box.bottom + 0.12)
        axes.text(*place, plain(box.text), ha="center", va="bottom", fontsize=11.5, fontweight="bold")
    elif box.text:
        place = ((box.left + box.right) / 2, box.bottom + 0.06)
        points = 9.5 if "\n" not in box.text else 7.5
        axes.text(*place, plain(box.text), ha="center", va="bottom", fontsize=points, linespacing=1.15)


def _node(axes: Axes, node: Node, look: tuple[str, str] | None) -> None:
    """Draw a device (a square of its type's colour and hatching) or a switch (a rounded bar)."""
    corner = (node.x - node.width / 2, node.y - node.height / 2)
    dark = look is not None and look[0] in DARK
    colour = "white" if dark or node.kind == "gateway" else "black"
    if look is not None:
        shape: dict[str, Any] = {"facecolor": look[0], "edgecolor": "0.1", "linewidth": 0.7, "zorder": 3}
        axes.add_patch(Rectangle(corner, node.width, node.height, hatch=look[1], **shape))
    else:
        face = SWITCH_COLOURS.get(node.kind, "0.72")
        round_by = f"round,pad=0,rounding_size={0.25 * node.height}"
        style: dict[str, Any] = {"facecolor": face, "edgecolor": "0.15", "linewidth": 0.8, "zorder": 3}
        axes.add_patch(FancyBboxPatch(corner, node.width, node.height, boxstyle=round_by, **style))
    behind: dict[str, Any] | None
    place: dict[str, Any]
    if node.text:
        behind = {"facecolor": look[0], "edgecolor": "none", "pad": 0.6} if look and look[1] else None
        place = {"ha": "center", "va": "center", "fontsize": node.points, "zorder": 5}
        axes.text(node.x, node.y, plain(node.text), color=colour, bbox=behind, **place)
    if node.below:
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        place = {"ha": "center", "va": "top", "fontsize": 7.5, "zorder": 4, "linespacing": 1.1}
        axes.text(node.x, corner[1] - 0.05, plain(node.below), bbox=behind, **place)


def _wire(axes: Axes, wire: Wire, layout: Layout) -> None:
    a, b = layout.nodes[wire.a], layout.nodes[wire.b]
    if frozenset((wire.a, wire.b)) in layout.hidden:
        return
    xs, ys = _ends(a, b)
    look = LINES[wire.kind]
    axes.plot(xs, ys, zorder=1, solid_capstyle="butt", **look)
    if not wire.both_ways:
        middle = ((xs[0] + 2 * xs[1]) / 3, (ys[0] + 2 * ys[1]) / 3)
        arrow = {"arrowstyle": "-|>", "color": look["color"], "linewidth": look["linewidth"]}
        axes.annotate("", middle, ((xs[0] + xs[1]) / 2, (ys[0] + ys[1]) / 2), arrowprops=arrow, zorder=2)
    if layout.labelled or wire.kind == "wide-area network":
        far = wire.kind == "wide-area network"
        text = f"{rate(wire.bandwidth_bytes_per_s)}\n{_delay(wire.latency_s)}"
        place: dict[str, Any] = {"ha": "center", "va": "bottom" if far else "center", "fontsize": 10 if far else 8}
        behind: dict[str, Any] | None = None if far else {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(sum(xs) / 2, sum(ys) / 2 + 0.06 * far, text, bbox=behind, zorder=4, **place)


def _ends(a: Node, b: Node) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (xs, ys) of a line between two nodes: straight up or down where one of them is a wide bar."""

    def near(node: Node, x: float) -> float:
        reach = max(0.0, node.width / 2 - 0.05)
        return min(max(x, node.x - reach), node.x + reach)

    bars = ("nvswitch", "pcie", "memory")
    if b.kind in bars or b.kind == "switch":
        return (a.x, near(b, a.x) if b.kind in bars else b.x), (a.y, b.y)
    return (near(a, b.x) if a.kind in bars else a.x, b.x), (a.y, b.y)
