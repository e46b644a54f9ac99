"""Layers that combine context parallelism with tensor or expert parallelism, derived from layers traced separately.

No such layer is traced: it is combined from three traced layers of the model file.

1. A layer of `sliced_layers`, `sequence_layers` or `expert_layers` gives all but the exchanges around the attention: a
   rank runs it on its own positions, as it would run it on whole sequences of that length.
2. A layer of `context_layers` has those exchanges: copies and all-to-alls of queries, keys, values and outputs; or
   rings of keys and values, without operations of their own.
3. The same layer of `layers` has none. What 2 has and 3 has not is added to 1.

A tensor-parallel rank exchanges its own heads; a rank with the whole attention and a part of the experts exchanges all.
Operations are numbered within a layer, so those after an added exchange are renumbered.
tests/oracles/test_traced_context_slices.py compares with traces of steps that have such layers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from gssim.execution.cache import cached_by_identity
from gssim.workload import (
    NO_ROLES,
    Buffer,
    Layer,
    LayerInstance,
    Model,
    Moment,
    Polynomial,
    Reduction,
    for_samples,
    sliced_layer,
    unrolled,
    with_quantities,
)
from gssim.workload.layer import NO_COST, summed_terms


@dataclass(frozen=True)
class Attention:
    """Positions of a block's attention in its forward and backward, and where the backward frees what it needed.

    The latter two are 0 for a block without a backward.
    """

    forward: int
    backward: int
    released: int

    @classmethod
    def of(cls, layer: Layer) -> "Attention | None":
        """Return the attention of a layer; None if it has no attention that ranks could divide.

        The attention is the only compute-heavy operation that makes two tensors, one of which has the logarithms of its
        sums; its backward makes three.
        """
        return _attention(layer)

    @classmethod
    def known(cls, layer: Layer) -> "Attention":
        """Return the attention of a layer that has one, for which a scenario is checked."""
        attention = cls.of(layer)
        assert attention is not None
        return attention


@cached_by_identity(maxsize=256)
def _attention(layer: Layer) -> Attention | None:
    """Return the attention of a layer, which is asked for at every moment of its exchanges."""
    heavy = layer.selective_positions or ()
    buffers = for_samples(layer, 2).buffers  # moments are those of several samples
    born = Counter((each.born.phase, each.born.position) for each in buffers)
    places = [position for position in heavy if born["f", position] > 1]
    if len(places) != 1:
        return None
    (forward,) = places
    if not layer.backward_operations:  # neither it nor a layer before it is trained
        return Attention(forward, 0, 0)
    released = max(each.freed.position for each in buffers if each.born == Moment("f", forward))
    backwards = [at for (phase, at), count in born.items() if phase == "b" and count == 3 and at < released]
    return Attention(forward, max(backwards), released) if backwards else None


@dataclass(frozen=True)
class Shift:
    """By how many positions the operations of a layer are moved by the exchanges around its attention."""

    at: Attention | None = None
    forward: int = 0
    """Shift of the attention's forward."""
    after: int = 0
    """Shift of the forward's operations after the attention."""
    backward: int = 0
    after_backward: int = 0

    @property
    def attention(self) -> Attention:
        """The attention of the layer, where anything is moved."""
        assert self.at is not None
        return self.at

    def __call__(self, phase: str, position: int) -> int:
        """Return the new position of an operation."""
        if self.at is None:
            return position
        if phase == "f":
            moved = 0 if position < self.at.forward else self.forward if position == self.at.forward else self.after
        else:
            moved = 0 if position < self.at.backward else self.backward
            moved = self.after_backward if position > self.at.released else moved
        return position + moved

    def near(self, moment: Moment, layer: Layer) -> Moment:
        """Return the place of a moment of another layer here, at the same distance from the attention."""
        own, other = self.attention, Attention.known(layer)  # both layers are traced in the same way
        forward = own.forward + self.forward - other.forward
        backward = own.backward + self.backward - other.backward
        return replace(moment, position=moment.position + (forward if moment.phase == "f" else backward))


@dataclass(frozen=True)
class _Exchange:
    """An all-to-all of a layer traced with context parallelism: tensors sent and received, and a copy of these."""

    reduction: Reduction
    sent: Buffer
    received: Buffer
    copy: Buffer


def _exchanges(layer: Layer, phase: str) -> list[_Exchange]:
    exchanges = []
    for reduction in layer.reductions:
        if reduction.moment.phase == phase and reduction.kind == "all-to-all":
            at = reduction.moment.position
            buffers = [buffer for buffer in layer.buffers if buffer.born.phase == phase]
            sent = next(buffer for buffer in buffers if buffer.born.position == at - 1)
            received = next(buffer for buffer in buffers if buffer.born.position == at)
            copy = min((b for b in buffers if b.born.position > at), key=lambda buffer: buffer.born.position)
            exchanges.append(_Exchange(reduction, sent, received, copy))
    return exchanges


def _last(layer: Layer, phase: str) -> int:
    """Return the last position of a pass at which a layer allocates."""
    return max((each.born.position for each in layer.buffers if each.born.phase == phase), default=0)


def uncombined_reason(model: Model, cut: Sequence[Layer]) -> str | None:
    """Return why layers with cut blocks (`cut`) cannot be combined with parts of sequences; None if they can."""
    if not model.exact_sequence:
        return "is traced at one sequence length alone, and parts of sequences are shorter; trace it without one"
    if any(map(rings_of, model.context_layers)):
        whole = all(not layer.block or _ring_places(layer) for layer in cut)
        return None if whole else "has a block whose attention is not one operation that keeps its sums"
    for layers in (model.layers, model.context_layers, cut):
        if any(layer.block and Attention.of(layer) is None for layer in layers):
            return "has a block without one attention of its own, or is traced without its compute-heavy operations"
    if any(layer.block and _pads_heads(layer) for layer in model.context_layers):
        return (
            "has heads that GPUs pad in 16 bits; what their exchanges free beside cut blocks or divided experts is not "
            "known yet; allowed: workload.precision = 'fp32' without workload.autocast, or plan.cp = 1"
        )
    return None


def _pads_heads(layer: Layer) -> bool:
    """Return whether what a backward's exchanges send are not the gradients that the attention makes, as of heads that
    are padded for its kernel.
    """
    at = Attention.known(layer)
    made = {each.freed for each in layer.buffers if _is_input_gradient(each, at)}
    return any(each.received.freed not in made for each in _exchanges(layer, "b")[1:])


def on_positions(quantity: Polynomial, positions: int) -> Polynomial:
    """Return a quantity of a part of `positions` positions as a function of the whole sequence's length.

    Terms that grow with the square of the length count pairs of an own position and any position of the sequence.

    >>> str(on_positions(Polynomial.parse("8 + 4*b*s + 2*b*s^2"), 16))
    '8 + 64*b + 32*b*s'
    """
    terms = tuple((c * (positions if j else 1), i, max(0, j - 1)) for c, i, j in quantity.terms)
    return Polynomial(summed_terms((1, terms)) or NO_COST.terms)


def at_length(layer: Layer, positions: int) -> Layer:
    """Return a layer on `positions` positions of its own, whose attention is to whole sequences."""
    return with_quantities(layer, partial(on_positions, positions=positions))


PASSES = ("forward", "backward", "recompute", "selective")
COSTS = (*(f"{name}_{what}" for name in PASSES for what in ("bytes", "streamed_bytes")), "saved_bytes")
"""Costs of a layer that exchanges increase; they have no FLOP."""
OPERATIONS = tuple(f"{name}_operations" for name in PASSES)


@cached_by_identity(maxsize=64)
def _parts(traced: Model, positions: int) -> tuple[tuple[Layer, Layer], ...]:
    """Return, for each layer of a whole model on `positions` positions, the layer without and with the exchanges."""
    once: dict[int, Layer] = {}
    parts = []
    for alone, exchanging in zip(
        unrolled(traced), unrolled(replace(traced, layers=traced.context_layers)), strict=True
    ):
        for layer, make in ((alone.layer, at_length), (exchanging.layer, lambda each, p: sliced_layer(each, 0, p))):
            if id(layer) not in once:
                once[id(layer)] = make(layer, positions)
        parts.append((once[id(alone.layer)], once[id(exchanging.layer)]))
    return tuple(parts)


Part = tuple[int, int]
"""Number of units on a rank, and in all."""


def in_context(model: Model, cut: Sequence[Layer], parts: Sequence[Part], positions: int) -> tuple[Layer, ...]:
    """Return a tensor-parallel rank's layers on `positions` positions of each sequence.

    `cut`: its layers without exchanges, as functions of the sequence length. `parts`: for each of these layers, the
    rank's part of the heads.
    """
    held = [part for layer, part in zip(cut, parts, strict=True) for _ in range(layer.repeats)]
    groups: list[tuple[Layer, list[str]]] = []
    for instance in instances_in_context(model, unrolled(replace(model, layers=tuple(cut))), held, positions):
        if groups and groups[-1][0] is instance.layer:
            groups[-1][1].append(instance.module)
        else:
            groups.append((instance.layer, [instance.module]))
    names = Counter(layer.name for layer, _ in groups)
    return tuple(
        replace(
            layer,
            name=layer.name if names[layer.name] == 1 else modules[0],
            modules=tuple(modules) if layer.modules else (),
        )
        for layer, modules in groups
    )


def instances_in_context(
    model: Model, instances: Sequence[LayerInstance], parts: Sequence[Part], positions: int
) -> tuple[LayerInstance, ...]:
    """Return a rank's unrolled layers on `positions` positions of each sequence; other arguments as `in_context`,
    unrolled.

    Equal layers are one object, if the operations of their neighbours are shifted equally.
    """
    traced = _parts(model, positions)
    own = {id(each.layer): at_length(each.layer, positions) for each in instances}
    shifts = [_shift(own[id(each.layer)], *whole) for each, whole in zip(instances, traced, strict=True)]
    once: dict[tuple[object, ...], Layer] = {}
    held = []
    for instance, whole, part in zip(instances, traced, parts, strict=True):
        nearby = tuple(
            shifts[at] if 0 <= (at := instance.index + offset) < len(shifts) else Shift()
            for offset in _offsets(instance)
        )
        key = (id(instance.layer), id(whole[0]), id(whole[1]), shifts[instance.index], nearby)
        if key not in once:
            moves = dict(zip(_offsets(instance), nearby, strict=True)) | {0: shifts[instance.index]}
            once[key] = _combined(own[id(instance.layer)], *whole, part, moves)
        held.append(replace(instance, layer=once[key]))
    return tuple(held)


def _offsets(instance: LayerInstance) -> tuple[int, ...]:
    """Return the layer offsets at which a layer's buffers are freed and its gradients are ready, without 0."""
    layer = instance.layer
    moments = [each.freed for each in layer.buffers]
    moments += [moment for each in layer.parameters for moment in (each.born, each.ready)]
    return tuple(sorted({moment.layer_offset for moment in moments} - {0}))


def rings_of(layer: Layer) -> list[Reduction]:
    """Return the rings that a layer's attention states itself, one for each pass, in place of all-to-alls."""
    return [each for each in layer.reductions if each.kind == "ring"]


def _ring_places(layer: Layer) -> dict[str, int] | None:
    """Return the positions of a block's attention by pass, if it is one compute-heavy operation with two results: the
    output and the logarithms of its sums, which its backward frees.
    """
    buffers = for_samples(layer, 2).buffers  # moments are those of several samples
    born = Counter(each.born.position for each in buffers if each.born.phase == "f")
    forward = [position for position in layer.selective_positions or () if born[position] > 1]
    if len(forward) != 1:
        return None
    freed = [each.freed for each in buffers if each.born == Moment("f", forward[0])]
    backward = [moment.position for moment in freed if moment.phase == "b"]
    return {"f": forward[0], "b": max(backward)} if backward else None


def _shift(own: Layer, alone: Layer, exchanging: Layer) -> Shift:
    if not exchanging.units or rings_of(exchanging):  # rings add no operation to the layer's own
        return Shift()
    at, before, with_exchange = map(Attention.known, (own, alone, exchanging))
    return Shift(
        at,
        with_exchange.forward - before.forward,
        _last(exchanging, "f") - _last(alone, "f"),
        with_exchange.backward - before.backward,
        _last(exchanging, "b") - _last(alone, "b"),
    )


def _combined(own: Layer, alone: Layer, exchanging: Layer, part_of: Part, moves: Mapping[int, Shift]) -> Layer:
    """Return a layer with the exchanges that `exchanging` has and `alone` has not.

    `part_of`: the rank's part of the layer's heads. `moves`: shift of operations, by layer offset.
    """
    part, whole = part_of
    shift = moves[0]

    def moved(moment: Moment) -> Moment:
        if moment.phase == "end":
            return moment
        return replace(moment, position=moves[moment.layer_offset](moment.phase, moment.position))

    def of_rank(size: Polynomial) -> Polynomial:
        return Polynomial(tuple((c * part // whole, i, j) for c, i, j in size.terms))

    layer = _with_costs(own, alone, exchanging, of_rank)
    if shift.at is not None:
        layer = _renumbered(layer, shift)
    buffers = [replace(each, born=moved(each.born), freed=moved(each.freed)) for each in own.buffers]
    reductions = [replace(each, moment=moved(each.moment)) for each in own.reductions]
    releases = own.recompute_releases
    if rings := rings_of(exchanging):
        places = _ring_places(own)
        assert places is not None  # a scenario is checked for it
        for ring in rings:
            moment = replace(ring.moment, position=places[ring.moment.phase])
            reductions.append(replace(ring, moment=moment, size_bytes=of_rank(ring.size_bytes)))
    if shift.at is not None:
        with_releases = _with_exchanges(own, buffers, exchanging, shift, of_rank)
        buffers = [each for each, _ in with_releases]
        releases = releases and tuple(release for each, release in with_releases if each.is_saved)
        for each in (*_exchanges(exchanging, "f"), *_exchanges(exchanging, "b")):
            moment = shift.near(each.reduction.moment, exchanging)
            reductions.append(replace(each.reduction, moment=moment, size_bytes=of_rank(each.reduction.size_bytes)))
    return replace(
        layer,
        parameters=tuple(replace(each, born=moved(each.born), ready=moved(each.ready)) for each in own.parameters),
        buffers=tuple(buffers),
        reductions=tuple(sorted(reductions, key=lambda each: (each.moment.phase != "f", each.moment.position))),
        recompute_releases=releases,
        **NO_ROLES,
    )


def _with_costs(own: Layer, alone: Layer, exchanging: Layer, of_rank: Callable[[Polynomial], Polynomial]) -> Layer:
    """Return a layer with bytes and operations of exchanges added; `of_rank`: reduces a size to the rank's part."""

    def changes_of(names: Sequence[str], *holders: Any) -> dict[str, Any]:
        """Return fields of the first holder plus the difference between those of the second and the third."""
        changes: dict[str, Any] = {}
        for name in names:
            values = [getattr(each, name) for each in holders]
            if None in values:
                continue
            if name.endswith("operations"):
                changes[name] = values[0] + values[1] - values[2]
            else:
                negative = Polynomial(tuple((-c, i, j) for c, i, j in values[2].terms))
                changes[name] = _sum(values[0], of_rank(_sum(values[1], negative)))
        return changes

    changes = changes_of((*COSTS, *OPERATIONS), own, exchanging, alone)
    again = [each.every_second_product for each in (own, exchanging, alone)]
    if again[0] is not None:
        of_again = changes_of(("bytes", "streamed_bytes", "operations"), *again)
        changes["every_second_product"] = replace(again[0], **of_again)
    return replace(own, **changes)


def _renumbered(layer: Layer, shift: Shift) -> Layer:
    """Return a layer whose recomputed positions are renumbered for the additional operations."""
    changes: dict[str, Any] = {}
    if layer.recompute_positions is not None:
        changes["recompute_positions"] = layer.recompute_positions + shift.after
    if layer.selective_positions is not None:
        changes["selective_positions"] = tuple(shift("f", position) for position in layer.selective_positions)
    if layer.selective_rerun is not None:
        changes["selective_rerun"] = tuple(shift("f", position) for position in layer.selective_rerun)
    if (again := layer.every_second_product) is not None:
        positions = tuple(shift("f", position) for position in again.positions)
        changes["every_second_product"] = replace(again, positions=positions)
    return replace(layer, **changes)


def _with_exchanges(
    own: Layer,
    moved: Sequence[Buffer],
    exchanging: Layer,
    shift: Shift,
    of_rank: Callable[[Polynomial], Polynomial],
) -> list[tuple[Buffer, int]]:
    """Return the buffers of a block together with those of its exchanges, in order.

    `moved`: the block's own buffers, at their new moments. Each is returned with the position at which a forward that
    saves nothing frees it.
    """
    at, other = shift.attention, Attention.known(exchanging)
    saved = [id(each) for each in own.buffers if each.is_saved]
    releases = dict(zip(saved, own.recompute_releases or (0,) * len(saved), strict=True))
    outputs = [
        shift("f", release)
        for each in own.buffers
        if each.born == Moment("f", at.forward) and (release := releases.get(id(each), 0)) > at.forward
    ]
    sent = [each.freed for each in exchanging.buffers if each.born == Moment("b", other.backward)]
    gradients = [new.freed for each, new in zip(own.buffers, moved, strict=True) if _is_input_gradient(each, at)]
    every = _own_buffers(own, moved, exchanging, shift, releases, sent)
    every += [
        (replace(each, size_bytes=of_rank(each.size_bytes)), release)
        for each, release in _exchanged_buffers(
            own,
            exchanging,
            shift,
            output_release=outputs[-1] if outputs else 0,
            gradient_ends=dict(zip(sent, gradients, strict=False)),
        )
    ]
    return sorted(every, key=lambda each: (each[0].born.phase != "f", each[0].born.position))


def _is_input_gradient(buffer: Buffer, at: Attention) -> bool:
    """Return whether a buffer is the gradient of the attention's queries, keys or values."""
    return buffer.born == Moment("b", at.backward)


def _own_buffers(
    own: Layer,
    moved: Sequence[Buffer],
    exchanging: Layer,
    shift: Shift,
    releases: Mapping[int, int],
    sent: Sequence[Moment],
) -> list[tuple[Buffer, int]]:
    """Return a block's own buffers, with their releases, where exchanges keep them for another time.

    Queries, keys and values live until their module returns: autograd saves the received tensors in their place.
    Gradients and outputs live until they are sent; outputs that no backward needs, until the function returns that
    exchanges them. `releases`: of the block without exchanges, by the buffer's `id`.
    `sent`: when the layer `exchanging` frees the gradients of queries, keys and values that it sends.
    """
    at, other = shift.attention, Attention.known(exchanging)
    outputs = [each.freed for each in exchanging.buffers if each.born == Moment("f", other.forward)]
    to_parts, of_output = _exchanges(exchanging, "f")[-1], next(iter(_exchanges(exchanging, "b")), None)
    copied = shift.near(to_parts.copy.born, exchanging).position
    sent_in_order = iter(sent)
    buffers: list[tuple[Buffer, int]] = []
    for each, new in zip(own.buffers, moved, strict=True):
        release = releases.get(id(each), 0)
        born, until_released = each.born, each.freed == Moment("b", at.released)
        if _is_input_gradient(each, at):
            new = replace(new, freed=shift.near(next(sent_in_order), exchanging))
        elif (
            of_output and until_released and born.phase == "b" and born.position < at.backward
        ):  # gradients of outputs of attention
            new = replace(new, freed=shift.near(of_output.received.freed, exchanging))
        elif until_released and born.phase == "f" and born.position < at.forward:  # queries, keys and values
            end = Moment("f", _end_of_module(own, exchanging, shift, each, release))
            new = replace(new, freed=end, category="temporaries")
        elif (born == Moment("f", at.forward) and release > at.forward) or born.position < at.forward == release:
            release = copied  # outputs, and what was freed directly after the attention
        elif born == Moment("f", at.forward) and each.freed.phase == "f" and each.freed.position > at.forward:
            new = replace(new, freed=shift.near(max(outputs, key=lambda freed: freed.position), exchanging))
        else:
            release = shift("f", release)
        buffers.append((new, release))
    return buffers


def _exchanged_buffers(
    own: Layer,
    exchanging: Layer,
    shift: Shift,
    *,
    output_release: int,
    gradient_ends: Mapping[Moment, Moment],
) -> list[tuple[Buffer, int]]:
    """Return the tensors that a block's exchanges send, receive and copy, with their releases; sizes are of all heads.

    Received outputs are copied for the linear map that follows, and the copies live as long as the outputs would
    without exchanges. Gradients are exchanged in reverse.

    Args:
        own: the block without exchanges.
        exchanging: the layer whose exchanges are taken.
        shift: from `own` to the block with exchanges.
        output_release: where a forward that saves nothing frees the copy of the received outputs.
        gradient_ends: when the copies of received gradients are freed, by when `exchanging` frees the gradients sent.
    """
    at = shift.attention
    (*to_heads, to_parts), of_gradients = _exchanges(exchanging, "f"), _exchanges(exchanging, "b")
    if to_parts.copy.freed.phase == "f":  # the map is frozen: autograd keeps nothing for the gradient of its weight
        end = max(output_release, shift("f", _end_of_product(own, at)))
        until = Moment("f", end) if end else shift.near(to_parts.copy.freed, exchanging)
    else:  # it is freed as long after the gradient of the map's weight as in `exchanging`
        product = max(
            (each for each in exchanging.parameters if each.born.position <= to_parts.copy.freed.position),
            key=lambda each: each.born.position,
        )
        (own_product,) = (each for each in own.parameters if each.name == product.name)
        after = to_parts.copy.freed.position - product.born.position
        until = Moment("b", shift("b", own_product.born.position + after))

    copied = shift.near(to_parts.copy.born, exchanging).position
    tensors = [(to_parts.copy, until, output_release)]
    if of_gradients:
        of_output, *of_inputs = of_gradients
        tensors += [(each.copy, Moment("b", shift("b", at.released)), copied) for each in to_heads]
        tensors.append((of_output.copy, shift.near(of_output.copy.freed, exchanging), 0))
        tensors += [(each.copy, gradient_ends[each.received.freed], 0) for each in of_inputs]
    else:
        tensors += [(each.copy, shift.near(each.copy.freed, exchanging), 0) for each in to_heads]
    for exchange in (*to_heads, to_parts, *of_gradients):
        tensors += [(each, shift.near(each.freed, exchanging), 0) for each in (exchange.sent, exchange.received)]
    return [
        (replace(each, born=shift.near(each.born, exchanging), freed=freed), release)
        for each, freed, release in tensors
    ]


def _end_of_module(own: Layer, exchanging: Layer, shift: Shift, kept: Buffer, release: int) -> int:
    """Return where the attention's module returns, and frees its queries, keys and values, one of which is `kept`.

    Some modules contain the linear map of the outputs, and return after its sum over the ranks. In others the map
    follows the module: they return as far after the attention as in the layer `exchanging`. So do all modules of whole
    attentions, which have no such sum. `release`: the last operation before.
    """
    at, other = shift.attention, Attention.known(exchanging)
    if not any(each.kind in ("all-reduce", "reduce-scatter") for each in own.reductions):
        alike = [each.freed for each in exchanging.buffers if each.born == kept.born and each.freed.phase == "f"]
        if alike:
            return shift.near(alike[0], exchanging).position
    copied = _exchanges(exchanging, "f")[-1].copy.born.position
    ends = [
        each.freed.position
        for each in exchanging.buffers
        if each.born.phase == each.freed.phase == "f" and not each.freed.layer_offset
        if each.born.position < other.forward and copied < each.freed.position < _next_product(exchanging, other)
    ]
    if ends:
        return shift.near(Moment("f", max(ends)), exchanging).position
    product = Moment("f", _next_product(own, at))
    outputs = [each.freed for each in own.buffers if each.born == product and each.freed.phase == "f"]
    inside = [each.position for each in outputs if not each.layer_offset and product.position <= release]
    return shift("f", max([release, *inside]))


def _end_of_product(layer: Layer, at: Attention) -> int:
    """Return where the linear map of the attention's outputs, if its sum over ranks follows, lets go of its output; 0
    where none follows.
    """
    if not any(each.kind in ("all-reduce", "reduce-scatter") for each in layer.reductions):
        return 0
    product = Moment("f", _next_product(layer, at))
    outputs = [each.freed for each in layer.buffers if each.born == product and each.freed.phase == "f"]
    return max((each.position for each in outputs if not each.layer_offset), default=0)


def _next_product(layer: Layer, at: Attention) -> int:
    """Return the position of the linear map of the attention's outputs."""
    return min(position for position in layer.selective_positions or () if position > at.forward)


def _sum(quantity: Polynomial, other: Polynomial) -> Polynomial:
    """Return the sum of two quantities of a rank's layers, with one term per power."""
    return Polynomial(summed_terms((1, quantity.terms), (1, other.terms)) or NO_COST.terms)


@lru_cache(maxsize=256)
def ring_layer(layer: Layer) -> Layer:
    """Return a layer with ring attention, made from one traced with all-to-alls; layers without attention, or with
    rings of their own, are unchanged.

    The exchange of heads is left out: copies to send, and received tensors. The attention has as many tensors of its
    own: copies of queries, keys and values, the output, its logarithms, and a copy in the form that the linear map
    takes; gradients need no further copies. One `ring` replaces the all-to-alls of each pass, directly after the
    attention; its bytes are those of a rank's keys and values.
    """
    forward = [each for each in layer.reductions if each.moment.phase == "f" and each.kind == "all-to-all"]
    backward = [each for each in layer.reductions if each.moment.phase == "b" and each.kind == "all-to-all"]
    if not forward:
        return layer
    (_, key, value, _), of_inputs = forward, backward[1:]
    positions = {each.moment.phase + str(each.moment.position + by) for each in (*forward, *backward) for by in (-1, 0)}
    attention = fused_attention(layer)
    assert attention is not None  # a scenario is checked for it
    copies = {each.moment.position + 3 for each in of_inputs}
    buffers = []
    for buffer in layer.buffers:
        born = buffer.born
        if str(born) in positions or (born.phase == "b" and born.position == attention.get("b")):
            continue
        if born.phase == "b" and born.position in copies:
            buffer = replace(buffer, born=replace(born, position=attention["b"]))
        buffers.append(buffer)
    both = key.size_bytes.plus(value.size_bytes)
    exchanged = [each for each in (forward, backward) if each]
    moments = [replace(each[0].moment, position=attention[each[0].moment.phase]) for each in exchanged]
    others = [each for each in layer.reductions if each.kind != "all-to-all"]
    every = (*others, *(Reduction(moment, both, "ring") for moment in moments))
    in_order = tuple(sorted(every, key=lambda each: (each.moment.phase != "f", each.moment.position)))
    return replace(layer, buffers=tuple(buffers), reductions=in_order)


def fused_attention(layer: Layer) -> dict[str, int] | None:
    """Return the positions, by pass, of a block's attention between its all-to-alls, or before its rings.

    None if its kernel does not make output and logarithms, and the gradients of queries, keys and values.
    """
    if rings := rings_of(layer):
        return {each.moment.phase: each.moment.position for each in rings}
    places: dict[str, int] = {}
    exchanges = [each.moment for each in layer.reductions if each.kind == "all-to-all"]
    for phase, before, tensors in (("f", 3, 2), ("b", 1, 3)):  # of queries, keys and values, or of the output
        positions = [each.position for each in exchanges if each.phase == phase]
        if not positions and phase == "b":  # with adapters, queries, keys and values may all have no gradient
            continue
        first, last = positions[before - 1 : before + 1]
        born = Counter(each.born.position for each in layer.buffers if each.born.phase == phase)
        inside = [position for position in born if first < position < last]
        # between the all-to-alls, most buffers are allocated by the attention itself
        places[phase] = max(inside, key=born.__getitem__)
        if born[places[phase]] < tensors:
            return None
    return places
