"""Sweeps go through the simulator and the lab; interrupted they go on, and nothing is left of them.

They need root, `ip` and `tc`; where these are missing, the reason is said.
"""

import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from test_real_lab import emulated_devices, lab, lab_to_its_end, marked, pytestmark, run_in, soon

from gsreal.lab.building import namespaces_of, runs
from gssim.cli import main
from gssim.result import read_result
from gssim.scenario import load_scenario

__all__ = ["pytestmark"]

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
TINY = f"""# Is a sweep of two plans measured as it is predicted?
scenario = "{SCENARIOS / "lab-2-hosts.toml"}"
set = {{ run.steps = 3, run.warmup_steps = 1, workload.global_batch_size = 4, workload.sequence_length = 32 }}
variants.ddp = {{ plan.method = "ddp" }}
variants.gs = {{ plan.method = "gs" }}
"""
SMALL_LIMIT_S = 900


def predict(monkeypatch, sweep, out):
    monkeypatch.setattr(sys, "argv", ["gssim", "sweep", str(sweep), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def results_in(folder):
    """Return (predicted, measured) results by name."""
    found = {}
    for file in folder.glob("*.json"):
        result = read_result(file)
        found.setdefault(result.scenario["name"], {})[result.source] = result
    return {name: (sides["simulated"], sides["measured"]) for name, sides in found.items()}


def assert_nothing_is_left(said, marker):
    built = {line.split()[2].rstrip(":") for line in said.splitlines() if "directed links verified" in line}
    assert not built & set(runs())
    assert not any(map(namespaces_of, built))
    assert soon(lambda: marked(marker) == [])


@pytest.mark.slow  # one lab that trains, and one that is ended, in test_real_lab
def test_a_sweep_that_is_interrupted_goes_on_and_is_as_predicted(tmp_path, monkeypatch):
    sweep, out = tmp_path / "tiny.toml", tmp_path / "out"
    sweep.write_text(TINY)
    predict(monkeypatch, sweep, out)
    # the second lab is verified: the first is finished
    ended, marker = lab_to_its_end(
        "--sweep", sweep, "--out", out, at="verified", times=2, by=signal.SIGINT, forked=True
    )
    said = ended.stderr
    assert ended.returncode == 130, said
    assert "1 of 2 done" in said
    assert_nothing_is_left(said, marker)
    (first,) = out.glob("*.measured.json")
    before = first.stat().st_mtime_ns

    ended, marker = lab_to_its_end("--sweep", sweep, "--out", out, forked=True)
    table, said = ended.stdout, ended.stderr
    assert ended.returncode == 0, said
    assert "1 of 2 are there already" in said
    assert "1 of 1 done" in said
    assert "Is a sweep of two plans measured as it is predicted?" in table
    assert run_in(next(line for line in said.splitlines() if "verified" in line))
    assert_nothing_is_left(said, marker)
    assert first.stat().st_mtime_ns == before
    found = results_in(out)
    assert sorted(found) == ["tiny--ddp", "tiny--gs"]
    devices = emulated_devices(load_scenario(SCENARIOS / "lab-2-hosts.toml").scenario.cluster)
    for predicted, measured in found.values():
        assert measured.provenance["repeat"] == 0
        assert measured.scenario_id == predicted.scenario_id
        assert [entry.key for entry in measured.collectives] == [entry.key for entry in predicted.collectives]
        assert {entry.device for entry in measured.ranks} == devices


def test_a_point_that_no_lab_can_be_is_told_before_any_is_built(tmp_path):
    sweep = tmp_path / "wide.toml"
    sweep.write_text(TINY + f'variants.wide = {{ cluster = "{SCENARIOS / "clusters" / "ring-8.toml"}" }}\n')
    ended, _ = lab_to_its_end("--sweep", sweep, "--out", tmp_path / "out")
    said = ended.stderr
    assert ended.returncode == 2
    assert said.startswith(f"gsreal: {sweep}: wide--wide: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(2 * SMALL_LIMIT_S)
def test_the_small_matrix_is_as_predicted_and_leaves_nothing(tmp_path, monkeypatch):
    sweep = SCENARIOS / "sweeps" / "lab-small.toml"
    predict(monkeypatch, sweep, tmp_path)
    process, marker = lab("--sweep", sweep, "--out", tmp_path)
    _, said = process.communicate(timeout=SMALL_LIMIT_S)
    assert process.returncode == 0, said
    assert_nothing_is_left(said, marker)
    found = results_in(tmp_path)
    assert len(found) == 11
    for predicted, measured in found.values():
        assert [entry.key for entry in measured.collectives] == [entry.key for entry in predicted.collectives]
        peaks = {rank: entry.peak_allocated_bytes for entry in predicted.ranks for rank in entry.ranks}
        for entry in measured.ranks:
            assert entry.peak_allocated_bytes == pytest.approx(peaks[entry.ranks[0]], rel=0.04)
