"""Traces any `nn.Module` or Hugging Face config into a model file, under fake tensors: no weights, no GPU.

One training step runs per traced shape. The quantities of each layer are exact for these shapes; as a function of batch
size b and sequence length s they are polynomials (up to b*s^2), fitted over six shapes and checked at a seventh. If the
model's blocks can be sliced among ranks, steps with sliced blocks are traced as well, see [Note: units]. Of many equal
blocks only a few are traced, see `repeated`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from gsreal.model_files.fit import NoPolynomialError, Shape, fit_layers, grouped
from gsreal.model_files.partial_backward import with_partial_costs
from gsreal.model_files.recorder import Record, Work
from gsreal.model_files.repeated import KEPT, Stack, repeat_blocks, with_fewer_blocks
from gsreal.model_files.step import fake_module, fewest_units, record_step, without_values
from gssim.errors import UserError
from gssim.workload import Layer, Model, TokenInput

TRACED_BATCH_SIZES = (2, 3)
CHECKED_BATCH_SIZE = 5
TRACED_UNITS = (2, 3)
"""Not one alone, which may behave differently: torch treats a dimension of one element as contiguous in any layout."""


@dataclass(frozen=True)
class OperationCounts:
    """Operations of one step, forward and backward, of a batch of one shape."""

    batch_size: int
    sequence_length: int | None
    operations: dict[str, Work]
    """By name."""


def _ignored(_counted: OperationCounts) -> None:
    """Ignore the counts."""


def trace(model: Model, *, where: str, on_counted: Callable[[OperationCounts], None] = _ignored) -> Model:
    """Return `model` (name, source, module, input; its layers are ignored) with its layers traced.

    `on_counted` is called with the operations of the largest step. Raises UserError if the module cannot be built, if
    its cost is not a polynomial in the batch size, and for an operation whose cost is unknown.
    """
    lengths = _sequence_lengths(model)
    checked = (CHECKED_BATCH_SIZE, model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else None)
    try:
        layers, sliced = _layers(model, lengths, checked, where, on_counted)
    except NoPolynomialError as error:
        raise UserError(
            f"{where}: {error}; give one sequence length with --sequence-length to trace it there alone"
        ) from None
    return replace(
        model,
        layers=layers,
        sliced_layers=sliced,
        buffer_bytes=_buffer_bytes(model, where),
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_sequence_lengths=tuple(s for s in lengths if s is not None),
    )


def trace_at_length(
    model: Model, sequence_length: int, *, where: str, on_counted: Callable[[OperationCounts], None] = _ignored
) -> Model:
    """Return `model` traced at one sequence length only: its quantities depend on the batch size alone."""
    checked = (CHECKED_BATCH_SIZE, sequence_length)
    try:
        layers, sliced = _layers(model, (sequence_length,), checked, where, on_counted)
    except NoPolynomialError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(
        model,
        layers=layers,
        sliced_layers=sliced,
        buffer_bytes=_buffer_bytes(model, where),
        exact_sequence=False,
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_sequence_lengths=(sequence_length,),
    )


def _layers(
    model: Model,
    lengths: Sequence[int | None],
    checked: tuple[int, int | None],
    where: str,
    on_counted: Callable[[OperationCounts], None],
) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return the model's layers, whole, and with sliced blocks (empty if they cannot be sliced)."""
    sibling = with_fewer_blocks(model, where)
    if sibling is not None:
        short, stack = sibling
        traced, traced_cut, largest = _traced(short, lengths, checked, where)
        longer, longer_cut = repeat_blocks(traced, stack), repeat_blocks(traced_cut, stack)
        if longer is not None and longer_cut is not None:
            on_counted(OperationCounts(*checked, _operations(largest, stack)))
            return grouped(longer), grouped(longer_cut)
    whole, cut, largest = _traced(model, lengths, checked, where)
    on_counted(OperationCounts(*checked, _operations(largest, None)))
    return grouped(whole), grouped(cut)


def _operations(record: Record, stack: Stack | None) -> dict[str, Work]:
    """Return the work of all layers by operation; `stack`: its middle block is counted for those left out."""
    total: dict[str, Work] = {}
    middle = record.modules.index(f"{stack.path}.{KEPT // 2}") if stack else -1
    for layer, operations in record.by_operation.items():
        times = stack.count - KEPT + 1 if stack and layer == middle else 1
        for name, work in operations.items():
            total[name] = total.get(name, Work()) + work.times(times)
    return total


def _traced(
    model: Model, lengths: Sequence[int | None], checked: tuple[int, int | None], where: str
) -> tuple[list[Layer], list[Layer], Record]:
    """Return all layers, one for each module, whole and with sliced blocks, and the record of the largest step."""
    shapes: list[tuple[int, int | None]] = list(product(TRACED_BATCH_SIZES, lengths))
    records: dict[Shape, Record] = {shape: record_step(model, *shape, where=where) for shape in shapes}
    largest = record_step(model, *checked, where=where)
    fitted = fit_layers(records, largest, checked)
    whole = with_partial_costs(model, fitted, shapes, checked, where=where)
    try:
        return whole, _traced_cut(model, shapes, checked, where), largest
    except NoPolynomialError:  # operations depend on the units: such blocks are not sliced
        return whole, [], largest


def _traced_cut(
    model: Model, shapes: Sequence[tuple[int, int | None]], checked: tuple[int, int | None], where: str
) -> list[Layer]:
    """Return all layers with sliced blocks, as functions of the units of the slice too."""
    units = fewest_units(model, where)
    if units < 2:
        return []
    traced = TRACED_UNITS if units >= max(TRACED_UNITS) else (1, 2)
    cut: dict[Shape, Record] = {
        (*shape, units_of_ranks): record_step(model, *shape, units_of_ranks, where=where)
        for units_of_ranks in traced
        for shape in shapes
    }
    last = (*checked, units)
    return fit_layers(cut, record_step(model, *last, where=where), last)


def _buffer_bytes(model: Model, where: str) -> tuple[int, ...]:
    """Return the bytes of the module's buffers, a number for each data type in order of first appearance."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    with without_values(model):
        for tensor in fake_module(model, where).buffers():
            sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
    return tuple(sizes.values())


def _sequence_lengths(model: Model) -> tuple[int | None, ...]:
    if not isinstance(model.input, TokenInput):
        return (None,)
    longest = model.input.maximum_sequence_length
    return tuple(sorted({max(8, longest // 8), max(12, longest // 4), max(16, longest // 2)}))
