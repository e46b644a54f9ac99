"""Published steps as a user would ask for them: presets, shipped models, nothing else; within ten percent."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from analysis.literature.platforms import cluster_of, platforms, sixteen_bits_of
from gssim.cluster import DeviceType
from gssim.cluster.presets import expanded
from gssim.scenario import load_scenario
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
A100 = """
[cluster]
name = "8 A100"
backend = "nccl"
nccl = "ampere-dgx-a100"
source = "a node of vTrain's"
device_types.a100 = "a100-sxm-80"

[cluster.topology]
kind = "servers"

[[cluster.topology.servers]]
count = 1
device = "a100"
devices = 8
inside = "nvswitch"
inside_link = "nvlink3-a100"
nics = 4
nic_link = "ib-hdr-200"
pcie_link = "pcie4x16"

[workload]
model = "{models}/gpt3-1.3b.toml"
global_batch_size = 32
sequence_length = 1024
precision = "fp16"
optimizer = "adam"
optimizer_implementation = "fused"

[plan]
method = "ddp"
overlap = false
recompute = "full"
micro_batches = 2
"""
V100 = """
[cluster]
name = "one V100"
backend = "nccl"
source = "one of a DGX-1"
device_types.v100 = "v100-sxm2-32"

[cluster.topology]
kind = "servers"
servers = [{{ count = 1, device = "v100", devices = 1 }}]

[workload]
model = "{models}/bert-large.toml"
global_batch_size = 4096
sequence_length = 128
precision = "fp32"
optimizer = "adam"
optimizer_implementation = "fused"

[plan]
method = "single"
micro_batches = 128
"""


def step_s(text: str, folder: Path) -> float:
    """Return the predicted step of a scenario that is written so."""
    file = folder / "scenario.toml"
    file.write_text(text.format(models=SCENARIOS / "models"))
    return simulate(load_scenario(file)).result.step_time_s


def test_llama_3_8b_under_fsdp_on_eight_of_torchtitans_h100():
    """5,762 tokens/s a GPU and 82.4 GiB, uncompiled: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md."""
    result = simulate(load_scenario(SCENARIOS / "llama3-8b-fsdp.toml")).result
    assert result.step_time_s == pytest.approx(2 * 8192 / 5762, rel=0.1)
    assert result.ranks[0].peak_reserved_bytes == pytest.approx(82.4 * 2**30, rel=0.1)


def test_what_a_compiler_saves_of_llama_3_8b_on_torchtitans_h100():
    """6,667 instead of 5,762 tokens/s a GPU, and 77.0 instead of 82.4 GiB: torchtitan, the same table, compiled.

    Both rows recompute every second product too; here neither does.
    """
    compiled = ["workload.model=llama3-8b-compiled-selective", "plan.recompute=none"]
    plain, fused = (simulate(load_scenario(SCENARIOS / "llama3-8b-fsdp.toml", each)).result for each in ([], compiled))
    assert fused.step_time_s / plain.step_time_s == pytest.approx(5762 / 6667, rel=0.08)
    saved = plain.ranks[0].peak_reserved_bytes - fused.ranks[0].peak_reserved_bytes
    assert saved == pytest.approx((82.4 - 77.0) * 2**30, rel=0.08)


def test_a_gpt_of_1_3_billion_parameters_on_eight_a100(tmp_path):
    """303.76 ms: vTrain (Bang et al. 2024), single-node table, row 13: width 2048, 24 layers, 8 replicas, fp16."""
    assert step_s(A100, tmp_path) == pytest.approx(0.303756, rel=0.1)


def test_bert_large_on_one_v100(tmp_path):
    """50 sequences/s of 128 tokens: NVIDIA, DeepLearningExamples, BERT for PyTorch, one V100 of 32 GB, FP32."""
    assert step_s(V100, tmp_path) == pytest.approx(4096 / 50, rel=0.1)


@pytest.mark.parametrize("name", platforms())
def test_what_is_scored_is_the_preset_that_users_name(name):
    gpu = platforms()[name].names[0]
    scored = cluster_of(((gpu, 1),), sixteen_bits_of(gpu)).device_types["gpu"]
    assert scored == TypeAdapter(DeviceType).validate_python(expanded("devices", platforms()[name].device))
