"""`python -m gssim`: the simulator's commands."""

from gssim.cli import main

if __name__ == "__main__":
    main()
