"""Which messages a collective sends, as each backend does it, and its time on idle links in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

from gssim.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes from one rank to another."""

    source: int
    target: int
    size_bytes: float


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that are under way together; the next round waits for all of them."""

    messages: tuple[Message, ...]
    reduced_bytes: float = 0.0
    """Most bytes that any rank adds to its own after this round."""


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective as it is handed over: kind, group, size; and per-pair bytes for the uneven forms."""

    kind: str
    group: tuple[int, ...]
    size_bytes: int
    """Of the full tensor, as in `result.Collective.bytes`."""
    pair_bytes: tuple[tuple[float, ...], ...] = ()
    """all-to-all-v: bytes from the i-th to the j-th member of the group."""
    part_bytes: tuple[int, ...] = ()
    """all-gather-v: bytes that each member owns."""
    data_dependent: bool = False

    @property
    def payload_bytes(self) -> float:
        """Bytes that an all-to-all-v really carries."""
        return sum(map(sum, self.pair_bytes))


def rounds(communication: Communication, backend: str) -> tuple[Round, ...]:
    """Return the messages of `communication`, round by round.

    gloo (backend-facts 1): all-reduce is a ring to rank-1; its reduce-scatter is that same all-reduce; all-gather is
    a ring to rank+1; broadcast is a binomial tree. nccl: ring algorithms of its own, reduce-scatter in (n-1) rounds.
    """
    members = len(communication.group)
    if members == 1:
        return ()
    kind = communication.kind
    if kind == "all-to-all-v":
        return (_direct(communication),)
    if kind == "all-gather-v":
        return _ring_uneven(communication.group, communication.part_bytes)
    if kind == "broadcast":
        return _binomial(communication.group, communication.size_bytes)
    chunk = communication.size_bytes / members
    scatter = tuple(_ring_round(communication.group, -1, chunk, reduced=chunk) for _ in range(members - 1))
    gather = tuple(_ring_round(communication.group, +1, chunk) for _ in range(members - 1))
    if kind == "all-gather":
        return gather
    if kind == "all-reduce" or (kind == "reduce-scatter" and backend == "gloo"):
        return scatter + tuple(_ring_round(communication.group, -1, chunk) for _ in range(members - 1))
    if kind == "reduce-scatter":
        return scatter
    raise ValueError(f"unknown collective {kind!r}")


def _ring_round(group: Sequence[int], direction: int, chunk: float, *, reduced: float = 0.0) -> Round:
    members = len(group)
    messages = tuple(Message(group[i], group[(i + direction) % members], chunk) for i in range(members))
    return Round(messages, reduced)


def _ring_uneven(group: Sequence[int], parts: Sequence[int]) -> tuple[Round, ...]:
    """Return a ring all-gather of unequal parts: in round r, member i passes on the part of member i-r."""
    members = len(group)
    found = []
    for step in range(members - 1):
        messages = tuple(
            Message(group[i], group[(i + 1) % members], parts[(i - step) % members])
            for i in range(members)
            if parts[(i - step) % members]
        )
        found.append(Round(messages))
    return tuple(found)


def _direct(communication: Communication) -> Round:
    group = communication.group
    return Round(
        tuple(
            Message(group[i], group[j], size)
            for i, row in enumerate(communication.pair_bytes)
            for j, size in enumerate(row)
            if i != j and size > 0
        )
    )


def _binomial(group: Sequence[int], size_bytes: float) -> tuple[Round, ...]:
    members, reach = len(group), 1
    found = []
    while reach < members:
        senders = range(min(reach, members - reach))
        found.append(Round(tuple(Message(group[i], group[i + reach], size_bytes) for i in senders)))
        reach *= 2
    return tuple(found)


def staging_bytes(communication: Communication, backend: str) -> int:
    """Return what the backend takes from the allocator for the length of one call.

    gloo gathers into, and scatters from, a flat copy of the full tensor (torch 2.13, ProcessGroupGloo.cpp,
    newLikeFlat); nccl works in place.

    >>> staging_bytes(Communication("all-gather", (0, 1), 8), "gloo")
    8
    """
    stages = backend == "gloo" and communication.kind in ("all-gather", "reduce-scatter")
    return communication.size_bytes if stages else 0


def overhead_s(cluster: Cluster, kind: str) -> float:
    """Return the fixed time of one call of a collective, on top of its links' latencies."""
    cost = cluster.backend_cost
    return cost.overhead_s.get(kind, cost.overhead_s.get("default", 0.0)) if cost else 0.0


def posting_s(cluster: Cluster, size_bytes: float) -> float:
    """Return the host time to hand messages of `size_bytes` to the backend before they go on in the background."""
    cost = cluster.backend_cost
    return cost.posting_s + cost.posting_byte_s * size_bytes if cost and size_bytes else 0.0


def bytes_factor(cluster: Cluster, kind: str) -> float:
    """Return the time per byte of a collective kind over that of a plain exchange on the same links."""
    return cluster.backend_cost.bytes_factor.get(kind, 1.0) if cluster.backend_cost else 1.0


def reduction_s(cluster: Cluster, reduced_bytes: float) -> float:
    """Return the time to add received bytes to local ones."""
    cost = cluster.backend_cost
    if cost is None or cost.reduction_bytes_per_s is None:
        return 0.0
    return reduced_bytes / cost.reduction_bytes_per_s


def ring_all_reduce_time_s(*, size_bytes: float, ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> float:
    """Return the time of a ring all-reduce on idle links, each of `bandwidth_bytes_per_s` in one direction.

        t = 2(n-1) * (latency + size / (n * bandwidth))

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

    >>> ring_all_reduce_time_s(size_bytes=8e9, ranks=2, bandwidth_bytes_per_s=4e9, latency_s=0)
    2.0
    """
    return 2 * (ranks - 1) * (latency_s + size_bytes / (ranks * bandwidth_bytes_per_s))
