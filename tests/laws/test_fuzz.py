"""Damaged files and command lines: an answer of finite numbers, or one line that says what is wrong; nothing else.

A failure is printed with its case's number: `python tests/helpers/fuzz.py FOLDER --first NUMBER --cases 1` makes it
again.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples import examples


def fuzz(folder, *, first, cases, programs):
    """Run cases; return how many were answered, and how many refused."""
    script = Path(__file__).resolve().parents[1] / "helpers" / "fuzz.py"
    words = [folder, "--first", first, "--cases", cases, "--programs", programs]
    ended = subprocess.run([sys.executable, script, *map(str, words)], capture_output=True, text=True)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counts = re.search(r"cases (\d+): (\d+) answered, (\d+) refused, 0 failed", ended.stdout)
    assert counts is not None, ended.stdout
    assert int(counts[1]) == cases
    return int(counts[2]), int(counts[3])


def test_damaged_inputs_of_the_simulator_are_answered_or_refused_in_a_line(tmp_path):
    answered, refused = fuzz(tmp_path / "fuzz", first=20_000, cases=16, programs="gssim")
    assert min(answered, refused) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("programs", "first", "cases"),
    [("gssim", 100_000, examples(3000)), ("analysis", 200_000, examples(1400)), ("gsreal", 300_000, examples(600))],
)
def test_many_damaged_inputs_and_command_lines_are_answered_or_refused(tmp_path, programs, first, cases):
    answered, refused = fuzz(tmp_path / "fuzz", first=first, cases=cases, programs=programs)
    assert min(answered, refused) >= cases / 10
