"""Executors of independent work: this process, a pool of processes, or the workers of a Dask cluster."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import current_process, forkserver, get_context, parent_process, spawn
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Protocol

from gssim.errors import RunFailedError, UserError
from gssim.execution.files import scratch_folder
from gssim.execution.garbage import OBJECTS_PER_COLLECTION
from gssim.units import excess, whole_number

LOOK_S = 0.2
"""Seconds that a wait for chunks lasts at most, so that a user's interrupt is noticed."""
SWITCH_S = 5e-4
"""Seconds after which a thread that computes lets others of its process run, while these pass single pieces of work to
other processes. With Python's 5 ms, a piece would take up to 20 ms there and back, in four waits of the threads of its
queue, and the process that has ended would be idle meanwhile.
"""


class Workers(Protocol):
    """An executor of chunks of work."""

    in_chunks: bool
    """Whether it is worthwhile to submit several points together."""
    is_remote: bool
    """Whether workers may run on machines that cannot read this one's files."""

    @property
    def at_a_time(self) -> int:
        """Most chunks to submit at once, running or queued, so that every worker always has a next one."""

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Submit a chunk; return a handle of it."""

    def ended(self, chunks: Collection[Any], within_s: float = LOOK_S) -> Collection[Any]:
        """Wait for one to finish, at most a short time; return the handles of finished chunks."""

    def answer(self, chunk: Any) -> Any:
        """Return the result of a finished chunk, or raise its exception; RunFailedError if the chunk was lost."""


class Alone:
    """Executor in this process: work is done when it is submitted."""

    in_chunks, is_remote = False, False
    at_a_time = 1

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Do the work."""
        future: Future[Any] = Future()
        future.set_result(work(argument))
        return future

    def ended(self, chunks: Collection[Any], within_s: float = LOOK_S) -> Collection[Any]:
        """Return all chunks."""
        return chunks

    def answer(self, chunk: Any) -> Any:
        """Return the result."""
        return chunk.result()


class Processes:
    """Executor of a pool of processes on this machine."""

    in_chunks, is_remote = True, False

    def __init__(self, pool: ProcessPoolExecutor, at_a_time: int) -> None:
        self.at_a_time = at_a_time
        self._pool = pool

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Submit a chunk."""
        try:
            with _starts_reported(), _endings_deferred(), _main_left_out():  # the first ones start the processes
                return self._pool.submit(work, argument)
        except BrokenProcessPool:
            raise _died() from None

    def ended(self, chunks: Collection[Any], within_s: float = LOOK_S) -> Collection[Any]:
        """Wait a short time for one to finish."""
        return wait(chunks, timeout=within_s, return_when=FIRST_COMPLETED).done

    def answer(self, chunk: Any) -> Any:
        """Return the result."""
        try:
            return chunk.result()
        except BrokenProcessPool:
            raise _died() from None


def _died() -> RunFailedError:
    return RunFailedError("a worker process died, perhaps out of memory: try fewer --jobs")


@contextmanager
def _starts_reported() -> Iterator[None]:
    """Convert the errors of processes that the system does not let start (a limit, a sandbox) to one line."""
    try:
        yield
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise RunFailedError(f"worker processes cannot be started ({why}): --jobs 1 needs none") from None


@contextmanager
def processes(jobs: int) -> Iterator[Workers]:
    """Provide an executor of `jobs` processes (1: this process) for chunks of similar work.

    An interpreter that is embedded in another program may not know its own path, and then starts none.
    """
    if jobs <= 1 or not sys.executable:
        yield Alone()
        return
    start = "forkserver" if sys.platform == "linux" else "spawn"  # not fork: the progress bar has a thread
    with _pool(jobs, start, None) as pool:
        yield Processes(pool, 2 * jobs)


def start_fork_server() -> None:
    """Start the process from which `processes` forks its own, where it can: it imports while this one goes on."""
    if sys.platform == "linux" and sys.executable:
        get_context("forkserver").set_forkserver_preload(["gssim.sweeps.predictions"])
        with _starts_reported():
            ensure_running()  # multiprocessing's tracker: its start would unblock signals
            with _endings_deferred():
                _provide_folder()
                forkserver.ensure_running()


_UNTIL_EXIT = ExitStack()
MAX_SOCKET_PATH = 107
"""Most bytes of a socket's path on Linux (unix(7): 108, with the zero at its end)."""


def _provide_folder() -> None:
    """Let multiprocessing's socket lie in a folder of ours until this process ends.

    Of a killed process it is removed by the next one; a folder that multiprocessing makes itself would stay for good.
    Where the path would be too long for a socket in the default folder for temporary files, as on some clusters, it
    lies below /tmp.
    """
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        path = f"{gettempdir()}/gssim-run-xxxxxxxx/listener-xxxxxxxx"
        inside = Path("/tmp") if len(os.fsencode(path)) > MAX_SOCKET_PATH else None
        config["tempdir"] = str(_UNTIL_EXIT.enter_context(scratch_folder(inside=inside)))
        atexit.register(_UNTIL_EXIT.close)


@contextmanager
def processes_with(state: Any, jobs: int) -> Iterator[Workers]:
    """Provide an executor of `jobs` processes, each with `state` as its `worker_state`, and one piece of work at a
    time.

    Where processes can be forked, they start with the content that `state` has when the first work is submitted, which
    must be before any thread is started. A daemonic process, which may start none, does the work itself.
    """
    if current_process().daemon or not (sys.executable or sys.platform == "linux"):
        _STATE[0] = state
        yield Alone()
        return
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(usual_s, SWITCH_S))
    try:
        with _pool(jobs, "fork" if sys.platform == "linux" else "spawn", state) as pool:
            yield Processes(pool, jobs)
    finally:
        sys.setswitchinterval(usual_s)


def worker_state() -> Any:
    """Return the state with which this worker process was started."""
    return _STATE[0]


_STATE: list[Any] = [None]


@contextmanager
def _pool(jobs: int, start: str, state: Any) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool. If its block is left by an exception, its processes end at once."""
    context = get_context(start)
    if start == "forkserver":  # it imports what all workers need only once, and lives as long as this process
        start_fork_server()
    stopped, running = context.Pipe(duplex=False)  # the processes end when `running` is closed
    forked = [running] if start == "fork" else []
    initial = (state, stopped, forked, dict(os.environ))
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=initial)
    try:
        yield pool
    except BaseException:
        running.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        running.close()
        stopped.close()


ENDINGS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a command: the user's interrupt, a termination, and a closed terminal."""


@contextmanager
def _endings_deferred() -> Iterator[None]:
    """Start processes in this context with signals that end a command blocked, until `_begin` sets what they do.

    Otherwise an interrupt would end the processes with a traceback while they import modules. This process gets the
    signals at the end of the context: unwinding its stack in the middle of a start would leave a process that nobody
    waits for, whose queue is gone when it looks for it. Its mask does not suffice for that: the system hands a signal
    to any thread that does not block it, and Python's handler then runs in the main thread. (Windows cannot block
    signals.)
    """
    if sys.platform == "win32":
        yield
        return
    noted: list[int] = []
    handlers: dict[int, Any] = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        if threading.current_thread() is threading.main_thread():
            for number in [each for each in ENDINGS if callable(signal.getsignal(each))]:
                handlers[number] = signal.signal(number, lambda number, frame: noted.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if noted:
            signal.raise_signal(noted[0])


_STARTING = threading.Lock()


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Start processes in this context that do not import the user's `__main__`: no work needs it.

    multiprocessing would run a script again in each of them, which ends them where the script lacks
    `if __name__ == "__main__":`, or was read from stdin. Processes that other threads start have theirs.
    """
    starter = threading.get_ident()
    with _STARTING:
        usual = spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            data = usual(name)
            if threading.get_ident() == starter:
                data.pop("init_main_from_path", None)
                data.pop("init_main_from_name", None)
            return data

        spawn.get_preparation_data = without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = usual


def _begin(state: Any, stopped: Connection, inherited: Sequence[Connection], environment: Mapping[str, str]) -> None:
    """Ignore the user's interrupt, which the parent process handles; end when the parent ends or stops this process.

    The process takes over the parent's environment, which may have changed since the fork server was started.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform != "win32":
        if callable(signal.getsignal(signal.SIGHUP)):  # the parent's; under nohup it is ignored, and stays so
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    for connection in inherited:
        connection.close()
    _STATE[0] = state
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # a collection would look through everything that the parent made, and copy the shared pages
    gc.set_threshold(OBJECTS_PER_COLLECTION)

    def end_with_parent() -> None:
        parent = parent_process()
        wait_for([stopped, *([parent.sentinel] if parent is not None else [])])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


class DaskWorkers:
    """Executor on a Dask cluster's workers, whose number may change; Dask repeats the work of lost workers."""

    in_chunks, is_remote = True, True

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

    def ended(self, chunks: Collection[Any], within_s: float = LOOK_S) -> Collection[Any]:
        """Wait a short time for one to finish."""
        from distributed import wait

        try:
            finished: Collection[Any] = wait(list(chunks), timeout=within_s, return_when=FIRST_COMPLETED).done
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
    """Provide an executor of the Dask scheduler at an address; raise UserError if there is none."""
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


def checked_jobs(asked: Any, name: str = "--jobs") -> int:
    """Return the requested number of processes, or the number of usable cores if `asked` is None.

    A daemonic process, as of multiprocessing.Pool, may have none of its own: 1 there. Raises UserError if `asked` is
    not a whole number, or more than there may be.
    """
    if asked is None:
        return 1 if current_process().daemon else usable_cores()
    jobs = whole_number(asked, name)
    if jobs > 1 and current_process().daemon:
        raise UserError(
            f"{name.rstrip(' =')} = {jobs}: a daemonic process, as of multiprocessing.Pool, may start none; allowed: 1"
        )
    if (why := excess("processes", jobs)) is not None:
        raise UserError(f"{name.rstrip(' =')}: {why}")
    return min(jobs, MOST_PROCESSES)


MOST_PROCESSES = 2**22
"""Largest number of processes of a Linux system."""


def usable_cores() -> int:
    """Return the number of this machine's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
