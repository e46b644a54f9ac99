"""Traces any `nn.Module` or Hugging Face config into a model file, under fake tensors: no weights, no GPU.

One training step runs per traced shape. The quantities of each layer are exact for these shapes; as a function of batch
size b and sequence length s they are polynomials (up to b*s^2), fitted over six shapes and checked at a seventh. If the
model's blocks can be sliced among ranks, steps with sliced blocks are traced as well, see [Note: units] in
`gssim.workload.model`. Of many equal blocks only a few are traced, see `repeated`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from pydantic import TypeAdapter

from gsreal.methods.adapters import adapted_maps
from gsreal.methods.stage_modules import unstaged_reason
from gsreal.model_files.divided_steps import (
    CHECKED_BATCH_SIZE,
    DIVIDED_STEPS,
    TRACED_ADAPTER_RANKS,
    TRACED_BATCH_SIZES,
    Lengths,
    Steps,
    record_steps,
    whole_steps,
)
from gsreal.model_files.fake_module import fake_module, uncut_reason, without_values
from gsreal.model_files.fit import TERMS, TERMS_WITH_ADAPTERS, Terms, fit_layers, merge_layers
from gsreal.model_files.fused_kernels import cuda_kernels
from gsreal.model_files.one_sample import with_one_sample
from gsreal.model_files.partial_backward import with_partial_costs
from gsreal.model_files.recorder import NoPolynomialError, Record, Work
from gsreal.model_files.repeated import KEPT, Stack, repeat_blocks, with_fewer_blocks
from gsreal.model_files.split_backward import with_split_costs
from gsreal.model_files.step import Step, record_step
from gssim.errors import UserError
from gssim.execution.files import write_text
from gssim.workload import Adapters, Layer, Model, TokenInput
from gssim.workload.layer import LayerRoles
from gssim.workload.model import AdaptedLayers, AutocastLayers, PartlyTrained, unrolled
from gssim.workload.owned import unchained


@dataclass(frozen=True)
class OperationCounts:
    """Operations of one step, forward and backward, of a batch of one shape."""

    batch_size: int
    sequence_length: int | None
    operations: dict[str, Work]
    """Work by the operation's name."""


def _ignore_counts(_counted: OperationCounts) -> None:
    """Ignore the counts."""


def trace(model: Model, *, where: str, on_counted: Callable[[OperationCounts], None] = _ignore_counts) -> Model:
    """Return `model` (name, source, module, input; its layers are ignored) with its layers traced.

    `on_counted` is called with the operations of the largest step. Raises UserError if the module cannot be built, if
    its cost is not a polynomial in the batch size, and for an operation whose cost is unknown.
    """
    traced: tuple[int | None, ...] = (None,)
    longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else None
    if longest is not None:
        traced = tuple(sorted({max(8, longest // 8), max(12, longest // 4), max(16, longest // 2)}))
    try:
        return _trace_layers(model, Lengths(traced, longest), where, on_counted)
    except NoPolynomialError as error:
        raise UserError(
            f"{where}: {error}; give one sequence length with --sequence-length to trace it there alone"
        ) from None


def trace_at_length(
    model: Model, sequence_length: int, *, where: str, on_counted: Callable[[OperationCounts], None] = _ignore_counts
) -> Model:
    """Return `model` traced at one sequence length only: its quantities depend on the batch size alone."""
    try:
        traced = _trace_layers(model, Lengths((sequence_length,), sequence_length), where, on_counted)
    except NoPolynomialError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(traced, exact_sequence=False)


def runs_other_kernels(model: Model, sequence_length: int | None, *, where: str) -> bool:
    """Return whether a CUDA GPU runs attention or dropout of the module by other operations than a CPU does.

    `sequence_length`: of the traced step; None: an eighth of the model's longest.
    """
    short, _ = with_fewer_blocks(model, where) or (model, None)
    length = sequence_length
    if length is None and isinstance(model.input, TokenInput):
        length = max(8, model.input.maximum_sequence_length // 8)
    with cuda_kernels() as replaced:
        record_step(short, Step(batch_size=TRACED_BATCH_SIZES[0], sequence_length=length), where=where)
    return bool(replaced)


def _trace_layers(model: Model, lengths: Lengths, where: str, on_counted: Callable[[OperationCounts], None]) -> Model:
    """Return the model with its layers traced; of many equal blocks a few are traced, and repeated."""
    sibling = with_fewer_blocks(model, where)
    layers = None
    if sibling is not None:
        short, stack = sibling
        traced, largest = _layers(short, lengths, where)
        repeated = {
            name: repeat_blocks(each, stack, neighbours_differ=name not in ("layers", "sliced_layers"))
            for name, each in traced.items()
        }
        if repeated["layers"] is not None and repeated["sliced_layers"] is not None:
            layers, counted = {name: each or [] for name, each in repeated.items()}, _operations(largest, stack)
    if layers is None:
        layers, largest = _layers(model, lengths, where)
        counted = _operations(largest, None)
    on_counted(OperationCounts(CHECKED_BATCH_SIZE, lengths.longest, counted))
    fields: dict[str, Any] = {
        name: merge_layers(_with_module_buffers(each, model, where)) for name, each in layers.items()
    }
    uncut = "compiled blocks are traced whole" if model.compiled else None
    if not model.compiled and not fields["sliced_layers"]:
        uncut = uncut_reason(model, where)
    with without_values(model):
        unstaged = unstaged_reason(model, fake_module(model, where))
    return replace(
        model,
        **fields,
        uncut_reason=uncut,
        unstaged_reason=unstaged,
        **_buffers(model, where),
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_one_sample=not model.compiled,
        traced_sequence_lengths=tuple(s for s in lengths.traced if s is not None),
    )


def _operations(record: Record, stack: Stack | None) -> dict[str, Work]:
    """Return the work of all layers by operation; with a `stack`, its middle block also counts for blocks left out."""
    total: dict[str, Work] = {}
    middle = record.modules.index(f"{stack.path}.{KEPT // 2}") if stack else -1
    for layer, operations in record.by_operation.items():
        times = stack.count - KEPT + 1 if stack and layer == middle else 1
        for name, work in operations.items():
            total[name] = total.get(name, Work()) + work.times(times)
    return total


def _layers(model: Model, lengths: Lengths, where: str) -> tuple[dict[str, list[Layer]], Record]:
    """Return all layers, one for each module, by the field of a model, and the record of the largest step.

    A field is empty if ranks cannot divide the model in its way.
    """
    steps = whole_steps(lengths)
    records, largest = record_steps(model, steps, where=where)
    whole = fit_layers(records, largest, steps.checked.shape, TERMS["layers"])
    if model.compiled:  # only whole blocks, all of them trained: parts of blocks would be other graphs
        return {"layers": whole, **{name: [] for name in DIVIDED_STEPS}}, largest
    partial = with_partial_costs(model, whole, steps, where=where)
    shapes = [step.shape for step in steps.traced]
    split = with_split_costs(model, partial, shapes, steps.checked.shape, where=where)
    first = next(iter(records.values()))
    layers = {"layers": with_one_sample(model, split, steps, TERMS["layers"], first, where=where)}
    for name in DIVIDED_STEPS:
        needed = "sliced_layers" if name == "sequence_layers" else "layers"
        layers[name] = _trace_divided_layers(name, model, lengths, where) if layers[needed] else []
    return layers, largest


def _trace_divided_layers(name: str, model: Model, lengths: Lengths, where: str) -> list[Layer]:
    """Return the layers as divided for field `name`; empty if that is impossible, or costs are no polynomials."""
    not_so: tuple[type[Exception], ...] = (NoPolynomialError,)
    if name == "context_layers":  # from modules that cannot run on a part of a sequence
        not_so = (NoPolynomialError, UserError, RuntimeError, TypeError, ValueError)
    try:
        steps = DIVIDED_STEPS[name](model, lengths, where)
        return _fit_to_steps(model, steps, TERMS[name], where) if steps is not None else []
    except not_so:
        return []


def _fit_to_steps(model: Model, steps: Steps, terms: Terms, where: str) -> list[Layer]:
    """Return the layers that are fitted to steps, with those buffers marked that depend on whether a step has one
    sample; raise NoPolynomialError where no polynomials are.
    """
    layers, fitted, first = _fit_with_records(model, steps, terms, where)
    return with_one_sample(model, layers, fitted, terms, first, where=where)


def _fit_with_records(model: Model, steps: Steps, terms: Terms, where: str) -> tuple[list[Layer], Steps, Record]:
    """Return the layers that are fitted to steps, these steps, and the record of the first of them.

    Where layers cannot be fitted, they are fitted to larger steps.
    """
    try:
        records, largest = record_steps(model, steps, where=where)
        layers = fit_layers(records, largest, steps.checked.shape, terms)
    except NoPolynomialError:
        larger = steps.without_single_units()
        if larger is None:
            raise
        steps = larger
        records, largest = record_steps(model, steps, where=where)
        layers = fit_layers(records, largest, steps.checked.shape, terms)
    return layers, steps, next(iter(records.values()))


def maps_of_adapters(model: Model, targets: str | tuple[str, ...], *, where: str) -> tuple[str, ...]:
    """Return the names of the maps that get adapters; raise UserError, with the option, where there is none."""
    option = targets if isinstance(targets, str) else ",".join(targets)
    with without_values(model):
        return adapted_maps(fake_module(model, where), targets, where=f"{where}: --adapters {option}")


def targets_of(option: str) -> str | tuple[str, ...]:
    """Return a value of `--adapters`: a role, or names that commas separate."""
    return option if option in ROLES else tuple(option.split(","))


def traced_adapters(model: Model, targets: str | tuple[str, ...], lengths: Lengths, *, where: str) -> AdaptedLayers:
    """Return the layers of a model with adapters of any rank; see [Note: adapters] in `gssim.workload.model`."""
    maps = maps_of_adapters(model, targets, where=where)
    short, stack = with_fewer_blocks(model, where) or (model, None)

    adapters = Adapters(rank=TRACED_ADAPTER_RANKS[0], targets=maps)
    adapted = replace(short, module=replace(short.module, adapters=adapters))

    def fitted(name: str, steps: Steps) -> list[Layer]:
        return _fit_to_steps(adapted, steps.with_adapters(), TERMS_WITH_ADAPTERS[name], where)

    try:
        layers = fitted("layers", whole_steps(lengths))
    except NoPolynomialError as error:
        raise UserError(f"{where}: {error}") from None
    whole = layers if stack is None else repeat_blocks(layers, stack)
    if whole is None:
        raise UserError(f"{where}: blocks with adapters differ from one another; not supported")
    fields = {"layers": whole}
    for name in (name for name in TERMS_WITH_ADAPTERS if name in DIVIDED_STEPS and getattr(model, name)):
        steps = DIVIDED_STEPS[name](adapted, lengths, where)
        try:
            divided = fitted(name, steps) if steps is not None else []
        except NoPolynomialError:
            continue
        fields[name] = divided if stack is None else repeat_blocks(divided, stack, neighbours_differ=True) or []
    role: Any = targets if isinstance(targets, str) else None
    grouped_fields = {name: merge_layers(_with_module_buffers(each, model, where)) for name, each in fields.items()}
    return AdaptedLayers(role=role, maps=tuple(sorted(maps)), **grouped_fields)


def with_traced_adapters(model: Model, targets: Sequence[str], *, where: str) -> Model:
    """Return a traced model with its layers also traced with adapters, for each of `targets`.

    A target is a role, or names joined by commas.
    """
    lengths = _lengths_of(model)
    adapted = [traced_adapters(model, targets_of(each), lengths, where=where) for each in targets]
    kept = [each for each in model.adapted if each.maps not in [new.maps for new in adapted]]
    return replace(model, adapted=(*kept, *adapted))


ROLES = ("query-value", "all-linear")


def _lengths_of(model: Model) -> Lengths:
    """Return the lengths at which a model was traced."""
    longest = model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else None
    traced = model.traced_sequence_lengths or (None,)
    return Lengths(traced, longest if model.exact_sequence else traced[-1])


def with_traced_autocast(model: Model, precisions: Sequence[str], *, where: str) -> Model:
    """Return a traced model with its layers under torch.autocast in each of the `precisions`.

    Layers are also traced in those ways in which ranks divide them without autocast.
    """
    lengths = _lengths_of(model)
    steps = whole_steps(lengths)
    short, stack = with_fewer_blocks(model, where) or (model, None)
    kept = [each for each in model.autocast if each.precision not in precisions]
    for precision in precisions:
        kind: Any = precision
        ours = replace(short, traced_precision="fp32", traced_autocast=kind, whole_layers=())
        try:
            layers = _fit_to_steps(ours, steps, TERMS["layers"], where)
        except NoPolynomialError as error:
            raise UserError(f"{where}: {error}") from None
        whole = layers if stack is None else repeat_blocks(layers, stack)
        if whole is None:
            raise UserError(f"{where}: blocks under autocast differ from one another; not supported")
        fields = {"layers": whole}
        for name in (name for name in DIVIDED_STEPS if getattr(model, name)):
            divided = _trace_divided_layers(name, ours, lengths, where)
            if stack is not None:
                divided = repeat_blocks(divided, stack, neighbours_differ=name != "sliced_layers") or []
            fields[name] = divided
        grouped_fields = {name: merge_layers(_with_module_buffers(each, model, where)) for name, each in fields.items()}
        kept.append(AutocastLayers(precision=kind, **grouped_fields))
    return replace(model, autocast=tuple(kept))


def with_traced_frozen(model: Model, *, where: str, on_impossible: Callable[[str], None] | None = None) -> Model:
    """Return a traced model with the costs of its layers where only some are trained, in each way in which ranks divide
    them; see `gsreal.model_files.partial_backward`.

    If they cannot be traced (its layers depend on one another otherwise than one after another), raises UserError. With
    `on_impossible`, which is called with the reason, returns the model without them instead.
    """

    def without(why: str) -> Model:
        if on_impossible is None:
            raise UserError(f"{where}: --frozen: {why}; leave it out")
        on_impossible(why)
        return replace(model, partly_trained=None)

    missing = any(layer.untrained_buffers is None for layer in model.layers)
    why = unchained([instance.layer for instance in unrolled(model)], side_modules=True)
    if missing and why is not None:
        return without(f"{why}: what it costs beside frozen layers is not modelled")
    lengths = _lengths_of(model)
    short, stack = with_fewer_blocks(model, where) or (model, None)
    fields: dict[str, tuple[LayerRoles, ...]] = {}
    for name in ("layers", *DIVIDED_STEPS):
        listed: tuple[Layer, ...] = getattr(model, name)
        if not listed or any(layer.untrained_buffers is not None for layer in listed):
            continue
        steps = whole_steps(lengths) if name == "layers" else DIVIDED_STEPS[name](short, lengths, where)
        if steps is None:
            continue
        layers, steps, _ = _fit_with_records(short, steps, TERMS[name], where)
        layers = with_partial_costs(short, layers, steps, where=where, terms=TERMS[name], side_modules=True)
        if any(layer.untrained_buffers is None for layer in layers):
            continue
        differ = name not in ("layers", "sliced_layers")
        whole = layers if stack is None else repeat_blocks(layers, stack, neighbours_differ=differ) or []
        if [layer.modules for layer in merge_layers(whole)] == [layer.modules for layer in listed]:
            fields[name] = tuple(
                LayerRoles(
                    untrained_buffers=each.untrained_buffers or (),
                    untrained_reductions=each.untrained_reductions,
                    frozen=each.frozen,
                    deepest=each.deepest,
                )
                for each in merge_layers(whole)
            )
    if missing and "layers" not in fields:
        return without("the operations of partly trained layers depend on the batch size or the sequence length")
    return replace(model, partly_trained=PartlyTrained(**fields))


def _buffers(model: Model, where: str) -> dict[str, Any]:
    """Return the bytes and kind of values of the module's buffers, by data type in order of first appearance.

    A module is cast to one precision before it trains, so all floating-point buffers then have one data type.
    """
    sizes: dict[torch.dtype, int] = defaultdict(int)
    with without_values(model):
        for tensor in fake_module(model, where).buffers():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            sizes[dtype] += tensor.numel() * dtype.itemsize
    values = tuple("floating-point" if dtype.is_floating_point else "integer" for dtype in sizes)
    return {"buffer_bytes": tuple(sizes.values()), "buffer_values": values if "integer" in values else ()}


def _with_module_buffers(layers: Sequence[Layer], model: Model, where: str) -> list[Layer]:
    """Return layers with the bytes of the buffers in their modules; the first layer gets those outside all modules."""
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


LISTED = 8
"""Number of operations without FLOP in a table of counts: those that move the most bytes."""


def counted_table(counted: OperationCounts) -> str:
    """Return a table of operation, calls, FLOP and bytes: all operations with FLOP, and the largest of the others."""
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
    """Write the model file, whole or not at all."""
    data = TypeAdapter(Model).dump_python(model, mode="json", exclude_none=True)
    for name in ("context_layers", "expert_layers", "adapted", "autocast", "whole_layers"):  # most models have none
        if not data[name]:
            del data[name]
    fused = data.get("fused_kernels", {})
    others = (*data.get("other_precisions", ()), fused, *fused.get("other_precisions", ()))
    adapted = [each for of in (data, *others) for each in of.get("adapted", ())]
    for each in (*adapted, *data.get("autocast", ()), *fused.get("autocast", ())):
        for name in DIVIDED_STEPS:
            if not each.get(name):
                each.pop(name, None)
    write_text(path, tomli_w.dumps(data, multiline_strings=False, indent=2))
