"""Gradients clipped to a norm (`workload.clip_norm`) train as on one device, with the predicted collectives."""

from typing import Any

import pytest
from real_runs import (
    HELPERS,
    assert_collectives,
    predicted_peaks,
    quick,
    run_cases,
    scenario_file,
    selected,
    star,
    tolerance_of,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

GPT = ["workload.sequence_length=24", "workload.global_batch_size=12", "workload.clip_norm=0.05"]
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05"]
TIED = f'workload.model="{HELPERS / "models" / "gpt-tied"}.toml"'
METHODS = {
    "ddp": ["plan.method=ddp"],
    "zero1": ["plan.method=zero1"],
    "zero2": ["plan.method=zero2"],
    "zero3": ["plan.method=zero3"],
    "gs": ["plan.method=gs"],
    "gs_z3": ["plan.method=gs_z3"],
    "pipeline": ["plan.method=pipeline", "plan.micro_batches=4", TIED],
    "tensor": ["plan.method=tensor"],
    "gs_tp": ["plan.method=gs_tp", "plan.shares.shards=[0.75,0.25]"],
}
CASES = {
    name: {"scenario": scenario_file("small-demo.toml"), "overrides": [star(2), *GPT, *SGD, *overrides]}
    for name, overrides in METHODS.items()
}


UNCLIPPED = {"scenario": scenario_file("small-demo.toml"), "overrides": [star(2), *GPT[:2], *SGD, "plan.method=ddp"]}

FOUR = {
    "hsdp": ["plan.method=hsdp", "plan.dp_replicate=2", "plan.dp_shard=2"],
    "gs_hier": ["plan.method=gs_hier", "plan.dp_replicate=2", "plan.dp_shard=2"],
    "ddp of slices": ["plan.method=ddp", "plan.tp=2"],
    "zero3 of slices": ["plan.method=zero3", "plan.tp=2"],
    "zero2 of sequence parts": ["plan.method=zero2", "plan.tp=2", "plan.sequence_parallel=true"],
    "replicated-pipeline": ["plan.method=ddp", "plan.pp=2", "plan.dp_replicate=2", "plan.micro_batches=3", TIED],
}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {"ddp": CASES["ddp"], "unclipped": UNCLIPPED} | selected(request, CASES)
    return run_cases(tmp_path_factory.mktemp("clipping"), cases, ranks=2)


@pytest.mark.parametrize("name", quick(CASES, ["ddp", "gs_z3", "pipeline", "gs_tp"]))
def test_clipped_training_is_that_of_one_device_with_the_predicted_collectives_and_peaks(seen, name):
    found = seen[name]
    assert found["difference"] <= tolerance_of(name, "sgd") * found["largest_parameter"]
    assert found["replicas_equal"]
    expected = assert_collectives(CASES[name], found)
    # norms of 29 tensors, or one sum
    bytes_of_norms = {"zero2": 4 * 29, "zero3": 4 * 29, "gs": 8, "gs_z3": 8, "pipeline": 8, "tensor": 8, "gs_tp": 8}
    norms = [entry for entry in expected.collectives if entry.kind == "all-reduce" and entry.bytes <= 4 * 29]
    assert {entry.bytes for entry in norms} == {bytes_of_norms[name]} if name in bytes_of_norms else not norms
    assert predicted_peaks(CASES[name]) == pytest.approx(found["peaks"], rel=0.01)


def test_a_smaller_norm_is_a_smaller_step(seen):
    """The loss falls by less than a third of what the same steps without clipping reach."""
    clipped, free = seen["ddp"]["losses"], seen["unclipped"]["losses"]
    assert clipped[0] == pytest.approx(free[0], rel=1e-6)
    assert clipped[0] - clipped[-1] < (free[0] - free[-1]) / 3


@pytest.mark.slow
def test_on_two_axes_norms_are_summed_over_shards_and_over_stages(tmp_path):
    cases = {
        name: {"scenario": scenario_file("demo.toml"), "overrides": [star(4), *GPT, *SGD, *overrides]}
        for name, overrides in FOUR.items()
    }
    for name, found in run_cases(tmp_path, cases, ranks=4).items():
        assert found["difference"] <= tolerance_of(name, "sgd") * found["largest_parameter"], name
        assert_collectives(cases[name], found)
        assert predicted_peaks(cases[name]) == pytest.approx(found["peaks"], rel=0.01), name
