"""Worker processes of a search: each lowers and bounds one plan at a time, and simulates it if it may be a result."""

import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gssim.cache import Shared
from gssim.errors import RunFailedError, UserError
from gssim.planner.bounds import Bound, LoweredBounds
from gssim.planner.objectives import Limits, objective_of
from gssim.planner.reasons import full_ratio
from gssim.result import Result
from gssim.scenario import Loaded, load_scenario
from gssim.simulation import no_collection, simulate

Answer = Result | Bound | UserError | RunFailedError
"""Answer for a plan: simulated, ruled out by its bound, refused, or failed (a deadlock is a bug of the simulator, not
of the plan).
"""


COSTLY_TASKS = 5000
"""Number of tasks of all roles above which simulating a program takes much longer than lowering it."""


def answered(file: Path, overrides: Sequence[str], limits: Limits, shared: Shared) -> Answer:
    """Return the answer for a scenario with overrides."""
    try:
        return judged(load_scenario(file, overrides, shared=shared), limits, shared)
    except (UserError, RunFailedError) as error:
        return error


def judged(loaded: Loaded, limits: Limits, shared: Shared) -> Result | Bound:
    """Return the prediction of a scenario, or its bound: where that rules it out, or other plans should go first."""
    with no_collection():
        if LoweredBounds.apply_to(loaded):
            bounds = LoweredBounds(loaded, limits.objective, shared)
            bound = bounds.allocated()
            for closer in (bounds.met, bounds.reserved):
                if limits.rule_out(bound):
                    return bound
                bound = closer(bound)
            if limits.rule_out(bound) or (bounds.tasks > COSTLY_TASKS and bound.objective > limits.next_objective):
                return bound
        result = simulate(loaded, shared=shared, spread=False).result
        if loaded.statistics_needed:
            types = loaded.scenario.cluster.device_types
            full = full_ratio(result, {name: device.memory_bytes for name, device in types.items()})
            objective = objective_of(result, limits.objective)
            if not limits.rule_out(Bound(result.step_time_s, objective, full if result.fits else math.inf)):
                return simulate(loaded, shared=shared).result  # it may be shown, with the time of its lightest steps
        return result


class Workers:
    """A pool of processes, to which plans are submitted as they become free."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.idle = list(connections)
        self.busy: dict[Connection, int] = {}

    def submit(self, number: int, override: str, limits: Limits) -> None:
        """Submit a plan to a free process; `number`: identifies its answer."""
        connection = self.idle.pop()
        connection.send((override, limits))
        self.busy[connection] = number

    def completed(self) -> Iterator[tuple[int, Answer]]:
        """Wait for an answer, and yield all that have arrived."""
        for connection in wait(list(self.busy)):
            assert isinstance(connection, Connection)
            try:
                answer: Answer = connection.recv()
            except EOFError:
                raise RunFailedError("a process died, of too little memory perhaps: try fewer --jobs") from None
            self.idle.append(connection)
            yield self.busy.pop(connection), answer


@contextmanager
def searchers(jobs: int, file: Path, overrides: Sequence[str], shared: Shared | None = None) -> Iterator[Workers]:
    """Start worker processes for the other plans of a scenario; they end with the block in any case.

    `shared`: cache with which forked processes start.
    """
    forks = sys.platform == "linux"
    context: Any = get_context("fork" if forks else "spawn")
    known = shared if forks else None
    connections, started = [], []
    for _ in range(jobs):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, file, tuple(overrides), known), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process shows as EOF
        connections.append(ours)
        started.append(process)
    try:
        yield Workers(connections)
    finally:
        for connection, process in zip(connections, started, strict=True):
            process.terminate()
            process.join()
            connection.close()


def _serve(connection: Connection, file: Path, overrides: Sequence[str], known: Shared | None) -> None:
    """Answer requests until the process is terminated; interrupts are handled by the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    shared = known or Shared()
    while True:
        try:
            override, limits = connection.recv()
        except EOFError:
            return
        connection.send(answered(file, [*overrides, override], limits, shared))
