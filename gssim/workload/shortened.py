"""A model with fewer of its repeated blocks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from gssim.workload.buffer import Buffer, Moment
from gssim.workload.layer import Layer
from gssim.workload.model import Model
from gssim.workload.parameter import Parameter


def shortened(model: Model, repeats: int) -> Model:
    """Return a model with `repeats` of its most repeated layer, and all else as it is.

    What is born in one layer and freed in another still is, however far apart they were.
    """
    place = max(range(len(model.layers)), key=lambda index: model.layers[index].repeats)
    deepest = model.layers[place]
    starts = [0, *accumulate(layer.repeats for layer in model.layers)]
    removed = deepest.repeats - repeats
    last = starts[place] + repeats - 1

    def moved(index: int) -> int:
        return index if index <= last else max(last, index - removed)

    layers = list(model.layers)
    layers[place] = replace(deepest, modules=deepest.modules[:repeats])
    for number, layer in enumerate(model.layers):
        if number != place:
            layers[number] = _with_moments(layer, starts[number], moved)
    return replace(model, layers=tuple(layers))


def _with_moments(layer: Layer, index: int, moved: Callable[[int], int]) -> Layer:
    """Return a layer, once at `index`, with the layers that its moments name where they are `moved` to."""

    def shifted(moment: Moment) -> Moment:
        offset = moved(index + moment.layer_offset) - moved(index)
        return moment if offset == moment.layer_offset else replace(moment, layer_offset=offset)

    def buffers(found: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple(replace(each, born=shifted(each.born), freed=shifted(each.freed)) for each in found)

    parameters: list[Parameter] = [
        replace(each, born=shifted(each.born), ready=shifted(each.ready)) for each in layer.parameters
    ]
    untrained = layer.untrained_buffers
    return replace(
        layer,
        parameters=tuple(parameters),
        buffers=buffers(layer.buffers),
        untrained_buffers=None if untrained is None else buffers(untrained),
    )
