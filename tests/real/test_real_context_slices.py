"""Context beside tensor parallelism; training equals one device's, predictions what was counted."""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    SCENARIOS,
    SGD,
    TrainsAsOneDevice,
    in_groups,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=4", "plan.cp=2", "plan.tp=2"]
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


FEW = {4: ("gpt-sequence-zero3-adamw", "llama-ring-ddp-sgd")}
"""Cases that are not slow: each exchange, model and form of tensor parallelism once."""


def case_of(ranks: int, _name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    return {"scenario": scenario_file("small-demo.toml"), "overrides": [star(ranks), *USUAL, *changes]}


world = in_groups({4: on_four_ranks, 8: on_eight_ranks}, FEW, case_of)


class TestTraining(TrainsAsOneDevice):
    def peak_error(self, name, case):
        return 0.002
