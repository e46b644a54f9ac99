"""Muon for the matrices of blocks and AdamW for the rest train as on one device, as both worlds say."""

import pytest
from real_runs import (
    HELPERS,
    SCENARIOS,
    Cases,
    assert_collectives,
    by_ranks,
    predicted_peaks,
    scenario_file,
    slow_where,
    star,
    tolerance_of,
)

from gssim.scenario import load_model
from gssim.workload.optimizers import NEWTON_SCHULZ_STEPS, all_matrices, largest_temporaries

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
from gsreal.measure import MemoryCounter

pytestmark = pytest.mark.real

MUON = ["workload.optimizer=muon", "workload.learning_rate=2e-3", "workload.weight_decay=0.01"]
SMALL = ["workload.sequence_length=24", "workload.global_batch_size=12"]
FP64 = "workload.precision=fp64"
CASES = {
    "ddp": ["plan.method=ddp", FP64],
    "ddp-bf16": ["plan.method=ddp", "workload.precision=bf16"],
    "ddp-clipped": ["plan.method=ddp", FP64, "workload.clip_norm=0.01"],
    "zero1": ["plan.method=zero1", FP64],
    "zero1-fp32": ["plan.method=zero1"],
    "zero1-bf16": ["plan.method=zero1", "workload.precision=bf16"],
    "zero1-recomputed": ["plan.method=zero1", FP64, "plan.recompute=full", "plan.micro_batches=2"],
    "zero1-lists": ["plan.method=zero1", "workload.optimizer_implementation=foreach"],
    "few": ["plan.method=ddp", "workload.sequence_length=1"],
    "local": ["plan.method=local_sgd", FP64, "plan.sync_every_steps=2"],
}
FEW = {2: ["ddp", "zero1-recomputed", "few", "experts"], 3: []}
PEAK_IN_UPDATE = {2: ["few"], 3: ["few", "ddp-bf16"]}
TRAINS_ALIKE = ("ddp", "ddp-clipped", "zero1", "zero1-recomputed", "pipeline", "experts")
"""As one device: in fp64, as with AdamW, where gradients' last digits turn no rounding to bf16; not where ranks train
apart."""


def cases_for(ranks: int) -> Cases:
    return {
        name: {
            "scenario": scenario_file("small-demo.toml"),
            "overrides": [star(ranks), *SMALL, *MUON, *changes],
        }
        for name, changes in CASES.items()
    } | (of_two_ranks() if ranks == 2 else {})


def of_two_ranks() -> Cases:
    usual = [star(2), *SMALL, *MUON, FP64]
    stages = ["plan.method=pipeline", "plan.pp=2", "plan.micro_batches=2"]
    model = f"workload.model={HELPERS}/models/of_tests/tiny-mixture.toml"
    experts = [model, "plan.method=zero1", "plan.ep=2"]  # stacked in one tensor, which AdamW updates
    return {
        "pipeline": {"scenario": scenario_file("small-demo.toml"), "overrides": [*usual, *stages]},
        "experts": {"scenario": scenario_file("moe-experts.toml"), "overrides": [*usual, *experts]},
    }


world = by_ranks(cases_for)


PAIRS = [slow_where(ranks, name, slow=[], few=FEW[ranks]) for ranks in (2, 3) for name in cases_for(ranks)]
each_case = pytest.mark.parametrize(("world", "name"), PAIRS, indirect=["world"])


@each_case
def test_parameters_after_five_steps_equal_those_of_one_device(world: tuple[Cases, Cases], name: str) -> None:
    seen = world[1][name]
    assert seen["replicas_equal"]
    if name in TRAINS_ALIKE:
        assert seen["difference"] <= tolerance_of(name, "adamw") * seen["largest_parameter"]


@each_case
def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(
    world: tuple[Cases, Cases], name: str
) -> None:
    assert_collectives(world[0][name], world[1][name])


@each_case
def test_the_predicted_peak_of_every_rank_is_the_counted_one(world: tuple[Cases, Cases], name: str) -> None:
    peaks = predicted_peaks(world[0][name], products=True)
    if name in PEAK_IN_UPDATE[len(peaks)]:
        workspace_bytes = workspace_of_an_update_bytes()
        peaks = [peak + workspace_bytes for peak in peaks]
    assert peaks == pytest.approx(world[1][name]["peaks"], rel=0.01)


def workspace_of_an_update_bytes() -> float:
    """Return what the kernels of torch's products in bf16 take for themselves at the peak of an update.

    They pack an operand, in other forms on other processors.
    """
    import torch
    from torch.optim._muon import _zeropower_via_newtonschulz

    counter = MemoryCounter(torch.device("cpu"))
    if counter.method != "allocator":
        return 0.0  # nothing is counted that tensors do not hold
    model = load_model(SCENARIOS / "models/gpt-byte-150k.toml")
    matrices, threads, held = dict.fromkeys(all_matrices(model.layers)), torch.get_num_threads(), 0.0
    torch.set_num_threads(1)  # as ranks have
    try:
        for matrix in matrices:
            update = torch.ones(matrix)
            for _ in range(2):  # the kernels are made in the first
                before = counter.alive()
                counter.reset()
                _zeropower_via_newtonschulz(update, (3.4445, -4.775, 2.0315), NEWTON_SCHULZ_STEPS, 1e-7)
                peak = counter.peak() - before
            held = max(held, update.nbytes + peak)
    finally:
        torch.set_num_threads(threads)
    return held - sum(largest_temporaries(matrices, value_bytes=4))
