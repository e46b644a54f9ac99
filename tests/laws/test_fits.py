"""`gssim fits` and `gssim models`: one line, an exit code, and no need of the repository."""

import json
import tomllib
from pathlib import Path

import commands
import pytest

from gssim.cluster import Cluster
from gssim.errors import UserError
from gssim.interop import SERVERS, find_model, server_of, usual_cluster
from gssim.interop.models import HUGGING_FACE_IDS
from gssim.scenario import load_scenario
from gssim.units import validated
from gssim.workload import shipped_models

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("llama3-8b", "--gpu", "h100", "--count", "8", "--set", "plan.recompute=full"), 0, "fits, 45."),
        (("llama3-8b", "--gpu", "h100"), 3, "does not fit, 101.97 GiB too much (largest: optimizer); with "),
        (("llama3-8b", "--gpu", "a100", "--count", "8", "--plan", "ddp"), 3, "with plan.method="),
        (("gpt2-124m", "--gpu", "t4", "--plan", "single"), 0, "under single (fp16, adamw, 1 sample of 1024 tokens)"),
        (("resnet-50", "--gpu", "v100", "--count", "2", "--plan", "ddp"), 0, "fits"),
    ],
)
def test_fits(tmp_path, arguments, code, said):
    ended = commands.run("gssim", "fits", *arguments, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert len(ended.stdout.splitlines()) == 1
    assert said in ended.stdout


def test_results_and_models_are_printed_as_json(tmp_path):
    ended = commands.run("gssim", "fits", "llama3-8b", "--gpu", "h100", "--json", folder=tmp_path)
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["fits"], found["schema"]) == (3, False, "gssim.result/1")
    models = json.loads(commands.run("gssim", "models", "--json", folder=tmp_path).stdout)
    assert {each["name"]: each["parameters"] for each in models}["gpt2-124m"] == 124_439_808


@pytest.mark.parametrize(
    ("gpu", "same"),
    [("H100", "h100"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("A100-SXM4-80GB", "a100-sxm-80"), ("A10", "a10")],
)
def test_a_gpu_is_known_by_capitals_and_by_its_name_in_nvidia_smi(gpu, same):
    assert server_of(gpu) == server_of(same)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lama3-8b", "--gpu", "h100"), "did you mean llama3-8b?"),
        (("llama3-8b", "--gpu", "h1000"), "no such GPU"),
        (("llama3-8b", "--gpu", "h100", "--count", "9"), "a multiple of 8"),
        (("llama3-8b", "--gpu", "h100", "--count", "0"), "--count 0"),
        (("llama3-8b", "--gpu", "h100", "--plan", "zero5"), "plan.method = 'zero5'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, said):
    ended = commands.run("gssim", "fits", *arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert said in ended.stderr


@pytest.mark.parametrize("gpu", SERVERS)
def test_usual_clusters_are_clusters(gpu):
    size = SERVERS[gpu].devices
    for count in (1, 2, size, 2 * size):
        cluster = validated(Cluster, usual_cluster(gpu, count), file="usual")
        assert len(cluster.devices) == count


def test_shipped_models_are_those_of_the_scenarios(tmp_path):
    names = {path.stem for path in (ROOT / "scenarios/models").glob("*.toml")}
    assert set(shipped_models()) == names
    assert find_model("llama3-8b").model.elements == 8_030_261_248
    ended = commands.run("gssim", "models", folder=tmp_path)
    assert ended.returncode == 0
    assert all(name in ended.stdout for name in names)
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "models/*.toml" in package_data["gssim.workload"]


def test_a_hugging_face_id_names_the_shipped_model_of_its_sizes():
    assert find_model("meta-llama/Llama-3.1-8B").written == "llama3.1-8b"
    assert find_model("Qwen/Qwen3-30B-A3B").path == shipped_models()["qwen3-30b-a3b"]
    assert set(HUGGING_FACE_IDS) <= set(shipped_models())
    with pytest.raises(UserError, match=r"--model meta-llama/Llama-3-8B: .*; did you mean llama3-8b\?"):
        find_model("meta-llama/Llama-3-8B")


def test_a_scenario_may_name_a_shipped_model(tmp_path):
    by_path = load_scenario(ROOT / "scenarios/llama3-8b-fsdp.toml").scenario
    text = (ROOT / "scenarios/llama3-8b-fsdp.toml").read_text().replace("models/llama3-8b.toml", "llama3-8b")
    (tmp_path / "x.toml").write_text(text.replace("clusters/", f"{ROOT}/scenarios/clusters/"))
    assert load_scenario(tmp_path / "x.toml").scenario.scenario_id == by_path.scenario_id
