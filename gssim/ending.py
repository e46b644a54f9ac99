"""How a command line ends: one line on stderr, and the exit code that says whose fault it was."""

import sys
from collections.abc import Callable
from typing import Any

from gssim.units import RunFailedError, UserError

INTERRUPTED = 130
"""Exit code that typer makes of the user's interrupt."""


def run_command_line(app: Callable[[], Any], program: str, *, interrupted: str = "") -> None:
    """Run a typer application: a fault of the user's is exit 2, a failed run exit 1, each with one line.

    `interrupted`: what is said after the user's interrupt, if anything.
    """
    try:
        app()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except RunFailedError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except SystemExit as ended:
        if interrupted and ended.code == INTERRUPTED:
            print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        raise
