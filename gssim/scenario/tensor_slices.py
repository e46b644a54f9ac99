"""Slices of a model's blocks on the ranks of a tensor-parallel group, in whole units (heads, columns), by shares.

The real backend cuts modules in the same way; predictions take their layers from here. See [Note: units] in
`gssim.workload.model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gssim.execution.cache import cached_by_identity
from gssim.scenario.context_slices import in_context, ring_layer
from gssim.scenario.device_rates import value_bytes
from gssim.scenario.expert_load import layers_of_own_experts, on_context_parts, routes_parts
from gssim.scenario.overlapped_maps import with_overlapped_products, with_overlapped_sums
from gssim.scenario.scenario import Scenario
from gssim.scenario.vocabulary_slices import DividedVocabulary, divided_layers, divided_vocabulary, units_of_ranks
from gssim.workload import (
    Buffer,
    Layer,
    LayerInstance,
    Model,
    Moment,
    Parameter,
    Reduction,
    sliced_layer,
)
from gssim.workload.layer import GATHER_AGAIN
from gssim.workload.model import DIVIDED_LISTS


def native_tensors(model: Model) -> int:
    """Return how many of a rank's parameters are DTensors if linear maps of blocks are cut natively.

    If any parameter of a linear map is cut, all of its parameters count, also a bias that is replicated.
    """
    return sum(layer.repeats * len(native_parameters(layer)) for layer in model.sliced_layers)


def native_parameters(layer: Layer) -> list[Parameter]:
    """Return the parameters of a sliced layer that are DTensors where it is cut natively; see `native_tensors`."""
    cut_maps = {_map_of(parameter) for parameter in layer.parameters if parameter.cut is not None}
    return [parameter for parameter in layer.parameters if layer.linear and _map_of(parameter) in cut_maps]


def _map_of(parameter: Parameter) -> str:
    """Return the name of the linear map that has the parameter."""
    return parameter.name.rpartition(".")[0]


_WHOLE_ONLY: dict[str, Any] = dict.fromkeys(DIVIDED_LISTS, ())
"""Fields of a model that a rank's part of it does not have."""


@dataclass(frozen=True)
class Slicing:
    """How tensor-parallel ranks divide a model besides the units of its blocks, and when they exchange."""

    vocabulary: DividedVocabulary | None = None
    """How they divide the vocabulary; None: not at all."""
    gathers_again: bool = False
    """Whether gathered inputs are gathered again in the backward instead of being kept for it."""
    overlaps_sums: bool = False
    """Whether sums of input gradients overlap with the products of weight gradients."""
    ring_length: int | None = None
    """Length of sequences whose parts are exchanged in a ring beside products; None: they are not."""

    @classmethod
    def of(cls, scenario: Scenario) -> "Slicing":
        """Return the slicing of a scenario's plan."""
        return cls(
            vocabulary=divided_vocabulary(scenario.plan, value_bytes(scenario.workload)),
            gathers_again=scenario.plan.gathered_inputs == "gathered-again",
            overlaps_sums=scenario.plan.async_input_gradients,
            ring_length=scenario.workload.sequence_length if scenario.multiplies_in_ring else None,
        )

    def overlapping(self, held: Model, ranks: int) -> Model:
        """Return a rank's slice of a model whose exchanges overlap with products."""
        layers = held.layers
        if self.overlaps_sums:
            layers = tuple(map(with_overlapped_sums, layers))
        if self.ring_length is not None:
            layers = tuple(with_overlapped_products(each, ranks, self.ring_length, held.name) for each in layers)
        return replace(held, layers=layers)


UNDIVIDED = Slicing()


def model_slice(
    model: Model, parts: Sequence[float], position: int, slicing: Slicing = UNDIVIDED, *, positions: int | None = None
) -> Model:
    """Return the slice of the model on the rank at `position` of a tensor group; `parts`: every rank's share.

    `positions`: with sequence parallelism, the rank's number of positions of each sequence; None: without it.
    """
    layers = []
    for layer in model.sliced_layers if positions is None else model.sequence_layers:
        units = units_of_ranks(layer.units, parts)[position] if layer.units else 0
        changes = layer.units or positions is not None
        layers.append(sliced_layer(layer, units, positions or 0) if changes else layer)
    if slicing.gathers_again:
        length = (positions or 0) * len(parts)
        layers = [_gathering_again(layer, len(parts), length) for layer in layers]
    if slicing.vocabulary is not None:
        layers = divided_layers(model, layers, parts, position, slicing.vocabulary)
    return slicing.overlapping(replace(model, layers=tuple(layers), **_WHOLE_ONLY), len(parts))


def context_part(model: Model, positions: int, *, ring: bool = False) -> Model:
    """Return the model on a rank with `positions` positions of each sequence, under context parallelism."""
    layers = tuple(sliced_layer(layer, 0, positions) for layer in model.context_layers)
    if ring:
        layers = tuple(ring_layer(layer) for layer in layers)
    return replace(model, layers=layers, **_WHOLE_ONLY)


def held_experts(scenario: Scenario, position: int, tensor_position: int) -> tuple[LayerInstance, ...]:
    """Return a rank's layers, given its position among the ranks that divide the experts and in its tensor group."""
    workload, plan, policies = scenario.workload, scenario.plan, scenario.policies
    instances = layers_of_own_experts(workload, policies, position)
    layers = [instance.layer for instance in instances]
    if routes_parts(workload.model, policies) and plan.gathered_inputs == "gathered-again":
        length = (workload.sequence_length or 1) // policies.cp
        layers = [_gathering_again(layer, policies.tp, length) for layer in layers]
    vocabulary = divided_vocabulary(plan, value_bytes(workload))
    if routes_parts(workload.model, policies) and vocabulary is not None:
        layers = divided_layers(workload.model, layers, scenario.slice_shares, tensor_position, vocabulary)
    held = [replace(each, layer=layer) for each, layer in zip(instances, layers, strict=True)]
    return on_context_parts(workload, policies, held)


def held_slice(scenario: Scenario, position: int) -> Model:
    """Return a scenario's model as the ranks at `position` of their tensor groups run it: with cut blocks, on parts of
    sequences, or both.
    """
    model, positions, policies = scenario.workload.model, scenario.sequence_positions, scenario.policies
    if policies.tp == 1:
        return context_part(model, positions or 0, ring=policies.ring)
    shares, slicing = scenario.slice_shares, Slicing.of(scenario)
    if policies.cp == 1:
        return model_slice(model, shares, position, slicing, positions=positions)
    of_part = (positions or 0) // policies.tp if policies.sequence_parallel else None
    return _context_slice(model, shares, position, slicing, positions or 0, of_part, policies.ring)


@cached_by_identity(maxsize=64)
def _context_slice(
    whole: Model,
    shares: tuple[float, ...],
    position: int,
    slicing: Slicing,
    positions: int,
    of_part: int | None,
    ring: bool,
) -> Model:
    """Return a slice of a model on `positions` positions of each sequence, `of_part` of these between cut blocks."""
    in_turn = replace(slicing, overlaps_sums=False, ring_length=None)
    cut = model_slice(whole, shares, position, in_turn, positions=of_part).layers
    parts = [(units_of_ranks(layer.units, shares)[position], layer.units) if layer.units else (1, 1) for layer in cut]
    layers = in_context(whole, cut, parts, positions)
    held = replace(whole, layers=tuple(map(ring_layer, layers)) if ring else layers, **_WHOLE_ONLY)
    return slicing.overlapping(held, len(shares))


@lru_cache(maxsize=256)
def _gathering_again(layer: Layer, ranks: int, length: int) -> Layer:
    """Return a layer that keeps only its part of the gathered inputs of its maps, and gathers them again in the
    backward.

    In the forward a gathered input lives until the maps' outputs are summed. In the backward it lives from the gradient
    of the map's input, which is computed meanwhile, to the gradient of the weights, where it was freed before.
    `length`: sequence length. Source: Megatron-LM, core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication.
    """
    in_forward = [each.moment.position for each in layer.reductions if each.moment.phase == "f"]
    in_backward = [each.born.position for each in layer.buffers if each.born.phase == "b"]
    changed: dict[int, Buffer] = {}
    gathered, reductions = [], list(layer.reductions)
    for gather in (each for each in layer.reductions if (each.kind, each.moment.phase) == ("all-gather", "f")):
        place = gather.moment.position
        end = min((position for position in in_forward if position > place), default=place)
        first = place if layer.experts else place + 1  # rows that may be gathered in any order need no further copy
        whole = [each for each in layer.buffers if each.is_saved and first <= each.born.position < end]
        whole = [each for each in whole if not each.freed.layer_offset and each.size_bytes == gather.size_bytes]
        as_large = [
            each
            for each in layer.buffers
            if each.born.phase == "f"
            and each.born.position <= place
            and all(ranks * each.size_bytes.at(b=b, s=length) == gather.size_bytes.at(b=b, s=length) for b in (1, 2))
        ]
        parts = [each for each in as_large if each.freed.phase == "f" and place < each.freed.position]
        if layer.experts and not parts:  # a router, too, keeps the part that is gathered for experts of all tokens
            kept = [each for each in as_large if each.is_saved and not each.freed.layer_offset]
            parts = sorted(kept, key=lambda each: each.born.position)
        if not whole or not parts:
            continue
        freed = whole[0].freed
        begin = max((position for position in in_backward if position < freed.position), default=1)
        changed[id(whole[0])] = replace(whole[0], freed=Moment("f", end), category="temporaries")
        until = max(freed, parts[-1].freed, key=lambda each: (each.phase == "b", each.position))
        changed[id(parts[-1])] = replace(parts[-1], freed=until, category="activations")
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
