"""Ranks as forks of the launching process, which has imported torch: importing takes longer than many short runs.

The launching process must have been started with `gsreal.machine.ENVIRONMENT` (allocators and thread pools read it when
they start), must have no other thread, and must not have used a GPU: CUDA does not survive a fork.
"""

import gc
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from gsreal.machine import ENVIRONMENT
from gssim.errors import RunFailedError
from gssim.execution.parent import die_with_parent

IMPORTS = ("gsreal.run.worker", "gsreal.calibrate.__main__", "torch.distributed.optim", "gssim.cli")
"""Modules that ranks and commands import, and that take a second each."""


def import_modules() -> None:
    """Import the modules that every fork of this process would otherwise import for itself."""
    for name in IMPORTS:
        import_module(name)


def check_environment() -> None:
    """Raise RunFailedError if ranks forked from this process would differ from ranks in new processes."""
    lacking = [name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if lacking:
        raise RunFailedError(f"ranks cannot be forked: started without {', '.join(lacking)} in the environment")
    if threading.active_count() > 1:
        raise RunFailedError("ranks cannot be forked: this process has several threads")


class Forked:
    """A process that is forked from this one; as much of `subprocess.Popen` as the launcher uses."""

    def __init__(self, act: Callable[[], object], log: Path) -> None:
        """Fork: the new process calls `act`, with its output in `log`.

        It ends with status 0, with that of SystemExit, or with 1 if `act` raises.
        """
        check_environment()
        log.touch()  # the launcher may look before the new process opens it
        gc.collect()
        gc.freeze()  # a collection in the new process must not copy all pages that it shares with this one
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(act, log)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the process to end; return its exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """End the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, options)
            if process:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _run(act: Callable[[], object], log: Path) -> NoReturn:
    """Call `act` in the new process, and end it without running its parent's handlers and `finally` clauses."""
    code, has_begun = 1, False
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent()
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        has_begun = True
        act()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        # a launcher that is interrupted meanwhile has removed the log's folder, and says so itself
        if has_begun or not isinstance(error, (FileNotFoundError, KeyboardInterrupt)):
            traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def module_run(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Callable[[], None]:
    """Return a function that does what `python -m module arguments...` does with more variables in the environment."""

    def act() -> None:
        os.environ.update(environment)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return act
