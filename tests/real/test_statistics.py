"""Sketches of gradients: what is taken from tensors, and that predictions from them equal what training shows."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from combinations import each_once

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from pathlib import Path

import torch
from strategies import star

from gsreal.measure import Timeline
from gsreal.model_files.build import loss_of
from gsreal.run.feed import Feed
from gsreal.run.worker import build
from gsreal.statistics.collect import APART, Replica, fastest_device, sampled_steps, take_statistics, write_statistics
from gsreal.statistics.records import BlockSketches, Feedback, partition, sketch, typical
from gssim.errors import UserError
from gssim.plan import Push
from gssim.scenario import Scenario, load_model, single_device
from gssim.scenario.run import Run
from gssim.sparsity import push_ratios
from gssim.units import validated
from gssim.workload.gradient_statistics import SKETCH_EDGES, GradientStatistics, Sketch, read_gradients

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
EDGES = np.array(SKETCH_EDGES)
BATCH = (9, 3)
THRESHOLD = 1e-3
CPU = torch.device("cpu")


def scenario_of(*, batch=BATCH, method="gs", model="gpt-byte-150k", **plan):
    """Return a short training of the smallest shipped GPT: 1 warm-up step and 5 that count."""
    shares = {"batch": [samples / sum(batch) for samples in batch], "shards": [0.7, 0.3]}
    data = {
        "name": "made",
        "cluster": star(len(batch)),
        "workload": {
            "model": load_model(MODELS / f"{model}.toml"),
            "global_batch_size": sum(batch),
            "sequence_length": 16,
            "learning_rate": 3e-3,
        },
        "plan": {"method": method, "shares": shares} | plan,
        "run": {"steps": 5, "warmup_steps": 1, "seed": 7},
    }
    return validated(Scenario, data, file="made")


@pytest.fixture(scope="module")
def taken():
    """Return the statistics of the short training, densely and under one threshold."""
    return take_statistics(scenario_of(), [THRESHOLD], every=1, courses=1, batches=1)


# Sketches ------------------------------------------------------------------------------------------------------------


def sketch_of(values: torch.Tensor) -> Sketch:
    """Return the sketch of all values together."""
    found = BlockSketches()
    found.add(values)
    return Sketch(**sketch([found], slice(None)))


def tails_of(sketch: Sketch) -> np.ndarray:
    """Return the fraction that reaches each of the edges."""
    tails = np.full(len(EDGES), sketch.tail_ratios[0])
    tails[sketch.first_edge :] = 0
    tails[sketch.first_edge :][: len(sketch.tail_ratios)] = sketch.tail_ratios
    return tails


def test_the_sketch_of_uniform_values_is_their_tail():
    """|g| uniform in 0..a: the mean is a / 2, the rms a / sqrt(3), and P(|g| >= t) = 1 - t/a."""
    largest = 0.02
    sketch = sketch_of(torch.linspace(-largest, largest, 100_000, dtype=torch.float64).reshape(100, -1))
    assert (sketch.mean, sketch.rms) == pytest.approx((largest / 2, largest / np.sqrt(3)), rel=1e-3)
    assert tails_of(sketch) == pytest.approx(np.clip(1 - EDGES / largest, 0, 1), abs=0.011)  # from 99 % on: all
    reached = EDGES / largest > 0.02
    assert tails_of(sketch)[reached] == pytest.approx(np.clip(1 - EDGES / largest, 0, 1)[reached], abs=6e-4)


def test_the_sketch_of_normal_values_is_their_tail():
    from scipy.special import erfc

    sketch = sketch_of(3e-4 * torch.randn(200_000, generator=torch.Generator().manual_seed(0)))
    assert sketch.rms == pytest.approx(3e-4, rel=0.01)
    assert tails_of(sketch) == pytest.approx(erfc(EDGES / 3e-4 / np.sqrt(2)), abs=0.011)


def test_a_value_at_an_edge_reaches_it_and_zeros_reach_none():
    sketch = sketch_of(torch.tensor([1.0, 1.0, 0.0, -1.0], dtype=torch.float64))
    assert list(tails_of(sketch)) == [0.75 * (edge <= 1.0) for edge in SKETCH_EDGES]
    silent = sketch_of(torch.zeros(3, 2))
    assert (silent.mean, silent.rms, list(tails_of(silent))) == (0, 0, [0.0] * len(EDGES))


def test_a_tensor_is_told_in_as_few_blocks_as_are_alike():
    thirds = torch.tensor([1.0, 1.0, 5.0]).repeat_interleave(400)
    for tensor, small, count in [(thirds, False, 3), (thirds, True, 1), (torch.ones(1200), False, 1)]:
        found = BlockSketches()
        found.add(tensor)
        parts = partition([found.means], small=small)
        assert len(parts) == count
        means = [sketch([found], part)["mean"] for part in parts]
        assert means == pytest.approx([float(each.mean()) for each in tensor.chunk(count)], rel=1e-3)


def test_what_is_not_sent_adds_up_until_it_is():
    """A steady gradient g reaches the threshold t every t/g-th step."""
    feedback, sent = Feedback([0.5, 1.0, 2.5]), []
    for _ in range(10):
        reached = feedback.reached(torch.full((24,), 0.5))
        sent.append(reached.sent.sum(1) / 24)
        feedback.add(torch.full((24,), 0.5))
    assert [list(each) for each in np.array(sent).T] == [[1.0] * 10, [0.0, 1.0] * 5, [0.0, 0.0, 0.0, 0.0, 1.0] * 2]


def test_a_relative_threshold_is_of_the_mean_of_what_has_gathered():
    """Three in four elements gather steps of 1 and the rest of 5; what is twice the mean is sent.

    The means are (3 + 5) / 4, then (3 * 2 + 5) / 4, of which 5 is less than twice, then (3 * 3 + 10) / 4.
    """
    feedback, sent = Feedback([], [2.0]), []
    for _ in range(3):
        values = torch.tensor([1.0, 1.0, 1.0, 5.0]).repeat(12)
        sent.append(feedback.reached(values).relative.sum(2)[:, 0] / 48)
        feedback.add(values)
    plain, kept = np.array(sent).T
    assert list(plain) == [0.25] * 3
    assert list(kept) == [0.25, 0.0, 0.25]


def test_what_courses_show_typically_is_what_half_of_them_exceed():
    """A course that shows far more than the others at a step counts no more than any."""
    courses = [np.array([each, 3 * each]) for each in (0.02, 0.03, 0.9, 0.01, 0.04)]
    assert list(typical(courses)) == pytest.approx([0.03, 0.09])
    assert list(typical(courses[:4])) == pytest.approx([0.025, 0.075])


@pytest.mark.parametrize(("steps", "first", "every"), each_once((1, 2, 11, 45, 1000), (0, 1, 5, 100), (1, 10, 15)))
def test_steps_are_sampled_to_the_last_and_most_densely_at_the_start(steps, first, every):
    found = sampled_steps(steps, first=first, every=every)
    assert found[0] == min(first, 1, steps - 1)
    assert {min(first, steps - 1), steps - 1} <= set(found)
    for before, after in pairwise(found):
        assert 1 <= after - before <= max(1, min(every, (1 + before) // 2))
    assert len(found) <= 2 + 2.5 * math.log2(steps) + steps / every


# Training ------------------------------------------------------------------------------------------------------------


def test_statistics_cover_every_parameter_rank_and_sampled_step(taken):
    scenario = scenario_of()
    names = {name for name, _ in build(single_device(scenario), Timeline(0, CPU), CPU).module.named_parameters()}
    assert isinstance(taken, GradientStatistics)
    assert (taken.steps, taken.sampled_steps) == (6, (1, 2, 3, 4, 5))
    runs = [(0.0, False), (THRESHOLD, False), (THRESHOLD, True)]
    assert sorted((t.samples, t.threshold, t.error_feedback) for t in taken.traces) == [
        (samples, *run) for samples in (3, 9) for run in runs
    ]
    for trace in taken.traces:
        assert set(trace.tensors) == names
        for tensor in trace.tensors.values():
            assert any(min(sketch.rms for sketch in block.sketches) > 0 for block in tensor.blocks)
            assert tensor.correlations == ()  # no two gradients with as many samples were seen at a step
    assert set(taken.changes) == names
    assert (taken.model, taken.optimizer, taken.global_batch_size) == ("gpt-byte-150k", "adamw", 12)
    assert (taken.sequence_length, taken.learning_rate, taken.seed) == (16, 3e-3, 7)
    assert "2 ranks" in taken.source


def test_statistics_come_back_from_their_file(taken, tmp_path):
    write_statistics(tmp_path / "made" / "gradients.json", taken)
    assert read_gradients(tmp_path / "made" / "gradients.json") == taken
    lines = (tmp_path / "made" / "gradients.json").read_text().splitlines()
    rows = [line for line in lines if '"mean"' in line]
    assert len(rows) == sum(len(trace.tensors) for trace in taken.traces)  # a line for each: diffs stay readable
    assert json.loads("{" + rows[0].rstrip(",") + "}")


def short(**changes):
    """Return a scenario of two steps."""
    return replace(scenario_of(**changes), run=Run(steps=1, warmup_steps=1, seed=7))


def test_the_same_training_gives_the_same_statistics():
    first, second = (take_statistics(short(), [THRESHOLD], every=1, courses=1, batches=1) for _ in range(2))
    assert first == second


def test_ranks_with_as_many_samples_share_a_trace_and_what_they_have_in_common_is_told():
    (trace,) = take_statistics(short(batch=(6, 6)), [], every=1, courses=1, batches=3).traces
    assert trace.samples == 6
    assert all(0 < tensor.correlations[0] <= 1 for name, tensor in trace.tensors.items() if "norm" in name)


def test_a_rank_without_samples_has_no_gradients():
    traces = take_statistics(short(batch=(12, 0)), [THRESHOLD], every=1, courses=1, batches=1).traces
    assert {trace.samples for trace in traces} == {12}


def test_parts_of_sequences_have_no_statistics_of_their_own():
    with pytest.raises(UserError, match=r"plan\.cp = 2: gradients are taken of whole sequences"):
        take_statistics(scenario_of(cp=2, shares={}))


def gradients_of(scenario, *, rank, step):
    """Return a rank's gradients after `step` steps on one device, which the sharded training equals."""
    single = single_device(scenario)
    training = build(single, Timeline(0, CPU), CPU)
    whole = Feed(single, 0, CPU)
    for earlier in range(step):
        inputs, targets, weights = whole.at(earlier)
        training.step(inputs, targets, weights, 0)
    inputs, targets, _ = Feed(scenario, rank, CPU).at(step)
    loss_of(training.module(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in training.module.named_parameters()}


@pytest.mark.parametrize(("rank", "step"), [(0, 3), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_the_density_predicted_at_a_sampled_step_is_the_exact_fraction(taken, rank, step):
    """At an edge of the sketch to its digits; elsewhere it lies between the fractions at the next edges."""
    for name, gradient in gradients_of(scenario_of(), rank=rank, step=step).items():
        magnitudes = gradient.abs().double().flatten()
        if len(magnitudes) < 10_000:
            continue
        typical = int(np.searchsorted(EDGES, float(magnitudes.median())))
        for edge, higher in pairwise(EDGES[typical : typical + 12]):
            for threshold in (edge, (edge * higher) ** 0.5):
                push = Push(threshold=float(threshold))
                predicted = push_ratios(dense_alone(taken), push, samples=BATCH[rank], tensor=name, step=step).over(
                    0.0, 1.0
                )
                exact = float((magnitudes >= threshold).double().mean())
                span = float(((magnitudes >= edge) & (magnitudes < higher)).double().mean())
                allowed = 0.011 * exact if threshold == edge else 0.6 * span + 0.011 * exact
                assert abs(predicted - exact) <= allowed + 3 / len(magnitudes), (name, threshold)


def dense_alone(statistics):
    """Return what dense training alone showed."""
    return replace(statistics, traces=tuple(trace for trace in statistics.traces if not trace.threshold))


def test_dropping_gradients_changes_later_ones(taken):
    by_run = {(t.threshold, t.error_feedback): t.tensors for t in taken.traces if t.samples == BATCH[0]}
    assert len(by_run) == 3
    assert by_run[0.0, False] != by_run[THRESHOLD, False] != by_run[THRESHOLD, True]


@pytest.mark.slow
def test_looking_at_other_batches_leaves_the_training_as_it_is():
    """Published parameters depend on the training alone; gradient statistics are taken on further batches."""
    one, several = (take_statistics(short(), [], every=1, courses=1, batches=batches) for batches in (1, 3))
    assert one.changes == several.changes
    assert one.traces != several.traces


def test_what_is_computed_aside_puts_random_numbers_and_running_means_back():
    """The network has dropout, and counts the batches that it has seen."""
    replica = Replica(scenario_of(), Push())
    noisy = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    replica.module = noisy
    before, drawn = [buffer.clone() for buffer in noisy.buffers()], []
    for aside in (False, True):
        torch.manual_seed(0)
        if aside:
            with replica.aside():
                noisy(torch.ones(3, 4))
                assert not torch.equal(noisy[1].running_mean, before[0])
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert all(torch.equal(buffer, value) for buffer, value in zip(noisy.buffers(), before, strict=True))


def test_a_statistic_is_the_typical_one_of_courses_of_other_seeds(monkeypatch):
    """To the digits of the files; what one course has held back is not in the next one."""
    monkeypatch.setattr("gsreal.statistics.collect._grids", lambda replica: ((1e-4, 1e-3), (1e-4, 1e-3)))

    def taken_from(seed, courses):
        scenario = replace(short(), run=replace(short().run, seed=seed))
        return take_statistics(scenario, [], every=1, courses=courses, batches=1)

    both, first, second = taken_from(7, 2), taken_from(7, 1), taken_from(7 + APART, 1)
    compared = 0
    for name in both.changes:
        blocks = [each.traces[0].tensors[name].blocks for each in (both, first, second)]
        if {len(each) for each in blocks} == {1}:
            shown = [
                [b.sketches[0].mean, *b.feedback[0].sent_ratios, *b.relative[0].feedback_ratios] for (b,) in blocks
            ]
            assert shown[0] == pytest.approx(list(typical(shown[1:])), rel=0.01)
            assert shown[1] != shown[2]
            compared += 1
        sent = [each.changes[name].blocks for each in (both, first, second)]
        if {len(each) for each in sent} == {1}:
            rows = [np.array(each[0][0]) for each in sent]
            assert rows[0] == pytest.approx(typical(rows[1:]), rel=0.01)
    assert compared > len(both.changes) / 2


# What the owners get --------------------------------------------------------------------------------------------------


def trained(push, *, steps=2, **changes):
    """Return the parameters after a few steps under a push policy."""
    replica = Replica(scenario_of(**changes), push)
    for step in range(steps):
        replica.step(step, lambda rank, gradients: None)
    return torch.cat([parameter.detach().flatten() for parameter in replica.module.parameters()])


def test_where_everything_is_sent_policies_do_not_matter():
    dense = trained(Push())
    assert torch.allclose(trained(Push(threshold=1e-30, error_feedback=True)), dense, atol=1e-7)
    assert torch.allclose(trained(Push(threshold=1e3, aggregate="received-weight", warmup_steps=2)), dense, atol=1e-7)
    assert not torch.allclose(trained(Push(threshold=1e3)), dense, atol=1e-6)


def test_what_is_not_sent_is_added_to_the_next_gradient():
    """At a threshold that nothing reaches the residual is the sum of all gradients, where others own it."""
    replica = Replica(scenario_of(), Push(threshold=1e3, error_feedback=True))
    total = 0
    for step in range(2):
        seen = {}
        replica.step(step, lambda rank, gradients, seen=seen: seen.update({rank: gradients["head.weight"].clone()}))
        total = total + seen[1]
    expected = torch.where(replica.owners["head.weight"] == 1, torch.zeros(()), total)
    assert torch.allclose(replica.residuals[1, "head.weight"], expected, atol=1e-7)


@pytest.mark.parametrize("feedback", [False, True])
def test_a_target_density_is_what_every_step_sends(feedback):
    push = Push(kind="target-density", threshold=0.1, reestimate_steps=4, error_feedback=feedback)
    scenario = scenario_of(batch=(6, 6), model="gpt-byte-1m")  # the density of few elements varies more between steps
    replica, sent = Replica(scenario, push), []
    for step in range(5):
        replica.step(step, lambda rank, gradients: None)
        sent.append(replica.sent_elements / replica.offered_elements)
    assert sent == pytest.approx([0.1] * 5, rel=0.1)


def test_a_target_density_is_met_where_residuals_have_gathered():
    """Residuals accumulate only in ranges that others own, whose values then exceed those of the own range."""
    push = Push(kind="target-density", threshold=0.02, reestimate_steps=4, error_feedback=True)
    cut = {"shares": {"shards": [0.5, 0.5]}, "bucket_bytes": 1, "first_bucket_bytes": 1}  # every tensor in halves
    replica, sent = Replica(scenario_of(batch=(6, 6), **cut), push), []
    for step in range(24):
        replica.step(step, lambda rank, gradients: None)
        sent.append(replica.sent_elements / replica.offered_elements)
    assert np.mean(sent[12:]) == pytest.approx(0.02, rel=0.1)


def test_a_relative_threshold_sends_what_reaches_a_multiple_of_the_tensors_mean():
    replica, shown = Replica(scenario_of(), Push(kind="relative", threshold=2.0)), {}
    replica.step(0, lambda rank, gradients: shown.update({rank: {n: g.clone() for n, g in gradients.items()}}))
    expected = 0
    for rank, gradients in shown.items():
        for name, gradient in gradients.items():
            reached = gradient.abs() >= 2 * gradient.abs().mean()
            expected += int((reached & (replica.owners[name] != rank)).sum())
    assert replica.sent_elements == pytest.approx(expected, abs=3)


def test_weight_that_was_not_received_counts_for_nothing():
    """If nothing is sent, an owner's gradient is its own mean, as if the other ranks had no samples."""
    plain, normalised = (Replica(scenario_of(), Push(threshold=1e3, aggregate=each)) for each in AGGREGATES)
    for replica in (plain, normalised):
        replica.step(0, lambda rank, gradients: None)
    for name, parameter in plain.parameters.items():
        weights = torch.where(plain.owners[name] == 0, *(n / sum(BATCH) for n in BATCH))
        assert torch.allclose(parameter.grad / weights, normalised.parameters[name].grad, rtol=1e-5, atol=1e-9)


AGGREGATES = ("batch-weight", "received-weight")


@pytest.mark.parametrize(
    ("kind", "has_gpu", "free_bytes", "expected"),
    [
        ("cuda", True, 1e12, "cuda"),
        ("cuda", True, 1e3, "cpu"),
        ("cuda", False, 1e12, "cpu"),
        ("cpu", True, 1e12, "cpu"),
    ],
)
def test_a_gpu_takes_the_statistics_of_a_scenario_for_gpus_if_it_has_room(
    monkeypatch, kind, has_gpu, free_bytes, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 2 * free_bytes))
    scenario = scenario_of()
    types = {name: replace(each, kind=kind) for name, each in scenario.cluster.device_types.items()}
    of_kind = replace(scenario, cluster=replace(scenario.cluster, device_types=types))
    assert fastest_device(of_kind).type == expected
