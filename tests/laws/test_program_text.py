"""The text form of programs: every task reads back as it was written, and no two tasks of a rank share a label."""

import json

import pytest
import tomli_w
from commands import run
from points import SCENARIOS, random_point

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.program import program_table, program_text, read_tasks
from gssim.scenario import load_scenario
from gssim.simulation import program_of

LARGE = ("gpt3-1024-3d", "gpt3-65536", "mt-nlg-280-dgx")
SHIPPED = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in LARGE or place % 4 else [], id=path.stem)
    for place, path in enumerate(sorted(SCENARIOS.glob("*.toml")))
]
MOST_TASKS = 1000
"""Tasks of a program that are written and read: those of further roles differ in little but numbers."""


def assert_reads_back(path) -> None:
    program, tasks_seen = program_of(load_scenario(path), Shared()), 0
    for role, tasks in enumerate(program.tasks):
        if tasks_seen > MOST_TASKS:
            break
        rank = program.role_of.index(role)
        tasks_seen += len(tasks)
        assert read_tasks(program_text(program, rank)) == tasks
        assert len({task.label for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
        assert [row["label"] for row in program_table(program, rank)] == [task.label for task in tasks]
    named = program.communications
    assert len({each.label for each in named}) == len(named)


@pytest.mark.parametrize("path", SHIPPED)
def test_programs_of_shipped_scenarios_read_back(path):
    assert_reads_back(path)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 40), marks=pytest.mark.slow)])
def test_programs_of_random_scenarios_read_back(seeds, tmp_path):
    answered = 0
    for seed in seeds:
        path = tmp_path / f"{seed}.toml"
        path.write_text(tomli_w.dumps(random_point(seed, most_devices=8)))
        try:
            assert_reads_back(path)
        except UserError:
            continue
        answered += 1
    assert answered >= len(seeds) / 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("forward layer=h.0", "there is no bar"),
        ("fly layer=h.0 | phase=forward stream=compute duration_s=0.0", "unknown operation 'fly'"),
        ("forward layer | phase=forward stream=compute duration_s=0.0", "'layer' has no value"),
        ("forward | stream=compute duration_s=0.0", "phase"),
    ],
)
def test_other_text_is_refused_with_its_line(line, message):
    with pytest.raises(UserError, match=message) as raised:
        read_tasks(f"# a comment\n{line}\n", file="step.txt")
    assert str(raised.value).startswith("step.txt:2: ")


def test_the_command_prints_the_tasks_of_a_rank():
    path = str(SCENARIOS / "lab-2-hosts.toml")
    program = program_of(load_scenario(SCENARIOS / "lab-2-hosts.toml"), Shared())
    shown = run("gssim", "program", path, "--rank", "1")
    assert shown.returncode == 0, shown.stderr
    assert read_tasks(shown.stdout) == program.tasks[program.role_of[1]]
    rows = json.loads(run("gssim", "program", path, "--json").stdout)
    assert rows[0]["id"] == {"op": "forward", "layer": "tokens"}
    refused = run("gssim", "program", path, "--rank", "2")
    assert (refused.returncode, refused.stderr) == (2, "gssim: --rank 2: must be from 0 to 1\n")
