"""Automatic mixed precision beside tensor, context and expert parallelism, as on one device and as predicted.

Tolerances of training are those of `test_real_autocast`, whose kernels are torch's own too.
"""

from pathlib import Path

import pytest
from real_runs import (
    AsPredicted,
    in_groups,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from test_real_adapters import MODELS
from test_real_experts import TINY
from test_real_sliced_adapters import TINY as LLAMA
from test_real_tensor_experts import SIZES, SMALL

pytestmark = pytest.mark.real

SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05"]
BF16, FP16 = ["workload.autocast=bf16"], ["workload.autocast=fp16", "workload.loss_scale=512"]
DDP, ZERO1, ZERO2, ZERO3, TENSOR, PIPELINE = (
    [f"plan.method={name}"] for name in ("ddp", "zero1", "zero2", "zero3", "tensor", "pipeline")
)
GS, GS_Z3, GS_TP = ["plan.method=gs"], ["plan.method=gs_z3"], ["plan.method=gs_tp", "plan.shares.shards=[0.7,0.3]"]
HSDP = ["plan.method=hsdp", "plan.dp_replicate=2", "plan.dp_shard=1"]
TP, SEQUENCE, CP, EP = ["plan.tp=2"], ["plan.sequence_parallel=true"], ["plan.cp=2"], ["plan.ep=2"]
RING = ["plan.context_exchange=ring"]
VOCABULARY = ["plan.embedding_parallel=true", "plan.loss_parallel=true"]
FULL, SELECTIVE, CLIPPED = ["plan.recompute=full"], ["plan.recompute=selective"], ["workload.clip_norm=0.05"]
TWICE, STAGED = ["plan.micro_batches=2"], ["plan.pp=2", "plan.micro_batches=2"]
ROUTER, LOAD = ["workload.expert_routing=router"], ["workload.expert_routing=load", "workload.expert_load.skew=0.7"]
ALONE = ["workload.global_batch_size=1"]
PARTS = [*TP, *SEQUENCE, "plan.etp=1", *EP]

BERT = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}
BERT |= {"vocab_size": 257, "max_position_embeddings": 24}
BERT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
SOURCES = {
    "gpt": MODELS["gpt"],
    "llama": ("hf:llama", LLAMA),
    "bert": ("hf:bert", BERT),
    "mixture": ("gsreal.models.mixture", TINY | {"shared_experts": 1}),
    "mixtral": (SMALL["small-heads-mixtral"][0], SIZES | SMALL["small-heads-mixtral"][1]),
    "qwen": (SMALL["small-qwen3-moe"][0], SIZES | SMALL["small-qwen3-moe"][1]),
}
OF_ALL_LENGTHS = ("llama", "mixture")
"""Models traced at several lengths of sequences: of these parts of sequences beside other parts follow."""
IN_FP16 = ("gpt", "llama", "mixtral")

ON: dict[int, dict[str, list[str]]] = {
    2: {
        "gpt-tensor": [*BF16, *TENSOR],
        "gpt-tensor-fp16-clipped": [*FP16, *TENSOR, *CLIPPED],
        "gpt-tensor-full-twice": [*BF16, *TENSOR, *FULL, *TWICE],
        "llama-tensor-selective": [*BF16, *TENSOR, *SELECTIVE],
        "llama-sequence": [*BF16, *TENSOR, *SEQUENCE],
        "llama-sequence-full": [*BF16, *TENSOR, *SEQUENCE, *FULL],
        "gpt-sequence-selective-fp16": [*FP16, *TENSOR, *SEQUENCE, *SELECTIVE],
        "bert-tensor": [*BF16, *TENSOR],
        "bert-sequence": [*BF16, *TENSOR, *SEQUENCE],
        "llama-uneven": [*BF16, *GS_TP],
        "gpt-owned": [*BF16, *GS, *TP],
        "gpt-context": [*BF16, *DDP, *CP],
        "llama-context-full-zero3": [*BF16, *ZERO3, *CP, *FULL],
        "llama-context-fp16-zero1": [*FP16, *ZERO1, *CP],
        "llama-context-selective-zero2": [*BF16, *ZERO2, *CP, *SELECTIVE],
        "bert-tensor-full-alone": [*BF16, *TENSOR, *FULL, *ALONE],
        "bert-context": [*BF16, *DDP, *CP],
        "bert-pipeline": [*BF16, *PIPELINE, *TWICE, "plan.stages=[2,3]"],
        "bert-pipeline-full": [*BF16, *PIPELINE, *TWICE, *FULL, "plan.stages=[2,3]"],
        "gpt-ring": [*BF16, *DDP, *CP, *RING],
        "llama-ring-selective-zero3": [*BF16, *ZERO3, *CP, *RING, *SELECTIVE],
        "llama-ring-gs_z3": [*BF16, *GS_Z3, *CP, *RING],
        "mixture-experts-ddp": [*BF16, *DDP, *EP, *LOAD],
        "mixture-experts-router-zero3": [*BF16, *ZERO3, *EP, *ROUTER],
        "mixtral-experts-full-zero3": [*BF16, *ZERO3, *EP, *LOAD, *FULL],
        "qwen-experts-selective-zero2": [*BF16, *ZERO2, *EP, *LOAD, *SELECTIVE],
        "mixtral-experts-fp16-zero1": [*FP16, *ZERO1, *EP, *LOAD],
        "mixture-experts-gs": [*BF16, *GS, *EP, *LOAD],
        "mixture-parts-router": [*BF16, *TENSOR, *PARTS, *ROUTER],
        "mixtral-parts-full": [*BF16, *TENSOR, *PARTS, *LOAD, *FULL],
        "mixture-context-experts-router": [*BF16, *DDP, *CP, *EP, *ROUTER],
        "mixture-ring-experts-zero3": [*BF16, *ZERO3, *CP, *RING, *EP, *LOAD],
    },
    3: {
        "gpt-uneven": [*BF16, "plan.method=gs_tp", "plan.shares.shards=[0.5,0.25,0.25]"],
        "llama-ring-zero1": [*BF16, *ZERO1, "plan.cp=3", *RING],
        "bert-ring-full-zero3": [*BF16, *ZERO3, "plan.cp=3", *RING, *FULL],
        "bert-pipeline": [*BF16, *PIPELINE, "plan.micro_batches=3", "plan.stages=[2,1,2]"],
        "mixture-experts-router-ddp": [*BF16, *DDP, "plan.ep=3", *ROUTER],
        "mixture-experts-full-zero3": [*BF16, *ZERO3, "plan.ep=3", *LOAD, *FULL],
    },
    4: {
        "gpt-four": [*BF16, *TENSOR],
        "gpt-tensor-ddp-fp16-clipped": [*FP16, *DDP, *TP, *CLIPPED],
        "llama-sequence-ddp": [*BF16, *DDP, *TP, *SEQUENCE],
        "llama-tensor-zero1": [*BF16, *ZERO1, *TP],
        "gpt-tensor-zero2-twice": [*BF16, *ZERO2, *TP, *TWICE],
        "llama-sequence-full-zero3": [*BF16, *ZERO3, *TP, *SEQUENCE, *FULL],
        "bert-tensor-hsdp": [*BF16, *HSDP, *TP],
        "gpt-tensor-gs": [*BF16, *GS, *TP],
        "llama-sequence-gs_z3": [*BF16, *GS_Z3, *TP, *SEQUENCE],
        "gpt-tensor-staged": [*BF16, *PIPELINE, *TP, *STAGED],
        "llama-tensor-staged-full": [*BF16, *PIPELINE, *TP, *STAGED, *FULL],
        "llama-sequence-staged": [*BF16, *PIPELINE, *TP, *SEQUENCE, *STAGED],
        "llama-context-zero3-clipped": [*BF16, *ZERO3, *CP, *CLIPPED],
        "gpt-context-four-zero2": [*BF16, *ZERO2, "plan.cp=4"],
        "llama-ring-hsdp": [*BF16, *HSDP, *CP, *RING],
        "llama-context-gs": [*BF16, *GS, *CP],
        "bert-staged-zero3": [*BF16, *ZERO3, *STAGED, "plan.stages=[2,3]"],
        "bert-context-staged": [*BF16, *DDP, *CP, *STAGED, "plan.stages=[2,3]"],
        "llama-context-staged": [*BF16, *DDP, *CP, *STAGED],
        "gpt-ring-staged-full": [*BF16, *DDP, *CP, *RING, *STAGED, *FULL],
        "llama-context-tensor": [*BF16, *DDP, *CP, *TP],
        "llama-ring-sequence-full": [*BF16, *ZERO1, *CP, *RING, *TP, *SEQUENCE, *FULL],
        "mixture-experts-ddp": [*BF16, *DDP, *EP, *LOAD],
        "mixture-experts-four-router-zero3": [*BF16, *ZERO3, "plan.ep=4", *ROUTER],
        "qwen-experts-zero3-full": [*BF16, *ZERO3, *EP, *LOAD, *FULL],
        "mixtral-experts-zero1-fp16-clipped": [*FP16, *ZERO1, *EP, *LOAD, *CLIPPED],
        "mixture-experts-hsdp": [*BF16, "plan.method=hsdp", "plan.dp_replicate=2", "plan.dp_shard=2", *EP, *LOAD],
        "mixtral-experts-gs": [*BF16, *GS, *EP, *LOAD],
        "mixture-experts-staged": [*BF16, *DDP, *EP, *LOAD, *STAGED],
        "mixture-parts-router-ddp": [*BF16, *DDP, *PARTS, *ROUTER],
        "qwen-parts-zero3-full": [*BF16, *ZERO3, *PARTS, *LOAD, *FULL],
        "mixture-context-experts-router-zero2": [*BF16, *ZERO2, *CP, *EP, *ROUTER],
        "mixture-ring-parts": [*BF16, *DDP, *CP, *RING, *PARTS, *LOAD],
    },
}


def model_of(kind: str) -> Path:
    """Return the file of a small model traced under autocast too."""
    from small_models import Request, kept

    source, arguments = SOURCES[kind]
    request = Request(
        model=source,
        arguments=tuple(f"{key}={value}" for key, value in arguments.items()),
        name=f"divided-autocast-{kind}",
        vocabulary=257 if kind == "bert" else 256,
        maximum_sequence_length=64 if kind in OF_ALL_LENGTHS else 24,
        sequence_length=None if kind in OF_ALL_LENGTHS else 24,
        task="masked-token" if kind == "bert" else "next-token",
        autocast=("bf16", "fp16") if kind in IN_FP16 else ("bf16",),
    )
    return kept(request)


FEW = {
    2: (
        *("llama-sequence-full", "llama-ring-selective-zero3", "mixture-parts-router", "mixture-ring-experts-zero3"),
        "bert-pipeline",  # the second stage casts its input once
        "bert-tensor-full-alone",  # most is held where the gradients of the shared weight are added
    ),
    3: ("mixture-experts-router-ddp",),  # one of the ranks may have no rows
}
"""Cases that are not slow: sums and parts of sequences, exchanges of heads and rows, in 16 bits and 32; stages."""


def case_of(ranks: int, name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    overrides = [star(ranks), f"workload.model={model_of(name.split('-')[0])}", "workload.sequence_length=24"]
    overrides += [f"workload.global_batch_size={12 if ranks == 3 else 8}", *SGD, *changes]
    return {"scenario": scenario_file("demo.toml"), "overrides": overrides, "onednn": False}


world = in_groups(ON, FEW, case_of)


def is_one_devices(name: str, case: dict) -> bool:
    """Return whether one device would route rows so too: a load is dealt out to each part of a sequence apart."""
    divides_sequences = any(kind in name for kind in ("parts", "context", "ring"))
    return not (divides_sequences and "workload.expert_routing=load" in case["overrides"])


class TestAutocast(AsPredicted):
    def peak_error(self, name, case):
        if "workload.expert_routing=router" in case["overrides"]:
            return None
        return 0.002

    def test_what_training_changes_is_that_of_one_device(self, world):
        for name, seen in world[1].items():
            assert seen["replicas_equal"], name
            if is_one_devices(name, world[0][name]):
                assert seen["difference_ratio"] < (0.001 if "fp16" in name else 0.004), name
