"""What sketches of one training predict for the density of another, from other weights and other batches."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import forks
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from real_runs import scenario_file

from gsreal.statistics.collect import take_statistics
from gsreal.statistics.training import Replica, one_thread
from gssim.plan import Push
from gssim.program import lower
from gssim.scenario import Scenario, load_scenario

pytestmark = pytest.mark.real


def loaded(name: str, *overrides: str) -> Scenario:
    """Return a scenario that ships, changed."""
    return load_scenario(Path(scenario_file(name)), list(overrides), gradients_needed=False).scenario


def realised(scenario: Scenario) -> list[float]:
    """Return the push density of each step after the warm-up."""
    replica, run, found = Replica(scenario, scenario.plan.push), scenario.run, []
    with one_thread():
        for step in range(run.warmup_steps + run.steps):
            replica.step(step, lambda rank, gradients: None)
            found.append(replica.sent_elements / replica.offered_elements)
    return found[run.warmup_steps :]


def errors(scenario: Scenario, pushes: list[Push], **how: int) -> tuple[float, float]:
    """Return the geometric-mean error over all unsampled steps, and that of the worst run's average.

    Statistics are from the scenario's seed; the runs, one under each policy, from the next one.
    """
    statistics = take_statistics(scenario, **how)
    unsampled = [
        step for step in range(scenario.run.warmup_steps, statistics.steps) if step not in statistics.sampled_steps
    ]
    logarithms, averages = [], []
    for push in pushes:
        run = replace(scenario.run, seed=scenario.run.seed + 1)
        other = replace(scenario, plan=replace(scenario.plan, push=push), run=run)
        found = realised(other)
        real = [found[step - run.warmup_steps] for step in unsampled]
        predicted = [lower(other, statistics, step=step).push_density or 0.0 for step in unsampled]
        logarithms += [abs(math.log(a / b)) for a, b in zip(predicted, real, strict=True)]
        averages.append(abs(fmean(predicted) / fmean(real) - 1))
    return math.exp(fmean(logarithms)) - 1, max(averages)


def pushes(*thresholds: float) -> list[Push]:
    """Return the thresholds, each with and without error feedback."""
    return [Push(threshold=each, error_feedback=feedback) for each in thresholds for feedback in (False, True)]


@pytest.mark.slow
def test_sketches_of_one_training_predict_the_density_of_another():
    """Digits, of whose gradients a seventh is sent; two courses, to be quick."""
    scenario = loaded("resnet-digits.toml", "run.steps=14", "run.warmup_steps=3")
    error, worst = errors(scenario, pushes(0.01), courses=2)
    assert error <= 0.15
    assert worst <= 0.40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "thresholds"),
    [
        ("resnet-digits.toml", (0.004, 0.013, 0.03, 0.06)),
        ("demo.toml", (3e-4, 1.3e-3, 4e-3, 1.3e-2)),
        ("bert-byte.toml", (3e-4, 1.3e-3, 4e-3)),
    ],
)
def test_densities_from_a_thousandth_to_a_third_are_predicted(name, thresholds):
    error, worst = errors(loaded(name), pushes(*thresholds))
    assert error <= 0.15
    assert worst <= 0.40


@pytest.mark.slow
def test_densities_under_thresholds_that_move_are_predicted():
    """Relative ones, which no scale decides, closely; an estimate is of one batch, and lasts."""
    relative = [Push(kind="relative", threshold=2.0, error_feedback=feedback) for feedback in (False, True)]
    estimated = [
        Push(kind="target-density", threshold=0.03, error_feedback=feedback, reestimate_steps=32)
        for feedback in (False, True)
    ]
    error, worst = errors(loaded("demo.toml"), relative + estimated)
    assert error <= 0.15
    assert worst <= 0.40


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["all-to-all", "ring"])
def test_densities_of_parts_of_sequences_are_predicted_by_their_tokens(exchange, tmp_path):
    """Real ranks that divide sequences, against statistics of whole sequences on ranks with as many tokens."""
    ratios = []
    for number, push in enumerate(pushes(3e-4, 1.3e-3)):
        overrides = [
            f"plan.push.threshold={push.threshold}",
            f"plan.push.error_feedback={json.dumps(push.error_feedback)}",
            "plan.cp=2",
            f"plan.context_exchange={exchange}",
            "run.seed=1",
        ]
        out = tmp_path / f"{number}.json"
        forks.launch(
            "gsreal.run.worker", [scenario_file("demo.toml"), json.dumps(overrides), str(out), "", "", "1"], ranks=2
        )
        asked = load_scenario(Path(scenario_file("demo.toml")), overrides)
        run = asked.scenario.run
        steps = range(run.warmup_steps, run.warmup_steps + run.steps)
        predicted = [lower(asked.scenario, asked.gradients, step=step).push_density or 0.0 for step in steps]
        ratios.append(fmean(predicted) / json.loads(out.read_text())["density"]["push"])
    assert math.exp(fmean(abs(math.log(ratio)) for ratio in ratios)) - 1 <= 0.15
    assert max(abs(ratio - 1) for ratio in ratios) <= 0.40


TARGET = [
    "plan.push.threshold=0.05",
    "plan.push.kind=target-density",
    "plan.push.error_feedback=true",
    "plan.push.reestimate_steps=1",  # in between, a bucket's thresholds are followed together
]


@pytest.mark.parametrize(
    ("changes", "rel"),
    [([], 1e-12), (TARGET, 1e-12), pytest.param(["workload.autocast=bf16"], 1e-3, marks=pytest.mark.slow)],
)
def test_trained_here_as_many_elements_are_sent_as_by_real_ranks(tmp_path, changes, rel):
    """On two ranks, whose contributions can be added in one order only.

    In bf16 it is exact on some processors; on one without AMX some elements in a hundred thousand are on the other side
    of the threshold, and why is not known.
    """
    overrides = [
        "plan.push.threshold=1e-3",
        "plan.shares.batch=[0.75, 0.25]",
        "plan.shares.shards=[0.3, 0.7]",
        "workload.sequence_length=16",
        "run.steps=4",
        "run.warmup_steps=1",
        *changes,
    ]
    out = tmp_path / "measured.json"
    forks.launch(
        "gsreal.run.worker", [scenario_file("small-demo.toml"), json.dumps(overrides), str(out), "", "", "1"], ranks=2
    )
    measured = json.loads(out.read_text())
    found = realised(loaded("small-demo.toml", *overrides))
    assert measured["density"]["push"] == pytest.approx(fmean(found), rel=rel)


def test_relative_thresholds_of_tensors_that_two_owners_share_are_predicted():
    """An own range has no residual, so that the mean and the threshold are smaller: twice as many are sent."""
    halves = ["plan.bucket_bytes=1", "plan.first_bucket_bytes=1"]  # a bucket for every tensor
    whole = loaded("small-demo.toml", "run.steps=14", "run.warmup_steps=3", "workload.sequence_length=32")
    statistics = take_statistics(whole, courses=1)
    for multiple, rel in ((2.0, 0.10), (4.0, 0.25)):
        push = Push(kind="relative", threshold=multiple, error_feedback=True)
        cut = loaded("small-demo.toml", "run.steps=14", "run.warmup_steps=3", "workload.sequence_length=32", *halves)
        cut = replace(cut, plan=replace(cut.plan, push=push))
        predicted = fmean(lower(cut, statistics, step=step).push_density or 0.0 for step in range(3, 17))
        assert predicted == pytest.approx(fmean(realised(cut)), rel=rel)
