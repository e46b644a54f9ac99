"""Clusters of the machines that figures were published of."""

import tomllib
from dataclasses import field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from gssim.cluster import Cluster
from gssim.topology.kinds import CUBE_MESH_DEVICES
from gssim.units import FlopPerSecond, PositiveFloat, PositiveInt, Seconds, spec, validated

FILE = "platforms.toml"


@spec
class Platform:
    """A kind of machine, as tables name its GPU."""

    names: tuple[str, ...]
    """What the tables call it, or what their entry begins with."""
    device: dict[str, Any]
    inside: Literal["nvswitch", "pcie", "cube-mesh", "none"]
    inside_link: str
    devices: PositiveInt
    """In each server, unless the table says."""
    nics: PositiveInt
    nic_link: str
    pcie_link: str
    nccl: str | dict[str, Any]
    tensor_float_flop_per_s: FlopPerSecond | None = None
    """Of matrix products in TF32; absent: the device has none."""
    float8_ratio: PositiveFloat | None = None
    """Rate of matrix products in float8 over that in 16 bits; absent: the device has none."""
    attention_ratio: PositiveFloat = 1.0
    """Rate of flash attention over that of maps; see `Software`."""
    first_attention_ratio: PositiveFloat = 1.0
    """The same of FlashAttention's first version, as Triton has it."""
    calibrated_on: tuple[str, ...] = field(default=())
    """The rows, by their id, that numbers of the device were fitted to."""


@spec
class Hosts:
    """What the hosts of all platforms have in common that tell nothing else."""

    operation_overhead_s: Seconds
    """Of issuing one operation."""
    calibrated_on: tuple[str, ...]
    """The rows that it was set to."""


@cache
def _file() -> tuple[Hosts, dict[str, Platform]]:
    data = tomllib.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    hosts = validated(Hosts, data.pop("hosts"), file=FILE, under="hosts")
    return hosts, {name: validated(Platform, table, file=FILE, under=name) for name, table in data.items()}


def platforms() -> dict[str, Platform]:
    """Return every platform by its key in the file."""
    return _file()[1]


def platform_of(gpu: str) -> Platform | None:
    """Return the platform of a GPU as a table names it: the longest name that its entry begins with.

    >>> platform_of("A100-SXM-80GB (as they say)").nics, platform_of("abacus")
    (8, None)
    """
    found = [(len(name), platform) for platform in platforms().values() for name in platform.names if _is(gpu, name)]
    return max(found, key=lambda each: each[0])[1] if found else None


def _is(gpu: str, name: str) -> bool:
    return gpu == name or gpu.startswith((f"{name} ", f"{name},"))


def first_attention_ratio_of(gpu: str) -> float:
    """Return the rate of FlashAttention's first version over that of maps; 1 where the GPU is not known."""
    platform = platform_of(gpu)
    return platform.first_attention_ratio if platform else 1.0


def float8_ratio_of(gpu: str) -> float | None:
    """Return the rate of matrix products in float8 over that in 16 bits; None where it is not known."""
    platform = platform_of(gpu)
    return platform.float8_ratio if platform else None


def calibration_rows() -> frozenset[str]:
    """Return the ids of all rows that a device's numbers were fitted to."""
    hosts, every = _file()
    return frozenset(row for each in (hosts, *every.values()) for row in each.calibrated_on)


@cache
def cluster_of(gpu: str, ranks: int, per_node: int | None, tensor_float: bool = False) -> Cluster:
    """Return a cluster of so many devices of a known GPU, in servers behind one switch that never blocks.

    `tensor_float`: products of fp32 are multiplied as TF32, where the device can.
    """
    platform = platform_of(gpu)
    assert platform is not None  # asked for before
    devices = min(per_node or platform.devices, ranks)
    while ranks % devices:
        devices -= 1
    # a part of a cube mesh is nearly a full mesh
    inside = "nvswitch" if platform.inside == "cube-mesh" and devices != CUBE_MESH_DEVICES else platform.inside
    nics = next(n for n in range(min(platform.nics, devices), 0, -1) if devices % n == 0)
    server = {
        "count": ranks // devices,
        "device": "gpu",
        "devices": devices,
        "inside": inside if devices > 1 else "none",
        **({"inside_link": platform.inside_link} if devices > 1 else {}),
        "nics": nics,
        "nic_link": platform.nic_link,
        "pcie_link": platform.pcie_link,
    }
    device = {"operation_overhead_s": _file()[0].operation_overhead_s, **platform.device}
    if tensor_float and platform.tensor_float_flop_per_s:
        device = {**device, "peak_flop_per_s": {"fp32": platform.tensor_float_flop_per_s}}
    data = {
        "name": f"{ranks} x {gpu}",
        "backend": "nccl",
        "nccl": platform.nccl,
        "source": f"analysis/published/{FILE}",
        "device_types": {"gpu": device},
        "topology": {"kind": "servers", "fabric": {"kind": "switch"}, "servers": [server]},
    }
    return validated(Cluster, data, file=FILE)
