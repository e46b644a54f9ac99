"""Clusters of the machines that figures were published of."""

import tomllib
from dataclasses import field
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, Literal

from gssim.cluster import GENERATIONS, Cluster, presets
from gssim.cluster.topology import CUBE_MESH_DEVICES
from gssim.units import FlopPerSecond, PositiveFloat, PositiveInt, Precision, spec, validated

FILE = "platforms.toml"


@spec
class Platform:
    """A kind of machine, as tables name its GPU."""

    names: tuple[str, ...]
    """What the tables call it, or what their entry begins with."""
    device: str
    """A preset of gssim's; so are the links."""
    inside: Literal["nvswitch", "pcie", "cube-mesh", "none"]
    inside_link: str
    devices: PositiveInt
    """In each server, unless the table says."""
    nics: PositiveInt
    nic_link: str
    pcie_link: str
    nccl: str
    """One of gssim's generations."""
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


@cache
def platforms() -> dict[str, Platform]:
    """Return every platform by its key in the file."""
    data = tomllib.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    for table in data.values():
        table |= {**data.get(table.pop("like", ""), {}), **table}
    return {name: validated(Platform, table, file=FILE, under=name) for name, table in data.items()}


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
    return frozenset().union(*(platform.calibrated_on for platform in platforms().values()))


def sixteen_bits_of(gpu: str) -> Precision:
    """Return in what 16 bits a GPU multiplies: fp16 where it has no bf16; bf16 where the GPU is not known.

    >>> sixteen_bits_of("V100-SXM2-16GB"), sixteen_bits_of("A100-SXM-80GB")
    ('fp16', 'bf16')
    """
    platform = platform_of(gpu)
    known = presets("devices")[platform.device]["peak_flop_per_s"] if platform else ()
    return "fp16" if "fp16" in known and "bf16" not in known else "bf16"


Server = tuple[str, int]
"""A server's GPU, as tables name it, and how many it has."""


def servers_of(gpu: str, ranks: int, per_node: int | None) -> tuple[Server, ...]:
    """Return equal servers of so many devices in all; as many in each as there may be that divide them evenly.

    >>> servers_of("T4", 8, 4), servers_of("T4", 6, 4)
    ((('T4', 4), ('T4', 4)), (('T4', 3), ('T4', 3)))
    """
    platform = platform_of(gpu)
    assert platform is not None  # asked for before
    devices = min(per_node or platform.devices, ranks)
    while ranks % devices:
        devices -= 1
    return ((gpu, devices),) * (ranks // devices)


@cache
def cluster_of(servers: tuple[Server, ...], precision: Precision, tensor_float: bool = False) -> Cluster:
    """Return a cluster of servers of known GPUs, in rank order, behind one switch that never blocks.

    `precision`, and `tensor_float`: what matrix products are in; those of fp32 are multiplied as TF32 where the device
    can. Of unlike servers, NCCL goes by the constants of the oldest.
    """
    kinds = dict.fromkeys(gpu for gpu, _ in servers)
    known = {gpu: platform for gpu in kinds if (platform := platform_of(gpu))}
    assert len(known) == len(kinds)  # asked for before
    types = {gpu: "gpu" if len(kinds) == 1 else gpu for gpu in kinds}
    ranks = sum(devices for _, devices in servers)
    data = {
        "name": f"{ranks} x {' and '.join(kinds)}",
        "backend": "nccl",
        "nccl": min((each.nccl for each in known.values()), key=_age),
        "source": f"analysis/literature/{FILE}",
        "device_types": {types[gpu]: _device(each, precision, tensor_float) for gpu, each in known.items()},
        "topology": {
            "kind": "servers",
            "fabric": {"kind": "switch"},
            "servers": [
                _server(known[gpu], types[gpu], devices, len(list(alike))) for (gpu, devices), alike in groupby(servers)
            ],
        },
    }
    return validated(Cluster, data, file=FILE)


def _age(nccl: str) -> int:
    """Return where a platform's generation stands among all of them."""
    return list(GENERATIONS).index(nccl.partition("-")[0])


def _device(platform: Platform, precision: Precision, tensor_float: bool) -> str | dict[str, Any]:
    """Return a platform's device as a cluster file has it: a preset, but for products in TF32, which gssim has not."""
    if precision != "fp32" or not tensor_float or not platform.tensor_float_flop_per_s:
        return platform.device
    peaks = {"fp32": platform.tensor_float_flop_per_s}
    source = f"analysis/literature/{FILE}: TF32 on tensor cores"
    return {"preset": platform.device, "peak_flop_per_s": peaks, "fp32_efficiency_ratio": None, "source": source}


def _server(platform: Platform, device: str, devices: int, count: int) -> dict[str, Any]:
    """Return servers of so many of a platform's devices as a cluster file has them."""
    # a part of a cube mesh is nearly a full mesh
    inside = "nvswitch" if platform.inside == "cube-mesh" and devices != CUBE_MESH_DEVICES else platform.inside
    return {
        "count": count,
        "device": device,
        "devices": devices,
        "inside": inside if devices > 1 else "none",
        **({"inside_link": platform.inside_link} if devices > 1 else {}),
        "nics": next(n for n in range(min(platform.nics, devices), 0, -1) if devices % n == 0),
        "nic_link": platform.nic_link,
        "pcie_link": platform.pcie_link,
    }
