"""Hosts from what was saved on them: NCCL's topology XML, and `nvidia-smi topo -m`; other reports are refused.

Rates are wire rates, as in the presets; `nccl` in the cluster file says which fraction of them is reached.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from gssim.cluster import hosts_in
from gssim.cluster.presets import expanded
from gssim.cluster.topology.builders import CUBE_MESH
from gssim.errors import UserError, one_line
from gssim.interop.reading import parsed_xml
from gssim.interop.servers import OF_AMD, SERVERS, Server, server_of
from gssim.units import parse_quantity

NVSWITCH, NVLINK_PEER = "0x068000", "0x03"
"""Classes of NVLinks' targets in NCCL's XML (tclass): NVSwitch; another GPU, by the first digits, as in
NCCL: 0x030200, or 0x030000 for cards that can drive a display (A40, RTX A6000, RTX 3090)."""
NVLINK_BYTES_PER_S = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9}
"""Rate of one NVLink's wire in each direction, by compute capability. Source: NVIDIA's data sheets (86: 112.5 GB/s in
both directions of the four links between two RTX 3090 or A40, GA102's whitepaper)."""
NVLINK_PRESETS = {
    (70, 6): "nvlink2-v100",
    (80, 12): "nvlink3-a100",
    (90, 18): "nvlink4-h100",
    (100, 18): "nvlink5-b200",
}
GPU_OF_CAPABILITY = {70: "v100", 80: "a100", 90: "h100", 100: "b200"}
"""GPU of each compute capability that only one of the presets has; other GPUs must be named."""
CAPABILITY_OF_CARD = {"rtx3090": 86, "a40": 86, "rtxa6000": 86}
"""Compute capability of cards that are not in `GPU_OF_CAPABILITY`, and that NVLinks can join in pairs."""
CARDS_WITHOUT_NVLINKS = ("t4", "a10", "l4", "l40s", "rtx4090", "rtx6000ada")
"""Source: NVIDIA's data sheets, which list PCIe as their only interconnect."""
CAPABILITIES = {
    "v100": 70,
    "t4": 75,
    "a100": 80,
    **CAPABILITY_OF_CARD,
    "a10": 86,
    **dict.fromkeys(("l4", "l40s", "rtx4090", "rtx6000ada"), 89),
    **dict.fromkeys(("h100", "h200", "h20"), 90),
    **dict.fromkeys(("b200", "gb200"), 100),
}
"""Compute capability of NVIDIA's GPUs, whose presets begin with these names. Source: NVIDIA, CUDA GPUs."""
NCCL_OF_CAPABILITY = {
    70: "volta",
    75: "volta",
    80: "ampere",
    86: "ampere",
    89: "ampere",
    90: "hopper",
    100: "blackwell",
}
PCIE_PRESETS = {(8.0, 16): "pcie3x16", (8.0, 8): "pcie3x8", (16.0, 16): "pcie4x16", (32.0, 16): "pcie5x16"}
PCIE_LANE_BYTES_PER_S = {2.5: 0.1875e9, 5.0: 0.375e9, 8.0: 0.75e9, 16.0: 1.5e9, 32.0: 3e9, 64.0: 6e9}
"""Usable rate of a lane by its GT/s. Source: NCCL, topo.h (12 GB/s for 16 lanes of 8 GT/s, and in proportion)."""
INFINIBAND = {100: "ib-edr-100", 200: "ib-hdr-200", 400: "ib-ndr-400"}
EFA_GBIT, EFA_BYTES_PER_S = 400, 37e9
"""Wire rate of the network cards of the preset efa-400x8 in Gbit/s, and the bytes/s that they reach."""
ETHERNET = {1: "tcp-1g", 10: "tcp-10g", 25: "tcp-25g", 100: "tcp-100g"}
"""Presets of network cards by Gbit/s."""

BETWEEN_PROCESSORS = (
    "paths over PCIe: one switch for all GPUs of a host, also between processors, whose link may be slower"
)
"""What is assumed of a host whose GPUs without NVLinks hang at several processors."""
CARDS_ASSUMED = "nic_link = "
"""Beginning of the note on network cards that were assumed."""
CARD_COUNT_ASSUMED = "nics = "
"""Beginning of the notes on their number."""


def assumed_cards(nic_link: object, gpu: str) -> str:
    """Return the note on network cards that are those of a GPU's usual server."""
    return f"{CARDS_ASSUMED}{nic_link}: of the usual server of {gpu}; --nic names another"


HIDDEN_WIDTH = "link_width = 0: a virtual machine hides it; taken as 16 lanes, as NCCL does"

MOST_GPUS = 256
"""Largest number of GPUs in a matrix."""

Rate = str | dict[str, Any]
"""A link's preset, or its table."""


@dataclass
class Host:
    """The devices of one host, and how they are linked."""

    device: str
    """Preset of its devices."""
    devices: int
    inside: str
    """How the devices are linked: nvswitch, pcie, cube-mesh, none, or links (those in `pairs`)."""
    inside_link: Rate | None
    nics: int
    nic_link: Rate | None
    pcie_link: Rate | None
    nccl: str
    source: str
    pairs: list[tuple[int, int, Rate]] = field(default_factory=list)
    """Links between two devices, if no shape of cluster files describes them."""
    defaults: list[str] = field(default_factory=list)
    """Notes on what was assumed."""


def of_server(server: Server) -> Host:
    """Return the usual server of a GPU as a host."""
    return Host(
        server.device,
        server.devices,
        server.inside,
        server.inside_link,
        server.nics,
        server.nic_link,
        server.pcie_link,
        server.nccl,
        server.source,
        defaults=list(server.notes),
    )


def first_devices(host: Host, count: int | None) -> Host:
    """Return a host with only its first `count` devices in use (None: all); raise UserError if it has fewer.

    A part of a cube mesh is described as joined by a switch, at the rate of the links that its first device has to the
    others. Network cards are reduced to as many as the devices share evenly.
    """
    if count is None:
        return host
    if not 1 <= count <= host.devices:
        raise UserError(f"--devices {count}: must be from 1 to {host.devices}, as many as the host has ({host.source})")
    if count == host.devices or host.inside == "cores":
        return replace(host, devices=count)
    inside, pairs = host.inside, [pair for pair in host.pairs if pair[1] < count]
    inside_link = host.inside_link
    if count == 1:
        inside = "none"
    elif inside == "cube-mesh":
        inside = "nvswitch"
        inside_link = _nvlink(70, sum(links for (a, b), links in CUBE_MESH.items() if a == 0 and b < count))
    elif inside == "links" and not pairs:
        inside = "pcie"
    elif inside_link in MESHES:
        others, links = (
            host.devices - 1,
            parse_quantity(expanded("links", inside_link)["bandwidth_bytes_per_s"], "bytes/s"),
        )
        inside_link = {
            "preset": inside_link,
            "bandwidth_bytes_per_s": links * (count - 1) / others,
            "source": f"links to {count - 1} of {others} others",
        }
    nics = next((cards for cards in range(host.nics, 0, -1) if count % cards == 0), 0)
    return replace(host, devices=count, inside=inside, inside_link=inside_link, pairs=pairs, nics=nics)


MESHES = ("xgmi-mi300x",)
"""Links to all others of a host together: a part of the host has only its part of them."""


def of_nccl_xml(text: str, *, file: str, gpu: str | None) -> Host:
    """Return the host in a topology that NCCL has dumped; `gpu` names its GPUs if their capability does not."""
    if (systems := len(re.findall(r"<system[ >]", text))) > 1:
        raise UserError(f"{file}: holds topologies of {systems} hosts; give each a file of its own")
    root = parsed_xml(text, file=file)
    if root.tag != "system":
        raise UserError(f"{file}: <{one_line(root.tag, 40)}>: is no topology of NCCL; allowed: <system>")
    gpus = [(pci, each) for pci in root.iter("pci") for each in pci.findall("gpu")]
    if not gpus:
        raise UserError(
            f"{file}: has no <gpu>; a file that a cloud ships for NCCL_TOPO_FILE has none: NCCL_TOPO_DUMP_FILE is "
            "written by rank 0 of a group with this host's GPUs"
        )
    of_rccl = next((each for _, each in gpus if each.get("gcn") is not None), None)
    if of_rccl is not None:  # whose sm is no compute capability
        raise UserError(
            f"{file}: <gpu> gcn = '{one_line(of_rccl.get('gcn', ''), 20)}': RCCL's topology is not read; {OF_AMD}"
        )
    busids = [pci.get("busid", "").lower() for pci, _ in gpus]
    capabilities = {_int(each, "sm", file) for _, each in gpus}
    if len(capabilities) > 1:
        raise UserError(f"{file}: sm = {sorted(capabilities)}: a host with GPUs of different kinds cannot be imported")
    capability = capabilities.pop()
    device, defaults = _gpu_of(capability, gpu, file)
    host = Host(device, len(gpus), "pcie", None, 0, None, None, "", f"NCCL's topology file {Path(file).name}")
    host.defaults = defaults
    host.nccl = NCCL_OF_CAPABILITY.get(capability, "ampere")
    host.pcie_link = _pcie(gpus[0][0], file)
    if gpus[0][0].get("link_width") == "0":
        host.defaults.append(HIDDEN_WIDTH)
    _nvlinks(host, [each for _, each in gpus], busids, capability, file)
    if host.inside == "pcie":
        host.inside_link = host.pcie_link
    if host.inside in ("pcie", "links") and sum(1 for cpu in root.iter("cpu") if cpu.find(".//gpu") is not None) > 1:
        host.defaults.append(BETWEEN_PROCESSORS)
    _cards(host, _nets(root), file)
    return host


def _nets(root: Element) -> list[Element]:
    """Return the network cards. A card without a PCIe address is listed below each processor; it counts once."""
    nets = [net for pci in root.iter("pci") for net in pci.findall("nic/net")]
    listed = set()
    for cpu in root.iter("cpu"):
        for net in cpu.findall("nic/net"):
            card = (cpu.get("host_hash"), net.get("name"), net.get("dev"))
            nets += [net] if card not in listed else []
            listed.add(card)
    return nets


def _gpu_of(capability: int, gpu: str | None, file: str) -> tuple[str, list[str]]:
    """Return the device that is named, or that alone has the file's capability, and what is assumed of it."""
    if gpu is not None:
        device = server_of(gpu).device
        others = [name for name, each in CAPABILITIES.items() if each == capability]
        if others and device.partition("-")[0] not in others:
            of_others = "NVLinks and constants of NCCL are as the file's GPUs have them"
            return device, [f"device = {device}: named, but sm = {capability} is of {', '.join(others)}: {of_others}"]
        return device, []
    if capability not in GPU_OF_CAPABILITY:
        why = "several GPUs have it" if capability in NCCL_OF_CAPABILITY else "no preset has it"
        ask = "yours" if capability in NCCL_OF_CAPABILITY else "the nearest"
        raise UserError(f"{file}: sm = {capability}: {why}; name {ask} by --gpu ({', '.join(SERVERS)})")
    device = SERVERS[GPU_OF_CAPABILITY[capability]].device
    return device, [f"device = {device}: the usual GPU of sm = {capability}; --gpu names another"]


def _int(element: Element, key: str, file: str) -> int:
    value = element.get(key, "")
    if not re.fullmatch(r"-?[0-9]{1,12}", value):
        raise UserError(f"{file}: <{element.tag}> {key} = '{one_line(value, 40)}': must be a whole number")
    return int(value)


def _pcie(pci: Element, file: str) -> Rate:
    """Return the link of a device from its PCIe speed and width."""
    speed, lanes = pci.get("link_speed", ""), _int(pci, "link_width", file) or 16
    match = re.match(r"^([0-9.]{1,6})\s*GT/s", speed)
    giga = float(match[1]) if match and match[1].count(".") < 2 and match[1] != "." else 0.0
    if giga not in PCIE_LANE_BYTES_PER_S or lanes not in (1, 2, 4, 8, 16, 32):
        link = f"link_speed = '{one_line(speed, 30)}', link_width = {lanes}"
        raise UserError(f"{file}: <pci> {link}: is no PCIe link; a virtual machine may hide it: write it into the file")
    if (giga, lanes) in PCIE_PRESETS:
        return PCIE_PRESETS[giga, lanes]
    rate = PCIE_LANE_BYTES_PER_S[giga] * lanes
    return {"preset": "pcie4x16", "bandwidth_bytes_per_s": rate, "source": f"NCCL, topo.h: {giga} GT/s, {lanes} lanes"}


def _nvlink(capability: int, count: int) -> Rate:
    if (capability, count) in NVLINK_PRESETS:
        return NVLINK_PRESETS[capability, count]
    generation = max((each for each in NVLINK_BYTES_PER_S if each <= capability), default=60)
    rate = count * NVLINK_BYTES_PER_S[generation]
    return {"preset": "nvlink3-a100", "bandwidth_bytes_per_s": rate, "source": f"{count} NVLinks of sm {capability}"}


def _nvlinks(host: Host, gpus: Sequence[Element], busids: Sequence[str], capability: int, file: str) -> None:
    """Fill in how NVLinks join the GPUs: through switches, as the mesh of a DGX-1V, or pair by pair."""
    to_switch = []
    pairs: dict[tuple[int, int], int] = {}
    for index, gpu in enumerate(gpus):
        links = gpu.findall("nvlink")
        to_switch.append(sum(_int(link, "count", file) for link in links if link.get("tclass") == NVSWITCH))
        for link in links:
            target = link.get("target", "").lower()
            if link.get("tclass", "").startswith(NVLINK_PEER) and target in busids and busids.index(target) != index:
                other = busids.index(target)
                pairs[min(index, other), max(index, other)] = _int(link, "count", file)
    if any(to_switch) and len(gpus) > 1:
        if len(set(to_switch)) > 1 or not 1 <= to_switch[0] <= 64:
            raise UserError(f"{file}: NVLinks to switches = {to_switch}: must be equally many of each GPU, at most 64")
        host.inside, host.inside_link = "nvswitch", _nvlink(capability, to_switch[0])
    elif pairs:
        _joined_by_pairs(host, pairs, lambda count: _nvlink(capability, count))


def _joined_by_pairs(host: Host, pairs: dict[tuple[int, int], int], rate: Any) -> None:
    """Fill in NVLinks between pairs of GPUs: a shape that the cluster file knows, or each link."""
    if pairs == CUBE_MESH:
        host.inside, host.inside_link = "cube-mesh", rate(6)
        host.defaults = [each for each in host.defaults if each != BETWEEN_PROCESSORS]
        return
    host.inside = "links"
    host.pairs = [(a, b, rate(count)) for (a, b), count in sorted(pairs.items())]


def _cards(host: Host, nets: Sequence[Element], file: str) -> None:
    """Fill in the network cards that are as fast as the fastest one; slower cards are for storage or control."""
    speeds = [(net.get("name", ""), _int(net, "speed", file)) for net in nets]
    fastest = max((speed for _, speed in speeds), default=0)
    cards = [(name, speed) for name, speed in speeds if speed == fastest]
    if fastest <= 0:
        host.nics, host.nic_link = 0, None
        host.pcie_link = None if host.inside != "none" else host.pcie_link
        return
    count, together = min(len(cards), host.devices), max(1, len(cards) // host.devices)
    while count > 1 and host.devices % count:
        count -= 1
    if count * together < len(speeds):
        host.defaults.append(
            f"{CARD_COUNT_ASSUMED}{count}: of {len(speeds)} cards, those of {fastest} Mbit/s that the GPUs share evenly"
        )
    if together > 1:  # ports of a card, or cards of virtual machines: NCCL uses all that are near a GPU
        host.defaults.append(
            f"{CARD_COUNT_ASSUMED}{count}: each {together} cards of {fastest} Mbit/s, which are a GPU's, as one"
        )
    if any(net.get("latency", "").strip("0.") for net in nets):  # as EFA's plugin tells NCCL's choice of algorithms
        host.defaults.append("latency of network cards: as in the preset, not as in the file")
    name = cards[0][0]
    guids = [net.get("guid", "") for net in nets if net.get("name") == name]
    # a card that is named like InfiniBand's and has no guid is used by sockets
    sockets = name.startswith(INFINIBAND_NAMES) and any(re.fullmatch("0x0*|0", guid) for guid in guids)
    if sockets:
        host.defaults.append(OVER_SOCKETS.format(name=one_line(name, 40)))
    host.nics = count
    host.nic_link = card_link(name, together * fastest / 1000, sockets=sockets)


INFINIBAND_NAMES = ("mlx", "ib", "rocep", "bnxt")
OVER_SOCKETS = (
    "network card {name}: sockets over InfiniBand (IPoIB), as its guid is 0: at the rate of TCP, not of the card; a "
    "dump under NCCL_IB_DISABLE=0 names the card itself, such as mlx5_0"
)


def card_link(name: str, gbit: float, *, sockets: bool = False) -> Rate:
    """Return the link of a network card by its name and rate in Gbit/s.

    `sockets`: TCP goes over it, whatever its name: the fastest preset of TCP that is not faster than the card.

    >>> card_link("mlx5_0", 400), card_link("eth0", 10), card_link("ib0", 200, sockets=True)
    ('ib-ndr-400', 'tcp-10g', 'tcp-100g')
    >>> card_link("rdmap82s0", 400)
    'efa-400x8'
    """
    if name.startswith(("rdmap", "efa")):
        if gbit == EFA_GBIT:
            return "efa-400x8"
        source = f"{name}: {gbit:g} Gbit/s; assumed: same ratio reached as efa-400x8"
        rate = EFA_BYTES_PER_S * gbit / EFA_GBIT
        return {"preset": "efa-400x8", "bandwidth_bytes_per_s": rate, "source": one_line(source, 80)}
    if sockets:
        return ETHERNET[max((rate for rate in ETHERNET if rate <= gbit), default=1)]
    infiniband = name.startswith(INFINIBAND_NAMES)
    table = INFINIBAND if infiniband else ETHERNET
    if gbit in table:
        return table[int(gbit)]
    source = f"{name}: {gbit:g} Gbit/s; latency as in the preset"
    preset = "ib-hdr-200" if infiniband else "tcp-25g"
    return {"preset": preset, "bandwidth_bytes_per_s": gbit * 1e9 / 8, "source": one_line(source, 80)}


HOST_PREFIX = re.compile(r"([A-Za-z][\w.-]*): ?(.*)")
"""A line of a host as pdsh and clush print it."""


def matrices_in(text: str) -> list[str]:
    r"""Return the matrices of `nvidia-smi topo -m` in a text of one or more hosts, one after another or line by line.

    >>> matrices_in("a: \tGPU0\nb: \tGPU0\na: GPU0\tX\nb: GPU0\tX\n")
    ['\tGPU0\nGPU0\tX', '\tGPU0\nGPU0\tX']
    """
    by_host: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = HOST_PREFIX.fullmatch(line)
        name, rest = match.groups() if match and re.search(r"GPU\d", match[2]) else ("", line)
        by_host.setdefault(name, []).append(rest)
    if len(by_host) > 1:  # lines without a host are headings
        by_host.pop("", None)
    matrices: list[str] = []
    for lines in by_host.values():
        heads = [i for i, line in enumerate(lines) if "GPU0" in line.split() and "X" not in line.split()]
        ends = [*heads[1:], len(lines)]
        matrices += ["\n".join(lines[start:end]) for start, end in zip(heads, ends, strict=True)] if heads else []
    return matrices or [text]


def of_smi_matrix(text: str, *, file: str, gpu: str | None) -> Host:
    """Return the host in the output of `nvidia-smi topo -m`. Rates are those of the GPU's usual server."""
    plain = re.sub(r"\x1b?\[[0-9;]*m", "", text)  # pasted text often lacks the escape of what underlines the header
    lines = [line.split("\t") if "\t" in line else line.split() for line in plain.splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines]
    header = next((line for line in cells if "GPU0" in line and "X" not in line), None)
    if header is None:
        raise UserError(f"{file}: has no GPU0; allowed: the output of `nvidia-smi topo -m`")
    if gpu is None:
        raise UserError(f"{file}: does not name its GPUs; say --gpu, in turn for each ({', '.join(SERVERS)})")
    columns = [cell for cell in header if cell]
    names = columns[: next((i for i, cell in enumerate(columns) if cell.startswith("CPU")), len(columns))]
    gpus = [name for name in names if re.fullmatch("GPU[0-9]+", name)]  # others are cards: NIC0, or mlx5_bond_0
    rows: dict[str, list[str]] = {}
    for line in cells:
        filled = [cell for cell in line if cell]
        if filled and filled[0] in gpus and len(filled) > len(names):
            rows[filled[0]] = filled[1:]
    if list(rows) != gpus or len(gpus) > MOST_GPUS:
        raise UserError(f"{file}: the matrix lacks a row of its {len(gpus)} GPUs, or has more than {MOST_GPUS}")
    server = of_server(server_of(gpu))
    server.devices, server.source = len(gpus), f"`nvidia-smi topo -m` in {Path(file).name}; rates: {server.source}"
    _join_gpus(server, rows, names, server_of(gpu), file=file)
    cards = len(names) - len(gpus)
    server.nics = next((count for count in range(min(cards, len(gpus)), 0, -1) if len(gpus) % count == 0), 0)
    if not server.nics:
        server.nic_link = server.pcie_link = None
    server.defaults.append(f"rates: of the usual server of {gpu}, as the matrix has none")
    if server.nics < cards:
        server.defaults.append(f"{CARD_COUNT_ASSUMED}{server.nics}: of {cards} cards, as many as the GPUs share evenly")
    if server.nics:
        server.defaults.append(assumed_cards(server.nic_link, gpu))
    return server


def _join_gpus(
    host: Host, rows: Mapping[str, Sequence[str]], names: Sequence[str], server: Server, *, file: str
) -> None:
    """Set how GPUs are joined inside a host, from the matrix's cells (`NV4` means four NVLinks)."""
    gpus = list(rows)
    links: dict[tuple[int, int], int] = {}
    for a, b in combinations(range(len(gpus)), 2):
        cell = rows[gpus[a]][names.index(gpus[b])]
        if rows[gpus[b]][names.index(gpus[a])] != cell:
            raise UserError(f"{file}: GPU{a} and GPU{b}: the matrix is not symmetric")
        if match := re.fullmatch(r"NV([1-9][0-9]?)", cell):
            links[a, b] = int(match[1])
        elif cell not in ("PIX", "PXB", "PHB", "NODE", "SYS"):
            raise UserError(f"{file}: GPU{a} and GPU{b}: {one_line(cell, 20)!r}: no such connection")
        elif cell == "SYS" and BETWEEN_PROCESSORS not in host.defaults:
            host.defaults.append(BETWEEN_PROCESSORS)
    all_joined = len(links) == len(gpus) * (len(gpus) - 1) // 2
    if not links:
        host.inside, host.inside_link = ("pcie", server.pcie_link) if len(gpus) > 1 else ("none", None)
        return
    if server.device in CARDS_WITHOUT_NVLINKS:
        (a, b), count = next(iter(links.items()))
        raise UserError(
            f"{file}: GPU{a} and GPU{b}: NV{count}, but --gpu {server.device} is a card without NVLinks; name the "
            "GPU of this host"
        )
    capability = next((sm for sm, name in GPU_OF_CAPABILITY.items() if server.device.startswith(name)), 80)
    capability = CAPABILITY_OF_CARD.get(server.device, capability)
    if all_joined and len(set(links.values())) == 1 and len(gpus) > 2:
        capability, usual = next(
            (key for key, name in NVLINK_PRESETS.items() if name == host.inside_link), (capability, 0)
        )
        host.inside, count = "nvswitch", links[0, 1]
        if count * (len(gpus) - 1) != usual:  # else all links of a usual GPU go to the others, with no switch between
            host.inside_link = _nvlink(capability, count)
    else:
        host.inside_link = server.pcie_link  # of pairs without NVLinks; those of the usual server may be NVLinks
        _joined_by_pairs(host, links, lambda count: _nvlink(capability, count))


MATRIX = "give the output of `nvidia-smi topo -m`, or the XML that NCCL_TOPO_DUMP_FILE names"
BY_HAND = "these devices' links are not known here: describe them in a cluster file (scenarios/README.md)"
REPORTS = {
    r"==+NVSMI LOG==|<nvidia_smi_log|^\| NVIDIA-SMI |^GPU \d+: .*UUID: GPU-": (
        "nvidia-smi's list of GPUs, without their links",
        MATRIX,
    ),
    r"<!DOCTYPE topology|<topology[ >]": ("hwloc's topology (lstopo), without NVLinks", MATRIX),
    r"controller: .*(NVIDIA|Mellanox)": ("lspci's list, without links between GPUs", MATRIX),
    r"ROCm System Management Interface|End of ROCm SMI|amd-smi": ("a report of rocm-smi or amd-smi", OF_AMD),
    r"HL-SMI Version|habanalabs": ("a report of hl-smi", BY_HAND),
    r"npu-smi ": ("a report of npu-smi", BY_HAND),
    r"^CA '": ("ibstat's list of a host's cards", "name them by --nic, such as ib-hdr-200, and their number by --nics"),
    r"^(vendid|switchguid)=": (
        "ibnetdiscover's list",
        "make a topology.conf of it (topograph, or slurmibtopology), and give that",
    ),
    r"^#\s+size\s+count\s+type": (
        "a log of nccl-tests, without hosts and links",
        "give it by --nccl-tests, beside a host's file or --gpu",
    ),
    r"^PARTITION +AVAIL": ("sinfo's list, without switches", "give topology.conf, or --gpu, --devices and --hosts"),
}
"""(what it is, what to give instead) of the output of other commands, by a pattern that it matches."""
MATRIX_ROW = r"(?m)^\W*GPU0\s+X\s"
NODES = r"(?im)^\s*NodeName="
GPUS = re.compile(r"(?i)Gres=gpu:(?:([a-z][\w.-]*):)?(\d+)(?![\w.])|Name=gpu(?: +Type=(\S+))? +File=\S*\[0-(\d+)\]")


def refuse_other_reports(text: str, *, file: str) -> None:
    """Raise UserError for a report that does not say how GPUs or hosts are linked."""
    if re.search(MATRIX_ROW, text):  # other output of nvidia-smi may stand beside it
        return
    for pattern, (what, instead) in REPORTS.items():
        if re.search(pattern, text, re.MULTILINE):
            raise UserError(f"{file}: {what}; {instead}")
    if re.search(NODES, text) and not re.search(r"(?i)(Switch|Block)Name=", text):
        options = " ".join(_options(text, file)) or "--gpu a100 --devices 4 --hosts 2"
        raise UserError(f"{file}: Slurm's nodes, without links; give topology.conf, or leave the file out: {options}")
    if re.search(r'"gres": *"|"GPUsPerNode"', text) and '"nodes"' in text:
        raise UserError(f"{file}: Slurm's nodes, without links; give topology.conf, or --gpu, --devices and --hosts")


def _options(text: str, file: str) -> Iterator[str]:
    """Yield the options that describe equal hosts of Slurm's `NodeName` entries; none where they are of several kinds.

    >>> list(_options("NodeName=n[1-3] Gres=gpu:a100:4(S:0-1)", "slurm.conf"))
    ['--gpu a100', '--devices 4', '--hosts 3']
    """
    kinds, count = set(), 0
    for entry in re.split(NODES, text)[1:]:
        if (gpus := GPUS.search(entry)) is None or entry.upper().startswith("DEFAULT"):
            continue
        name, number, typed, last = gpus.groups()
        kinds.add((name or typed or "GPU", int(number) if number else int(last) + 1))
        count += len(hosts_in(entry.split()[0], file=file))
    if len(kinds) == 1:
        gpu, devices = kinds.pop()
        yield f"--gpu {one_line(gpu, 40)}"
        yield f"--devices {devices}"
        yield f"--hosts {count}"
