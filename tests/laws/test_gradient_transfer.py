"""Gradient statistics transferred from families of small models: held-back trainings, measured files, every model."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from real_runs import quick

from analysis.charts.sweeps.thresholds import draw_band
from gssim import sparsity
from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.interop.models import find_model
from gssim.plan import METHODS, Push
from gssim.scenario import Loaded, load_scenario, read_toml
from gssim.simulation import simulate
from gssim.sparsity import push_ratios
from gssim.sweeps.table import outcome
from gssim.workload import Model, shipped_models, unrolled
from gssim.workload.gradient_family import (
    DENSITIES,
    Family,
    HeldBackError,
    distances,
    held_back_errors,
    question_of,
    read_family,
    scale_error,
    shipped_families,
    tail_at,
)
from gssim.workload.gradient_rungs import family_of, placed
from gssim.workload.gradient_statistics import GradientStatistics, at_end, read_gradients
from gssim.workload.gradient_transfer import zipf

ROOT = Path(__file__).resolve().parents[2]
SHARED = Shared()
"""Models and their transferred statistics, which many tests ask for."""
FAMILIES = ("bert", "gpt", "llama", "resnet")
TRANSFORMERS = ("bert", "gpt", "llama")


@cache
def family(name: str) -> Family:
    return read_family(shipped_families()[name])


@cache
def errors(name: str) -> list[HeldBackError]:
    return held_back_errors(family(name))


def test_families_ship_with_the_package() -> None:
    assert set(shipped_families()) == set(FAMILIES)
    assert all(family(name).source for name in FAMILIES)
    assert all(path.stat().st_size < 400_000 for path in shipped_families().values())


@pytest.mark.parametrize("name", quick(FAMILIES, ("gpt",)))
def test_the_band_covers_nine_in_ten_held_back_densities(name: str) -> None:
    """Each training is predicted from the others: other widths, depths, rates, batches; the first 8 steps, and all."""
    covered = [
        abs(error) <= math.hypot(family(name).scale_error, *beyond(name, each))
        for each in errors(name)
        for error in each.scales
    ]
    assert len(covered) >= 5 * 2 * len(DENSITIES)
    assert np.mean(covered) >= 0.9


def beyond(name: str, error: HeldBackError) -> list[float]:
    slopes = family(name).slope_errors
    return [slopes[side] * distance for side, distance in error.distances.items()]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_the_largest_model_is_predicted_from_smaller_ones_within_a_factor_of_one_and_a_half(name: str) -> None:
    largest = max(family(name).rungs, key=lambda rung: sum(rung.elements.values()))
    assert largest.held_back
    others = [rung for rung in family(name).rungs if rung is not largest]
    assert sum(largest.elements.values()) > 3 * max(sum(rung.elements.values()) for rung in others)
    found = [each for each in errors(name) if each.rung == largest.name]
    assert {each.window for each in found} == {"start", "run"}
    for each in found:
        assert np.abs(each.densities).max() <= math.log(1.5)


def test_the_band_grows_with_the_distance_from_the_ladder() -> None:
    gpt = family("gpt")
    inside = question_of(gpt.rungs[0])
    assert max(distances(gpt, inside).values()) == 0
    wider = [scale_error(gpt, replace(inside, width=width)) for width in (64, 256, 4096)]
    assert wider == sorted(set(wider))
    assert scale_error(gpt, inside, vocabulary=50257) > scale_error(gpt, inside)


MEASURED = {
    "gpt-byte-1m": ("demo.toml", []),
    "gpt-byte-1m-1024": ("demo.toml", ["workload.global_batch_size=1024", "run.steps=7", "run.warmup_steps=5"]),
    "bert-byte-1m": ("bert-byte.toml", ["plan.method=gs"]),
    "resnet-digits": ("resnet-digits.toml", []),
}


def transferred(file: str, overrides: list[str]) -> tuple[GradientStatistics, Model]:
    loaded = load_scenario(
        ROOT / "scenarios" / file,
        [*overrides, "workload.gradients=transferred", "plan.push.threshold=1e-4"],
        shared=SHARED,
    )
    assert loaded.gradients is not None
    return loaded.gradients, loaded.scenario.workload.model


def density(statistics: GradientStatistics, model: Model, threshold: float, samples: int) -> float:
    """Return the density of the whole model, as a mean over all steps of the statistics."""
    sizes = {
        name: parameter.elements
        for instance in unrolled(model)
        for name, parameter in zip(instance.parameter_names, instance.layer.parameters, strict=True)
    }
    push, steps = Push(threshold=threshold, error_feedback=False), range(1, statistics.steps, 3)
    return sum(
        count * push_ratios(statistics, push, samples=samples, tensor=name, step=step).over(0.0, 1.0) / len(steps)
        for name, count in sizes.items()
        for step in steps
    ) / sum(sizes.values())


@pytest.mark.parametrize("name", quick(MEASURED, ("resnet-digits",)))
def test_measured_statistics_of_shipped_models_lie_in_the_band(name: str) -> None:
    """No family has seen these models: they are wider than its first rung, and trained in longer sequences."""
    measured = read_gradients(ROOT / f"scenarios/gradients/{name}.json")
    statistics, model = transferred(*MEASURED[name])
    samples = measured.traces[0].samples
    low, high = (at_end(statistics, high=side) for side in (False, True))
    inside = []
    for threshold in np.geomspace(1e-6, 1e-1, 11):
        truth = density(measured, model, threshold, samples)
        if DENSITIES[0] <= truth <= DENSITIES[-1]:
            ends = [density(each, model, threshold, samples) for each in (low, high)]
            inside.append(ends[0] <= truth <= ends[1])
    assert inside
    assert np.mean(inside) >= 0.9


PUSHES: dict[str, dict[str, object]] = {
    "absolute": {"threshold": 1e-4},
    "with error feedback": {"threshold": 1e-4, "error_feedback": True},
    "relative": {"threshold": 2.0, "kind": "relative"},
    "relative with error feedback": {"threshold": 2.0, "kind": "relative", "error_feedback": True},
    "target density": {"threshold": 0.01, "kind": "target-density"},
}


def asked(model: str, push: dict[str, object], method: str = "gs", **publish: object) -> Loaded:
    file = ROOT / "scenarios/gpt2-unequal-gpus.toml"
    tables = read_toml(file)[1]
    workload = tables["workload"] | {"model": model, "global_batch_size": 16, "sequence_length": 64}
    if "resnet" in model:
        del workload["sequence_length"]
        workload |= {"optimizer": "sgd-momentum"}
    plan = {"method": method, "push": push} | ({"publish": publish} if publish else {})
    run = {"steps": 3, "warmup_steps": 2, "seed": 0}
    tables |= {"workload": workload, "plan": plan, "run": run, "question": "", "name": "t"}
    return load_scenario(file, tables=tables, shared=SHARED)


OTHER_KINDS = tuple(kind for kind in PUSHES if kind != "absolute")


def test_networks_under_one_plan_share_the_densities_of_both_ends_of_the_band(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["step"])
        return push_ratios(*args, **kwargs)

    monkeypatch.setattr(sparsity, "push_ratios", counted)
    overrides = ["workload.gradients=transferred", "plan.push.threshold=1e-4", "run.steps=4"]
    loaded = load_scenario(ROOT / "scenarios" / "gpt2-unequal-gpus.toml", overrides)
    shared = Shared()
    first = simulate(loaded, shared=shared).result
    assert asked
    asked.clear()
    again = simulate(loaded, shared=shared).result
    assert not asked
    assert again.band == first.band
    assert first.band is not None


QUICK = ("gpt2-124m", "resnet-50", "bert-byte-1m", "mixture-byte-1m", "gpt-byte-1m")
MODELS = {name: () if name in QUICK else (pytest.mark.slow,) for name in sorted(shipped_models())}


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        *(pytest.param(each, ("absolute",), marks=marks) for each, marks in MODELS.items()),
        *(
            pytest.param(each, OTHER_KINDS, marks=pytest.mark.slow)
            for each in ("bert-byte-1m", "resnet-50", "gpt2-124m", "mixture-byte-1m")
        ),
    ],
)
def test_thresholds_of_every_shipped_model_are_answered_with_their_band(model: str, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        push = PUSHES[kind]
        loaded = asked(model, push)
        result = simulate(loaded).result
        band, dense = result.band, result.density
        assert band is not None
        assert band.family == family_of(loaded.scenario.workload.model)
        assert dense.push is not None
        assert dense.push_low is not None
        assert dense.push_high is not None
        assert 0 <= dense.push_low <= dense.push <= dense.push_high <= 1
        assert band.step_time_low_s <= result.step_time_s <= band.step_time_high_s
        assert band.bytes_sent_low <= band.bytes_sent_high
        assert band.peak_allocated_low_bytes <= band.peak_allocated_high_bytes
        assert "transferred" in result.provenance["gradient_statistics"]
        if "kind" not in push:
            assert 0.001 < dense.push < 0.999, kind
        assert result.to_dict()["band"]["family"] == band.family


def test_the_peaks_at_the_ends_of_the_band_are_those_of_steps_replayed_with_its_statistics() -> None:
    loaded = asked("gpt2-124m", {"threshold": 1e-4})
    statistics, result = loaded.gradients, simulate(loaded).result
    band = result.band
    assert statistics is not None
    assert band is not None
    assert any((each.fragmentation_ratio or 0) > 0 for each in result.ranks)
    ends = [
        simulate(replace(loaded, gradients=at_end(statistics, high=high)), banded=False).result
        for high in (False, True)
    ]
    peaks = [max(each.peak_allocated_bytes for each in end.ranks) for end in (result, *ends)]
    assert min(peaks) == pytest.approx(band.peak_allocated_low_bytes, rel=2e-3)
    assert max(peaks) == pytest.approx(band.peak_allocated_high_bytes, rel=2e-3)
    assert band.peak_allocated_high_bytes > 1.005 * band.peak_allocated_low_bytes


@pytest.mark.parametrize("model", quick(("bert-large", "llama2-13b", "gpt3-175b", "mt-nlg-530b"), ("bert-large",)))
def test_statistics_of_large_models_have_every_tensor(model: str) -> None:
    loaded = asked(model, {"threshold": 1e-4})
    statistics, names = loaded.gradients, {each.name for each in placed(loaded.scenario.workload.model)}
    assert statistics is not None
    assert all(set(trace.tensors) == names for trace in statistics.traces)
    assert set(statistics.changes) == names
    pushed = [
        push_ratios(statistics, loaded.scenario.push, samples=4, tensor=name, step=2).over(0.0, 1.0) for name in names
    ]
    assert all(0 <= each <= 1 for each in pushed)
    assert max(pushed) > 0


@pytest.mark.parametrize("method", [name for name, each in METHODS.items() if each.gradients == "push"])
def test_every_method_that_pushes_takes_transferred_statistics(method: str) -> None:
    result = simulate(asked("gpt2-124m", {"threshold": 1e-4}, method)).result
    assert result.band is not None
    assert result.band.density_error_ratio > 1


def test_a_table_has_the_band_and_a_chart_draws_it() -> None:
    row = outcome(simulate(asked("gpt-byte-1m", {"threshold": 1e-3})).result)
    assert row["push_density_low_ratio"] < row["push_density_ratio"] < row["push_density_high_ratio"]
    assert row["step_time_low_s"] <= row["step_time_s"] <= row["step_time_high_s"]
    assert row["bytes_sent_low_per_step"] < row["bytes_sent_high_per_step"]
    rows = [row | {"plan.push.threshold": threshold} for threshold in (1e-3, 1e-2)]
    _, axes = pyplot.subplots()
    draw_band(axes, rows, {"color": "black"}, (1e-3, 1e-2), "push_density", lambda value: value)
    (band,) = axes.collections
    heights = {float(y) for _, y in band.get_paths()[0].vertices}
    assert heights == {row["push_density_low_ratio"], row["push_density_high_ratio"]}
    pyplot.close()


def test_published_parameters_are_thresholded_too() -> None:
    result = simulate(asked("gpt2-124m", {"threshold": 1e-4}, threshold=3e-5)).result
    assert result.density.publish is not None
    assert 0 < result.density.publish < 1


def test_measured_statistics_win_and_others_are_refused() -> None:
    file = ROOT / "scenarios/demo.toml"
    exact = load_scenario(file, ["plan.push.threshold=1e-3"])
    assert exact.gradients is not None
    assert exact.gradients.transfer is None
    result = simulate(exact).result
    assert result.band is None
    assert "band" not in result.to_dict()
    assert "push_low" not in result.to_dict()["density"]
    with pytest.raises(UserError, match="learning_rate"):
        load_scenario(file, ["plan.push.threshold=1e-3", "workload.learning_rate=1e-3"])


def test_a_higher_threshold_lets_through_no_more() -> None:
    loaded = asked("llama3-8b", {"threshold": 1e-4})
    assert loaded.gradients is not None
    pushed = [density(loaded.gradients, loaded.scenario.workload.model, 10.0**k, 4) for k in range(-7, 0)]
    assert pushed == sorted(pushed, reverse=True)
    assert pushed[0] > 0.5 > 0.001 > pushed[-1]


def test_the_calibration_id_is_of_the_family_and_the_question() -> None:
    ids = [asked("gpt2-124m", {"threshold": threshold}).calibration_id for threshold in (1e-4, 1e-4, 1e-3)]
    assert ids[0] == ids[1] == ids[2]
    assert asked("gpt2-355m", {"threshold": 1e-4}).calibration_id != ids[0]


def test_roles_cover_the_tensors_of_every_shipped_model() -> None:
    """Each matrix of a block has its own role; heads, embeddings and tied embeddings have different roles."""
    for name in shipped_models():
        roles = {each.role for each in placed(find_model(name).model)}
        if "resnet" in name:
            assert {"stem", "convolution", "head", "norm.weight"} <= roles
        else:
            assert {"out", "norm.weight"} <= roles
            assert ("tied" in roles) != ({"tokens", "head"} <= roles)
            assert roles & {"q", "qkv"}


def test_zipf_sums_to_one_and_tails_fall() -> None:
    frequency, tokens = zipf(30522)
    assert float(frequency @ tokens) == pytest.approx(1)
    assert (np.diff(frequency) < 0).all()
    levels = np.geomspace(0.01, 100, 50)
    found = tail_at((0.1, 1.0, 10.0), (0.9, 0.4, 0.01), levels)
    assert (np.diff(found) <= 0).all()
