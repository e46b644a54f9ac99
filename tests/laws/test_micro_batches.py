"""Gradient accumulation as predicted: what is computed, what is kept, and when gradients leave."""

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import loaded_of, scenario_of, star

from gssim.engine import MEMORY_STEPS, memory_after
from gssim.errors import UserError
from gssim.program import Steps, Task, lower
from gssim.result import Result
from gssim.scenario import Scenario, load_model, load_scenario
from gssim.simulation import record_steady_step, simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
GPT = load_model(SCENARIOS / "models" / "gpt-byte-1m.toml")
METHODS = ["single", "ddp", "zero1", "zero2", "zero3", "gs"]


def accumulated(method: str, count: int, *, batch: int = 8, ranks: int = 2, optimizer: str = "sgd", **plan) -> Scenario:
    ranks = 1 if method == "single" else ranks
    settings = {"model": GPT, "global_batch_size": batch * ranks, "sequence_length": 32, "optimizer": optimizer}
    return scenario_of(star(ranks), {"method": method, "micro_batches": count} | plan, **settings)


def peak_of(scenario: Scenario) -> float:
    return simulate(loaded_of(scenario)).result.ranks[0].peak_allocated_bytes


def kinds(scenario: Scenario) -> Counter[str]:
    counted: Counter[str] = Counter()
    for entry in simulate(loaded_of(scenario)).result.collectives:
        counted[entry.kind] += entry.count
    return counted


@pytest.mark.parametrize("method", METHODS)
def test_one_micro_batch_is_the_plain_step(method: str):
    labels = [task.label for task in lower(accumulated(method, 1)).tasks[0]]
    assert not any("micro-batch" in label for label in labels)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sync", ["step", "micro-batch"])
def test_every_sample_is_computed_once(method: str, sync: str):
    """Tasks of each micro-batch are those of the plain step at its size, but for the adding up."""
    whole = lower(accumulated(method, 4, gradient_sync=sync)).tasks[0]
    quarter = lower(accumulated(method, 1, batch=2)).tasks[0]
    plain = {task.label: task.duration_s for task in quarter if task.label.startswith("forward ")}
    for number in range(4):
        own = {t.label.removesuffix(f" micro-batch {number}"): t for t in whole if t.label.endswith(f"batch {number}")}
        assert {label: task.duration_s for label, task in own.items() if label.startswith("forward ")} == plain


@pytest.mark.parametrize("method", ["ddp", "zero1", "gs"])
def test_gradients_that_leave_once_a_step_are_as_many_as_without_micro_batches(method: str):
    assert kinds(accumulated(method, 4)) == kinds(accumulated(method, 1))


@pytest.mark.parametrize(
    ("method", "kind"), [("ddp", "all-reduce"), ("zero2", "reduce-scatter"), ("gs", "all-to-all-v")]
)
def test_gradients_that_leave_in_each_micro_batch_leave_so_often(method: str, kind: str):
    each = kinds(accumulated(method, 4, gradient_sync="micro-batch"))
    assert each[kind] == 4 * kinds(accumulated(method, 1))[kind]


def test_fsdp_gathers_parameters_again_in_every_micro_batch_whenever_gradients_leave():
    once = kinds(accumulated("zero3", 1))["all-gather"]
    for sync in ("step", "micro-batch"):
        assert kinds(accumulated("zero3", 3, gradient_sync=sync))["all-gather"] == 3 * once


def test_one_device_holds_one_micro_batch_of_activations_and_one_set_of_gradients():
    peaks = {count: peak_of(accumulated("single", count, batch=16)) for count in (1, 2, 4)}
    assert peaks[1] > peaks[2] > peaks[4]
    # the peak is in the backward of the second micro-batch, where the gradients of the first are there
    samples = peak_of(accumulated("single", 1, batch=4))
    gradients = 4 * GPT.elements
    assert samples < peaks[4] < samples + gradients


def test_keeping_whole_gradients_until_the_end_takes_more_than_sharding_them_each_time():
    assert peak_of(accumulated("zero3", 4)) < peak_of(accumulated("zero3", 4, gradient_sync="step"))


def held_after(tasks: tuple[Task, ...]) -> dict[str, float]:
    left: dict[str, float] = defaultdict(float)
    for task in tasks:
        for category, size in task.need.kept:
            left[category] += size
    return {category: size for category, size in left.items() if abs(size) > 1e-6}


@given(
    st.sampled_from(METHODS[1:]),
    st.integers(1, 5),
    st.sampled_from(["step", "micro-batch"]),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_step_leaves_in_memory_what_it_found(method: str, count: int, sync: str, ranks: int, recompute: bool):
    plan = {"gradient_sync": sync, "recompute": "full" if recompute else "none"}
    for tasks in lower(accumulated(method, count, ranks=ranks, **plan)).tasks:
        assert held_after(tasks) == {}


def test_more_micro_batches_than_samples_are_refused(tmp_path: Path):
    from gssim.errors import UserError

    with pytest.raises(UserError, match=r"plan.micro_batches = 9: rank 0 has 8 samples"):
        accumulated("ddp", 9)


@pytest.mark.parametrize("method", ["single", "tensor", "gs_wgrad"])
def test_gradients_that_stay_have_no_micro_batch_to_leave_in(method: str):
    """They are summed on the rank, whatever `gradient_sync` says."""
    assert peak_of(accumulated(method, 4, gradient_sync="micro-batch")) == peak_of(accumulated(method, 4))


# Extrapolation: run.extrapolate_micro_batches ------------------------------------------------------------------------


def whole_and_extrapolated(scenario: Scenario) -> tuple[Result, Result]:
    run = replace(scenario.run, extrapolate_micro_batches=True)
    return tuple(simulate(loaded_of(each)).result for each in (scenario, replace(scenario, run=run)))


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        ("single", {}),
        ("ddp", {}),
        ("zero2", {"gradient_sync": "micro-batch"}),
        ("zero3", {}),
        ("gs", {}),
        ("pipeline", {"pp": 2, "schedule": "1f1b"}),
        ("pipeline", {"pp": 2, "schedule": "gpipe"}),
        ("pipeline", {"pp": 2, "schedule": "interleaved", "stages": (2, 1, 2, 2)}),
        ("pipeline", {"pp": 2, "schedule": "interleaved_zero_bubble", "stages": (2, 1, 2, 2)}),
        ("pipeline", {"pp": 2, "schedule": "1f1b", "receive_buffers": "in-flight", "recompute": "full"}),
        ("pipeline", {"pp": 2, "schedule": "interleaved", "stages": (2, 1, 2, 2), "receive_buffers": "in-flight"}),
        ("zero2", {"pp": 2, "schedule": "1f1b", "ranks": 4}),
        # more and more outputs of the first stage are on their way, until seven micro-batches
        ("pipeline", {"pp": 4, "schedule": "1f1b", "ranks": 4, "stages": (1, 2, 1, 3)}),
    ],
)
def test_extrapolated_micro_batches_are_close_to_all(method, plan):
    batch = 16 if method == "pipeline" else 8
    scenario = accumulated(method, 16, batch=2 * batch, **plan)
    whole, short = whole_and_extrapolated(scenario)
    assert short.provenance["simulated_micro_batches"] < 16
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=5e-3)
    assert short.collectives == whole.collectives
    assert sum(short.phases_s.values()) == pytest.approx(short.step_time_s)
    for one, other in zip(short.ranks, whole.ranks, strict=True):
        assert (one.ranks, one.bytes_sent) == (other.ranks, pytest.approx(other.bytes_sent))
        assert one.peak_by_category_bytes == pytest.approx(other.peak_by_category_bytes)
    for one, other in zip(short.links, whole.links, strict=True):
        assert (one.name, one.bytes) == (other.name, pytest.approx(other.bytes))
    assert short.scenario["plan"] == whole.scenario["plan"]
    assert short.throughput_samples_per_s == pytest.approx(whole.throughput_samples_per_s, rel=5e-3)


@pytest.mark.parametrize(
    ("model", "count", "plan"),
    [
        # the second stage has slack in the first period, which is too short: by 5 and by 8 % of the step
        ("llama3-8b", 24, 'method="pipeline", ranks=2, pp=2, schedule="1f1b"'),
        ("gpt3-1.3b", 24, 'method="pipeline", ranks=2, pp=2, schedule="1f1b"'),
        # the peak of a short step is in the update, that of the whole one in the forward
        ("gpt2-124m", 32, 'method="pipeline", ranks=8, pp=8, schedule="gpipe", recompute="full"'),
    ],
)
def test_periods_count_only_once_the_pace_has_settled(model: str, count: int, plan: str):
    changes = [
        f'workload={{model="models/{model}.toml", global_batch_size={count}, sequence_length=512, precision="bf16"}}',
        f"plan={{micro_batches={count}, {plan}}}",
    ]
    scenario = load_scenario(SCENARIOS / "llama3-8b-fsdp.toml", changes).scenario
    whole, short = whole_and_extrapolated(scenario)
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=5e-3)
    peaks = [
        {rank: each.peak_by_category_bytes | {"rounding": 0.0} for each in result.ranks for rank in each.ranks}
        for result in (whole, short)
    ]
    assert peaks[0].keys() == peaks[1].keys()
    for rank, peak in peaks[0].items():
        assert peaks[1][rank] == pytest.approx(peak)


def test_rows_of_experts_are_extrapolated_with_their_exchanges():
    model = load_model(SCENARIOS / "models" / "mixture-byte-1m.toml")
    workload = {"model": model, "global_batch_size": 32, "sequence_length": 32, "expert_load": {"skew": 0.5}}
    whole, short = whole_and_extrapolated(
        scenario_of(star(2), {"method": "zero1", "ep": 2, "micro_batches": 16}, **workload)
    )
    assert short.provenance["simulated_micro_batches"] < 16
    assert any(each.payload_bytes for each in whole.collectives)
    assert [each.key for each in short.collectives] == [each.key for each in whole.collectives]
    for one, other in zip(short.collectives, whole.collectives, strict=True):
        assert one.payload_bytes == (None if other.payload_bytes is None else pytest.approx(other.payload_bytes))


def test_few_or_uneven_micro_batches_are_all_simulated():
    uneven = accumulated("ddp", 5, batch=8)  # of 8 samples
    for scenario in (accumulated("ddp", 3, batch=6), uneven):
        whole, short = whole_and_extrapolated(scenario)
        assert short.step_time_s == whole.step_time_s
        assert "simulated_micro_batches" not in short.provenance


def test_a_trace_needs_all_micro_batches():
    scenario = accumulated("ddp", 8)
    run = replace(scenario.run, extrapolate_micro_batches=True)
    simulated = simulate(loaded_of(replace(scenario, run=run)))
    with pytest.raises(UserError, match=r"run\.extrapolate_micro_batches = true"):
        record_steady_step(simulated)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2", "zero3"])
def test_a_program_for_memory_has_the_memory_of_the_whole_one_in_fewer_tasks(method, schedule):
    parts = "dp_replicate=2" if method in ("ddp", "zero1") else "dp_shard=2"
    plan = f'method="{method}", schedule="{schedule}", pp=4, {parts}, micro_batches=32, recompute="full"'
    scenario = load_scenario(SCENARIOS / "search-unequal-gpus.toml", [f"plan={{{plan}}}"]).scenario
    whole, alone = (Steps(scenario, for_memory=each).program(0) for each in (False, True))
    assert len(alone.tasks[0]) < len(whole.tasks[0])
    for role in range(len(whole.tasks)):
        expected, found = (each.once(memory_after, role, MEMORY_STEPS) for each in (whole, alone))
        assert (found.peak, found.current) == (expected.peak, expected.current)
