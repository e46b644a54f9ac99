"""Contention that slows a device's compute: from other devices of its host (in the lab: its core), or communication."""

from collections.abc import Sequence

from gssim.cluster.cluster import Cluster, DeviceType


def dealt(shares: Sequence[float], cores: int) -> tuple[int, ...]:
    """Return the core (from 0) of each of the lab's devices: in order of falling share, each on the least loaded core.

    >>> dealt([0.2, 0.8, 0.4], 2)
    (1, 0, 1)
    """
    left = [1.0] * cores
    core_of = dict[int, int]()
    for device in sorted(range(len(shares)), key=lambda i: -shares[i]):
        core = max(range(cores), key=lambda c: left[c])
        left[core] -= shares[device]
        core_of[device] = core
    return tuple(core_of[i] for i in range(len(shares)))


def contention_groups(cluster: Cluster) -> tuple[str, ...]:
    """Return the resource that each device shares with others: its host, by name; in the lab, its core."""
    shares, cores = core_shares(cluster), _cores(cluster)
    if shares is None or cores is None:
        return tuple(device.host for device in cluster.devices)
    return tuple(f"core {core}" for core in dealt(shares, cores))


def core_shares(cluster: Cluster) -> tuple[float, ...] | None:
    """Return each device's share of a core's time in the lab; None elsewhere, or if the number of cores is unknown."""
    if _cores(cluster) is None:
        return None
    kinds = [cluster.device_types[device.type].lab for device in cluster.devices]
    return tuple(kind.cpu_share_ratio if kind else 1.0 for kind in kinds)


def _cores(cluster: Cluster) -> int | None:
    counts = [kind.lab.cores for kind in cluster.device_types.values() if kind.lab and kind.lab.cores]
    return min(counts, default=None)


def has_contention(device: DeviceType) -> bool:
    """Return whether other devices of its host (or core), or its own communication, slow a device down."""
    alone = device.communicating_excess_ratio is None and device.communicating_slowdown_ratio == 1
    return device.neighbour_slowdown_ratio != 1 or not alone


def communicating_excess(device: DeviceType, busy_share: float, handled_bytes_per_s: float) -> float:
    """Return the extra compute time of a device during communication, relative to compute alone.

    `busy_share`: fraction of the time for which communication keeps a processor busy. If the slowdown was measured by
    rate, `handled_bytes_per_s` (sent and received) counts instead.
    """
    curve = device.communicating_excess_ratio
    if curve is None:
        return (device.communicating_slowdown_ratio - 1) * min(1.0, busy_share)
    return curve.at(min(handled_bytes_per_s, curve.sizes[-1])) if handled_bytes_per_s else 0.0
