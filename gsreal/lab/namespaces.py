"""Work inside a network namespace without leaving this process.

And setup of a lab process before it executes its command.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000  # linux/sched.h
FOLDER = Path("/run/netns")
"""Folder in which `ip netns` keeps named namespaces."""

T = TypeVar("T")


def in_namespace(namespace: str, action: Callable[[], T]) -> T:
    """Return the result of `action`, called in a thread that has entered the namespace.

    Sockets belong to the namespace in which they are created, and a file in /proc/sys/net to that of the thread which
    opens it.
    """
    results: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            enter(FOLDER / namespace)
            results.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]


def enter(namespace: Path) -> None:
    """Let this thread enter a network namespace; raise OSError if it may not."""
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(namespace))
    finally:
        os.close(handle)


def can_create_namespaces() -> bool:
    """Return whether this process may create network namespaces: root in a container often may not."""
    allowed: list[bool] = []

    def work() -> None:
        allowed.append(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return allowed == [True]


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def prepare_process() -> None:
    """Make this process, the leader of a session, end with its parent and run at the highest priority.

    Other processes of the machine then disturb it less. If Linux schedules sessions as groups, a group has a priority
    of its own in addition to that of its processes.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        Path("/proc/self/autogroup").write_text("-20", encoding="ascii")
