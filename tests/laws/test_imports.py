"""Who may import whom, and what importing costs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "polars", "matplotlib", "sklearn", "transformers", "dask", "gsreal", "analysis")


@pytest.mark.parametrize("module", ["gssim", "gssim.cli.commands", "gssim.simulation.run"])
def test_importing_the_simulator_imports_nothing_heavy(module):
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_the_words_of_the_project_need_no_event_engine():
    code = "import sys, gssim.scenario, gssim.program.passes; print('simpy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_the_contracts_of_imports_are_kept():
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stdout
    assert " 0 broken" in ended.stdout
