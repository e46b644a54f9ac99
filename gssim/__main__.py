"""The commands of the simulator: `gssim`, or `python -m gssim`."""

import gc


def main() -> None:
    """Run the command line; interrupted while its modules are imported, exit as after any interrupt."""
    try:
        from gssim.execution.garbage import OBJECTS_PER_COLLECTION, end_without_collection

        gc.set_threshold(OBJECTS_PER_COLLECTION)
        end_without_collection()
        from gssim.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # 128 + SIGINT, as gssim.terminal.INTERRUPTED, which is not there yet
    run()


if __name__ == "__main__":
    main()
