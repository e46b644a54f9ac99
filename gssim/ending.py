"""How a command line ends: one line on stderr, and the exit code that says whose fault it was."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from gssim.units import RunFailedError, UserError

INTERRUPTED = 130
"""Exit code that typer makes of the user's interrupt."""
USAGE_ERROR: Any = typer.BadParameter.__base__
"""What typer raises for options and arguments that it does not know, misses, or cannot read."""


ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that, like the user's interrupt, unwind the stack."""


class EndedError(SystemExit):
    """A signal asked this process to end; its exit code is the shell's for that signal."""


def _unwind(number: int, frame: FrameType | None) -> None:
    for each in ENDING:  # what is cleaned up now is not interrupted by a second one
        signal.signal(each, signal.SIG_IGN)
    raise EndedError(128 + number)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let signals that end the process raise EndedError, so that temporary folders and locks are taken away.

    Those that this process was started to ignore, as under `nohup`, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in usual:
        signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def run_command_line(app: typer.Typer, program: str, *, interrupted: str = "") -> None:
    """Run a typer application: a fault of the user's is exit 2, a failed run exit 1, each with one line.

    `interrupted`: what is said after the user's interrupt, if anything.
    """
    try:
        with unwinding():
            code = app(standalone_mode=False)
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except USAGE_ERROR as error:
        print(_usage_line(program, error), file=sys.stderr)
        raise SystemExit(2) from None
    except RunFailedError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if interrupted and code == INTERRUPTED:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
    raise SystemExit(code or 0)


def _usage_line(program: str, error: Any) -> str:
    """Return what is wrong with a command line, and where the allowed ones are told; without any command, just that."""
    message = error.format_message()
    if "\n" in message:  # the help itself, which typer gives where there is no command
        return str(message)
    path = error.ctx.command_path if error.ctx is not None else program
    return f"{program}: {message.rstrip('.')} (see `{path} --help`)"
