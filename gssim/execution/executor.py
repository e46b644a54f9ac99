"""Who answers points: this process, several of them, or the workers of a Dask cluster."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, Protocol

from gssim.errors import RunFailedError, UserError

LOOK_S = 0.2
"""How long is waited for a chunk before it is seen whether the user has interrupted."""


class Workers(Protocol):
    """Those who answer."""

    in_chunks: bool
    """Whether it pays to hand out several points together."""

    @property
    def at_a_time(self) -> int:
        """Chunks of points that are handed out at most, under way and waiting: each shall have its next one there."""

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Hand out a chunk; return what stands for it."""

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Wait a little; return those that have ended by then."""

    def answer(self, chunk: Any) -> Any:
        """Return what was made of a chunk that has ended; raise what was raised there; RunFailedError if it is lost."""


class Alone:
    """This process: what is handed out is done at once."""

    in_chunks = False
    at_a_time = 1

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Do it."""
        future: Future[Any] = Future()
        future.set_result(work(argument))
        return future

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Return all."""
        return chunks

    def answer(self, chunk: Any) -> Any:
        """Return what was made of it."""
        return chunk.result()


class Processes:
    """Processes of this machine."""

    in_chunks = True

    def __init__(self, pool: ProcessPoolExecutor, jobs: int) -> None:
        self.at_a_time = 2 * jobs
        self._pool = pool

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Hand out a chunk."""
        try:
            return self._pool.submit(work, argument)
        except BrokenProcessPool:
            raise _died() from None

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Wait a little for one to end."""
        return wait(chunks, timeout=LOOK_S, return_when=FIRST_COMPLETED).done

    def answer(self, chunk: Any) -> Any:
        """Return what was made of it."""
        try:
            return chunk.result()
        except BrokenProcessPool:
            raise _died() from None


def _died() -> RunFailedError:
    return RunFailedError("a process died, of too little memory perhaps: try fewer --jobs")


@contextmanager
def processes(jobs: int) -> Iterator[Workers]:
    """Give so many processes, or this one alone."""
    if jobs <= 1:
        yield Alone()
        return
    # not forked: the progress bar has a thread
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin) as pool:
        try:
            yield Processes(pool, jobs)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin() -> None:
    """Leave the user's interrupt to the process that hands out the points, and end when that one does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class DaskWorkers:
    """The workers of a Dask cluster, however many there are at the time; Dask does again what a lost one had."""

    in_chunks = True

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def at_a_time(self) -> int:
        """Two chunks for each thread of a worker; some where there is none yet."""
        threads: int = sum(self._client.ncores().values())
        return 2 * max(1, threads)

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Hand out a chunk."""
        return self._client.submit(work, argument, pure=False)

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Wait a little for one to end."""
        from distributed import wait

        try:
            found: Collection[Any] = wait(list(chunks), timeout=LOOK_S, return_when=FIRST_COMPLETED).done
            return found
        except TimeoutError:
            return ()

    def answer(self, chunk: Any) -> Any:
        """Return what was made of it."""
        from concurrent.futures import CancelledError

        from distributed import KilledWorker

        try:
            return chunk.result()
        except KilledWorker:
            raise RunFailedError(
                "dask: the same points were under way when several workers died one after another"
            ) from None
        except (CancelledError, OSError) as error:
            raise RunFailedError(f"dask: the scheduler is gone: {error}") from None
        except ImportError as error:
            raise RunFailedError(f"dask: a worker lacks what points need: {error}") from None


@contextmanager
def dask_workers(address: str) -> Iterator[Workers]:
    """Give the workers of the Dask scheduler at an address; raise UserError where there is none."""
    try:
        from distributed import Client
    except ImportError:
        raise UserError("--dask needs dask: pip install 'gssim[distributed]'") from None
    try:
        client = Client(address, timeout=CONNECT_S)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--dask {address}: no scheduler there: {str(error).splitlines()[0]}") from None
    try:
        yield DaskWorkers(client)
    finally:
        client.close()


CONNECT_S = 10
"""How long is tried to reach a scheduler."""


def usable_cores() -> int:
    """Return how many of this machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
