"""Slices of a model's blocks on the ranks of a tensor-parallel group, in whole units (heads, columns), by their shares.

The real backend cuts modules so, and predictions take their layers from here. See [Note: units] in `gssim.workload`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gssim.plan import splitting
from gssim.workload import Model, Parameter, sliced_layer

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


def context_part(model: Model, positions: int) -> Model:
    """Return the model on a rank with so many positions of each sequence, under context parallelism."""
    layers = tuple(sliced_layer(layer, 0, positions) for layer in model.context_layers)
    return replace(model, layers=layers, **_WHOLE_ONLY)


def held_slice(scenario: "Scenario", position: int) -> Model:
    """Return a scenario's model as the ranks at `position` of their tensor groups run it: blocks cut, or on parts of
    sequences.
    """
    model, positions = scenario.workload.model, scenario.sequence_positions
    if scenario.policies.cp > 1:
        return context_part(model, positions or 0)
    return model_slice(model, scenario.slice_shares, position, positions=positions)
