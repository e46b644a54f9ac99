"""Layers that sum gradients of inputs beside products of weights' gradients, derived from traced ones."""

from collections import Counter
from pathlib import Path

import pytest

from gssim.memory import footprint
from gssim.memory.lifetimes import activation_timeline, gradient_events
from gssim.scenario import load_model
from gssim.scenario.overlapped_maps import end_of, input_gradient_sums, maps_of_sums, with_overlapped_sums
from gssim.workload import Layer, LayerInstance, Parameter, Reduction, sliced_layer
from gssim.workload.layer import Buffer

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    *(ROOT / f"scenarios/models/{name}.toml" for name in ("gpt-byte-1m", "bert-base", "gpt2-124m", "llama3.2-1b")),
    *(ROOT / f"tests/helpers/models/of_tests/{name}.toml" for name in ("decoder-olmo2", "decoder-phi", "decoder-opt")),
)


def blocks(file: Path, kind: str) -> list[Layer]:
    """Return the first block of each kind of a model, with one unit in two of it."""
    layers = [layer for layer in getattr(load_model(file), kind) if layer.units]
    return [sliced_layer(layer, max(1, layer.units // 2), 8) for layer in layers]


def peak_bytes(layer: Layer) -> float:
    """Return the peak of a block's backward over what is allocated at its begin."""
    instances = [LayerInstance(0, layer, 0)]
    events = activation_timeline(instances, batch_size=3, sequence_length=16).at(0, "b")
    gradients = gradient_events(instances, value_bytes=4, given_back=0)
    return footprint([*events, *gradients.get((0, "b"), ())]).peak_bytes


@pytest.mark.parametrize("kind", ["sliced_layers", "sequence_layers"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_products_are_between_the_begin_of_a_sum_and_its_end(file, kind):
    """Every map that is cut by columns has one; what is saved for the backward, and what is sent, stay as they were."""
    for layer in blocks(file, kind):
        beside = with_overlapped_sums(layer)
        assert [each.size_bytes for each in beside.reductions] == [each.size_bytes for each in layer.reductions]
        sums, maps = input_gradient_sums(beside), maps_of_sums(beside)
        assert [sorted(p.name for p in each) for each in maps] == [
            sorted(p.name for p in each) for each in maps_of_sums(layer)
        ]
        assert any(maps)
        for each, own in zip(sums, maps, strict=True):
            assert (each.awaited is not None) == bool(own)
            for parameter in own:
                assert each.moment.position < parameter.born.position <= end_of(each) < parameter.ready.position
        saved = (
            Counter((b.born, b.size_bytes) for b in each.buffers if b.born.phase == "f") for each in (layer, beside)
        )
        assert next(saved) == next(saved)
        if kind == "sliced_layers":  # no copies of sums
            assert peak_bytes(beside) <= peak_bytes(layer)
            assert len(layer.buffers) - len(beside.buffers) == sum(map(bool, maps))


def test_a_backward_of_one_operation_keeps_its_tensors():
    """Files that are not traced have no copy of a sum: the input of a map, as large and freed there, is none."""
    layer = Layer(
        name="block",
        modules=("block",),
        block=True,
        parameters=[
            Parameter("{}.up.weight", (64, 16), *(Parameter.parse("w 1 b2 b2").ready,) * 2, sliced_dimension=0),
            Parameter("{}.down.weight", (16, 64), *(Parameter.parse("w 1 b0 b0").ready,) * 2, sliced_dimension=1),
        ],
        **dict.fromkeys(("forward_flop", "backward_flop", "forward_bytes", "backward_bytes", "saved_bytes"), "0"),
        output_bytes="64*b",
        forward_operations=3,
        backward_operations=3,
        buffers=list(
            map(Buffer.parse, ("f0 b2 activations 64*b", "b1 b2 temporaries 256*b", "b2 b3 temporaries 64*b"))
        ),
        reductions=[Reduction.parse("f2 64*b"), Reduction.parse("b2 64*b")],
    )
    beside = with_overlapped_sums(layer)
    assert beside.buffers == layer.buffers
    (found,) = input_gradient_sums(beside)
    assert (found.moment.position, found.awaited) == (1, 2)
    assert [each.name for each in maps_of_sums(beside)[0]] == ["{}.up.weight"]
