"""Flows over links: fluid, sharing every link max-min fairly, re-solved when a flow begins or ends; never packets."""

import math
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import networkx as nx
import simpy

from gssim.cluster import Cluster
from gssim.units import UserError

Edge = tuple[str, str]


def graph_of(cluster: Cluster) -> "nx.DiGraph[str]":
    """Return the cluster's directed graph: an edge for each direction of each link, parallel links added up."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from([*(device.name for device in cluster.devices), *cluster.switches])
    for link in cluster.links:
        ends = [link.between] if link.directed else [link.between, link.between[::-1]]
        for source, target in ends:
            before = graph.get_edge_data(source, target, {"bandwidth": 0.0, "latency": link.latency_s})
            graph.add_edge(
                source,
                target,
                bandwidth=before["bandwidth"] + link.bandwidth_bytes_per_s,
                latency=min(before["latency"], link.latency_s),
            )
    return graph


def max_min_rates(
    paths: Mapping[int, Sequence[Edge]],
    capacities: Mapping[Edge, float],
) -> dict[int, float]:
    """Return the max-min fair rate of each flow (by key of `paths`) over links of the given capacities.

    Progressive filling: all rates grow together; where a link is full, its flows stop growing.
    Source: Bertsekas & Gallager 1992, "Data Networks", section 6.5.2.

    >>> max_min_rates({0: [("a", "b")], 1: [("a", "b"), ("b", "c")]}, {("a", "b"): 10.0, ("b", "c"): 2.0})
    {1: 2.0, 0: 8.0}
    """
    rates: dict[int, float] = {}
    left = dict(capacities)
    users: dict[Edge, set[int]] = {}
    for flow, path in paths.items():
        for edge in path:
            users.setdefault(edge, set()).add(flow)
    while users:
        tightest = min(users, key=lambda edge: (left[edge] / len(users[edge]), edge))
        share = max(0.0, left[tightest]) / len(users[tightest])
        for flow in sorted(users[tightest]):
            rates[flow] = share
            for edge in paths[flow]:
                left[edge] -= share
                users[edge].discard(flow)
        users = {edge: flows for edge, flows in users.items() if flows}
    return rates


class Flow:
    """Bytes on their way, and the event that ends them."""

    __slots__ = ("done", "path", "rate", "remaining")

    def __init__(self, path: tuple[Edge, ...], size_bytes: float, done: simpy.Event) -> None:
        self.path, self.remaining, self.done = path, size_bytes, done
        self.rate = 0.0


class Network:
    """The links of a cluster in simulated time, and the bytes that each of them carried."""

    def __init__(self, env: simpy.Environment, cluster: Cluster) -> None:
        self.env = env
        self.graph = graph_of(cluster)
        self.names = [device.name for device in cluster.devices]
        self.capacities: dict[Edge, float] = {(u, v): d["bandwidth"] for u, v, d in self.graph.edges(data=True)}
        self.carried: dict[Edge, float] = dict.fromkeys(self.capacities, 0.0)
        self.flows: dict[int, Flow] = {}
        self.last_s = 0.0
        self.numbers = 0
        self.wake: simpy.Event | None = None
        self.path = cache(self._path)

    def _path(self, source: int, target: int) -> tuple[tuple[Edge, ...], float]:
        """Return the edges from one rank's device to another's, and their latencies added up."""
        ends = (self.names[source], self.names[target])
        try:
            nodes = nx.shortest_path(self.graph, *ends, weight="latency")
        except nx.NetworkXNoPath:
            raise UserError(f"cluster: no path of links from {ends[0]} to {ends[1]}") from None
        edges = tuple(pairwise(nodes))
        return edges, sum(self.graph.edges[edge]["latency"] for edge in edges)

    def transfer(
        self, source: int, target: int, size_bytes: float, *, factor: float = 1.0
    ) -> Generator[Any, Any, None]:
        """Take the simulated time of a message; `factor`: bytes that occupy a link for each byte carried."""
        edges, latency_s = self.path(source, target)
        if latency_s:
            yield self.env.timeout(latency_s)
        for edge in edges:
            self.carried[edge] += size_bytes
        if size_bytes <= 0:
            return
        flow = Flow(edges, size_bytes * factor, self.env.event())
        self._advance()
        self.flows[self.numbers] = flow
        self.numbers += 1
        self._share()
        yield flow.done

    def _advance(self) -> None:
        """Let every flow carry what it could since the last change."""
        elapsed = self.env.now - self.last_s
        for flow in self.flows.values():
            flow.remaining -= flow.rate * elapsed
        self.last_s = self.env.now

    def _share(self) -> None:
        """Give every flow its fair rate and wake up when the first of them ends."""
        rates = max_min_rates({number: flow.path for number, flow in self.flows.items()}, self.capacities)
        for number, flow in self.flows.items():
            flow.rate = rates[number]
        if self.flows:
            first_s = min(max(0.0, flow.remaining) / flow.rate for flow in self.flows.values())
            self.wake = self.env.timeout(first_s)
            self.wake.callbacks.append(self._ended)

    def _ended(self, event: simpy.Event) -> None:
        if event is not self.wake:
            return  # planned before the flows changed
        self._advance()
        slack_s = 1e-12 + 2 * math.ulp(self.env.now)  # the clock cannot tell times that are nearer
        ended = [number for number, flow in self.flows.items() if flow.remaining <= flow.rate * slack_s + 1e-9]
        for number in ended:
            self.flows.pop(number).done.succeed()
        self._share()
