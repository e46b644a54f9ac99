"""This machine as a rank sees it: devices and their names, thread pinning, process settings, and provenance.

[Note: gloo's threads] Each process group of gloo has a loop, a thread that reads and writes its sockets, and workers
that carry out collectives. The loop tries the lock of a connection and, if another thread has it, polls the kernel
again immediately, for the socket is still ready (gloo, tcp/pair.cc, handleEvents). A message that arrives while another
thread sends wakes the loop, often on that thread's core. There it fails to get the lock, and until the scheduler's next
tick keeps the core from the thread that would release it. Under the policy SCHED_BATCH, which any process may choose, a
woken loop preempts nobody. Threads that may run on any core are also woken on a core where another rank computes, and
wait there for a tick while their own core is idle; so they stay on their rank's cores.

Measured between two ranks on two cores, as means of an exchange of 1.2 MB. The three figures are for threads as by
default, for loops that preempt nobody, and for such threads on their rank's core. Rings: 0.4 to 3.8 ms (of which loops
asked for a lock for up to 3.7), 0.3 to 2.4, 0.25 to 0.6. All-reduces whose ranks arrive apart: 2.3 to 4.5, 0.9 to 3.4,
0.45 to 0.6. A step of tensor parallelism: 156, 144, 132. In the lab, where ranks pause many times a tick and links are
slower, the first of the two changed no step by more than noise: the defaults are left there.
"""

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gsreal.lab.throttle import own_place, take
from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.execution import SHOWN, package_digest
from gssim.execution.parent import die_with_parent

MATRIX_SIDE = 1024
"""Size of the square matrices by whose product a CPU's arithmetic is measured."""

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
"""Environment of every process that is timed, in calibration and in runs alike."""


def processor_name() -> str:
    """Return the CPU's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of the device type that a rank really uses, as in cluster files."""
    place = own_place()
    if place is not None:
        return place.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor_name()} core"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def check_machine(cluster: Cluster, ranks: int, *, where: str) -> None:
    """Raise UserError if this machine cannot run the cluster's ranks; under torchrun, those of them that it started."""
    kinds = {cluster.type_of(rank).kind for rank in range(ranks)}
    if kinds == {"cuda"} and not torch.cuda.is_available():
        raise UserError(f"{where}: cluster: its devices are GPUs, but this machine has none; use --set cluster=FILE")
    if kinds not in ({"cuda"}, {"cpu"}):
        raise UserError(f"{where}: cluster: ranks on {', '.join(sorted(kinds))} cannot run together here")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if cluster.backend == "nccl" and here > (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise UserError(f"{where}: cluster.backend = 'nccl': {here} ranks need a GPU each; gloo can share one")


@dataclass(frozen=True)
class ThreadPlacement:
    """Affinity and scheduling policy of a thread."""

    cores: frozenset[int]
    niceness: int

    @classmethod
    def now(cls) -> "ThreadPlacement":
        """Return the affinity and policy of the calling thread."""
        return cls(frozenset(usable_cores()), os.getpriority(os.PRIO_PROCESS, 0))

    def take(self) -> None:
        """Apply them to the calling thread, as far as this process may."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)


_before: list[ThreadPlacement] = []
"""Placement of this rank's main thread before it was pinned; empty in a process that is not pinned."""


@contextmanager
def group_threads() -> Iterator[None]:
    """Create process groups inside: their threads run on the same cores as those of a pinned rank's first group.

    These are the lab's free cores (gloo's threads stand for a network card), or else the rank's own.
    """
    in_lab, mine = own_place() is not None, ThreadPlacement.now()
    for before in _before if in_lab else ():
        before.take()
    try:
        yield
    finally:
        if in_lab:
            mine.take()
        elif _before:
            _settle_gloo()


LOOP, WORKER = "gloo_tcp_loop", "pt_gloo_runloop"
"""Names of gloo's threads."""


def _settle_gloo() -> None:
    """Keep gloo's threads on this thread's cores, and its loops from preempting others; see [Note: gloo's threads]."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended, or a kernel that does not let us
            thread, kind = int(name.parent.name), name.read_text(encoding="utf-8").strip()
            if kind in (LOOP, WORKER):
                os.sched_setaffinity(thread, usable_cores())
            if kind == LOOP:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def settle(cluster: Cluster, local_rank: int) -> torch.device:
    """Pin this rank's threads and return its device; the rank ends with its launcher.

    To be called after the process group is created: in the lab, gloo's own threads then stay free to run on any core.
    Later groups are created within `group_threads`.
    """
    _before[:] = [ThreadPlacement.now()]
    die_with_parent()
    torch.set_num_threads(1)
    place = own_place()
    if place is not None:
        take(place)
        return torch.device("cpu")
    cores, each = usable_cores(), cluster.cores_per_rank
    if each and (local_rank + 1) * each <= len(cores):
        os.sched_setaffinity(0, set(cores[local_rank * each : (local_rank + 1) * each]))
    _settle_gloo()
    if cluster.type_of(0).kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class CoreWait:
    """Time that the calling thread could run, but waited for a core, as Linux counts it."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._began = self._now()

    def ratio(self) -> float | None:
        """Return the waiting since the start as a fraction of the time passed; None where the kernel does not tell."""
        now = self._now()
        if now is None or self._began is None or now[1] <= self._began[1]:
            return None
        return (now[0] - self._began[0]) / (now[1] - self._began[1])

    @staticmethod
    def _now() -> tuple[float, float] | None:
        """Return (seconds waited, seconds of the clock)."""
        try:
            text = Path("/proc/thread-self/schedstat").read_text(encoding="ascii")
        except OSError:
            return None
        return int(text.split()[1]) / 1e9, time.monotonic()


def provenance(device: torch.device) -> dict[str, Any]:
    """Return versions, hardware and date of a measurement; `gsreal`: the digest of this package's code."""
    values = {
        "gsreal": package_digest("gsreal")[:SHOWN],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": len(usable_cores()),
    }
    if device.type == "cuda":
        values["gpu"] = torch.cuda.get_device_name(device)
        values["cuda"] = torch.version.cuda
    return values
