"""Slices of a model's blocks on the ranks of a tensor-parallel group, in whole units (heads, columns), by their shares.

The real backend cuts modules so, and predictions take their layers from here. See [Note: units] in `gssim.workload`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gssim.plan import splitting
from gssim.scenario.device_rates import value_bytes
from gssim.scenario.scenario import Scenario
from gssim.units import PRECISION_BYTES
from gssim.workload import (
    Buffer,
    Layer,
    Model,
    Moment,
    Parameter,
    Polynomial,
    Reduction,
    TokenInput,
    layer_input_gradient,
    layer_output,
    sliced_layer,
)
from gssim.workload.layer import GATHER_AGAIN


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
    return sum(layer.repeats * len(native_parameters(layer)) for layer in model.sliced_layers)


def native_parameters(layer: Layer) -> list[Parameter]:
    """Return the parameters of a sliced layer that are DTensors where it is cut natively; see `native_tensors`."""
    cut_maps = {_map_of(parameter) for parameter in layer.parameters if parameter.cut is not None}
    return [parameter for parameter in layer.parameters if layer.linear and _map_of(parameter) in cut_maps]


def _map_of(parameter: Parameter) -> str:
    """Return the name of the linear map that has the parameter."""
    return parameter.name.rpartition(".")[0]


def undivided_reason(model: Model) -> str | None:
    """Return why ranks cannot divide the vocabulary of a model's head and loss; None: they can."""
    if not isinstance(model.input, TokenInput) or model.input.classes is not None or len(model.layers) < 2:
        return "it predicts no tokens"
    if model.loss_fused:
        return "its loss is fused with the head"
    head, loss = model.layers[-2:]
    shapes = [parameter.shape for parameter in head.parameters]
    if loss.modules or head.block or len(shapes) != 1 or len(shapes[0]) != 2:
        return "its last layer is no linear map with a weight of its own, and without bias"
    output = layer_output(head.buffers, head.output_bytes)
    if (
        output is None
        or len(output.size_bytes.terms) != 1
        or layer_input_gradient(head.buffers) is None
        or len(head.buffers) != 2
    ):
        return "its head is not traced as one matrix product"
    return None


WIDE_BYTES = 4
"""Bytes of an element of what is summed over a divided vocabulary, or those of the logits if these have more."""


@lru_cache(maxsize=256)
def divided_loss(head: Layer, loss: Layer, rows: int, *, traced_bytes: int, value_bytes: int) -> tuple[Layer, Layer]:
    """Return head and loss of a rank with so many rows of the vocabulary, of those that have all of it.

    `traced_bytes`: of an element as traced; `value_bytes`: as it is trained. The loss is that of gsreal.methods.
    loss_parallel: wide logits become exponentials, and these the gradient, in place, until the head's backward is done;
    narrow ones are cast, and so is their gradient. Of each token there are, besides: an index, two flags and two sums
    until the backward, and for a moment the largest logit, and as much again as the sums.
    """
    (weight,) = head.parameters
    share = rows / weight.shape[0]
    output, gradient = layer_output(head.buffers, head.output_bytes), layer_input_gradient(head.buffers)
    assert output is not None  # a scenario is checked for it
    assert gradient is not None
    summed = Moment("b", max(weight.ready.position, gradient.born.position) + 1)
    used = max((each.freed for each in loss.buffers if each.freed.layer_offset == -1), key=lambda each: each.position)
    wide = max(WIDE_BYTES, value_bytes)
    ((logits_bytes, *powers),) = output.size_bytes.terms  # of a model traced at one length, of whole sequences
    tokens = logits_bytes // (weight.shape[0] * traced_bytes)

    def per_token(size: float) -> Polynomial:
        return Polynomial(((round(tokens * size * traced_bytes / value_bytes), powers[0], powers[1]),))

    def of(born: str, freed: str, category: str, size: Polynomial) -> Buffer:
        return Buffer(Moment.parse(born), Moment.parse(freed), category, size)

    own_logits = per_token(rows * value_bytes)
    scalars = [each for each in loss.buffers if all(i == 0 for _, i, _ in each.size_bytes.terms)]
    last = max((each.freed.position for each in scalars if each.freed.layer_offset == 0), default=3)
    end = f"b{last}"
    small = [
        of("f1", "f2", "temporaries", per_token(wide)),
        of("f2", end, "activations", per_token(8 + 1 + 1)),
        of("f3", end, "activations", per_token(2 * wide)),
        of("f4", "f5", "temporaries", per_token(2 * wide)),
        of("b1", "b2", "temporaries", per_token(2 * wide)),
    ]
    if value_bytes < WIDE_BYTES:
        logits = replace(output, size_bytes=own_logits)
        small += [of("f0", end, "activations", per_token(rows * wide))]
        small += [Buffer(Moment.parse(end), used, "temporaries", own_logits)]
    else:
        logits = replace(output, category="activations", freed=replace(used, layer_offset=0), size_bytes=own_logits)
    partial, whole = replace(gradient, freed=summed), replace(gradient, born=summed)
    reductions = [Reduction(Moment("f", place), per_token(size)) for place, size in ((1, wide), (4, 2 * wide))]
    own_head = replace(
        _scaled(head, share),
        parameters=(replace(weight, shape=(rows, weight.shape[1]), sliced=True),),
        buffers=(logits, partial, whole),
        reductions=(Reduction(summed, gradient.size_bytes),),
        output_bytes=own_logits,
    )
    own_loss = replace(
        _scaled(loss, share), buffers=(*scalars, *small), reductions=tuple(reductions), output_bytes=loss.output_bytes
    )
    return own_head, own_loss


def _scaled(layer: Layer, share: float) -> Layer:
    """Return a layer with a share of the work, of which nearly all is in proportion to the vocabulary."""
    names = [f"{phase}_{what}" for phase in ("forward", "backward") for what in ("flop", "bytes", "streamed_bytes")]
    changes: dict[str, Any] = {"frozen": None, "deepest": None, "untrained_buffers": None}
    for name in names:
        size = getattr(layer, name)
        if size is not None:
            terms = tuple((round(c * share), i, j) for c, i, j in size.terms)
            changes[name] = Polynomial(terms)
    return replace(layer, **changes)


_WHOLE_ONLY: dict[str, Any] = dict.fromkeys(("sliced_layers", "sequence_layers", "context_layers", "expert_layers"), ())
"""Fields of a model that a rank's part of it lacks."""


def model_slice(
    model: Model,
    parts: Sequence[float],
    position: int,
    *,
    positions: int | None = None,
    value_bytes: int | None = None,
    gathers_again: bool = False,
) -> Model:
    """Return the slice of the model on the rank at `position` of a tensor group; `parts`: every rank's share.

    `positions`: of each sequence that the rank has with sequence parallelism; None: without. `value_bytes`: of an
    element of the logits, where ranks divide the vocabulary; None: they do not. `gathers_again`: gathered inputs are
    not kept for the backward.
    """
    layers = []
    for layer in model.sliced_layers if positions is None else model.sequence_layers:
        units = units_of_ranks(layer.units, parts)[position] if layer.units else 0
        changes = layer.units or positions is not None
        layers.append(sliced_layer(layer, units, positions or 0) if changes else layer)
    if gathers_again:
        length = (positions or 0) * len(parts)
        layers = [_gathering_again(layer, len(parts), length) for layer in layers]
    if value_bytes is not None:
        vocabulary = layers[-2].parameters[0].shape[0]
        traced_bytes = PRECISION_BYTES[model.traced_precision]
        rows = units_of_ranks(vocabulary, parts)[position]
        layers[-2:] = divided_loss(*layers[-2:], rows, traced_bytes=traced_bytes, value_bytes=value_bytes)
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
    attention: dict[str, int] = {}  # between the all-to-alls, most buffers are allocated by the attention itself
    for phase, first, last in (("f", value, output), ("b", of_output, of_inputs[0])):
        born = Counter(each.born.position for each in layer.buffers if each.born.phase == phase)
        inside = [position for position in born if first.moment.position < position < last.moment.position]
        attention[phase] = max(inside, key=born.__getitem__)
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


def held_slice(scenario: Scenario, position: int) -> Model:
    """Return a scenario's model as the ranks at `position` of their tensor groups run it: blocks cut, or on parts of
    sequences.
    """
    model, positions = scenario.workload.model, scenario.sequence_positions
    if scenario.policies.cp > 1:
        return context_part(model, positions or 0, ring=scenario.policies.ring)
    value = value_bytes(scenario.workload) if scenario.plan.loss_parallel else None
    again = scenario.plan.gathered_inputs == "gathered-again"
    return model_slice(
        model, scenario.slice_shares, position, positions=positions, value_bytes=value, gathers_again=again
    )


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
