"""Run the command line of `analysis`: `python -m analysis COMMAND`."""

from analysis.cli import main

if __name__ == "__main__":
    main()
