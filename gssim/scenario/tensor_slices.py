"""What each rank of a tensor group holds of the blocks that they share: whole units, as its share of them says.

Both sides go by it: the real backend cuts modules so, and a prediction takes its layers from here. See [Note: units] in
`gssim.workload`.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from gssim.plan import splitting
from gssim.workload import Layer, Model, Parameter, Polynomial


def units_held(units: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Return how many of a block's units each rank holds: largest remainders, as `shares.split`.

    >>> units_held(8, [0.7, 0.2, 0.1])
    (6, 1, 1)
    """
    return splitting.split(units, parts)


@lru_cache(maxsize=256)
def _held_layer(layer: Layer, units: int) -> Layer:
    changes: dict[str, Any] = {
        "parameters": tuple(parameter.held(units) for parameter in layer.parameters),
        "buffers": tuple(replace(buffer, size_bytes=buffer.size_bytes.held(units)) for buffer in layer.buffers),
        "reductions": tuple(replace(each, size_bytes=each.size_bytes.held(units)) for each in layer.reductions),
    }
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, Polynomial):
            changes[field.name] = value.held(units)
    return replace(layer, **changes)


def native_tensors(model: Model) -> int:
    """Return how many parameters of a rank are DTensors where blocks of linear maps are cut natively.

    All of a map that is cut in any of them: a bias that every rank has whole is one too.
    """
    return sum(layer.repeats * len(_of_cut_maps(layer)) for layer in model.sliced_layers if layer.linear)


def _of_cut_maps(layer: Layer) -> list[Parameter]:
    cut = {_map_of(parameter) for parameter in layer.parameters if parameter.cut is not None}
    return [parameter for parameter in layer.parameters if _map_of(parameter) in cut]


def _map_of(parameter: Parameter) -> str:
    return parameter.name.rpartition(".")[0]


def held_model(model: Model, parts: Sequence[float], position: int) -> Model:
    """Return the model as the rank at `position` of a tensor group holds it; `parts`: every rank's share."""
    layers = []
    for layer in model.sliced_layers:
        held = units_held(layer.units, parts)[position] if layer.units else 0
        layers.append(_held_layer(layer, held) if layer.units else layer)
    return replace(model, layers=tuple(layers), sliced_layers=())
