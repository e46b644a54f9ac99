"""Blocks cut among ranks, natively and by slices of our own, train as one device does, as predicted."""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    SGD,
    TrainsAsOneDevice,
    in_groups,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from gssim.scenario import load_scenario
from gssim.scenario.tensor_slices import native_tensors
from gssim.workload import unrolled

pytestmark = pytest.mark.real

GPT = ["workload.sequence_length=24", "workload.global_batch_size=12"]
IMAGES = ["workload.precision=fp64", "workload.global_batch_size=12"]
BASE = {"gpt": "small-demo.toml", "bert": "small-bert.toml", "resnet": "small-resnet.toml"}
UNEVEN = ["plan.method=gs_tp", "plan.shares.shards=[0.7,0.3]"]
SLOWED = "run.slowdowns=[{rank=1, first_step=0, compute_ratio=2}]"


TINY = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 256, "use_cache": "false"}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"intermediate_size": 48, "vocab_size": 256, "max_position_embeddings": 64, "use_cache": "false"},
}
"""Configs of Hugging Face's; of Llama's two heads share each one of keys and values."""


def tiny(kind: str) -> Path:
    """Return the file of a small model of Hugging Face's, traced at one sequence length."""
    from small_models import Request, kept

    request = Request(
        model=f"hf:{kind}",
        arguments=tuple(f"{key}={value}" for key, value in TINY[kind].items()),
        name=f"tiny-{kind}",
        vocabulary=256,
        maximum_sequence_length=64,
        task="next-token",
        classes=0,
        auto_class="AutoModelForCausalLM",
        sequence_length=24,
    )
    return kept(request)


FOREACH = ["workload.optimizer_implementation=foreach", "workload.global_batch_size=2"]
"""The optimizer updates DTensors, and then all others, and has the most in memory: samples are few."""


def on_two_ranks() -> dict[str, list[str]]:
    tensor = ["plan.method=tensor"]
    gpt2, llama = (f"workload.model={tiny(kind)}" for kind in ("gpt2", "llama"))
    return {
        "gpt-even-sgd": [*GPT, *SGD, *tensor],
        "gpt-even-recompute-sgd": [*GPT, *SGD, *tensor, "plan.recompute=full"],
        "gpt-even-foreach-adamw": [*GPT, *ADAMW64, *tensor, *FOREACH],
        "gpt-uneven-adamw": [*GPT, *ADAMW64, *UNEVEN],
        "bert-even-adamw": [*GPT, *ADAMW64, *tensor],
        "bert-uneven-selective-sgd": [*GPT, *SGD, *UNEVEN, "plan.recompute=selective"],
        "resnet-even-sgd": [*IMAGES, *SGD, *tensor],
        "gpt-even-slowed-sgd": [*GPT, *SGD, *tensor, SLOWED],
        "gpt-uneven-slowed-sgd": [*GPT, *SGD, *UNEVEN, SLOWED],
        "gpt-hugging-face-adamw": [gpt2, *GPT, *ADAMW64, *UNEVEN],
        "gpt-llama-sgd": [llama, *GPT, *SGD, *tensor],  # it norms in fp32 whatever the precision
        "gpt-one-owner-adamw": [*GPT, *ADAMW64, "plan.method=gs", "plan.tp=2"],
        "gpt-one-owner-z3-adamw": [*GPT, *ADAMW64, "plan.method=gs_z3", "plan.tp=2"],
        "gpt-one-replica-adamw": [*GPT, *ADAMW64, "plan.method=ddp", "plan.tp=2"],
        "gpt-one-replica-zero1-sgd": [llama, *GPT, *SGD, "plan.method=zero1", "plan.tp=2"],
    }


def on_four_ranks() -> dict[str, list[str]]:
    replicas, shards = ["plan.tp=2", "plan.dp_replicate=2"], ["plan.tp=2", "plan.dp_shard=2"]
    return {
        "resnet-uneven-sgd": [*IMAGES, *SGD, "plan.method=gs_tp", "plan.shares.shards=[0.4,0.3,0.2,0.1]"],
        "gpt-ddp-sgd": [*GPT, *SGD, "plan.method=ddp", *replicas, "plan.shares.batch=[0.75,0.25]"],
        "gpt-zero3-adamw": [*GPT, *ADAMW64, "plan.method=zero3", *shards],
        "gpt-gs-sgd": [*GPT, *SGD, "plan.method=gs", *shards, "plan.shares.shards=[0.7,0.3]"],
        "gpt-gs-slowed-sgd": [*GPT, *SGD, "plan.method=gs", "plan.tp=2", "plan.shares.shards=[0.7,0.3]", SLOWED],
    }


FEW = {
    2: (
        *("gpt-even-foreach-adamw", "bert-uneven-selective-sgd", "resnet-even-sgd", "gpt-uneven-slowed-sgd"),
        *("gpt-hugging-face-adamw", "gpt-one-replica-adamw"),
    )
}
"""Cases that are not slow: they cut each kind of model, evenly and not, slow a rank and run again."""


def case_of(ranks: int, name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    return {"scenario": scenario_file(BASE[name.split("-")[0]]), "overrides": [star(ranks), *changes]}


world = in_groups({2: on_two_ranks, 4: on_four_ranks}, FEW, case_of)


class TestTraining(TrainsAsOneDevice):
    def peak_error(self, name, case):
        return 0.01

    def test_what_is_predicted_to_be_dtensors_is(self, world):
        """They cost the host more. Where FSDP2 shards what is cut, all are."""
        for name, case in world[0].items():
            scenario = load_scenario(Path(case["scenario"]), case["overrides"]).scenario
            expected = native_tensors(scenario.workload.model) if scenario.policies.cuts_natively else 0
            whole = sum(len(layer.parameter_names) for layer in unrolled(scenario.workload.model))
            assert world[1][name]["dtensors"] == (whole if "zero3" in name else expected), name
