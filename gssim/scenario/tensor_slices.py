"""Slices of a model's blocks on the ranks of a tensor-parallel group, in whole units (heads, columns), by their shares.

The real backend cuts modules so, and predictions take their layers from here. See [Note: units] in `gssim.workload`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gssim.execution.cache import Same
from gssim.scenario.context_slices import in_context
from gssim.scenario.device_rates import value_bytes
from gssim.scenario.scenario import Scenario
from gssim.scenario.vocabulary_slices import DividedVocabulary, divided_layers, divided_vocabulary, units_of_ranks
from gssim.workload import (
    Buffer,
    Layer,
    Model,
    Moment,
    Parameter,
    Reduction,
    sliced_layer,
)
from gssim.workload.layer import GATHER_AGAIN


def native_tensors(model: Model) -> int:
    """Return the number of a rank's parameters that are DTensors where blocks of linear maps are cut natively.

    Every parameter of a map of which any is cut counts: also a bias that is replicated.
    """
    return sum(layer.repeats * len(native_parameters(layer)) for layer in model.sliced_layers)


def native_parameters(layer: Layer) -> list[Parameter]:
    """Return the parameters of a sliced layer that are DTensors where it is cut natively; see `native_tensors`."""
    cut_maps = {_map_of(parameter) for parameter in layer.parameters if parameter.cut is not None}
    return [parameter for parameter in layer.parameters if layer.linear and _map_of(parameter) in cut_maps]


def _map_of(parameter: Parameter) -> str:
    """Return the name of the linear map that has the parameter."""
    return parameter.name.rpartition(".")[0]


_WHOLE_ONLY: dict[str, Any] = dict.fromkeys(("sliced_layers", "sequence_layers", "context_layers", "expert_layers"), ())
"""Fields of a model that a rank's part of it lacks."""


def model_slice(
    model: Model,
    parts: Sequence[float],
    position: int,
    *,
    positions: int | None = None,
    vocabulary: DividedVocabulary | None = None,
    gathers_again: bool = False,
) -> Model:
    """Return the slice of the model on the rank at `position` of a tensor group; `parts`: every rank's share.

    `positions`: of each sequence that the rank has with sequence parallelism; None: without. `vocabulary`: what ranks
    divide of it; None: nothing. `gathers_again`: gathered inputs are not kept for the backward.
    """
    layers = []
    for layer in model.sliced_layers if positions is None else model.sequence_layers:
        units = units_of_ranks(layer.units, parts)[position] if layer.units else 0
        changes = layer.units or positions is not None
        layers.append(sliced_layer(layer, units, positions or 0) if changes else layer)
    if gathers_again:
        length = (positions or 0) * len(parts)
        layers = [_gathering_again(layer, len(parts), length) for layer in layers]
    if vocabulary is not None:
        layers = divided_layers(model, layers, parts, position, vocabulary)
    return replace(
        model, layers=tuple(layers), sliced_layers=(), sequence_layers=(), context_layers=(), expert_layers=()
    )


def context_part(model: Model, positions: int, *, ring: bool = False) -> Model:
    """Return the model on a rank with so many positions of each sequence, under context parallelism."""
    layers = tuple(sliced_layer(layer, 0, positions) for layer in model.context_layers)
    if ring:
        layers = tuple(ring_layer(layer) for layer in layers)
    return replace(model, layers=layers, **_WHOLE_ONLY)


@lru_cache(maxsize=256)
def ring_layer(layer: Layer) -> Layer:
    """Return a layer whose attention is a ring, of one traced with all-to-alls; layers without stay as they are.

    What heads are exchanged for is left out: copies to send, and what is received. The attention's own tensors are as
    many: copies of queries, keys and values, the output, its logarithms, and a copy as the linear map takes it;
    gradients need no further copies. One `ring` takes the place of the all-to-alls of each pass, right after the
    attention; its bytes are those of a rank's keys and values.
    """
    forward = [each for each in layer.reductions if each.moment.phase == "f" and each.kind == "all-to-all"]
    backward = [each for each in layer.reductions if each.moment.phase == "b" and each.kind == "all-to-all"]
    if not forward:
        return layer
    (_, key, value, _), (_, *of_inputs) = forward, backward
    positions = {each.moment.phase + str(each.moment.position + by) for each in (*forward, *backward) for by in (-1, 0)}
    attention = fused_attention(layer)
    assert attention is not None  # a scenario is checked for it
    copies = {each.moment.position + 3 for each in of_inputs}
    buffers = []
    for buffer in layer.buffers:
        born = buffer.born
        if str(born) in positions or str(born) == f"b{attention['b']}":
            continue
        if born.phase == "b" and born.position in copies:
            buffer = replace(buffer, born=replace(born, position=attention["b"]))
        buffers.append(buffer)
    both = key.size_bytes.plus(value.size_bytes)
    moments = [replace(each[0].moment, position=attention[each[0].moment.phase]) for each in (forward, backward)]
    others = [each for each in layer.reductions if each.kind != "all-to-all"]
    every = (*others, *(Reduction(moment, both, "ring") for moment in moments))
    in_order = tuple(sorted(every, key=lambda each: (each.moment.phase != "f", each.moment.position)))
    return replace(layer, buffers=tuple(buffers), reductions=in_order)


def fused_attention(layer: Layer) -> dict[str, int] | None:
    """Return the positions, by pass, of the attention of a block that is traced with all-to-alls around it.

    None: it is no kernel that makes output and logarithms, and the gradients of queries, keys and values.
    """
    found: dict[str, int] = {}
    exchanges = [each.moment for each in layer.reductions if each.kind == "all-to-all"]
    for phase, before, tensors in (("f", 3, 2), ("b", 1, 3)):  # of queries, keys and values, or of the output
        first, last = [each.position for each in exchanges if each.phase == phase][before - 1 : before + 1]
        born = Counter(each.born.position for each in layer.buffers if each.born.phase == phase)
        inside = [position for position in born if first < position < last]
        # between the all-to-alls, most buffers are allocated by the attention itself
        found[phase] = max(inside, key=born.__getitem__)
        if born[found[phase]] < tensors:
            return None
    return found


def held_slice(scenario: Scenario, position: int) -> Model:
    """Return a scenario's model as the ranks at `position` of their tensor groups run it: blocks cut, on parts of
    sequences, or both.
    """
    model, positions, policies = scenario.workload.model, scenario.sequence_positions, scenario.policies
    if policies.tp == 1:
        return context_part(model, positions or 0, ring=policies.ring)
    divided = divided_vocabulary(scenario.plan, value_bytes(scenario.workload))
    again = scenario.plan.gathered_inputs == "gathered-again"
    shares = scenario.slice_shares
    if policies.cp == 1:
        return model_slice(model, shares, position, positions=positions, vocabulary=divided, gathers_again=again)
    of_part = (positions or 0) // policies.tp if policies.sequence_parallel else None
    return _context_slice(Same(model), shares, position, positions or 0, of_part, divided, again, policies.ring)


@lru_cache(maxsize=64)
def _context_slice(
    model: Same,
    shares: tuple[float, ...],
    position: int,
    positions: int,
    of_part: int | None,
    vocabulary: DividedVocabulary | None,
    gathers_again: bool,
    ring: bool,
) -> Model:
    """Return a slice of a model on so many positions of each sequence, `of_part` of these between its cut blocks."""
    whole = model.value
    assert isinstance(whole, Model)
    cut = model_slice(
        whole, shares, position, positions=of_part, vocabulary=vocabulary, gathers_again=gathers_again
    ).layers
    units = [units_of_ranks(layer.units, shares)[position] if layer.units else 0 for layer in cut]
    layers = in_context(whole, cut, units, positions)
    return replace(whole, layers=tuple(map(ring_layer, layers)) if ring else layers, **_WHOLE_ONLY)


@lru_cache(maxsize=256)
def _gathering_again(layer: Layer, ranks: int, length: int) -> Layer:
    """Return a layer that keeps its part of the gathered inputs of its maps, and gathers them again in its backward.

    A gathered input lives until the maps' outputs are summed; in the backward from the gradient of the map's input on,
    which is computed meanwhile, until the gradient of the weights, where it was freed before. `length`: of sequences.
    Source: Megatron-LM, core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.
    """
    in_forward = [each.moment.position for each in layer.reductions if each.moment.phase == "f"]
    in_backward = [each.born.position for each in layer.buffers if each.born.phase == "b"]
    changed: dict[int, Buffer] = {}
    gathered, reductions = [], list(layer.reductions)
    for gather in (each for each in layer.reductions if (each.kind, each.moment.phase) == ("all-gather", "f")):
        place = gather.moment.position
        end = min((position for position in in_forward if position > place), default=place)
        whole = [each for each in layer.buffers if each.is_saved and place < each.born.position < end]
        whole = [each for each in whole if not each.freed.layer_offset and each.size_bytes == gather.size_bytes]
        parts = [
            each
            for each in layer.buffers
            if each.born.phase == each.freed.phase == "f"
            and each.born.position <= place < each.freed.position
            and all(ranks * each.size_bytes.at(b=b, s=length) == gather.size_bytes.at(b=b, s=length) for b in (1, 2))
        ]
        if not whole or not parts:
            continue
        freed = whole[0].freed
        begin = max((position for position in in_backward if position < freed.position), default=1)
        changed[id(whole[0])] = replace(whole[0], freed=Moment("f", end), category="temporaries")
        changed[id(parts[-1])] = replace(parts[-1], freed=freed, category="activations")
        gathered.append(Buffer(Moment("b", begin), freed, "temporaries", gather.size_bytes))
        reductions.append(Reduction(Moment("b", begin - 1), gather.size_bytes, GATHER_AGAIN))
    saved = [each for each in layer.buffers if each.is_saved]
    releases = {id(each): at for each, at in zip(saved, layer.recompute_releases or (), strict=False)}
    kept = [each for each in layer.buffers if changed.get(id(each), each).is_saved]
    return replace(
        layer,
        buffers=(*(changed.get(id(each), each) for each in layer.buffers), *gathered),
        reductions=tuple(sorted(reductions, key=lambda each: (each.moment.phase != "f", each.moment.position))),
        recompute_releases=layer.recompute_releases
        and tuple(releases.get(id(each), each.freed.position) for each in kept),
    )
