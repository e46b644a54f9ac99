"""Layers of a tensor-parallel rank in which sums of input gradients overlap with the products of weight gradients.

They are derived from traced layers, in which such a sum follows the whole backward of its map. The changes are those
that `gsreal.methods.overlapped_sums` makes in real runs (`plan.async_input_gradients`):

- An all-reduce begins where the gradient of the map's input is computed, which comes before those of weight and bias.
  It is done in place, without the copy of its operand that the trace has.
- A reduce-scatter begins where the input's gradient of all maps that read the gathered tensor is complete. Only then
  come the gradients of these maps' weights and biases; their inputs, and the gradients of their outputs, live until
  the wait.

Either way the gradients of weights and biases are ready right after the wait for the sum.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from gssim.workload import Buffer, Layer, Moment, Parameter, Reduction

SUMS = ("all-reduce", "reduce-scatter")
"""Kinds of the collectives that sum over tensor-parallel ranks."""


def end_of(reduction: Reduction) -> int:
    """Return the position at which a layer has the result of a collective."""
    return reduction.moment.position if reduction.awaited is None else reduction.awaited


def input_gradient_sums(layer: Layer) -> list[Reduction]:
    """Return the collectives that sum gradients of inputs over tensor-parallel ranks, in order.

    What else is summed in a backward are statistics of norms over all heads, mostly in fp32 whatever the precision.
    """
    sums = [e for e in layer.reductions if e.moment.phase == "b" and e.kind in SUMS and not e.fixed]
    scatters = [e for e in sums if e.kind == "reduce-scatter"]
    return scatters or sums


def maps_of_sums(layer: Layer, *, rows: bool = False) -> list[list[Parameter]]:
    """Return, for each of `input_gradient_sums`, the weights of the column-parallel maps whose input gradients it sums.

    `rows`: instead, those of row-parallel maps whose weight gradients are computed between that sum and the one before.
    A layer whose forward sums outputs ends with a row-parallel map; all maps cut in its dimension are row-parallel.
    """
    maps = sorted((p for p in layer.parameters if p.sliced and len(p.shape) == 2), key=lambda p: p.ready.position)
    sums_results = any(e.moment.phase == "f" and e.kind in SUMS for e in layer.reductions)
    cut = maps[0].sliced_dimension if maps and sums_results else None
    ends = [end_of(each) + (each.awaited is not None) for each in input_gradient_sums(layer)]
    return [
        [p for p in maps if begin < p.ready.position <= end and (p.sliced_dimension == cut) == rows]
        for begin, end in pairwise((-1, *ends))
    ]


@lru_cache(maxsize=256)
def with_overlapped_sums(layer: Layer) -> Layer:
    """Return a layer whose sums of input gradients overlap with the products that give the weight gradients."""
    for reduction, maps in zip(input_gradient_sums(layer), maps_of_sums(layer), strict=True):
        owners = {each.name.rpartition(".")[0] for each in maps}
        of_maps = [each for each in layer.parameters if each.name.rpartition(".")[0] in owners]
        if maps and not any(each.of_experts for each in maps):
            is_traced = all(each.born.position < reduction.moment.position for each in of_maps)
            change = _with_scatter if reduction.kind == "reduce-scatter" else _with_all_reduce
            layer = (change if is_traced else _with_sum_of_one_operation)(layer, reduction, of_maps)
    return layer


def _with_sum_of_one_operation(layer: Layer, reduction: Reduction, parameters: Sequence[Parameter]) -> Layer:
    """Return a layer that is not traced (of a published run) with such a sum.

    There one operation stands for the whole backward of a map, and its sum has no copy of its operand.
    """
    end = reduction.moment
    ready = {id(each): replace(each, ready=_next(end)) for each in parameters}
    return _replaced(layer, {}, ready, reduction, Moment("b", end.position - 1))


def _with_all_reduce(layer: Layer, reduction: Reduction, parameters: Sequence[Parameter]) -> Layer:
    """Return a layer with one such all-reduce; `parameters`: weight and bias of the map."""
    end = reduction.moment
    as_large = [each for each in layer.buffers if each.born.phase == "b" and each.size_bytes == reduction.size_bytes]
    sent = next(each for each in as_large if each.freed == end)
    copy = next(each for each in as_large if each.born == end)
    places = [sent.born.position, *(each.born.position for each in parameters)]
    begin, later = Moment("b", min(places)), Moment("b", max(places))
    changed = {
        id(each): replace(each, born=later if each.born.position <= begin.position else each.born, ready=_next(end))
        for each in parameters
    }
    return _replaced(layer, {id(sent): None, id(copy): replace(copy, born=begin)}, changed, reduction, begin)


def _with_scatter(layer: Layer, reduction: Reduction, parameters: Sequence[Parameter]) -> Layer:
    """Return a layer with one such reduce-scatter; `parameters`: weights and biases of all maps that read its tensor.

    What a map's backward needs (its input, and the gradient of its output) is freed at the wait; in the trace, right
    after the gradient of its weight.
    """
    end = reduction.moment
    begin = Moment("b", end.position - 1)
    frees = {each.freed.position for each in layer.buffers if each.freed.phase == "b" and not each.freed.layer_offset}
    of_maps = [(each.born.position, each.ready.position) for each in parameters if len(each.shape) == 2]
    after_maps = [min((at for at in frees if born < at < ready), default=None) for born, ready in of_maps]
    changed: dict[int, Buffer | None] = {}
    for buffer in layer.buffers:
        freed = buffer.freed
        if freed.phase == "b" and not freed.layer_offset and freed.position in after_maps:
            changed[id(buffer)] = replace(buffer, freed=end)
        elif buffer.born == end:
            changed[id(buffer)] = replace(buffer, born=begin)
    gradients = {id(each): replace(each, born=end, ready=_next(end)) for each in parameters}
    return _replaced(layer, changed, gradients, reduction, begin)


def _next(moment: Moment) -> Moment:
    return replace(moment, position=moment.position + 1)


def _replaced(
    layer: Layer,
    buffers: dict[int, Buffer | None],
    parameters: dict[int, Parameter],
    reduction: Reduction,
    begin: Moment,
) -> Layer:
    """Return a layer with changed buffers and parameters, by `id` (None: left out), and a sum from `begin` on."""
    kept = (buffers.get(id(each), each) for each in layer.buffers)
    beside = replace(reduction, moment=begin, awaited=reduction.moment.position)
    reductions = [beside if each is reduction else each for each in layer.reductions]
    return replace(
        layer,
        buffers=tuple(each for each in kept if each is not None),
        parameters=tuple(parameters.get(id(each), each) for each in layer.parameters),
        reductions=tuple(reductions),
    )
