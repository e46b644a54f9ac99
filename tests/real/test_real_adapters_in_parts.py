"""Low-rank adapters where ranks divide sequences beside blocks or experts, as on one device and as predicted."""

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

from test_real_experts import TINY
from test_real_sliced_adapters import TINY as LLAMA

pytestmark = pytest.mark.real

DDP, ZERO1, ZERO2, ZERO3, GS, GS_Z3 = (
    f"plan.method={name}" for name in ("ddp", "zero1", "zero2", "zero3", "gs", "gs_z3")
)
CP, TP, EP, RING = "plan.cp=2", "plan.tp=2", "plan.ep=2", "plan.context_exchange=ring"
SEQUENCE, TWICE, CLIPPED = "plan.sequence_parallel=true", "plan.micro_batches=2", "workload.clip_norm=0.01"
FULL, SELECTIVE = "plan.recompute=full", "plan.recompute=selective"
ROUTINGS = {
    "router": ["workload.expert_routing=router"],
    "load": ["workload.expert_routing=load", "workload.expert_load.skew=0.7"],
}
"""By their part of a case's name. Rows, and with them peaks, are predicted where a load routes them; it is dealt out to
each part of a sequence, on one device to the whole."""
SOURCES = {"llama": ("hf:llama", LLAMA), "mixture": ("gsreal.models.mixture", TINY | {"shared_experts": 1})}

ON: dict[int, dict[str, list[str]]] = {
    2: {
        "mixture-query-value-load-ddp-sgd": [*SGD, DDP, CP, EP],
        "mixture-all-router-ddp-adamw": [*ADAMW64, DDP, CP, EP],
        "mixture-query-value-load-ring-zero3-sgd": [*SGD, ZERO3, CP, EP, RING],
        "mixture-all-router-clipped-zero1-sgd": [*SGD, ZERO1, CP, EP, CLIPPED],
    },
    4: {
        "llama-query-value-ddp-sgd": [*SGD, DDP, CP, TP],
        "llama-all-clipped-ddp-sgd": [*SGD, DDP, CP, TP, CLIPPED],
        "llama-query-value-sequence-zero1-sgd": [*SGD, ZERO1, CP, TP, SEQUENCE],
        "llama-query-value-full-zero3-sgd": [*SGD, ZERO3, CP, TP, FULL],
        "llama-all-sequence-selective-zero2-sgd": [*SGD, ZERO2, CP, TP, SEQUENCE, SELECTIVE],
        "llama-query-value-ring-sequence-zero3-sgd": [*SGD, ZERO3, CP, TP, RING, SEQUENCE, TWICE],
        "llama-query-value-ring-gs-sgd": [*SGD, GS, CP, TP, RING],
        "llama-all-gs-z3-sgd": [*SGD, GS_Z3, CP, TP],
        "mixture-query-value-load-zero2-sgd": [*SGD, ZERO2, CP, EP],
        "mixture-all-router-zero3-adamw": [*ADAMW64, ZERO3, CP, EP],
        "mixture-query-value-router-four-ddp-sgd": [*SGD, DDP, CP, "plan.ep=4"],
        "mixture-all-load-full-gs-sgd": [*SGD, GS, CP, EP, FULL],
    },
}
FEW = {
    2: ("mixture-query-value-load-ddp-sgd", "mixture-all-router-ddp-adamw"),
    4: ("llama-query-value-full-zero3-sgd", "llama-query-value-ring-sequence-zero3-sgd"),
}
"""Cases that are not slow: sequences beside divided experts, and beside cut blocks, by both exchanges."""


def model_of(kind: str) -> Path:
    """Return the file of a small model with adapters; at several lengths: from it, what both divide follows."""
    from small_models import Request, kept

    source, arguments = SOURCES[kind]
    request = Request(
        model=source,
        arguments=tuple(f"{key}={value}" for key, value in arguments.items()),
        name=f"context-adapters-{kind}",
        vocabulary=256,
        maximum_sequence_length=64,
        adapters=("query-value", "all-linear"),
    )
    return kept(request)


def case_of(ranks: int, name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    model, adapters = adapters_of(name)
    routing = [each for kind, keys in ROUTINGS.items() if f"-{kind}-" in name for each in keys]
    overrides = [star(ranks), f"workload.model={model_of(model)}", "workload.sequence_length=24"]
    overrides += ["workload.global_batch_size=12", adapters, *routing, *changes]
    return {"scenario": scenario_file("small-demo.toml"), "overrides": overrides}


world = in_groups(ON, FEW, case_of)


def of_one_device(world):
    """Return the cases, and what they showed, whose experts one device would choose too."""
    return tuple({name: each for name, each in found.items() if "-load-" not in name} for found in world)


class TestAdapters(TrainsAdapters):
    """Adapters train as on one device, with the predicted collectives and peaks."""

    def peak_error(self, name, case):
        if "-router-" in name:
            return None
        # blocks of experts hold up to 0.2 % more than predicted where they run again, on whole sequences too
        return 0.002 if "mixture" in name and "-full-" in name else super().peak_error(name, case)

    def test_what_training_changes_is_that_of_one_device(self, world):
        super().test_what_training_changes_is_that_of_one_device(of_one_device(world))

    def test_parameters_after_five_steps_equal_those_of_one_device(self, world):
        super().test_parameters_after_five_steps_equal_those_of_one_device(of_one_device(world))

    def test_losses_are_those_of_one_device(self, world):
        super().test_losses_are_those_of_one_device(of_one_device(world))
