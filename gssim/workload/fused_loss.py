"""A loss that is computed together with the head, tile by tile, so that the logits of a batch are never in memory.

[Note: fused loss] Cut cross-entropy (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models",
section 4): the forward multiplies tiles and keeps a log-sum-exp for each token. The backward multiplies the same tiles
again, and computes the gradients of the head's input and weight from them. So the head's forward FLOP are done once
more, and no tensor with a value per vocabulary entry is read or written. The kernel may skip entries of next to no
probability; that saving is not counted.
"""

from dataclasses import replace
from typing import Any

from gssim.execution.cache import cached_by_identity
from gssim.workload.layer import FIELDS_OF_TERMS, Buffer, Layer, Moment, Polynomial, layer_input_gradient
from gssim.workload.model import LAYER_LISTS, Model, TokenInput

LOG_SUM_EXP_BYTES = 4
"""Bytes of the log-sum-exp of each token, in fp32."""


def with_fused_loss(model: Model) -> Model:
    """Return the model with its head and loss fused; itself if they are. Raises ValueError if they cannot be."""
    return model if model.loss_fused else _with_fused_loss(model)


@cached_by_identity(maxsize=64)
def _with_fused_loss(model: Model) -> Model:
    if not isinstance(model.input, TokenInput) or model.input.classes is not None:
        raise ValueError(f"fused_loss = true: '{model.name}' predicts no tokens")
    changes: dict[str, Any] = {name: _fused(layers) for name in LAYER_LISTS if (layers := getattr(model, name))}
    if None in changes.values():
        raise ValueError(f"fused_loss = true: the last layer of '{model.name}' is no head that returns logits")
    return replace(model, loss_fused=True, adapted=(), autocast=(), other_precisions=(), **changes)


def _fused(layers: tuple[Layer, ...]) -> tuple[Layer, ...] | None:
    """Return layers that end with a head and a loss, with these two fused; None if the layers end otherwise."""
    *others, head, loss = layers
    logits = [(kind, term) for kind in FIELDS_OF_TERMS.values() for term in getattr(head.output_bytes, kind)]
    gradient = layer_input_gradient(head.buffers)
    # a linear map has one matrix, or none of its own if it shares the embedding's
    is_map = not head.block and [len(each.shape) for each in head.parameters] in ([], [2])
    if loss.modules or not is_map or len(logits) != 1 or gradient is None:
        return None
    ((kind, (logits_bytes, *powers)),) = logits

    inputs_bytes = next(c for c, i, j in getattr(gradient.size_bytes, kind) if [i, j] == powers)

    def with_coefficient(size: Polynomial | None, coefficient: int) -> Any:
        """Return a size in which the coefficient of the logits' term is replaced."""
        if size is None:
            return None
        terms = [term for term in getattr(size, kind) if [*term[1:]] != powers]
        terms += [(coefficient, *powers)] if coefficient else []
        return replace(size, **{kind: tuple(terms) or (((0, 0, 0),) if kind == "terms" else ())})

    def is_wide(buffer: Buffer) -> bool:
        coefficients = [c for c, i, j in getattr(buffer.size_bytes, kind) if [i, j] == powers]
        return buffer is not gradient and bool(coefficients) and coefficients[0] >= logits_bytes

    kept = [each for each in head.buffers if not is_wide(each)]
    if len(kept) == len(head.buffers):
        return None
    born = next(each.born for each in head.buffers if is_wide(each))
    size = with_coefficient(head.output_bytes, LOG_SUM_EXP_BYTES)
    log_sum_exp = Buffer(born, Moment("b", gradient.born.position), "activations", size)
    forward_bytes = with_coefficient(head.forward_bytes, inputs_bytes)
    backward_bytes = with_coefficient(head.backward_bytes, 2 * inputs_bytes)
    return (
        *others,
        replace(
            head,
            name=f"{head.name} with its loss",  # no profile of the head alone
            output_bytes=size,
            buffers=(*kept, log_sum_exp),
            forward_bytes=forward_bytes,
            backward_flop=head.backward_flop.plus(head.forward_flop),
            backward_bytes=backward_bytes.plus(forward_bytes),
        ),
        replace(
            loss,
            name=f"{loss.name} of the fused head",
            buffers=tuple(each for each in loss.buffers if not is_wide(each)),
            saved_bytes=with_coefficient(loss.saved_bytes, 0),
            forward_bytes=with_coefficient(loss.forward_bytes, 0),
            backward_bytes=with_coefficient(loss.backward_bytes, 0),
            forward_streamed_bytes=with_coefficient(loss.forward_streamed_bytes, 0),
            backward_streamed_bytes=with_coefficient(loss.backward_streamed_bytes, 0),
        ),
    )
