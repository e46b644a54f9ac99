"""Sums of inputs' gradients beside the products of weights' gradients, on ranks of this machine.

Training equals one device's; collectives and peaks are the predicted ones.
"""

import pytest
from real_runs import ADAMW64, SGD, TrainsAsOneDevice, in_groups, named_by_model

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12", "plan.async_input_gradients=true"]
TENSOR, PARTS, UNEVEN = ["plan.method=tensor"], ["plan.sequence_parallel=true"], ["plan.method=gs_tp"]
HALVES = [*UNEVEN, "plan.shares.shards=[0.7,0.3]"]
THREE = [*UNEVEN, "plan.shares.shards=[0.5,0.25,0.25]"]
VOCABULARY = ["plan.loss_parallel=true", "plan.embedding_parallel=true"]
REPLICAS, SHARDS = (["plan.tp=2", f"plan.{axis}=2"] for axis in ("dp_replicate", "dp_shard"))
ON = {
    2: {
        "gpt-sgd": [*SGD, *TENSOR],
        "gpt-parts-adamw": [*ADAMW64, *TENSOR, *PARTS],
        "llama-sgd": [*SGD, *TENSOR],
        "llama-parts-sgd": [*SGD, *TENSOR, *PARTS],
        "bert-sgd": [*SGD, *TENSOR],
        "bert-parts-adamw": [*ADAMW64, *TENSOR, *PARTS],
        "gpt-vocabulary-adamw": [*ADAMW64, *TENSOR, *VOCABULARY],
        "llama-parts-vocabulary-sgd": [*SGD, *TENSOR, *PARTS, *VOCABULARY],
        "gpt-uneven-full-adamw": [*ADAMW64, *HALVES, "plan.recompute=full", "plan.micro_batches=2"],
        "llama-parts-full-sgd": [*SGD, *TENSOR, *PARTS, "plan.recompute=full", "plan.micro_batches=2"],
        "llama-parts-selective-sgd": [*SGD, *TENSOR, *PARTS, "plan.recompute=selective"],
        "gpt2-sgd": [*SGD, *TENSOR],
        "gpt2-parts-adamw": [*ADAMW64, *TENSOR, *PARTS],
        "olmo2-sgd": [*SGD, *TENSOR],
        "olmo2-parts-sgd": [*SGD, *TENSOR, *PARTS],
        "gpt_neox-adamw": [*ADAMW64, *TENSOR],
        "gpt_neox-parts-sgd": [*SGD, *TENSOR, *PARTS],
        "phi-parts-sgd": [*SGD, *TENSOR, *PARTS],
        "opt-sgd": [*SGD, *TENSOR],
        "gemma-parts-sgd": [*SGD, *TENSOR, *PARTS],
        "falcon-sgd": [*SGD, *TENSOR],
        # the peaks of these are in the backward of the maps themselves
        "gpt-parts-small-batch-sgd": [*SGD, *TENSOR, *PARTS, *VOCABULARY, "workload.global_batch_size=2"],
        "llama-parts-full-vocabulary-sgd": [*SGD, *TENSOR, *PARTS, *VOCABULARY, "plan.recompute=full"],
        "gpt-gs-sgd": [*SGD, "plan.method=gs", "plan.tp=2"],
        "gpt-ddp-parts-adamw": [*ADAMW64, "plan.method=ddp", "plan.tp=2", *PARTS],
    },
    3: {
        "gpt-adamw": [*ADAMW64, *THREE],
        "gpt-parts-sgd": [*SGD, *THREE, *PARTS],
        "llama-sgd": [*SGD, *THREE],
        "llama-parts-sgd": [*SGD, *THREE, *PARTS],
        "bert-adamw": [*ADAMW64, *THREE],
        "bert-parts-sgd": [*SGD, *THREE, *PARTS],
    },
    4: {
        "gpt-adamw": [*ADAMW64, *TENSOR],
        # their peaks would be higher if a sum were a copy
        "llama-full-vocabulary-sgd": [*SGD, *TENSOR, *VOCABULARY, "plan.recompute=full"],
        "llama-selective-vocabulary-sgd": [*SGD, *TENSOR, *VOCABULARY, "plan.recompute=selective"],
        "llama-parts-sgd": [*SGD, *TENSOR, *PARTS],
        "bert-parts-adamw": [*ADAMW64, *TENSOR, *PARTS],
        "gpt-ddp-sgd": [*SGD, "plan.method=ddp", *REPLICAS],
        "llama-ddp-parts-sgd": [*SGD, "plan.method=ddp", *REPLICAS, *PARTS],
        "bert-zero3-adamw": [*ADAMW64, "plan.method=zero3", *SHARDS],
        "llama-zero3-parts-sgd": [*SGD, "plan.method=zero3", *SHARDS, *PARTS],
        "gpt-gs-parts-adamw": [*ADAMW64, "plan.method=gs", *SHARDS, *PARTS],
        "bert-z3-parts-sgd": [*SGD, "plan.method=gs_z3", *SHARDS, *PARTS],
        "gpt-pipeline-sgd": [*SGD, "plan.method=pipeline", "plan.tp=2", "plan.pp=2", "plan.micro_batches=3"],
        "llama-pipeline-parts-sgd": [
            *SGD,
            *PARTS,
            *["plan.method=pipeline", "plan.tp=2", "plan.pp=2", "plan.micro_batches=3"],
        ],
        "gpt-context-adamw": [*ADAMW64, "plan.method=ddp", "plan.tp=2", "plan.cp=2"],
        "gpt-context-parts-sgd": [*SGD, "plan.method=ddp", "plan.tp=2", "plan.cp=2", *PARTS],
    },
}
FEW = {2: ("gpt-sgd", "gpt2-parts-adamw", "bert-parts-adamw", "llama-parts-full-vocabulary-sgd")}
"""Cases that are not slow: one map, and several, read what is summed; weights of both layouts; blocks run again."""

world = in_groups(ON, FEW, named_by_model(USUAL))


class TestTraining(TrainsAsOneDevice):
    pass
