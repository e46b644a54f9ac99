"""The commands of the simulator: `gssim`, or `python -m gssim`."""

import atexit
import gc

OBJECTS_PER_COLLECTION = 2**20
"""As in worker processes: see `gssim.execution.executor`."""


def main() -> None:
    """Run the command line; interrupted while its modules are imported, exit as after any interrupt.

    Collections of garbage would take a quarter of the time of `gssim run`: they look through all modules and whole
    simulations, several times at the process's end, which frees everything anyway.
    """
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    atexit.register(gc.freeze)
    try:
        from gssim.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # 128 + SIGINT, as gssim.terminal.INTERRUPTED, which is not there yet
    run()


if __name__ == "__main__":
    main()
