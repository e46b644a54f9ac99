"""The commands of the real backend: `gsreal`, or `python -m gsreal`."""

from gssim.garbage import end_without_collection


def main() -> None:
    """Run the command line; interrupted while its modules are imported, exit as after any interrupt."""
    end_without_collection()
    try:
        from gsreal.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # 128 + SIGINT, as gssim.terminal.INTERRUPTED, which is not imported yet
    run()


if __name__ == "__main__":
    main()
