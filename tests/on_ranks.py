"""How a test's module runs on every rank: what fails there is noted for the launcher, which names the rank."""

import os
import sys
from collections.abc import Callable

from gsreal.worker import note_failure


def run_on_rank(main: Callable[..., None]) -> None:
    """Call `main` with the command line's arguments."""
    try:
        main(*sys.argv[1:])
    except Exception as error:
        note_failure(error)
        raise
    finally:
        sys.stdout.flush()
        os.environ.pop("GSREAL_REPORTS", None)
