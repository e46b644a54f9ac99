"""Every method on real ranks equals single-device training, with the predicted collectives and peaks."""

import pytest
from real_runs import (
    ADAMW64,
    SGD,
    assert_collectives,
    by_ranks,
    predicted,
    predicted_keys,
    predicted_peaks,
    scenario_file,
    slow_where,
    star,
    tolerance_of,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

SMALL_GPT = ["workload.sequence_length=24", "workload.global_batch_size=12"]
DIGITS = ["workload.global_batch_size=12", "workload.precision=fp64"]
BERT = [*SMALL_GPT]
MANY = ["workload.sequence_length=64", "workload.global_batch_size=24"]

BASE = {"resnet": "small-resnet.toml", "bert": "small-bert.toml"}

METHODS = {
    "ddp": ["plan.method=ddp"],
    "zero1": ["plan.method=zero1"],
    "zero2": ["plan.method=zero2"],
    "zero3": ["plan.method=zero3"],
    "gs": ["plan.method=gs"],
    "gs-zero": ["plan.method=gs", "plan.push.threshold=0"],
    "gs-coo": ["plan.method=gs", "plan.push.threshold=0", 'plan.push.encoding="coo"'],
    "ddp-buckets": ["plan.method=ddp", "plan.bucket_bytes=300000"],
    "zero1-buckets": ["plan.method=zero1", "plan.bucket_bytes=300000"],
    "gs-buckets": ["plan.method=gs", "plan.bucket_bytes=300000", "plan.first_bucket_bytes=100000"],
}
METHODS |= {f"{name}-recompute": [*METHODS[name], "plan.recompute=full"] for name in ("ddp", "zero2", "zero3", "gs")}
UNEVEN = {
    2: ["plan.shares.batch=[0.75,0.25]"],
    3: ["plan.shares.batch=[0.5,0.25,0.25]"],
    4: ["plan.shares.batch=[0.25,0.25,0.25,0.25]"],
}
UNEVEN_SHARDS = {2: [0.7, 0.3], 3: [0.6, 0.3, 0.1], 4: [0.4, 0.3, 0.2, 0.1]}


def cases_for(ranks: int) -> dict[str, dict[str, object]]:
    found: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        uneven = UNEVEN[ranks]
        if name.startswith("gs"):
            uneven = [*uneven, f"plan.shares.shards={UNEVEN_SHARDS[ranks]}"]
        found[f"{name}-sgd"] = [*SMALL_GPT, *SGD, *method]
        found[f"{name}-adamw"] = [*SMALL_GPT, *ADAMW64, *method, *uneven]
    found["gs-resnet-sgd"] = [*DIGITS, *SGD, *METHODS["gs"], f"plan.shares.shards={UNEVEN_SHARDS[ranks]}"]
    found["gs-resnet-adamw"] = [*DIGITS, *ADAMW64, *METHODS["gs"], f"plan.shares.shards={UNEVEN_SHARDS[ranks]}"]
    few = [*SMALL_GPT[:1], f"workload.global_batch_size={ranks}"]
    for method in ("zero2", "zero3"):
        found[f"{method}-few-sgd"] = [*few, *SGD, *METHODS[method]]  # its peak is inside a collective
        found[f"{method}-bert-sgd"] = [*BERT, *SGD, *METHODS[method]]
    found["zero1-few-adamw"] = [*few, *ADAMW64, *METHODS["zero1"]]  # its peak is in the optimizer
    found["gs-bert-adamw"] = [*BERT, *ADAMW64, *METHODS["gs-zero"], *UNEVEN[ranks]]
    for method in ("ddp", "zero3", "gs"):
        changes = [*METHODS[method], "plan.recompute=full"]
        # enough samples that activations, not gradients, make the peak
        found[f"{method}-recompute-many-sgd"] = [*MANY, *SGD, *changes]
        found[f"{method}-bert-recompute-sgd"] = [*MANY, *SGD, *changes]
        found[f"{method}-resnet-recompute-sgd"] = [*DIGITS, *SGD, *changes]
    found["planted-sgd"] = [*SMALL_GPT, *SGD, *METHODS["ddp"]]
    if (
        ranks > 2
    ):  # all methods; what else there is does not depend on the number of ranks (the slow matrix runs it all)
        plain = [f"{name}-adamw" for name in METHODS if "recompute" not in name]
        found = {name: found[name] for name in (*plain, "zero2-few-sgd", "zero3-few-sgd", "planted-sgd")}
    return {
        name: {
            "scenario": scenario_file(BASE.get(name.split("-")[1], "small-demo.toml")),
            "overrides": [star(ranks), *overrides],
            "plant": name.startswith("planted"),
        }
        for name, overrides in found.items()
    }


world = by_ranks(cases_for, always=["planted-sgd"])


NAMES = {ranks: [name for name in cases_for(ranks) if not name.startswith("planted")] for ranks in (2, 3, 4)}
FEW = {
    2: [
        "ddp-adamw",
        "zero1-buckets-adamw",
        "zero3-sgd",
        "zero2-few-sgd",
        "gs-coo-adamw",
        "gs-resnet-adamw",
        "gs-bert-recompute-sgd",
    ],
    3: [],
    4: [],
}
"""By number of ranks: every method, model, optimizer and way to recompute once."""
PAIRS = [slow_where(ranks, name, slow=[3], few=FEW[ranks]) for ranks, names in NAMES.items() for name in names]
each_case = pytest.mark.parametrize(("world", "name"), PAIRS, indirect=["world"])


@each_case
def test_parameters_after_five_steps_equal_those_of_one_device(world: tuple[dict, dict], name: str) -> None:
    seen = world[1][name]
    tolerance = tolerance_of(name, "adamw" if name.endswith("adamw") else "sgd")
    assert seen["largest_parameter"] > 0.05
    assert seen["difference"] <= tolerance * seen["largest_parameter"]
    assert seen["replicas_equal"]


@each_case
def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    assert_collectives(cases[name], found[name])


@each_case
def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    assert predicted_peaks(cases[name]) == pytest.approx(found[name]["peaks"], rel=0.02)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_planted_collective_is_seen(world: tuple[dict, dict]) -> None:
    cases, found = world
    expected = predicted_keys(predicted(cases["planted-sgd"]))
    extra = [entry for entry in found["planted-sgd"]["collectives"] if entry not in expected]
    assert [entry[0] for entry in extra] == ["all-reduce"]
    assert extra[0][2] == 28
