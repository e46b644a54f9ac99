"""Signals that end a lab: its network is taken down first, and that is not interrupted."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gssim.ending import ENDING


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
