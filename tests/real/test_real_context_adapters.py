"""Low-rank adapters on sequences that context-parallel ranks divide, as on one device and as predicted."""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    SGD,
    TrainsAdapters,
    adapters_of,
    in_groups,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from test_real_adapters import traced

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12"]
DDP, ZERO1, ZERO2, ZERO3, GS, GS_Z3, LEVELS = (
    f"plan.method={name}" for name in ("ddp", "zero1", "zero2", "zero3", "gs", "gs_z3", "gs_hier")
)
RING, PLAIN = ["plan.context_exchange=ring"], ["plan.context_exchange=ring", "plan.context_split=plain"]
TWO, FOUR = "plan.cp=2", "plan.cp=4"
REPLICAS = ["plan.dp_replicate=2", "plan.dp_shard=1"]
STAGES = ["plan.pp=2", "plan.micro_batches=2"]
FULL, SELECTIVE, TWICE = "plan.recompute=full", "plan.recompute=selective", "plan.micro_batches=2"
CLIPPED = "workload.clip_norm=0.01"

ON: dict[int, dict[str, list[str]]] = {
    2: {
        "gpt-query-value-ddp-sgd": [*SGD, DDP, TWO],
        "llama-query-value-full-zero3-sgd": [*SGD, ZERO3, TWO, FULL],
        "llama-query-value-selective-zero1-sgd": [*SGD, ZERO1, TWO, SELECTIVE],
        "llama-all-zero3-sgd": [*SGD, ZERO3, TWO],
        "llama-down-ddp-sgd": [*SGD, DDP, TWO],
        "gpt-query-value-selective-zero2-adamw": [*ADAMW64, ZERO2, TWO, SELECTIVE],
        "gpt-query-value-gs-adamw": [*ADAMW64, GS, TWO],
        "gpt-query-value-ring-ddp-sgd": [*SGD, DDP, TWO, *RING],
        "llama-query-value-ring-gs-z3-sgd": [*SGD, GS_Z3, TWO, *RING, CLIPPED],
        "llama-query-value-ring-selective-ddp-sgd": [*SGD, DDP, TWO, *RING, SELECTIVE],
        "llama-all-ring-zero3-sgd": [*SGD, ZERO3, TWO, *RING, TWICE],
        "llama-down-ring-full-zero3-sgd": [*SGD, ZERO3, TWO, *RING, FULL],
        "gpt-all-plain-ring-full-zero3-adamw": [*ADAMW64, ZERO3, TWO, *PLAIN, FULL],
    },
    3: {
        "llama-query-value-ring-ddp-sgd": [*SGD, DDP, "plan.cp=3", *RING],
        "llama-query-value-ring-zero3-sgd": [*SGD, ZERO3, "plan.cp=3", *RING, TWICE],
        "gpt-all-plain-ring-zero2-sgd": [*SGD, ZERO2, "plan.cp=3", *PLAIN],
        "gpt-query-value-ring-gs-sgd": [*SGD, GS, "plan.cp=3", *RING],
    },
    4: {
        "llama-query-value-ddp-sgd": [*SGD, DDP, TWO],
        "llama-query-value-zero1-sgd": [*SGD, ZERO1, TWO],
        "llama-query-value-clipped-zero3-sgd": [*SGD, ZERO3, TWO, CLIPPED],
        "gpt-query-value-hsdp-adamw": [*ADAMW64, ZERO3, TWO, *REPLICAS],
        "gpt-query-value-four-zero2-adamw": [*ADAMW64, ZERO2, FOUR],
        "gpt-query-value-uneven-ddp-adamw": [*ADAMW64, DDP, TWO, "plan.shares.batch=[0.75,0.25]"],
        "llama-query-value-ring-four-zero3-sgd": [*SGD, ZERO3, FOUR, *RING],
        "llama-all-ring-hsdp-sgd": [*SGD, ZERO3, TWO, *RING, *REPLICAS, TWICE],
        "gpt-query-value-plain-ring-full-four-zero3-adamw": [*ADAMW64, ZERO3, FOUR, *PLAIN, FULL],
        "gpt-query-value-hier-adamw": [*ADAMW64, LEVELS, TWO, *REPLICAS],
        "llama-query-value-ring-hier-sgd": [*SGD, LEVELS, TWO, *RING, *REPLICAS, "workload.clip_norm=0.05"],
        "llama-query-value-gs-z3-sgd": [*SGD, GS_Z3, TWO, CLIPPED, TWICE],
        "llama-query-value-staged-sgd": [*SGD, DDP, TWO, *STAGES],
        "gpt-query-value-ring-selective-staged-sgd": [*SGD, DDP, TWO, *RING, *STAGES, SELECTIVE],
        "llama-all-ring-staged-zero2-sgd": [*SGD, ZERO2, TWO, *RING, "plan.pp=2", "plan.micro_batches=3"],
    },
}
FEW = {2: ("llama-query-value-full-zero3-sgd", "llama-down-ring-full-zero3-sgd")}
"""Cases that are not slow: each exchange, with and without gradients of all inputs of the attention. Of Llama's first
block keys get no gradient with `query-value`, none of the attention's inputs does with `down`."""


def case_of(ranks: int, name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    model, adapters = adapters_of(name)
    overrides = [star(ranks), f"workload.model={traced(model)}", *USUAL, adapters, *changes]
    return {"scenario": scenario_file("small-demo.toml"), "overrides": overrides}


world = in_groups(ON, FEW, case_of)


class TestAdapters(TrainsAdapters):
    """Adapters train as on one device, with the predicted collectives and peaks."""
