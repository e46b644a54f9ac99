"""Real: weight gradients dealt out by layers. What is put together from traced roles is what such a step really does."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from torch._subclasses.fake_tensor import FakeTensorMode

from gsreal.build import example_batch
from gsreal.trace.parts import record_trained
from gsreal.trace.recorder import Record
from gsreal.trace.step import fake_module
from gssim.memory import activation_timeline
from gssim.program.owned import owned_layers
from gssim.scenario import load_model
from gssim.workload import LayerInstance, Model, unrolled

MODELS = Path(__file__).resolve().parents[1] / "scenarios" / "models"
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
    [("gpt-byte-1m", 0, 3), ("gpt-byte-1m", 2, 4), ("gpt-byte-1m", 4, 6), ("gpt-byte-1m", 6, 7), ("bert-byte-1m", 1, 2)]
    + [("resnet-digits", first, last) for first, last in ((0, 1), (0, 8), (1, 2), (3, 6), (5, 8), (7, 8))],
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
