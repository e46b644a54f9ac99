"""Signals that end a lab: its network is taken down first, and that is not interrupted."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Like the user's interrupt, these unwind the stack."""


class EndedError(SystemExit):
    """A signal asked this process to end; its exit code is the shell's for that signal."""


def _unwind(number: int, frame: FrameType | None) -> None:
    raise EndedError(128 + number)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let signals that end the process raise EndedError, so that contexts are left properly."""
    before = {number: signal.signal(number, _unwind) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore those signals and the user's interrupt meanwhile."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*ENDING, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Let those signals and the user's interrupt wait meanwhile.

    Raised in what Python calls around a fork, where it can but say that it ignores them, they would be lost.
    """
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda each, frame: noted.append(each)) for number in (*ENDING, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])
