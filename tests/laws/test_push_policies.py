"""Effect of the push options on a prediction: bytes sent, memory, and dense steps."""

from pathlib import Path
from typing import Any

import pytest
from strategies import device_type, exponential_statistics, loaded_of, scenario_of, star
from tasks import communications_by_label

from gssim.plan import Push, resolved_push, scratch_elements
from gssim.program import Program, lower
from gssim.scenario import load_scenario
from gssim.simulation import simulate

THRESHOLD = 1e-3
RANKS = 4
ELEMENTS = 168


def gs(optimizer: str = "adamw", *, run: dict[str, Any] | None = None, plan: dict[str, Any] | None = None, **push: Any):
    plan = {"method": "gs", "push": push, **(plan or {})}
    return scenario_of(star(RANKS), plan, run=run, optimizer=optimizer)


def program(scenario, step: int = 3) -> Program:
    return lower(scenario, exponential_statistics(), step=step, unfolded=True)


def peak_of(scenario, category: str) -> float:
    return max(held.get(category, 0.0) for held in program(scenario).persistent)


@pytest.mark.parametrize(
    ("push", "sgd", "kept"),
    [
        ({}, True, False),
        ({"threshold": 1e-3}, True, True),
        ({"threshold": 1e-3}, False, False),
        ({"threshold": 1e-3, "aggregate": "received-weight"}, True, False),
        ({"threshold": 1e-3, "error_feedback": False}, True, False),
        ({"threshold": 1e-3, "error_feedback": True}, False, True),
    ],
)
def test_error_feedback_is_on_for_sgd_where_nothing_else_mends_what_is_dropped(push, sgd, kept):
    assert resolved_push(Push(**push), sgd=sgd).error_feedback is kept


def test_saying_what_follows_from_the_optimizer_asks_the_same_question():
    silent, said = gs("sgd", threshold=0.0), gs("sgd", threshold=0.0, error_feedback=True)
    assert silent.scenario_id == said.scenario_id != gs("sgd", threshold=0.0, error_feedback=False).scenario_id


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_rank_keeps_a_value_for_every_element_that_others_own(precision, size):
    kept = gs(threshold=THRESHOLD, error_feedback=True, error_feedback_precision=precision)
    assert peak_of(kept, "residuals") == size * ELEMENTS * (1 - 1 / RANKS)
    assert peak_of(gs(threshold=THRESHOLD), "residuals") == 0


def test_flags_and_magnitudes_are_found_in_scratch_of_one_message():
    own = ELEMENTS // RANKS
    assert scratch_elements(own, ELEMENTS, chunked=True) == (48, ELEMENTS)
    assert peak_of(gs(threshold=0.0), "scratch") == 48 + 4 * ELEMENTS
    assert peak_of(gs(), "scratch") == 0


def test_what_was_kept_takes_the_sum_so_that_its_bucket_is_given_back_before_messages_are_packed():
    def packing_bytes(**push: Any) -> float:
        tasks = program(gs(threshold=0.0, encoding="coo", **push)).tasks[0]
        (task,) = [task for task in tasks if task.label == "threshold bucket 0"]
        return task.need.peak_bytes

    own, messages = 4 * ELEMENTS / RANKS, 8 * ELEMENTS * (1 - 1 / RANKS)
    assert packing_bytes() == own + messages
    assert packing_bytes(error_feedback=True) == own + messages - 4 * ELEMENTS
    assert packing_bytes(error_feedback=True, error_feedback_precision="bf16") == own + messages


def test_dividing_by_the_weight_received_takes_that_of_every_own_element():
    def adding_bytes(aggregate: str) -> float:
        tasks = program(gs(threshold=1e9, aggregate=aggregate)).tasks[0]  # no messages come that could go
        (task,) = [task for task in tasks if task.label == "add bucket 0"]
        return task.need.peak_bytes

    assert (adding_bytes("batch-weight"), adding_bytes("received-weight")) == (0, 4 * ELEMENTS / RANKS)


def test_steps_at_the_start_are_pushed_as_if_there_were_no_threshold():
    warm = gs(threshold=THRESHOLD, warmup_steps=2)
    dense, steady = program(gs()), program(gs(threshold=THRESHOLD), 2)

    def pushed(found: Program) -> dict[str, Any]:
        return {name: c for name, c in communications_by_label(found).items() if not name.startswith("publish")}

    assert pushed(program(warm, 1)) == pushed(dense)
    assert pushed(program(warm, 2)) == pushed(steady)
    assert [program(warm, step).push_density for step in (0, 1)] == [1, 1]
    assert [task.label for task in program(warm, 1).tasks[0]] == [task.label for task in dense.tasks[0]]


def test_a_result_shows_steady_steps_and_densities_of_all():
    run = {"steps": 4, "warmup_steps": 1}
    warm, steady = (
        simulate(loaded_of(gs(threshold=THRESHOLD, run=run, **more))).result for more in ({"warmup_steps": 3}, {})
    )
    assert [entry.key for entry in warm.collectives] == [entry.key for entry in steady.collectives]
    assert warm.step_time_s == steady.step_time_s
    assert warm.density.push == pytest.approx((2 * 1 + 2 * steady.density.push) / 4)


def test_what_fits_only_under_the_threshold_does_not_fit_if_steps_at_the_start_are_dense():
    def fits(memory_bytes: float, **push: Any) -> bool:
        cluster = star(RANKS, device_types={"fast": device_type(memory_bytes=memory_bytes)})
        plan = {"method": "gs", "push": {"threshold": 1e9} | push}
        scenario = scenario_of(cluster, plan, global_batch_size=RANKS, sequence_length=1)
        return simulate(loaded_of(scenario)).result.fits

    sizes = [size for size in range(2800, 3200, 40) if fits(size) and not fits(size, warmup_steps=2)]
    assert sizes, "dense pushes take more than thresholded ones"


@pytest.mark.parametrize("encoding", ["coo", "bitmap", "dense"])
def test_messages_are_as_long_as_their_encoding_says(encoding):
    found = program(gs(threshold=THRESHOLD, encoding=encoding))
    pushed = [c for name, c in communications_by_label(found).items() if name.startswith("push")]
    entries = found.push_density * (RANKS - 1) * ELEMENTS
    messages, own = RANKS * (RANKS - 1) * len(pushed), ELEMENTS / RANKS
    wanted = {
        "coo": 8 * entries,
        "bitmap": 4 * entries + messages * 6,  # bits of 42 elements
        "dense": 4 * messages * own,
    }
    assert sum(c.payload_bytes for c in pushed) == pytest.approx(wanted[encoding])


def test_a_rank_without_samples_sends_nothing():
    shares = {"shares": {"batch": [0.5, 0.5, 0, 0]}}
    for threshold in (0.0, THRESHOLD):
        found = program(gs(threshold=threshold, plan=shares))
        (pushed,) = [c for name, c in communications_by_label(found).items() if name.startswith("push")]
        assert [sum(row) > 0 for row in pushed.pair_bytes] == [True, True, False, False]


def test_error_feedback_and_estimates_take_time_in_compression():
    def threshold_s(**push: Any) -> float:
        tasks = program(gs(threshold=0.1, **push)).tasks[0]
        return sum(task.duration_s for task in tasks if task.label.startswith("threshold"))

    plain = threshold_s()
    assert threshold_s(error_feedback=True) > plain
    assert threshold_s(kind="relative") > plain
    for steps in (1, 2):  # step 3 estimates, or follows a sample
        assert threshold_s(kind="target-density", reestimate_steps=steps) > plain


def test_an_owners_range_is_compared_only_with_thresholds_of_tensors_that_lie_in_it():
    """As `clip_ranges` cuts them in real runs, not with those of all six tensors of the bucket for every owner."""
    overhead_s = 1e-3
    cluster = star(RANKS, types={"fast": device_type(operation_overhead_s=overhead_s)})

    def threshold_s(kind: str) -> float:
        push = {"threshold": 0.0, "kind": kind}  # both send everything
        tasks = program(scenario_of(cluster, {"method": "gs", "push": push}, optimizer="adamw")).tasks[0]
        return sum(task.duration_s for task in tasks if task.label.startswith("threshold"))

    tensors = (64, 16, 4, 16, 4, 64)
    others = ((42, 84, 3), (84, 126, 3), (126, 168, 1))  # range of an owner, and tensors that lie in it
    assert sum(tensors) == ELEMENTS == others[-1][1]
    means_s = 2 * overhead_s * len(tensors) + 4 * ELEMENTS / 1e9
    further = sum(pieces - 1 for _, _, pieces in others)  # beyond one comparison for each owner
    assert threshold_s("relative") - threshold_s("absolute") == pytest.approx(means_s + 4 * overhead_s * further)


@pytest.mark.parametrize("push", [{"kind": "relative", "threshold": 0.0}, {"kind": "target-density", "threshold": 1.0}])
def test_ranks_that_compare_with_unequal_numbers_of_thresholds_are_told_apart_though_all_is_sent(push):
    cluster = star(RANKS, types={"fast": device_type(operation_overhead_s=1e-3)})
    loaded = loaded_of(scenario_of(cluster, {"method": "gs", "push": push}, optimizer="adamw"))
    folded, unfolded = (simulate(loaded, unfolded=each).result for each in (False, True))
    assert folded.step_time_s == unfolded.step_time_s
    assert folded.phases_s == pytest.approx(unfolded.phases_s)


def test_a_tenth_of_the_steps_take_no_longer_than_the_median_though_one_that_sends_less_may():
    scenarios = Path(__file__).resolve().parents[2] / "scenarios"
    question = [
        f"cluster={scenarios / 'clusters/dgx-a100.toml'}",
        f"workload.model={scenarios / 'models/llama3.2-1b.toml'}",
        "workload.global_batch_size=64",
        "workload.sequence_length=512",
        "workload.learning_rate=1e-4",
        "plan.push={threshold=1e-4, error_feedback=true}",
        "plan.publish.threshold=1e-6",
        "plan.micro_batches=2",
        "run.steps=6",
        "run.warmup_steps=3",
    ]
    result = simulate(load_scenario(scenarios / "gpt3-gs.toml", question), banded=False).result
    assert result.step_time_p10_s <= result.step_time_s
