"""`python -m gsreal`: the real backend's commands."""

from gsreal.cli import main

if __name__ == "__main__":
    main()
