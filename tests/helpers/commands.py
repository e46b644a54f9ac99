"""Runs command lines of the project in this process: programs are imported once, and ranks are forked (forks.py)."""

import importlib
import io
import sys
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import forks
from forks import Ended

MODULES = {"gssim": "gssim.cli.commands", "gsreal": "gsreal.cli", "analysis": "analysis.cli"}


def run(program: str, *arguments: object, folder: Path | None = None) -> Ended:
    """Run a program's command line to its end, in a folder if one is given; what `main` does not catch is raised."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    restarts = "--max-restarts" in arguments  # which forks do not do
    main = importlib.import_module(MODULES[program]).main
    with (
        patch.object(sys, "argv", [program, *map(str, arguments)]),
        patch("gsreal.run.launch.launch", forks.launch) if program == "gsreal" and not restarts else nullcontext(),
        chdir(folder or "."),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, stdout.getvalue(), stderr.getvalue())
