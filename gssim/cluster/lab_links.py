"""What the lab's shaped links do that wires do not: a token bucket lets the first bytes through at once.

[Note: head start] A wire takes a message's bytes one after another from the first on. A token bucket has tokens for a
burst when it was idle, and lets a group of segments pass while it has any, whatever the group's size: groups pass at
once until the tokens are gone. From then on bytes go at the rate, and a pause no longer than the burst is made up for.
A message over an idle link is done that much earlier than over a wire, and one of 1 Mbit at 100 Mbit/s a tenth earlier.
"""

from gssim.cluster.cluster import Cluster

SEGMENT_BYTES, FRAME_BYTES = 1448, 1514
"""What an Ethernet frame of 1500 bytes carries beside the headers of TCP (with timestamps) and IP, and what it is."""
BURST_S = 0.2e-3
"""A wire that was idle sends so much at once: as late as a timer may wake it."""
GROUP_S = 1e-3
"""A group of segments that travels together takes no longer than this on the slowest wire: it arrives whole, and a
message that is one group would arrive at once. Smaller groups keep the machine busier than a faster wire is: in a site
at 400 Mbit/s, behind a link of 50, messages in groups of half a millisecond took twice their time (measured)."""
MOST_GROUPED_BYTES = 65536


def group_bytes(slowest_bytes_per_s: float) -> int:
    """Return how large a group of segments may be, in a network whose slowest wire has this rate.

    >>> group_bytes(12.5e6), group_bytes(1e5)
    (12112, 1514)
    """
    frames = int(slowest_bytes_per_s * GROUP_S / SEGMENT_BYTES)
    return max(FRAME_BYTES, min(frames * FRAME_BYTES, MOST_GROUPED_BYTES))


def burst_bytes(rate_bytes_per_s: float) -> int:
    """Return for how much a link has tokens when it was idle.

    >>> burst_bytes(125e6), burst_bytes(1e6)
    (25000, 3028)
    """
    return max(2 * FRAME_BYTES, int(rate_bytes_per_s * BURST_S))


def head_start_s(rate_bytes_per_s: float, group: int) -> float:
    """Return how much sooner than over a wire of a rate bytes are through that come in groups; see [Note: head start].

    >>> round(head_start_s(12.5e6, 12_500), 9), round(head_start_s(125e6, 12_500), 9)
    (0.001, 0.0003)
    """
    return (1 + burst_bytes(rate_bytes_per_s) // group) * group / rate_bytes_per_s


def shaped_group_bytes(cluster: Cluster) -> int:
    """Return how large groups of segments are on a cluster's links, where the lab shapes them; elsewhere 0."""
    if not any(kind.lab for kind in cluster.device_types.values()):
        return 0
    return group_bytes(float(cluster.wiring.bandwidth_bytes_per_s.min(initial=float("inf"))))
