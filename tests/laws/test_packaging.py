"""The wheel and the source distribution: what they hold, and that the installed package alone answers questions."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gssim", "gsreal", "analysis")
DATA = {".cpp", ".css", ".csv", ".html", ".js", ".json", ".py", ".toml", ".typed"}
"""Endings of the packages' files that a run needs; embedded libraries are packed with their licences."""
DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
SCENARIO = """
name = "mine"

[cluster]
name = "eight H100"
backend = "nccl"
source = "an example"
device_types.h100.preset = "h100-sxm"

[cluster.topology]
kind = "switch"
devices = [{ device = "h100", count = 8 }]
link.preset = "nvlink4-h100"

[workload]
model = "llama3-8b"
global_batch_size = 8
sequence_length = 4096
precision = "bf16"
optimizer = "adamw"

[plan]
method = "fsdp"
"""


def call(*words: object, folder: Path) -> str:
    """Run a command outside of the repository; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def wheel_of(source: Path, out: Path) -> Path:
    call(
        sys.executable, "-m", "pip", "wheel", source,
        "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", out, folder=out.parent,
    )  # fmt: skip
    (wheel,) = out.glob("gssim-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that was built from the source distribution of a copy of the project."""
    folder = tmp_path_factory.mktemp("packaging")
    tree, sources = folder / "tree", folder / "sources"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "measured")
    for name in (*PACKAGES, "scenarios"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    sources.mkdir()
    call(
        sys.executable,
        "-c",
        f"from setuptools import build_meta; build_meta.build_sdist({str(sources)!r})",
        folder=tree,
    )
    (source,) = sources.glob("gssim-*.tar.gz")
    return wheel_of(source, folder / "wheels")


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs' folder of a new environment: with the wheel, and dependencies from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    call(
        sys.executable, "-m", "pip", "--python", programs / "python", "install",
        "--no-deps", "--no-index", "--quiet", wheel, folder=folder,
    )  # fmt: skip
    (packages,) = folder.glob("lib/python*/site-packages")
    # files like __editable__*.pth have no effect in a folder that is added by such a file; nor have those by which this
    # environment may itself take packages from another
    folders = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return programs


LINKED = (ROOT / "gssim/workload/models", ROOT / "gssim/workload/families")


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for folder in (ROOT / package, *LINKED)  # links, which `rglob` does not follow
        for path in folder.rglob("*")
        if (path.suffix in DATA or (path.parent.name == "vendor" and path.is_file()))
        and "__pycache__" not in path.parts
    }
    assert held == ours


@pytest.mark.slow
def test_what_is_imported_is_what_was_installed(clean: Path, tmp_path: Path) -> None:
    code = f"import gssim, gsreal, analysis; print({', '.join(f'{name}.__file__' for name in PACKAGES)}, sep='\\n')"
    for file in call(clean / "python", "-c", code, folder=tmp_path).split():
        assert Path(file).is_relative_to(clean.parent)


@pytest.mark.slow
def test_a_question_is_answered_without_a_file(clean: Path, tmp_path: Path) -> None:
    shown = call(clean / "gssim", "models", folder=tmp_path)
    assert all(file.stem in shown for file in (ROOT / "scenarios/models").glob("*.toml"))
    fits = call(
        clean / "gssim", "fits", "llama3-8b", "--gpu", "h100", "--count", 64, "--plan", "zero3", folder=tmp_path
    )
    assert "llama3-8b on 64 x h100" in fits
    assert ": fits, " in fits


@pytest.mark.slow
def test_a_scenario_of_shipped_models_and_devices_is_predicted(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SCENARIO)
    predicted = json.loads(call(clean / "gssim", "run", "mine.toml", "--json", folder=tmp_path))
    code = "import gssim; print(gssim.simulate(gssim.load('mine.toml', {'plan.method': 'zero2'})).step_time_s)"
    other_s = float(call(clean / "python", "-c", code, folder=tmp_path))
    assert 0 < other_s != predicted["step_time_s"] > 0


@pytest.mark.slow
def test_another_tools_file_is_imported_and_predicted(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SCENARIO)
    cluster = SCENARIO.partition("[cluster]")[2].partition("[workload]")[0].replace("[cluster.", "[")
    (tmp_path / "cluster.toml").write_text(cluster)
    (tmp_path / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    words = ("import", "deepspeed.json", "--model", "llama3-8b", "--cluster", "cluster.toml", "--out", "theirs.toml")
    call(clean / "gssim", *words, folder=tmp_path)
    assert "zero3" in (tmp_path / "theirs.toml").read_text()
    assert "step" in call(clean / "gssim", "run", "theirs.toml", folder=tmp_path)


@pytest.mark.slow  # they import torch and the charts' packages, from elsewhere
def test_the_other_programs_start(clean: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    assert "torch.distributed" in call(clean / "gsreal", "--help", folder=tmp_path)
    assert "Compare predictions" in call(clean / "python", "-m", "analysis", "--help", folder=tmp_path)
    code = "from gsreal.gradient_sharding import Push, shard_gradients; print(Push(threshold=1e-3).threshold)"
    assert call(clean / "python", "-c", code, folder=tmp_path).strip() == "0.001"
