"""Records one training step of any `nn.Module` under fake tensors, layer by layer.

A layer begins where a chosen module is entered, and ends where the next chosen module is entered. Its backward begins
when the gradient of its output, which is the next layer's input, is complete.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from gsreal.methods.checkpointing import SELECTIVE, checkpoint_inside
from gsreal.methods.context_parallel import ContextParts, divide_context
from gsreal.methods.cuts import cut_beside_experts, cut_of, cut_or_reason, is_linear
from gsreal.methods.experts import Splits, divided_reason, experts_of, replace_experts
from gsreal.methods.tensor_slices import SequenceParts, divide_sequences, end_of_parts, slice_block, whole_with_parts
from gsreal.model_files.build import (
    DTYPES,
    autocast,
    build_module,
    example_batch,
    first_line,
    logits_of,
    loss_of,
    sequences_not_packed,
)
from gsreal.model_files.layers import layer_modules
from gsreal.model_files.recorder import NoPolynomialError, Record, Recorder, UnknownOperationError, Work
from gssim.errors import UserError
from gssim.workload import Model

LOSS = "loss"
"""Name of the last layer, which runs outside any module."""


@contextmanager
def layer_boundaries(
    model: nn.Module,
    modules: list[str],
    *,
    enter: Callable[[int, str], None],
    take: Callable[[Tensor], None] | None = None,
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Call `enter(layer, "f")` and `enter(layer, "b")` where layers begin, for the duration of the context.

    `take`: called with what a layer takes from the one before, if a gradient is computed for it. Layer i begins at
    `modules[i]`; the last layer (index `len(modules)`) is the loss. Yields a function that marks the model's output as
    the loss's input: call the loss on its result.
    """
    handles: list[Any] = []
    inner = dict(model.named_modules())

    def mark(layer: int, tensors: list[Any]) -> None:
        enter(layer, "f")
        carrying = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        if layer > 0 and carrying and torch.is_grad_enabled():
            carrying[0].register_hook(lambda _gradient: enter(layer - 1, "b"))
            if take is not None:
                take(carrying[0])

    def before(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            mark(layer, tree_leaves((args, kwargs)))

        return hook

    def before_loss(output: Tensor) -> Tensor:
        mark(len(modules), [output])
        return output

    try:
        for layer, name in enumerate(modules):
            handles.append(inner[name].register_forward_pre_hook(before(layer), with_kwargs=True))
        yield before_loss
    finally:
        for handle in handles:
            handle.remove()


def fake_module(model: Model, where: str) -> nn.Module:
    """Return the module, made without the one of torch's initialisers that reads values: fake tensors have none."""
    with mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_settings: tensor):
        module = build_module(model.module, where=where)
    others = {str(p.dtype) for p in module.parameters()} - {str(DTYPES[model.traced_precision])}
    if others:
        raise UserError(
            f"{where}: the module has parameters in {', '.join(sorted(others))}, but is traced in "
            f"{model.traced_precision}, to which a run casts all: make them in torch's default type, or give "
            "--precision"
        )
    return module


class _FakeTensors(FakeTensorMode):
    """Fake tensors whose grouped products accept fp32 and fp16 too, and whose LSTMs keep a workspace, as kernels do.

    Torch's shape functions of these accept bf16 only, and have an empty workspace. A separate mode for them would see
    every operation, which takes longer than most of what a trace does with it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as `Recorder` does."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype in (torch.float32, torch.float16):
            with self:
                return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            with self:  # empty where nothing is kept for a backward
                return *result[:3], torch.empty(_lstm_workspace(func, args), dtype=torch.uint8)
        return result


def _lstm_workspace(func: Any, args: Any) -> int:
    """Return the bytes that oneDNN keeps of an LSTM's layer for its backward, a whole number for each sample.

    It says how many by running, here on zeros. Its parts are rounded up to pages, which the bytes of a sample are not:
    a page's worth of samples has whole ones only.
    """
    inputs, *others = args
    length, samples = inputs.shape[:2]
    whole = PAGE_BYTES // inputs.dtype.itemsize
    key = (
        inputs.dtype,
        inputs.shape[2:],
        *(each.shape if isinstance(each, Tensor) else str(each) for each in others[:4]),
    )
    if key not in _WORKSPACES:
        sizes = []
        with unset_fake_temporarily(), torch.enable_grad():  # without gradients nothing is kept
            for steps in (1, 2):
                real = [torch.zeros((steps, whole, *inputs.shape[2:]), dtype=inputs.dtype)]
                real += [
                    torch.zeros((whole, each.shape[-1]) if place in STATES else each.shape, dtype=each.dtype)
                    if isinstance(each, Tensor)
                    else each
                    for place, each in enumerate(others, 1)
                ]
                workspace: Tensor | None = func(*real)[3]
                sizes.append(0 if workspace is None else workspace.nbytes // whole)
        _WORKSPACES[key] = (sizes[0], sizes[1] - sizes[0])
    first, further = _WORKSPACES[key]
    return int(samples * (first + further * (length - 1)))


PAGE_BYTES = 4096
STATES = (5, 6)
"""Places of an LSTM's states among its arguments."""
_WORKSPACES: dict[tuple[Any, ...], tuple[int, int]] = {}
"""Bytes of workspace for a sample's first step, and for each further one, by the layer's sizes."""


@contextmanager
def traced_precision(model: Model) -> Iterator[None]:
    """Create modules and images in the precision of the trace, for the duration of the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[model.traced_precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_values(model: Model) -> Iterator[None]:
    """Use fake tensors for the duration of the context, with the operations that the model runs on real values."""
    whole = sequences_not_packed() if model.module.hugging_face is not None else nullcontext()
    # what fails is reported in one line, and not by torch as well, with its own traceback
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with _FakeTensors(allow_non_fake_inputs=False), traced_precision(model), whole:
        yield


def record_step(
    model: Model,
    batch_size: int,
    sequence_length: int | None,
    units: int | None = None,
    parts: int | None = None,
    routed: tuple[int, int] | None = None,
    *,
    context: int | None = None,
    where: str,
    like: Record | None = None,
    apart: Record | None = None,
) -> Record:
    """Return the record of one training step at this shape, layer by layer.

    `units`: number of units to which each block is sliced. `parts`: number of ranks that divide sequences between the
    sliced parts of blocks. `routed`: the experts that each layer of routed experts holds, and the rows that they
    process; in sliced blocks, routed experts are not sliced. `context`: number of ranks that divide sequences
    everywhere; raises UserError if a block cannot.

    `like`: the record of such a step at another shape. What no shape changes is taken from it: the order of the
    modules, which tensors autograd saves, and when the others would be freed if it saved none; for compiled blocks also
    the order of kernels and the buffers that share memory. That saves three of four forwards. `apart`: for the first
    record of compiled blocks, a record at another shape.
    """
    with without_values(model):
        step = _prepared(model, batch_size, sequence_length, units, parts, routed, context, where, like)
        record, module = step.record, step.module
        try:
            with _compiled(model, module, record, step.inputs, apart, where) if model.compiled else nullcontext():
                if like is None or model.compiled:
                    step.record_saved(where)
                step.record_operations(where, None if model.compiled else like)
                step.record_unsaved(like)
                step.record_needed(like)
        except UnknownOperationError as error:
            raise UserError(f"{where}: {error}") from None
    if context:
        layers = [layer for layer, name in enumerate(record.modules) if name in record.blocks]
        if not layers or any(not record.reductions.get(layer) for layer in layers):
            raise UserError(f"{where}: a block does not attend by torch's scaled_dot_product_attention")
        record.units = dict.fromkeys(layers, gcd(*step.heads))
    return record


def record_partial_steps(
    model: Model,
    batch_size: int,
    sequence_length: int | None,
    units: int | None = None,
    parts: int | None = None,
    routed: tuple[int, int] | None = None,
    *,
    context: int | None = None,
    where: str,
    like: Record | None,
    trained: Sequence[AbstractSet[str]],
) -> list[Record]:
    """Return the records of training steps at one shape, each of which trains only the parameters named in `trained`.

    Other arguments as of `record_step`. Only what a backward changes is recorded: work, storages and collectives.
    """
    with without_values(model):
        step = _prepared(model, batch_size, sequence_length, units, parts, routed, context, where, like)
        return [
            record_trained(
                step.module,
                step.record.modules,
                names,
                step.inputs,
                step.targets,
                on_recorder=step.stand_in.record_with,
                summed=step.record.summed,
            )
            for names in trained
        ]


def record_trained(
    module: nn.Module,
    names: list[str],
    trained: AbstractSet[str],
    inputs: Tensor,
    targets: Tensor,
    *,
    on_recorder: Callable[[Recorder], None] = lambda _recorder: None,
    summed: AbstractSet[str] = frozenset(),
) -> Record:
    """Return the record of a step that trains only the `trained` parameters.

    To be called under fake tensors; it freezes the module's other parameters.

    Args:
        module: the module.
        names: the modules at which layers begin.
        trained: names of the trained parameters.
        inputs: of the step.
        targets: of the step.
        on_recorder: called with the recorder before the step.
        summed: names of the parameters whose gradients are partial sums.
    """
    record = Record(names, blocks=set(), summed=set(summed))
    for name, parameter in module.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in trained)
    recorder = Recorder(record, known_storages(module, inputs, targets))
    on_recorder(recorder)
    record_backward(recorder, module, inputs, targets)
    return record


def _prepared(
    model: Model,
    batch_size: int,
    sequence_length: int | None,
    units: int | None,
    parts: int | None,
    routed: tuple[int, int] | None,
    context: int | None,
    where: str,
    like: Record | None,
) -> "_Step":
    """Return a step of the module, divided as one rank has it; arguments as of `record_step`. Needs fake tensors."""
    module = fake_module(model, where)
    module.train()
    chosen = layer_modules(module)
    length = (sequence_length or 0) // context if context else sequence_length
    inputs, targets = example_batch(model, batch_size=batch_size, sequence_length=length)
    _check_positions(module, sequence_length, where)
    modules = like.modules if like else _execution_order(module, list(chosen), inputs, targets, model, where)
    blocks = [name for name in modules if chosen[name]]
    record = Record(modules, blocks=set(blocks), autocast=model.traced_autocast)
    record.kernel_plans = like.kernel_plans if like else {}
    stand_in = _ReductionRecorder()
    if units:
        _slice_blocks(record, module, chosen, stand_in, units, parts, beside_experts=routed is not None)
    exchanged = stand_in.context(context) if context else None
    if exchanged is not None:
        divide_context(module, [module.get_submodule(name) for name in blocks], exchanged)
    if routed is not None:
        _divide_experts(record, module, stand_in, *routed)
    return _Step(record, module, inputs, targets, stand_in, exchanged.heads if exchanged is not None else frozenset())


@contextmanager
def _compiled(
    model: Model, module: nn.Module, record: Record, inputs: Tensor, apart: Record | None, where: str
) -> Iterator[None]:
    """Run the module's blocks as torch.compile does, for the duration of the context."""
    from gsreal.model_files.compiled import traced_as_compiled  # inductor takes seconds to import

    if not record.blocks:
        raise UserError(f"{where}: --compile: the module has no stack of blocks, which are compiled one by one")
    blocks = [module.get_submodule(name) for name in record.modules if name in record.blocks]
    for block in blocks if model.compiled_recompute != "none" else ():
        checkpoint_inside(block, model.compiled_recompute)
    with ExitStack() as stack:
        with _explained(where):
            others = apart.kernel_plans if apart else {}
            stack.enter_context(traced_as_compiled(blocks, lambda: module(inputs), record.kernel_plans, others))
        yield


def _divide_experts(record: Record, module: nn.Module, stand_in: "_ReductionRecorder", held: int, rows: int) -> None:
    """Let each layer hold `held` of its routed experts, which process `rows` rows; note its number of experts."""

    def note(layer: int, _inner: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        index = args[1] if len(args) > 1 else named["top_k_index"]
        record.experts_per_token[layer] = index.shape[1]

    for path, inner in experts_of(module):
        (layer,) = (i for i, name in enumerate(record.modules) if f"{path}.".startswith(f"{name}."))
        (record.experts if layer in record.units else record.units)[layer] = inner.gate_up_proj.shape[0]
        replace_experts(inner, range(held), _TracedExchange(stand_in, held, rows))
        inner.register_forward_pre_hook(partial(note, layer), with_kwargs=True)


@dataclass(frozen=True)
class _TracedExchange:
    """Stands in for the all-to-alls of divided experts: a rank holds `held` of them, which process `rows` rows."""

    stand_in: "_ReductionRecorder"
    held: int
    rows: int

    def share_counts(self, counts: Tensor) -> tuple[Tensor, Splits]:
        """Return the received tensor of counts, and the total rows that all senders send."""
        assert self.stand_in.recorder is not None
        received = self.stand_in.recorder.exchange(counts, "counts", len(counts))
        return received.view(-1, self.held), Splits([], [self.rows])

    def move(self, rows: Tensor, splits: Splits, *, back: bool) -> Tensor:
        """Return the received tensor of rows."""
        assert self.stand_in.recorder is not None
        if not splits.sent:  # the first dispatch, of all rows that this rank sends
            splits.sent.append(len(rows))  # type: ignore[attr-defined]
        (count,) = splits.sent if back else splits.received
        return self.stand_in.recorder.exchange(rows, "combine" if back else "dispatch", count)


class _ReductionRecorder:
    """Stands in for the sums over ranks, and passes them to the active recorder."""

    recorder: Recorder | None = None

    def record_with(self, recorder: Recorder) -> None:
        """Pass all later sums to `recorder`."""
        self.recorder = recorder

    def __call__(self, tensor: Tensor) -> Tensor:
        assert self.recorder is not None  # blocks are sliced for a record
        return self.recorder.reduce(tensor)

    def fixed(self, tensor: Tensor) -> Tensor:
        """Sum a tensor that has the same type in every precision."""
        assert self.recorder is not None
        return self.recorder.reduce(tensor, fixed=True)

    def parts(self, ranks: int) -> SequenceParts:
        """Return the division of sequences among `ranks` ranks; this rank is the first of them."""

        def received(kind: str, sent: Tensor) -> Tensor:
            assert self.recorder is not None
            return self.recorder.receive(sent, kind, ranks)

        return SequenceParts(ranks, 0, partial(received, "all-gather"), partial(received, "reduce-scatter"))

    def context(self, ranks: int) -> ContextParts:
        """Return the division of sequences among `ranks` ranks from embedding to loss; this rank is the first."""

        def received(sent: Tensor) -> Tensor:
            assert self.recorder is not None
            return self.recorder.receive(sent, "all-to-all", ranks)

        return ContextParts(ranks, 0, received)


def _slice_blocks(
    record: Record,
    module: nn.Module,
    chosen: dict[str, bool],
    stand_in: _ReductionRecorder,
    units: int,
    ranks: int | None,
    *,
    beside_experts: bool,
) -> None:
    """Slice each block to this number of units; note what was sliced, and which gradients are of parts of sequences.

    `ranks`: number of ranks that divide sequences between sliced parts of blocks, if they do. `beside_experts`: routed
    experts are divided among ranks, not sliced.
    """
    divided = stand_in.parts(ranks) if ranks else None
    sliced: dict[str, tuple[int, bool]] = {}
    """By name of a block: units of the whole block, and whether all sliced modules are linear maps."""
    for name, block in [(name, module.get_submodule(name)) for name, is_block in chosen.items() if is_block]:
        if beside_experts:
            cut_beside_experts(block)
        cut = cut_of(block)
        if cut is not None:
            sliced[name] = whole, _ = cut.units(block), is_linear(block, cut)
            held = [unit % whole for unit in range(units)]  # units are alike: a trace may have more than the block has
            # what one rank does is independent of the number of ranks
            slice_block(block, held, stand_in, ranks=2, parts=divided, reduce_fixed=stand_in.fixed)
    for layer, name in enumerate(record.modules):
        if name in sliced:
            record.units[layer], record.linear[layer] = sliced[name]
    if divided is not None:
        paths = [name for name in record.modules if chosen[name]]
        end = end_of_parts(record.modules, paths, module)
        record.summed = {*divide_sequences(paths, module, divided, end=end)}
    else:
        for name in sliced:
            parted = whole_with_parts(module.get_submodule(name))
            record.summed |= {f"{name}.{path}.{each}" for path, each in parted}


@contextmanager
def _blocks_without_values(model: Model, where: str, *, beside_experts: bool = False) -> Iterator[list[nn.Module]]:
    """Yield a model's blocks, of fake tensors; `beside_experts`: routed experts are not sliced but divided."""
    with without_values(model):
        module = fake_module(model, where)
        blocks = [module.get_submodule(name) for name, is_block in layer_modules(module).items() if is_block]
        for block in blocks if beside_experts else ():
            cut_beside_experts(block)
        yield blocks


def fewest_units(model: Model, where: str, *, beside_experts: bool = False) -> int:
    """Return the smallest number of units of the model's blocks; 0 if one cannot be sliced.

    `beside_experts`: routed experts are not sliced but divided among ranks.
    """
    with _blocks_without_values(model, where, beside_experts=beside_experts) as blocks:
        return min((cut.units(block) if (cut := cut_of(block)) else 0 for block in blocks), default=0)


def uncut_reason(model: Model, where: str) -> str | None:
    """Return why the model has no sliced layers, with the name of the module; None if it has no blocks."""
    with _blocks_without_values(model, where) as blocks:
        reasons = [cut for block in blocks if isinstance(cut := cut_or_reason(block), str)]
        if reasons or not blocks:
            return next(iter(reasons), None)
        units = min(known.units(block) for block in blocks if (known := cut_of(block)) is not None)
        kind = type(blocks[0]).__name__
        if units < 2:
            return f"{kind}: its heads (or groups that share keys) and its perceptron's width have no common divisor"
        return f"{kind}: what it does is no polynomial in its {units} units (heads, or groups that share keys)"


def experts_to_divide(model: Model, where: str) -> int:
    """Return the fewest experts of the model's layers of routed experts; 0 if ranks cannot divide them."""
    with without_values(model):
        module = fake_module(model, where)
        if divided_reason(module) is not None:
            return 0
        return min(inner.gate_up_proj.shape[0] for _, inner in experts_of(module))


def can_divide_sequences(model: Model, where: str, *, beside_experts: bool = False) -> bool:
    """Return whether ranks can divide the sequences between all slices of the model's blocks.

    `beside_experts`: routed experts are divided among ranks, not sliced.
    """
    with _blocks_without_values(model, where, beside_experts=beside_experts) as blocks:
        cuts = [cut_of(block) for block in blocks]
        return bool(cuts) and all(cut is not None and cut.gathered for cut in cuts)


def _check_positions(module: nn.Module, sequence_length: int | None, where: str) -> None:
    """Raise UserError if a Hugging Face model has no embedding for the last positions.

    Fake tensors do not detect that.
    """
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if sequence_length is not None and isinstance(longest, int) and sequence_length > longest:
        raise UserError(
            f"{where}: the config has max_position_embeddings = {longest}, but sequences of {sequence_length} tokens "
            "are asked for (input.maximum_sequence_length)"
        )


def _check_logits(logits: Tensor, targets: Tensor, model: Model, where: str) -> None:
    """Raise UserError unless a module has logits for each target, and of all classes.

    Fake tensors do not detect that there are fewer logits than classes.
    """
    source = model.input
    if logits.ndim < 2 or logits.numel() != targets.numel() * logits.shape[-1]:
        raise UserError(
            f"{where}: the module returns {'x'.join(map(str, logits.shape)) or 'a number'}, of {targets.numel()} "
            "targets: the loss is the cross-entropy of one row of logits for each target, and no other can be traced; "
            "wrap the module in one that ends so"
        )
    key = "classes" if source.classes is not None else "vocabulary"
    needed = getattr(source, key)
    if logits.shape[-1] < needed:
        raise UserError(f"{where}: the module has logits for {logits.shape[-1]} classes, but input.{key} = {needed}")


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Raise exceptions of a forward as UserErrors."""
    try:
        yield
    except (UnknownOperationError, NoPolynomialError):
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise UserError(
            f"{where}: what the module does depends on the values of its tensors ({error}), and a trace has none; of "
            "Hugging Face's experts, experts_implementation = 'grouped_mm' does not"
        ) from None
    except Exception as error:
        raise UserError(
            f"{where}: the module's forward or loss fails on the stated input: {first_line(error)}"
        ) from error


def _execution_order(
    module: nn.Module, chosen: list[str], inputs: Tensor, targets: Tensor, model: Model, where: str
) -> list[str]:
    """Return the chosen modules at which a layer begins, in execution order.

    Modules whose inputs carry no gradient (parallel embeddings) belong to the layer of the first of them. Layers are
    those that the module has when all of it is trained, so frozen parameters require gradients meanwhile.
    """
    order: list[str] = []
    inner = dict(module.named_modules())
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)

    def before(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            carrying = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
            if carrying or not order:
                order.append(name)

        return hook

    handles = [inner[name].register_forward_pre_hook(before(name), with_kwargs=True) for name in chosen]
    with _explained(where):
        output = module(inputs)
        logits = logits_of(output)
    if model.module.hugging_face is not None and not hasattr(output, "logits"):
        raise UserError(
            f"{where}: module.hugging_face.auto_class = '{model.module.hugging_face.auto_class}': has no head"
        )
    _check_logits(logits, targets, model, where)
    with _explained(where):
        loss = loss_of(logits, targets)
    if not loss.requires_grad:
        raise UserError(f"{where}: the module has no parameters to train")
    for handle in handles:
        handle.remove()
    for parameter in frozen:
        parameter.requires_grad_(False)
    twice = {name for name in order if order.count(name) > 1}
    # what has no parameters is then part of the layers before its runs, such as two kinds of rotary angles (Gemma 3)
    order = [name for name in order if name not in twice or any(True for _ in inner[name].parameters())]
    twice &= {*order}
    if twice:
        raise UserError(f"{where}: the module {sorted(twice)[0]!r} runs more than once in a forward; not supported")
    return order


def known_storages(module: nn.Module, *tensors: Tensor) -> set[int]:
    """Return the storages that exist before a step, by address."""
    known = [*module.parameters(), *module.buffers(), *tensors]
    return {tensor.untyped_storage()._cdata for tensor in known}


@dataclass(frozen=True)
class _Step:
    """A step that is run several times under fake tensors; each time other facts of it are recorded."""

    record: Record
    module: nn.Module
    inputs: Tensor
    targets: Tensor
    stand_in: _ReductionRecorder
    heads: AbstractSet[int]
    """Numbers of heads that the forwards of attentions exchange among ranks; empty where they do not."""

    def recorder(self, record: Record) -> Recorder:
        """Return a recorder into `record`, to which sums over ranks are passed from now on."""
        known = known_storages(self.module, self.inputs, self.targets)
        self.stand_in.recorder = recorder = Recorder(record, known)
        return recorder

    def record_saved(self, where: str) -> None:
        """Record the unique storages that autograd saves, the work before the last of them, and each layer's output."""
        record, module = self.record, self.module
        known = known_storages(module, self.inputs, self.targets)
        seen: set[int] = set()
        numbers: dict[int, int] = {}
        """Index of each storage among those that the forward creates, by its `id`."""
        keep = []
        recorder = self.recorder(Record(record.modules, record.blocks))
        record.saved.clear()
        record.saved_storages.clear()
        record.output.clear()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in seen:
                seen.add(storage._cdata)
                keep.append(storage)  # so that no other storage gets its address
                record.saved[recorder.layer] += storage.nbytes()
                born = recorder.record.alive
                numbers.update((id(born[number]), number) for number in range(len(numbers), len(born)))
                number = numbers.get(id(recorder.live.get(storage._cdata)), -1)
                record.saved_storages[recorder.layer].append(number)
            if recorder.layer not in record.output:  # the layer's module has not returned yet
                record.until_saved[recorder.layer] = recorder.again()
                record.saved_after[recorder.layer] = len(recorder.record.counted[recorder.layer, "f"])
            return tensor

        hooks, cast = saved_tensors_hooks(pack, lambda tensor: tensor), autocast(record.autocast)
        boundaries = layer_boundaries(module, record.modules, enter=recorder.enter)
        with recorder, boundaries as out, self.noting_outputs(where), hooks, cast:
            loss = loss_of(out(logits_of(module(self.inputs))), self.targets)
            record.output[len(record.modules)] = loss.numel() * loss.element_size()
        module.zero_grad(set_to_none=True)

    @contextmanager
    def noting_outputs(self, where: str) -> Iterator[None]:
        """Record the size of each layer's output in a forward within this context; raise its failures as UserError."""

        def note(_module: nn.Module, _args: Any, output: Any, layer: int) -> None:
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            self.record.output[layer] = sum(t.numel() * t.element_size() for t in tensors[:1])

        handles = [
            self.module.get_submodule(name).register_forward_hook(partial(note, layer=layer))
            for layer, name in enumerate(self.record.modules)
        ]
        with _explained(where):
            yield
        for handle in handles:
            handle.remove()

    def record_operations(self, where: str, like: Record | None) -> None:
        """Record every operation and every storage of one forward and backward.

        `like`: a record at another shape, whose saved storages are taken over; None: `record_saved` has run.
        """
        record, recorder = self.record, self.recorder(self.record)
        if like is None:
            record_backward(recorder, self.module, self.inputs, self.targets)
        else:
            recorder.saved_after = record.saved_after = dict(like.saved_after)
            for layer, operations in like.saved_after.items():
                if not operations:
                    record.until_saved[layer] = {"full": Work(), **dict.fromkeys(SELECTIVE, Work())}
            # torch asks for a parameter's device when it makes the node that accumulates its gradient, and the recorder
            # counts that: the nodes exist already in the first record, and so they do here
            nodes = [each.view_as(each).grad_fn for each in self.module.parameters() if each.requires_grad]
            forward = self.noting_outputs(where)
            record_backward(recorder, self.module, self.inputs, self.targets, forward=forward)
            del nodes
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                layer = recorder.first_use.get(parameter.untyped_storage()._cdata, 0)
                record.frozen[name] = (layer, tuple(parameter.shape))
            elif parameter.grad is None:
                raise UserError(f"{where}: the parameter {name!r} gets no gradient (unused or frozen); not supported")
        if not record.parameters:
            raise UserError(f"{where}: the module has no parameters to train: all are frozen")
        if like is not None:  # last: another forward, where it is needed, drops the gradients
            self._sum_saved(like, where)

    def _sum_saved(self, like: Record, where: str) -> None:
        """Record the bytes of the storages that autograd saves: of the same storages as in `like`, at another shape.

        If the two forwards create different storages, another forward is run to find the saved ones.
        """
        record = self.record
        created, others = ([each for each in of.alive if each.born[1] == "f"] for of in (record, like))
        numbers = like.saved_storages
        if len(created) != len(others) or any(-1 in each for each in numbers.values()):
            self.record_saved(where)
            return
        record.saved_storages = numbers
        for layer, saved in numbers.items():
            record.saved[layer] = sum(created[number].size_bytes for number in saved)

    def record_unsaved(self, like: Record | None) -> None:
        """Record when a forward's tensors would be freed if autograd saved nothing, or take that from `like`.

        That is the case in the forward of a checkpointed block.
        """
        record = self.record
        if like is not None:
            if len(like.alive) == len(record.alive):  # else the operations depend on the shape: it cannot be fitted
                for alive, other in zip(record.alive, like.alive, strict=True):
                    alive.unsaved = other.unsaved
            return
        seen = Record(record.modules, record.blocks)
        hooks = saved_tensors_hooks(lambda _tensor: None, lambda _nothing: _nothing)
        recorder, cast = self.recorder(seen), autocast(record.autocast)
        with recorder, hooks, layer_boundaries(self.module, record.modules, enter=recorder.enter) as out, cast:
            loss_of(out(logits_of(self.module(self.inputs))), self.targets)
        created = [alive for alive in record.alive if alive.born[1] == "f"]
        # positions differ by views, numbers of operations and collectives do not
        layers = range(len(record.modules) + 1)
        ours, theirs = ([each.forward_positions(layer) for layer in layers] for each in (record, seen))
        for alive, again in zip(created, seen.alive, strict=True):
            if again.freed is not None and again.freed[:2] == again.born[:2]:
                layer, _, position = again.freed
                alive.unsaved = ours[layer][bisect_right(theirs[layer], position) - 1]

    def record_needed(self, like: Record | None) -> None:
        """Record how many storages a layer's backward creates before it needs a saved tensor, or take that from `like`.

        A checkpointed block recomputes its forward only at that moment.
        """
        record = self.record
        if like is not None or record.kernel_plans:  # a compiled block is one node, which needs all saved at once
            record.before_saved = like.before_saved if like is not None else {}
            return
        created: dict[int, int] = {}
        recorder = self.recorder(Record(record.modules, record.blocks, autocast=record.autocast))

        def unpack(tensor: Tensor) -> Tensor:
            if recorder.phase == "b":
                place = (recorder.layer, "b")
                created.setdefault(recorder.layer, sum(alive.born[:2] == place for alive in recorder.record.alive))
            return tensor

        self.module.zero_grad(set_to_none=True)
        with saved_tensors_hooks(lambda tensor: tensor, unpack):
            record_backward(recorder, self.module, self.inputs, self.targets)
        record.before_saved = created


def record_backward(
    recorder: Recorder,
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    forward: AbstractContextManager[None] | None = None,
) -> None:
    """Record a forward, in the context `forward`, and the backward of the parameters that require gradients, if any.

    To be called under fake tensors, with a module whose parameters have no gradients yet. Gradients are not in the
    record's `alive`, but in its `parameters`, with the moments at which each is created and is ready.
    """
    record = recorder.record
    ready: dict[str, tuple[int, str, int]] = {}
    handles = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:

            def note_ready(_parameter: Tensor, name: str = name) -> None:
                ready[name] = recorder.now()

            handles.append(parameter.register_post_accumulate_grad_hook(note_ready))
    with recorder, layer_boundaries(module, record.modules, enter=recorder.enter, take=recorder.take) as out:
        with forward or nullcontext(), autocast(record.autocast):
            loss = loss_of(out(logits_of(module(inputs))), targets)
        record.output[len(record.modules)] = loss.numel() * loss.element_size()
        if handles:
            recorder.enter(len(record.modules), "b")
            loss.backward()
    for handle in handles:
        handle.remove()
    gradients = set()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            alive = recorder.live[parameter.grad.untyped_storage()._cdata]
            gradients.add(id(alive))
            layer = recorder.first_use.get(parameter.untyped_storage()._cdata, 0)
            record.parameters[name] = (layer, tuple(parameter.shape), alive.born, ready[name])
    record.alive = [alive for alive in record.alive if id(alive) not in gradients]
