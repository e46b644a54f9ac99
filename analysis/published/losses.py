"""The loss behind a model's logits: which tensors of them there are at once depends on the software."""

from typing import TYPE_CHECKING

from analysis.published.operations import Operation

if TYPE_CHECKING:
    from analysis.published.transformer import Writer

FLOAT = 4


def loss_of(writer: "Writer", vocabulary: int) -> tuple[Operation, ...]:
    """Return the operations from the logits on, of so many rows, to the loss."""
    if writer.software.fused_loss:
        return (_fused(writer, vocabulary),)
    if writer.software.in_place_loss:
        return (_cast(writer, vocabulary, saves=("float_logits",)), _in_place(writer, vocabulary))
    return (_cast(writer, vocabulary), *_softmax_and_loss(writer, vocabulary))


def _cast(writer: "Writer", vocabulary: int, saves: tuple[str, ...] = ()) -> Operation:
    """Return the cast of the logits to float."""
    return Operation(
        name="float_logits",
        reads=("logits",),
        output=writer.tokens(vocabulary, value=FLOAT),
        streamed=writer.tokens(vocabulary, value=writer.value + FLOAT),
        backward_streamed=writer.tokens(vocabulary, value=writer.value + FLOAT),
        saves=saves,
    )


def _softmax_and_loss(writer: "Writer", vocabulary: int) -> tuple[Operation, ...]:
    """Return torch's loss: tensors of their own for what becomes of the logits."""
    size = writer.tokens(vocabulary, value=FLOAT)
    parallel = writer.software.parallel_loss and writer.cut.ranks > 1
    shifted = Operation(name="shifted", reads=("float_logits",), output=size)
    softmax = Operation(
        name="log_softmax",
        reads=("shifted",) if parallel else ("float_logits",),
        output=size,
        streamed=writer.tokens(2 * vocabulary, value=FLOAT),
        backward_streamed=writer.tokens(3 * vocabulary, value=FLOAT),
        saves=("log_softmax",),
    )
    loss = Operation(
        name="loss",
        # in parallel, four tensors in float are there at once: what is kept, zeros, their sum and its product
        reads=("log_softmax", "float_logits") if parallel else ("log_softmax",),
        output=writer.cut.size(one=FLOAT, shared=False),
        backward_streamed=size,
    )
    return (shifted, softmax, loss) if parallel else (softmax, loss)


def _in_place(writer: "Writer", vocabulary: int) -> Operation:
    """Return the loss that makes the softmax of its logits in their place, and their gradient in that one's."""
    return Operation(
        name="loss",
        reads=("float_logits",),
        output=writer.cut.size(one=FLOAT, shared=False),
        streamed=writer.tokens(2 * vocabulary, value=FLOAT),
        backward_streamed=writer.tokens(4 * vocabulary, value=FLOAT),
        saves=("float_logits",),
        passes_gradient=True,
        kernels=2,
    )


def _fused(writer: "Writer", vocabulary: int) -> Operation:
    """Return the loss that reads the logits twice, for their maxima and sums, and writes their gradient at once."""
    return Operation(
        name="loss",
        reads=("logits",),
        output=writer.cut.size(one=FLOAT, shared=False),
        streamed=writer.tokens(2 * vocabulary),
        backward_streamed=writer.tokens(2 * vocabulary),
        saves=("logits",),
        noted=writer.tokens(1, shared=False, value=2 * FLOAT),
    )
