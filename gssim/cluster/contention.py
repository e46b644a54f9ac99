"""What slows a device's compute down: others of its host, in the lab of its core, and its own communication."""

from collections.abc import Sequence

from gssim.cluster.cluster import Cluster, DeviceType


def dealt(shares: Sequence[float], cores: int) -> tuple[int, ...]:
    """Return the core of each of the lab's devices, from 0: the largest shares first, each to the core with most left.

    >>> dealt([0.2, 0.8, 0.4], 2)
    (1, 0, 1)
    """
    left = [1.0] * cores
    found = dict[int, int]()
    for device in sorted(range(len(shares)), key=lambda i: -shares[i]):
        core = max(range(cores), key=lambda c: left[c])
        left[core] -= shares[device]
        found[device] = core
    return tuple(found[i] for i in range(len(shares)))


def neighbourhoods(cluster: Cluster) -> tuple[str, ...]:
    """Return what each device shares with its neighbours: the name of its host; in the lab, of its core."""
    shares, cores = core_shares(cluster), _cores(cluster)
    if shares is None or cores is None:
        return tuple(device.host for device in cluster.devices)
    return tuple(f"core {core}" for core in dealt(shares, cores))


def core_shares(cluster: Cluster) -> tuple[float, ...] | None:
    """Return which part of a core's time each device has in the lab; None where they are no parts of cores.

    So it is where it is not known how many cores there are.
    """
    if _cores(cluster) is None:
        return None
    kinds = [cluster.device_types[device.type].lab for device in cluster.devices]
    return tuple(kind.cpu_share_ratio if kind else 1.0 for kind in kinds)


def _cores(cluster: Cluster) -> int | None:
    found = [kind.lab.cores for kind in cluster.device_types.values() if kind.lab and kind.lab.cores]
    return min(found, default=None)


def is_coupled(device: DeviceType) -> bool:
    """Return whether other devices of its host or core, or its own communication, change a device's pace."""
    alone = device.communicating_excess_ratio is None and device.communicating_slowdown_ratio == 1
    return device.neighbour_slowdown_ratio != 1 or not alone


def communicating_excess(device: DeviceType, busy_share: float, handled_bytes_per_s: float) -> float:
    """Return how much longer a device's compute takes beside communication, over compute alone.

    `busy_share`: part of the time for which that keeps a processor busy. Measured rate by rate, the bytes that the
    device sends and receives decide.
    """
    curve = device.communicating_excess_ratio
    if curve is None:
        return (device.communicating_slowdown_ratio - 1) * min(1.0, busy_share)
    return curve.at(min(handled_bytes_per_s, curve.sizes[-1])) if handled_bytes_per_s else 0.0
