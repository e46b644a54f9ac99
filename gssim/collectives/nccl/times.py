"""NCCL's performance model: the algorithm and protocol that it chooses for a collective, and its time on idle links."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from gssim.cluster import Array, Kind, NcclTuning
from gssim.cluster.nccl_tuning import Algorithm, Joint, Protocol

BASE_LATENCY_S: dict[Algorithm, dict[Protocol, float]] = {
    "tree": {"ll": 6.8e-6, "ll128": 14e-6, "simple": 8.4e-6},
    "ring": {"ll": 6.6e-6, "ll128": 14e-6, "simple": 8.4e-6},
    "nvls": {"simple": 25e-6},
    "direct": {"ll": 6.6e-6, "simple": 8.4e-6},
}
HOP_LATENCY_S: dict[Joint, dict[Algorithm, dict[Protocol, float]]] = {
    "nvlink": {
        "tree": {"ll": 0.6e-6, "ll128": 1.25e-6, "simple": 4e-6},
        "ring": {"ll": 0.6e-6, "ll128": 1.9e-6, "simple": 3.4e-6},
    },
    "pcie": {
        "tree": {"ll": 1e-6, "ll128": 1.9e-6, "simple": 4e-6},
        "ring": {"ll": 1e-6, "ll128": 2.5e-6, "simple": 5.7e-6},
    },
    "network": {
        "tree": {"ll": 5e-6, "ll128": 8.5e-6, "simple": 14e-6},
        "ring": {"ll": 2.7e-6, "ll128": 4e-6, "simple": 14e-6},
    },
}
# Inside a server, LL takes longer if its ring has other ranks behind a network.
LL_BESIDE_NETWORK_RATIO = 1.8
PLATEAU_BYTES_PER_CHANNEL_AND_RANK = 64
# Fraction of the links' bandwidth that NCCL assumes; LL spends half of its bytes on flags, LL128 8 of 128.
PROTOCOL_RATIO: dict[Algorithm, dict[Protocol, float]] = {
    "tree": {"ll": 1 / 3.8, "ll128": 0.92 * 0.92, "simple": 0.92},
    "ring": {"ll": 1 / 2, "ll128": 0.92, "simple": 1.0},
    "nvls": {"simple": 1.0},
    "direct": {"ll": 1 / 2, "simple": 1.0},
}
TREE_LL128_INSIDE_NODE_RATIO = 7 / 9
NVLS_MIN_RANKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of a collective and the links between them; rates are wire rates of one direction, per GPU.

    `bandwidth_bytes_per_s` is the rate of a GPU within its node: the sum of its links behind NVSwitch, otherwise the
    rate of `ring_packing`. `network_bytes_per_s` is a GPU's share of its node's network cards.

    >>> Group(ranks=16, nodes=2, bandwidth_bytes_per_s=450e9, network_bytes_per_s=25e9).per_node
    8
    """

    ranks: int
    nodes: int = 1
    bandwidth_bytes_per_s: float
    network_bytes_per_s: float | None = None
    joint: Literal["nvlink", "pcie"] = "nvlink"
    nvls: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"nodes = {self.nodes}: must be from 1 to the number of ranks, {self.ranks}")
        if self.nodes > 1 and self.network_bytes_per_s is None:
            raise ValueError(f"network_bytes_per_s: missing, needed for {self.nodes} nodes")

    @property
    def per_node(self) -> int:
        """Ranks on the fullest node."""
        return math.ceil(self.ranks / self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The algorithm and protocol of a collective, and its time on idle links: `latency_s`, then the slower transfer.

    A GPU sends `node_bytes` over its links within the node, at `bandwidth_ratio` of their wire rate, and
    `network_bytes` over its share of the network, at `network_bandwidth_ratio`. On shared links it waits for
    `latency_s`, then transfers bytes / ratio.
    """

    algorithm: Algorithm = "direct"
    protocol: Protocol = "simple"
    latency_s: float = 0.0
    node_bytes: float = 0.0
    bandwidth_ratio: float = 1.0
    network_bytes: float = 0.0
    network_bandwidth_ratio: float = 1.0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Way:
    """One algorithm with one protocol, and the parameters of its time as a function of the size."""

    algorithm: Algorithm
    protocol: Protocol
    fixed_s: float
    plateau_s: float
    plateau_bytes: float
    node_share: float
    network_share: float
    node_ratio: float
    network_ratio: float
    transfer_s_per_byte: float
    copy_s_per_byte: float
    pipeline_s: float

    def latency_s(self, size_bytes: Array) -> Array:
        """Return the time besides the transfer: base, hops, the last copy, and the time to fill the chunk pipeline."""
        time_s = self.fixed_s + self.copy_s_per_byte * size_bytes
        if self.plateau_s:
            time_s = time_s + np.where(size_bytes >= self.plateau_bytes, self.plateau_s, 0.0)
        if self.pipeline_s:
            time_s = time_s + 2 * np.sqrt(self.pipeline_s * self.transfer_s_per_byte * size_bytes)
        return np.asarray(time_s, dtype=np.float64)

    def time_s(self, size_bytes: Array) -> Array:
        return self.latency_s(size_bytes) + self.transfer_s_per_byte * size_bytes


@lru_cache(maxsize=2**16)
def times(tuning: NcclTuning, kind: Kind, size_bytes: float, group: Group) -> Choice:
    """Return the fastest way to run a collective of `size_bytes` (of the full tensor, gathered or to be scattered).

    time = latency_s + max(node_bytes / (rate * ratio), network_bytes / (network rate * ratio)), the least over
    {ring, tree, NVLS} x {LL, LL128, Simple} (`ncclTopoGetAlgoTime`).

    >>> eight = Group(ranks=8, bandwidth_bytes_per_s=300e9)
    >>> choice = times(NcclTuning(), "all-reduce", 2**30, eight)
    >>> choice.algorithm, choice.protocol, round(choice.latency_s * 1e6, 1), choice.bandwidth_ratio
    ('ring', 'simple', 56.0, 0.8)
    """
    if kind not in get_args(Kind):
        raise ValueError(f'kind = "{kind}": allowed: {", ".join(get_args(Kind))}')
    if size_bytes < 0:
        raise ValueError(f"size_bytes = {size_bytes}: must not be negative")
    if group.ranks <= 1:
        return Choice()
    size = np.asarray(size_bytes, dtype=np.float64)
    way = min(ways(tuning, kind, group), key=lambda way: float(way.time_s(size)))
    return Choice(
        algorithm=way.algorithm,
        protocol=way.protocol,
        latency_s=float(way.latency_s(size)),
        node_bytes=way.node_share * size_bytes,
        bandwidth_ratio=way.node_ratio,
        network_bytes=way.network_share * size_bytes,
        network_bandwidth_ratio=way.network_ratio,
        time_s=float(way.time_s(size)),
    )


@lru_cache(maxsize=2**8)
def ways(tuning: NcclTuning, kind: Kind, group: Group) -> list[_Way]:
    """Return every algorithm and protocol that NCCL may choose, with its times."""
    return [_way(tuning, kind, group, algorithm, protocol) for algorithm, protocol in _allowed(tuning, kind, group)]


def _allowed(tuning: NcclTuning, kind: Kind, group: Group) -> list[tuple[Algorithm, Protocol]]:
    """Return the algorithms and protocols that NCCL considers for `kind` between the ranks of `group`."""
    if kind in ("send", "all-to-all"):
        return [("direct", "ll"), ("direct", "simple")] if kind == "send" else [("direct", "simple")]
    ll128 = tuning.ll128_across_nodes if group.nodes > 1 else group.joint == "nvlink"
    protocols: tuple[Protocol, ...] = ("ll", "ll128", "simple") if ll128 else ("ll", "simple")
    algorithms: tuple[Algorithm, ...] = ("ring", "tree") if kind == "all-reduce" else ("ring",)
    ways: list[tuple[Algorithm, Protocol]] = [
        (algorithm, protocol) for algorithm in algorithms for protocol in protocols
    ]
    nvls = group.nvls and tuning.nvls_ratio > 0 and group.nodes == 1 and group.ranks >= NVLS_MIN_RANKS
    return [*ways, ("nvls", "simple")] if nvls and kind == "all-reduce" else ways


def _way(tuning: NcclTuning, kind: Kind, group: Group, algorithm: Algorithm, protocol: Protocol) -> _Way:
    hops_s = _hops_s(kind, group, algorithm, protocol) * (tuning.simple_hop_ratio if protocol == "simple" else 1.0)
    plateau = kind == "all-reduce" and algorithm == "ring" and protocol == "simple" and group.nodes > 1
    node_share, network_share = _shares(kind, group, algorithm)
    node_ratio, network_ratio = _ratios(tuning, group, algorithm, protocol, node_share)
    network = group.network_bytes_per_s or math.inf
    copied = algorithm == "ring" and kind in ("all-reduce", "all-gather") and tuning.copy_bytes_per_s
    return _Way(
        algorithm=algorithm,
        protocol=protocol,
        fixed_s=tuning.latency_s + BASE_LATENCY_S[algorithm][protocol] + hops_s,
        plateau_s=(BASE_LATENCY_S[algorithm][protocol] + hops_s) * (tuning.plateau_ratio - 1) if plateau else 0.0,
        plateau_bytes=PLATEAU_BYTES_PER_CHANNEL_AND_RANK * tuning.channels * group.ranks,
        node_share=node_share,
        network_share=network_share,
        node_ratio=node_ratio,
        network_ratio=network_ratio,
        transfer_s_per_byte=max(
            node_share / (group.bandwidth_bytes_per_s * node_ratio), network_share / (network * network_ratio)
        ),
        copy_s_per_byte=1 / group.ranks / copied if copied else 0.0,
        pipeline_s=tuning.pipeline_latency_s if protocol == "simple" else 0.0,
    )


def _hops_s(kind: Kind, group: Group, algorithm: Algorithm, protocol: Protocol) -> float:
    """Return the published latency of all hops in seconds.

    A ring of M ranks on k nodes takes 2(M-1) steps (all-reduce) or M-1 steps, of which 2(k-1) or k-1 cross the network.
    A tree goes up and down each node's chain and log2(k) levels of nodes (`ncclTopoTuneModel`).
    """
    if algorithm == "nvls":
        return 0.0
    table: Algorithm = "tree" if algorithm == "tree" else "ring"
    inside_s = HOP_LATENCY_S[group.joint][table][protocol]
    across_s = HOP_LATENCY_S["network"][table][protocol]
    if group.nodes > 1 and protocol == "ll":
        inside_s *= LL_BESIDE_NETWORK_RATIO
    if algorithm == "direct":
        return across_s if group.nodes > 1 else inside_s
    if algorithm == "tree":
        return 2 * ((group.per_node - 1) * inside_s + (group.nodes.bit_length() - 1) * across_s)
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * ((group.ranks - group.nodes) * inside_s + (group.nodes - 1) * across_s)


def _shares(kind: Kind, group: Group, algorithm: Algorithm) -> tuple[float, float]:
    """Return the bytes that a GPU sends over its node's links and over its share of the network, per byte of the
    tensor.

    Rings: 2(M-1)/M for an all-reduce, half of that for a reduce-scatter or all-gather, 1 along the chain of a
    broadcast. Each of the g GPUs of a node has a ring of its own that leaves the node there, so each network share
    carries 1/g. Trees: all bytes go up and down, within a node through every GPU, between k nodes 2(k-1)/k per node on
    average. NVLS: a GPU sends its tensor into the switch, and then 1/M of the sum back to all. Direct: the bytes for
    GPUs of the same node, and for those of other nodes.
    """
    ranks, nodes, per_node = group.ranks, group.nodes, group.per_node
    if kind == "send":
        return (0.0, 1.0) if nodes > 1 else (1.0, 0.0)
    if kind == "all-to-all":
        return (per_node - 1) / ranks, (ranks - per_node) / ranks
    if algorithm == "nvls":
        return 1 + 1 / ranks, 0.0
    if algorithm == "tree":
        node_share, node_network_share = 2.0, 2 * (nodes - 1) / nodes
    else:
        part = (ranks - 1) / ranks
        steps = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": part}
        node_share = node_network_share = steps.get(kind, 1.0)
    return node_share if per_node > 1 else 0.0, node_network_share / per_node if nodes > 1 else 0.0


def _ratios(
    tuning: NcclTuning, group: Group, algorithm: Algorithm, protocol: Protocol, node_share: float
) -> tuple[float, float]:
    """Return the achieved rate relative to the wire rate, within the node and on the network.

    LL is also limited by the rate at which a GPU's threads store, `ll_..._bytes_per_s`, whatever the links are.
    """
    share = PROTOCOL_RATIO[algorithm][protocol]
    if protocol == "ll128" and algorithm == "tree" and group.nodes == 1:
        share *= TREE_LL128_INSIDE_NODE_RATIO
    if algorithm == "nvls":
        share *= tuning.nvls_ratio
    if protocol == "ll128":
        share *= tuning.low_latency_ratio
    node_ratio, network_ratio = share * tuning.bandwidth_ratio, share * tuning.network_bandwidth_ratio
    if protocol == "ll":
        by_nodes = (tuning.ll_node_bytes_per_s, tuning.ll_two_nodes_bytes_per_s, tuning.ll_nodes_bytes_per_s)
        most = by_nodes[min(group.nodes, 3) - 1] * tuning.low_latency_ratio
        node_ratio = min(node_ratio, most / group.bandwidth_bytes_per_s)
        if not node_share and group.network_bytes_per_s:
            network_ratio = min(network_ratio, most / group.network_bytes_per_s)
    return node_ratio, network_ratio
