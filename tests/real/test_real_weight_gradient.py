"""Weight gradients divided among ranks by layers; steps with all other layers frozen are the oracle."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    SGD,
    assert_collectives,
    assert_parameters_of_one_device,
    by_ranks,
    predicted_peaks,
    scenario_file,
    slow_where,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from torch._subclasses.fake_tensor import FakeTensorMode

from gsreal.model_files.build import example_batch
from gsreal.model_files.fake_module import fake_module
from gsreal.model_files.recorder import Record
from gsreal.model_files.step import record_trained
from gssim.memory import activation_timeline
from gssim.scenario import load_model
from gssim.workload import LayerInstance, Model, unrolled
from gssim.workload.owned import owned_layers

pytestmark = pytest.mark.real

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
BATCH, LENGTH = 4, 40
"""A shape at which nothing was traced."""
Place = tuple[int, str]


@cache
def shipped(name: str) -> Model:
    return load_model(MODELS / f"{name}.toml")


def recorded(model: Model, owned: Iterable[int]) -> Record:
    """Return what a step shows in which the parameters of the `owned` layers alone are trained."""
    layers = unrolled(model)
    length = LENGTH if model.input.kind == "tokens" else None
    with FakeTensorMode():
        module = fake_module(model, "test")
        module.train()
        trained = {name for index in owned for name in layers[index].parameter_names}
        names = [layer.module for layer in layers if layer.layer.modules]
        return record_trained(module, names, trained, *example_batch(model, batch_size=BATCH, sequence_length=length))


def seen(record: Record, places: list[Place]) -> dict[Place, tuple[float, float]]:
    """Return the peak of every place of a step, and what is alive at its end, of a record."""
    events = defaultdict(list)
    for alive in record.alive:
        events[alive.born[:2]].append((alive.born[2], alive.size_bytes))
        if alive.freed:
            events[alive.freed[:2]].append((alive.freed[2], -alive.size_bytes))
    return replayed(events, places)


def composed(layers: tuple[LayerInstance, ...], places: list[Place]) -> dict[Place, tuple[float, float]]:
    """Return the same of layers as they are put together."""
    timeline = activation_timeline(layers, batch_size=BATCH, sequence_length=LENGTH)
    events = {place: [(e.position, e.size_bytes) for e in timeline.at(*place)] for place in places}
    return replayed(events, places)


def replayed(events: dict[Place, list[tuple[int, float]]], places: list[Place]) -> dict[Place, tuple[float, float]]:
    held, found = 0.0, {}
    for place in places:
        order = sorted(events.get(place, ()), key=lambda event: (event[0], event[1] < 0))
        levels = [held, *accumulate((size for _, size in order), initial=held)]
        held, found[place] = levels[-1], (max(levels), levels[-1])
    return found


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("gpt-byte-1m", 0, 3), ("gpt-byte-1m", 6, 7), ("bert-byte-1m", 1, 2), ("resnet-digits", 3, 6)]
    + [pytest.param("gpt-byte-1m", 2, 4, marks=pytest.mark.slow)]
    + [pytest.param("resnet-digits", first, first + n, marks=pytest.mark.slow) for first, n in ((0, 1), (1, 1), (5, 3))]
    + [("resnet-digits", 7, 8)],
)
def test_layers_put_together_from_their_roles_do_what_a_step_with_the_others_frozen_does(name, first, last):
    model = shipped(name)
    run = owned_layers(unrolled(model), set(range(first, last)))
    record = recorded(model, range(first, last))
    ends = len(run.layers)
    places = [(i, "f") for i in range(ends)] + [(i, "b") for i in reversed(range(run.deepest, ends))]
    shape = {"b": BATCH, "s": LENGTH}
    for instance in run.layers:
        place, layer = (instance.index, "b"), instance.layer
        assert record.flop[place] == layer.backward_flop.at(**shape)
        assert record.bytes_moved[place] == layer.backward_bytes.at(**shape)
        assert record.operations[place] == layer.backward_operations
        assert record.flop[instance.index, "f"] == layer.forward_flop.at(**shape)
    expected, found = seen(record, places), composed(run.layers, places)
    assert {place: value for place, value in found.items() if value != pytest.approx(expected[place], abs=8)} == {}


# On ranks ------------------------------------------------------------------------------------------------------------

SLOWED = "run.slowdowns=[{rank=1, first_step=0, compute_ratio=2}]"
SMALL = ["workload.sequence_length=24", "workload.global_batch_size=11"]  # no batch need be divided
FULL, AGAIN = ["plan.recompute=full"], ["plan.recompute=selective"]

CASES = {
    2: {
        "gpt-sgd": ("small-demo.toml", [*SMALL, *SGD]),
        "gpt-slowed-sgd": ("small-demo.toml", [*SMALL, *SGD, SLOWED]),
        "bert-adamw": ("small-bert.toml", [*SMALL, *ADAMW64, "plan.shares.shards=[0.7, 0.3]"]),
        "gpt-full-sgd": ("small-demo.toml", [*SMALL, *SGD, "plan.recompute=full"]),
        "gpt-selective-micro-batches-adamw": ("small-demo.toml", [*SMALL, *ADAMW64, *AGAIN, "plan.micro_batches=2"]),
        "bert-full-adamw": ("small-bert.toml", [*SMALL, *ADAMW64, "plan.shares.shards=[0.7, 0.3]", *FULL]),
    },
    3: {
        "gpt-adamw": ("small-demo.toml", [*SMALL, *ADAMW64, "plan.shares.shards=[0.2, 0.5, 0.3]"]),
        "gpt-full-adamw": ("small-demo.toml", [*SMALL, *ADAMW64, "plan.shares.shards=[0.2, 0.5, 0.3]", *FULL]),
        "resnet-selective-sgd": (
            "resnet-digits.toml",
            ["workload.global_batch_size=11", "workload.precision=fp64", *SGD, *AGAIN],
        ),
        "resnet-sgd": ("resnet-digits.toml", ["workload.global_batch_size=11", "workload.precision=fp64", *SGD]),
    },
}


@cache
def cases_for(ranks: int) -> dict[str, dict[str, object]]:
    return {
        name: {"scenario": scenario_file(file), "overrides": [star(ranks), "plan.method=gs_wgrad", *overrides]}
        for name, (file, overrides) in CASES[ranks].items()
    }


world = by_ranks(cases_for)


FEW = {2: ["gpt-slowed-sgd", "gpt-selective-micro-batches-adamw"], 3: ["gpt-adamw"]}
"""Both optimizers, with shares and without, and blocks that run again."""


@pytest.mark.parametrize(
    ("world", "name"),
    [slow_where(ranks, name, slow=[], few=FEW[ranks]) for ranks, cases in CASES.items() for name in cases],
    indirect=["world"],
)
def test_it_trains_as_one_device_does_publishes_once_and_peaks_where_predicted(world, name):
    case, seen = world[0][name], world[1][name]
    assert_parameters_of_one_device({name: seen})
    assert_collectives(case, seen)
    assert predicted_peaks(case) == pytest.approx(seen["peaks"], rel=0.01)
