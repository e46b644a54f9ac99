"""Micro-batches, with gradients that leave in each or only in the last, on real ranks."""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    SGD,
    assert_collectives,
    assert_parameters_of_one_device,
    by_ranks,
    predicted,
    scenario_file,
    slow_where,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

GPT = ["workload.sequence_length=24", "workload.global_batch_size=24"]
MANY = ["workload.sequence_length=64", "workload.global_batch_size=36"]
LLAMA = Path(__file__).resolve().parents[1] / "helpers/models/llama.toml"
STEP, EACH = ["plan.gradient_sync=step"], ["plan.gradient_sync=micro-batch"]
UNEVEN = {2: [0.75, 0.25], 3: [0.5, 0.25, 0.25]}


def cases_for(ranks: int) -> dict[str, dict[str, object]]:
    found: dict[str, tuple[str, list[str]]] = {}
    for method in ("ddp", "zero1", "zero2", "zero3", "gs"):
        for name, sync in (("step", STEP), ("each", EACH)):
            plan = [f"plan.method={method}", "plan.micro_batches=3", *sync]
            found[f"{method}-{name}-sgd"] = ("small-demo.toml", [*GPT, *SGD, *plan])
    uneven = f"plan.shares.batch={UNEVEN[ranks]}"
    few = ["plan.bucket_bytes=300000"]
    found["ddp-buckets-uneven-adamw"] = (
        "small-demo.toml",
        [*GPT, *ADAMW64, *few, "plan.method=ddp", "plan.micro_batches=2", uneven],
    )
    for method in ("ddp", "zero1"):  # their buckets are then reduced by a hook of ours
        found[f"{method}-each-without-overlap-adamw"] = (
            "small-demo.toml",
            [*GPT, *ADAMW64, f"plan.method={method}", "plan.micro_batches=3", *EACH, "plan.overlap=false"],
        )
    gs = ["plan.method=gs", "plan.micro_batches=3", f"plan.shares.shards={UNEVEN[ranks]}", uneven]
    found["gs-coo-uneven-adamw"] = (
        "small-demo.toml",
        [*GPT, *ADAMW64, *gs, "plan.push.threshold=0", 'plan.push.encoding="coo"', *EACH],
    )
    found["gs-bert-uneven-sgd"] = ("small-bert.toml", [*GPT, *SGD, *gs, *few])
    head = ['workload.frozen=["tokens","blocks.*"]', "plan.method=gs_z3", "plan.micro_batches=3", *EACH]
    found["gs-z3-head-each-sgd"] = (  # where little else is held, a head's gradient is added to one that was pushed
        "small-demo.toml",
        [*GPT, *SGD, *head, f"workload.global_batch_size={3 * ranks}"],
    )
    whole = ["plan.method=gs", "plan.micro_batches=2", *STEP]  # all in one bucket, which the first sum of a step starts
    found["gs-one-bucket-each-sum-sgd"] = ("small-demo.toml", [*GPT, *SGD, *whole, f"workload.model={LLAMA}"])
    found["zero3-recompute-sgd"] = (
        "small-demo.toml",
        [*MANY, *SGD, "plan.method=zero3", "plan.micro_batches=2", "plan.recompute=full"],
    )
    found["ddp-many-sgd"] = ("small-demo.toml", [*MANY, *SGD, "plan.method=ddp", "plan.micro_batches=4"])
    if ranks > 2:
        found = {name: case for name, case in found.items() if name.endswith("-adamw") or "each" in name}
    return {
        name: {"scenario": scenario_file(file), "overrides": [star(ranks), *overrides]}
        for name, (file, overrides) in found.items()
    }


world = by_ranks(cases_for)


FEW = [
    "zero1-each-sgd",
    "gs-coo-uneven-adamw",
    "gs-z3-head-each-sgd",
    "zero3-recompute-sgd",
]
PAIRS = [slow_where(ranks, name, slow=[3], few=FEW) for ranks in (2, 3) for name in cases_for(ranks)]
each_case = pytest.mark.parametrize(("world", "name"), PAIRS, indirect=["world"])


@each_case
def test_accumulated_training_equals_that_of_one_device_on_the_whole_batch(world: tuple[dict, dict], name: str) -> None:
    assert_parameters_of_one_device({name: world[1][name]})


@each_case
def test_gradients_leave_when_the_plan_says(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    assert_collectives(cases[name], found[name])


@each_case
def test_the_peak_is_that_of_one_micro_batch_with_what_is_accumulated(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    peaks = {rank: entry.peak_allocated_bytes for entry in predicted(cases[name]).ranks for rank in entry.ranks}
    for rank, measured in enumerate(found[name]["peaks"]):
        assert peaks[rank] / measured == pytest.approx(1, abs=0.01), (rank, peaks[rank], measured)
