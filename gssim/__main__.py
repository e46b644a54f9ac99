"""The commands of the simulator: `gssim`, or `python -m gssim`."""

import gc
import os


def main() -> None:
    """Run the command line; interrupted while its modules are imported, exit as after any interrupt."""
    gc.disable()  # modules, once imported, leave no garbage worth a collection
    try:
        from gssim.execution.garbage import OBJECTS_PER_COLLECTION, end_without_collection

        gc.set_threshold(OBJECTS_PER_COLLECTION)
        end_without_collection()
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for some in all packages takes 0.05 s
        from gssim.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # 128 + SIGINT, as gssim.terminal.INTERRUPTED, which is not there yet
    gc.enable()
    run()


if __name__ == "__main__":
    main()
