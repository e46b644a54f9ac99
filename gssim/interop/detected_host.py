"""This machine as a host: its GPUs by nvidia-smi, else its cores from /proc; its network cards from /sys."""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from gssim.errors import UserError, one_line
from gssim.interop.hosts import Host, card_link, of_smi_matrix
from gssim.interop.servers import DETECTED, WITHOUT_SERVER, short_name


def detected(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Host:
    """Return this machine as a host: its GPUs if nvidia-smi lists any, else its processor's cores."""
    kinds = list(dict.fromkeys(_smi("--query-gpu=name", "--format=csv,noheader").splitlines()))
    if kinds:
        if len(kinds) > 1:
            names = one_line(", ".join(kinds), 100)
            raise UserError(f"--detect: {names}: a host with GPUs of different kinds cannot be described")
        host = of_smi_matrix(_smi("topo", "-m"), file="nvidia-smi", gpu=_detected_gpu(kinds[0]))
    else:
        host = _processor(proc)
        if any(proc.glob("driver/nvidia/gpus/*")) or any(sys.glob("class/kfd/kfd/topology/nodes/*/mem_banks/*")):
            host.defaults.append("GPUs that nvidia-smi does not list, AMD's among them, are left out: cores alone")
    cards = [card for card in sorted(sys.glob("class/net/*")) if (card / "device").exists()]
    speeds = {}
    for card in cards:
        with suppress(OSError, ValueError):  # a card that is down has no speed
            speeds[card.name] = int((card / "speed").read_text())
    speeds = {name: speed for name, speed in speeds.items() if speed > 0}
    if speeds:
        name = max(speeds, key=lambda each: speeds[each])
        host.defaults.append(f"network card {name} of {speeds[name]} Mbit/s: used where hosts are joined")
        if host.nic_link is None:
            host.nics, host.nic_link = 1, card_link(name, speeds[name] / 1000)
            host.pcie_link = host.pcie_link or "pcie4x16"
    return host


def _detected_gpu(name: str) -> str:
    """Return the preset of a GPU by its name in nvidia-smi; raise UserError if there is none of just this GPU.

    >>> _detected_gpu("NVIDIA L40S"), _detected_gpu("Tesla V100-SXM2-16GB")
    ('l40s', 'v100-sxm2-16')
    """
    preset = DETECTED.get(short_name(name))
    if preset is None:
        known = ", ".join(dict.fromkeys(each for each in DETECTED.values() if each not in WITHOUT_SERVER))
        raise UserError(
            f"--detect: {one_line(name, 60)}: no such preset; save nvidia-smi's matrix "
            f"(`nvidia-smi topo -m > topo.txt`), and give it as FILE with --gpu of the nearest: {known}"
        )
    return preset


def _smi(*arguments: str) -> str:
    """Return the output of nvidia-smi, or an empty text if it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        ended = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


FLOP_PER_CYCLE = {"avx512f": 64, "avx2": 32, "asimd": 16}
"""fp32 operations of a core in a cycle by its widest vectors: two fused multiply-adds."""


def _processor(proc: Path) -> Host:
    """Return the cores of this machine as devices, with rates estimated from clock and vector width."""
    try:
        info = (proc / "cpuinfo").read_text(errors="replace")
        total = re.search(r"MemTotal:\s*([0-9]+) kB", (proc / "meminfo").read_text())
    except OSError as error:
        raise UserError(f"--detect: {error.filename}: cannot be read: {error.strerror}") from None
    model = re.search(r"model name\s*:\s*(.*)", info)
    cores = len(set(re.findall(r"physical id\s*:\s*(\d+)[\s\S]*?core id\s*:\s*(\d+)", info))) or os.cpu_count() or 1
    sockets = len(set(re.findall(r"physical id\s*:\s*(\d+)", info))) or 1
    clock = re.search(r"cpu MHz\s*:\s*([0-9.]+)", info)
    megahertz = float(clock[1]) if clock else 2500.0
    per_cycle = next((flop for flag, flop in FLOP_PER_CYCLE.items() if flag in info), 8)
    name = one_line(model[1].strip(), 60) if model else "processor"
    host = Host("core", cores, "cores", None, 0, None, None, "", f"/proc of this machine: {sockets} x {name}")
    host.inside_link = {
        "memory_bytes": int(total[1]) * 1024 // cores if total else 2**30,
        "fp32": megahertz * 1e6 * per_cycle,
        "bandwidth": 10e9,
    }
    host.defaults.append(f"rates of {name}: assumed from {megahertz:g} MHz; `gsreal calibrate` measures them")
    return host
