"""The vocabulary divided among tensor-parallel ranks: rows of the token embedding, and of the head with its loss.

Each rank looks up those tokens whose rows it has, and one all-reduce adds the ranks' results
(`plan.embedding_parallel`; Megatron-LM, core/tensor_parallel/layers.py, VocabParallelEmbedding). Each rank has its own
rows of the head, and only the logits of these rows (`plan.loss_parallel`). A weight that embedding and head share is
divided once. Beside adapters both are frozen: the lookup has no backward, and the head's has the gradient of its input
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gssim.plan import Plan, splitting
from gssim.units import PRECISION_BYTES
from gssim.workload import (
    NO_ROLES,
    Buffer,
    Layer,
    Model,
    Moment,
    Parameter,
    Polynomial,
    Reduction,
    TokenInput,
    for_samples,
    layer_input_gradient,
    layer_output,
)


@dataclass(frozen=True)
class DividedVocabulary:
    """The layers whose vocabulary tensor-parallel ranks divide: the embedding, and the head with the loss."""

    embedding: bool
    loss: bool
    value_bytes: int
    """Bytes of an element in the training precision."""


def divided_vocabulary(plan: Plan, value_bytes: int) -> DividedVocabulary | None:
    """Return which parts of the vocabulary the ranks of a plan divide; None if none."""
    if not (plan.embedding_parallel or plan.loss_parallel):
        return None
    return DividedVocabulary(plan.embedding_parallel, plan.loss_parallel, value_bytes)


def divided_entries(plan: Plan, model: Model) -> list[int]:
    """Return the numbers of rows of the weights that the ranks of a plan divide along the vocabulary."""
    weight, divided = token_embedding(model), []
    if plan.embedding_parallel and weight is not None:
        divided.append(weight.shape[0])
    if plan.loss_parallel and not shares_embedding(model):
        divided.append(_weights(model.layers[-2])[0].shape[0])
    return divided


def _weights(layer: Layer) -> tuple[Parameter, ...]:
    """Return the parameters of a layer outside of blocks, trained or frozen; none of these has some of both."""
    return layer.parameters or layer.frozen_parameters


def _with_weights(layer: Layer, weights: Sequence[Parameter]) -> Layer:
    """Return a layer with other parameters, which are trained if its own are."""
    if layer.parameters:
        return replace(layer, parameters=tuple(weights))
    return replace(layer, frozen_parameters=tuple(weights))


def units_of_ranks(units: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Return each rank's number of units of a block, or of rows of the vocabulary, by largest remainders (see
    `splitting.split`).

    >>> units_of_ranks(8, [0.75, 0.125, 0.125])
    (6, 1, 1)
    """
    return splitting.split(units, parts)


def undivided_loss_reason(model: Model) -> str | None:
    """Return why ranks cannot divide the vocabulary of a model's head and loss; None if they can."""
    if not isinstance(model.input, TokenInput) or model.input.classes is not None or len(model.layers) < 2:
        return "it predicts no tokens"
    if model.loss_fused:
        return "its loss is fused with the head"
    head, loss = model.layers[-2:]
    shapes = [parameter.shape for parameter in _weights(head)]
    tied = shares_embedding(model) and not shapes
    if loss.modules or head.block or not (tied or (len(shapes) == 1 and len(shapes[0]) == 2)):
        return "its last layer is no linear map without bias, whose weight is its own or the token embedding's"
    output, made = layer_output(head.buffers, head.output_bytes), 2
    if tied and model.module.adapters is None:
        made = 3
    elif model.module.frozen is not None and not passes_gradient(model.layers[-3]):
        made = 1  # the gradient of its weight alone
    if (
        output is None
        or len(output.size_bytes.terms) != 1
        or (layer_input_gradient(head.buffers) is None) != (made == 1)
        or len(head.buffers) != made
    ):
        return "its head is not traced as one matrix product"
    return None


def passes_gradient(layer: Layer) -> bool:
    """Return whether a layer has a backward: it or one before it is trained."""
    return bool(layer.parameters) or layer.backward_operations > 0


def undivided_embedding_reason(model: Model) -> str | None:
    """Return why ranks cannot divide a model's token embedding; None if they can."""
    if not isinstance(model.input, TokenInput):
        return "its input is no tokens"
    if token_embedding(model) is None:
        return "its first layer has no embedding of the whole vocabulary"
    if _lookup(model.layers[0], model) is None:
        return "its embedding is not traced as one lookup"
    if shares_embedding(model) and _weights(model.layers[-2]):
        return "its head, which shares the embedding's weight, has other parameters"
    return None


def token_embedding(model: Model) -> Parameter | None:
    """Return the weight of a model's token embedding, the first parameter of the first layer; None if it has none."""
    first = model.layers[0]
    if not isinstance(model.input, TokenInput) or first.block or not _weights(first):
        return None
    weight = _weights(first)[0]
    return weight if len(weight.shape) == 2 and weight.shape[0] >= model.input.vocabulary else None


def shares_embedding(model: Model) -> bool:
    """Return whether a model's head shares the weight of its token embedding.

    If so, a buffer of the head has the weight's size and is freed in the backward of an earlier layer, the embedding:
    the head's part of the gradient. Beside adapters the weight has no gradient, and the model's own layers are asked.
    """
    weight = token_embedding(model)
    if weight is None or len(model.layers) < 2:
        return False
    if model.module.adapters is not None:
        return shares_embedding(replace(model, layers=model.whole_layers, module=replace(model.module, adapters=None)))
    table = weight.elements * PRECISION_BYTES[model.traced_precision]
    return any(
        each.born.phase == "b" and each.freed.layer_offset < 0 and _is_constant(each.size_bytes, table)
        for each in model.layers[-2].buffers
    )


def _is_constant(size: Polynomial, value: int) -> bool:
    varying = size.unit_terms or size.part_terms or size.row_terms or size.expert_terms
    return size.terms == ((value, 0, 0),) and not varying


def _lookup(layer: Layer, model: Model) -> Buffer | None:
    """Return the output of the lookup in a model's first layer: the first tensor with a row for every token."""
    row_bytes = _weights(layer)[0].shape[1] * PRECISION_BYTES[model.traced_precision]
    lookups = [
        each
        for each in layer.buffers
        if each.born.phase == "f" and len(each.size_bytes.terms) == 1  # in tokens, or if of one length in sequences
        for size, samples, _ in each.size_bytes.terms
        if samples == 1 and not size % row_bytes
    ]
    return min(lookups, key=lambda each: each.born.position, default=None)


def divided_layers(
    model: Model, layers: Sequence[Layer], parts: Sequence[float], position: int, vocabulary: DividedVocabulary
) -> list[Layer]:
    """Return a rank's layers with its part of the vocabulary.

    Args:
        model: the whole model, whose vocabulary can be divided.
        layers: its layers as the rank runs them, with the whole vocabulary.
        parts: the shares of all ranks.
        position: the rank's position among them.
        vocabulary: the parts of the vocabulary that are divided.
    """
    layers, weight = list(layers), token_embedding(model)
    how = {"traced_bytes": PRECISION_BYTES[model.traced_precision], "value_bytes": vocabulary.value_bytes}
    if vocabulary.embedding:
        assert weight is not None  # a scenario is checked for it
        rows = units_of_ranks(weight.shape[0], parts)[position]
        layers = _divided_embedding(model, layers, rows, vocabulary.value_bytes)
    if vocabulary.loss:
        (head,) = _weights(model.layers[-2]) or (weight,)
        assert head is not None
        entries = head.shape[0]
        rows = units_of_ranks(entries, parts)[position]
        layers[-2:] = divided_loss(*layers[-2:], rows, entries, **how)
    return layers


LOOKUP_OPERATIONS = 7
"""Number of operations besides the lookup: finding the rank's own tokens, and zeroing the others."""


def _divided_embedding(model: Model, layers: Sequence[Layer], rows: int, value_bytes: int) -> list[Layer]:
    """Return layers with `rows` rows of the token embedding, as gsreal.methods.vocabulary_parallel runs them.

    For each token there is also an index until the backward of the lookup and, for a moment, a second index and a flag.
    Gradients of the whole table, also in a head that shares it, are those of the rank's rows only.
    """
    weight, *others = _weights(layers[0])
    traced_bytes = PRECISION_BYTES[model.traced_precision]
    share, table = rows / weight.shape[0], weight.elements * traced_bytes
    own_table = Polynomial(((rows * weight.shape[1] * traced_bytes, 0, 0),))

    def without_others(quantity: Polynomial | None) -> Polynomial | None:
        """Return bytes that are moved, without the tables of the other ranks."""
        if quantity is None:
            return None
        terms = tuple(
            (c - round(c // table * table * (1 - share)) if i == j == 0 else c, i, j) for c, i, j in quantity.terms
        )
        return replace(quantity, terms=terms)

    changed = []
    for number, layer in enumerate(layers):
        buffers = [
            replace(each, size_bytes=own_table) if _is_constant(each.size_bytes, table) else each
            for each in layer.buffers
        ]
        if number in (0, weight.born.layer_offset):  # of a frozen weight, which has no gradient, 0
            names = [f"{phase}_{what}" for phase in ("forward", "backward") for what in ("bytes", "streamed_bytes")]
            moved: dict[str, Any] = {name: without_others(getattr(layer, name)) for name in names}
            layer = replace(layer, **NO_ROLES, **moved)
        changed.append(replace(layer, buffers=tuple(buffers)))
    first, lookup = changed[0], _lookup(layers[0], model)
    assert lookup is not None  # a scenario is checked for it
    at, ((found_bytes, *powers),) = lookup.born, lookup.size_bytes.terms
    tokens = found_bytes // (weight.shape[1] * traced_bytes)

    def per_token(size: float) -> Polynomial:
        return Polynomial(((round(tokens * size * traced_bytes / value_bytes), powers[0], powers[1]),))

    masked = lookup.size_bytes.plus(lookup.size_bytes)  # read and written, to be zero where the token is another rank's
    trained = bool(layers[0].parameters)
    index = (weight.born, "activations") if trained else (at, "temporaries")
    small = (
        Buffer(at, *index, per_token(8)),
        Buffer(at, at, "temporaries", per_token(8 + 1)),
    )
    streamed = first.forward_streamed_bytes
    own_weight = replace(weight, shape=(rows, weight.shape[1]), sliced_dimension=0)
    changed[0] = replace(
        _with_weights(first, (own_weight, *others)),
        buffers=(*first.buffers, *small),
        reductions=(*first.reductions, Reduction(at, lookup.size_bytes)),
        forward_bytes=first.forward_bytes.plus(masked),
        forward_streamed_bytes=None if streamed is None else streamed.plus(masked),
        forward_operations=first.forward_operations + LOOKUP_OPERATIONS,
    )
    return changed


WIDE_BYTES = 4
"""Bytes of an element of the sums over a divided vocabulary; as many as the logits' elements have, if that is more."""


@lru_cache(maxsize=256)
def divided_loss(
    head: Layer, loss: Layer, rows: int, entries: int, *, traced_bytes: int, value_bytes: int
) -> tuple[Layer, Layer]:
    """Return a rank's head and loss with `rows` of the vocabulary's `entries`, made from layers with all entries.

    `traced_bytes`: bytes of an element in the trace; `value_bytes`: in training. The loss works as in
    gsreal.methods.vocabulary_parallel. Wide logits are turned in place into exponentials and then into the gradient,
    which lives until the head's backward is done; narrow logits, and their gradient, are cast. Each token also has an
    index, two flags and two sums until the backward and, for a moment, its largest logit and as much again as the sums.
    """
    share = rows / entries
    head, loss = (_for_any_samples(layer) for layer in (head, loss))
    output, gradient = layer_output(head.buffers, head.output_bytes), layer_input_gradient(head.buffers)
    assert output is not None  # a scenario is checked for it
    used = max((each.freed for each in loss.buffers if each.freed.layer_offset == -1), key=lambda each: each.position)
    shared = tuple(each for each in head.buffers if each is not output and each is not gradient)  # of a tied weight
    made = max((each.ready.position for each in head.parameters), default=used.position)
    wide = max(WIDE_BYTES, value_bytes)
    ((logits_bytes, *powers),) = output.size_bytes.terms  # of a model traced at one length, of whole sequences
    tokens = logits_bytes // (entries * traced_bytes)

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
    exchanged: dict[str, Any] = {"buffers": (logits, *shared)}
    if gradient is not None:  # of its input, which has none where no layer before it is trained
        summed = Moment("b", max(made, gradient.born.position) + 1)
        partial, whole = replace(gradient, freed=summed), replace(gradient, born=summed)
        exchanged["buffers"] = (logits, *shared, partial, whole)
        exchanged["reductions"] = (Reduction(summed, gradient.size_bytes),)
    reductions = [Reduction(Moment("f", place), per_token(size)) for place, size in ((1, wide), (4, 2 * wide))]
    own_weights = [replace(each, shape=(rows, each.shape[1]), sliced_dimension=0) for each in _weights(head)]
    own_head = replace(
        _with_weights(_scaled(head, share), own_weights),
        output_bytes=own_logits,
        **exchanged,
    )
    own_loss = replace(
        _scaled(loss, share), buffers=(*scalars, *small), reductions=tuple(reductions), output_bytes=loss.output_bytes
    )
    return own_head, own_loss


def _for_any_samples(layer: Layer) -> Layer:
    """Return a head or a loss with the buffers of several samples, which one sample has too.

    See [Note: one sample] in `gssim.workload.layer`: that other layers copy less moves those of one sample in a trace.
    """
    return replace(layer, buffers=tuple(replace(each, samples="") for each in for_samples(layer, 2).buffers))


def _scaled(layer: Layer, share: float) -> Layer:
    """Return a layer with a share of its work, since nearly all of it is proportional to the vocabulary."""
    names = [f"{phase}_{what}" for phase in ("forward", "backward") for what in ("flop", "bytes", "streamed_bytes")]
    changes: dict[str, Any] = dict(NO_ROLES)
    for name in names:
        size = getattr(layer, name)
        if size is not None:
            terms = tuple((round(c * share), i, j) for c, i, j in size.terms)
            changes[name] = Polynomial(terms)
    return replace(layer, **changes)
