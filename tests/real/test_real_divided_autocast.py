"""Real: automatic mixed precision where ranks divide blocks, sequences or experts, as on one device and as predicted.

Tolerances of training are those of `test_real_autocast`, whose kernels are torch's own too.
"""

from pathlib import Path

import pytest
from real_runs import (
    assert_predicted_collectives,
    predicted_peaks,
    quick,
    run_cases,
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
PARTS = [*TP, *SEQUENCE, "plan.etp=1", *EP]

BERT = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}
BERT |= {"vocab_size": 257, "max_position_embeddings": 24}
BERT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
SOURCES = {
    "gpt": (*MODELS["gpt"], "next-token"),
    "llama": ("hf:llama", LLAMA, "next-token"),
    "bert": ("hf:bert", BERT, "masked-token"),
    "mixture": ("gsreal.models.mixture", TINY | {"shared_experts": 1}, "next-token"),
    "mixtral": (SMALL["small-heads-mixtral"][0], SIZES | SMALL["small-heads-mixtral"][1], "next-token"),
    "qwen": (SMALL["small-qwen3-moe"][0], SIZES | SMALL["small-qwen3-moe"][1], "next-token"),
}

ON: dict[int, dict[str, list[str]]] = {
    2: {
        "gpt-tensor": [*BF16, *TENSOR],
        "gpt-tensor-fp16-clipped": [*FP16, *TENSOR, *CLIPPED],
        "gpt-tensor-full-twice": [*BF16, *TENSOR, *FULL, *TWICE],
        "llama-tensor-selective": [*BF16, *TENSOR, *SELECTIVE],
        "llama-sequence": [*BF16, *TENSOR, *SEQUENCE],
        "llama-sequence-full": [*BF16, *TENSOR, *SEQUENCE, *FULL],
        "gpt-sequence-selective-fp16": [*FP16, *TENSOR, *SEQUENCE, *SELECTIVE],
        "gpt-tensor-vocabulary": [*BF16, *TENSOR, *VOCABULARY],
        "gpt-sequence-vocabulary": [*BF16, *TENSOR, *SEQUENCE, *VOCABULARY],
        "bert-tensor": [*BF16, *TENSOR],
        "bert-sequence": [*BF16, *TENSOR, *SEQUENCE],
        "llama-uneven": [*BF16, *GS_TP],
        "gpt-owned": [*BF16, *GS, *TP],
        "gpt-context": [*BF16, *DDP, *CP],
        "llama-context-full-zero3": [*BF16, *ZERO3, *CP, *FULL],
        "llama-context-fp16-zero1": [*FP16, *ZERO1, *CP],
        "llama-context-selective-zero2": [*BF16, *ZERO2, *CP, *SELECTIVE],
        "bert-context": [*BF16, *DDP, *CP],
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
    },
}


def model_of(kind: str) -> Path:
    """Return the file of a small model traced under autocast too."""
    from small_models import Request, kept

    source, arguments, task = SOURCES[kind]
    request = Request(
        model=source,
        arguments=tuple(f"{key}={value}" for key, value in arguments.items()),
        name=f"divided-autocast-{kind}",
        vocabulary=256 + (task == "masked-token"),
        maximum_sequence_length=24,
        sequence_length=24,
        task=task,
        autocast=("bf16", "fp16"),
    )
    return kept(request)
