"""The script that `gssim export --to torchrun` writes trains on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gssim.interop import export_scenario
from gssim.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("method", ["ddp", "zero3", "gs"])
def test_an_exported_script_trains(tmp_path, method):
    pytest.importorskip("torch")
    changes = [f"plan.method={method}", "plan.micro_batches=2", "plan.recompute=full"]
    scenario = load_scenario(ROOT / "scenarios/demo.toml", changes, gradients_needed=False).scenario
    (tmp_path / "train.py").write_text(export_scenario(scenario, "torchrun").text)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "STEPS": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.rpartition(" ")[2]) for line in ended.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 2
    assert all(0 < loss < 6 for loss in losses)
