"""Processes that end with the one that started them, however it ends."""

import ctypes
import platform
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when its parent dies, so that it does not outlive it; else do nothing."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
