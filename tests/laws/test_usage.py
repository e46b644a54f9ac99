"""Command lines that cannot be understood, or ask for what there is not: one line on stderr and exit code 2."""

import importlib
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import gssim
from gssim.workload.model import shipped_models

REFUSED = [
    ("gssim", "run", "missing argument"),
    ("gssim", "run x.toml --nope", "no such option: --nope"),
    ("gssim", "predict x.toml", "no such command 'predict'"),
    ("gssim", "cluster", "missing argument 'files', or --gpu, or --detect"),
    ("gssim", "run /dev/zero", "/dev/zero: 268,435,457 file bytes: at most"),
    ("gssim", f"check {'x' * 300}.toml", "cannot be read: file name too long"),
    ("gssim", f"sweep x.toml --jobs 1{'0' * 18}", "--jobs: more than 1,000,000,000,000,000,000 processes: at most"),
    ("gssim", "search x.toml --jobs 1000000", "--jobs: 1,000,000 processes: at most"),
    ("gsreal", "gradients x.toml", "missing option '--out'"),
    ("gsreal", "gradients x.toml --out y.json --every 0", "--every 0: must be at least 1"),
    ("gsreal", "gradients x.toml --out y.json --batches -2", "--batches -2: must be at least 1"),
    ("gsreal", "gradients x.toml --out y.json --every often", "invalid value for '--every'"),
    ("gsreal", "run x.toml --every 0", "--every 0: must be at least 1"),
    ("gsreal", "calibrate --ranks 0", "--ranks 0: must be at least 1"),
    ("gsreal", "calibrate --ranks two", "invalid value for '--ranks'"),
    ("gsreal", "calibrate --batch-sizes 0", "--batch-sizes 0: must be distinct whole numbers of at least 1"),
    ("gsreal", "calibrate --batch-sizes 1.5", "--batch-sizes 1.5: must be distinct whole numbers of at least 1"),
    ("gsreal", "calibrate --sequence-length 0", "--sequence-length 0: must be at least 1"),
    ("gsreal", "calibrate --again --out none.toml", "none.toml: no such file"),
    ("gsreal", "calibrate --out .", ".: cannot be written: it is a folder"),
    ("gsreal", "calibrate --lab none.toml", "none.toml: no such file"),
    ("gsreal", "gradients x.toml --out .", ".: cannot be written: it is a folder"),
    ("gsreal", "gradients x.toml --out pyproject.toml/y", "pyproject.toml is no folder"),
    ("gsreal", "trace gsreal.models.gpt --vocabulary 9 --out .", ".: cannot be written: it is a folder"),
    ("gsreal", "trace gsreal.models.gpt --vocabulary 9 --classes 2 --out y.toml", "--classes: has no effect"),
    ("gsreal", "trace gsreal.models.gpt --image 1x8x8 --padding 1 --out y.toml", "--padding: has no effect"),
    ("gsreal", "trace gsreal.models.gpt --image 1x8x8 --padding 0 --out y.toml", "--padding: has no effect"),
    ("gsreal", "trace gsreal.models.gpt --image 1x8x8 --task masked-token --out y.toml", "--task: has no effect"),
    ("gsreal", "trace gsreal.models.gpt --vocabulary 9 --auto-class A --out y.toml", "--auto-class: has no effect"),
    ("gsreal", "trace x.toml --vocabulary 9 --out y.toml", "--vocabulary: has no effect"),
    ("gsreal", "trace gsreal.models.resnet --image 1x8x8 --classes 0 --out y.toml", "input.classes = 0: "),
    ("analysis", "compare results", "missing option '--out'"),
    ("analysis", "draw x.toml --out y.jpeg", "must end in .png"),
    ("analysis", "draw x.toml --out pyproject.toml/y.png", "pyproject.toml is no folder"),
    ("analysis", "convergence x.toml --out pyproject.toml", "pyproject.toml is no folder"),
    ("analysis", "convergence --seeds many", "invalid value for '--seeds'"),
    ("analysis", "keys x.toml", "x.toml: no such folder"),
    ("analysis", f"keys {'x' * 300}", "no such folder"),
    ("analysis", "literature x.csv --jobs 1000000", "--jobs: 1,000,000 processes: at most"),
    ("analysis", "literature", "no table"),
    ("analysis", "literature --headlines x.csv", "takes neither tables nor --jobs"),
    ("analysis", "literature x.csv --slow", "has no effect without --headlines"),
]
ROOT = Path(__file__).resolve().parents[2]
MODULES = {"gssim": "gssim.cli.commands", "gsreal": "gsreal.cli", "analysis": "analysis.cli"}


def run(monkeypatch, program, arguments):
    """Run a command line that ends with an exit code; return it."""
    if program == "gsreal":
        pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    monkeypatch.setattr(sys, "argv", [program, *arguments.split()])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(MODULES[program]).main()
    return ended.value.code


@pytest.mark.parametrize(("columns", "origins"), [(80, False), (140, True)])
def test_a_model_is_one_line_however_narrow_the_terminal(monkeypatch, capsys, columns, origins):
    """Origins were broken into nine lines of two words in 80 columns."""
    monkeypatch.setattr("gssim.cli.interop_commands.PIPE_WIDTH", columns)
    assert run(monkeypatch, "gssim", "models") == 0
    lines = capsys.readouterr().out.splitlines()[3:-1]
    assert max(map(len, lines)) <= columns
    assert len(lines) == len(shipped_models())
    assert {line.count("│") for line in lines} == {5 if origins else 4}


@pytest.mark.parametrize("program", MODULES)
def test_a_program_says_its_version(monkeypatch, capsys, program):
    assert run(monkeypatch, program, "--version") == 0
    assert capsys.readouterr().out == f"gssim {gssim.__version__}\n"


@pytest.mark.parametrize("program", MODULES)
def test_the_examples_of_the_help_name_options_and_files_that_there_are(program):
    if program == "gsreal":
        pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    app = importlib.import_module(MODULES[program]).app
    commands = {command.name: command.callback for command in app.registered_commands}
    examples = [line for callback in commands.values() for line in EXAMPLE.findall(inspect.getdoc(callback) or "")]
    assert len(examples) >= 3
    for words in map(str.split, examples):
        name = words[len(program_words(program))]
        kinds = [each.annotation for each in inspect.signature(commands[name]).parameters.values()]
        options = [option for kind in kinds for option in kind.__metadata__]
        known = {word for option in options for word in (option.default, *(option.param_decls or ()))}
        assert words[: len(program_words(program))] == program_words(program)
        assert {word for word in words if word.startswith("--")} <= known
        assert all((ROOT / word).exists() for word in words if word.startswith("scenarios/"))


EXAMPLE = re.compile("Example: (.*)")


def program_words(program):
    return ["python", "-m", program] if program == "analysis" else [program]


@pytest.mark.parametrize(("program", "arguments", "message"), REFUSED, ids=[f"{p} {a}" for p, a, _ in REFUSED])
def test_what_cannot_be_read_is_one_line_and_exit_2(monkeypatch, capsys, program, arguments, message):
    assert run(monkeypatch, program, arguments) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith(f"{program}: ")
    assert stderr.endswith("\n")
    assert stderr.count("\n") == 1
    assert message in stderr.lower()


NEED_NOTHING = {"gssim": {"models", "support"}, "analysis": {"keys"}, "gsreal": {"calibrate", "validate"}}


@pytest.mark.parametrize("program", list(MODULES))
def test_every_command_that_needs_something_says_so_without_it(monkeypatch, capsys, program):
    if program == "gsreal":
        pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    commands = importlib.import_module(MODULES[program]).app.registered_commands
    names = {command.name or command.callback.__name__ for command in commands}
    assert names > NEED_NOTHING[program]
    for name in sorted(names - NEED_NOTHING[program]):
        assert run(monkeypatch, program, name) == 2, name
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        (line,) = stderr.splitlines()
        assert line.startswith(f"{program}: "), name


@pytest.mark.parametrize("program", list(MODULES))
def test_help_is_asked_for_and_answered(monkeypatch, capsys, program):
    assert run(monkeypatch, program, "--help") == 0
    stdout, stderr = capsys.readouterr()
    assert "Usage" in stdout
    assert stderr == ""


def test_a_command_line_without_a_command_gives_the_help_and_exit_2(monkeypatch, capsys):
    assert run(monkeypatch, "gssim", "") == 2
    assert "Usage" in "".join(capsys.readouterr())


@pytest.mark.parametrize("program", list(MODULES))
def test_help_fills_its_lines(monkeypatch, capsys, program):
    """Lines of a paragraph end where the next word has no room, and not where those of the code do."""
    if program == "gsreal":
        pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    commands = importlib.import_module(MODULES[program]).app.registered_commands
    for name in sorted(command.name or command.callback.__name__ for command in commands):
        assert run(monkeypatch, program, f"{name} --help") == 0, name
        text = [line.strip() for line in capsys.readouterr().out.partition("╭")[0].splitlines()]
        for line, after in pairwise(text):
            if line and after:
                assert len(line) + len(after.split()[0]) >= 76, f"{name}: {line}"
