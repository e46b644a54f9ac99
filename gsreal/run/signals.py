"""Signals that end a run, while its processes are started and its network is taken down. Imports nothing of torch."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gssim.terminal import ENDING


@contextmanager
def signals_ignored(handler: Any = signal.SIG_IGN) -> Iterator[None]:
    """Ignore termination signals and the user's interrupt inside, or let another `handler` have them."""
    before = {number: signal.signal(number, handler) for number in (*ENDING, signal.SIGINT)}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer termination signals and the user's interrupt until the end of the context.

    Python reports and ignores exceptions in callbacks that it runs around a fork: interrupts raised there would be
    lost.
    """
    noted: list[int] = []
    try:
        with signals_ignored(lambda number, frame: noted.append(number)):
            yield
    finally:
        if noted:
            signal.raise_signal(noted[0])
