"""The lab's shaped links: burst and segment-group sizes of their token buckets, and the resulting head start.

[Note: head start] A wire transmits a message's bytes one after another. A token bucket that was idle has tokens for a
burst. While it has any tokens, it lets a whole group of segments pass, whatever the group's size; so groups pass at
once until the tokens are used up. From then on bytes pass at the link's rate, and a pause no longer than the burst is
made up for. So a message over an idle link completes earlier than over a wire: one of 1 Mbit at 100 Mbit/s by a tenth.
"""

from gssim.cluster.cluster import Cluster

SEGMENT_BYTES, FRAME_BYTES = 1448, 1514
"""Payload and size of an Ethernet frame of 1500 bytes, with the headers of TCP (with timestamps) and IP."""
BURST_S = 0.2e-3
"""Length of an idle token bucket's burst, as time at the link's rate: the accuracy of timers."""
GROUP_S = 1e-3
"""Longest time of a segment group on the slowest wire. A group arrives as a whole, so a message that is one group would
arrive at once. Smaller groups load the machine more than a faster wire does: in a site at 400 Mbit/s behind a link of
50 Mbit/s, messages in groups of half a millisecond took twice their time (measured)."""
MOST_GROUPED_BYTES = 65536


def group_bytes(slowest_bytes_per_s: float) -> int:
    """Return the size of a segment group in a network whose slowest wire has this rate, in bytes.

    >>> group_bytes(12.5e6), group_bytes(1e5)
    (12112, 1514)
    """
    frames = int(slowest_bytes_per_s * GROUP_S / SEGMENT_BYTES)
    return max(FRAME_BYTES, min(frames * FRAME_BYTES, MOST_GROUPED_BYTES))


def burst_bytes(rate_bytes_per_s: float) -> int:
    """Return the bytes for which an idle link has tokens.

    >>> burst_bytes(125e6), burst_bytes(1e6)
    (25000, 3028)
    """
    return max(2 * FRAME_BYTES, int(rate_bytes_per_s * BURST_S))


def head_start_s(rate_bytes_per_s: float, group: int) -> float:
    """Return the time that bytes in groups of `group` bytes gain over a wire of the same rate; see [Note: head start].

    >>> round(head_start_s(12.5e6, 12_500), 9), round(head_start_s(125e6, 12_500), 9)
    (0.001, 0.0003)
    """
    return (1 + burst_bytes(rate_bytes_per_s) // group) * group / rate_bytes_per_s


def shaped_group_bytes(cluster: Cluster) -> int:
    """Return the size of segment groups on a cluster's links if the lab shapes them; else 0."""
    if not any(kind.lab for kind in cluster.device_types.values()):
        return 0
    return group_bytes(float(cluster.wiring.bandwidth_bytes_per_s.min(initial=float("inf"))))
