"""Measures the kernel workspace of a model's layers, operation by operation, at the positions of a trace.

An operation's workspace is the peak of allocated bytes while it runs, minus the bytes allocated before it or after it,
whichever are more. (After it there are its results, which the trace has already.) It depends on shapes in steps: oneDNN
selects other kernels if channels are not a multiple of its vectors. So each variant of a layer is measured: whole,
sliced to each number of units, and with parts of its backward left out. Whole and sliced layers are measured under
torch.autocast too, if the model is traced under it. (There a CPU's operations on tensors of two precisions take
workspace as well: copies of operands, which count once, as the trace's are left out where workspaces are measured.)
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsreal.measure import MemoryCounter
from gsreal.methods.cuts import cut_of
from gsreal.methods.tensor_slices import TensorExchanges, slice_block
from gsreal.model_files.build import autocast, build_module, logits_of, loss_of
from gsreal.model_files.divided_steps import TRACED_BATCH_SIZES, TRACED_UNITS
from gsreal.model_files.fused_kernels import cuda_kernels
from gsreal.model_files.partial_backward import FIRST, NOTHING, record_partial_step
from gsreal.model_files.recorder import Record
from gsreal.model_files.step import Step, layer_boundaries, record_step
from gssim.cluster.measured import Scratch
from gssim.workload import Model, unrolled
from gssim.workload.model import under_autocast

Place = tuple[int, str]
"""Layer and phase."""
Batches = Mapping[int, tuple[Tensor, Tensor]]
"""Inputs and targets by batch size."""
Taken = Mapping[Place, Sequence[tuple[str, int]]]
"""Name and workspace of every operation, in order, for each place."""
FEWEST_BYTES = 64
"""Smaller allocations are numbers, not arrays."""


@dataclass(frozen=True)
class _Variant:
    """A variant of the layers, and the places at which it applies in a step that is prepared for it."""

    name: str
    places: tuple[Place, ...]
    step: int | None = None
    """Which parameters are trained, as in `gsreal.model_files.partial_backward`; None: all."""
    units: int | None = None
    """Units of the slice of each block that can be sliced."""


def layer_scratch(
    model: Model, batches: Batches, counter: MemoryCounter, dtype: torch.dtype, *, rank: int = 0, ranks: int = 1
) -> dict[str, dict[str, list[str]]]:
    """Return the workspace of every layer entry of the model file by variant; see `LayerProfile.scratch_bytes`.

    Each of `ranks` ranks measures some of the variants.
    """
    workspace: dict[str, dict[str, list[str]]] = {layer.name: {} for layer in model.layers}
    if model.compiled:  # torch compiles nothing under a dispatch mode, which sees single operations
        return workspace
    kinds = {"": model}
    if dtype == torch.float32:
        kinds |= {f"autocast-{each.precision}-": under_autocast(model, each.precision) for each in model.autocast}
    for kind, as_run in kinds.items():
        instances, ways = unrolled(as_run), list(_variants(as_run))[rank::ranks]
        with cuda_kernels() if model.runs_fused_kernels else nullcontext():
            traced = _traced(as_run, ways, batches)
        for way, record in zip(ways, traced, strict=True):
            seen = _measure_workspaces(as_run, way, batches, counter, dtype)
            places: dict[str, list[Place]] = defaultdict(list)
            for place in way.places:
                places[instances[place[0]].layer.name].append(place)
            for name, its in places.items():
                if lines := _lines(its, record, seen):
                    workspace.setdefault(name, {})[kind + way.name] = lines
    return workspace


def _variants(model: Model) -> Iterator[_Variant]:
    """Give the variants in which plans may run the model's layers."""
    instances = unrolled(model)
    everywhere = tuple((each.index, phase) for each in instances for phase in ("f", "b"))
    yield _Variant("whole", everywhere)
    if any(layer.frozen for layer in model.layers):
        yield _Variant("untrained", tuple(place for place in everywhere if place[1] == "f"), NOTHING)
        yield _Variant("frozen", tuple(place for place in everywhere if place[0] > 0), FIRST)
        for each in instances:
            if each.layer.deepest and each.repetition == 0:
                yield _Variant("deepest", ((each.index, "f"), (each.index, "b")), each.index)
    units = [layer.units or 0 for layer in model.sliced_layers for _ in range(layer.repeats)]
    for number in range(1, max(units, default=0)):
        yield _Variant(
            f"units-{number}", tuple(place for place in everywhere if units[place[0]] > number), units=number
        )


def _traced(model: Model, ways: Sequence[_Variant], batches: Batches) -> list[Record]:
    """Return the trace of each variant: its positions are those of the model file."""
    if not ways:
        return []
    inputs = next(iter(batches.values()))[0]
    length = inputs.shape[1] if model.input.kind == "tokens" else None
    step = Step(batch_size=TRACED_BATCH_SIZES[0], sequence_length=length)
    whole = cut = record_step(model, step, where=model.name)
    if any(way.units for way in ways):
        cut = record_step(model, replace(step, units=TRACED_UNITS[0]), where=model.name, like=whole)
    layers = [replace(i.layer, name=i.module, modules=(i.module,) if i.layer.modules else ()) for i in unrolled(model)]
    steps = [way.step for way in ways if way.step is not None]
    parts = record_partial_step(model, layers, steps, step, model.name) if steps else {}
    return [cut if way.units else whole if way.step is None else parts[way.step] for way in ways]


def _modules(model: Model) -> list[str]:
    return [each.module for each in unrolled(model) if each.layer.modules]


def _prepared(module: nn.Module, model: Model, way: _Variant) -> nn.Module:
    """Return the module prepared for a variant; sums over ranks are replaced by one rank's allocations."""
    module.train()
    for name in _modules(model) if way.units else []:
        block = module.get_submodule(name)
        cut = cut_of(block)
        if way.units and cut is not None and cut.units(block) > way.units:
            slice_block(block, range(way.units), TensorExchanges(2, torch.clone))
    if way.step is not None:
        trained = unrolled(model)[way.step].parameter_names if way.step != NOTHING else ()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)
    return module


def _measure_workspaces(
    model: Model, way: _Variant, batches: Batches, counter: MemoryCounter, dtype: torch.dtype
) -> dict[int, Taken]:
    """Return the workspace of every operation by batch size."""
    device = next(iter(batches.values()))[0].device
    module = _prepared(build_module(model.module, where=model.name).to(device, dtype), model, way)
    by_batch_size: dict[int, Taken] = {}
    for batch_size, (inputs, targets) in batches.items():
        watch = _Watch(counter)
        with watch, layer_boundaries(module, _modules(model), enter=watch.enter) as out:
            with autocast(model.traced_autocast, device.type):
                loss = loss_of(out(logits_of(module(inputs))), targets)
            if way.step != NOTHING:
                watch.enter(len(_modules(model)), "b")
                loss.backward()
        module.zero_grad(set_to_none=True)
        by_batch_size[batch_size] = watch.taken
    return by_batch_size


class _Watch(TorchDispatchMode):
    """Dispatch mode that measures the workspace of every operation."""

    def __init__(self, counter: MemoryCounter) -> None:
        super().__init__()
        self.counter = counter
        self.place: Place = (0, "f")
        self.taken: dict[Place, list[tuple[str, int]]] = defaultdict(list)

    def enter(self, layer: int, phase: str) -> None:
        """Record subsequent operations for a phase of a layer."""
        self.place = (layer, phase)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counter.alive()
        self.counter.reset()
        result = func(*args, **(kwargs or {}))
        peak, after = self.counter.peak(), self.counter.alive()
        if not func.is_view and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.taken[self.place].append((str(func), peak - max(before, after)))
        return result


def _lines(places: Sequence[Place], record: Record, seen: Mapping[int, Taken]) -> list[str]:
    """Return the workspace of an entry, by moment: the maximum of its repetitions."""
    most: dict[tuple[str, int], dict[int, int]] = defaultdict(lambda: dict.fromkeys(seen, 0))
    for batch_size, taken in seen.items():
        for place in places:
            names, sizes = zip(*taken[place], strict=True) if taken[place] else ((), ())
            positions = _aligned(names, record.names[place], record.counted[place])
            for position, size in zip(positions, sizes, strict=True):
                if size >= FEWEST_BYTES:
                    peaks = most[place[1], position]
                    peaks[batch_size] = max(peaks[batch_size], size)
    order = sorted(most, key=lambda moment: (moment[0] == "b", moment[1]))
    return [str(Scratch(*moment, _breakpoints(sorted(most[moment].items())))) for moment in order]


def _aligned(names: Sequence[str], traced: Sequence[str], positions: Sequence[int]) -> list[int]:
    """Return the traced position of every operation.

    It is the position of the same operation in the trace, or else of the last one before it.

    The trace of a few units, or for the CPU, may differ in copies from a run of one unit, or on another device.

    >>> _aligned(["mm", "copy", "add"], ["mm", "add"], [0, 4])
    [0, 0, 4]
    """
    aligned: list[int | None] = [None] * len(names)
    for run in SequenceMatcher(None, traced, names, autojunk=False).get_matching_blocks():
        aligned[run.b : run.b + run.size] = positions[run.a : run.a + run.size]
    latest = 0
    return [latest := latest if position is None else position for position in aligned]


def _breakpoints(points: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the first and the last point, and those between at which the slope changes.

    >>> _breakpoints([(1, 10), (2, 20), (4, 40), (8, 90)])
    ((1, 10), (4, 40), (8, 90))
    """
    selected = list(points[:1])
    for here, after in pairwise(points[1:]):
        if _slope(selected[-1], here) != _slope(here, after):
            selected.append(here)
    return (*selected, *points[1:][-1:])


def _slope(a: tuple[int, int], b: tuple[int, int]) -> Fraction:
    return Fraction(b[1] - a[1], b[0] - a[0])
