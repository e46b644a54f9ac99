"""Real: context beside tensor parallelism; training equals one device's, predictions what was counted."""

from pathlib import Path

import pytest
from real_runs import (
    SCENARIOS,
    assert_losses_of_one_device,
    assert_parameters_of_one_device,
    assert_predicted_collectives,
    predicted_peaks,
    quick,
    run_cases,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=4", "plan.cp=2", "plan.tp=2"]
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05", "workload.weight_decay=0.01"]
ADAMW64 = ["workload.optimizer=adamw", "workload.precision=fp64", "workload.learning_rate=1e-3"]
RING, SEQUENCE = ["plan.context_exchange=ring"], ["plan.sequence_parallel=true"]
GPT = [f"workload.model={SCENARIOS}/models/gpt-byte-1m.toml"]


def llama() -> list[str]:
    """Return the model of a small Llama traced at all lengths: two heads share each of four keys and values."""
    from small_models import Request, kept

    config = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    config |= {"intermediate_size": 48, "vocab_size": 256, "max_position_embeddings": 64}
    request = Request(
        model="hf:llama",
        arguments=(*(f"{key}={value}" for key, value in config.items()), "use_cache=false"),
        name="lengths-llama",
        vocabulary=256,
        maximum_sequence_length=64,
        task="next-token",
        classes=0,
        auto_class="AutoModelForCausalLM",
    )
    return [f"workload.model={Path(kept(request))}"]


def on_four_ranks() -> dict[str, list[str]]:
    return {
        "gpt-sequence-zero3-adamw": [*GPT, *ADAMW64, *SEQUENCE, "plan.method=zero3", "workload.clip_norm=0.05"],
        "llama-ring-ddp-sgd": [*llama(), *SGD, *RING, "plan.method=ddp", "plan.micro_batches=2"],
        "gpt-ddp-sgd": [*GPT, *SGD, "plan.method=ddp", "workload.clip_norm=0.05"],
        "gpt-zero1-adamw": [*GPT, *ADAMW64, "plan.method=zero1", "plan.recompute=full"],
        "gpt-ring-sequence-zero1-sgd": [*GPT, *SGD, *RING, *SEQUENCE, "plan.method=zero1"],
        "gpt-sequence-vocabulary-zero2-adamw": [
            *[*GPT, *ADAMW64, *SEQUENCE, "plan.method=zero2", "plan.micro_batches=2"],
            *["plan.embedding_parallel=true", "plan.loss_parallel=true", "plan.recompute=selective"],
        ],
        "llama-sequence-zero3-sgd": [*[*llama(), *SGD, *SEQUENCE, "plan.method=zero3", "plan.recompute=selective"]],
        "llama-ring-sequence-full-zero3-sgd": [
            *[*llama(), *SGD, *RING, *SEQUENCE, "plan.method=zero3", "plan.recompute=full"],
            "workload.clip_norm=0.05",
        ],
        "llama-plain-ring-zero2-sgd": [*llama(), *SGD, *RING, "plan.context_split=plain", "plan.method=zero2"],
        "gpt-gs-sgd": [*GPT, *SGD, "plan.method=gs"],
        "gpt-ring-sequence-gs-z3-adamw": [*GPT, *ADAMW64, *RING, *SEQUENCE, "plan.method=gs_z3"],
    }


def on_eight_ranks() -> dict[str, list[str]]:
    return {
        "gpt-ring-hsdp-adamw": [
            *[*GPT, *ADAMW64, *RING, "plan.method=zero3", "plan.dp_replicate=2", "plan.dp_shard=1"],
            "workload.clip_norm=0.05",
        ],
        "gpt-sequence-uneven-ddp-sgd": [*GPT, *SGD, *SEQUENCE, "plan.method=ddp", "plan.shares.batch=[0.75,0.25]"],
        "llama-zero3-sgd": [*llama(), *SGD, *SEQUENCE, "plan.method=zero3", "plan.dp_shard=2"],
    }


FEW = ("gpt-sequence-zero3-adamw", "llama-ring-ddp-sgd")
"""Cases that are not slow: each exchange, model and form of tensor parallelism once."""
GROUPS = {
    "4": (4, {name: case for name, case in on_four_ranks().items() if name in FEW}),
    "4-others": (4, {name: case for name, case in on_four_ranks().items() if name not in FEW}),
    "8": (8, on_eight_ranks()),
}


@pytest.fixture(scope="module", params=quick(GROUPS, ["4"]))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases of a group in one launch; return (cases, what they showed)."""
    ranks, group = GROUPS[request.param]
    cases = {
        name: {"scenario": scenario_file("small-demo.toml"), "overrides": [star(ranks), *USUAL, *overrides]}
        for name, overrides in group.items()
    }
    return cases, run_cases(tmp_path_factory.mktemp(f"ranks{request.param}"), cases, ranks=ranks)


def test_parameters_after_five_steps_equal_those_of_one_device(world: tuple[dict, dict]) -> None:
    assert_parameters_of_one_device(world[1])


def test_losses_are_those_of_one_device(world: tuple[dict, dict]) -> None:
    assert_losses_of_one_device(world[1])


def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(world: tuple[dict, dict]) -> None:
    assert_predicted_collectives(*world)


def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict]) -> None:
    for name, case in world[0].items():
        assert predicted_peaks(case) == pytest.approx(world[1][name]["peaks"], rel=0.002), name
