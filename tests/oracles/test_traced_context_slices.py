"""Cut blocks, and divided experts, on parts of sequences follow from three traces: compared with a trace of a step that
has both."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from real_runs import quick

from gsreal.model_files.recorder import Record
from gsreal.model_files.step import Step, record_partial_steps, record_step
from gssim.scenario import load_model
from gssim.scenario.context_slices import in_context
from gssim.workload import Adapters, Layer, Model, for_samples, sliced_layer, unrolled
from gssim.workload.model import with_adapters
from gssim.workload.owned import with_frozen_layers

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
SAMPLES, LENGTH = 2, 64
STEP = Step(batch_size=SAMPLES, sequence_length=LENGTH, context=1)
FOLDERS = (MODELS, MODELS.parents[1] / "tests" / "helpers" / "models" / "of_tests")
WHOLE_ONLY = dict.fromkeys(
    ("sliced_layers", "sequence_layers", "context_layers", "expert_layers", "expert_sequence_layers"), ()
)
CASES = {
    "gpt-byte-150k": (1, None),
    "gpt-byte-1m-sequence": (2, 2),
    "llama3-8b-sequence": (4, 2),
    "llama2-70b": (2, None),
    "gpt2-124m": (3, None),
    "bert-base-sequence": (6, 2),
}
"""Units of a rank, and tensor-parallel ranks that divide sequences between its cut blocks."""
ROUTED = {"mixture-byte-1m": (3, 40, None), "mixture-byte-1m-sequence": (3, 40, (2, 2))}
"""Experts of a rank, and rows that they process for each of its samples; units and ranks as above."""
ADAPTED: dict[str, tuple[str, tuple[int, int | None] | tuple[int, int, None]]] = {
    "gpt-byte-1m": ("query-value", (2, None)),
    "gpt-byte-1m-sequence": ("query-value", (2, 2)),
    "bert-byte-1m-sequence": ("all-linear", (2, 2)),
    "llama2-70b-sequence": ("query-value", (2, 2)),
    "llama3-8b": ("all-linear", (4, None)),
    "bert-base": ("query-value", (6, None)),
    "gpt2-124m": ("query-value", (3, None)),
    "context-adapters-mixture": ("query-value", (3, 40, None)),
    "mixtral-8x7b": ("all-linear", (2, 40, None)),
}
"""Targets of low-rank adapters, and what a rank holds, as above; names are of models, whose own weights are frozen."""

FROZEN = {
    "gpt-byte-150k": (2, None),
    "gpt-byte-150k-sequence": (2, 2),
    "bert-byte-1m-sequence": (2, 2),
    "llama3-8b": (4, None),
    "mixture-byte-1m": (3, 40, None),
    "mixture-byte-1m-sequence": (3, 40, (2, 2)),
}
"""What a rank holds, as above, of models with frozen layers."""
FEW_FROZEN = ["gpt-byte-150k-sequence", "mixture-byte-1m"]

EVERY = [*CASES, *ROUTED, *(f"adapters: {name}" for name in ADAPTED)]
FEW = ["gpt-byte-150k", *ROUTED, "adapters: gpt-byte-1m-sequence", "adapters: context-adapters-mixture"]


@cache
def both(name: str) -> tuple[Model, Record]:
    """Return the model with layers that follow from others, and the record of a step that has such blocks.

    One context-parallel rank exchanges with itself: the operations are those of any number of them.
    """
    name, targets, held = _held(name)
    model = shipped(name)
    if targets is not None:
        model = with_adapters(model, Adapters(rank=4, targets=targets))
    if len(held) == 3:
        experts, rows, slices = held
        step = replace(STEP, experts=experts, rows=SAMPLES * rows)
        if slices is not None:
            units, ranks = slices
            record = record_step(model, replace(step, units=units, parts=ranks), where="here")
            layers = model.expert_sequence_layers
            own = [sliced_layer(layer, units, LENGTH // ranks, rows, experts) for layer in layers]
            parts = [(units, layer.units) if layer.units else (1, 1) for layer in layers]
            return replace(model, layers=in_context(model, own, parts, LENGTH), **WHOLE_ONLY), record
        record = record_step(model, step, where="here")
        own = [sliced_layer(layer, experts, 0, rows) for layer in model.expert_layers]
        return replace(model, layers=in_context(model, own, [(1, 1)] * len(own), LENGTH), **WHOLE_ONLY), record
    units, ranks = held
    record = record_step(model, replace(STEP, units=units, parts=ranks), where="here")
    layers = model.sliced_layers if ranks is None else model.sequence_layers
    cut = [sliced_layer(layer, units if layer.units else 0, LENGTH // (ranks or 1)) for layer in layers]
    found = in_context(model, cut, [(units, layer.units) if layer.units else (1, 1) for layer in layers], LENGTH)
    return replace(model, layers=found, **WHOLE_ONLY), record


def shipped(name: str) -> Model:
    return load_model(next(each for folder in FOLDERS if (each := folder / f"{name}.toml").is_file()))


def _held(name: str) -> tuple[str, str | None, tuple]:
    """Return the model's name, the targets of its adapters, and what a rank holds."""
    targets, held = ADAPTED[name.removeprefix("adapters: ")] if name.startswith("adapters: ") else (None, None)
    return name.removeprefix("adapters: ").removesuffix("-sequence"), targets, held or CASES.get(name) or ROUTED[name]


def size(quantity) -> int:
    return quantity.at(b=SAMPLES, s=LENGTH)


def traced_buffers(record: Record, layer: int, phase: str) -> list[tuple]:
    """Return when each buffer of a layer's pass is allocated, its bytes, and until which later allocation it lives."""
    own = [each for each in record.alive if each.born[:2] == (layer, phase)]
    own = [each for each in own if each.freed != each.born or each.size_bytes]
    ends = [None if each.freed is None else (each.freed[0] - layer, *each.freed[1:]) for each in own]
    return sorted((each.born[2], each.size_bytes, *end(e)) for each, e in zip(own, ends, strict=True))


def end(freed: tuple | None) -> tuple:
    return (0, "end", 0) if freed is None else freed


def own_buffers(layer: Layer, phase: str) -> list[tuple]:
    own = [each for each in for_samples(layer, SAMPLES).buffers if each.born.phase == phase]
    ends = [(each.freed.layer_offset, each.freed.phase, each.freed.position) for each in own]
    return sorted((each.born.position, size(each.size_bytes), *e) for each, e in zip(own, ends, strict=True))


def until_next(buffers: list[tuple], births: dict[str, list[int]]) -> list[tuple]:
    """Return buffers with the number of allocations before they are freed, where their own layer frees them."""
    return sorted(
        (born, size, distance, phase, 0 if distance else sum(at <= place for at in births.get(phase, [])))
        for born, size, distance, phase, place in buffers
    )


@pytest.mark.parametrize("name", quick(EVERY, FEW))
def test_blocks_are_those_of_a_step_with_both(name):
    model, record = both(name)
    for instance in unrolled(model):
        layer, at = instance.layer, instance.index
        for phase, way in (("f", "forward"), ("b", "backward")):
            work = (record.flop, record.bytes_moved, record.streamed)
            costs = [size(getattr(layer, f"{way}_{what}")) for what in ("flop", "bytes", "streamed_bytes")]
            assert costs == [each[at, phase] for each in work], instance.module
            assert getattr(layer, f"{way}_operations") == record.operations[at, phase]
        assert size(layer.saved_bytes) == record.saved[at]
        sums = [
            (each.moment.phase, each.moment.position, size(each.size_bytes), each.kind) for each in layer.reductions
        ]
        assert sums == [(*each.at[1:], each.size_bytes, each.kind) for each in record.reductions.get(at, [])]
        if not layer.block:
            continue
        again = record.until_saved[at]["full"]
        costs = [size(layer.recompute_flop), size(layer.recompute_bytes), layer.recompute_operations]
        assert costs == [again.flop, again.bytes_moved, again.operations]
        assert list(layer.selective_positions) == list(record.kept[at, "selective"])
        traced = {phase: traced_buffers(record, at, phase) for phase in "fb"}
        births = {phase: sorted({each[0] for each in traced[phase]}) for phase in "fb"}
        for phase in "fb":
            ours = until_next(own_buffers(layer, phase), births)
            assert ours == until_next(traced[phase], births), (instance.module, phase)


@pytest.mark.parametrize("name", quick(EVERY, FEW))
def test_all_tensors_are_there_but_for_positions(name):
    """Outside of blocks, what a rank makes of the numbers of its positions is left out: 8 bytes for each."""
    model, record = both(name)
    for instance in unrolled(model):
        ours = sum(size(each.size_bytes) for each in for_samples(instance.layer, SAMPLES).buffers)
        traced = sum(each.size_bytes for each in record.alive if each.born[0] == instance.index)
        assert ours == pytest.approx(traced, abs=16 * LENGTH), instance.module


@pytest.mark.parametrize("frozen", ["first", "all but the last"])
@pytest.mark.parametrize("name", quick([*FROZEN], FEW_FROZEN))
def test_blocks_free_their_tensors_as_traced_where_layers_are_frozen(name, frozen):
    """A block without a backward held the attention's output until its linear map was done: 18 kB of 873 too much."""
    whole, held = shipped(name.removesuffix("-sequence")), FROZEN[name]
    modules = [each.module for each in unrolled(whole) if each.layer.parameters]
    model = with_frozen_layers(whole, tuple(modules[:2] if frozen == "first" else modules[:-1]))
    units, ranks, rows, experts = _cut(held)
    trained = {each for instance in unrolled(model) for each in instance.parameter_names}
    step = replace(STEP, units=units, parts=ranks, experts=experts, rows=SAMPLES * rows)
    (record,) = record_partial_steps(whole, step, where="here", like=None, trained=[trained])
    own, parts = _cut_layers(model, held)
    layers = in_context(model, own, parts, LENGTH)
    for instance in unrolled(replace(model, layers=layers, **WHOLE_ONLY)):
        if instance.layer.block:
            traced = {phase: traced_buffers(record, instance.index, phase) for phase in "fb"}
            ours = {phase: own_buffers(instance.layer, phase) for phase in "fb"}
            for phase in "fb":
                assert in_order(ours, phase) == in_order(traced, phase), (instance.module, phase)


def _cut(held: tuple) -> tuple[int | None, int | None, int, int]:
    """Return units, ranks that divide sequences, rows of experts and experts; None or 0 where there are none."""
    if len(held) == 2:
        return *held, 0, 0
    experts, rows, slices = held
    return *(slices or (None, None)), rows, experts


def _cut_layers(model: Model, held: tuple) -> tuple[list[Layer], list[tuple[int, int]]]:
    """Return a rank's layers without exchanges around the attention, and its parts of the heads."""
    units, ranks, rows, experts = _cut(held)
    if units is None:
        own = [sliced_layer(each, experts, 0, rows) for each in model.expert_layers]
        return own, [(1, 1)] * len(own)
    layers = model.expert_sequence_layers if experts else model.sequence_layers if ranks else model.sliced_layers
    own = [sliced_layer(each, units if each.units else 0, LENGTH // (ranks or 1), rows, experts) for each in layers]
    return own, [(units, each.units) if each.units else (1, 1) for each in layers]


def in_order(buffers: dict[str, list[tuple]], phase: str) -> list[tuple]:
    """Return buffers of a pass by order of allocation: views, which allocate nothing, differ with frozen weights."""
    births = {each: sorted({buffer[0] for buffer in buffers[each]}) for each in buffers}
    return sorted((births[phase].index(born), *rest) for born, *rest in until_next(buffers[phase], births))
