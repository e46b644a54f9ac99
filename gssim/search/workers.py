"""Processes that simulate plans, one at a time each."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gssim.result import Result
from gssim.scenario import load_scenario
from gssim.shared import Shared
from gssim.simulate import simulate
from gssim.units import RunFailedError, UserError

Answer = Result | UserError | RunFailedError
"""What becomes of a plan: simulated, refused, or without an end (a deadlock is a fault of ours, not of the plan)."""


def simulated(file: Path, overrides: Sequence[str], shared: Shared) -> Answer:
    """Return what becomes of a scenario with overrides."""
    try:
        return simulate(load_scenario(file, overrides, shared=shared), shared=shared).result
    except (UserError, RunFailedError) as error:
        return error


class Workers:
    """So many processes, to which plans are handed as they become free."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.idle = list(connections)
        self.busy: dict[Connection, int] = {}

    def begin(self, number: int, override: str) -> None:
        """Hand a plan to a free process; `number`: what its answer goes by."""
        connection = self.idle.pop()
        connection.send(override)
        self.busy[connection] = number

    def ended(self) -> Iterator[tuple[int, Answer]]:
        """Give the answers that have come, after waiting for one."""
        for connection in wait(list(self.busy)):
            assert isinstance(connection, Connection)
            try:
                answer: Answer = connection.recv()
            except EOFError:
                raise RunFailedError("a process died, of too little memory perhaps: try fewer --jobs") from None
            self.idle.append(connection)
            yield self.busy.pop(connection), answer


@contextmanager
def searchers(jobs: int, file: Path, overrides: Sequence[str]) -> Iterator[Workers]:
    """Give so many processes that simulate a scenario with other plans; they end with the block, whatever they do."""
    context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
    connections, started = [], []
    for _ in range(jobs):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, file, tuple(overrides)), daemon=True)
        process.start()
        theirs.close()  # so that its end shows as the end of what comes
        connections.append(ours)
        started.append(process)
    try:
        yield Workers(connections)
    finally:
        for connection, process in zip(connections, started, strict=True):
            process.terminate()
            process.join()
            connection.close()


def _serve(connection: Connection, file: Path, overrides: Sequence[str]) -> None:
    """Answer for plans until the process is ended; the user's interrupt is for the one that hands them out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    shared = Shared()
    while True:
        try:
            override = connection.recv()
        except EOFError:
            return
        connection.send(simulated(file, [*overrides, override], shared))
