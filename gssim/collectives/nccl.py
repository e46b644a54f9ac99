"""NCCL's performance model: the algorithm and protocol that it chooses for a collective, and its time on idle links.

Also the fit of the model's constants to a table of nccl-tests, and the packing of rings onto direct links.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any, Literal, get_args

import numpy as np

from gssim.cluster import GENERATIONS, Array, Kind, NcclTuning
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


# Fitted constants: (name, lower bound, upper bound, step size).
_Constant = tuple[str, float, float, float]
_BOUNDS: tuple[_Constant, ...] = (
    ("latency_s", 0.0, 0.1, 1e-5),
    ("simple_hop_ratio", 0.1, 100.0, 1.0),
    ("pipeline_latency_s", 0.0, 1e-3, 2e-6),
)
# Latency, hop ratio; pipeline latency, factor of the bandwidth ratio: a fast network is hidden behind the links
_STARTS = tuple(
    (*hops, *rest)
    for hops in ((1e-5, 1.0), (5e-5, 0.3), (1e-4, 8.0))
    for rest in ((1e-6, 1.0), (2e-5, 1.0), (1e-6, 0.4))
)
# Weights of the prior (the start values) relative to one point's relative error. They decide only what the table does
# not determine: above all, with a single number of ranks, how a latency is split between `latency_s` and the hops.
_PRIOR_WEIGHT = 0.001
_HOP_PRIOR_WEIGHT = 0.02


def fit(
    table: Iterable[tuple[float, float]],
    group: Group,
    *,
    kind: Kind = "all-reduce",
    start: NcclTuning | None = None,
) -> NcclTuning:
    """Return `start` with four constants fitted to (size in bytes, time in seconds) of `kind` between `group`.

    The four are `latency_s`, `simple_hop_ratio`, `pipeline_latency_s`, and `bandwidth_ratio` (with several nodes
    `network_bandwidth_ratio`). The fit minimises squared relative errors, with a soft loss beyond 10 % (robust to
    outliers), in which each of many sizes of one octave counts less. It runs from a few fixed starts, so equal tables
    give equal constants. `start` (of `GENERATIONS`; Ampere by default) has all other constants. Raises ValueError for
    fewer than four sizes.

    >>> wires = Group(ranks=8, bandwidth_bytes_per_s=300e9)
    >>> true = NcclTuning(latency_s=2e-5, bandwidth_ratio=0.7)
    >>> table = [(2.0**k, times(true, "all-reduce", 2.0**k, wires).time_s) for k in range(10, 31)]
    >>> round(fit(table, wires, start=NcclTuning()).bandwidth_ratio, 2)
    0.7
    """
    sizes, measured_s = _columns(table)
    weights = _octave_weights(sizes)
    start = start or GENERATIONS["ampere"]
    ratio = "network_bandwidth_ratio" if group.nodes > 1 else "bandwidth_ratio"
    constants = (*_BOUNDS, (ratio, 0.01, 1.0, 0.1))
    origin = np.array([getattr(start, name) for name, *_ in constants])
    scale = np.array([step for *_, step in constants])

    def tuned(values: Array) -> NcclTuning:
        moved: dict[str, Any] = {name: float(x) for (name, *_), x in zip(constants, values, strict=True)}
        return replace(start, **moved)

    def residuals(values: Array) -> Array:
        predicted_s = np.min([way.time_s(sizes) for way in ways(tuned(values), kind, group)], axis=0)
        prior = _PRIOR_WEIGHT * math.sqrt(len(sizes)) * (values - origin) / scale
        prior[1] = _HOP_PRIOR_WEIGHT * math.sqrt(len(sizes)) * math.log(values[1] / origin[1])
        return np.concatenate([weights * (predicted_s / measured_s - 1), prior])

    return tuned(_least(residuals, origin, constants, scale))


def _columns(table: Iterable[tuple[float, float]]) -> tuple[Array, Array]:
    """Return sizes and times of a table, sorted, without rows that lack either."""
    rows = sorted((size, time_s) for size, time_s in table if size > 0 and time_s > 0)
    if len({size for size, _ in rows}) < 4:
        raise ValueError(f"table: has {len(rows)} usable rows, but four constants need four sizes")
    columns = np.array(rows, dtype=np.float64)
    return columns[:, 0], columns[:, 1]


def _octave_weights(sizes: Array) -> Array:
    """Return square roots of weights under which an octave of sizes with c rows counts as sqrt(c) rows; mean 1.

    A table with a row per MiB has a thousand large messages and a handful of small ones. Equal weights for all rows, or
    for all octaves, would fit one end badly.
    """
    octaves = np.floor(np.log2(sizes))
    _, place, counts = np.unique(octaves, return_inverse=True, return_counts=True)
    weights = counts[place] ** -0.5
    return np.asarray(np.sqrt(weights / weights.mean()), dtype=np.float64)


def _least(residuals: Callable[[Array], Array], origin: Array, constants: Sequence[_Constant], scale: Array) -> Array:
    """Return the values with the least cost over all fixed starts, each within its bounds."""
    from scipy.optimize import least_squares  # lazy: keeps `import gssim` fast

    lower = np.array([low for _, low, _, _ in constants])
    upper = np.array([high for _, _, high, _ in constants])
    best, least = origin, math.inf
    for *values, factor in _STARTS:
        first = np.array([*values, factor * origin[3]])
        solution = least_squares(
            residuals,
            np.clip(first, lower + 1e-9, upper - 1e-9),
            bounds=(lower, upper),
            x_scale=scale,
            diff_step=np.full(4, 1e-4),
            loss="soft_l1",
            f_scale=0.1,
            max_nfev=200,
        )
        if solution.cost < least:
            best, least = solution.x, solution.cost
    return np.asarray(best, dtype=np.float64)


MAX_PACKED_RANKS = 8


def ring_packing(link_bytes_per_s: Sequence[Sequence[float]]) -> list[tuple[tuple[int, ...], float]]:
    """Return directed rings through all GPUs and their rates, with the largest total rate that the links allow.

    `link_bytes_per_s[i][j]` is the rate from GPU i to GPU j, in bytes/s of one direction, 0 without a link. A linear
    program over all Hamiltonian cycles maximises the sum of the rings' rates, with no link above its own rate. NCCL
    searches such rings too (`ncclTopoCompute`). Raises ValueError if no ring exists, or for more than 8 GPUs.

    >>> ring_packing([[0, 50e9], [50e9, 0]])
    [((0, 1), 50000000000.0)]
    """
    rates = np.asarray(link_bytes_per_s, dtype=np.float64)
    count = len(rates)
    if rates.shape != (count, count) or not 2 <= count <= MAX_PACKED_RANKS or (rates < 0).any():
        raise ValueError(f"links: must be a square of rates >= 0 for 2 to {MAX_PACKED_RANKS} GPUs, not {rates.shape}")
    cycles = _cycles(rates)
    if not cycles:
        raise ValueError(f"links: no ring passes through all {count} GPUs")
    exact = _cover(rates, cycles)
    if exact is not None:
        return exact
    links = {(int(i), int(j)): row for row, (i, j) in enumerate(np.argwhere(rates > 0))}
    uses = np.zeros((len(links), len(cycles)))
    for column, cycle in enumerate(cycles):
        uses[[links[link] for link in _links(cycle)], column] = 1.0
    # in units of the fastest link: the solver's tolerances are absolute
    fastest = rates.max()
    limits = np.array([rates[link] / fastest for link in links])
    from scipy.optimize import linprog  # lazy: keeps `import gssim` fast

    solution = linprog(-np.ones(len(cycles)), A_ub=uses, b_ub=limits, method="highs")
    return [(cycle, float(x * fastest)) for cycle, x in zip(cycles, np.asarray(solution.x), strict=True) if x > 1e-9]


def _links(cycle: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def _cycles(rates: Array) -> list[tuple[int, ...]]:
    """Return all Hamiltonian cycles over the links, each from GPU 0."""
    rest = np.array(list(permutations(range(1, len(rates)))), dtype=np.int64)
    orders = np.concatenate([np.zeros((len(rest), 1), np.int64), rest], axis=1)
    closed = (rates[orders, np.roll(orders, -1, axis=1)] > 0).all(axis=1)
    return [tuple(order) for order in orders[closed].tolist()]


COVER_STEPS = 10_000


def _cover(rates: Array, cycles: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], float]] | None:
    """Return rings that use up every link, if a short search finds them; such rings are optimal without a solver.

    The search is an exact cover, for GPUs that all have the same number of unit links in and out: it always takes a
    ring over the first unused link.
    """
    unit = float(rates[rates > 0].min())
    left = np.rint(rates / unit).astype(int)
    degrees = {*left.sum(axis=0).tolist(), *left.sum(axis=1).tolist()}
    if len(degrees) != 1 or not np.allclose(left * unit, rates):
        return None
    links = [_links(cycle) for cycle in cycles]
    steps = [COVER_STEPS]
    chosen = _covered(left.tolist(), links, steps)
    if chosen is None:
        return None
    counts = Counter(chosen)
    return [(cycles[number], count * unit) for number, count in sorted(counts.items())]


def _covered(left: list[list[int]], links: Sequence[list[tuple[int, int]]], steps: list[int]) -> list[int] | None:
    following = next((j for j, count in enumerate(left[0]) if count), None)
    if following is None:
        return []
    for number, ring in enumerate(links):
        steps[0] -= 1
        if steps[0] < 0:
            return None
        if ring[0] != (0, following) or any(not left[i][j] for i, j in ring):
            continue
        for i, j in ring:
            left[i][j] -= 1
        rest = _covered(left, links, steps)
        for i, j in ring:
            left[i][j] += 1
        if rest is not None:
            return [number, *rest]
    return None
