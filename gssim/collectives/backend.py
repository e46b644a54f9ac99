"""Backends (gloo, NCCL): the algorithm of each collective, fixed costs, host time to post messages, and staging memory.

[Note: notices] gloo sends no byte of a message before the receiver has posted a receive for it and has announced it: a
notice travels back, and the sender's thread answers it (pytorch/gloo, gloo/transport/tcp/pair.cc: Pair::send,
Pair::recv, handleRemotePendingRecv). A message arrives at

    max(send posted, receive posted + notice) + latency + transfer

If both ends post at the same time, a message takes two latencies; if its receive was posted long before, only one. This
holds for the transport, and so for gloo's own collectives as well as for point-to-point messages. Notices take the same
path as messages, and are assumed to take as long. They also use the same connection. Suppose a rank first posts a send
to a peer whose receive is posted already, and then a receive from that peer: the notice of the receive queues behind
all bytes of the sent message, so the two messages do not overlap. Messages to the same peer leave one after another,
too (Pair::tx_): those of two broadcasts at once do not share the link, but the first has all of it. The segments of two
rings at once alternate, and share it. NCCL has no notices: its kernels poll the peer's memory.

[Note: following] The fixed time of a collective over gloo is mostly due to cold caches: a step's compute has evicted
the code and the buffers of torch, gloo and the kernel's network stack. For a collective that starts as soon as another
has ended, they are still there. Measured with torch 2.13 between two pinned ranks on one machine, 4 KiB, in ms:

                          after compute   each after the last   in a queue of 24, all awaited at the end
    broadcast                      0.45                  0.10                                       0.04
    all-reduce                     0.60                  0.15                                       0.13
    reduce-scatter                 0.69                  0.20                                       0.15
    all-gather                     0.71                  0.14                                       0.09

Waking threads is not the cause: the second column includes it, too, and a pause of 0.5 ms without compute changes
nothing, whereas 1 ms of matrix products restores a quarter to a half of the difference, 5 ms three quarters. Two
threads carry out a queue; one works while the other waits, so that processor time alone limits it. In steps of a model
of 4.5 MB on these ranks, ZeRO-1's 53 broadcasts took 4.8 ms (predicted: 4.2 ms; with cold caches for all: 11.2 ms), and
Gradient Sharding's 11 publications 3.0 ms (2.9 ms; 5.9 ms).
"""

from collections.abc import Mapping

import numpy as np

from gssim.cluster import Cluster, DeviceType
from gssim.cluster.measured import PostingCost
from gssim.collectives.algorithms import ALGORITHMS, algorithms_for
from gssim.collectives.communication import Communication
from gssim.collectives.stage import Stage
from gssim.errors import UserError

BACKEND_ALGORITHMS: dict[str, dict[str, str]] = {
    # gloo's reduce-scatter is an all-reduce (measured with torch 2.13); uneven forms use point-to-point messages
    "gloo": {
        "all-reduce": "segmented-ring",
        "reduce-scatter": "segmented-ring-all-reduce",
        "all-gather": "segmented-ring",
        "broadcast": "binomial-at-once",
        "reduce": "binomial",
        "all-to-all": "direct",
        "send": "direct",
        "all-gather-v": "ring",
        "reduce-scatter-v": "ring",
        "all-to-all-v": "direct",
    },
    # NCCL: rings and chains in chunks; for all-reduce its tuner chooses; uneven gathers are grouped broadcasts
    "nccl": {
        "all-reduce": "ring",
        "reduce-scatter": "ring",
        "all-gather": "ring",
        "broadcast": "chain",
        "reduce": "chain",
        "all-to-all": "direct",
        "send": "direct",
        "all-gather-v": "pipelined-ring",
        "reduce-scatter-v": "pipelined-ring",
        "all-to-all-v": "direct",
    },
}
"""Algorithm of each kind of collective, by backend."""


def algorithm_of(cluster: Cluster, kind: str) -> str:
    """Return the name of the algorithm that the cluster's backend uses for a kind, or `best`.

    Raises UserError if the cluster file names an algorithm that does not implement that kind.
    """
    named = cluster.algorithms.get(kind)
    if named is None:
        return BACKEND_ALGORITHMS[cluster.backend][kind]
    if named != "best" and (named, kind) not in ALGORITHMS:
        allowed = ", ".join([*algorithms_for(kind), "best"])
        raise UserError(f"cluster.algorithms.{kind} = {named!r}: no such algorithm; allowed: {allowed}")
    return named


def at_once(backend: str) -> int:
    """Return how many asynchronous collectives of one group a backend runs concurrently.

    gloo has two threads for each process group, which take the collectives in turn (torch, ProcessGroupGloo::Options).
    NCCL runs the kernels of a communicator on one stream.
    """
    return {"gloo": 2, "nccl": 1}[backend]


def has_notices(backend: str) -> bool:
    """Return whether a backend's sends wait for a notice of the receiver; see [Note: notices]."""
    return backend == "gloo"


def message_s(cluster: Cluster) -> float:
    """Return the time of a message or notice in addition to the latency of its path: waking up threads."""
    return cluster.backend_cost.message_s if cluster.backend_cost else 0.0


def staging_bytes(communication: Communication, backend: str, *, kind: str = "cpu") -> float:
    """Return the memory that an even gather or reduce-scatter allocates on a device for the duration of one call, in
    bytes.

    `kind`: kind of the device. gloo gathers into, and scatters from, a flat copy of the full tensor (torch 2.13,
    ProcessGroupGloo.cpp, newLikeFlat, reduce_scatter_tensor_coalesced). For a GPU's gathers, the copy is in pinned
    memory of the host (AsyncAllgatherCUDAWork). nccl works in place. So do rings of point-to-point messages, except for
    a reduce-scatter among more than two ranks, which receives the parts that it forwards into a buffer of one part.

    >>> gather = Communication("all-gather", (0, 1), 8)
    >>> staging_bytes(gather, "gloo"), staging_bytes(gather, "gloo", kind="cuda")
    (8, 0)
    >>> staging_bytes(Communication("reduce-scatter", (0, 1, 2, 3), 8, carried_as="reduce-scatter-v"), "gloo")
    2.0
    """
    size, members = communication.size_bytes, len(communication.group)
    if communication.carried_as:
        return size / members if communication.kind == "reduce-scatter" and members > 2 else 0
    staged = ("reduce-scatter",) if kind == "cuda" else ("all-gather", "reduce-scatter")
    return size if backend == "gloo" and communication.kind in staged else 0


def overhead_s(cluster: Cluster, kind: str, half_precision: str = "", *, ranks: int = 2) -> float:
    """Return the fixed time of one call of a collective among `ranks` ranks, in addition to its links' latencies.

    `half_precision`: bf16 or fp16, if the summed elements have that precision.
    """
    cost = cluster.backend_cost
    if cost is None:
        return 0.0
    added_s = max(0, ranks - 2) * _by_kind(cost.overhead_rank_s, kind, half_precision)
    return _by_kind(cost.overhead_s, kind, half_precision) + added_s


PAIRWISE_KINDS = ("all-to-all", "send")
"""Kinds whose messages start pair by pair, as their ranks arrive."""


def following_s(cluster: Cluster, kind: str, half_precision: str = "") -> tuple[float, float]:
    """Return two times in seconds for a collective that starts as soon as another on its stream has ended: how much
    shorter it is for that, and for how long it occupies the processors of its ranks. See [Note: following].

    Both are 0 if they were not measured, and for kinds and backends that have no such collectives.
    """
    cost = cluster.backend_cost
    if cost is None or not has_notices(cluster.backend) or kind in PAIRWISE_KINDS:
        return 0.0, 0.0
    return _by_kind(cost.following_saving_s, kind, half_precision), _by_kind(cost.queued_s, kind, half_precision)


def _by_kind(values: Mapping[str, float], kind: str, half_precision: str) -> float:
    """Return the value of a kind; for sums in a 16-bit format, the value for kind and format if it was measured."""
    for key in (f"{kind} {half_precision}", kind, "default"):
        if key in values:
            return values[key]
    return 0.0


def measured_s(cluster: Cluster, communication: Communication) -> float | None:
    """Return the measured time of a collective of all ranks, if the cluster file has a table for its kind.

    Log-log interpolation, because sizes in a table of nccl-tests span six decades.
    """
    table = cluster.backend_cost.measured_s.get(communication.carried_kind) if cluster.backend_cost else None
    if table is None or len(communication.group) != len(cluster.devices):
        return None
    size, largest = communication.size_bytes, table.sizes[-1]
    if size > largest:
        return table.values[-1] * size / largest
    return float(np.exp(np.interp(np.log(max(size, 1e-9)), np.log(table.sizes), np.log(table.values))))


def posting_s(cluster: Cluster, device: DeviceType, size_bytes: float, messages: int = 1) -> float:
    """Return the host time of a device to post `messages` messages, of `size_bytes` in total, to the backend.

    The transfer begins while they are posted: see `processor_s`. If a link is slow, sockets do not buffer all bytes at
    once; the backend's thread posts the rest later.
    """
    cost = cluster.backend_cost
    if cost is None or not size_bytes:
        return 0.0
    own = device.posting or PostingCost(exchange_s=cost.posting_s, message_s=cost.posting_message_s)
    limit_bytes = size_bytes if cost.posting_limit_bytes is None else cost.posting_limit_bytes * messages
    return own.exchange_s + own.message_s * (messages - 1) + cost.posting_byte_s * min(size_bytes, limit_bytes)


def processor_byte_s(cluster: Cluster, kind: str, half_precision: str = "") -> float:
    """Return a rank's processor time per byte that it sends or receives in a kind of collective.

    `half_precision`: bf16 or fp16, if the summed elements have that precision. On one machine gloo took 1.4 times as
    long per byte for bf16, and 2.7 times for fp16, as for fp32 (torch 2.13, all-reduces of 4 million elements).
    """
    return _by_kind(cluster.backend_cost.processor_byte_s, kind, half_precision) if cluster.backend_cost else 0.0


def processor_s(stage: Stage, byte_s: float) -> float:
    """Return the processor time of a stage on the rank that sends and receives the most, in seconds.

    Like the links' times, it is a lower bound of the stage's time: bytes cross the links while others are copied, so
    the stage takes the longer of the two, not their sum. On a loopback the processor is the bottleneck, on a slow link
    the link. One thread of gloo serves all of a rank's connections, in both directions (its transport/tcp/loop.cc).

    >>> from gssim.collectives.stage import Hops
    >>> processor_s(Stage(Hops.of([(0, 1, 1.0), (1, 0, 1.0)]), size_bytes=100.0), byte_s=1e-3)
    0.2
    """
    return stage.size_bytes * stage.stretch_ratio * stage.hops.most_handled * byte_s if byte_s else 0.0


def reduction_s(cluster: Cluster, reduced_bytes: float) -> float:
    """Return the time to add received bytes to local ones."""
    cost = cluster.backend_cost
    if cost is None or cost.reduction_bytes_per_s is None:
        return 0.0
    return reduced_bytes / cost.reduction_bytes_per_s
