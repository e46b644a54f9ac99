"""Clusters of the machines on which published runs were measured, from platforms.toml."""

from dataclasses import field
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, Literal

import tomli

from gssim.cluster import GENERATIONS, Cluster, presets
from gssim.cluster.topology import CUBE_MESH_DEVICES
from gssim.units import BytesPerSecond, FlopPerSecond, PositiveFloat, PositiveInt, Precision, Seconds, spec, validated

FILE = "platforms.toml"


@spec
class Platform:
    """A kind of server, identified by the GPU name that tables give."""

    names: tuple[str, ...]
    """GPU names in the tables; an entry may go on after a space or comma."""
    device: str
    """A device preset of gssim; links are presets too."""
    inside: Literal["nvswitch", "pcie", "cube-mesh", "none"]
    inside_link: str
    devices: PositiveInt
    """Devices per server, unless the table gives another number."""
    nics: PositiveInt
    nic_link: str
    pcie_link: str
    nccl: str
    """One of gssim's NCCL generations."""
    link_ratio: PositiveFloat | None = None
    """Measured rate of all-gathers and reduce-scatters over the wire rate of a server's links; absent: NCCL's own."""
    tensor_float_flop_per_s: FlopPerSecond | None = None
    """Rate of matrix products in TF32; absent: the device has no TF32."""
    attention_ratio: PositiveFloat = 1.0
    """Rate of flash attention relative to linear layers; see `Software`."""
    fused_attention_ratio: PositiveFloat | None = None
    """The same ratio for cuDNN's attention; None: `attention_ratio`."""
    first_attention_ratio: PositiveFloat = 1.0
    """The same ratio for the first version of FlashAttention (Triton)."""
    host_core_bytes_per_s: BytesPerSecond | None = None
    """Rate at which one core of the host reads or writes memory; absent: what it moves takes no time."""
    calls: dict[str, tuple[Seconds, Seconds]] = field(default_factory=dict)
    """Measured time of an empty collective inside a server, by kind: a fixed part, and one for each other rank."""
    exchange_fixed_s: dict[str, Seconds] = field(default_factory=dict)
    """Fixed part of an all-to-all by the number of its ranks, beside that in `calls`."""
    calibrated_on: tuple[str, ...] = field(default=())
    """Ids of the rows that numbers of the device were fitted to."""


@cache
def platforms() -> dict[str, Platform]:
    """Return every platform by its key in the file."""
    data = tomli.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    for table in data.values():
        table |= {**data.get(table.pop("like", ""), {}), **table}
    return {name: validated(Platform, table, file=FILE, under=name) for name, table in data.items()}


def platform_of(gpu: str) -> Platform | None:
    """Return the platform of a table's GPU entry: the one with the longest name that the entry begins with.

    >>> platform_of("A100-SXM-80GB (as they say)").nics, platform_of("abacus")
    (8, None)
    """
    matches = [
        (len(name), platform)
        for platform in platforms().values()
        for name in platform.names
        if gpu == name or gpu.startswith((f"{name} ", f"{name},"))
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def attention_ratio_of(gpu: str) -> float:
    """Return the rate of flash attention relative to linear layers; 1 for an unknown GPU.

    >>> attention_ratio_of("A100-SXM-80GB"), attention_ratio_of("abacus")
    (0.74, 1.0)
    """
    platform = platform_of(gpu)
    return platform.attention_ratio if platform else 1.0


def fused_attention_ratio_of(gpu: str) -> float:
    """Return the rate of cuDNN's attention relative to linear layers; where it is not known, that of other kernels.

    >>> fused_attention_ratio_of("H100"), fused_attention_ratio_of("A100-SXM-80GB")
    (0.87, 0.74)
    """
    platform = platform_of(gpu)
    known = platform.fused_attention_ratio if platform else None
    return attention_ratio_of(gpu) if known is None else known


def first_attention_ratio_of(gpu: str) -> float:
    """Return the rate of FlashAttention's first version relative to linear layers; 1 for an unknown GPU."""
    platform = platform_of(gpu)
    return platform.first_attention_ratio if platform else 1.0


def float8_ratio_of(gpu: str) -> float | None:
    """Return the rate of matrix products in float8 relative to 16 bits; None where it is unknown."""
    platform = platform_of(gpu)
    return presets("devices")[platform.device].get("float8_ratio") if platform else None


def calibration_rows() -> frozenset[str]:
    """Return the ids of all rows that numbers of a device were fitted to."""
    return frozenset().union(*(platform.calibrated_on for platform in platforms().values()))


def sixteen_bits_of(gpu: str) -> Precision:
    """Return a GPU's 16-bit precision: fp16 where it has no bf16, else bf16 (also for an unknown GPU).

    >>> sixteen_bits_of("V100-SXM2-16GB"), sixteen_bits_of("A100-SXM-80GB")
    ('fp16', 'bf16')
    """
    platform = platform_of(gpu)
    known = presets("devices")[platform.device]["peak_flop_per_s"] if platform else ()
    return "fp16" if "fp16" in known and "bf16" not in known else "bf16"


Server = tuple[str, int]
"""GPU name in the table, and number of GPUs of the server."""


def servers_of(gpu: str, ranks: int, per_node: int | None) -> tuple[Server, ...]:
    """Return equal servers for `ranks` devices: the largest number per server that divides them evenly.

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
    """Return the cluster of `cluster_tables`."""
    return validated(Cluster, cluster_tables(servers, precision, tensor_float), file=FILE)


def cluster_tables(servers: tuple[Server, ...], precision: Precision, tensor_float: bool = False) -> dict[str, Any]:
    """Return a cluster of servers with known GPUs, in rank order, behind one non-blocking switch, as in a cluster file.

    `precision` and `tensor_float`: number format of matrix products; those in fp32 use TF32 where the device has it.
    Where servers differ, NCCL uses the constants of the oldest generation.
    """
    kinds = dict.fromkeys(gpu for gpu, _ in servers)
    known = {gpu: platform for gpu in kinds if (platform := platform_of(gpu))}
    assert len(known) == len(kinds)  # asked for before
    types = {gpu: "gpu" if len(kinds) == 1 else gpu for gpu in kinds}
    ranks = sum(devices for _, devices in servers)
    oldest_first = list(GENERATIONS)
    generations = (platform.nccl for platform in known.values())
    oldest = min(generations, key=lambda nccl: oldest_first.index(nccl.partition("-")[0]))
    ratio = next(iter(known.values())).link_ratio if len(known) == 1 else None
    return {
        "name": f"{ranks} x {' and '.join(kinds)}",
        "backend": "nccl",
        "nccl": oldest if ratio is None else {"generation": oldest, "bandwidth_ratio": ratio},
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


def _device(platform: Platform, precision: Precision, tensor_float: bool) -> str | dict[str, Any]:
    """Return a platform's device as in a cluster file: a preset, changed for TF32 products, which presets lack."""
    if precision != "fp32" or not tensor_float or not platform.tensor_float_flop_per_s:
        return platform.device
    peaks = {"fp32": platform.tensor_float_flop_per_s}
    source = f"analysis/literature/{FILE}: TF32 on tensor cores"
    ratio = presets("devices")[platform.device]["efficiency_ratio"]  # the preset's own for fp32 is without tensor cores
    return {"preset": platform.device, "peak_flop_per_s": peaks, "fp32_efficiency_ratio": ratio, "source": source}


def _server(platform: Platform, device: str, devices: int, count: int) -> dict[str, Any]:
    """Return `count` servers with `devices` devices each, as a cluster file has them."""
    # a part of a cube mesh is close to a full mesh
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
