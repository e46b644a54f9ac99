"""Slices of a model's blocks on the ranks of a tensor-parallel group, in whole units (heads, columns), by their shares.

The real backend cuts modules so, and predictions take their layers from here. See [Note: units] in `gssim.workload`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gssim.plan import splitting
from gssim.workload import Layer, Model, Parameter, Reduction, sliced_layer

if TYPE_CHECKING:
    from gssim.scenario.scenario import Scenario


def units_of_ranks(units: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Return the number of a block's units on each rank: largest remainders, as `splitting.split`.

    >>> units_of_ranks(8, [0.7, 0.2, 0.1])
    (6, 1, 1)
    """
    return splitting.split(units, parts)


def native_tensors(model: Model) -> int:
    """Return the number of a rank's parameters that are DTensors where blocks of linear maps are cut natively.

    Every parameter of a map of which any is cut counts: also a bias that is replicated.
    """
    count = 0
    for layer in model.sliced_layers:
        if layer.linear:
            cut_maps = {_map_of(parameter) for parameter in layer.parameters if parameter.cut is not None}
            count += layer.repeats * sum(_map_of(parameter) in cut_maps for parameter in layer.parameters)
    return count


def _map_of(parameter: Parameter) -> str:
    """Return the name of the linear map that has the parameter."""
    return parameter.name.rpartition(".")[0]


_WHOLE_ONLY: dict[str, Any] = dict.fromkeys(("sliced_layers", "sequence_layers", "context_layers", "expert_layers"), ())
"""Fields of a model that a rank's part of it lacks."""


def model_slice(model: Model, parts: Sequence[float], position: int, *, positions: int | None = None) -> Model:
    """Return the slice of the model on the rank at `position` of a tensor group; `parts`: every rank's share.

    `positions`: of each sequence that the rank has with sequence parallelism; None: without.
    """
    layers = []
    for layer in model.sliced_layers if positions is None else model.sequence_layers:
        units = units_of_ranks(layer.units, parts)[position] if layer.units else 0
        changes = layer.units or positions is not None
        layers.append(sliced_layer(layer, units, positions or 0) if changes else layer)
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
    (_, key, value, output), (of_output, *of_inputs) = forward, backward
    positions = {each.moment.phase + str(each.moment.position + by) for each in (*forward, *backward) for by in (-1, 0)}
    attention = {
        phase: _busiest(layer, phase, *between)
        for phase, between in (
            ("f", (value.moment.position, output.moment.position)),
            ("b", (of_output.moment.position, of_inputs[0].moment.position)),
        )
    }
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
    reductions = (*others, *(Reduction(moment, both, "ring") for moment in moments))
    return replace(layer, buffers=tuple(buffers), reductions=reductions)


def _busiest(layer: Layer, phase: str, first: int, last: int) -> int:
    """Return the position between two others at which most buffers are allocated: that of the attention itself."""
    born = Counter(each.born.position for each in layer.buffers if each.born.phase == phase)
    return max((int(position) for position in born if first < position < last), key=lambda position: born[position])


def held_slice(scenario: "Scenario", position: int) -> Model:
    """Return a scenario's model as the ranks at `position` of their tensor groups run it: blocks cut, or on parts of
    sequences.
    """
    model, positions = scenario.workload.model, scenario.sequence_positions
    if scenario.policies.cp > 1:
        return context_part(model, positions or 0, ring=scenario.policies.ring)
    return model_slice(model, scenario.slice_shares, position, positions=positions)
