"""FSDP2's CPUOffloadPolicy (`plan.offload = "parameters"`), with collectives, peaks and the training's result.

A CPU is its own host: what is offloaded stays where it is, and all else runs as FSDP2 runs it.
"""

from typing import Any

import pytest
from real_runs import assert_collectives, predicted_peaks, quick, run_cases, scenario_file, selected, star

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

GPT = ["workload.sequence_length=24", "workload.global_batch_size=12"]
BERT = ["workload.sequence_length=24", "workload.global_batch_size=12"]
CASES = {
    "zero3": ("small-demo.toml", ["plan.method=zero3", *GPT]),
    "zero2-accumulated": ("small-demo.toml", ["plan.method=zero2", "plan.micro_batches=3", *GPT]),
    "zero3-clipped": ("small-demo.toml", ["plan.method=zero3", "workload.clip_norm=0.1", *GPT]),
    "zero3-bf16": ("demo.toml", ["plan.method=zero3", "workload.precision=bf16", *GPT]),
    "bert": ("small-bert.toml", ["plan.method=zero2", *BERT]),
    "bert-recomputed": ("small-bert.toml", ["plan.method=zero3", "plan.recompute=full", *BERT]),
}
FEW = ["zero2-accumulated", "bert-recomputed"]
OFFLOAD = ["plan.offload=parameters", "workload.optimizer=sgd-momentum", "workload.learning_rate=0.05"]


def case_of(name: str, ranks: int = 2) -> dict[str, Any]:
    file, overrides = CASES[name]
    return {"scenario": scenario_file(file), "overrides": [star(ranks), *overrides, *OFFLOAD]}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = selected(request, {name: case_of(name) for name in CASES})
    return run_cases(tmp_path_factory.mktemp("offloaded"), cases, ranks=2)


def check(name: str, case: dict[str, Any], found: dict[str, Any]) -> None:
    assert_collectives(case, found)
    narrow = name.endswith("bf16")
    assert predicted_peaks(case) == pytest.approx(found["peaks"], rel=0.015 if narrow else 0.001)
    assert found["replicas_equal"]
    assert found["difference"] / found["largest_parameter"] <= (2**-6 if narrow else 1e-5)


@pytest.mark.parametrize("name", quick(CASES, FEW))
def test_offloaded_shards_train_as_one_device_with_the_predicted_collectives_and_peaks(seen, name):
    check(name, case_of(name), seen[name])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_so_do_those_of_more_ranks(tmp_path, ranks):
    cases = {name: case_of(name, ranks) for name in ("zero3", "bert")}
    found = run_cases(tmp_path, cases, ranks=ranks)
    for name, case in cases.items():
        check(name, case, found[name])
