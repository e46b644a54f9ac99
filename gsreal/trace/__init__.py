"""Any `nn.Module` or Hugging Face config -> a model file, under fake tensors: no weights, no GPU.

One training step runs per traced shape. What is recorded per layer is exact for these shapes; as a function of batch
size b and sequence length s it is a polynomial (up to b*s^2), fitted over six shapes and checked at a seventh.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gsreal.trace.fit import NoPolynomialError, Shape, fitted_layers, grouped
from gsreal.trace.recorder import Record
from gsreal.trace.step import fake_module, record_step, traced_precision
from gssim.units import UserError
from gssim.workload import Model, TokenInput

__all__ = ["trace", "trace_at"]

TRACED_BATCH_SIZES = (2, 3)
CHECKED_BATCH_SIZE = 5


def trace(model: Model, *, where: str) -> Model:
    """Return `model` (name, source, module, input; its layers are ignored) with its layers traced.

    Raises UserError where the module cannot be built, or where its cost is no polynomial in the batch size.
    """
    lengths = _sequence_lengths(model)
    shapes = list(product(TRACED_BATCH_SIZES, lengths))
    records = {shape: record_step(model, *shape, where=where) for shape in shapes}
    check_length = _checked_length(model, lengths)
    checked = (CHECKED_BATCH_SIZE, check_length)
    try:
        layers = fitted_layers(records, record_step(model, *checked, where=where), checked)
    except NoPolynomialError as error:
        raise UserError(
            f"{where}: {error}; give one sequence length with --sequence-length to trace it there alone"
        ) from None
    return replace(
        model,
        layers=grouped(layers),
        buffer_bytes=_buffer_bytes(model, where),
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_sequence_lengths=tuple(s for s in lengths if s is not None),
    )


def trace_at(model: Model, sequence_length: int, *, where: str) -> Model:
    """Return `model` traced at one sequence length only: its quantities depend on the batch size alone."""
    records: dict[Shape, Record] = {
        (b, sequence_length): record_step(model, b, sequence_length, where=where) for b in TRACED_BATCH_SIZES
    }
    checked = (CHECKED_BATCH_SIZE, sequence_length)
    try:
        layers = fitted_layers(records, record_step(model, *checked, where=where), checked)
    except NoPolynomialError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(
        model,
        layers=grouped(layers),
        buffer_bytes=_buffer_bytes(model, where),
        exact_sequence=False,
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_sequence_lengths=(sequence_length,),
    )


def _buffer_bytes(model: Model, where: str) -> tuple[int, ...]:
    """Return the bytes of the module's buffers, a number for each data type in order of first appearance."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    with FakeTensorMode(), traced_precision(model):
        for tensor in fake_module(model, where).buffers():
            sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
    return tuple(sizes.values())


def _sequence_lengths(model: Model) -> tuple[int | None, ...]:
    if not isinstance(model.input, TokenInput):
        return (None,)
    longest = model.input.maximum_sequence_length
    return tuple(sorted({max(8, longest // 8), max(12, longest // 4), max(16, longest // 2)}))


def _checked_length(model: Model, lengths: Sequence[int | None]) -> int | None:
    return model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else lengths[0]
