"""Real: sequences divided among tensor-parallel ranks; training equals one device's, predictions what was counted."""

import json

import pytest
from real_runs import predicted, predicted_peaks, quick, run_cases, scenario_file, star, tolerance_of

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

USUAL = ["workload.sequence_length=24", "workload.global_batch_size=12", "plan.sequence_parallel=true"]
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05", "workload.weight_decay=0.01"]
ADAMW64 = ["workload.optimizer=adamw", "workload.precision=fp64", "workload.learning_rate=1e-3"]
TENSOR = ["plan.method=tensor"]
UNEVEN = ["plan.method=gs_tp", "plan.shares.shards=[0.7,0.3]"]
ON_TWO = {
    "gpt-sgd": ("small-demo.toml", [*SGD, *TENSOR]),
    "gpt-full-adamw": ("small-demo.toml", [*ADAMW64, *TENSOR, "plan.recompute=full", "plan.micro_batches=2"]),
    "gpt-uneven-selective-adamw": ("small-demo.toml", [*ADAMW64, *UNEVEN, "plan.recompute=selective"]),
    "bert-adamw": ("small-bert.toml", [*ADAMW64, *TENSOR]),
}
FEW = ("gpt-full-adamw", "gpt-uneven-selective-adamw")
"""Cases on two ranks that are not slow: blocks are cut evenly and not, and run again in both ways."""
ON_FOUR = {
    "gpt-ddp-sgd": ("small-demo.toml", [*SGD, "plan.method=ddp", "plan.tp=2", "plan.dp_replicate=2"]),
    "gpt-zero1-adamw": ("small-demo.toml", [*ADAMW64, "plan.method=zero1", "plan.tp=2", "plan.dp_replicate=2"]),
    "gpt-zero3-adamw": ("small-demo.toml", [*ADAMW64, "plan.method=zero3", "plan.tp=2", "plan.dp_shard=2"]),
    "bert-four-sgd": ("small-bert.toml", [*SGD, *TENSOR]),
}


GROUPS = {
    "2": {name: ON_TWO[name] for name in FEW},
    "2-others": {name: case for name, case in ON_TWO.items() if name not in FEW},
    "4": ON_FOUR,
}


@pytest.fixture(scope="module", params=quick(GROUPS, ["2"]))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases of a group in one launch; return (cases, what they showed)."""
    ranks = int(request.param[0])
    cases = {
        name: {"scenario": scenario_file(file), "overrides": [star(ranks), *USUAL, *overrides]}
        for name, (file, overrides) in GROUPS[request.param].items()
    }
    return cases, run_cases(tmp_path_factory.mktemp(f"ranks{request.param}"), cases, ranks=ranks)


def test_parameters_after_five_steps_equal_those_of_one_device(world: tuple[dict, dict]) -> None:
    for name, seen in world[1].items():
        assert seen["largest_parameter"] > 0.05
        assert seen["difference"] <= tolerance_of(name, name.split("-")[-1]) * seen["largest_parameter"], name
        assert seen["replicas_equal"], name


def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(world: tuple[dict, dict]) -> None:
    for name, case in world[0].items():
        entries = sorted([list(entry.key) for entry in predicted(case).collectives], key=str)
        assert json.loads(json.dumps(entries)) == sorted(world[1][name]["collectives"], key=str), name


def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[dict, dict]) -> None:
    for name, case in world[0].items():
        assert predicted_peaks(case) == pytest.approx(world[1][name]["peaks"], rel=0.001), name
