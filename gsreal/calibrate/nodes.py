"""Calibrates several nodes: each measures its own devices, and the first devices of each pair of nodes their link.

Nodes are connected by one switch in the cluster file: each has an uplink as fast as its fastest connection, with a part
of the measured latencies. A pair that is slower than its uplinks is reported: their switches must be described
otherwise.
"""

import socket
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gsreal.calibrate.bench import Settings
from gsreal.calibrate.cluster_file import (
    GUARD,
    LINK_KEYS,
    backend_cost_data,
    device_type_data,
    measure,
    source_of,
)
from gsreal.calibrate.communication import EXCHANGE_BYTES, Line, line_through, shapes
from gsreal.run.nodes import own_node
from gsreal.run.rank import gather_json, leave
from gssim.errors import UserError

MOST_NODES = 16
"""Every pair is measured, one after the other."""
REPEATS, WARMUPS = 15, 3
SLOWER_RATIO = 0.8
"""A pair below this fraction of its uplinks is reported."""

Pairs = dict[tuple[int, int], Line]
"""Time of a message by its size, by pair of nodes."""


def measure_nodes(settings: Settings, *, ranks: int) -> tuple[list[dict[str, Any]], Pairs] | None:
    """Return the measurements of all nodes of a launcher, and of each pair, on the first one; None on the others.

    Called once on each node, on its first rank; `ranks`: devices of this node. Raises UserError for more than
    `MOST_NODES` nodes.
    """
    node, nodes = own_node()
    if nodes > MOST_NODES:
        raise UserError(
            f"gsreal calibrate: {nodes} nodes: allowed: up to {MOST_NODES}, of which each two are measured; describe "
            "larger clusters by `gssim cluster` with the device types that one node measures"
        )
    dist.init_process_group("gloo", rank=node, world_size=nodes, timeout=timedelta(seconds=2 * GUARD.timeout_s))
    try:
        measured = measure(settings, ranks=ranks)
        all_measured: list[dict[str, Any]] = gather_json({**measured, "host": socket.gethostname()})
        links = {pair: _pair_link(node, pair) for pair in combinations(range(nodes), 2)}
        known = {pair: link for pair, link in links.items() if link is not None}
        plain = gather_json([[*pair, link.fixed_s, link.byte_s] for pair, link in known.items()])
    finally:
        leave()
    if node:
        return None
    everything = {(a, b): Line(fixed_s, byte_s) for each in plain for a, b, fixed_s, byte_s in each}
    for line in slow_pairs(_host_names([each["host"] for each in all_measured]), everything):
        print(f"gsreal: calibrate: {line}", file=sys.stderr)
    return all_measured, everything


def _pair_link(node: int, pair: tuple[int, int]) -> Line | None:
    """Return a pair's connection on its first node, None on the others (a collective).

    A message's time is half of that to the other node and back, so that clocks of nodes need not agree.
    """
    dist.barrier()
    if node not in pair:
        return None
    first, other = node == pair[0], pair[1] if node == pair[0] else pair[0]
    times_s = []
    for size in EXCHANGE_BYTES:
        message = torch.zeros(size // 4)
        rounds_s = []
        for _ in range(WARMUPS + REPEATS):
            began_s = time.perf_counter()
            if first:
                dist.send(message, other)
            dist.recv(message, other)
            if not first:
                dist.send(message, other)
            rounds_s.append((time.perf_counter() - began_s) / 2)
        times_s.append(statistics.median(rounds_s[WARMUPS:]))
    return line_through(EXCHANGE_BYTES, times_s) if first else None


def nodes_data(measured: Sequence[dict[str, Any]], links: Pairs, settings: Settings) -> dict[str, Any]:
    """Return a cluster file's content from every node's measurements and every pair's connection.

    Nodes with the same device name share the costs of the first of them. A message's fixed time is the backend's, as
    measured inside the first node, plus two latencies of the link: for its notification and for itself.
    """
    hosts = _host_names([each["host"] for each in measured])
    types: dict[str, Any] = {}
    for each in measured:
        if each["name"] not in types:
            types[each["name"]] = device_type_data(each, settings, source_of(each))
    inside = next((each["communication"] for each in measured if each.get("communication")), None)
    overhead_s = inside["overhead_s"]["send"] if inside else 0.0
    rounds = shapes(2)["send"].rounds
    latency_s = {pair: max(0.0, link.fixed_s - overhead_s) / rounds for pair, link in links.items()}
    uplinks, latencies_s = _uplink_rates(links, len(hosts)), _uplink_latencies_s(latency_s, len(hosts))
    source = source_of(measured[0]) + f", and messages between {len(hosts)} nodes"
    counts = {name: sum(each["ranks"] for each in measured if each["name"] == name) for name in types}
    data: dict[str, Any] = {
        "name": f"{len(hosts)} nodes: {', '.join(f'{count} x {name}' for name, count in counts.items())}",
        "backend": "gloo",
        "cores_per_rank": 1 if settings.kind == "cpu" else 0,
        "source": source,
        "device_types": types,
        "devices": [],
        "switches": ["switch"],
        "links": [],
    }
    for node, (host, each) in enumerate(zip(hosts, measured, strict=True)):
        names = [f"{host}/device{rank}" for rank in range(each["ranks"])]
        data["devices"] += [{"name": name, "type": each["name"], "host": host} for name in names]
        uplink = {"bandwidth_bytes_per_s": uplinks[node], "latency_s": latencies_s[node]}
        port = names[0]
        if len(names) > 1:
            port = f"{host}/network"
            data["switches"].append(port)
            local = {key: each["communication"][key] for key in LINK_KEYS}
            data["links"] += [{"between": list(pair), **local, "source": source} for pair in combinations(names, 2)]
            to_port = {"bandwidth_bytes_per_s": local["bandwidth_bytes_per_s"], "latency_s": 0.0, "source": source}
            data["links"] += [{"between": [name, port], **to_port} for name in names]
        data["links"].append({"between": [port, "switch"], **uplink, "source": source})
    if inside:
        data["backend_cost"] = backend_cost_data(inside, source)
    return data


def _host_names(names: Sequence[str]) -> list[str]:
    """Return a distinct name for each node: its own, or its number where several have the same.

    >>> _host_names(["alpha", "beta"]), _host_names(["here", "here"])
    (['alpha', 'beta'], ['node0', 'node1'])
    """
    return list(names) if len(set(names)) == len(names) else [f"node{i}" for i in range(len(names))]


def _uplink_latencies_s(pairs: dict[tuple[int, int], float], nodes: int) -> list[float]:
    """Return latencies of uplinks, none negative, whose sums are closest to those of the pairs (least squares).

    >>> [round(each, 3) for each in _uplink_latencies_s({(0, 1): 3.0, (0, 2): 4.0, (1, 2): 5.0}, 3)]
    [1.0, 2.0, 3.0]
    >>> _uplink_latencies_s({(0, 1): 3.0}, 2)
    [1.5, 1.5]
    """
    from scipy.optimize import nnls  # here: imports of scipy take long

    if nodes == 2:
        return [pairs[0, 1] / 2] * 2
    matrix = np.zeros((len(pairs), nodes))
    for row, pair in enumerate(pairs):
        matrix[row, list(pair)] = 1.0
    latencies_s, _ = nnls(matrix, np.array(list(pairs.values())))
    return [float(each) for each in latencies_s]


def _uplink_rates(links: Pairs, nodes: int) -> list[float]:
    """Return the bytes per second of each node's fastest connection."""
    return [max(1 / link.byte_s for pair, link in links.items() if node in pair) for node in range(nodes)]


def slow_pairs(hosts: Sequence[str], links: Pairs) -> list[str]:
    """Return a line for each pair of nodes that is slower than both of their uplinks.

    >>> slow = {(0, 1): Line(1e-4, 1e-9), (0, 2): Line(1e-4, 1e-9), (1, 2): Line(1e-4, 4e-9)}
    >>> slow_pairs(["a", "b", "c"], slow)
    ['b and c reach 25% of what both reach with others: one switch does not describe them']
    """
    uplinks = _uplink_rates(links, len(hosts))
    ratios = {(a, b): 1 / link.byte_s / min(uplinks[a], uplinks[b]) for (a, b), link in links.items()}
    return [
        f"{hosts[a]} and {hosts[b]} reach {ratio:.0%} of what both reach with others: one switch does not describe them"
        for (a, b), ratio in ratios.items()
        if ratio < SLOWER_RATIO
    ]
