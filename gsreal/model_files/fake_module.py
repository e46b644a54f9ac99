"""Modules of fake tensors, as one rank has them: whole, or with its slices of blocks, its experts, and its parts of
sequences. What stands in for the exchanges with other ranks passes them to a recorder.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from gsreal.methods.context_parallel import ContextParts
from gsreal.methods.cuts import cut_beside_experts, cut_of, cut_or_reason, is_linear
from gsreal.methods.experts import Splits, divided_reason, experts_of, replace_experts
from gsreal.methods.tensor_slices import (
    SequenceParts,
    TensorExchanges,
    divide_sequences,
    end_of_parts,
    slice_block,
    whole_with_parts,
)
from gsreal.model_files.build import DTYPES, build_module, sequences_not_packed
from gsreal.model_files.layers import layer_modules
from gsreal.model_files.lstm import workspace_parts
from gsreal.model_files.recorder import Record, Recorder
from gssim.errors import UserError
from gssim.workload import Model

aten = torch.ops.aten
GROUPED_PRODUCT, LINSPACE = aten._grouped_mm.default, aten.linspace.default
LSTM, LSTM_BACKWARD = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention.default


def fake_module(model: Model, where: str) -> nn.Module:
    """Return the module, made without the one of torch's initialisers that reads values: fake tensors have none.

    Values of `torch.linspace` are kept: image models read the drop-path rate of each block from it.
    """
    unread = mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_args, **_settings: tensor)
    # up to this size, torch's fake tensors keep the values of constants and of what is computed from them alone
    kept = mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_READ)
    # a module that its constructor casts (`self.double()`, or to another memory format) swaps fake parameters for new
    # ones; torch refuses those with weak references, as fake tensors have by which their constants are tracked
    swapped = mock.patch("torch.utils.weakref.getweakrefs", return_value=[])
    with unread, kept, swapped, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch does, to copy a parameter
        module = build_module(model.module, where=where)
    for path, inner in module.named_modules():
        if isinstance(inner, nn.SyncBatchNorm):
            raise UserError(
                f"{where}: the module '{path}' is a SyncBatchNorm: it exchanges statistics with other ranks, which a "
                "trace does not see, and torch runs it on GPUs only; use a BatchNorm, or another norm"
            )
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

    Memory-efficient attention saves one fp32 log-sum-exp for each query here. Its kernel rounds their number up to a
    multiple of 32, which is no polynomial in the length: at most 124 bytes more for each head and sample.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Attributes of this mode's fake tensors that need no gradient, by device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as `Recorder` does."""
        return False

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_FakeTensors":
        """Return the mode itself: a module that copies another (nn.TransformerEncoder) copies its tensors with all that
        they refer to, and tensors of two modes cannot be combined.
        """
        return self

    def _prep_args_for_hash(self, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]) -> None:
        """Append an operation's arguments to the key under which torch caches what its result looks like.

        Torch flattens all that it knows of a tensor, number by number, which took a fifth of a trace's time. Of dense
        tensors without symbolic sizes, and of plain values, the same is appended here as a whole.
        """
        if not isinstance(args, (list, tuple)):
            super()._prep_args_for_hash(result, args, state, id_hashed_objects)
            return
        result.append((type(args), len(args)))
        for argument in args:
            kind = type(argument)
            if kind in PLAIN:
                result.append((kind, argument))  # 1 and 1.0 are equal, but not what they give
            elif kind is FakeTensor and is_plain(argument) and self.is_our_fake(argument):
                result.append(metadata_key(argument))
            elif kind in (list, tuple):
                self._prep_args_for_hash(result, argument, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (argument,), state, id_hashed_objects)

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        """Return a tensor of the cached metadata, as torch does.

        Torch's constructor sets the attributes of a new fake tensor one by one, which took a seventh of a trace's time.
        Those of dense tensors without symbolic sizes are here copied from one that the constructor has made.
        """
        like = entry.metadata
        if entry.inplace_idx is not None or like is None or like.layout is not torch.strided or self.shape_env:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        if like.is_conj or like.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(
                like.shape, like.stride, dtype=like.dtype, device="meta", requires_grad=like.requires_grad
            )
            if entry.view_idx is not None:
                made.set_(args[entry.view_idx].untyped_storage(), like.storage_offset, like.shape, like.stride)
            return self._with_device(made, like.device)

    def _with_device(self, made: Tensor, device: torch.device) -> FakeTensor:
        """Return a tensor of the device `meta` as one of this mode that is on another device."""
        attributes = self._attributes.get(device)
        if attributes is None:
            found = FakeTensor(self, made, device)
            self._attributes[device] = {name: value for name, value in vars(found).items() if name != "fake_mode"}
            return found
        found = Tensor._make_subclass(
            FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(found)
        else:
            torch._C._set_throw_on_mutable_data_ptr(found)
        found.fake_mode = self
        vars(found).update(attributes)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is GROUPED_PRODUCT and args[0].dtype in (torch.float32, torch.float16):
            with self:
                return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
        # without torch's guard against compiling, and its debug log, which took a tenth of a trace's time
        of_torch = func in OF_TORCH or not self.cache_enabled
        result: Any = (self.dispatch if of_torch else self._cached_dispatch_impl)(func, types, args, kwargs)
        if func is LINSPACE and result.numel() <= fake_tensor.CONSTANT_NUMEL_LIMIT:
            with unset_fake_temporarily():
                result.constant = func(*args, **kwargs)
        if func is LSTM:
            with self:  # empty where nothing is kept for a backward
                return *result[:3], torch.empty(sum(workspace_parts(func, args)), dtype=torch.uint8)
        if func is LSTM_BACKWARD:
            with self:  # torch's shape function returns one gradient for both biases, the kernel two
                return *result[:4], result[3].clone(), *result[5:]
        if func is EFFICIENT_ATTENTION:
            with self:
                return result[0], torch.empty(args[0].shape[:3], dtype=torch.float32), *result[2:]
        if func in LAYOUTS:
            with self:
                return LAYOUTS[func](result, *args)
        return result


PLAIN = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout})
"""Types of values that can be part of a key as they are."""


def is_plain(tensor: FakeTensor) -> bool:
    """Return whether a fake tensor is dense, of known sizes, and without known values."""
    return tensor.layout is torch.strided and not tensor._has_symbolic_sizes_strides and tensor.constant is None


def metadata_key(tensor: FakeTensor) -> tuple[Any, ...]:
    """Return the metadata of a fake tensor that `is_plain` on which an operation's result may depend, as a cache key.

    These are the fields of torch's TensorMetadata that do not follow from others.
    """
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.device,
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def _contiguous(result: Any, *_args: Any) -> Any:
    """Return an operation's results with the first one, if it is computed, contiguous, as the kernel writes it."""
    if isinstance(result, Tensor):
        return result.contiguous()
    return None if result[0] is None else result[0].contiguous(), *result[1:]


def _as_product(_result: Tensor, gradient: Tensor, *others: Any) -> Tensor:
    """Return the gradient of an operation on elements laid out as the kernel does: as a product with the activation."""
    return gradient * next(each for each in others if isinstance(each, Tensor))


def _as_input(result: Any, *args: Any, place: int) -> Any:
    """Return a batch norm's results with the first one in the memory format of its input, argument number `place`."""
    form = suggest_memory_format(args[place])
    return None if result[0] is None else result[0].contiguous(memory_format=form), *result[1:]


LAYOUTS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten._weight_norm_interface.default: _contiguous,
    aten.hardswish_backward.default: _as_product,
    aten.softplus_backward.default: _as_product,
    aten.elu_backward.default: _as_product,
    aten.native_batch_norm.default: partial(_as_input, place=0),
    aten.native_batch_norm_backward.default: partial(_as_input, place=1),
}
"""Operations whose results torch's fake tensors lay out in another way than kernels do, where operands are transposed.
A later view of the result is then a copy in the trace alone, or in the run alone."""


OF_TORCH = frozenset({*fake_tensor._DISPATCH_META_HANDLERS, *fake_tensor._DISPATCH_HANDLE_DIRECTLY})
"""Questions about a tensor that torch's fake tensors answer without an operation."""
MOST_READ = 4096
"""Elements of the largest tensors of which a module's construction may read values."""


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
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    if logger.level != logging.CRITICAL:  # to set it makes every logger look up its level anew: thousands, with torch's
        logger.setLevel(logging.CRITICAL)
    with _FakeTensors(allow_non_fake_inputs=False), traced_precision(model), whole:
        yield


class Exchanges:
    """Stands in for the sums over ranks, and other exchanges with them, and passes them to the active recorder."""

    _recorder: Recorder | None = None

    def record_with(self, recorder: Recorder) -> None:
        """Pass all later exchanges to `recorder`."""
        self._recorder = recorder

    @property
    def recorder(self) -> Recorder:
        """The active recorder, which `record_with` sets before a divided module runs."""
        assert self._recorder is not None
        return self._recorder

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        return self.recorder.reduce(tensor)

    def fixed(self, tensor: Tensor) -> Tensor:
        """Sum a tensor that has the same type in every precision."""
        return self.recorder.reduce(tensor, fixed=True)

    def parts(self, ranks: int) -> SequenceParts:
        """Return the division of sequences among `ranks` ranks; this rank is the first of them."""

        def received(kind: str, sent: Tensor) -> Tensor:
            return self.recorder.receive(sent, kind, ranks)

        return SequenceParts(ranks, 0, partial(received, "all-gather"), partial(received, "reduce-scatter"))

    def context(self, ranks: int) -> ContextParts:
        """Return the division of sequences among `ranks` ranks from embedding to loss; this rank is the first."""

        def received(sent: Tensor) -> Tensor:
            return self.recorder.receive(sent, "all-to-all", ranks)

        return ContextParts(ranks, 0, received)


@dataclass(frozen=True)
class _TracedExchange:
    """Stands in for the all-to-alls of divided experts: a rank holds `held` of them, which process `rows` rows."""

    stand_in: Exchanges
    held: int
    rows: int

    def share_counts(self, counts: Tensor) -> tuple[Tensor, Splits]:
        """Return the received tensor of counts, and the total rows that all senders send."""
        received = self.stand_in.recorder.exchange(counts, "counts", len(counts))
        return received.view(-1, self.held), Splits([], [self.rows])

    def move(self, rows: Tensor, splits: Splits, *, back: bool) -> Tensor:
        """Return the received tensor of rows."""
        if not splits.sent:  # the first dispatch, of all rows that this rank sends
            splits.sent.append(len(rows))  # type: ignore[attr-defined]
        (count,) = splits.sent if back else splits.received
        return self.stand_in.recorder.exchange(rows, "combine" if back else "dispatch", count)


def slice_blocks(
    record: Record,
    module: nn.Module,
    chosen: dict[str, bool],
    stand_in: Exchanges,
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
    # what one rank does is independent of the number of ranks
    exchanges = TensorExchanges(2, stand_in, parts=divided, reduce_fixed=stand_in.fixed)
    sliced: dict[str, tuple[int, bool]] = {}
    """By name of a block: units of the whole block, and whether all sliced modules are linear maps."""
    for name, block in [(name, module.get_submodule(name)) for name, is_block in chosen.items() if is_block]:
        if beside_experts:
            cut_beside_experts(block)
        cut = cut_of(block)
        if cut is not None:
            sliced[name] = whole, _ = cut.units(block), is_linear(block, cut)
            held = [unit % whole for unit in range(units)]  # units are alike: a trace may have more than the block has
            slice_block(block, held, exchanges)
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


def divide_experts(record: Record, module: nn.Module, stand_in: Exchanges, held: int, rows: int) -> None:
    """Let each layer hold `held` of its routed experts, which process `rows` rows; note its number of experts."""

    def note(layer: int, _inner: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        index = args[1] if len(args) > 1 else named["top_k_index"]
        record.experts_per_token[layer] = index.shape[1]

    for path, inner in experts_of(module):
        (layer,) = (i for i, name in enumerate(record.modules) if f"{path}.".startswith(f"{name}."))
        (record.experts if layer in record.units else record.units)[layer] = inner.gate_up_proj.shape[0]
        replace_experts(inner, range(held), _TracedExchange(stand_in, held, rows))
        inner.register_forward_pre_hook(partial(note, layer), with_kwargs=True)


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
    """Return how many equal parts the block with the fewest can be cut into (by heads, say); 0: one cannot be cut.

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
