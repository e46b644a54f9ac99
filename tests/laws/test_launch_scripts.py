"""Launch scripts for several hosts: valid in their launcher's language, equal ranks, the command of the scenario."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from gssim.errors import UserError
from gssim.scenario import load_scenario

pytest.importorskip("torch")

from gsreal.run.script import LAUNCHERS, launch_script

ROOT = Path(__file__).resolve().parents[2]
GPUS = ROOT / "scenarios/llama3-8b-fsdp.toml"
CHANGES = [f"cluster={ROOT}/scenarios/clusters/two-dgx-h100.toml"]


def script(launcher, *, path=GPUS, changes=CHANGES, image=None):
    scenario = load_scenario(path, changes, gradients_needed=False).scenario
    return launch_script(scenario, path, changes, launcher, image=image)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_the_scenario_on_its_hosts(launcher):
    text = script(launcher, image="registry/image:1" if launcher == "kubernetes" else None)
    assert f"gsreal run {GPUS} --set cluster=" in re.sub(r"['\"\\]", "", text)  # a path with spaces is quoted
    assert "--rdzv-backend c10d" in text
    assert "$HEAD:29500" in text.replace("\\", "")
    assert "--node-rank" not in text  # which torchrun ignores under c10d


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_scripts_of_a_shell_are_valid(tmp_path, launcher):
    (tmp_path / "x.sh").write_text(script(launcher))
    ended = subprocess.run([shutil.which("bash"), "-n", tmp_path / "x.sh"], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_slurm_starts_one_torchrun_on_each_host():
    text = script("slurm")
    assert "#SBATCH --nodes 2\n#SBATCH --ntasks-per-node 1\n#SBATCH --gpus-per-node 8\n" in text
    assert "--nnodes 2 --nproc-per-node 8" in text
    assert "resolves to the loopback" in text
    assert "SLURM_LAUNCH_NODE_IPADDR" not in text  # the submitting node's, on some clusters


def test_a_first_host_on_the_loopback_is_refused(tmp_path):
    (tmp_path / "x.sh").write_text(script("torchrun"))
    bash = shutil.which("bash")
    environment = {"HEAD": "localhost", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run([bash, tmp_path / "x.sh"], capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, "resolves to the loopback" in ended.stderr) == (1, True)


def test_kubernetes_and_skypilot_are_yaml():
    service, job = yaml.safe_load_all(script("kubernetes", image="registry/image:1"))
    spec = job["spec"]["template"]["spec"]
    assert (job["spec"]["completions"], spec["subdomain"]) == (2, service["metadata"]["name"])
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    task = yaml.safe_load(script("skypilot"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert json.dumps(task["run"]).count("torchrun") == 1


def test_what_cannot_be_launched_is_refused():
    with pytest.raises(UserError, match="no such launcher"):
        script("pbs")
    with pytest.raises(UserError, match="--image"):
        script("kubernetes")
    with pytest.raises(UserError, match=r"hosts have \[1, 8\] ranks"):
        script("slurm", changes=[*CHANGES, "plan.ranks=9", "workload.global_batch_size=9"])
