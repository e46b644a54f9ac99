"""Emulates unequal devices on equal cores: assigns each rank a core, and a share of that core's time.

A rank's main thread, which computes, alternates between work and sleep (`throttle.cpp`): measured beside three other
busy processes, it had 0.4 +- 0.002 and 0.25 +- 0.002 of a core, two of 0.4 on one core as well as one alone. A cgroup's
quota would refill while a rank waits for the network, and let it compute faster afterwards (measured). Gloo's threads
are not slowed down, as a network card would not be by a slow GPU.
"""

import ctypes
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from gsreal.compiled import compiled
from gssim.cluster import DeviceType
from gssim.cluster.contention import dealt
from gssim.errors import RunFailedError, UserError

VARIABLE = "GSREAL_LAB_PLACE"
"""Environment variable with a rank's place."""
LEAST_SHARE_RATIO = 0.01
"""Smallest share of a core: a smaller device would sleep for a tenth of a second at a time, a hundred times as long as
it computes.
"""
MOST_OF_THE_CORES = 0.8
"""Largest part of all cores together that devices get; the rest is for gloo's threads and network processing."""


@dataclass(frozen=True)
class Place:
    """Core, share and emulated device of a rank."""

    device: str
    """Name of the emulated device."""
    core: int
    cpu_share_ratio: float
    library: str
    """The compiled throttle; empty if the share is 1."""


def share_of(device: DeviceType) -> float:
    """Return the share of a core's time that a device of this type gets in the lab."""
    return device.lab.cpu_share_ratio if device.lab else 1.0


def cores_of(shares: Sequence[float], cores: Sequence[int], *, where: str) -> tuple[int, ...]:
    """Return the core of each device, the largest shares first, each on the core with the most time left.

    Raises UserError if the cores do not suffice.

    >>> cores_of([0.2, 0.8, 0.4], [4, 5], where="example")
    (5, 4, 5)
    """
    if min(shares) < LEAST_SHARE_RATIO:
        raise UserError(
            f"{where}: device_types: lab.cpu_share_ratio = {min(shares):g}: the lab's devices have at least "
            f"{LEAST_SHARE_RATIO:g} of a core"
        )
    total, room = sum(shares), MOST_OF_THE_CORES * len(cores)
    if total > room + 1e-9:
        raise UserError(
            f"{where}: device_types: lab.cpu_share_ratio: the devices' shares add up to {total:g} cores, but this "
            f"machine has {len(cores)}, of which the lab gives {MOST_OF_THE_CORES:g}: at most {room:g}, "
            f"such as {room / len(shares):.3g} for each of {len(shares)}"
        )
    numbers = dealt(shares, len(cores))
    if any(sum(s for s, c in zip(shares, numbers, strict=True) if c == core) > 1 + 1e-9 for core in numbers):
        raise UserError(
            f"{where}: device_types: lab.cpu_share_ratio: shares of {', '.join(f'{s:g}' for s in shares)} cannot be "
            f"assigned to {len(cores)} cores without more than a whole on one"
        )
    return tuple(cores[core] for core in numbers)


def throttle_library() -> Path | None:
    """Return the compiled throttle, or None without a compiler; raise UserError if it could not be loaded."""
    library = compiled(Path(__file__).with_name("throttle.cpp"), ["-shared", "-fPIC"])
    if library is not None and re.search(r"[\s:]", str(library)):  # the dynamic linker takes these for separators
        raise UserError(
            f"{library.parent}: LD_PRELOAD, which slows devices down, cannot name a path with a space or a colon: name "
            "another folder with XDG_CACHE_HOME"
        )
    return library


def own_place() -> Place | None:
    """Return this process's place in the lab; None outside the lab."""
    stated = os.environ.get(VARIABLE)
    return Place(**json.loads(stated)) if stated else None


def device_time_s() -> float:
    """Return the emulated device's time of this thread, in seconds from some moment.

    A slowed-down thread sleeps now and then for many milliseconds: whether that falls into a timed interval is random,
    and medians of short calls never include it. Its CPU time, over its share, is the cost of a call. Outside the lab
    this is the wall-clock. In the lab, waiting for others does not count.
    """
    share = _own_share_ratio()
    return time.perf_counter() if share == 1 else time.thread_time() / share


@cache
def _own_share_ratio() -> float:
    """Return the share of a core's time that this process has in the lab; 1 outside."""
    place = own_place()
    return place.cpu_share_ratio if place else 1.0


def as_variable(place: Place) -> dict[str, str]:
    """Return the environment variable of a rank's place."""
    variables = {VARIABLE: json.dumps(asdict(place))}
    if place.library:
        variables["LD_PRELOAD"] = " ".join(filter(None, (place.library, os.environ.get("LD_PRELOAD"))))
    return variables


def take(place: Place) -> None:
    """Pin this thread to its core, and slow it down to its share of it."""
    os.sched_setaffinity(0, {place.core})
    if place.cpu_share_ratio < 1:
        try:
            throttle = ctypes.CDLL(None).gsreal_throttle
        except AttributeError:
            raise RunFailedError(
                f"{place.library}: was not loaded by LD_PRELOAD: nothing slows this rank down"
            ) from None
        throttle.argtypes = [ctypes.c_double]
        failed = throttle(place.cpu_share_ratio)
        if failed:
            raise RunFailedError(f"the CPU share {place.cpu_share_ratio:g} cannot be set: {os.strerror(failed)}")
