"""How a command line ends: one line on stderr, and the exit code that says whose fault it was."""

import sys
from typing import Any

import typer

from gssim.units import RunFailedError, UserError

INTERRUPTED = 130
"""Exit code that typer makes of the user's interrupt."""
USAGE_ERROR: Any = typer.BadParameter.__base__
"""What typer raises for options and arguments that it does not know, misses, or cannot read."""


def run_command_line(app: typer.Typer, program: str, *, interrupted: str = "") -> None:
    """Run a typer application: a fault of the user's is exit 2, a failed run exit 1, each with one line.

    `interrupted`: what is said after the user's interrupt, if anything.
    """
    try:
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
