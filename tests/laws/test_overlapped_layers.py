"""Layers whose exchanges of parts of sequences overlap with products, as they are derived from traced ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from searching import assert_bounds_below_prediction
from strategies import device_type, scenario_of, star

from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.scenario.tensor_slices import Slicing, model_slice
from gssim.workload import Layer, Model

SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "models"
OF_TESTS = Path(__file__).resolve().parents[1] / "helpers" / "models" / "of_tests"
FEW = ("gpt-byte-1m", "bert-byte-1m", "llama3.2-1b", "decoder-olmo2", "tiny-gpt2", "decoder-falcon")


GPT = load_model(SHIPPED / "gpt-byte-1m.toml")
DIVIDED = {"method": "tensor", "sequence_parallel": True, "tp_overlap": True}


def can_overlap(model: Model) -> bool:
    blocks = [layer for layer in model.sequence_layers if layer.units]
    return bool(blocks) and all(
        layer.selective_positions is not None and not any(each.of_experts for each in layer.parameters)
        for layer in blocks
    )


def files() -> Iterator[object]:
    for path in sorted([*SHIPPED.glob("*.toml"), *OF_TESTS.glob("*.toml")]):
        yield pytest.param(path, id=path.stem, marks=[] if path.stem in FEW else [pytest.mark.slow])


def blocks_of(model: Model, ranks: int, *, in_ring: bool) -> list[Layer]:
    """Return the cut blocks of the first of several ranks."""
    length = model.traced_sequence_lengths[0] if model.exact_sequence is False else 8 * ranks
    ring_length = length if in_ring else None
    held = model_slice(model, (1 / ranks,) * ranks, 0, Slicing(ring_length=ring_length), positions=length // ranks)
    return [layer for layer in held.layers if layer.block]


@pytest.mark.parametrize(
    "plan",
    [
        {"method": "tensor"},
        {"method": "tensor", "recompute": "full", "micro_batches": 3},
        {"method": "pipeline", "tp": 2, "pp": 2, "micro_batches": 4},
        {"method": "zero3", "tp": 2, "dp_shard": 2},
        {"method": "ddp", "tp": 2, "cp": 2},
    ],
    ids=str,
)
def test_bounds_of_a_search_are_no_more_than_a_prediction(plan):
    assert_bounds_below_prediction(
        scenario_of(star(4), DIVIDED | plan, model=GPT, sequence_length=64, global_batch_size=12)
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("path", files())
def test_the_same_is_exchanged_and_gradients_of_weights_follow_the_exchange(path, ranks):
    """Nothing else is made or freed between the sum of an input's gradient and the last of these gradients."""
    model = load_model(path)
    if not can_overlap(model) or any((layer.units or ranks) % ranks for layer in model.sequence_layers):
        pytest.skip("its blocks are not cut so")
    traced = blocks_of(model, ranks, in_ring=False)
    changed = blocks_of(model, ranks, in_ring=True)
    assert traced
    for before, after in zip(traced, changed, strict=True):
        assert [(e.kind, e.size_bytes) for e in after.reductions] == [(e.kind, e.size_bytes) for e in before.reductions]
        sums = [each for each in after.reductions if each.awaited is not None]
        assert len(sums) == sum(each.moment.phase == "b" and each.kind == "reduce-scatter" for each in after.reductions)
        for exchange in sums:
            begin, end = exchange.moment.position, exchange.awaited
            for buffer in after.buffers:
                moments = [each for each in (buffer.born, buffer.freed) if each.phase == "b" and not each.layer_offset]
                if any(begin < each.position < end for each in moments):
                    assert len(moments) == 2
                    assert all(begin <= each.position < end for each in moments), str(buffer)
            weights = [each for each in after.parameters if begin < each.born.position < end]
            assert weights
            assert all(each.ready.position == end + 1 and each.sliced for each in weights)


def test_rings_of_gpus_are_refused():
    gpus = star(2, types={"cpu": device_type(kind="cuda")})
    with pytest.raises(UserError, match="messages beside products are known of CPUs only"):
        scenario_of(gpus, DIVIDED, model=GPT, sequence_length=64, global_batch_size=12)


def test_a_model_that_does_not_show_its_products_is_refused():
    layers = tuple(replace(each, selective_positions=None) for each in GPT.sequence_layers)
    with pytest.raises(UserError, match="does not tell which operations are products"):
        scenario_of(
            star(2), DIVIDED, model=replace(GPT, sequence_layers=layers), sequence_length=64, global_batch_size=12
        )
    moved = tuple(replace(each, selective_positions=(0, 1, 2, 3, 4)) for each in GPT.sequence_layers)
    with pytest.raises(UserError, match=r"'gpt-byte-1m' \(workload.model\) does not show the products of 'blocks.0'"):
        blocks_of(replace(GPT, sequence_layers=moved), 2, in_ring=True)
