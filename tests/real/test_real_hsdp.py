"""Parameters sharded on one axis of a mesh and replicated on the other (HSDP), on four real ranks."""

import pytest
from real_runs import (
    ADAMW64,
    SGD,
    assert_collectives,
    assert_parameters_of_one_device,
    predicted_peaks,
    quick,
    run_cases,
    scenario_file,
    selected,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

RANKS = 4
GPT = ["workload.sequence_length=24", "workload.global_batch_size=12"]
DIGITS = ["workload.global_batch_size=12", "workload.precision=fp64"]
GRID = ["plan.method=hsdp", "plan.dp_replicate=2", "plan.dp_shard=2"]
TWICE = ["plan.micro_batches=2", "workload.global_batch_size=16"]

CASES = {
    "recompute-backend-sgd": ("small-demo.toml", [*GPT, *SGD, *GRID, "plan.recompute=full", "plan.exchange=backend"]),
    "each-micro-batch-sgd": ("small-demo.toml", [*GPT, *SGD, *GRID, *TWICE]),
    "gathered-uneven-last-micro-batch-adamw": (
        "small-demo.toml",
        [
            *[*GPT, *ADAMW64, *GRID, *TWICE, "plan.gradient_sync=step", "plan.parameters=gathered"],
            "plan.shares.batch=[0.5,0.25,0.125,0.125]",
        ],
    ),
    "replicas-alone-sgd": (
        "small-demo.toml",
        [*GPT, *SGD, "plan.method=hsdp", "plan.dp_replicate=4", "plan.dp_shard=1"],
    ),
    "resnet-sgd": ("resnet-digits.toml", [*DIGITS, *SGD, *GRID]),
}


NAMES = quick(CASES, ["each-micro-batch-sgd"])


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    cases = {
        name: {"scenario": scenario_file(file), "overrides": [star(RANKS), *overrides]}
        for name, (file, overrides) in CASES.items()
    }
    return cases, run_cases(tmp_path_factory.mktemp("hsdp"), selected(request, cases), ranks=RANKS)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_after_five_steps_equal_those_of_one_device(world: tuple[dict, dict], name: str) -> None:
    assert_parameters_of_one_device({name: world[1][name]})


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_reduced_in_their_group_and_then_over_the_replicas(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    result = assert_collectives(cases[name], found[name])
    replicas = {tuple(entry.group) for entry in result.collectives if entry.kind == "all-reduce"}
    assert replicas == ({(0, 1, 2, 3)} if "alone" in name else {(0, 2), (1, 3)})


@pytest.mark.parametrize("name", NAMES)
def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    assert predicted_peaks(cases[name]) == pytest.approx(found[name]["peaks"], rel=0.01)
