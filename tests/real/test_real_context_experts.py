"""Divided experts on parts of sequences; predictions are what was counted, training with the router's own choices
equals one device's.
"""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    HELPERS,
    SCENARIOS,
    SGD,
    RoutesAsPredicted,
    in_groups,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=4", "plan.cp=2"]
ROUTER, LOAD = ["workload.expert_routing=router"], ["workload.expert_routing=load"]
SKEWED = [*LOAD, "workload.expert_load.skew=0.7"]
MIXTURE = [f"workload.model={SCENARIOS}/models/mixture-byte-1m.toml"]
MIXTRAL = [f"workload.model={HELPERS}/models/mixtral.toml"]
"""A model with few heads of keys and values; one device runs it only in fp32."""
RING, FULL = ["plan.context_exchange=ring"], ["plan.recompute=full"]
TWO, FOUR = ["plan.ep=2"], ["plan.ep=4"]
STAGED = ["plan.pp=2", "plan.micro_batches=2"]


def on_two_ranks() -> dict[str, list[str]]:
    """Ranks that divide sequences divide the experts too."""
    return {
        "ddp-balanced-load-sgd": [*MIXTURE, *SGD, *LOAD, *TWO, "plan.method=ddp"],
        "mixtral-ring-full-zero3-skewed-load-sgd": [
            *[*MIXTRAL, *SGD, *SKEWED, *TWO, *RING, *FULL, "plan.method=zero3"]
        ],
        "zero1-full-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, *FULL, "plan.method=zero1"],
        "mixtral-zero2-skewed-load-sgd": [*MIXTRAL, *SGD, *SKEWED, *TWO, "plan.method=zero2"],
        "plain-ring-ddp-skewed-load-sgd": [
            *[*MIXTURE, *SGD, *SKEWED, *TWO, *RING, "plan.method=ddp", "plan.context_split=plain"]
        ],
        "zero3-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *TWO, "plan.method=zero3"],
        "ring-zero1-full-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *TWO, *RING, *FULL, "plan.method=zero1"],
        "mixtral-ddp-router-sgd": [*MIXTRAL, *SGD, *ROUTER, *TWO, "plan.method=ddp"],
        "gs-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, "plan.method=gs"],
        "gs-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *TWO, "plan.method=gs"],
        "mixtral-ring-full-sharded-gs-skewed-load-sgd": [
            *[*MIXTRAL, *SGD, *SKEWED, *TWO, *RING, *FULL, "plan.method=gs_z3"]
        ],
    }


def on_four_ranks() -> dict[str, list[str]]:
    """Ranks that divide sequences divide the experts too, or so do those with other samples beside them."""
    return {
        "all-zero3-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *FOUR, "plan.method=zero3", "plan.micro_batches=2"],
        "mixtral-zero2-accumulated-skewed-load-sgd": [
            *[*MIXTRAL, *SGD, *SKEWED, *TWO, "plan.method=zero2", "plan.micro_batches=2"]
        ],
        "ddp-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, "plan.method=ddp"],
        "all-ddp-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *FOUR, "plan.method=ddp", "plan.overlap=false"],
        "zero1-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, "plan.method=zero1"],
        "mixtral-all-zero3-skewed-load-sgd": [*MIXTRAL, *SGD, *SKEWED, *FOUR, *FULL, "plan.method=zero3"],
        "four-parts-zero3-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, "plan.method=zero3", "plan.cp=4"],
        "ddp-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *TWO, "plan.method=ddp"],
        "mixtral-zero2-router-sgd": [*MIXTRAL, *SGD, *ROUTER, *TWO, "plan.method=zero2"],
        "ring-all-zero1-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *FOUR, *RING, "plan.method=zero1"],
        "gs-all-accumulated-skewed-load-sgd": [
            *[*MIXTURE, *SGD, *SKEWED, *FOUR, "plan.method=gs", "plan.micro_batches=2"]
        ],
        "four-parts-gs-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, "plan.method=gs", "plan.cp=4"],
        "mixtral-sharded-gs-skewed-load-sgd": [*MIXTRAL, *SGD, *SKEWED, *TWO, "plan.method=gs_z3"],
        "gs-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *TWO, "plan.method=gs"],
        "ring-all-sharded-gs-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *FOUR, *RING, "plan.method=gs_z3"],
        "staged-ddp-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, *STAGED, "plan.method=ddp"],
        "staged-full-zero3-skewed-load-sgd": [*MIXTURE, *SGD, *SKEWED, *TWO, *STAGED, *FULL, "plan.method=zero3"],
        "staged-mixtral-ring-zero2-skewed-load-sgd": [
            *[*MIXTRAL, *SGD, *SKEWED, *TWO, *STAGED, *RING, "plan.method=zero2"]
        ],
        "staged-zero1-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *TWO, *STAGED, "plan.method=zero1"],
        "staged-ring-zero2-router-adamw": [*MIXTURE, *ADAMW64, *ROUTER, *TWO, *STAGED, *RING, "plan.method=zero2"],
    }


FEW = {
    2: (
        "ddp-balanced-load-sgd",
        "mixtral-ring-full-zero3-skewed-load-sgd",
        "ring-zero1-full-router-adamw",
    ),
    4: ("all-zero3-router-adamw", "mixtral-zero2-accumulated-skewed-load-sgd"),
}
"""Cases that are not slow: each method, exchange and model, recomputation, experts among more ranks than sequences."""


def case_of(ranks: int, _name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    return {"scenario": scenario_file("moe-experts.toml"), "overrides": [star(ranks), *USUAL, *changes]}


world = in_groups({2: on_two_ranks, 4: on_four_ranks}, FEW, case_of)


class TestExperts(RoutesAsPredicted):
    def peak_error(self, name, case):
        if "-load-" not in name:
            return None
        return 0.01 if FULL[0] in case["overrides"] else 0.001  # where less else is held, moments count more
