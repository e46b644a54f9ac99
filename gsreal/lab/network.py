"""The emulated network as data (a namespace for each device and switch, wires, routes), and its `tc` shaping commands.

It has the cluster's own topology, whatever that is: a star, a ring, two sites behind one link, a tree. Every device has
an address of its own, and every node forwards; messages take a path of fewest links and, among those, of least latency,
as in a prediction (which splits messages among equal paths; here one of them is taken). Devices of one host have
namespaces of their own too: the connection between them is a link like any other.

`tc` shapes the traffic that leaves an interface by a rate, a delay, and a priority for acknowledgements.

The module also runs functions inside a network namespace without leaving this process, and sets up a lab process before
it executes its command.
"""

import ctypes
import heapq
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gssim.cluster import Cluster
from gssim.cluster.lab_links import FRAME_BYTES, SEGMENT_BYTES, burst_bytes
from gssim.errors import UserError
from gssim.execution.parent import die_with_parent

CLONE_NEWNET = 0x40000000  # linux/sched.h
FOLDER = Path("/run/netns")
"""Folder in which `ip netns` keeps named namespaces."""

T = TypeVar("T")


def in_namespace(namespace: str, action: Callable[[], T]) -> T:
    """Return the result of `action`, called in a thread that has entered the namespace.

    Sockets belong to the namespace in which they are created, and a file in /proc/sys/net to that of the thread which
    opens it.
    """
    results: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            enter(FOLDER / namespace)
            results.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]


def enter(namespace: Path) -> None:
    """Let this thread enter a network namespace; raise OSError if it may not."""
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(namespace))
    finally:
        os.close(handle)


def can_create_namespaces() -> bool:
    """Return whether this process may create network namespaces: root in a container often may not."""
    allowed: list[bool] = []

    def work() -> None:
        allowed.append(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return allowed == [True]


def prepare_process() -> None:
    """Make this process, the leader of a session, end with its parent and run at the highest priority.

    Other processes of the machine then disturb it less. If Linux schedules sessions as groups, a group has a priority
    of its own in addition to that of its processes.
    """
    die_with_parent()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        Path("/proc/self/autogroup").write_text("-20", encoding="ascii")


PREFIX = "gsreal-lab-"
"""Prefix of the names of all namespaces."""
ADDRESS_DEVICE = "rank"
"""Name of the device, in a rank's namespace, that holds its address, independent of its wires."""
FASTEST_BYTES_PER_S = 2.5e9 / 8
"""Above this rate a shaped wire is more than 5 % slower than its setting (measured)."""
LEAST_DELAY_S = 0.5e-3
"""Latencies below this are not emulated, as the machine's own are 0.03 to 0.1 ms for a wire."""
MOST_NODES, MOST_WIRES = 64, 256


@dataclass(frozen=True)
class Node:
    """A device or a switch."""

    name: str
    namespace: str
    address: str | None
    """Address of the rank of a device; None for a switch."""


@dataclass(frozen=True)
class End:
    """One end of a wire: an interface, and the shaping of the traffic that leaves it."""

    namespace: str
    interface: str
    address: str
    rate_bytes_per_s: float
    """Rate of payload, without headers."""
    delay_s: float


@dataclass(frozen=True)
class Wire:
    """A link in both directions."""

    between: tuple[str, str]
    """Names of the nodes that it connects, which may have any characters."""
    ends: tuple[End, End]

    @property
    def name(self) -> str:
        """Name used in messages to the user."""
        return " - ".join(self.between)

    @property
    def is_delayed(self) -> bool:
        """Whether a direction has a delay of its own."""
        return any(end.delay_s for end in self.ends)


@dataclass(frozen=True)
class Route:
    """A node's route to a device."""

    namespace: str
    destination: str
    via: str
    interface: str
    source: str | None
    """The address to send from, if the node is a device."""


@dataclass(frozen=True)
class Network:
    """Nodes (devices in rank order, then switches), wires and routes of one lab."""

    run_id: str
    nodes: tuple[Node, ...]
    wires: tuple[Wire, ...]
    routes: tuple[Route, ...]

    @property
    def slowest_bytes_per_s(self) -> float:
        """Rate of the slowest wire."""
        return min((end.rate_bytes_per_s for wire in self.wires for end in wire.ends), default=FASTEST_BYTES_PER_S)


@dataclass(frozen=True)
class _Edge:
    source: int
    target: int
    rate_bytes_per_s: float
    latency_s: float


def network_of(cluster: Cluster, run_id: str, *, where: str = "cluster") -> Network:
    """Return the network of a cluster; raise UserError where the lab cannot build it.

    >>> from gssim.cluster.topology.builders import Group, LinkType, Switch
    >>> link = LinkType(bandwidth_bytes_per_s="100 Mbit/s", latency_s="20 ms", source="example")
    >>> star = Switch(kind="switch", devices=(Group(device="a", count=2),), link=link)
    >>> rates = dict(peak_flop_per_s={"fp32": 1e10}, memory_bandwidth_bytes_per_s=1e10)
    >>> kinds = {"a": dict(kind="cpu", memory_bytes=1e9, source="example", **rates)}
    >>> cluster = Cluster(name="two", backend="gloo", device_types=kinds, topology=star, source="example")
    >>> lab = network_of(cluster, "7f")
    >>> [(node.namespace, node.address) for node in lab.nodes]
    [('gsreal-lab-7f-0', '10.77.0.1'), ('gsreal-lab-7f-1', '10.77.0.2'), ('gsreal-lab-7f-2', None)]
    >>> [(wire.name, wire.ends[0].rate_bytes_per_s, wire.ends[0].delay_s) for wire in lab.wires]
    [('device0 - switch', 12500000.0, 0.01), ('device1 - switch', 12500000.0, 0.01)]
    """
    edges = _edges(cluster, where)
    wiring, devices = cluster.wiring, len(cluster.devices)
    nodes = tuple(
        Node(name, f"{PREFIX}{run_id}-{i}", f"10.77.0.{i + 1}" if i < devices else None)
        for i, name in enumerate(wiring.names)
    )
    wires: dict[tuple[int, int], Wire] = {}
    for number, (a, b) in enumerate(pair for pair in edges if pair[0] < pair[1]):
        there, back = (
            End(
                namespace=nodes[edge.source].namespace,
                interface=f"wire{number}",
                address=f"10.78.{number // 64}.{number % 64 * 4 + 1 + side}",
                rate_bytes_per_s=edge.rate_bytes_per_s,
                delay_s=edge.latency_s if edge.latency_s >= LEAST_DELAY_S else 0.0,
            )
            for side, edge in enumerate((edges[a, b], edges[b, a]))
        )
        wires[a, b] = Wire((nodes[a].name, nodes[b].name), (there, back))
    routes = []
    for target in range(devices):
        address = nodes[target].address
        assert address is not None, "every device has one"
        for node, following in sorted(_next_hops(target, edges).items()):
            ends = wires[min(node, following), max(node, following)].ends
            here, there = ends if node < following else ends[::-1]
            routes.append(Route(here.namespace, address, there.address, here.interface, nodes[node].address))
    return Network(run_id, nodes, tuple(wires.values()), tuple(routes))


def _edges(cluster: Cluster, where: str) -> dict[tuple[int, int], _Edge]:
    """Return the directed links by their ends; refuse those that cannot be built."""
    wiring = cluster.wiring
    can = (
        f"the lab builds up to {MOST_NODES} devices and switches wired in any way (star, ring, tree, sites behind one "
        f"link), with links both ways of up to {FASTEST_BYTES_PER_S * 8 / 1e9:g} Gbit/s"
    )
    if wiring.nodes > MOST_NODES or wiring.links > 2 * MOST_WIRES:
        raise UserError(f"{where}: {wiring.nodes} devices and switches, {wiring.links} directed links: {can}")
    columns = (wiring.source, wiring.target, wiring.bandwidth_bytes_per_s, wiring.latency_s)
    edges = {(a, b): _Edge(a, b, rate, wait) for a, b, rate, wait in zip(*(c.tolist() for c in columns), strict=True)}
    for (a, b), edge in edges.items():
        name = f"the link from '{wiring.names[a]}' to '{wiring.names[b]}'"
        if (b, a) not in edges:
            raise UserError(f"{where}: {name} has no way back, which acknowledgements need: {can}")
        if edge.rate_bytes_per_s > FASTEST_BYTES_PER_S:
            raise UserError(f"{where}: {name} has {edge.rate_bytes_per_s * 8 / 1e9:g} Gbit/s: {can}")
    reached = _next_hops(0, edges).keys() | {0}
    apart = [wiring.names[i] for i in range(len(cluster.devices)) if i not in reached]
    if apart:
        raise UserError(f"{where}: no link leads from '{wiring.names[0]}' to '{apart[0]}': {can}")
    return edges


def _next_hops(target: int, edges: dict[tuple[int, int], _Edge]) -> dict[int, int]:
    """Return the next hop of each node that can reach `target`: fewest links, then least latency."""
    into: dict[int, list[_Edge]] = {}
    for edge in edges.values():
        into.setdefault(edge.target, []).append(edge)
    hops: dict[int, int] = {}
    queue = [(0, 0.0, target, target)]
    while queue:
        links, latency_s, node, following = heapq.heappop(queue)
        if node in hops:
            continue
        hops[node] = following
        for edge in into.get(node, []):
            if edge.source not in hops:
                heapq.heappush(queue, (links + 1, latency_s + edge.latency_s, edge.source, node))
    del hops[target]
    return hops


QUEUE_FRAMES = 10_000
ACKNOWLEDGEMENTS = (("0x0000", "0xffc0"), ("0x0040", "0xfff0"), ("0x0050", "0xffff"))
"""Lengths of packets (bytes 2 and 3 of the IP header) with their masks: up to 80 bytes, the size of headers alone.
Acknowledgements that wait behind a queue of data hold up the other direction (measured). Nothing else may overtake
data: gloo's notices, of 100 bytes, share their connection with data, and if a segment arrives before its turn, those
that it overtook seem to be lost.
"""

Command = tuple[str, ...]


def wire_bits_per_s(rate_bytes_per_s: float) -> int:
    """Return the rate of frames at which payload has the given rate.

    >>> wire_bits_per_s(12.5e6)
    104558011
    """
    return round(rate_bytes_per_s * 8 * FRAME_BYTES / SEGMENT_BYTES)


def shape(end: End, *, netem: bool) -> list[Command]:
    """Return the commands that shape the traffic leaving an interface; without `netem`, the wire implements the delay.

    A hierarchical token bucket (HTB): class 1:20 for acknowledgements has priority, class 1:10 takes all else.
    """
    tc: Command = ("tc", "-n", end.namespace)
    device: Command = ("dev", end.interface)
    rate = wire_bits_per_s(end.rate_bytes_per_s)
    burst = ("burst", f"{burst_bytes(end.rate_bytes_per_s)}b")
    common = ("ceil", f"{rate}bit", *burst, "c" + burst[0], burst[1], "quantum", "60000")

    def leaf(place: str, part: float, priority: int) -> Command:
        rates = ("rate", f"{round(rate * part)}bit", *common, "prio", str(priority))
        return (*tc, "class", "add", *device, "parent", "1:1", "classid", place, "htb", *rates)

    def queue(place: str, handle: str) -> Command:
        delay = round(end.delay_s * 1e6)
        kind = ("netem", "delay", f"{delay}us", "limit") if netem and delay else ("pfifo", "limit")
        return (*tc, "qdisc", "add", *device, "parent", place, "handle", handle, *kind, str(QUEUE_FRAMES))

    whole = ("rate", f"{rate}bit", *common)
    filters = (*tc, "filter", "add", *device, "parent", "1:", "protocol", "ip", "prio", "1", "u32")
    return [
        (*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "10"),
        (*tc, "class", "add", *device, "parent", "1:", "classid", "1:1", "htb", *whole),
        leaf("1:10", 0.9, 1),
        leaf("1:20", 0.1, 0),
        queue("1:10", "10:"),
        queue("1:20", "20:"),
        *((*filters, "match", "u16", *length, "at", "2", "flowid", "1:20") for length in ACKNOWLEDGEMENTS),
    ]
