"""How a command line ends: one line on stderr, and the exit code that says whose fault it was."""

import contextlib
import errno
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer

from gssim.limits import lift, restored
from gssim.units import RunFailedError, UserError, one_line

INTERRUPTED = 130
"""Exit code that typer makes of the user's interrupt."""
USAGE_ERROR: Any = typer.BadParameter.__base__
"""What typer raises for options and arguments that it does not know, misses, or cannot read."""
HELP_ERROR = "NoArgsIsHelpError"
"""Name of what it raises where there is no command: the message is the help itself."""
STREAM_ERRORS = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF, errno.EDQUOT)
LONGEST_LINE = 300
SILENT_S = 2.0
"""What takes longer says what it does."""


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

    `interrupted`: what is said after the user's interrupt, if anything. Every command has the option `--no-limits`.
    """
    try:
        with unwinding(), restored():
            code = _with_limits(app)(standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        _end(program, str(error), 2)
    except USAGE_ERROR as error:
        _end_with_usage(program, error)
    except RunFailedError as error:
        _end(program, str(error), 1)
    except KeyboardInterrupt:  # before typer listens, or after
        code = INTERRUPTED
    except MemoryError:
        _end(program, "needs more memory than there is", 1)
    except OSError as error:
        if error.filename is not None or error.errno not in STREAM_ERRORS:
            raise
        _leave_stdout()
        if error.errno == errno.EPIPE:  # whoever reads has enough
            raise SystemExit(1) from None
        _end(program, f"output cannot be written: {error.strerror}", 1)
    if interrupted and code == INTERRUPTED:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
    raise SystemExit(code or 0)


def _end(program: str, message: str, code: int) -> None:
    with contextlib.suppress(OSError):
        print(one_line(f"{program}: {message}", LONGEST_LINE + _length_of_paths(message)), file=sys.stderr)
    raise SystemExit(code) from None


def _end_with_usage(program: str, error: Any) -> None:
    """End with what is wrong with a command line, and where the allowed ones are told."""
    if type(error).__name__ == HELP_ERROR:
        print(error.format_message(), file=sys.stderr)
        raise SystemExit(2) from None
    path = error.ctx.command_path if error.ctx is not None else program
    _end(program, f"{error.format_message().rstrip('.')} (see `{path} --help`)", 2)


def _length_of_paths(message: str) -> int:
    """Return how much of a message are paths that the user named and that are there: a line may be so much longer."""
    words = {part for word in sys.argv[1:] for part in (word, word.partition("=")[2])}
    paths = [word for word in words if os.sep in word and word in message and os.path.exists(word)]
    return sum(len(path) * message.count(path) for path in paths)


def _leave_stdout() -> None:
    """Let what could not be written go, so that the interpreter does not try again as it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _with_limits(app: typer.Typer) -> typer.Typer:
    """Return the application with the option `--no-limits` on each of its commands."""
    for each in app.registered_commands:
        if each.callback is not None and not hasattr(each.callback, "lifts_limits"):
            each.callback = _lifting(each.callback)
    return app


def _lifting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that has one option more."""

    @functools.wraps(command)
    def run(*arguments: Any, no_limits: bool = False, **options: Any) -> Any:
        if no_limits:
            lift()
        return command(*arguments, **options)

    kind = Annotated[bool, typer.Option("--no-limits", help="Lift all limits on sizes.")]
    option = inspect.Parameter("no_limits", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
    written = inspect.signature(command)
    vars(run)["__signature__"] = written.replace(parameters=[*written.parameters.values(), option])
    run.__annotations__ = {**command.__annotations__, "no_limits": kind}
    vars(run)["lifts_limits"] = True
    return run


@contextmanager
def activity(command: str) -> Iterator[Callable[[str], None]]:
    """Give a function to be told what a command is doing: said on stderr after two seconds, or at an interrupt."""
    now = ""
    timer: threading.Timer | None = None

    def said(what: str) -> None:
        nonlocal now, timer
        if timer is not None:
            timer.cancel()
        now = what
        timer = threading.Timer(SILENT_S, print, (f"{command}: {what} ...",), {"file": sys.stderr, "flush": True})
        timer.daemon = True
        timer.start()

    try:
        yield said
    except KeyboardInterrupt:
        print(f"{command}: interrupted{f' while {now}' if now else ''}", file=sys.stderr)
        raise
    finally:
        if timer is not None:
            timer.cancel()
