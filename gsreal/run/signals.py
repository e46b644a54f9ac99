"""Signals that end a run, while its processes are started and its network is taken down. Imports nothing of torch."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gssim.terminal import ENDING


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore termination signals and the user's interrupt inside."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*ENDING, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer termination signals and the user's interrupt until the end of the context.

    Python reports and ignores exceptions in callbacks that it runs around a fork: interrupts raised there would be
    lost.
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
