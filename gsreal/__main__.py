"""The commands of the real backend: `gsreal`, or `python -m gsreal`."""


def main() -> None:
    """Run the command line; interrupted while its modules are imported, exit as after any interrupt."""
    try:
        from gssim.execution.garbage import end_without_collection

        end_without_collection()
        from gsreal.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # 128 + SIGINT, as gssim.terminal.INTERRUPTED, which is not imported yet
    run()


if __name__ == "__main__":
    main()
