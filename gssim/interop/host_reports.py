"""Refusals of reports without the links of GPUs or hosts (Slurm's nodes, nvidia-smi -q, lstopo), by what they are."""

import re
from collections.abc import Iterator

from gssim.cluster import hosts_in
from gssim.errors import UserError, one_line
from gssim.interop.servers import OF_AMD

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
