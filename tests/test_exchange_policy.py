"""Exchanges by point-to-point messages or by the backend's collectives: what each moves, holds and takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_runs import predicted, run_cases, scenario_file, star

SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05", "workload.weight_decay=0.01"]
ADAMW64 = ["workload.optimizer=adamw", "workload.precision=fp64", "workload.learning_rate=1e-3"]
TOLERANCE = {"sgd": 1e-5, "adamw": 1e-9}


def cases_for(ranks: int) -> dict[str, dict[str, Any]]:
    """Few samples: the peak is inside a collective; many: in the activations."""
    few = ["workload.sequence_length=24", f"workload.global_batch_size={ranks}"]
    many = ["workload.sequence_length=24", "workload.global_batch_size=24"]
    batch, shards = {2: ([0.75, 0.25], [0.7, 0.3]), 3: ([0.5, 0.25, 0.25], [0.6, 0.4, 0.0])}[ranks]
    found: dict[str, list[str]] = {}
    for exchange in ("point-to-point", "backend"):
        for method in ("zero2", "zero3"):
            plan = [f"plan.method={method}", f"plan.exchange={exchange}"]
            found[f"{method} {exchange} few sgd"] = [*few, *SGD, *plan]
            found[f"{method} {exchange} many adamw"] = [*many, *ADAMW64, *plan, f"plan.shares.batch={batch}"]
    plan = ["plan.method=gs", "plan.exchange=backend"]
    uneven = [f"plan.shares.batch={batch}", f"plan.shares.shards={shards}"]
    buckets = ["plan.bucket_bytes=300000", "plan.first_bucket_bytes=100000"]
    found["gs backend few sgd"] = [*few, *SGD, *plan]
    found["gs backend many adamw"] = [*many, *ADAMW64, *plan, *uneven, *buckets]
    found["gs backend coo adamw"] = [*many, *ADAMW64, *plan, *uneven, "plan.push.threshold=0", "plan.push.encoding=coo"]
    scenario = scenario_file("demo.toml")
    return {name: {"scenario": scenario, "overrides": [star(ranks), *each]} for name, each in found.items()}


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases of one number of ranks in one launch; return (cases, what they showed)."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    cases = cases_for(request.param)
    return cases, run_cases(tmp_path_factory.mktemp(f"ranks{request.param}"), cases, ranks=request.param)


NAMES = list(cases_for(2))


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
def test_training_equals_that_of_one_device_whatever_carries_the_exchange(world: tuple[dict, dict], name: str) -> None:
    seen = world[1][name]
    assert seen["largest_parameter"] > 0.05
    assert seen["difference"] <= TOLERANCE[name.split()[-1]] * seen["largest_parameter"]
    assert seen["replicas_equal"]


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
def test_the_predicted_collectives_are_seen(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    entries = sorted([list(entry.key) for entry in predicted(cases[name]).collectives], key=str)
    assert json.loads(json.dumps(entries)) == sorted(found[name]["collectives"], key=str)


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
def test_the_predicted_peak_is_counted(world: tuple[dict, dict], name: str) -> None:
    cases, found = world
    peaks = {rank: entry.peak_allocated_bytes for entry in predicted(cases[name]).ranks for rank in entry.ranks}
    assert [peaks[rank] for rank in range(len(peaks))] == pytest.approx(found[name]["peaks"], rel=0.01)
