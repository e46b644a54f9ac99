"""Stages whose blocks are cut, or whose sequences are divided: one device's training, exact predictions."""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    HELPERS,
    SGD,
    TrainsAsOneDevice,
    in_groups,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12", "plan.micro_batches=3"]
ON_EIGHT = ["workload.sequence_length=24", "workload.global_batch_size=8", "plan.micro_batches=2"]
CUT, DIVIDED = ["plan.pp=2", "plan.tp=2"], ["plan.pp=2", "plan.cp=2"]
RING = ["plan.context_exchange=ring"]
PIPELINE = [*CUT, "plan.method=pipeline"]
SEQUENCE = ["plan.sequence_parallel=true"]
VOCABULARY = ["plan.embedding_parallel=true", "plan.loss_parallel=true"]
CLIP = ["workload.clip_norm=0.05"]
GPT2 = [f"workload.model={HELPERS}/models/gpt2.toml"]
LLAMA = [f"workload.model={HELPERS}/models/of_tests/tiny-llama.toml"]
GEMMA = [f"workload.model={HELPERS}/models/of_tests/decoder-gemma.toml"]
FULL, GPIPE, INTERLEAVED = (
    ["plan.recompute=full"],
    ["plan.schedule=gpipe"],
    ["plan.schedule=interleaved", "plan.micro_batches=4"],
)
ONE = [*PIPELINE, *GPIPE, "plan.micro_batches=1"]
UNEVEN = ["plan.method=gs_tp", *CUT, "plan.shares.shards=[0.75,0.25]"]

FOUR = {
    "gpt-sgd": [*USUAL, *SGD, *PIPELINE],
    "gpt2-tied-vocabulary-sgd": [*USUAL, *SGD, *PIPELINE, *VOCABULARY, *GPT2],
    "gpt-sequence-full-clipped-adamw": [*USUAL, *ADAMW64, *PIPELINE, *SEQUENCE, *FULL, *CLIP],
    "gpt-sequence-selective-adamw": [*USUAL, *ADAMW64, *PIPELINE, *SEQUENCE, "plan.recompute=selective"],
    "gpt-sequence-embedding-alone-sgd": [*USUAL, *SGD, *PIPELINE, *SEQUENCE, "plan.stages=[1,4]"],
    "gpt-sequence-embedding-alone-vocabulary-selective-adamw": [
        *USUAL, *ADAMW64, *PIPELINE, *SEQUENCE, *VOCABULARY, "plan.stages=[1,4]", "plan.recompute=selective"
    ],
    "gpt-sequence-interleaved-sgd": [*USUAL, *SGD, *PIPELINE, *SEQUENCE, *INTERLEAVED, "plan.stages=[1,1,1,2]"],
    "llama-sequence-embedding-alone-full-sgd": [
        *USUAL, *SGD, *PIPELINE, *SEQUENCE, *LLAMA, *FULL, "plan.stages=[2,4]"
    ],
    "llama-sequence-one-batch-full-sgd": [*USUAL, *SGD, *ONE, *SEQUENCE, *LLAMA, *FULL, "plan.stages=[3,3]"],
    "gemma-sequence-one-batch-selective-sgd": [
        *USUAL, *SGD, *ONE, *SEQUENCE, *GEMMA, "plan.recompute=selective", "plan.stages=[3,3]"
    ],
    "llama-sequence-sgd": [*USUAL, *SGD, *PIPELINE, *SEQUENCE, *LLAMA, "plan.stages=[3,3]"],
    "llama-stages-of-one-block-sgd": [
        *USUAL, *SGD, *LLAMA, "plan.pp=4", "plan.method=pipeline", "plan.stages=[2,1,1,2]"
    ],
    "gpt-gpipe-clipped-sgd": [*USUAL, *SGD, *PIPELINE, *GPIPE, *CLIP],
    "gpt-interleaved-sgd": [*USUAL, *SGD, *PIPELINE, *INTERLEAVED],
    "gpt-uneven-sgd": [*USUAL, *SGD, *UNEVEN],
    "gpt2-full-adamw": [*USUAL, *ADAMW64, *PIPELINE, *FULL, *GPT2],
    "gs-ring-full-adamw": [*USUAL, *ADAMW64, *DIVIDED, *RING, *FULL, "plan.method=gs"],
    "gs-heads-sgd": [*USUAL, *SGD, *DIVIDED, "plan.method=gs"],
    "gpt2-ddp-heads-gpipe-sgd": [*USUAL, *SGD, *DIVIDED, *GPIPE, *GPT2, "plan.method=ddp"],
    "zero1-plain-ring-clipped-adamw": [
        *USUAL, *ADAMW64, *DIVIDED, *RING, *CLIP, "plan.method=zero1", "plan.context_split=plain"
    ],
    "zero2-ring-sgd": [*USUAL, *SGD, *DIVIDED, *RING, "plan.method=zero2"],
}  # fmt: skip
EIGHT = {
    "ddp-uneven-clipped-adamw": [
        *ON_EIGHT, *ADAMW64, *CUT, *CLIP, "plan.method=ddp", "plan.shares.batch=[0.75,0.25]"
    ],
    "zero1-tied-vocabulary-clipped-sgd": [*ON_EIGHT, *SGD, *CUT, *CLIP, *VOCABULARY, *GPT2, "plan.method=zero1"],
    "zero2-sgd": [*ON_EIGHT, *SGD, *CUT, "plan.method=zero2"],
    "zero3-sequence-vocabulary-full-adamw": [
        *ON_EIGHT, *ADAMW64, *CUT, *SEQUENCE, *VOCABULARY, *FULL, "plan.method=zero3"
    ],
    "zero3-sequence-embedding-alone-adamw": [
        *ON_EIGHT, *ADAMW64, *CUT, *SEQUENCE, "plan.method=zero3", "plan.stages=[1,4]"
    ],
    "gs-sequence-embedding-alone-sgd": [
        *ON_EIGHT, *SGD, *CUT, *SEQUENCE, *LLAMA, "plan.method=gs", "plan.stages=[2,4]"
    ],
    "ddp-heads-sequence-embedding-alone-sgd": [
        *ON_EIGHT, *SGD, *CUT, *SEQUENCE, "plan.cp=2", "plan.method=ddp", "plan.stages=[1,4]"
    ],
    "zero3-clipped-adamw": [*ON_EIGHT, *ADAMW64, *CUT, *CLIP, "plan.method=zero3"],
    "ddp-ring-cut-sequence-vocabulary-sgd": [
        *ON_EIGHT, *SGD, *CUT, "plan.cp=2", *RING, *SEQUENCE, *VOCABULARY, "plan.method=ddp"
    ],
    "zero3-heads-cut-sequence-clipped-adamw": [
        *ON_EIGHT, *ADAMW64, *CUT, "plan.cp=2", *SEQUENCE, *CLIP, "plan.method=zero3"
    ],
    "gs-heads-uneven-adamw": [
        *ON_EIGHT, *ADAMW64, *DIVIDED, "plan.method=gs", "plan.dp_shard=2", "plan.shares.batch=[0.75,0.25]"
    ],
    "gs-cut-tied-vocabulary-uneven-adamw": [
        *ON_EIGHT, *ADAMW64, *CUT, *VOCABULARY, *GPT2, "plan.method=gs", "plan.shares.shards=[0.7,0.3]"
    ],
    "gs-cut-sequence-full-sgd": [*ON_EIGHT, *SGD, *CUT, *SEQUENCE, *FULL, "plan.method=gs", "plan.bucket_bytes=60000"],
    "zero3-cut-interleaved-full-adamw": [
        *[*ON_EIGHT, *ADAMW64, *CUT, "plan.schedule=interleaved", "plan.method=zero3", "plan.recompute=full"]
    ],
    "gs-cut-interleaved-adamw": [*ON_EIGHT, *ADAMW64, *CUT, "plan.schedule=interleaved", "plan.method=gs"],
    "gs-cut-tied-sequence-sgd": [*ON_EIGHT, *SGD, *CUT, *SEQUENCE, *GEMMA, "plan.method=gs", "plan.recompute=full"],
    "zero3-ring-adamw": [*ON_EIGHT, *ADAMW64, *DIVIDED, *RING, "plan.method=zero3", "plan.dp_shard=2"],
}  # fmt: skip
FEW = {
    4: (
        "gpt2-tied-vocabulary-sgd",
        "gpt-sequence-embedding-alone-sgd",
        "llama-sequence-embedding-alone-full-sgd",
        "llama-sequence-one-batch-full-sgd",
        "gpt-sequence-full-clipped-adamw",
        "gs-ring-full-adamw",
    )
}
"""Cases that are not slow: own slices and DTensors, whole sequences and parts of each kind, a divided vocabulary,
and stages that begin with the first block."""


def case_of(ranks: int, _name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    return {"scenario": scenario_file("small-demo.toml"), "overrides": [star(ranks), *changes]}


world = in_groups({4: FOUR, 8: EIGHT}, FEW, case_of)


class TestTraining(TrainsAsOneDevice):
    def peak_error(self, name, case):
        return 0.002
