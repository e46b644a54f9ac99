"""Closed forms of the time of every algorithm on idle, equal links: the oracle of the simulated times.

"Bandwidth" in a formula is the rate at which every member sends and receives over its own link (of a switch, a ring, or
a torus, per direction). For `direct` on a fully connected network it is the rate of each pair's link.
"""

import math
from collections.abc import Callable

from gssim.collectives.algorithms import CHUNK_BYTES, SEGMENT_BYTES, tree_depth


def ring_all_reduce_time_s(*, size_bytes: float, ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> float:
    """Return the time of a ring all-reduce on idle links, each of `bandwidth_bytes_per_s` in one direction.

        t = 2(n-1) * (latency + size / (n * bandwidth))

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * (ranks - 1) * (latency_s + size_bytes / (ranks * bandwidth_bytes_per_s))


Formula = Callable[[int, float, float, float], float]
"""Seconds from (ranks, size, bandwidth, latency)."""


def _ring(turns: int) -> Formula:
    return lambda n, size, rate, latency: turns * (n - 1) * (latency + size / n / rate)


def _segmented(turns: int, segment_bytes: float) -> Formula:
    """Segmented ring with two messages in flight at a time: each hides the latency of the other.

    Two ranks share one connection for both directions, so between them no latency is hidden.
    """

    def time_s(n: int, size: float, rate: float, latency: float) -> float:
        segments = max(2, math.ceil(size / n / segment_bytes))
        messages = (n - 1) * segments
        message_s = size / n / segments / rate
        hidden_s = message_s if n > 2 else 0.0
        later = messages / 2 - 1 if n > 2 else segments - 2
        return turns * (latency + messages * message_s + later * max(0.0, latency - hidden_s))

    return time_s


def _direct_on_switch(turns: int) -> Formula:
    """n-1 messages leave every port together."""
    return lambda n, size, rate, latency: turns * (latency + (n - 1) / n * size / rate)


def _direct_on_pairs(turns: int) -> Formula:
    """Every message has a link of its own."""
    return lambda n, size, rate, latency: turns * (latency + size / n / rate)


def _binomial(n: int, size: float, rate: float, latency: float) -> float:
    return math.ceil(math.log2(n)) * (latency + size / rate)


def _binomial_at_once(n: int, size: float, rate: float, latency: float) -> float:
    """Each level of the tree takes as long as its node with most children needs to send to all of them."""
    children = [sum(rank < 2**i and rank + 2**i < n for i in range(n.bit_length())) for rank in range(n)]
    levels = [[children[rank] for rank in range(n) if rank.bit_count() == level] for level in range(n.bit_length())]
    return float(sum(latency + max(level) * size / rate for level in levels if max(level)))


def _chain(n: int, size: float, rate: float, latency: float) -> float:
    chunks = max(1, math.ceil(size / CHUNK_BYTES))
    return (n - 2 + chunks) * (latency + size / chunks / rate)


def _halving_doubling(n: int, size: float, rate: float, latency: float) -> float:
    """2 log2(n) exchanges that send 2(n-1)/n of the size in total; beyond a power of two, also the whole size twice."""
    power = 2 ** (n.bit_length() - 1)
    inside: float = 2 * math.log2(power) * latency + 2 * (power - 1) / power * size / rate
    return inside + (2 * (latency + size / rate) if n > power else 0.0)


CLOSED_FORMS: dict[tuple[str, str, str], Formula] = {
    ("ring", "all-reduce", "ring"): _ring(2),
    ("ring", "reduce-scatter", "ring"): _ring(1),
    ("ring", "all-gather", "ring"): _ring(1),
    # every message crosses all links on its way: n(n-1)/2 steps of an n-th (a one-way ring)
    ("ring", "all-to-all", "ring"): lambda n, size, rate, latency: n * (n - 1) / 2 * (latency + size / n / rate),
    ("ring", "all-reduce", "switch"): _ring(2),
    ("ring", "reduce-scatter", "switch"): _ring(1),
    ("ring", "all-gather", "switch"): _ring(1),
    ("ring-all-reduce", "reduce-scatter", "switch"): _ring(2),
    ("segmented-ring", "all-reduce", "switch"): _segmented(2, SEGMENT_BYTES),
    ("segmented-ring", "all-gather", "switch"): _segmented(1, math.inf),
    ("segmented-ring-all-reduce", "reduce-scatter", "switch"): _segmented(2, SEGMENT_BYTES),
    ("direct", "all-reduce", "fully-connected"): _direct_on_pairs(2),
    ("direct", "reduce-scatter", "fully-connected"): _direct_on_pairs(1),
    ("direct", "all-gather", "fully-connected"): _direct_on_pairs(1),
    ("direct", "all-to-all", "fully-connected"): _direct_on_pairs(1),
    ("direct", "all-reduce", "switch"): _direct_on_switch(2),
    ("direct", "reduce-scatter", "switch"): _direct_on_switch(1),
    ("direct", "all-gather", "switch"): _direct_on_switch(1),
    ("direct", "all-to-all", "switch"): _direct_on_switch(1),
    ("direct", "send", "switch"): lambda n, size, rate, latency: latency + size / rate,
    ("binomial", "broadcast", "switch"): _binomial,
    ("binomial-at-once", "broadcast", "switch"): _binomial_at_once,
    ("binomial", "reduce", "switch"): _binomial,
    ("chain", "broadcast", "switch"): _chain,
    ("chain", "reduce", "switch"): _chain,
    ("halving-doubling", "all-reduce", "switch"): _halving_doubling,
    # 2 depth latencies, and the size twice over every port (once for 2 members, 1.5 times for 3)
    ("double-tree", "all-reduce", "switch"): lambda n, size, rate, latency: (
        2 * tree_depth(n) * latency + {2: 1.0, 3: 1.5}.get(n, 2.0) * size / rate
    ),
    # every device sends its tensor into the switch, which adds up, and its part of the sum to all
    ("in-switch", "all-reduce", "switch"): lambda n, size, rate, latency: 2 * latency + (1 + 1 / n) * size / rate,
}
"""By (algorithm, kind, topology)."""


def torus_time_s(kind: str, *, shape: tuple[int, ...], size_bytes: float, rate: float, latency_s: float) -> float:
    """Return the time of a dimension-wise collective on a torus whose links have `rate` in each direction.

            t = turns * sum over dimensions d of  (d-1) * (latency + part / (2 d rate)),  part shrinking by d each time

        A ring of two has only one link between its members, which carries both halves.

    >>> torus_time_s("all-gather", shape=(4,), size_bytes=8.0, rate=1.0, latency_s=0.0)
    3.0
    """
    turns, part, total = (2 if kind == "all-reduce" else 1), size_bytes, 0.0
    for size in shape:
        directions = 2 if size > 2 else 1
        total += turns * (size - 1) * (latency_s + part / size / rate / directions)
        part /= size
    return total


def hierarchical_time_s(
    *, size_bytes: float, inside: int, hosts: int, inside_rate: float, between_rate: float, latency_s: float
) -> float:
    """Return the time of a hierarchical all-reduce: `inside` devices on each host, each with its own rail between.

    t = 2(g-1)(latency + n/(g inside_rate)) + 2(k-1)(latency + n/(g k between_rate))

    >>> hierarchical_time_s(size_bytes=8.0, inside=2, hosts=2, inside_rate=8.0, between_rate=1.0, latency_s=0.0)
    5.0
    """
    g, k = inside, hosts
    within = 2 * (g - 1) * (latency_s + size_bytes / g / inside_rate)
    return within + 2 * (k - 1) * (latency_s + size_bytes / g / k / between_rate)
