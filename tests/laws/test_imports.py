"""Import contracts between packages, and the time and modules that an import costs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "polars", "matplotlib", "sklearn", "transformers", "dask", "gsreal", "analysis")


IN_TURN = ("gssim", "gssim.scenario", "gssim.program.passes", "gssim.simulation.run", "gssim.cli.commands")


@pytest.fixture(scope="module")
def imported():
    """Return what is imported after each of these modules, in one process."""
    code = f"import sys, importlib\nfor name in {IN_TURN}: importlib.import_module(name); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(IN_TURN, map(str.split, ended.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("module", ["gssim", "gssim.cli.commands", "gssim.simulation.run"])
def test_importing_the_simulator_imports_nothing_heavy(module, imported):
    assert [name for name in HEAVY if name in imported[module]] == []


def test_the_words_of_the_project_need_no_event_engine(imported):
    assert "simpy" not in imported["gssim.program.passes"]
    assert "simpy" in imported["gssim.simulation.run"]


def test_the_contracts_of_imports_are_kept():
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stdout
    assert " 0 broken" in ended.stdout


def test_no_import_goes_in_a_circle():
    """Also of types alone, under `TYPE_CHECKING` or inside functions: what two modules need lies below both."""
    grimp, networkx = pytest.importorskip("grimp"), pytest.importorskip("networkx")
    imports = grimp.build_graph("gssim", "gsreal", "analysis", exclude_type_checking_imports=False, cache_dir=None)
    arrows = [
        (module, other) for module in imports.modules for other in imports.find_modules_directly_imported_by(module)
    ]
    circles = networkx.strongly_connected_components(networkx.DiGraph(arrows))
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


NAMED = re.compile(r"(?:gssim|gsreal|analysis)(?:\.[A-Za-z_]\w*)+")


def test_modules_that_the_code_names_in_texts_exist():
    """Ranks are started by the names of modules, which no type checker sees."""
    missing = []
    for file in sorted(path for package in ("gssim", "gsreal", "analysis") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
                module, _, attribute = node.value.rpartition(".")
                places = [ROOT / name.replace(".", "/") for name in (node.value, module)]
                found = places[0].is_dir() or places[0].with_suffix(".py").is_file()
                if not found and not (places[1].with_suffix(".py").is_file() or (places[1] / "__init__.py").is_file()):
                    missing.append(f"{file.relative_to(ROOT)}: {node.value}")
                elif not found and attribute.islower() and places[1].is_dir():
                    text = (places[1] / "__init__.py").read_text(encoding="utf-8")
                    if attribute not in text:
                        missing.append(f"{file.relative_to(ROOT)}: {node.value}")
    assert missing == []
