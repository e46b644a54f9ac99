"""Sketches of gradients: what is taken from tensors, and that predictions from them equal what training shows."""

import json
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from pathlib import Path

import torch
from strategies import star

from gsreal.build import loss_of
from gsreal.measure import Timeline
from gsreal.statistics import _sketch, sampled_steps, take_statistics, write_statistics
from gsreal.worker import Feed, build
from gssim.density import push_density
from gssim.gradients import SKETCH_EDGES, GradientStatistics, read_gradients
from gssim.plan import Push
from gssim.scenario import Scenario, load_model, single_device
from gssim.units import validated

MODELS = Path(__file__).resolve().parents[1] / "scenarios" / "models"
EDGES = np.array(SKETCH_EDGES)
BATCH = (9, 3)
THRESHOLD = 1e-3
CPU = torch.device("cpu")


def scenario_of(*, batch=BATCH, method="gs", **plan):
    """Return a short training of the smallest shipped GPT: 1 warm-up step and 5 that count."""
    shares = {"batch": [samples / sum(batch) for samples in batch], "shards": [0.7, 0.3]}
    data = {
        "name": "made",
        "cluster": star(len(batch)),
        "workload": {
            "model": load_model(MODELS / "gpt-byte-1m.toml"),
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
    return take_statistics(scenario_of(), [0.0, THRESHOLD])


# Sketches ------------------------------------------------------------------------------------------------------------


def test_the_sketch_of_uniform_values_is_their_tail():
    """|g| uniform in 0..a: the rms is a / sqrt(3), and P(|g| >= t) = 1 - t/a."""
    count, largest = 100_000, 0.02
    values = torch.linspace(-largest, largest, count, dtype=torch.float64)
    rms, tail = _sketch(values.reshape(100, -1), with_tail=True)
    assert rms == pytest.approx(largest / np.sqrt(3), rel=1e-4)
    assert tail == pytest.approx(np.clip(1 - EDGES / np.sqrt(3), 0, 1), abs=2e-5)


def test_the_sketch_of_normal_values_is_their_tail():
    from scipy.special import erfc

    values = 3e-4 * torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    rms, tail = _sketch(values, with_tail=True)
    assert rms == pytest.approx(3e-4, rel=0.01)
    assert tail == pytest.approx(erfc(EDGES / np.sqrt(2)), abs=0.005)


def test_a_value_at_the_edge_reaches_it():
    rms, tail = _sketch(torch.ones(4, dtype=torch.float64), with_tail=True)
    assert rms == 1.0
    assert list(tail) == [float(edge <= 1.0) for edge in SKETCH_EDGES]


def test_a_gradient_of_zeros_has_no_tail():
    rms, tail = _sketch(torch.zeros(3, 2), with_tail=True)
    assert rms == 0.0
    assert list(tail) == [0.0] * len(EDGES)
    assert _sketch(torch.ones(3), with_tail=False) == (1.0, None)


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 50, 1000])
def test_steps_are_sampled_from_the_first_to_the_last_and_ever_fewer(steps):
    found = sampled_steps(steps)
    assert found[0] == 0
    assert found[-1] == steps - 1
    assert list(found[:4]) == list(range(min(steps, 4)))
    assert all(a < b for a, b in pairwise(found))
    gaps = [b - a for a, b in pairwise(found[:-1])]
    assert gaps == sorted(gaps)
    assert len(found) < 30


# Training ------------------------------------------------------------------------------------------------------------


def test_statistics_cover_every_parameter_rank_and_step(taken):
    scenario = scenario_of()
    names = {name for name, _ in build(single_device(scenario), Timeline(0, CPU), CPU).module.named_parameters()}
    assert isinstance(taken, GradientStatistics)
    assert taken.sampled_steps == (0, 1, 2, 3, 4, 5)
    assert taken.steps == 6
    assert sorted((trace.samples, trace.threshold) for trace in taken.traces) == [
        (samples, threshold) for samples in (3, 9) for threshold in (0.0, THRESHOLD)
    ]
    for trace in taken.traces:
        assert set(trace.tensors) == names
        for tensor in trace.tensors.values():
            assert len(tensor.rms) == 6
            assert min(tensor.rms) > 0
            assert all(len(tail) == len(SKETCH_EDGES) for tail in tensor.tail_ratios)
            assert all(a >= b for tail in tensor.tail_ratios for a, b in pairwise(tail))
    assert (taken.model, taken.optimizer, taken.global_batch_size) == ("gpt-byte-1m", "adamw", 12)
    assert (taken.sequence_length, taken.learning_rate, taken.seed) == (16, 3e-3, 7)
    assert "2 ranks" in taken.source


def test_statistics_come_back_from_their_file(taken, tmp_path):
    write_statistics(tmp_path / "made" / "gradients.json", taken)
    assert read_gradients(tmp_path / "made" / "gradients.json") == taken
    lines = (tmp_path / "made" / "gradients.json").read_text().splitlines()
    rows = [line for line in lines if '"rms"' in line]
    assert len(rows) == sum(len(trace.tensors) for trace in taken.traces)  # a line for each: diffs stay readable
    assert json.loads("{" + rows[0].rstrip(",") + "}")


def test_the_same_training_gives_the_same_statistics(taken):
    assert take_statistics(scenario_of(), [0.0, THRESHOLD]) == taken


def test_ranks_with_as_many_samples_share_a_trace():
    (trace,) = take_statistics(scenario_of(batch=(6, 6)), [0.0]).traces
    assert trace.samples == 6


def test_a_rank_without_samples_has_no_gradients():
    (trace,) = take_statistics(scenario_of(batch=(12, 0)), [THRESHOLD]).traces
    assert trace.samples == 12


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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [0, 3])
def test_the_density_predicted_at_a_sampled_step_is_the_exact_fraction(taken, rank, step):
    """Both lie between the fractions at the neighbouring edges of the sketch; at an edge they are equal."""
    dense = [trace for trace in taken.traces if trace.threshold == 0]
    statistics = GradientStatistics(**{name: getattr(taken, name) for name in FIELDS} | {"traces": tuple(dense)})
    for name, gradient in gradients_of(scenario_of(), rank=rank, step=step).items():
        magnitudes = gradient.abs().double().flatten()
        rms = float(magnitudes.square().mean().sqrt())
        rounding = 2 / len(magnitudes) + 1e-3  # of values near the threshold, and of four digits
        for edge, higher in pairwise(EDGES[6:30]):
            for threshold in (edge * rms, (edge * higher) ** 0.5 * rms):
                push = Push(threshold=float(threshold))
                predicted = push_density(statistics, push, samples=BATCH[rank], tensor=name, step=step)
                exact = float((magnitudes >= threshold).double().mean())
                span = float(((magnitudes >= edge * rms) & (magnitudes < higher * rms)).double().mean())
                allowed = rounding if threshold == edge * rms else rounding + span
                assert abs(predicted - exact) <= allowed, (name, threshold / rms)


FIELDS = [name for name in GradientStatistics.__dataclass_fields__ if name != "traces"]


def test_dropping_gradients_changes_later_ones_alone(taken):
    """Step 0 comes before any update, so it is the same under every threshold."""
    by_threshold = {trace.threshold: trace.tensors for trace in taken.traces if trace.samples == BATCH[0]}
    dense, thresholded = by_threshold[0.0], by_threshold[THRESHOLD]
    assert {name: book.rms[0] for name, book in dense.items()} == {n: b.rms[0] for n, b in thresholded.items()}
    assert any(book.rms[-1] != thresholded[name].rms[-1] for name, book in dense.items())
