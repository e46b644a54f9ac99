"""Prerequisites of the lab on a machine, and removal of the remains of killed labs (`gsreal lab --clean`).

A lab holds a lock on a file that is named after its run; the kernel releases it when the process dies. So a lab whose
lock can be acquired is dead, and labs that are running are left alone.
"""

import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gsreal.compiled import compiler
from gsreal.lab.namespaces import FOLDER, can_create_namespaces
from gsreal.lab.network import PREFIX, Network
from gssim.errors import UserError
from gssim.execution.files import held_lock, release_lock

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
"""Debian's package of each program."""


def missing() -> str | None:
    """Return the prerequisites that this machine lacks, with how to install them, in one line; None if it has all."""
    if platform.system() != "Linux":
        return f"needs Linux (network namespaces), but this is {platform.system()}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces and shape their links: run it with sudo"
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            return f"needs the program {program}: apt-get install {package}"
    if not can_create_namespaces():
        return "root may not make network namespaces here (in a container: it needs CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    return None


def check_tools() -> None:
    """Raise UserError if this machine cannot run a lab."""
    lacks = missing()
    if lacks:
        raise UserError(f"lab: {lacks}")


def check_compiler(network: Network, shares: Sequence[float]) -> None:
    """Raise UserError if this lab needs a compiler, and there is none."""
    if compiler() is not None:
        return
    for needed, reason in (
        (any(share < 1 for share in shares), "to slow devices down (lab.cpu_share_ratio)"),
        (any(wire.is_delayed for wire in network.wires), "to delay links where the kernel has no netem"),
    ):
        if needed:
            raise UserError(f"lab: needs a C++ compiler {reason}: apt-get install g++")


LOCKS = Path("/run/gsreal-lab")


def run_of(namespace: str) -> str | None:
    """Return the id of the run to which a namespace belongs; None for one that is not the lab's.

    >>> run_of("gsreal-lab-1f2e3d-4"), run_of("gsreal-lab-"), run_of("mine")
    ('1f2e3d', None, None)
    """
    run_id, _, number = namespace.removeprefix(PREFIX).rpartition("-")
    return run_id if namespace.startswith(PREFIX) and run_id and number.isdigit() else None


def namespaces_of(run_id: str) -> list[str]:
    """Return the names of a run's existing namespaces."""
    return sorted(name for name in _names(FOLDER) if run_of(name) == run_id)


def runs() -> list[str]:
    """Return the ids of all runs that have left anything, or are alive."""
    locks = {Path(name).stem for name in _names(LOCKS)}
    return sorted(locks | {run for name in _names(FOLDER) if (run := run_of(name)) is not None})


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


@contextmanager
def claimed(run_id: str) -> Iterator[bool]:
    """Acquire a run's lock, which is released when the run ends; False if another process holds it."""
    path = LOCKS / f"{run_id}.lock"
    while True:
        LOCKS.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the last one that ended meanwhile took the folder away
            handle = held_lock(path)
            break
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        release_lock(path, handle)
        with suppress(OSError):
            LOCKS.rmdir()  # the last one


def take_down(run_id: str) -> list[str]:
    """Kill the processes in a run's namespaces and remove these; return their names."""
    namespaces = namespaces_of(run_id)
    for name in namespaces:
        said = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in said.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return namespaces


def clean() -> tuple[list[str], list[str]]:
    """Remove the remains of dead runs; return their ids, and those of the runs that are alive."""
    removed: list[str] = []
    alive: list[str] = []
    for run_id in runs():
        with claimed(run_id) as is_dead:
            if is_dead:
                take_down(run_id)
            (removed if is_dead else alive).append(run_id)
    return removed, alive
