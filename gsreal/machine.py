"""What this machine is: the device a rank really runs on, its name, and the process settings of a real run.

[Note: gloo's loops] Each process group of gloo has a thread that reads and writes its sockets. It tries the lock of a
connection and, where another thread has it, asks the kernel again at once, for the socket is still ready (gloo,
tcp/pair.cc, handleEvents). A message that arrives while the main thread sends wakes it, on the same core where no
other is free: there it asks in vain, and keeps the core from the thread that would let go of the lock, until the
scheduler's next tick. Of exchanges of a megabyte between two ranks on two cores, up to four in ten took 4 ms (of which
the loop asked for 3.6, by the kernel's count), the others 0.3. As SCHED_BATCH, which any process may choose, a loop
that is woken takes the core from nobody: 0.2 to 0.6 ms, and FSDP2's step without resharding on two cores 113 ms instead
of 137. In the lab, whose ranks pause many times a tick and whose links are slower, it is left as it is.
"""

import ctypes
import os
import platform
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gsreal.lab.throttle import own_place, take
from gssim.cluster import Cluster
from gssim.units import UserError

PR_SET_PDEATHSIG = 1  # linux/prctl.h

ENVIRONMENT = {
    # one thread a rank: threads would compete for the rank's core
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # keep freed blocks: fresh ones are page-faulted in on every use (measured)
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
"""Of every process that is timed, in calibration and in runs alike."""


def processor_name() -> str:
    """Return the CPU's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of the device type that a rank really uses, as cluster files call it."""
    place = own_place()
    if place is not None:
        return place.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor_name()} core"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def check_machine(cluster: Cluster, ranks: int, *, where: str) -> None:
    """Raise UserError where this machine cannot run the cluster's ranks."""
    kinds = {cluster.type_of(rank).kind for rank in range(ranks)}
    if kinds == {"cuda"} and not torch.cuda.is_available():
        raise UserError(f"{where}: cluster: its devices are GPUs, but this machine has none; use --set cluster=FILE")
    if kinds not in ({"cuda"}, {"cpu"}):
        raise UserError(f"{where}: cluster: ranks on {', '.join(sorted(kinds))} cannot run together here")
    if cluster.backend == "nccl" and ranks > (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise UserError(f"{where}: cluster.backend = 'nccl': {ranks} ranks need a GPU each; gloo can share one")


@dataclass(frozen=True)
class Freedom:
    """Where a thread may run, and before which others."""

    cores: frozenset[int]
    niceness: int

    @classmethod
    def now(cls) -> "Freedom":
        """Return the calling thread's."""
        return cls(frozenset(usable_cores()), os.getpriority(os.PRIO_PROCESS, 0))

    def take(self) -> None:
        """Give it to the calling thread, as far as this process may."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)


_unsettled: list[Freedom] = []
"""What this rank's main thread had before it was settled."""


@contextmanager
def unsettled() -> Iterator[None]:
    """Start threads inside as if this one were not pinned: a process group's, for they have what their maker has.

    Pinned beside a busy main thread, they wait for the scheduler, and each message takes milliseconds.
    """
    mine = Freedom.now()
    for before in _unsettled:
        before.take()
    try:
        yield
    finally:
        mine.take()
    if _unsettled:
        _let_loops_wait()


LOOP = "gloo_tcp_loop"


def _let_loops_wait() -> None:
    """Let gloo's loops take the core from no thread that computes or sends; see [Note: gloo's loops]."""
    if own_place() is not None:
        return
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended, or a kernel that does not let us
            if name.read_text(encoding="utf-8").strip() == LOOP:
                os.sched_setscheduler(int(name.parent.name), os.SCHED_BATCH, os.sched_param(0))


def settle(cluster: Cluster, local_rank: int) -> torch.device:
    """Pin this rank's main thread and return its device; the rank dies with its launcher.

    To be called after the process group is made: gloo's own threads then stay free to run on any core. Groups that are
    made later are made `unsettled`.
    """
    _unsettled[:] = [Freedom.now()]
    _let_loops_wait()
    die_with_parent()
    torch.set_num_threads(1)
    place = own_place()
    if place is not None:
        take(place)
        return torch.device("cpu")
    cores, each = usable_cores(), cluster.cores_per_rank
    if each and (local_rank + 1) * each <= len(cores):
        os.sched_setaffinity(0, set(cores[local_rank * each : (local_rank + 1) * each]))
    if cluster.type_of(0).kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that no rank outlives its launcher."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def provenance(device: torch.device) -> dict[str, Any]:
    """Return versions, hardware and date of a measurement."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": len(usable_cores()),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found
