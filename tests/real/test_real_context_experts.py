"""Real: divided experts on parts of sequences; predictions are what was counted, training with the router's own choices
equals one device's.
"""

import pytest
from real_runs import (
    HELPERS,
    SCENARIOS,
    assert_losses_of_one_device,
    assert_parameters_of_one_device,
    assert_predicted_collectives,
    predicted,
    predicted_peaks,
    quick,
    run_cases,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=4", "plan.cp=2"]
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05", "workload.weight_decay=0.01"]
ADAMW64 = ["workload.optimizer=adamw", "workload.precision=fp64", "workload.learning_rate=1e-3"]
ROUTER, LOAD = ["workload.expert_routing=router"], ["workload.expert_routing=load"]
SKEWED = [*LOAD, "workload.expert_load.skew=0.7"]
MIXTURE = [f"workload.model={SCENARIOS}/models/mixture-byte-1m.toml"]
MIXTRAL = [f"workload.model={HELPERS}/models/mixtral.toml"]
"""Of few heads with keys of their own; one device runs it in fp32 alone."""
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


FEW = (
    "ddp-balanced-load-sgd",
    "mixtral-ring-full-zero3-skewed-load-sgd",
    "ring-zero1-full-router-adamw",
    "all-zero3-router-adamw",
    "mixtral-zero2-accumulated-skewed-load-sgd",
)
"""Cases that are not slow: each method, exchange and model, recomputation, experts among more ranks than sequences."""
GROUPS = {
    f"{ranks}{rest}": (ranks, {name: case for name, case in cases.items() if (name in FEW) == (not rest)})
    for ranks, cases in ((2, on_two_ranks()), (4, on_four_ranks()))
    for rest in ("", "-others")
}


@pytest.fixture(scope="module", params=quick(GROUPS, ["2", "4"]))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases of a group in one launch; return (cases, what they showed)."""
    ranks, group = GROUPS[request.param]
    cases = {
        name: {"scenario": scenario_file("moe-experts.toml"), "overrides": [star(ranks), *USUAL, *overrides]}
        for name, overrides in group.items()
    }
    return cases, run_cases(tmp_path_factory.mktemp(f"ranks{request.param}"), cases, ranks=ranks)


def routed(found: dict, kind: str) -> dict:
    """Return what cases showed whose experts are chosen by `router` or by `load`."""
    return {name: seen for name, seen in found.items() if f"-{kind}-" in name}


def test_parameters_and_losses_with_the_models_own_router_equal_those_of_one_device(world: tuple[dict, dict]) -> None:
    # a load is dealt out to each part of a sequence, on one device to the whole
    of_router = routed(world[1], "router")
    assert of_router
    assert_parameters_of_one_device(of_router)
    assert_losses_of_one_device(of_router)


def test_parameters_are_equal_on_all_ranks(world: tuple[dict, dict]) -> None:
    assert all(seen["replicas_equal"] for seen in world[1].values())


def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(world: tuple[dict, dict]) -> None:
    assert_predicted_collectives(*world)


def test_the_predicted_rows_are_the_ones_that_were_sent(world: tuple[dict, dict]) -> None:
    for name, seen in routed(world[1], "load").items():
        rows = [each.payload_bytes for each in predicted(world[0][name]).collectives if each.kind == "all-to-all-v"]
        sent = zip(seen["collectives"], seen["payloads"], strict=True)
        payloads = [payload for key, payload in sent if key[0] == "all-to-all-v"]
        assert sorted(filter(None, rows)) == sorted(filter(None, payloads)), name  # those of a ring have none
        assert sum(filter(None, payloads)) > 0


def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict]) -> None:
    compared = routed(world[1], "load")
    assert compared
    for name, seen in compared.items():
        most = 0.01 if FULL[0] in world[0][name]["overrides"] else 0.001  # where less else is held, moments count more
        assert predicted_peaks(world[0][name]) == pytest.approx(seen["peaks"], rel=most), name
