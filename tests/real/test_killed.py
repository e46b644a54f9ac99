"""Killed at random moments, and run again: the same bytes as undisturbed, and nothing left."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from killing import Killer, marked
from strategies import write_files

ENDINGS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""Three of five processes have no time to tidy up."""
SWEEP_TOML = """# Which plan, and which threshold?
scenario = "scenario.toml"
[variants]
ddp = { plan.method = "ddp" }
gs = { plan.method = "gs", axes = { plan.push.threshold = [1e-3, 1e-2, inf] } }
[axes]
run.seed = [0, 1, 2]
"""


@pytest.fixture
def killer(tmp_path, monkeypatch):
    """Return what runs commands, in a working directory with a sweep and with temporary folders of its own."""
    for name in ("temporary", "work"):
        (tmp_path / name).mkdir()
    write_files(tmp_path / "work")
    (tmp_path / "work" / "sweep.toml").write_text(SWEEP_TOML)
    monkeypatch.chdir(tmp_path / "work")
    made = Killer(tmp_path / "temporary")
    yield made
    made.end()
    assert list((tmp_path / "temporary").iterdir()) == []


def contents(folder):
    """Return the bytes of every file below a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kills", [2, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("out", ["table.parquet", pytest.param("results", marks=pytest.mark.slow)])
def test_a_sweep_that_is_killed_and_run_again_leaves_what_an_undisturbed_one_does(tmp_path, killer, out, kills):
    undisturbed, disturbed = Path("undisturbed"), Path("disturbed")
    command = ("sweep", "sweep.toml", "--jobs", 1, "--out")
    killer.run(*command, undisturbed / "first" / out)  # what is read once for all is read
    code, whole_s = killer.run(*command, undisturbed / out)
    assert code == 0
    for path in (undisturbed / "first").rglob("*"):
        path.is_file() and path.unlink()
    expected = contents(undisturbed)
    assert expected
    draw, done, ends = random.Random(f"19 {out}"), 0, {}
    while done < kills:
        again = ("--again",) if draw.random() < 0.2 else ()  # over what is there
        number = draw.choice(ENDINGS)
        code, _ = killer.run(*command, disturbed / out, *again, after_s=draw.uniform(0, whole_s), number=number)
        if code:
            ends[code] = ends.get(code, 0) + 1
            done += 1
        if draw.random() < 0.5 or done == kills:
            assert killer.run(*command, disturbed / out)[0] == 0
            assert contents(disturbed) == expected
            if draw.random() < 0.7:
                for path in disturbed.rglob("*"):
                    path.is_file() and path.unlink()
    print(f"{done} kills of {whole_s:.2f} s each, by exit status: {ends}")
    assert 70 not in ends, (tmp_path / "temporary-kernels.txt").read_text()
    assert set(ends) <= {-signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}


# Real runs ------------------------------------------------------------------------------------------------------------

DEMO = Path(__file__).resolve().parents[2] / "scenarios" / "demo.toml"
LAB = DEMO.with_name("lab-2-hosts.toml")
SMALL = ("workload.global_batch_size=4", "workload.sequence_length=16", "run.warmup_steps=1")
EXACT = (*SMALL, "workload.precision=fp64", "run.steps=11", "plan.method=gs")
TRAINING_KILLS, LAB_KILLS = 40, 20
LIMIT_S = 300


class Command:
    """A command of `gsreal` with temporary folders of its own; its processes are found by their environment."""

    def __init__(self, temporary, *words):
        self.line = [sys.executable, "-c", "from gsreal.cli import main; main()", *map(str, words)]
        self.marker = f"gsreal-test-{uuid.uuid4().hex}"
        self.environment = {
            **os.environ,
            "MARKER": self.marker,
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(DEMO.parents[1]),
        }

    def run(self, after_s=None, number=signal.SIGKILL):
        """Return how it ends, what it says, and after how long; nothing of it runs any more."""
        began_s = time.monotonic()
        process = subprocess.Popen(
            self.line, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            said, talk = process.communicate(timeout=LIMIT_S if after_s is None else after_s)
        except subprocess.TimeoutExpired:
            assert after_s is not None, "it hangs"
            process.send_signal(number)
            said, talk = process.communicate(timeout=LIMIT_S)
        until_s = time.monotonic() + 20
        while marked(self.marker) and time.monotonic() < until_s:
            time.sleep(0.1)
        assert marked(self.marker) == []
        return process.returncode, said, talk, time.monotonic() - began_s


def words(changes):
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture
def temporary(tmp_path):
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.mark.real
@pytest.mark.slow
def test_a_training_that_is_killed_goes_on_as_if_nothing_had_happened(tmp_path, temporary):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    killer = Killer(temporary, "gsreal")
    saved = tmp_path / "saved"

    def train(folder, **how):
        return killer.run("run", DEMO, "--checkpoint", folder, "--every", 2, *words(EXACT), **how)

    def losses(folder):
        return json.loads((folder / "step-00000012" / "progress.json").read_text())["losses"]

    try:
        code, whole_s = train(tmp_path / "undisturbed")
        assert code == 0
        draw, done, ends = random.Random(20), 0, {}
        while done < TRAINING_KILLS:
            code, _ = train(saved, after_s=draw.uniform(0, whole_s), number=draw.choice(ENDINGS))
            assert killer.left() == []
            if code not in (0, 2):  # 2: it has all steps already
                ends[code] = ends.get(code, 0) + 1
                done += 1
            if code in (0, 2) or done == TRAINING_KILLS:
                assert train(saved)[0] in (0, 2)
                assert losses(saved) == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-9)
                assert sorted(os.listdir(saved)) == ["step-00000010", "step-00000012"]
                assert list(temporary.iterdir()) == []
                shutil.rmtree(saved)
    finally:
        killer.end()
    print(f"{done} kills of a training of {whole_s:.1f} s, by exit status: {ends}")


@pytest.mark.real
@pytest.mark.slow
def test_a_lab_that_is_killed_leaves_what_clean_takes_away(tmp_path, temporary):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.lab.building import clean, missing

    if missing() is not None:
        pytest.skip(f"the lab {missing()}")
    out, changes = tmp_path / "out", words((*SMALL, "run.steps=4"))
    code, _, talk, whole_s = Command(temporary, "lab", LAB, "--out", out, *changes).run()
    assert code == 0, talk
    (name,) = os.listdir(out)
    draw, done, ends = random.Random(21), 0, {}
    while done < LAB_KILLS:
        lab = Command(temporary, "lab", LAB, "--out", out, *changes)
        code, *_ = lab.run(draw.uniform(0.1, 1.0) * whole_s, draw.choice(ENDINGS))
        if code:
            ends[code] = ends.get(code, 0) + 1
            done += 1
        assert Command(temporary, "lab", "--clean").run()[0] == 0
        assert clean()[0] == []  # labs of others on this machine are alive
        assert list(temporary.iterdir()) == []
        assert os.listdir(out) == [name]
    assert Command(temporary, "lab", LAB, "--out", out, *changes).run()[0] == 0
    print(f"{done} kills of a lab of {whole_s:.0f} s, by exit status: {ends}")
