"""Commands in README.md and the walk-throughs: each is run, slow ones in a small form.

A block fenced as `sh` is run line by line in a copy of `scenarios/`; those of `sh slow` are parsed, and run one after
another, with few steps, by the slow test.
"""

import ast
import importlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import commands
import forks
import pytest
import typer

from gssim.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "gssim/README.md", "gsreal/README.md", "analysis/README.md", "scenarios/README.md")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
TEXT = "\n".join(TEXTS.values())
README_LINES = 110
"""Largest number of lines of README.md: two screens."""
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
PROGRAMS = {"gssim": ["gssim"], "gsreal": ["gsreal"], "analysis": ["python", "-m", "analysis"]}
NEEDED = {"gssim": (), "gsreal": ("torch", "tomli_w", "sklearn"), "analysis": ("polars", "matplotlib")}
SLOW_VERBS = {("gsreal", verb) for verb in ("calibrate", "gradients", "run", "lab", "trace")}
LIMIT_S = 120
SHORT = ("--set", "run.steps=2", "--set", "run.warmup_steps=1")
SMALL: dict[tuple[str, str], tuple[str, ...]] = {
    ("gssim", "run"): SHORT,
    ("gsreal", "run"): SHORT,
    ("gsreal", "lab"): SHORT,
    ("gsreal", "gradients"): (
        *("--set", "run.steps=4", "--set", "run.warmup_steps=1"),
        *("--every", "2", "--batches", "1", "--courses", "1"),
    ),
    ("gsreal", "calibrate"): ("--batch-sizes", "2", "--sequence-length", "16"),
    ("gssim", "sweep"): ("--only", "hosts--gs-silent*"),
    ("gssim", "search"): (
        *("--set", 'search.methods=["zero3", "gs_z3"]', "--set", "search.devices=[8]", "--set", "search.tp=[1]"),
        *("--set", "search.micro_batches=[2]", "--set", 'search.recompute=["full"]'),
    ),
    ("analysis", "convergence"): ("--seeds", "2", "--set", "run.steps=3", "--set", "run.warmup_steps=1"),
}
"""Options that make slow commands short: of repeated options the last counts."""


@dataclass(frozen=True)
class Line:
    """One command of a page."""

    program: str
    arguments: tuple[str, ...]
    slow: bool

    def __str__(self):
        return f"{self.program} {' '.join(self.arguments)}"


def line_of(text, *, slow):
    """Return the command in one line of a block, or None where it is not one of ours."""
    words = shlex.split(text.removeprefix("$ "), comments=True)
    for program, start in PROGRAMS.items():
        if words[: len(start)] == start:
            arguments = tuple(words[len(start) :])
            return Line(program, arguments, slow or (program, arguments[0] if arguments else "") in SLOW_VERBS)
    return None


def lines():
    found = []
    for tags, body in FENCE.findall(TEXT):
        words = re.split(r"[\s,{}.]+", tags.strip())
        if words[0] in ("sh", "bash", "shell", "console"):
            all_lines = (line_of(text, slow="slow" in words) for text in body.replace("\\\n", " ").splitlines())
            found += [line for line in all_lines if line is not None]
    return found


LINES = lines()
MADE_ELSEWHERE = {
    ("analysis", ("keys",)),
    ("analysis", ("literature", "--headlines")),
    ("gssim", ("run", "scenarios/gpt3-65536.toml", "--timing")),
    ("gssim", ("run", "scenarios/gpt3-gs-z3.toml")),
    ("gssim", ("check", "scenarios/*.toml")),
    ("gssim", ("models",)),
    ("gssim", ("run", "out/mine.toml")),
    ("analysis", ("compare", "out/job", "--out", "out/job-compared")),
    ("gssim", (*("sweep", "scenarios/sweeps/lab-small.toml", "--only", "two-hosts--*"), "--out", "out/small.parquet")),
    ("gssim", ("support", "scenarios/gpt2-unequal-gpus.toml")),
}
"""Commands with tests of their own, which take seconds: the reference page, the headlines, predictions of the scenarios
that ship, the lists of models and of what combines, a sweep, a comparison and an imported
plan's prediction."""
QUICK = [
    pytest.param(line, marks=[pytest.mark.slow] if (line.program, line.arguments) in MADE_ELSEWHERE else [])
    for line in LINES
    if not line.slow
]


def need(line):
    for module in NEEDED[line.program]:
        pytest.importorskip(module, reason=f"{module} is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a copy of the scenarios, where all lines run one after another."""
    made = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "scenarios", made / "scenarios")
    return made


def expanded(arguments, folder):
    """Return the arguments with patterns replaced by the files that they match, as a shell does."""
    found = []
    for argument in arguments:
        matches = sorted(str(path.relative_to(folder)) for path in folder.glob(argument)) if "*" in argument else []
        found += matches or [argument]
    return found


@pytest.mark.parametrize("line", QUICK, ids=str)
def test_a_quick_command_runs(line, folder):
    need(line)
    ended = commands.run(line.program, *expanded(line.arguments, folder), folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    for option in ("--out", "--trace"):
        if option in line.arguments:
            assert (folder / line.arguments[line.arguments.index(option) + 1]).exists()


@pytest.mark.parametrize("line", LINES, ids=str)
def test_verb_options_and_arguments_of_a_command_exist(line, monkeypatch):
    need(line)
    module = importlib.import_module(f"{line.program}.cli")
    verbs = getattr(typer.main.get_command(module.app), "commands", {})
    verb, *arguments = line.arguments
    assert verb in verbs
    monkeypatch.chdir(ROOT)
    context = verbs[verb].make_context(verb, expanded(arguments, ROOT))  # raises where an option is unknown
    # all that the command has, even if that is nothing
    assert context.params.keys() == {each.name for each in verbs[verb].params if each.expose_value}


def is_made(value):
    """Return whether an override names a file that another command writes."""
    return value.startswith("out/")


@pytest.mark.parametrize("line", [line for line in LINES if "--set" in line.arguments], ids=str)
def test_overrides_of_a_command_are_keys_that_scenarios_have(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = next(argument for argument in line.arguments if argument.startswith("scenarios/"))
    changes = [line.arguments[i + 1] for i, argument in enumerate(line.arguments) if argument == "--set"]
    kept = [change for change in changes if not is_made(change.partition("=")[2])]
    assert load_scenario(Path(path), kept, gradients_needed=False).scenario.ranks >= 1


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`|\$ )make ([a-z][a-z-]*)", TEXT, re.MULTILINE))))
def test_what_is_made_is_a_target(target):
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(3600)  # half an hour on two busy cores: two studies and a calibration in the lab take most
def test_slow_commands_run_in_a_small_form(tmp_path):
    shutil.copytree(ROOT / "scenarios", tmp_path / "scenarios")
    for line in LINES:
        key = (line.program, line.arguments[0])
        if not line.slow or (key[1] == "lab" and not can_emulate()):
            continue
        need(line)
        small = () if "--clean" in line.arguments else SMALL.get(key, ())
        ended = commands.run(line.program, *expanded(line.arguments, tmp_path), *small, folder=tmp_path)
        assert ended.returncode == 0, f"{line}: {ended.stderr}"


def can_emulate():
    from gsreal.lab.building import check_tools
    from gssim.errors import UserError

    try:
        check_tools()
    except UserError:
        return False
    return True


@pytest.mark.parametrize("page", PAGES)
def test_what_is_linked_to_is_there(page):
    anchors = {name: set(anchors_of(text)) for name, text in TEXTS.items()}
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / page).parent / path if path else ROOT / page
        assert place.exists(), target
        if anchor:
            assert anchor in anchors[str(place.resolve().relative_to(ROOT))], target


def anchors_of(text):
    """Return what headings are linked to by, as GitHub makes it."""
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_readme_is_two_screens_and_leads_to_every_walk_through():
    assert len(TEXTS["README.md"].splitlines()) <= README_LINES
    for page in PAGES[1:]:
        assert f"]({page})" in TEXTS["README.md"]


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:gssim|gsreal|analysis|scenarios|tests)/[\w./-]+)`", TEXT)))
)
def test_files_that_are_named_exist(path):
    assert (ROOT / path).exists()


@pytest.fixture
def training(tmp_path):
    """Return the file of the program that trains."""
    ((_, text),) = [(tags, body) for tags, body in FENCE.findall(TEXT) if tags == "python run"]
    assert len([line for line in text.splitlines() if line.strip()]) <= 25
    (tmp_path / "train.py").write_text(text)
    return tmp_path / "train.py"


def check_printed(text, ranks):
    """Check what all ranks of the program print."""
    needs = re.search(r"^memory: [\d.]+ MiB \(.*\); in the backward [\d.]+ MiB", text, re.MULTILINE)
    assert needs, text
    losses = [
        float(loss)
        for loss in re.findall(r"rank \d: loss ([\d.]+), pushed \d+% of", text)  # both print at once
    ]
    assert len(losses) == ranks
    assert max(losses) < 0.8 * math.log(10)  # of what guessing one in ten has


@pytest.mark.real
def test_a_program_runs_under_torchruns_launcher(training, tmp_path):
    pytest.importorskip("torch")
    forks.launch("script_ranks", [str(training), "2", str(tmp_path)], ranks=1)
    check_printed("".join((tmp_path / f"out-{rank}.txt").read_text() for rank in range(2)), 2)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_program_runs_under_torchrun(training, tmp_path, ranks):
    pytest.importorskip("torch")
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), training],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    check_printed(ended.stdout, ranks)


def test_the_example_of_the_python_api_runs_in_a_small_form(monkeypatch, tmp_path):
    ((_, text),) = [(tags, body) for tags, body in FENCE.findall(TEXT) if tags == "python api"]
    small = (
        'scenario.with_({"search.methods": ["ddp"], "search.micro_batches": [1], "search.recompute": ["none"], '
        '"run.steps": 2})'
    )
    assert "gssim.search(scenario," in text
    (file,) = re.findall(r'gssim\.sweep\("(.*?)"\)', text)
    sweep = (ROOT / file).read_text(encoding="utf-8").replace('"../', f'"{ROOT}/scenarios/')
    (tmp_path / "sweep.toml").write_text(re.sub(r"^variants = .*", 'variants = ["ddp"]', sweep, flags=re.MULTILINE))
    monkeypatch.chdir(ROOT)
    names = {}
    text = text.replace(file, str(tmp_path / "sweep.toml"))
    exec(text.replace("gssim.search(scenario,", f"gssim.search({small},"), names)
    assert names["result"].step_time_s > 0
    assert names["other"].plan.method == "gs_z3"
    assert names["table"].height == 3  # of each group of points one
    assert names["best"]


def test_python_in_the_text_is_python_and_toml_is_toml():
    for tags, body in FENCE.findall(TEXT):
        if tags.startswith("python"):
            ast.parse(body)
        if tags.startswith("toml"):
            assert tomllib.loads(body)


def test_there_is_something_to_run():
    assert {line.program for line in LINES} >= {"gssim", "gsreal"}
    assert any(line.program == "gssim" and not line.slow for line in LINES)
