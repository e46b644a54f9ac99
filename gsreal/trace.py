"""Any `nn.Module` or Hugging Face config -> a model file, under fake tensors: no weights, no GPU.

One training step runs per traced shape. What is recorded per layer is exact for these shapes; as a function of batch
size b and sequence length s it is a polynomial (up to b*s^2), fitted over six shapes and checked at a seventh.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby, product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gsreal.build import build_module, example_batch, first_line, logits_of, loss_of
from gsreal.layers import LOSS, layer_boundaries, layer_modules
from gssim.units import UserError
from gssim.workload import Buffer, Layer, Model, Moment, Parameter, Polynomial, TokenInput

aten = torch.ops.aten
# torch counts no FLOP for the CPU's flash attention; its arguments are those of the CUDA kernel
FLOP_ALIASES = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
TRACED_BATCH_SIZES = (2, 3)
CHECKED_BATCH_SIZE = 5


@dataclass
class _Alive:
    """One storage that an operation created, with the absolute moments (layer, phase, position) of its life."""

    size_bytes: int
    born: tuple[int, str, int]
    freed: tuple[int, str, int] | None = None


@dataclass
class _Record:
    """What one traced step showed, per layer index."""

    modules: list[str]
    blocks: set[str]
    flop: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes_moved: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    operations: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    saved: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    output: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    alive: list[_Alive] = field(default_factory=list)
    parameters: dict[str, tuple[int, tuple[int, ...], tuple[int, str, int], tuple[int, str, int]]] = field(
        default_factory=dict
    )
    """Name -> (layer of first use, shape, gradient born, gradient ready)."""


class _Recorder(TorchDispatchMode):
    """Sees every operation of a step and books it on the layer that runs."""

    def __init__(self, record: _Record, known: set[int]) -> None:
        super().__init__()
        self.record, self.known = record, known
        self.layer, self.phase = 0, "f"
        self.position: dict[tuple[int, str], int] = defaultdict(lambda: -1)
        self.live: dict[int, _Alive] = {}
        self.first_use: dict[int, int] = {}

    def enter(self, layer: int, phase: str) -> None:
        self.layer, self.phase = layer, phase

    def now(self) -> tuple[int, str, int]:
        place = (self.layer, self.phase)
        return (*place, max(0, self.position[place]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = (self.layer, self.phase)
        self.position[place] += 1
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in inputs:
            key = tensor.untyped_storage()._cdata
            if key in self.known:
                self.first_use.setdefault(key, self.layer)
        result = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if outputs and not func.is_view:
            self._count(func, args, kwargs, result, inputs, outputs, place)
        for tensor in outputs:
            self._born(tensor)
        return result

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        place: tuple[int, str],
    ) -> None:
        packet = FLOP_ALIASES.get(func._overloadpacket, func._overloadpacket)
        if packet in flop_registry:
            self.record.flop[place] += flop_registry[packet](*args, **kwargs, out_val=result)
        moved = {id(t): t.numel() * t.element_size() for t in [*inputs, *outputs]}
        self.record.bytes_moved[place] += sum(moved.values())
        self.record.operations[place] += 1

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self.known:
            return
        alive = _Alive(storage.nbytes(), self.now())
        self.live[key] = alive
        self.record.alive.append(alive)
        weakref.finalize(storage, self._freed, key, alive)

    def _freed(self, key: int, alive: _Alive) -> None:
        alive.freed = self.now()
        if self.live.get(key) is alive:
            del self.live[key]


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
        layers = _fitted_layers(records, record_step(model, *checked, where=where), checked)
    except _NoPolynomialError as error:
        raise UserError(
            f"{where}: {error}; give one sequence length with --sequence-length to trace it there alone"
        ) from None
    return replace(
        model,
        layers=_grouped(layers),
        buffer_bytes=_buffer_bytes(model, where),
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_sequence_lengths=tuple(s for s in lengths if s is not None),
    )


def trace_at(model: Model, sequence_length: int, *, where: str) -> Model:
    """Return `model` traced at one sequence length only: its quantities depend on the batch size alone."""
    records: dict[_Shape, _Record] = {
        (b, sequence_length): record_step(model, b, sequence_length, where=where) for b in TRACED_BATCH_SIZES
    }
    checked = (CHECKED_BATCH_SIZE, sequence_length)
    try:
        layers = _fitted_layers(records, record_step(model, *checked, where=where), checked)
    except _NoPolynomialError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(
        model,
        layers=_grouped(layers),
        buffer_bytes=_buffer_bytes(model, where),
        exact_sequence=False,
        traced_batch_sizes=TRACED_BATCH_SIZES,
        traced_sequence_lengths=(sequence_length,),
    )


def _buffer_bytes(model: Model, where: str) -> tuple[int, ...]:
    """Return the bytes of the module's buffers, a number for each data type in order of first appearance."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    with FakeTensorMode():
        for tensor in _fake_module(model, where).buffers():
            sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
    return tuple(sizes.values())


def _fake_module(model: Model, where: str) -> nn.Module:
    """Return the module; one initialisation of torch's asks for values, which fake tensors do not have."""
    with mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_settings: tensor):
        return build_module(model.module, where=where)


def _sequence_lengths(model: Model) -> tuple[int | None, ...]:
    if not isinstance(model.input, TokenInput):
        return (None,)
    longest = model.input.maximum_sequence_length
    return tuple(sorted({max(8, longest // 8), max(12, longest // 4), max(16, longest // 2)}))


def _checked_length(model: Model, lengths: Sequence[int | None]) -> int | None:
    return model.input.maximum_sequence_length if isinstance(model.input, TokenInput) else lengths[0]


def record_step(model: Model, batch_size: int, sequence_length: int | None, *, where: str) -> _Record:
    """Return what one training step at this shape does, layer by layer."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        module = _fake_module(model, where)
        module.train()
        chosen = layer_modules(module)
        inputs, targets = example_batch(model, batch_size=batch_size, sequence_length=sequence_length)
        modules = _executed(module, list(chosen), inputs, targets, where)
        record = _Record(modules, blocks={name for name in modules if chosen[name]})
        _record_saved(record, module, inputs, targets)
        module.zero_grad(set_to_none=True)
        _record_operations(record, module, inputs, targets, where)
    return record


def _executed(module: nn.Module, chosen: list[str], inputs: Tensor, targets: Tensor, where: str) -> list[str]:
    """Return the chosen modules at which a layer begins, in the order in which they run.

    Modules that take nothing that carries a gradient (embeddings side by side) belong to the first of them.
    """
    order: list[str] = []
    inner = dict(module.named_modules())

    def before(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            carrying = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
            if carrying or not order:
                order.append(name)

        return hook

    handles = [inner[name].register_forward_pre_hook(before(name), with_kwargs=True) for name in chosen]
    try:
        loss = loss_of(module(inputs), targets)
    except Exception as error:
        raise UserError(
            f"{where}: the module's forward or loss fails on the stated input: {first_line(error)}"
        ) from error
    if not loss.requires_grad:
        raise UserError(f"{where}: the module has no parameters to train")
    for handle in handles:
        handle.remove()
    twice = {name for name in order if order.count(name) > 1}
    if twice:
        raise UserError(f"{where}: the module {sorted(twice)[0]!r} runs more than once in a forward; not supported")
    return order


def _known_storages(module: nn.Module, *tensors: Tensor) -> set[int]:
    kept = [*module.parameters(), *module.buffers(), *tensors]
    return {tensor.untyped_storage()._cdata for tensor in kept}


def _record_saved(record: _Record, module: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Book the unique storages that autograd saves, and the output of each layer."""
    known = _known_storages(module, inputs, targets)
    seen: set[int] = set()
    current = 0
    keep = []

    def enter(layer: int, phase: str) -> None:
        nonlocal current
        current = layer

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage._cdata not in seen:
            seen.add(storage._cdata)
            keep.append(storage)  # so that no other storage takes its place
            record.saved[current] += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), layer_boundaries(module, record.modules, enter=enter) as out:
        handles = _book_outputs(record, module)
        logits = out(logits_of(module(inputs)))
        loss = loss_of(logits, targets)
        record.output[len(record.modules)] = loss.numel() * loss.element_size()
    for handle in handles:
        handle.remove()


def _book_outputs(record: _Record, module: nn.Module) -> list[Any]:
    inner = dict(module.named_modules())

    def after(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            record.output[layer] = sum(t.numel() * t.element_size() for t in tensors[:1])

        return hook

    return [inner[name].register_forward_hook(after(i)) for i, name in enumerate(record.modules)]


def _record_operations(record: _Record, module: nn.Module, inputs: Tensor, targets: Tensor, where: str) -> None:
    """Book every operation and every storage of one forward and backward."""
    known = _known_storages(module, inputs, targets)
    recorder = _Recorder(record, known)
    ready: dict[str, tuple[int, str, int]] = {}
    handles = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:

            def hook(_parameter: Tensor, name: str = name) -> None:
                ready[name] = recorder.now()

            handles.append(parameter.register_post_accumulate_grad_hook(hook))
    with recorder, layer_boundaries(module, record.modules, enter=recorder.enter) as out:
        loss = loss_of(out(logits_of(module(inputs))), targets)
        recorder.enter(len(record.modules), "b")
        loss.backward()
    for handle in handles:
        handle.remove()
    _book_gradients(record, recorder, module, ready, where)


def _book_gradients(
    record: _Record, recorder: _Recorder, module: nn.Module, ready: dict[str, tuple[int, str, int]], where: str
) -> None:
    gradients = set()
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise UserError(f"{where}: the parameter {name!r} gets no gradient (unused or frozen); not supported")
        alive = recorder.live[parameter.grad.untyped_storage()._cdata]
        gradients.add(id(alive))
        layer = recorder.first_use.get(parameter.untyped_storage()._cdata, 0)
        record.parameters[name] = (layer, tuple(parameter.shape), alive.born, ready[name])
    record.alive = [alive for alive in record.alive if id(alive) not in gradients]


class _NoPolynomialError(Exception):
    """A quantity that is no polynomial in batch size and sequence length."""


_Shape = tuple[int, int | None]


def _fitted_layers(records: dict[_Shape, _Record], check: _Record, checked: _Shape) -> list[Layer]:
    first = next(iter(records.values()))
    everything = {**records, checked: check}
    if any(len(r.alive) != len(first.alive) or r.modules != first.modules for r in everything.values()):
        raise _NoPolynomialError("the operations depend on batch size or sequence length")

    def fit(read: Any, what: str) -> Polynomial:
        return _polynomial({shape: read(record) for shape, record in everything.items()}, checked, what)

    layers = []
    for index, name in enumerate([*first.modules, LOSS]):
        costs = {}
        for key, phase in (("forward", "f"), ("backward", "b")):
            place = (index, phase)
            costs[f"{key}_flop"] = fit(lambda r, p=place: r.flop[p], f"{name}: FLOP")
            costs[f"{key}_bytes"] = fit(lambda r, p=place: r.bytes_moved[p], f"{name}: bytes")
        layers.append(
            Layer(
                name=name,
                modules=(name,) if index < len(first.modules) else (),
                block=name in first.blocks,
                parameters=_parameters(first, index, name),
                saved_bytes=fit(lambda r, i=index: r.saved[i], f"{name}: saved bytes"),
                output_bytes=fit(lambda r, i=index: r.output[i], f"{name}: output"),
                forward_operations=first.operations[index, "f"],
                backward_operations=first.operations[index, "b"],
                buffers=_buffers(first, everything, checked, index, name),
                **costs,
            )
        )
    return layers


def _parameters(record: _Record, index: int, module: str) -> tuple[Parameter, ...]:
    found = []
    for name, (layer, shape, born, ready) in record.parameters.items():
        if layer == index:
            short = "{}" + name[len(module) :] if name.startswith(module + ".") else name
            found.append(Parameter(short, shape, _moment(born, index), _moment(ready, index)))
    return tuple(found)


def _moment(at: tuple[int, str, int] | None, layer: int) -> Moment:
    return Moment("end") if at is None else Moment(at[1], at[2], at[0] - layer)


def _buffers(
    first: _Record, everything: dict[_Shape, _Record], checked: _Shape, index: int, name: str
) -> tuple[Buffer, ...]:
    found = []
    for number, alive in enumerate(first.alive):
        if alive.born[0] != index or (alive.freed == alive.born and alive.size_bytes == 0):
            continue
        sizes = {shape: record.alive[number].size_bytes for shape, record in everything.items()}
        lives = {(record.alive[number].born, record.alive[number].freed) for record in everything.values()}
        if len(lives) > 1:
            raise _NoPolynomialError(f"{name}: the lifetime of a buffer depends on batch size or sequence length")
        kept = alive.born[1] == "f" and (alive.freed is None or alive.freed[1] == "b")
        found.append(
            Buffer(
                born=_moment(alive.born, index),
                freed=_moment(alive.freed, index),
                category="activations" if kept else "temporaries",
                size_bytes=_polynomial(sizes, checked, f"{name}: a buffer"),
            )
        )
    return tuple(found)


def _polynomial(values: dict[_Shape, int], checked: _Shape, what: str) -> Polynomial:
    """Return the polynomial through all values but the checked one, which it must meet too."""
    shapes = [shape for shape in values if shape != checked]
    lengths = {s for _, s in shapes}
    powers = [(i, j) for j in range(len(lengths)) for i in (0, 1)]
    rows = [[Fraction(b**i * (s or 1) ** j) for i, j in powers] for b, s in shapes]
    solution = _solve(rows, [Fraction(values[shape]) for shape in shapes])
    if any(c.denominator != 1 for c in solution):
        raise _NoPolynomialError(f"{what} is no whole polynomial in batch size and sequence length")
    terms = tuple((int(c), i, j) for c, (i, j) in zip(solution, powers, strict=True) if c)
    fitted = Polynomial(terms or ((0, 0, 0),))  # what "0" is parsed to
    if fitted.at(b=checked[0], s=checked[1] or 1) != values[checked]:
        raise _NoPolynomialError(f"{what} is no polynomial in batch size and sequence length")
    return fitted


def _solve(rows: list[list[Fraction]], values: list[Fraction]) -> list[Fraction]:
    """Return the exact solution of a small square linear system (Gauss-Jordan on fractions)."""
    table = [[*row, value] for row, value in zip(rows, values, strict=True)]
    size = len(table)
    for column in range(size):
        pivot = next(r for r in range(column, size) if table[r][column])
        table[column], table[pivot] = table[pivot], table[column]
        table[column] = [v / table[column][column] for v in table[column]]
        for r in range(size):
            if r != column and table[r][column]:
                factor = table[r][column]
                table[r] = [v - factor * p for v, p in zip(table[r], table[column], strict=True)]
    return [row[-1] for row in table]


def _grouped(layers: list[Layer]) -> tuple[Layer, ...]:
    """Return layers with neighbours that differ only in their module put together."""
    groups = []
    for _, members in groupby(layers, key=lambda layer: repr(replace(layer, name="", modules=()))):
        run = list(members)
        modules = tuple(m for layer in run for m in layer.modules)
        name = run[0].name.rpartition(".")[0] if len(run) > 1 else run[0].name
        groups.append(replace(run[0], name=name or run[0].name, modules=modules))
    return tuple(groups)
