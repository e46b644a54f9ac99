"""Selection of the schedule of each collective on a cluster: members, algorithm, stages and fixed costs."""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import cast

import numpy as np

from gssim import collectives
from gssim.cluster import GENERATIONS, Cluster, Kind, NcclTuning, memory_node
from gssim.cluster.lab_links import shaped_group_bytes
from gssim.collectives import BACKEND_ALGORITHMS, COPIES, TO_HOST, Communication, Exchange, Hops, Stage, summed
from gssim.collectives.algorithms import ALGORITHMS, Members, ring_hops
from gssim.collectives.backend import processor_s
from gssim.collectives.nccl import Group, ring_packing, times
from gssim.collectives.stage import HostCopies
from gssim.engine.host import Load
from gssim.errors import UserError
from gssim.execution.cache import Same, Shared
from gssim.network import Network, Pace, Router, queued_ratio
from gssim.units import Floats, Ints, distinct, kinds_of_rows

NCCL_ALGORITHMS = {"ring": "ring", "tree": "double-tree", "nvls": "in-switch"}
"""Names of this package's algorithms by NCCL's names."""
DATA_CENTRE_LATENCY_S = 50e-6
"""Latency above which a message counts as long-distance; NCCL's own constants assume 14 us for a network."""
PCIE_BYTES_PER_S = 64e9
"""If devices of a host reach each other through a switch at a lower rate, PCIe is assumed instead of NVLink."""


@dataclass(frozen=True, eq=False)
class CollectiveSchedule:
    """One way to carry out a collective."""

    algorithm: str
    stages: tuple[Stage, ...]
    fixed_s: float
    """Time before the first byte."""
    factor: float = 1.0
    """Time per byte relative to that of the bare links."""
    path_latency: bool = True
    """Whether the latencies of links are added; if not, `fixed_s` includes them."""
    measured: bool = False
    """Whether `fixed_s` is the whole measured time; bytes are then counted on links but take no time of their own."""
    processor_byte_s: float = 0.0
    """Processor time of a rank per byte that it sends or receives, in addition to the links' time."""

    message_s: float = 0.0
    """Time of each message in addition to the latency of its path."""
    notices: bool = False
    """Whether a message waits for the notice of the receiver's receive."""
    group_bytes: int = 0
    """Bytes that a shaped link passes as one segment; 0 for links that are not shaped."""
    following_saving_s: float = 0.0
    """Time by which it is shorter if it starts as soon as another collective of its stream has ended."""
    queued_s: float = 0.0
    """Time for which it then occupies its ranks' processors, whatever its size."""

    def least_fixed_s(self) -> float:
        """Return the least fixed time before the first byte, without latencies: that of one that follows another."""
        return max(0.0, self.fixed_s - self.following_saving_s - self.queued_s)

    def pace(self, stage: Stage, *, latency: bool = True, lead_s: float = 0.0) -> Pace:
        """Return the times and factors that the backend adds to a stage's time on its links; `lead_s`: see `Pace`."""
        return Pace(
            self.factor,
            latency and self.path_latency,
            processor_s(stage, self.processor_byte_s),
            self.message_s,
            self.notices,
            lead_s,
            self.group_bytes,
        )

    def alone_s(self, network: Network) -> float:
        """Return the time on idle links, without the reduction of received bytes."""
        return self.fixed_s if self.measured else self.fixed_s + self._carrying_s(network)

    def load(self, network: Network) -> Load:
        """Return the load on processors while it runs on idle links; full load if the processor time per byte is
        unknown.
        """
        busy_s = sum(processor_s(stage, self.processor_byte_s) for stage in self.stages)
        handled = sum(processor_s(stage, 1.0) for stage in self.stages)
        carrying_s = self._carrying_s(network, latency=False)
        share = min(1.0, busy_s / carrying_s) if busy_s else 1.0
        return Load(share, handled / carrying_s if carrying_s else 0.0)

    def _carrying_s(self, network: Network, *, latency: bool = True) -> float:
        return sum(network.alone_s(stage, self.pace(stage, latency=latency)) for stage in self.stages)


MAX_COMPARED = 2**22
"""Largest number of pairs of members up to which groups are compared all at once."""
MIN_ROUTED_AHEAD = 16
"""Smallest number of collections of groups whose rings are searched all at once."""
MAX_CACHED = 512
"""Number of cached collectives, and of cached collections of groups."""


class Scheduler:
    """Finds the schedules of collectives on a cluster; the members of each group are computed once."""

    def __init__(self, cluster: Cluster, router: Router, ranks: int, shared: Shared | None = None) -> None:
        self.cluster, self.router, self._shared = cluster, router, shared or Shared()
        gpus = any(cluster.device_types[name].kind == "cuda" for name in {d.type for d in cluster.devices[:ranks]})
        self.tuning = (cluster.nccl or GENERATIONS["ampere"]) if cluster.backend == "nccl" and gpus else None
        self._groups: dict[Members, Group] = {}
        self._equal_groups: dict[bytes, Group] = {}
        self._ring_rates: dict[Sequence[int], tuple[float, float]] = {}
        """By group: rates of a ring's hops inside hosts and between them, of groups that were routed together."""
        devices = cluster.devices[:ranks]
        numbers = {name: i for i, name in enumerate(dict.fromkeys(device.host for device in devices))}
        self.hosts = np.array([numbers[device.host] for device in devices], dtype=np.int64)
        self._members: dict[tuple[Sequence[int], int], Members] = {}
        self._cache = Shared(MAX_CACHED)
        self._group_bytes = shaped_group_bytes(cluster)

    def members(self, group: Sequence[int], root: int = 0) -> Members:
        """Return a group's members in ring order from the root; equal groups and roots share one object."""
        if (group, root) not in self._members:
            ranks = np.roll(np.array(group, dtype=np.int64), -root)
            topology = self.cluster.topology
            shape = getattr(topology, "shape", ()) if topology is not None and topology.kind == "torus" else ()
            rails = self.cluster.backend == "nccl"
            inside = self._ring_packing(ranks) if rails and not root else None  # a ring has no root
            rings = () if inside is None else (inside.source, inside.target, inside.weight)
            arrays = tuple(each.tobytes() for each in (ranks, self.hosts[ranks], *rings))
            fills = tuple(shape) if prod(shape) == len(ranks) else ()

            def new_members() -> Members:
                kept = self.router.kept
                return Members(ranks, self.hosts[ranks], shape=fills, multirail=rails, inside=inside, kept=kept)

            key = (arrays, fills, rails)  # clusters that differ only in rates share members, and so their hops
            self._members[group, root] = self._shared.once("members", key, new_members, most=MAX_CACHED)
        return self._members[group, root]

    def _ring_packing(self, ranks: Ints) -> Hops | None:
        """Return the best rings inside hosts with direct links between devices; None if there are no such hosts."""
        if not len(self._direct_links):
            return None
        wiring, position = self.cluster.wiring, np.full(self.cluster.wiring.nodes, -1)
        position[ranks] = np.arange(len(ranks))
        source, target = position[wiring.source], position[wiring.target]
        direct = self._direct_links[(source[self._direct_links] >= 0) & (target[self._direct_links] >= 0)]
        if not len(direct):
            return None
        rates: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
        for link in direct.tolist():
            host = int(self.hosts[ranks[source[link]]])
            rates[host][int(source[link]), int(target[link])] = float(wiring.bandwidth_bytes_per_s[link])
        pairs: list[tuple[int, int, float]] = []
        for host in distinct(self.hosts[ranks]).tolist():
            pairs += _host_rings(np.flatnonzero(self.hosts[ranks] == host).tolist(), rates.get(host, {}))
        return Hops.of(pairs)

    @cached_property
    def _direct_links(self) -> Ints:
        """Links between two devices of one host."""
        wiring, ranks = self.cluster.wiring, len(self.hosts)
        links = np.flatnonzero((wiring.source < ranks) & (wiring.target < ranks))
        return np.asarray(links[self.hosts[wiring.source[links]] == self.hosts[wiring.target[links]]])

    def _tuned_by_nccl(self, tuning: NcclTuning, members: Members, communication: Communication) -> CollectiveSchedule:
        """Return the schedule that NCCL's tuner chooses, with its latency and the fraction of the links' rates it
        reaches.

        The tuner's price does not depend on the root.
        """
        group = self.nccl_group(communication.group)
        uneven = communication.kind == "all-to-all-v"  # other uneven kinds count as the even kind of the same size
        size_bytes = communication.most_sent_bytes if uneven else communication.size_bytes
        choice = times(tuning, cast(Kind, communication.kind.removesuffix("-v")), size_bytes, group)
        name = BACKEND_ALGORITHMS["nccl"][communication.kind]
        if communication.kind == "all-reduce":  # all other kinds have one algorithm
            name = NCCL_ALGORITHMS[choice.algorithm]
        stages = tuple(
            stage if stage.stretch_ratio == 1 else replace(stage, stretch_ratio=1.0)
            for stage in ALGORITHMS[name, communication.kind](members, communication)
        )
        rates = group.bandwidth_bytes_per_s, group.network_bytes_per_s or math.inf
        bare_s = [size / rate for size, rate in zip((choice.node_bytes, choice.network_bytes), rates, strict=True)]
        reached_s = bare_s[0] / choice.bandwidth_ratio, bare_s[1] / choice.network_bandwidth_ratio
        # one factor for all links, inside and across nodes: the slowest then takes as long as the tuner's
        factor = max(reached_s) / max(bare_s) if max(bare_s) else 1.0
        fixed_s = (
            choice.latency_s
            + self._long_distance_s(stages)
            + collectives.overhead_s(self.cluster, communication.carried_kind, ranks=len(communication.group))
        )
        return CollectiveSchedule(name, stages, fixed_s, factor, path_latency=False)

    def nccl_group(self, group: Sequence[int]) -> Group:
        """Return a group of ranks as NCCL's tuner sees it."""
        members, rates = self.members(group), self._ring_rates.get(group)
        if rates is not None and members not in self._groups:
            self._groups[members] = _group_with(members, *rates)
        return self._group(members)

    def _long_distance_s(self, stages: Sequence[Stage]) -> float:
        """Return the latency of long-distance hops beyond a data centre, which NCCL's constants do not include."""
        return sum([self._beyond_s(stage.hops, stage.steps if stage.coupled else None) for stage in stages], 0.0)

    def _beyond_s(self, hops: Hops, steps: float | None) -> float:
        """Return the seconds of latency beyond a data centre's, of one stage's hops.

        `steps`: the number of steps that the hops take together; None: they do not, and the longest hop counts. It is
        cached without the steps, since collectives of different sizes have the same hops.
        """

        def beyond_s() -> float:
            if steps is not None:
                return self.router.latency_beyond_s(hops, DATA_CENTRE_LATENCY_S)
            return float((self.router.latencies_s(hops) - DATA_CENTRE_LATENCY_S).max(initial=0.0))

        one_s = self._cache.once("long distance", (Same(hops), steps is None), beyond_s)
        return one_s if steps is None else steps * one_s

    def _group(self, members: Members) -> Group:
        """Return a group as NCCL's tuner sees it, with the rates of the ring's hops inside hosts and between hosts."""
        if members not in self._groups:
            place = self._canonical_place(members)
            if place is not None and place in self._equal_groups:
                return self._groups.setdefault(members, self._equal_groups[place])
            hops = ring_hops(members, 1)
            inside, between = (self.router.rate_bytes_per_s(hops, weight) for weight in self._ring_weights(hops))
            self._groups[members] = _group_with(members, inside, between)
            if place is not None:
                self._equal_groups[place] = self._groups[members]
        return self._groups[members]

    def _ring_weights(self, hops: Hops) -> tuple[Floats, Floats]:
        """Return two arrays of ring weights: hops inside hosts, scaled to 1 per sender, and hops between hosts."""
        local = np.where(self.hosts[hops.source] == self.hosts[hops.target], hops.weight, 0.0)
        whole = summed(hops.source, local, len(self.hosts))[hops.source]
        inside = np.divide(local, whole, out=np.zeros_like(local), where=whole > 0)
        return inside, np.where(local > 0, 0.0, hops.weight)

    def _canonical_place(self, members: Members) -> bytes | None:
        """Return a key that is equal for equal groups, if all servers are equal and on one switch; else None.

        The key is the members' hosts, numbered in order of appearance, and the positions inside them.
        """
        topology = self.cluster.topology
        if topology is None or topology.kind != "servers" or len(topology.servers) > 1:
            return None
        if topology.fabric is not None and topology.fabric.kind != "switch":
            return None
        _, first, inverse = np.unique(members.hosts, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first, kind="stable"), kind="stable")[inverse.ravel()]
        ranks = np.asarray(members.ranks) % topology.servers[0].devices
        return np.concatenate([order, ranks]).tobytes()

    def kinds(self, groups: Sequence[Sequence[int]]) -> Ints:
        """Return a class for each of several groups; groups of a class have the same schedules for their collectives.

        The class depends on how members are spread over hosts and, for NCCL's tuner, on the rates between these.
        """
        if len(groups[0]) == 1:  # copies between a device and its host; only the network tells them apart
            return np.zeros(len(groups), np.int64)
        return self._cache.once("kinds", tuple(groups), lambda: self._kinds(groups))

    def _kinds(self, groups: Sequence[Sequence[int]]) -> Ints:
        if self._are_switched and len(groups) * len(groups[0]) ** 2 <= MAX_COMPARED:
            return self._kinds_at_once(groups)
        found = []
        for group in groups:
            members = self.members(group)
            order = {host: number for number, host in enumerate(dict.fromkeys(members.hosts.tolist()))}
            spread = tuple(order[host] for host in members.hosts.tolist())
            inside = members.inside
            rings = None if inside is None else tuple(map(tuple, (inside.source, inside.target, inside.weight)))
            found.append(
                (spread, members.shape, rings, repr(_round_rates(self._group(members))) if self.tuning else "")
            )
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(found))}
        return np.array([numbers[kind] for kind in found], dtype=np.int64)

    @cached_property
    def _are_switched(self) -> bool:
        """Whether rings depend only on hosts: NCCL's tuner prices them, and no devices are directly linked."""
        devices, wiring, topology = len(self.cluster.devices), self.cluster.wiring, self.cluster.topology
        direct = (wiring.source < devices) & (wiring.target < devices)
        return self.tuning is not None and not direct.any() and (topology is None or topology.kind != "torus")

    def _kinds_at_once(self, groups: Sequence[Sequence[int]]) -> Ints:
        """Return the classes of groups if rings depend only on hosts; all groups are then routed at once."""
        ranks = np.array(groups, dtype=np.int64)
        hosts = self.hosts[ranks]
        first_on_host = (hosts[:, :, None] == hosts[:, None, :]).argmax(axis=2)
        spread, first = kinds_of_rows(first_on_host)
        kind, kinds = np.zeros(len(groups), np.int64), dict[tuple[int, Group], int]()
        for number, representative in enumerate(first.tolist()):
            which = np.flatnonzero(spread == number)
            members = self.members(groups[representative])
            hops = ring_hops(members, 1)
            source, target = (
                ranks[which][:, _places(ranks[representative], ends)] for ends in (hops.source, hops.target)
            )
            rates = np.stack(self.router.rates_of_equal(source, target, self._ring_weights(hops)), axis=1)
            self._ring_rates.update(
                zip([groups[each] for each in which.tolist()], map(tuple, rates.tolist()), strict=True)
            )
            distinct_rates, of_rates = np.unique(rates, axis=0, return_inverse=True)
            for place, (inside, between) in enumerate(distinct_rates.tolist()):
                own = number, _round_rates(_group_with(members, inside, between))
                kind[which[of_rates.ravel() == place]] = kinds.setdefault(own, len(kinds))
        numbers = {each: number for number, each in enumerate(dict.fromkeys(kind.tolist()))}
        return np.array([numbers[each] for each in kind.tolist()], dtype=np.int64)

    def route_rings(self, collections: Sequence[Sequence[Sequence[int]]]) -> None:
        """Search the paths of the rings of many groups at once; in each collection they have equally many members.

        They are the hops of most collectives that NCCL's tuner prices, and what it knows of the links. Where other
        groups of a collection are spread differently over hosts than its first, theirs are searched when they are
        needed.
        """
        if self.tuning is None or len(collections) < MIN_ROUTED_AHEAD:
            return
        ends: list[Ints] = []
        for groups in collections:
            if len(groups[0]) > 1:
                hops, ranks = ring_hops(self.members(groups[0]), 1), np.array(groups, dtype=np.int64)
                ends.append(np.stack([ranks[:, _places(ranks[0], end)].ravel() for end in (hops.source, hops.target)]))
        if ends and sum(pairs.shape[1] for pairs in ends) <= MAX_COMPARED:
            with suppress(UserError):  # it is raised for those that are needed
                self.router.search_ahead(*np.concatenate(ends, axis=1))

    def candidates(self, communication: Communication) -> tuple[CollectiveSchedule, ...]:
        """Return the possible schedules: a single one if the backend or the user names it, else all that fit."""
        if communication.pair_bytes:  # data-dependent sizes never repeat, so caching is useless
            return self._candidates(communication)
        return self._cache.once("candidates", communication, lambda: self._candidates(communication))

    def in_every(self, hops: Hops, groups: Sequence[Sequence[int]]) -> Hops:
        """Return the hops of all groups that carry out the same collective; `hops`: those of one group."""
        key = (Same(hops), tuple(groups))

        def new_hops() -> Hops:
            if isinstance(hops, Exchange):
                return hops.in_groups(tuple(map(self.members, groups)))
            return hops.in_every(np.array(groups))

        return self._cache.once("hops in every group", key, new_hops)

    def _candidates(self, communication: Communication) -> tuple[CollectiveSchedule, ...]:
        if communication.kind in COPIES:
            return (self._host_copy_schedule(communication),)
        if len(communication.group) == 1:
            return (CollectiveSchedule("none", (), 0.0),)
        members = self.members(communication.group, communication.root)
        table_s = collectives.measured_s(self.cluster, communication)
        if table_s is not None:
            name = BACKEND_ALGORITHMS[self.cluster.backend][communication.carried_kind]
            stages = ALGORITHMS[name, communication.carried_kind](members, communication)
            return (CollectiveSchedule(name, stages, table_s, measured=True),)
        if self.tuning is not None and communication.carried_kind not in self.cluster.algorithms:
            return (self._tuned_by_nccl(self.tuning, members, communication),)
        named = collectives.algorithm_of(self.cluster, communication.carried_kind)
        if named == "best":
            return self._fitting_algorithms(members, communication)
        try:
            return (self._with_backend_costs(named, members, communication),)
        except ValueError as error:
            raise UserError(f"cluster.algorithms.{communication.carried_kind} = {named!r}: {error}") from None

    def _host_copy_schedule(self, communication: Communication) -> CollectiveSchedule:
        """Return the schedule of a copy between a rank's device and its host's memory; the backend adds no time."""
        (rank,) = communication.group
        key = (communication.kind, rank)
        to_host = communication.kind == TO_HOST

        def new_hops() -> HostCopies:
            return HostCopies.between(np.array([rank]), self._memory, to_host=to_host)

        hops = self._cache.once("copies", key, new_hops)
        return CollectiveSchedule("copy", (Stage(hops, communication.size_bytes, coupled=False),), 0.0)

    @cached_property
    def _memory(self) -> Ints:
        """Node of the host memory of each rank; -1 if the cluster has none."""
        node = {name: number for number, name in enumerate(self.cluster.wiring.names)}
        return np.array([node.get(memory_node(device.host), -1) for device in self.cluster.devices[: len(self.hosts)]])

    def _with_backend_costs(self, name: str, members: Members, communication: Communication) -> CollectiveSchedule:
        """Return an algorithm with the backend's costs; raises ValueError where the group's shape does not fit it."""
        kind, half_precision = communication.carried_kind, communication.half_precision
        stages = ALGORITHMS[name, kind](members, communication)
        saving_s, queued_s = collectives.following_s(self.cluster, kind, half_precision)
        return CollectiveSchedule(
            name,
            tuple(self._with_queueing(stage) for stage in stages),
            collectives.overhead_s(self.cluster, kind, half_precision, ranks=len(communication.group)),
            processor_byte_s=collectives.processor_byte_s(self.cluster, kind, half_precision),
            message_s=collectives.message_s(self.cluster),
            notices=collectives.has_notices(self.cluster.backend),
            group_bytes=self._group_bytes,
            following_saving_s=saving_s,
            queued_s=queued_s,
        )

    def _with_queueing(self, stage: Stage) -> Stage:
        """Return the stage, stretched if receivers' notices wait in queues behind the stage's own data."""
        if not stage.queued_ratio or not collectives.has_notices(self.cluster.backend):
            return stage
        waits_ratio = self._cache.once("queues", Same(stage.hops), lambda: queued_ratio(self.router, stage.hops))
        return replace(stage, stretch_ratio=stage.stretch_ratio * (1 + waits_ratio * stage.queued_ratio))

    def _fitting_algorithms(self, members: Members, communication: Communication) -> tuple[CollectiveSchedule, ...]:
        """Return the schedules of all algorithms that fit the shape of the group.

        In-switch reduction is left out: it is used where NCCL's tuner or the user says that the switches support it.
        """
        found = []
        for name in collectives.algorithms_for(communication.carried_kind):
            if name != "in-switch":
                with suppress(ValueError):
                    found.append(self._with_backend_costs(name, members, communication))
        return tuple(found)


def _places(ranks: Ints, ends: Ints) -> Ints:
    """Return the place of each end among the ranks of a group."""
    order = np.argsort(ranks)
    return np.asarray(order[np.searchsorted(ranks, ends, sorter=order)])


def _group_with(members: Members, inside: float, between: float) -> Group:
    """Return a group as NCCL's tuner sees it, with the rates of its ring's hops inside hosts and between them."""
    nodes = len(members.blocks[0])
    per_node = math.ceil(members.count / nodes)
    return Group(
        ranks=members.count,
        nodes=nodes,
        bandwidth_bytes_per_s=inside if math.isfinite(inside) else between,
        network_bytes_per_s=between / per_node if nodes > 1 else None,
        joint="pcie" if members.inside is None and inside < PCIE_BYTES_PER_S else "nvlink",
        nvls=members.inside is None and members.count > 1,
    )


def _round_rates(group: Group) -> Group:
    """Return a group with rates rounded to twelve digits, because sums of the same numbers may differ by their
    order.
    """
    across = group.network_bytes_per_s
    return replace(
        group,
        bandwidth_bytes_per_s=float(f"{group.bandwidth_bytes_per_s:.12g}"),
        network_bytes_per_s=None if across is None else float(f"{across:.12g}"),
    )


MAX_PACKED_DEVICES = 8
"""Hosts with more devices are not searched for rings."""


def _host_rings(members: list[int], rates: dict[tuple[int, int], float]) -> list[tuple[int, int, float]]:
    """Return (source, target, weight) of the hops of rings over one host's members; in rank order if links
    allow none.
    """
    first = members[0]
    matrix = [[rates.get((a, b), 0.0) for b in members] for a in members]
    rings = _cached_ring_packing(tuple(map(tuple, matrix))) if 1 < len(members) <= MAX_PACKED_DEVICES else ()
    total = sum(rate for _, rate in rings)
    if not total:
        following = [*members[1:], first]
        return [(a, b, 1.0) for a, b in zip(members, following, strict=True) if a != b]
    weights: dict[tuple[int, int], float] = defaultdict(float)
    for order, rate in rings:
        for a, b in zip(order, [*order[1:], order[0]], strict=True):
            weights[members[a], members[b]] += rate / total
    return [(a, b, weight) for (a, b), weight in weights.items()]


@lru_cache(maxsize=64)
def _cached_ring_packing(matrix: tuple[tuple[float, ...], ...]) -> tuple[tuple[tuple[int, ...], float], ...]:
    try:
        return tuple(ring_packing(matrix))
    except ValueError:  # these links alone allow no ring
        return ()
