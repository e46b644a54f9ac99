"""Usual servers by GPU: how the presets' GPUs are connected if no file describes it."""

import re
from dataclasses import dataclass, replace

from gssim.cluster import presets
from gssim.errors import UserError


@dataclass(frozen=True)
class Server:
    """GPUs of one server and their links, by the names of presets."""

    device: str
    devices: int
    inside: str
    inside_link: str
    nics: int
    nic_link: str
    pcie_link: str
    nccl: str
    source: str
    notes: tuple[str, ...] = ()
    """What is assumed of it beyond its links."""


RCCL = "RCCL's choices of algorithms are not known: those of NCCL on an Ampere are taken"
OF_AMD = (
    "leave the file out: --gpu mi300x, or mi325x, names their usual server; describe the links of others in a cluster "
    "file (scenarios/README.md)"
)
"""What to do instead of giving a report of AMD's tools, none of which is read."""


def _nvswitch(device: str, devices: int, link: str, nccl: str, source: str, *, nic: str = "ib-ndr-400") -> Server:
    """Return a server with a switch (or a mesh that is as good) and a network card of its own for each device."""
    pcie = "pcie4x16" if nic == "ib-hdr-200" else "pcie5x16"
    return Server(device, devices, "nvswitch", link, devices, nic, pcie, nccl, source)


def _of_amd(device: str) -> Server:
    source = "assumed: AMD's platform of eight, a mesh of Infinity Fabric as one switch, cards of 400 Gbit/s"
    return replace(_nvswitch(device, 8, "xgmi-mi300x", "ampere", source), notes=(RCCL,))


def _pcie(device: str, devices: int, pcie: str, nic: str, nccl: str) -> Server:
    source = "assumed: PCIe cards behind one root, one network card"
    return Server(device, devices, "pcie", pcie, 1, nic, pcie, nccl, source)


SERVERS: dict[str, Server] = {
    "v100": Server(
        *("v100-sxm2-32", 8, "cube-mesh", "nvlink2-v100", 4, "ib-edr-100", "pcie3x16", "volta-dgx-1"),
        source="NVIDIA 2017, DGX-1 with Tesla V100 system architecture",
    ),
    "a100": _nvswitch(
        *("a100-sxm-80", 8, "nvlink3-a100", "ampere", "NVIDIA 2020, DGX A100 system architecture"), nic="ib-hdr-200"
    ),
    "h100": _nvswitch("h100-sxm", 8, "nvlink4-h100", "hopper", "NVIDIA 2022, DGX H100 system architecture"),
    "h200": _nvswitch("h200-sxm", 8, "nvlink4-h100", "hopper", "assumed: as DGX H100, whose board it shares"),
    "h20": _nvswitch("h20", 8, "nvlink4-h100", "hopper", "assumed: as DGX H100, whose NVLinks it has"),
    "b200": _nvswitch("b200-sxm", 8, "nvlink5-b200", "blackwell", "assumed: DGX B200, cards of 400 Gbit/s"),
    "gb200": _nvswitch(
        *("gb200", 72, "nvlink5-b200", "blackwell"),
        "data sheet (recalled): GB200 NVL72, a rack as one NVLink domain; assumed: a card of 400 Gbit/s a GPU",
    ),
    "t4": _pcie("t4", 4, "pcie3x16", "tcp-50g-t4", "volta-t4"),
    "a10": _pcie("a10", 4, "pcie4x16", "tcp-25g", "ampere"),
    "a40": _pcie("a40", 4, "pcie4x16", "tcp-25g", "ampere"),
    "l4": _pcie("l4", 8, "pcie4x16", "tcp-100g", "ampere"),
    "l40s": _pcie("l40s", 8, "pcie4x16", "tcp-100g", "ampere"),
    "rtxa6000": _pcie("rtxa6000", 4, "pcie4x16", "tcp-10g", "ampere"),
    "rtx6000ada": _pcie("rtx6000ada", 4, "pcie4x16", "tcp-10g", "ampere"),
    "rtx3090": _pcie("rtx3090", 8, "pcie4x16-8-gpus", "tcp-10g", "ampere"),
    "rtx4090": _pcie("rtx4090", 8, "pcie4x16", "tcp-10g", "ampere"),
    "mi300x": _of_amd("mi300x"),
    "mi325x": _of_amd("mi325x"),
}
"""Usual servers by the GPU's usual name."""


DETECTED = {
    "v100-sxm2-16gb": "v100-sxm2-16",
    "v100-sxm2-32gb": "v100-sxm2-32",
    "v100-sxm3-32gb": "v100-sxm3-32",
    "v100-pcie-16gb": "v100-pcie-16",
    "a100-sxm4-40gb": "a100-sxm-40",
    "a100-sxm4-80gb": "a100-sxm-80",
    "a100 80gb pcie": "a100-pcie-80",
    "h100 80gb hbm3": "h100-sxm",
    "h100 pcie": "h100-pcie",
    "h200": "h200-sxm",
    "h20": "h20",
    "b200": "b200-sxm",
    "gb200": "gb200",
    "t4": "t4",
    "a10": "a10",
    "l4": "l4",
    "l40s": "l40s",
    "a40": "a40",
    "rtx a6000": "rtxa6000",
    "rtx 6000 ada generation": "rtx6000ada",
    "rtx 3090": "rtx3090",
    "rtx 4090": "rtx4090",
    **dict.fromkeys(("amd instinct mi250x", "amd instinct mi250x/mi250", "mi250x"), "mi250x-gcd"),
    **dict.fromkeys(("amd instinct mi300x", "amd instinct mi300x oam"), "mi300x"),
    **dict.fromkeys(("amd instinct mi325x", "amd instinct mi325x oam"), "mi325x"),
    **dict.fromkeys(("hl-225", "intel gaudi 2", "gaudi 2"), "gaudi2"),
    **dict.fromkeys(("hl-325l", "hl-325", "intel gaudi 3", "gaudi 3"), "gaudi3"),
}
"""Presets by the names of nvidia-smi, in lower case, without NVIDIA, Tesla and GeForce, and by those of rocm-smi, torch
and hl-smi. Whole names: parts of them would take an L40S for an L4, a GH200 for an H200, and an A10G for an A10."""
WITHOUT_SERVER = ("mi250x-gcd", "gaudi2", "gaudi3")
"""Presets of devices whose usual servers are none of the shapes here."""


def short_name(name: str) -> str:
    """Return a GPU's name in lower case, without NVIDIA, Tesla and GeForce.

    >>> short_name("NVIDIA GeForce RTX 4090")
    'rtx 4090'
    """
    return re.sub(r"^(nvidia|tesla|geforce|\s)+", "", name.strip().lower())


def server_of(gpu: str) -> Server:
    """Return the usual server of a GPU, by its usual name or its preset's name, or its name in nvidia-smi.

    Raise UserError if there is none. Capitals make no difference.

    >>> server_of("H100").inside_link, server_of("a100-sxm-40").device
    ('nvlink4-h100', 'a100-sxm-40')
    >>> server_of("NVIDIA GeForce RTX 4090").device
    'rtx4090'
    >>> server_of("h100-pcie").inside, server_of("h100-pcie").inside_link
    ('pcie', 'pcie5x16')
    """
    asked, gpu = gpu, short_name(gpu)
    gpu = gpu if gpu in SERVERS else DETECTED.get(gpu, gpu)
    if gpu in SERVERS:
        return SERVERS[gpu]
    if gpu in WITHOUT_SERVER:
        raise UserError(
            f"--gpu {asked}: the links of its usual server are no shape that is known here; describe them in a cluster "
            f'file (scenarios/README.md), with device_types.a = "{gpu}"'
        )
    base = next((name for name in SERVERS if gpu.startswith(f"{name}-")), None)
    if base is None or gpu not in presets("devices"):
        variants = tuple(f"{name}-" for name in SERVERS)
        known = ", ".join([*SERVERS, *(each for each in presets("devices") if each.startswith(variants))])
        raise UserError(
            f"--gpu {asked}: no such GPU, or its server is not known (a cluster file describes any); allowed: {known}"
        )
    server = SERVERS[base]
    if "-pcie" in gpu:  # a card, not the board with NVLinks that the base's name stands for
        server = _pcie(gpu, server.devices, server.pcie_link, server.nic_link, server.nccl)
    return replace(server, device=gpu)
