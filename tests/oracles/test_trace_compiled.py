"""Published and real: what a trace of compiled blocks says, against torch's eager counts and arithmetic by hand."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from small_models import whole_layers_alone

from gsreal.model_files.recorder import Record
from gsreal.model_files.request import Request, traced_model
from gsreal.model_files.step import Step, record_step
from gssim.errors import UserError
from gssim.scenario import load_model

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
WIDTH, HEADS = 16, 2
BATCH, LENGTH = 3, 20
TOKENS = BATCH * LENGTH
FIRST = 1
"""The layer of the first block."""


def record(
    *, compiled: bool, batch: int = BATCH, like: Record | None = None, recompute: Literal["none", "selective"] = "none"
) -> Record:
    gpt = load_model(MODELS / "gpt-byte-150k.toml")
    module = replace(gpt.module, arguments={"width": WIDTH, "heads": HEADS, "layers": 2})
    model = replace(gpt, module=module, compiled=compiled, compiled_recompute=recompute)
    return record_step(model, Step(batch_size=batch, sequence_length=LENGTH), where="test", like=like)


@cache
def traced(*, compiled: bool) -> Record:
    return record(compiled=compiled)


def test_products_are_those_of_eager_blocks_and_fewer_bytes_are_moved():
    eager, compiled = traced(compiled=False), traced(compiled=True)
    for phase in "fb":
        assert compiled.flop[FIRST, phase] == eager.flop[FIRST, phase] > 0
        assert compiled.bytes_moved[FIRST, phase] < eager.bytes_moved[FIRST, phase]
    assert compiled.operations[FIRST, "f"] < eager.operations[FIRST, "f"]
    for phase in "fb":  # what is outside of blocks is the same
        assert compiled.bytes_moved[0, phase] == eager.bytes_moved[0, phase]
        assert compiled.names[0, phase] == eager.names[0, phase]


def test_a_fused_kernel_reads_its_inputs_and_writes_its_outputs_once():
    """The fused forward of a block: two norms (the second adds), a GELU, and the last sum; in float32."""
    fused = {
        name: work.bytes_moved / work.operations
        for name, work in traced(compiled=True).by_operation[FIRST].items()
        if name.startswith("cpp_fused") and "backward" not in name
    }
    row, statistic, weights = 4 * WIDTH * TOKENS, 4 * TOKENS, 2 * 4 * WIDTH
    norm = [size for name, size in fused.items() if "native_layer_norm_0" in name]
    assert norm == [2 * row + 2 * statistic + weights]  # reads x, weight and bias; writes output, mean and deviation
    assert [size for name, size in fused.items() if "gelu" in name] == [2 * 4 * row]  # four times as wide
    added = [size for name, size in fused.items() if "add_native_layer_norm" in name]
    assert added == [3 * row + 2 * statistic + weights]  # two summands


def test_the_partitioner_saves_what_backward_reads_and_recomputes_the_rest():
    """Saved: the input, both norms' outputs and statistics, queries, keys and values, attention's output and
    log-sum-exp, its projection, the GELU's input and output; not the sum behind attention, which is added again.
    """
    values = WIDTH * (1 + 2 + 3 + 1 + 1 + 4 + 4) + 4 + HEADS
    assert traced(compiled=True).saved[FIRST] == 4 * values * TOKENS


@pytest.mark.slow
def test_what_is_recomputed_inside_of_a_graph_is_not_saved():
    """Selective: the input, products (all but the last, which no backward reads) and attention are saved."""
    selective, whole = record(compiled=True, recompute="selective"), traced(compiled=True)
    assert selective.saved[FIRST] == 4 * (WIDTH * (1 + 3 + 1 + 1 + 4) + HEADS) * TOKENS
    assert selective.flop[FIRST, "b"] == whole.flop[FIRST, "b"]
    assert selective.bytes_moved[FIRST, "f"] < whole.bytes_moved[FIRST, "f"]  # less is written for the backward


@pytest.mark.slow
def test_a_plan_of_kernels_and_buffers_holds_for_other_shapes_too():
    first = traced(compiled=True)
    other = record(compiled=True, batch=2, like=first)
    assert other.names == first.names
    assert len(other.alive) == len(first.alive)
    for mine, theirs in zip(other.alive, first.alive, strict=True):
        assert (mine.born, mine.freed) == (theirs.born, theirs.freed)
    assert 3 * other.saved[FIRST] == 2 * first.saved[FIRST]


def test_compiled_blocks_have_no_costs_of_partly_trained_layers():
    path = MODELS / "gpt-byte-150k.toml"
    with whole_layers_alone():  # whose costs do not matter here
        found = traced_model(Request(model=str(path), arguments=(), name="again", sequence_length=8, compiled=True))
    assert load_model(path).partly_trained is not None
    assert found.partly_trained is None


def test_a_model_without_a_stack_of_blocks_is_not_compiled():
    digits = load_model(MODELS / "resnet-digits.toml")
    module = replace(digits.module, arguments={**digits.module.arguments, "blocks": 1, "widths": [8]})
    with pytest.raises(UserError, match="no stack of blocks"):
        record_step(
            replace(digits, module=module, compiled=True), Step(batch_size=2, sequence_length=None), where="test"
        )
