"""Traces any `nn.Module` or Hugging Face config into a model file, under fake tensors: no weights, no GPU.

One training step runs per traced shape. The quantities of each layer are exact for these shapes; as a function of batch
size b and sequence length s they are polynomials (up to b*s^2), fitted over six shapes and checked at a seventh. If the
model's blocks can be sliced among ranks, steps with sliced blocks are traced as well, see [Note: units]. Of many equal
blocks only a few are traced, see `repeated`.
"""

import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import tomli_w
import torch
from pydantic import TypeAdapter

from gsreal.methods.adapters import adapted_maps
from gsreal.model_files import config_file
from gsreal.model_files.build import DTYPES
from gsreal.model_files.fit import (
    Shape,
    fit_layers,
    grouped,
    powers_beside_experts,
    powers_in_slices,
    powers_of_adapters,
)
from gsreal.model_files.partial_backward import with_partial_costs
from gsreal.model_files.recorder import NoPolynomialError, Record, Work
from gsreal.model_files.repeated import KEPT, Stack, repeat_blocks, with_fewer_blocks
from gsreal.model_files.step import (
    can_divide_sequences,
    experts_to_divide,
    fake_module,
    fewest_units,
    record_step,
    uncut_reason,
    without_values,
)
from gssim.errors import UserError
from gssim.execution.files import write_text
from gssim.scenario import load_model
from gssim.units import Precision, Recompute, validated
from gssim.workload import Adapters, Layer, Model, TokenInput
from gssim.workload.model import AdaptedLayers, AutocastLayers

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
    lengths: tuple[int | None, ...] = (None,)
    longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else None
    if longest is not None:
        lengths = tuple(sorted({max(8, longest // 8), max(12, longest // 4), max(16, longest // 2)}))
    checked = (CHECKED_BATCH_SIZE, longest)
    try:
        traced = _layers(model, lengths, checked, where, on_counted)
    except NoPolynomialError as error:
        raise UserError(
            f"{where}: {error}; give one sequence length with --sequence-length to trace it there alone"
        ) from None
    return replace(
        model,
        **traced,
        uncut_reason=_uncut_reason(model, traced, where),
        **_buffers(model, where),
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_sequence_lengths=tuple(s for s in lengths if s is not None),
    )


def trace_at_length(
    model: Model, sequence_length: int, *, where: str, on_counted: Callable[[OperationCounts], None] = _ignored
) -> Model:
    """Return `model` traced at one sequence length only: its quantities depend on the batch size alone."""
    checked = (CHECKED_BATCH_SIZE, sequence_length)
    try:
        traced = _layers(model, (sequence_length,), checked, where, on_counted)
    except NoPolynomialError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(
        model,
        **traced,
        uncut_reason=_uncut_reason(model, traced, where),
        **_buffers(model, where),
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
) -> dict[str, Any]:
    """Return the model's layers by field: whole, with sliced blocks, with divided sequences too, under context
    parallelism, with divided experts, and with these beside sliced blocks (empty if not possible).
    """
    sibling = with_fewer_blocks(model, where)
    if sibling is not None:
        short, stack = sibling
        traced, largest = _traced(short, lengths, checked, where)
        whole, sliced = (repeat_blocks(each, stack) for each in traced[:2])
        if whole is not None and sliced is not None:
            on_counted(OperationCounts(*checked, _operations(largest, stack)))
            divided = [repeat_blocks(each, stack, neighbours_differ=True) for each in traced[2:]]
            return _by_field([whole, sliced, *divided], model, where)
    traced, largest = _traced(model, lengths, checked, where)
    on_counted(OperationCounts(*checked, _operations(largest, None)))
    return _by_field(traced, model, where)


def _uncut_reason(model: Model, traced: dict[str, tuple[Layer, ...]], where: str) -> str | None:
    if model.compiled:
        return "compiled blocks are traced whole"
    return None if traced["sliced_layers"] else uncut_reason(model, where)


FIELDS = (
    "layers",
    "sliced_layers",
    "sequence_layers",
    "context_layers",
    "expert_layers",
    "expert_sequence_layers",
)


def _by_field(traced: Sequence[list[Layer] | None], model: Model, where: str) -> dict[str, tuple[Layer, ...]]:
    return {
        name: grouped(_with_module_buffers(layers or [], model, where))
        for name, layers in zip(FIELDS, traced, strict=True)
    }


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
) -> tuple[tuple[list[Layer], ...], Record]:
    """Return all layers, one for each module, and the record of the largest step.

    Layers are whole, with sliced blocks, with divided sequences too, under context parallelism, with divided experts,
    and with these beside sliced blocks.
    """
    shapes: list[tuple[int, int | None]] = list(product(TRACED_BATCH_SIZES, lengths))
    records, largest = _recorded(model, [(shape, shape) for shape in shapes], (checked, checked), where)
    fitted = fit_layers(records, largest, checked)
    if model.compiled:  # whole blocks, all of them trained: parts of blocks would be other graphs
        return (fitted, [], [], [], [], []), largest
    whole = with_partial_costs(model, fitted, shapes, checked, where=where)
    others = (
        traced_context(model, lengths, checked, where),
        _traced_experts(model, shapes, checked, where),
        traced_expert_parts(model, lengths, checked, where),
    )
    try:
        cut = _traced_cut(model, shapes, checked, where)
    except NoPolynomialError:  # operations depend on the units: such blocks are not sliced
        return (whole, [], [], *others), largest
    try:
        return (whole, cut, traced_parts(model, lengths, checked, where) if cut else [], *others), largest
    except NoPolynomialError:
        return (whole, cut, [], *others), largest


Step = tuple[int, int | None] | tuple[int, int | None, int] | tuple[int, int | None, int, int]
"""Batch size, sequence length, units of sliced blocks, number of ranks that divide sequences."""


def _recorded(
    model: Model, steps: Sequence[tuple[Shape, Step]], last: tuple[Shape, Step], where: str
) -> tuple[dict[Shape, Record], Record]:
    """Return the records of steps by the shapes as functions of which they are fitted, and that of the largest one."""
    records: dict[Shape, Record] = {}
    largest = None
    if model.compiled:  # the largest orders kernels, and shares buffers, for all others
        largest = record_step(model, *last[1], where=where, apart=record_step(model, *steps[0][1], where=where))
    for shape, step in steps:
        records[shape] = record_step(model, *step, where=where, like=largest or next(iter(records.values()), None))
    return records, largest or record_step(model, *last[1], where=where, like=next(iter(records.values())))


def traced_context(
    model: Model, lengths: Sequence[int | None], checked: tuple[int, int | None], where: str
) -> list[Layer]:
    """Return all layers under context parallelism, as functions of a rank's positions too; empty if not possible.

    Traced are one rank, which exchanges with itself, and the fewest that divide the heads.
    """
    source, longest = model.input, checked[1]
    if not isinstance(source, TokenInput) or source.classes is not None or longest is None:
        return []
    try:
        whole = record_step(model, TRACED_BATCH_SIZES[0], longest, context=1, where=where)
        shapes = _context_shapes(whole, lengths, longest)
        if shapes is None:
            return []
        records: dict[Shape, Record] = {}
        likes = {1: whole}
        for b, (s, n) in product(TRACED_BATCH_SIZES, shapes.places):
            records[b, s, 0, s // n] = record_step(model, b, s, context=n, where=where, like=likes.get(n))
            likes.setdefault(n, records[b, s, 0, s // n])
        ranks, longest = shapes.ranks, shapes.longest
        largest = record_step(model, checked[0], longest, context=ranks, where=where, like=likes[ranks])
        return fit_layers(records, largest, (checked[0], longest, 0, longest // ranks))
    except (NoPolynomialError, UserError, RuntimeError, TypeError, ValueError):  # of modules that take no parts
        return []


class _ContextShapes(NamedTuple):
    """Sequences that are divided in traces."""

    ranks: int
    """The fewest that divide the heads."""
    places: tuple[tuple[int, int], ...]
    """Lengths and the numbers of ranks that divide them."""
    of_adapters: tuple[tuple[int, int], ...]
    """Those of a second rank of adapters."""
    longest: int
    """Of the step that is checked, by `ranks`."""


def _context_shapes(whole: Record, lengths: Sequence[int | None], longest: int) -> _ContextShapes | None:
    """Return the sequences to divide, for a record of a step of one rank; None: ranks cannot divide the heads."""
    heads = max(whole.units.values())
    divisors = [n for n in range(2, heads + 1) if heads % n == 0 and not (len(lengths) == 1 and longest % n)]
    if not divisors:
        return None
    ranks = divisors[0]
    shorter, *_, last = sorted({-(-length // ranks) * ranks for length in lengths if length is not None}) * 2
    both = ((last, 1), (last, ranks))
    return _ContextShapes(ranks, tuple(sorted({*both, (shorter, 1)})), both, longest - longest % ranks)


TRACED_RANKS = (2, 4)
"""Numbers of ranks that divide sequences in traces; lengths are rounded to multiples of the larger one."""


def traced_parts(
    model: Model, lengths: Sequence[int | None], checked: tuple[int, int | None], where: str
) -> list[Layer]:
    """Return all layers with sliced blocks and divided sequences, as functions of units and positions of a part too.

    Parts of two ranks are traced at all shapes and units, those of four at two batch sizes: what is on parts depends on
    their positions alone.
    """
    units, fewer, more = fewest_units(model, where), *TRACED_RANKS
    if units < 2 or not can_divide_sequences(model, where):
        return []
    rounded, longest = _lengths_of_parts(lengths, checked)
    if not longest:
        return []
    several = TRACED_UNITS if units >= max(TRACED_UNITS) else (1, 2)
    sizes = [(b, s, u, fewer) for u in several for b in TRACED_BATCH_SIZES for s in rounded]
    sizes += [(b, rounded[-1], several[0], more) for b in TRACED_BATCH_SIZES]
    last = (checked[0], longest, units, longest // more), (checked[0], longest, units, more)
    records, largest = _recorded(
        model, [((b, s, u, s // ranks), (b, s, u, ranks)) for b, s, u, ranks in sizes], last, where
    )
    return fit_layers(records, largest, last[0])


def _lengths_of_parts(lengths: Sequence[int | None], checked: tuple[int, int | None]) -> tuple[list[int], int]:
    """Return lengths that ranks can divide, and that of the largest step; 0: the only length is no multiple."""
    more = max(TRACED_RANKS)
    rounded = [-(-length // more) * more for length in lengths if length is not None]
    longest = (checked[1] or 0) // more * more
    return rounded, 0 if checked[1] in lengths and checked[1] != longest else longest


def traced_expert_parts(
    model: Model, lengths: Sequence[int | None], checked: tuple[int, int | None], where: str
) -> list[Layer]:
    """Return all layers with sliced blocks, divided sequences and divided experts; empty if not possible.

    They are functions of units, positions of a part, experts that are held and their rows. Steps are those of
    `traced_parts`, and two with other rows and experts; see [Note: experts of parts] in `gssim.workload.model`.
    """
    experts, units = experts_to_divide(model, where), fewest_units(model, where, beside_experts=True)
    rounded, longest = _lengths_of_parts(lengths, checked)
    if experts < 4 or units < 2 or not longest or not can_divide_sequences(model, where, beside_experts=True):
        return []
    fewer, more = TRACED_RANKS
    first, others, last = TRACED_ROWS
    several = TRACED_UNITS if units >= max(TRACED_UNITS) else (1, 2)
    steps = [(b, s, u, fewer, first, 2) for u in several for b in TRACED_BATCH_SIZES for s in rounded]
    steps += [(b, rounded[-1], several[0], more, first, 2) for b in TRACED_BATCH_SIZES]
    steps.append((*steps[-1][:4], others, 2))
    steps.append((*steps[-2][:5], experts // 2 if experts > 4 else experts))
    records: dict[Shape, Record] = {}

    def record(b: int, s: int, u: int, ranks: int, rows: int, held: int) -> Record:
        like = next(iter(records.values()), None)
        return record_step(model, b, s, u, ranks, (held, rows), where=where, like=like)

    try:
        for b, s, u, ranks, rows, held in steps:
            records[b, s, u, s // ranks, rows, held] = record(b, s, u, ranks, rows, held)
        largest = record(checked[0], longest, units, more, last, 2)
        return fit_layers(records, largest, (checked[0], longest, units, longest // more, last, 2))
    except NoPolynomialError:
        return []


def _traced_cut(
    model: Model, shapes: Sequence[tuple[int, int | None]], checked: tuple[int, int | None], where: str
) -> list[Layer]:
    """Return all layers with sliced blocks, as functions of the units of the slice too."""
    units = fewest_units(model, where)
    if units < 2:
        return []
    traced = TRACED_UNITS if units >= max(TRACED_UNITS) else (1, 2)
    sizes: list[Step] = [(*shape, units_of_ranks) for units_of_ranks in traced for shape in shapes]
    last: Step = (*checked, units)
    cut, largest = _recorded(model, [(size, size) for size in sizes], (last, last), where)
    return fit_layers(cut, largest, last)


TRACED_ADAPTER_RANKS = (2, 3)
CHECKED_ADAPTER_RANK = 8


def traced_adapters(
    model: Model, targets: str | tuple[str, ...], lengths: Sequence[int | None], length: int | None, *, where: str
) -> AdaptedLayers:
    """Return the layers of a model with adapters of any rank; see [Note: adapters] in `gssim.workload.model`.

    `lengths`: those at which it is traced, `length`: that at which the result is checked.
    """
    with without_values(model):
        maps = adapted_maps(fake_module(model, where), targets, where=where)
    short, stack = with_fewer_blocks(model, where) or (model, None)

    def adapted(rank: int) -> Model:
        return replace(short, module=replace(short.module, adapters=Adapters(rank=rank, targets=maps)))

    def record(b: int, s: int | None, rank: int, like: Record | None = None) -> Record:
        return record_step(adapted(rank), b, s, where=where, like=like)

    records: dict[Shape, Record] = {}
    for b, s, rank in product(TRACED_BATCH_SIZES, lengths, TRACED_ADAPTER_RANKS):
        records[b, s, rank] = record(b, s, rank, next(iter(records.values()), None))
    last = (CHECKED_BATCH_SIZE, length, CHECKED_ADAPTER_RANK)
    try:
        layers = fit_layers(records, record(*last, next(iter(records.values()))), last)
    except NoPolynomialError as error:
        raise UserError(f"{where}: {error}") from None
    whole = layers if stack is None else repeat_blocks(layers, stack)
    if whole is None:
        raise UserError(f"{where}: blocks with adapters differ from one another; not supported")
    divided = {
        "context_layers": _adapted_context(adapted, lengths, length, where) if model.context_layers else [],
        "sliced_layers": _adapted_slices(adapted, lengths, length, where) if model.sliced_layers else [],
        "sequence_layers": _adapted_parts(adapted, lengths, length, where) if model.sequence_layers else [],
        "expert_layers": _adapted_experts(adapted, lengths, length, where) if model.expert_layers else [],
    }
    if stack is not None:
        differ = {"neighbours_differ": True}
        divided = {name: repeat_blocks(each, stack, **differ) or [] for name, each in divided.items()}
    role: Any = targets if isinstance(targets, str) else None
    return AdaptedLayers(
        role=role,
        maps=tuple(sorted(maps)),
        layers=grouped(_with_module_buffers(whole, model, where)),
        **{name: grouped(_with_module_buffers(each, model, where)) for name, each in divided.items()},
    )


def _adapted_slices(
    adapted: Callable[[int], Model], lengths: Sequence[int | None], longest: int | None, where: str
) -> list[Layer]:
    """Return all layers of a model with adapters with sliced blocks, as functions of units and the rank.

    Arguments and result as of `_adapted_context`.
    """
    (low, high), few = TRACED_ADAPTER_RANKS, lengths[: min(2, len(lengths))]
    units = fewest_units(adapted(low), where)
    several = TRACED_UNITS if units >= max(TRACED_UNITS) else (1, 2)
    steps = [(b, s, u, low) for u in several for b in TRACED_BATCH_SIZES for s in lengths]
    steps += [(b, s, u, high) for u in several for b in TRACED_BATCH_SIZES for s in few]
    records: dict[Shape, Record] = {}

    def record(b: int, s: int | None, u: int, rank: int) -> Record:
        like = next(iter(records.values()), None)
        return record_step(adapted(rank), b, s, u, where=where, like=like)

    try:
        for b, s, u, rank in steps:
            records[b, s, u, 0, 0, 0, rank] = record(b, s, u, rank)
        last = CHECKED_BATCH_SIZE, longest, units, 0, 0, 0, CHECKED_ADAPTER_RANK
        check = record(CHECKED_BATCH_SIZE, longest, units, CHECKED_ADAPTER_RANK)
        return fit_layers(records, check, last, powers_in_slices(len(lengths), parts=False))
    except NoPolynomialError:
        return []


def _adapted_parts(
    adapted: Callable[[int], Model], lengths: Sequence[int | None], longest: int | None, where: str
) -> list[Layer]:
    """Return all layers of a model with adapters with sliced blocks and divided sequences, as functions of units, of
    positions of a part, and of the rank.

    Arguments and result as of `_adapted_context`; lengths and ranks as of `traced_parts`.
    """
    (low, high), (fewer, more) = TRACED_ADAPTER_RANKS, TRACED_RANKS
    units = fewest_units(adapted(low), where)
    rounded, longest = _lengths_of_parts(lengths, (CHECKED_BATCH_SIZE, longest))
    if not longest:
        return []
    several = TRACED_UNITS if units >= max(TRACED_UNITS) else (1, 2)
    steps = [(b, s, u, fewer, low) for u in several for b in TRACED_BATCH_SIZES for s in rounded]
    steps += [(b, s, u, fewer, high) for u in several for b in TRACED_BATCH_SIZES for s in rounded[:2]]
    steps += [(b, rounded[-1], several[0], more, low) for b in TRACED_BATCH_SIZES]
    records: dict[Shape, Record] = {}

    def record(b: int, s: int, u: int, n: int, rank: int) -> Record:
        like = next(iter(records.values()), None)
        return record_step(adapted(rank), b, s, u, n, where=where, like=like)

    try:
        for b, s, u, n, rank in steps:
            records[b, s, u, s // n, 0, 0, rank] = record(b, s, u, n, rank)
        last = CHECKED_BATCH_SIZE, longest, units, longest // more, 0, 0, CHECKED_ADAPTER_RANK
        check = record(CHECKED_BATCH_SIZE, longest, units, more, CHECKED_ADAPTER_RANK)
        return fit_layers(records, check, last, powers_in_slices(len(rounded), parts=True))
    except NoPolynomialError:
        return []


def _adapted_context(
    adapted: Callable[[int], Model], lengths: Sequence[int | None], longest: int | None, where: str
) -> list[Layer]:
    """Return all layers of a model with adapters under context parallelism, as functions of the rank and of positions.

    `adapted`: returns the model with adapters of a rank. Empty if these are no such functions.
    """
    assert longest is not None  # it runs so without adapters
    (low, high), likes = TRACED_ADAPTER_RANKS, dict[int, Record]()

    def record(b: int, s: int, rank: int, n: int) -> Record:
        likes[n] = record_step(adapted(rank), b, s, context=n, where=where, like=likes.get(n))
        return likes[n]

    try:
        shapes = _context_shapes(record(TRACED_BATCH_SIZES[0], longest, low, 1), lengths, longest)
        assert shapes is not None  # as without adapters
        places = [*((low, *place) for place in shapes.places), *((high, *place) for place in shapes.of_adapters)]
        records: dict[Shape, Record] = {
            (b, s, rank, s // n): record(b, s, rank, n) for b, (rank, s, n) in product(TRACED_BATCH_SIZES, places)
        }
        last = CHECKED_BATCH_SIZE, shapes.longest, CHECKED_ADAPTER_RANK
        largest = record(*last, shapes.ranks)
        powers = powers_of_adapters(len(lengths))
        return fit_layers(records, largest, (*last, shapes.longest // shapes.ranks), powers)
    except NoPolynomialError:
        return []


def _adapted_experts(
    adapted: Callable[[int], Model], lengths: Sequence[int | None], longest: int | None, where: str
) -> list[Layer]:
    """Return all layers of a model with adapters with divided experts, as functions of the experts that are held, of
    their rows, and of the rank.

    Arguments and result as of `_adapted_context`; experts and rows as of `_traced_experts`.
    """
    (low, high), few = TRACED_ADAPTER_RANKS, lengths[: min(2, len(lengths))]
    experts, (first, more, last) = experts_to_divide(adapted(low), where), TRACED_ROWS
    if experts < 4:
        return []
    steps = [(b, s, 2, first, low) for b in TRACED_BATCH_SIZES for s in lengths]
    steps += [(b, s, 2, first, high) for b in TRACED_BATCH_SIZES for s in few]
    steps += [(*steps[0][:2], experts // 2 if experts > 4 else experts, first, low), (*steps[0][:3], more, low)]
    records: dict[Shape, Record] = {}

    def record(b: int, s: int | None, held: int, rows: int, rank: int) -> Record:
        like = next(iter(records.values()), None)
        return record_step(adapted(rank), b, s, routed=(held, rows), where=where, like=like)

    try:
        for b, s, held, rows, rank in steps:
            records[b, s, held, 0, rows, 0, rank] = record(b, s, held, rows, rank)
        check = CHECKED_BATCH_SIZE, longest, 2, last, CHECKED_ADAPTER_RANK
        checked = (*check[:3], 0, last, 0, CHECKED_ADAPTER_RANK)
        return fit_layers(records, record(*check), checked, powers_beside_experts(len(lengths)))
    except NoPolynomialError:
        return []


def with_traced_adapters(model: Model, targets: Sequence[str], *, where: str) -> Model:
    """Return a traced model with its layers with adapters beside each of the `targets` (names joined by commas)."""
    longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else None
    lengths = model.traced_sequence_lengths or (None,)
    length = longest if model.exact_sequence else lengths[-1]
    adapted = []
    for each in targets:
        wanted = each if each in ROLES else tuple(each.split(","))
        adapted.append(traced_adapters(model, wanted, lengths, length, where=where))
    kept = [each for each in model.adapted if each.maps not in [new.maps for new in adapted]]
    return replace(model, adapted=(*kept, *adapted))


ROLES = ("query-value", "all-linear")


def with_traced_autocast(model: Model, precisions: Sequence[str], *, where: str) -> Model:
    """Return a traced model with its layers under torch.autocast in each of the `precisions`."""
    longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else None
    lengths = model.traced_sequence_lengths or (None,)
    shapes = list(product(TRACED_BATCH_SIZES, lengths))
    last = (CHECKED_BATCH_SIZE, longest if model.exact_sequence else lengths[-1])
    short, stack = with_fewer_blocks(model, where) or (model, None)
    found = [each for each in model.autocast if each.precision not in precisions]
    for precision in precisions:
        kind: Any = precision
        ours = replace(short, traced_precision="fp32", traced_autocast=kind, whole_layers=())
        try:
            records, largest = _recorded(ours, [(shape, shape) for shape in shapes], (last, last), where)
            layers = fit_layers(records, largest, last)
        except NoPolynomialError as error:
            raise UserError(f"{where}: {error}") from None
        whole = layers if stack is None else repeat_blocks(layers, stack)
        if whole is None:
            raise UserError(f"{where}: blocks under autocast differ from one another; not supported")
        found.append(AutocastLayers(precision=kind, layers=grouped(_with_module_buffers(whole, model, where))))
    return replace(model, autocast=tuple(found))


TRACED_ROWS = (96, 160, 224)
"""Rows that the experts of a rank process in traces; the last in the step that is checked."""


def _traced_experts(
    model: Model, shapes: Sequence[tuple[int, int | None]], checked: tuple[int, int | None], where: str
) -> list[Layer]:
    """Return all layers with divided experts, as functions of the experts that are held and their rows too.

    Ranks hold two experts, or more: a single one may behave differently, see `TRACED_UNITS`.
    """
    experts = experts_to_divide(model, where)
    if experts < 4:
        return []
    first, more, last = TRACED_ROWS
    sizes = [(*shape, 2, first) for shape in shapes]
    sizes += [(*shapes[-1], experts // 2 if experts > 4 else experts, first), (*shapes[-1], 2, more)]
    records: dict[Shape, Record] = {}

    def record(b: int, s: int | None, held: int, rows: int) -> Record:
        like = next(iter(records.values()), None)
        return record_step(model, b, s, routed=(held, rows), where=where, like=like)

    for b, s, held, rows in sizes:
        records[b, s, held, 1, rows] = record(b, s, held, rows)
    try:
        return fit_layers(records, record(*checked, 2, last), (*checked, 2, 1, last))
    except NoPolynomialError:
        return []


def _buffers(model: Model, where: str) -> dict[str, Any]:
    """Return the bytes of the module's buffers and what values they have, for each data type as it first appears.

    A module is cast to one precision before it trains, so that all floating-point buffers have one data type then.
    """
    sizes: dict[torch.dtype, int] = defaultdict(int)
    with without_values(model):
        for tensor in fake_module(model, where).buffers():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            sizes[dtype] += tensor.numel() * dtype.itemsize
    values = tuple("floating-point" if dtype.is_floating_point else "integer" for dtype in sizes)
    return {"buffer_bytes": tuple(sizes.values()), "buffer_values": values if "integer" in values else ()}


def _with_module_buffers(layers: Sequence[Layer], model: Model, where: str) -> list[Layer]:
    """Return layers with the bytes of the buffers in their modules; those outside all modules are in the first."""
    if not layers:
        return []
    sizes: dict[str, int] = defaultdict(int)
    integers: dict[str, int] = defaultdict(int)
    paths = {path: layer.name for layer in layers for path in layer.modules}
    with without_values(model):
        for name, tensor in fake_module(model, where).named_buffers():
            parents = [name.rsplit(".", i)[0] for i in range(1, 1 + name.count("."))]
            holder = next((paths[parent] for parent in parents if parent in paths), layers[0].name)
            if tensor.is_floating_point():
                sizes[holder] += tensor.numel() * torch.float32.itemsize
            else:
                sizes[holder] += tensor.numel() * tensor.element_size()
                integers[holder] += tensor.numel() * tensor.element_size()
    return [
        replace(layer, module_buffer_bytes=sizes[layer.name], integer_buffer_bytes=integers[layer.name])
        if layer.name in sizes
        else layer
        for layer in layers
    ]


CLASSIFICATION = "sequence-classification"
AUTO_CLASSES = {
    "next-token": "AutoModelForCausalLM",
    "masked-token": "AutoModelForMaskedLM",
    CLASSIFICATION: "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}
"""Hugging Face's auto class for each task."""


@dataclass(frozen=True)
class Request:
    """A model to trace, as the user asked for it."""

    model: str
    arguments: tuple[str, ...]
    name: str
    vocabulary: int | None
    maximum_sequence_length: int | None
    """None: what a config.json says, or 256."""
    image: str | None
    classes: int | None
    auto_class: str | None
    sequence_length: int | None
    task: str | None = None
    """None: what a config.json says, or next-token."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Entries of a Hugging Face config, before those of `arguments`."""
    padding: int = 0
    precision: str | None = None
    """Precision of the trace; None: that of the model file, or fp32."""
    source: str | None = None
    """Publication of the model's numbers."""
    autocast: tuple[str, ...] = field(default=(), repr=False)
    """Precisions of torch.autocast under which the model is traced too."""
    compiled: bool = field(default=False, repr=False)
    """Whether the model's blocks are compiled; False: as in the model file, or not."""
    recompute: str = field(default="none", repr=False)
    """What compiled blocks recompute inside of their graphs."""
    adapters: tuple[str, ...] = field(default=(), repr=False)
    """Maps that get adapters: for each time that the model is traced with adapters, a role or names and commas."""


def completed(request: Request) -> Request:
    """Return a request with what its config.json says, or defaults, in place of what the user left out.

    Raises UserError where the file cannot be read, or says what cannot be traced.
    """
    if request.model.endswith(".json"):
        given = _arguments(request, f"gsreal trace {request.model}")
        said = config_file.settings_in(Path(request.model), given=given)
        if request.image is not None or request.vocabulary is not None:  # the form of the input is the user's
            said = {key: said[key] for key in ("model", "config")}
        said = {key: value for key, value in said.items() if key == "model" or not getattr(request, key)}
        request = replace(request, **said)
    return replace(
        request,
        task=request.task or "next-token",
        maximum_sequence_length=request.maximum_sequence_length or MAXIMUM_SEQUENCE_LENGTH,
    )


MAXIMUM_SEQUENCE_LENGTH = 256
"""Of models for which nobody says it."""


def traced_model(request: Request, *, on_counted: Callable[[OperationCounts], None] = lambda _counted: None) -> Model:
    """Return the traced model for a `request`; raise UserError if it cannot be traced.

    `on_counted` is called with the operations of the largest step that was traced.
    """
    where = f"gsreal trace {request.model}"
    request = completed(request)
    model = load_model(Path(request.model)) if request.model.endswith(".toml") else _untraced(request, where)
    if request.precision is not None:
        if request.precision not in DTYPES:
            raise UserError(f"{where}: --precision {request.precision}: allowed: {', '.join(DTYPES)}")
        model = replace(model, traced_precision=cast(Precision, request.precision))
    model = _compiled(model, request, where)
    if model.traced_precision not in DTYPES:
        raise UserError(f"{where}: traced_precision = {model.traced_precision!r}: allowed: {', '.join(DTYPES)}")
    if request.sequence_length is not None:
        longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else 0
        if not 1 <= request.sequence_length <= longest:
            allowed = f"at least 1 and at most {longest}" if longest else "left out: the input is images"
            raise UserError(f"{where}: --sequence-length {request.sequence_length}: must be {allowed}")
        traced = trace_at_length(model, request.sequence_length, where=where, on_counted=on_counted)
    else:
        traced = trace(model, where=where, on_counted=on_counted)
    if set(request.autocast) - {"bf16", "fp16"}:
        raise UserError(f"{where}: --autocast {' '.join(request.autocast)}: allowed: bf16, fp16")
    traced = with_traced_autocast(traced, request.autocast, where=where)
    return with_traced_adapters(traced, request.adapters, where=where)


def _compiled(model: Model, request: Request, where: str) -> Model:
    """Return the model with what the request says of compilation; raise UserError for what does not go with it."""
    kind: Any = request.recompute
    if kind != "none" and (kind not in get_args(Recompute) or not request.compiled):
        allowed = ", ".join(get_args(Recompute)) if request.compiled else "with --compile alone"
        raise UserError(f"{where}: --recompute {kind}: allowed: {allowed}")
    if request.compiled:
        name = model.name  # a profile of the model that is not compiled has another
        if request.model.endswith(".toml") and not model.compiled:
            name = f"{name}-compiled" + (f"-{kind}" if kind != "none" else "")
        model = replace(model, name=name, compiled=True, compiled_recompute=kind, autocast=(), adapted=())
    if model.compiled and (request.autocast or request.adapters):
        option = "--autocast" if request.autocast else "--adapters"
        raise UserError(f"{where}: {option}: compiled blocks are traced without it; leave out one of the two")
    return model


def check_options(request: Request) -> None:
    """Raise UserError for an option of the command line that does not apply to such a model."""
    request = completed(request)
    is_file, is_image = request.model.endswith(".toml"), request.image is not None
    is_text_classifier = request.task == CLASSIFICATION and not is_image
    without_effect = {
        "--argument": is_file and request.arguments,
        "--vocabulary": is_file and request.vocabulary is not None,
        "--image": is_file and is_image,
        "--task": request.task != "next-token" and (is_file or is_image),
        "--classes": request.classes is not None and (is_file or not (is_image or is_text_classifier)),
        "--padding": request.padding != Request.padding and (is_file or not is_text_classifier),
        "--auto-class": request.auto_class is not None and not request.model.startswith("hf:"),
    }
    for option in (option for option, found in without_effect.items() if found):
        raise UserError(f"gsreal trace {request.model}: {option}: has no effect on this model; leave it out")


def _arguments(request: Request, where: str) -> dict[str, Any]:
    """Return the values of the command line's `--argument`, as TOML reads them."""
    arguments: dict[str, Any] = {}
    for text in request.arguments:
        key, separator, value = text.partition("=")
        if not separator:
            raise UserError(f"{where}: --argument {text}: must be NAME=VALUE")
        try:
            arguments[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:  # a string without quotes
            arguments[key] = value
        if value == "null" and request.model.endswith(".json") | request.model.startswith("hf:"):
            arguments[key] = None  # as in a config.json; TOML has none
    return arguments


def _untraced(request: Request, where: str) -> Model:
    arguments = {**request.config, **_arguments(request, where)}
    if request.model.startswith("hf:"):
        if request.image is not None:
            arguments = {"num_labels": _classes(request, 10), **arguments}
        elif request.task == CLASSIFICATION:
            arguments = {"num_labels": _classes(request, 2), "pad_token_id": request.padding, **arguments}
        module: dict[str, Any] = {
            "hugging_face": {
                "model_type": request.model.removeprefix("hf:"),
                "auto_class": request.auto_class
                or AUTO_CLASSES.get("image" if request.image else str(request.task), "AutoModel"),
                "config": {key: value for key, value in arguments.items() if value is not None},
                "null": tuple(key for key, value in arguments.items() if value is None),
            }
        }
    else:
        module = {"factory": request.model, "arguments": arguments}
    traced = f"traced from {request.model} by gsreal trace, torch {torch.__version__.partition('+')[0]}"
    data = {
        "name": request.name,
        "source": f"{request.source}; {traced}" if request.source else traced,
        "module": module,
        "input": _input(request, where),
        "traced_batch_sizes": (1,),
        "layers": (),
    }
    return validated(Model, data, file=where)


def _input(request: Request, where: str) -> dict[str, Any]:
    if (request.image is None) == (request.vocabulary is None):
        raise UserError(f"{where}: exactly one of --vocabulary (tokens) and --image is needed")
    if request.image is None:
        length = request.maximum_sequence_length
        tokens = {
            "kind": "tokens",
            "vocabulary": request.vocabulary,
            "task": request.task,
            "maximum_sequence_length": length,
        }
        if request.task == CLASSIFICATION:
            tokens |= {"classes": _classes(request, 2), "padding": request.padding}
        return tokens
    try:
        shape = tuple(int(size) for size in request.image.split("x"))
    except ValueError:
        shape = ()
    if len(shape) != 3:
        raise UserError(f"{where}: --image {request.image}: must be CHANNELSxHEIGHTxWIDTH, such as 1x8x8")
    return {"kind": "image", "shape": shape, "classes": _classes(request, 10)}


def _classes(request: Request, default: int) -> int:
    return default if request.classes is None else request.classes


LISTED = 8
"""Number of operations without FLOP in a table of counts: those that move the most bytes."""


def counted_table(counted: OperationCounts) -> str:
    """Return the counts as lines: operation, calls, FLOP, bytes; all with FLOP, of the others the largest."""
    works = counted.operations
    rows = [(name, work) for name, work in works.items() if work.flop]
    others = sorted(((n, w) for n, w in works.items() if not w.flop), key=lambda row: -row[1].bytes_moved)
    rows = [*sorted(rows, key=lambda row: -row[1].flop), *others[:LISTED]]
    if others[LISTED:]:
        rows.append((f"{len(others) - LISTED} others", sum((work for _, work in others[LISTED:]), Work())))
    rows.append(("all", sum(works.values(), Work())))
    width = max(len(name) for name, _ in rows)
    tokens = "" if counted.sequence_length is None else f" of {counted.sequence_length} tokens"
    return "\n".join(
        [
            f"gsreal: counted in one step of {counted.batch_size} samples{tokens}, forward and backward:",
            f"  {'operation':{width}}  {'calls':>7}  {'FLOP':>9}  {'bytes':>9}",
            *(
                f"  {name:{width}}  {work.operations:>7}  {work.flop:>9.3g}  {work.bytes_moved:>9.3g}"
                for name, work in rows
            ),
        ]
    )


def write_model(path: Path, model: Model) -> None:
    """Write the model file, or nothing."""
    data = TypeAdapter(Model).dump_python(model, mode="json", exclude_none=True)
    for name in ("context_layers", "expert_layers", "adapted", "autocast", "whole_layers"):  # most models have none
        if not data[name]:
            del data[name]
    for each in data.get("adapted", ()):
        for name in ("context_layers", "sliced_layers", "sequence_layers", "expert_layers"):
            if not each[name]:
                del each[name]
    write_text(path, tomli_w.dumps(data, multiline_strings=False, indent=2))
