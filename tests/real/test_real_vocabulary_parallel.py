"""A vocabulary that tensor-parallel ranks divide (embedding, head and loss): collectives, peaks, and training."""

from typing import Any

import pytest
from real_runs import HELPERS, assert_collectives, predicted_peaks, quick, run_cases, scenario_file, selected, star
from test_real_tensor import tiny

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

GPT = ["workload.sequence_length=24", "workload.global_batch_size=12"]
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05"]
TENSOR = ["plan.method=tensor"]
LOSS, EMBEDDING = ["plan.loss_parallel=true"], ["plan.embedding_parallel=true"]
BOTH = [*EMBEDDING, *LOSS]
TIED = f'workload.model="{HELPERS / "models" / "gpt-tied"}.toml"'
SCALED = f'workload.model="{HELPERS / "models" / "of_tests" / "decoder-gemma"}.toml"'
"""Gemma, whose embedding scales what it looks up."""
SEQUENCES = ["plan.sequence_parallel=true", "workload.clip_norm=0.1"]
CASES = {
    "gpt": ("small-demo.toml", [*TENSOR, *LOSS]),
    "gpt-accumulated": ("small-demo.toml", [*TENSOR, *LOSS, "plan.micro_batches=3", "plan.recompute=full"]),
    "gpt-sequences": ("small-demo.toml", [*TENSOR, *LOSS, *SEQUENCES]),
    "gpt-uneven": ("small-demo.toml", ["plan.method=gs_tp", "plan.shares.shards=[0.7,0.3]", *LOSS]),
    "gpt-adamw": ("small-demo.toml", [*TENSOR, *LOSS, "workload.optimizer=adamw", "workload.precision=fp64"]),
    "gpt-bf16": ("small-demo.toml", [*TENSOR, *LOSS, "workload.precision=bf16"]),
    "bert": ("small-bert.toml", [*TENSOR, *LOSS]),  # of whose 257 tokens one rank has one more
    "llama": ("small-demo.toml", [*TENSOR, *LOSS, "llama"]),
    "embedding-gpt": ("small-demo.toml", [*TENSOR, *EMBEDDING]),
    "embedding-gpt-sequences": ("small-demo.toml", [*TENSOR, *EMBEDDING, *SEQUENCES]),
    "embedding-bert": ("small-bert.toml", [*TENSOR, *EMBEDDING, "plan.micro_batches=2"]),
    "both-gpt-bf16": ("small-demo.toml", [*TENSOR, *BOTH, "workload.precision=bf16"]),
    "both-llama": ("small-demo.toml", [*TENSOR, *BOTH, "llama"]),
    "both-uneven": ("small-demo.toml", ["plan.method=gs_tp", "plan.shares.shards=[0.7,0.3]", *BOTH]),
    "tied-gpt": ("small-demo.toml", [*TENSOR, *BOTH, TIED]),
    "tied-gpt-accumulated": ("small-demo.toml", [*TENSOR, *BOTH, TIED, "plan.micro_batches=3", "plan.recompute=full"]),
    "tied-gemma": ("small-demo.toml", [*TENSOR, *BOTH, SCALED]),
    "tied-gpt2-sequences": ("small-demo.toml", [*TENSOR, *BOTH, "gpt2", *SEQUENCES]),
    "tied-gpt2-adamw": (
        "small-demo.toml",
        [*TENSOR, *BOTH, "gpt2", "workload.optimizer=adamw", "workload.precision=fp64"],
    ),
}
FEW = ["gpt-accumulated", "bert", "tied-gpt", "tied-gemma"]
FOUR = {
    "zero3": (
        "small-demo.toml",
        ["plan.method=zero3", "plan.tp=2", "plan.dp_shard=2", "workload.clip_norm=0.1", *LOSS],
    ),
    "ddp": ("small-demo.toml", ["plan.method=ddp", "plan.tp=2", "plan.dp_replicate=2", *LOSS]),
    "gs": (
        "small-demo.toml",
        ["plan.method=gs", "plan.tp=2", "plan.dp_shard=2", "plan.shares.shards=[0.7,0.3]", *BOTH],
    ),
    "tied-zero3": ("small-demo.toml", ["plan.method=zero3", "plan.tp=2", "plan.dp_shard=2", *BOTH, TIED]),
    "tied-ddp": ("small-demo.toml", ["plan.method=ddp", "plan.tp=2", "plan.dp_replicate=2", *BOTH, TIED]),
    "tied-zero1": ("small-demo.toml", ["plan.method=zero1", "plan.tp=2", "plan.dp_replicate=2", *BOTH, "gpt2"]),
}


def case_of(file: str, overrides: list[str], ranks: int = 2) -> dict[str, Any]:
    asked = [f"workload.model={tiny(each)}" if each in ("llama", "gpt2") else each for each in overrides]
    return {"scenario": scenario_file(file), "overrides": [star(ranks), *GPT, *SGD, *asked]}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    wanted = selected(request, {name: {"name": name} for name in CASES})
    cases = {name: case_of(*CASES[name]) for name in wanted}
    return run_cases(tmp_path_factory.mktemp("divided"), cases, ranks=2)


def check(name: str, case: dict[str, Any], found: dict[str, Any]) -> None:
    assert_collectives(case, found)
    narrow = name.endswith("bf16")
    assert found["replicas_equal"]
    assert found["difference"] / found["largest_parameter"] <= (2**-6 if narrow else 1e-5)
    assert predicted_peaks(case) == pytest.approx(found["peaks"], rel=0.015 if narrow else 0.002)


@pytest.mark.parametrize("name", quick(CASES, FEW))
def test_a_divided_vocabulary_trains_as_a_whole_one_with_the_predicted_collectives_and_peaks(seen, name):
    check(name, case_of(*CASES[name]), seen[name])


@pytest.mark.slow
def test_so_does_one_of_three_ranks(tmp_path):
    case = case_of("small-demo.toml", ["plan.method=gs_tp", "plan.shares.shards=[0.5,0.25,0.25]", *BOTH], ranks=3)
    check("three", case, run_cases(tmp_path, {"three": case}, ranks=3)["three"])


@pytest.mark.slow
def test_so_does_it_beside_shards_replicas_and_pushes(tmp_path):
    cases = {name: case_of(*each, ranks=4) for name, each in FOUR.items()}
    found = run_cases(tmp_path, cases, ranks=4)
    for name, case in cases.items():
        check(name, case, found[name])
