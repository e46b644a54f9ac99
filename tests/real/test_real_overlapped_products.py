"""Products of linear maps beside the exchanges of parts of sequences, in a ring, on ranks of this machine.

Training equals one device's; collectives and peaks are the predicted ones. Random points in bf16 are in
`test_real_points.py`.
"""

import pytest
from real_runs import ADAMW64, SGD, TrainsAsOneDevice, in_groups, named_by_model

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

pytestmark = pytest.mark.real

USUAL = [
    "workload.sequence_length=24",
    "workload.global_batch_size=12",
    "plan.sequence_parallel=true",
    "plan.tp_overlap=true",
]
TENSOR, UNEVEN = ["plan.method=tensor"], ["plan.method=gs_tp"]
HALVES = [*UNEVEN, "plan.shares.shards=[0.7,0.3]"]
THREE = [*UNEVEN, "plan.shares.shards=[0.5,0.25,0.25]"]
VOCABULARY = ["plan.loss_parallel=true", "plan.embedding_parallel=true"]
FULL, SMALL = ["plan.recompute=full"], ["workload.global_batch_size=2"]
REPLICAS, SHARDS = (["plan.tp=2", f"plan.{axis}=2"] for axis in ("dp_replicate", "dp_shard"))
STAGES = ["plan.method=pipeline", "plan.tp=2", "plan.pp=2", "plan.micro_batches=3"]
ON = {
    2: {
        "gpt-sgd": [*SGD, *TENSOR],
        "gpt-full-adamw": [*ADAMW64, *TENSOR, *FULL],
        "gpt-small-vocabulary-sgd": [*SGD, *TENSOR, *VOCABULARY, *SMALL],
        "gpt-uneven-adamw": [*ADAMW64, *HALVES, "plan.micro_batches=2"],
        "gpt-uneven-full-adamw": [*ADAMW64, *HALVES, *FULL, "plan.micro_batches=2"],
        "llama-sgd": [*SGD, *TENSOR],
        "llama-full-sgd": [*SGD, *TENSOR, *FULL, "plan.micro_batches=2"],
        "llama-vocabulary-sgd": [*SGD, *TENSOR, *VOCABULARY],
        "llama-full-vocabulary-sgd": [*SGD, *TENSOR, *VOCABULARY, *FULL],
        "bert-adamw": [*ADAMW64, *TENSOR],
        "bert-full-sgd": [*SGD, *TENSOR, *FULL],
        "gpt2-adamw": [*ADAMW64, *TENSOR],
        "gpt2-full-vocabulary-sgd": [*SGD, *TENSOR, *FULL, *VOCABULARY],
        "olmo2-sgd": [*SGD, *TENSOR],
        "gpt_neox-sgd": [*SGD, *TENSOR],
        "gpt_neox-full-sgd": [*SGD, *TENSOR, *FULL],
        "phi-adamw": [*ADAMW64, *TENSOR],
        "gemma-sgd": [*SGD, *TENSOR],
        "falcon-sgd": [*SGD, *TENSOR],
        "gpt-one-vocabulary-sgd": [*SGD, *TENSOR, *VOCABULARY, "workload.global_batch_size=1"],
        "llama-one-vocabulary-sgd": [*SGD, *TENSOR, *VOCABULARY, "workload.global_batch_size=1"],
        "qwen3-sgd": [*SGD, *TENSOR],
        "gpt-gs-sgd": [*SGD, "plan.method=gs", "plan.tp=2"],
        "gpt-ddp-adamw": [*ADAMW64, "plan.method=ddp", "plan.tp=2"],
    },
    3: {
        "gpt-adamw": [*ADAMW64, *THREE],
        "llama-sgd": [*SGD, *THREE],
        "llama-full-sgd": [*SGD, *THREE, *FULL],
        "bert-adamw": [*ADAMW64, *THREE],
    },
    4: {
        "gpt-adamw": [*ADAMW64, *TENSOR],
        "gpt-full-small-vocabulary-sgd": [*SGD, *TENSOR, *FULL, *SMALL, *VOCABULARY],
        "llama-sgd": [*SGD, *TENSOR],
        "bert-adamw": [*ADAMW64, *TENSOR],
        "llama-ddp-sgd": [*SGD, "plan.method=ddp", *REPLICAS],
        "bert-zero1-adamw": [*ADAMW64, "plan.method=zero1", *REPLICAS],
        "llama-zero3-full-sgd": [*SGD, "plan.method=zero3", *SHARDS, *FULL],
        "gpt-gs-adamw": [*ADAMW64, "plan.method=gs", *SHARDS],
        "gpt-gs-no-samples-sgd": [*SGD, "plan.method=gs", *SHARDS, "plan.shares.batch=[1,0]"],
        "bert-gs_z3-sgd": [*SGD, "plan.method=gs_z3", *SHARDS],
        "gpt-pipeline-adamw": [*ADAMW64, *STAGES],
        "llama-pipeline-full-sgd": [*SGD, *STAGES, *FULL],
        "gpt-context-sgd": [*SGD, "plan.method=ddp", "plan.tp=2", "plan.cp=2"],
        "lengths-ring-sgd": [*SGD, "plan.method=ddp", "plan.tp=2", "plan.cp=2", "plan.context_exchange=ring"],
    },
}
FEW = {2: ("gpt-sgd", "gpt2-adamw", "bert-adamw", "llama-full-vocabulary-sgd")}
"""Cases that are not slow: one map, and several, read what is gathered; weights of both layouts; blocks run again."""

world = in_groups(ON, FEW, named_by_model(USUAL))


class TestTraining(TrainsAsOneDevice):
    pass
