"""Selective checkpointing trains as one device does, with the predicted collectives and peaks."""

import pytest
from real_runs import (
    SGD,
    assert_collectives,
    assert_parameters_of_one_device,
    predicted,
    predicted_peaks,
    quick,
    run_cases,
    scenario_file,
    selected,
    star,
    trained_alone,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch

pytestmark = pytest.mark.real

MANY = ["workload.sequence_length=64", "workload.global_batch_size=12", *SGD]
"""Enough samples that activations, not gradients, make the peak."""
SHORT = ["workload.sequence_length=24", "workload.global_batch_size=12", *SGD]
DIGITS = ["workload.global_batch_size=12", "workload.precision=fp64", *SGD]
BASE = {"gpt": "small-demo.toml", "bert": "small-bert.toml", "resnet": "small-resnet.toml"}
RANKS = 2


def case_of(name: str, *, ranks: int = RANKS) -> dict[str, object]:
    """Return the case `METHOD-MODEL-RECOMPUTE`; an upper-case model takes few samples."""
    method, model, recompute = name.split("-", 2)
    shape = DIGITS if model == "resnet" else SHORT if model.isupper() else MANY
    changes = [star(ranks), *shape, f"plan.method={method}", f"plan.recompute={recompute}"]
    return {"scenario": scenario_file(BASE[model.lower()]), "overrides": changes, "plant": False}


SECOND = "every-second-product"
FEW = ["ddp-gpt-selective", "gs-resnet-selective", f"zero3-bert-{SECOND}"]
NAMES = [
    *FEW,
    "zero3-bert-selective",
    f"gs-gpt-{SECOND}",
    "gs-gpt-selective",
    f"ddp-gpt-{SECOND}",
    "gs-bert-selective",
    "zero1-GPT-selective",
    "zero2-GPT-selective",
]
each_name = pytest.mark.parametrize("name", quick(NAMES, FEW))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    cases = selected(request, {name: case_of(name) for name in NAMES})
    return run_cases(tmp_path_factory.mktemp("ranks"), cases, ranks=RANKS)


@each_name
def test_selective_checkpointing_trains_as_one_device_does_with_the_predicted_collectives(found, name) -> None:
    assert_parameters_of_one_device({name: found[name]})
    assert_collectives(case_of(name), found[name])


@each_name
def test_the_predicted_peak_of_selective_checkpointing_is_the_counted_one(found, name) -> None:
    assert predicted_peaks(case_of(name)) == pytest.approx(found[name]["peaks"], rel=0.01)


@pytest.mark.parametrize("model", ["gpt", pytest.param("bert", marks=pytest.mark.slow)])
def test_one_device_learns_the_very_same_and_needs_less_memory_as_predicted(model) -> None:
    kinds = ("none", "selective", SECOND, "full")
    peaks, parameters = zip(*(trained_alone(case_of(f"single-{model}-{each}", ranks=1)) for each in kinds), strict=True)
    assert list(peaks) == sorted(set(peaks), reverse=True)
    for again in parameters[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters[0], again, strict=True))
    for recompute, measured in zip(kinds, peaks, strict=True):
        (entry,) = predicted(case_of(f"single-{model}-{recompute}", ranks=1)).ranks
        assert entry.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
