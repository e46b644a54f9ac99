"""Executors of independent work: this process, a pool of processes, or the workers of a Dask cluster."""

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
"""Timeout of a wait for chunks, after which an interrupt of the user is noticed."""


class Workers(Protocol):
    """An executor of chunks of work."""

    in_chunks: bool
    """Whether it pays to submit several points together."""

    @property
    def at_a_time(self) -> int:
        """Most chunks to submit at once, running and queued: enough for every worker to have a next one."""

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Submit a chunk; return a handle of it."""

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Wait a short time; return the handles of finished chunks."""

    def answer(self, chunk: Any) -> Any:
        """Return the result of a finished chunk, or raise its exception; RunFailedError if the chunk was lost."""


class Alone:
    """Executor in this process: work is done when it is submitted."""

    in_chunks = False
    at_a_time = 1

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Do the work."""
        future: Future[Any] = Future()
        future.set_result(work(argument))
        return future

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Return all chunks."""
        return chunks

    def answer(self, chunk: Any) -> Any:
        """Return the result."""
        return chunk.result()


class Processes:
    """Executor of a pool of processes on this machine."""

    in_chunks = True

    def __init__(self, pool: ProcessPoolExecutor, jobs: int) -> None:
        self.at_a_time = 2 * jobs
        self._pool = pool

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Submit a chunk."""
        try:
            return self._pool.submit(work, argument)
        except BrokenProcessPool:
            raise _died() from None

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Wait a short time for one to finish."""
        return wait(chunks, timeout=LOOK_S, return_when=FIRST_COMPLETED).done

    def answer(self, chunk: Any) -> Any:
        """Return the result."""
        try:
            return chunk.result()
        except BrokenProcessPool:
            raise _died() from None


def _died() -> RunFailedError:
    return RunFailedError("a worker process died, perhaps out of memory: try fewer --jobs")


@contextmanager
def processes(jobs: int) -> Iterator[Workers]:
    """Provide an executor of so many processes, or of this one only."""
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
    """Ignore the user's interrupt, which the parent process handles, and end when that process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class DaskWorkers:
    """Executor of a Dask cluster's workers, however many there are at a time; Dask repeats the work of lost ones."""

    in_chunks = True

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def at_a_time(self) -> int:
        """Two chunks for each thread of a worker, and two without any worker."""
        threads: int = sum(self._client.ncores().values())
        return 2 * max(1, threads)

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Submit a chunk."""
        return self._client.submit(work, argument, pure=False)

    def ended(self, chunks: Collection[Any]) -> Collection[Any]:
        """Wait a short time for one to finish."""
        from distributed import wait

        try:
            finished: Collection[Any] = wait(list(chunks), timeout=LOOK_S, return_when=FIRST_COMPLETED).done
            return finished
        except TimeoutError:
            return ()

    def answer(self, chunk: Any) -> Any:
        """Return the result."""
        from concurrent.futures import CancelledError

        from distributed import KilledWorker

        try:
            return chunk.result()
        except KilledWorker:
            raise RunFailedError(
                "dask: the same points were running when several workers died one after another"
            ) from None
        except (CancelledError, OSError) as error:
            raise RunFailedError(f"dask: the scheduler is gone: {error}") from None
        except ImportError as error:
            raise RunFailedError(f"dask: a worker lacks a required package: {error}") from None


@contextmanager
def dask_workers(address: str) -> Iterator[Workers]:
    """Provide an executor of the Dask scheduler at an address; raise UserError where there is none."""
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
"""Timeout of the connection to a scheduler."""


def usable_cores() -> int:
    """Return the number of this machine's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
