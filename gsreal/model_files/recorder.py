"""Records the operations of one training step under fake tensors: FLOP, bytes, and lives of storages.

FLOP are those of matrix products, convolutions, attention and LSTMs; all other operations are costed by the bytes they
move. Every operation on floating-point numbers either has a FLOP formula, or is known to be bound by the bytes it
moves. Any other operation is refused: it would count as free, however much it computes.
"""

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from gsreal.methods.blocks import PRODUCTS, SELECTIVE, is_kept
from gsreal.model_files.lstm import workspace_parts
from gsreal.model_files.operand_casts import operand_casts
from gssim.units import Recompute

aten = torch.ops.aten
prim_device = torch.ops.prim.device.default


class NoPolynomialError(Exception):
    """A quantity is not a polynomial in batch size and sequence length."""


class UnknownOperationError(Exception):
    """An operation on floating-point numbers with an unknown number of FLOP."""


# torch counts no FLOP for the operations on the left; their first arguments are those of the counted ones on the right
ALIASES = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable: aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: (
        aten._scaled_dot_product_efficient_attention_backward
    ),
    aten._addmm_activation: aten.addmm,
}


def _grouped_product_flop(a: Tensor, b: Tensor, *_rest: Any, **_settings: Any) -> int:
    """Return the FLOP of a grouped product: the rows (or columns) of each group times the matrix of that group.

    Each row of `a` belongs to one group, so the groups' sizes do not matter. If `a` and `b` both have two dimensions,
    groups divide the common one, as in the gradient of the groups' matrices.
    """
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    rows, common, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    return 2 * batch * rows * common * columns


def _convolution_backward_flop(gradient: Tensor, inputs: Tensor, weight: Tensor, *rest: Any, **_settings: Any) -> int:
    """Return the FLOP of the gradients of input and weight: each takes as many as the forward.

    torch's own formula treats the weight's gradient of a grouped convolution as that of an ungrouped one.
    """
    transposed, wanted = rest[4], rest[7]
    places = (inputs if transposed else gradient).shape
    return sum(wanted[:2]) * 2 * places[0] * prod(places[2:]) * prod(weight.shape)


def _lstm_flop(inputs: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_rest: Any, **_settings: Any) -> int:
    """Return the FLOP of one direction of an LSTM's layer: each sample's input and state, times the gates' weights."""
    places = prod(inputs.shape[:2])
    return 2 * places * (input_weight.numel() + hidden_weight.numel())


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mkldnn_rnn_layer: _lstm_flop,
    aten.mkldnn_rnn_layer_backward: lambda *of_forward, **_settings: 2 * _lstm_flop(*of_forward[:3]),
    aten._grouped_mm: _grouped_product_flop,
    aten.convolution_backward: _convolution_backward_flop,
    aten.mv: lambda a, *_rest, **_settings: 2 * a.numel(),
    aten.addmv: lambda _bias, a, *_rest, **_settings: 2 * a.numel(),
    aten.dot: lambda a, *_rest, **_settings: 2 * a.numel(),
    aten.vdot: lambda a, *_rest, **_settings: 2 * a.numel(),
    aten.addbmm: lambda _bias, a, b, *_rest, **_settings: 2 * prod(a.shape) * b.shape[-1],
}
"""FLOP formulas of operations that torch's counter lacks or miscounts; they take tensors."""

# without leading and trailing underscores, and without the suffixes below
SUFFIXES = ("_backward_data", "_backward", "_forward", "_functional", "_copy", "_impl")
FAMILIES = (
    *("adaptive_avg_pool", "adaptive_max_pool", "assert", "avg_pool", "batch_norm", "embedding_bag", "empty", "fake"),
    *("fractional_max_pool", "functional_assert", "grid_sampler_", "max_pool", "max_unpool", "native_batch_norm"),
    *("new_", "rand", "reflection_pad", "replication_pad", "unique", "upsample_"),
)
"""Name prefixes of operations that are bound by the bytes they move."""
BOUND_BY_BYTES = (
    # made, filled, drawn
    "arange bernoulli cauchy complex exponential eye fill full full_like geometric linspace log_normal logspace "
    "multinomial normal ones ones_like poisson polar scalar_tensor uniform zero zeros zeros_like "
    # moved
    "alias as_strided as_strided_scatter block_diag cat channel_shuffle chunk_cat clone col2im constant_pad_nd copy "
    "detach diag_embed diagonal diagonal_scatter embedding embedding_dense embedding_renorm expand flip gather im2col "
    "index index_add index_copy index_fill index_put index_reduce index_select lift_fresh masked_fill masked_scatter "
    "masked_select narrow nonzero nonzero_static permute pin_memory pixel_shuffle pixel_unshuffle put repeat "
    "repeat_interleave reshape resize resize_as roll rot90 scatter scatter_add scatter_reduce select select_scatter "
    "slice slice_scatter split split_with_sizes squeeze stack t take to to_copy trace transpose tril triu unbind "
    "unfold unsafe_index unsafe_index_put unsafe_masked_index unsafe_masked_index_put_accumulate unsafe_split "
    "unsafe_split_with_sizes unsafe_view unsqueeze view view_as_complex view_as_real "
    # element by element
    "addr amp_update_scale dequantize dropout elu fused_dropout gelu glu hardshrink hardsigmoid hardswish hardtanh "
    "leaky_relu local_scalar_dense log_sigmoid masked_scale native_dropout prelu_kernel rrelu_with_noise rsub softplus "
    "softshrink threshold "
    # norms, softmax, losses
    "binary_cross_entropy binary_cross_entropy_with_logits cudnn_batch_norm fused_rms_norm huber_loss log_softmax "
    "masked_softmax miopen_batch_norm mse_loss multi_margin_loss multilabel_margin_loss native_group_norm "
    "native_layer_norm native_norm nll_loss nll_loss2d renorm safe_softmax smooth_l1_loss soft_margin_loss softmax "
    "weight_norm_interface "
    # reductions, scans, sorts
    "all allclose amax amin aminmax any argmax argmin bincount bucketize count_nonzero cummax cummax_helper cummin "
    "cummin_helper cumprod cumsum dist equal fused_sdp_choice histc is_all_true is_any_true isin kthvalue "
    "linalg_cross linalg_vector_norm logcumsumexp logsumexp max mean median min mode nanmedian nansum norm prod "
    "searchsorted sort std std_mean sum topk var var_mean"
)
"""Operations that are bound by the bytes they move, in addition to those that torch tags as pointwise."""
NAMES = frozenset(BOUND_BY_BYTES.split())
TAGS = {tag for tag in (torch.Tag.pointwise, getattr(torch.Tag, "reduction", None)) if tag is not None}


def flop_of(func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[Tensor]) -> int:
    """Return the FLOP of one operation; `tensors`: its inputs and outputs. Raises UnknownOperationError."""
    packet = ALIASES.get(func._overloadpacket, func._overloadpacket)
    if packet in FORMULAS:
        return FORMULAS[packet](*args, **kwargs)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if is_bound_by_bytes(func) or not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return 0
    raise UnknownOperationError(
        f"the operation {func._overloadpacket} does an unknown number of FLOP; where the module is defined, state it "
        "with torch.utils.flop_counter.register_flop_formula (0, where its time depends on the bytes that it moves)"
    )


def is_bound_by_bytes(func: Any) -> bool:
    """Return whether an operation's time is that of the bytes it reads and writes."""
    if func.namespace not in ("aten", "prims", "prim"):
        return False
    if TAGS & set(func.tags):
        return True
    name = func._overloadpacket.__name__.strip("_")
    if name.startswith("foreach_"):
        return name != "foreach_mm"
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name in NAMES or name.startswith(FAMILIES)


@dataclass
class StorageLife:
    """One storage that an operation created, with the absolute moments (layer, phase, position) of its life."""

    size_bytes: int
    born: tuple[int, str, int]
    freed: tuple[int, str, int] | None = None
    unsaved: int | None = None
    """Position of its own layer's forward at which it would be freed if autograd did not save it."""
    replaced_next: bool = False
    """Whether the module keeps it until its next forward makes another."""
    handed_on: tuple[int, str, int] | None = None
    """When it would be freed if autograd did not save it, if it is one of several storages that a block returns to
    later layers; else None."""
    fixed: bool = False
    """Whether it holds integers or truth values, whose size is the same in every precision."""
    casts_input: bool = False
    """Whether it is torch.autocast's copy of the layer's input in 16 bits."""
    casts_parameter: bool = False
    """Whether it is torch.autocast's copy of a parameter in 16 bits, which it keeps to the end of the forward."""
    casts_operand: bool = False
    """Whether a CPU makes it inside an operation, as a copy of an operand; see `operand_casts`."""
    summed_in_place: bool = False
    """Whether it is a gradient to which autograd adds another in place, or a product to which a linear map adds its
    bias in place; the trace has the sum in a new storage."""
    parts: tuple[int, ...] = ()
    """Bytes of its parts, if a run rounds each of several parts up to pages; `size_bytes` is their sum."""


@dataclass(slots=True)  # not frozen: a trace makes several for each operation, which then takes a third of the time
class Work:
    """FLOP, bytes and number of operations. Nothing changes one: a sum is another."""

    flop: int = 0
    bytes_moved: int = 0
    operations: int = 0
    streamed: int = 0
    """The part of `bytes_moved` that belongs to operations without FLOP.

    These are all but matrix products, convolutions and attention. Operations that only return their input's storage
    move nothing: `_unsafe_view`, for example, which torch does not call a view.
    """

    def __add__(self, other: "Work") -> "Work":
        """Return the sum of both."""
        return Work(
            self.flop + other.flop,
            self.bytes_moved + other.bytes_moved,
            self.operations + other.operations,
            self.streamed + other.streamed,
        )

    def times(self, count: int) -> "Work":
        """Return the work of `count` repetitions."""
        return Work(count * self.flop, count * self.bytes_moved, count * self.operations, count * self.streamed)


class SliceCollective(NamedTuple):
    """Collective over the ranks that share a sliced block."""

    at: tuple[int, str, int]
    """Its moment: layer, phase, position."""
    size_bytes: int
    kind: str
    fixed: bool = False
    """Whether its size is the same in every precision."""


@dataclass
class Record:
    """Record of one traced step, per layer index."""

    modules: list[str]
    blocks: set[str]
    autocast: str | None = None
    """Precision of torch.autocast in the forward."""
    flop: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    uncast_flop: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    """The part of `flop` that runs in fp32 though autocast has another precision."""
    bytes_moved: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    streamed: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    """The part of `bytes_moved` that belongs to operations without FLOP."""
    operations: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    saved: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    output: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    until_saved: dict[int, dict[Recompute, Work]] = field(default_factory=dict)
    """By layer and kind of checkpointing: recomputed work of its forward, up to the last tensor that autograd saves."""
    saved_storages: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By layer: the storages that autograd saves, as indices of those that the forward creates; -1: another."""
    saved_after: dict[int, int] = field(default_factory=dict)
    """By layer: number of operations of its forward before the last tensor that autograd saves."""
    before_saved: dict[int, int] = field(default_factory=dict)
    """Number of storages that a layer's backward creates before it needs the first tensor that autograd saved."""
    counted: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    """Positions of operations (not views), by layer and phase."""
    names: dict[tuple[int, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    """Names of these operations."""
    by_operation: dict[int, dict[str, Work]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Work)))
    """By layer: name of an operation -> its work, forward and backward."""
    kept: dict[tuple[int, Recompute], list[int]] = field(default_factory=lambda: defaultdict(list))
    """By layer and kind of checkpointing: positions of the operations whose outputs it keeps."""
    overwritten: set[int] = field(default_factory=set)
    """Layers that change the output of a compute-heavy operation in place, so that it cannot be saved."""
    alive: list[StorageLife] = field(default_factory=list)

    def recompute_after(self, layer: int) -> int:
        """Return the number of positions of a layer's backward up to the last storage of `before_saved`; 0: none."""
        moments = [alive.born for alive in self.alive] + [born for _, _, born, _ in self.parameters.values()]
        positions = sorted(position for at, phase, position in moments if (at, phase) == (layer, "b"))
        number = self.before_saved.get(layer, 0)
        return positions[number - 1] + 1 if number else 0

    def forward_positions(self, layer: int) -> list[int]:
        """Return the positions of a layer's forward at which it runs operations (not views) or collectives.

        What a collective sends, and what the callers hold meanwhile, lives until it returns.
        """
        collectives = (each.at[2] for each in self.reductions.get(layer, ()) if each.at[1] == "f")
        return sorted({*self.counted[layer, "f"], *collectives})

    def position_at_end(self, layer: int) -> int:
        """Return the position of the last operation (not view) of a layer's forward."""
        return self.counted[layer, "f"][-1]

    parameters: dict[str, tuple[int, tuple[int, ...], tuple[int, str, int], tuple[int, str, int]]] = field(
        default_factory=dict
    )
    """Name -> (layer of first use, shape, gradient born, gradient ready)."""
    frozen: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Name of a parameter that is not trained -> (layer of first use, shape)."""
    units: dict[int, int] = field(default_factory=dict)
    """By layer: units of a sliced block; of a whole layer with divided experts, the number of experts."""
    experts: dict[int, int] = field(default_factory=dict)
    """By layer: the number of experts, for sliced blocks whose experts are divided."""
    experts_per_token: dict[int, int] = field(default_factory=dict)
    """By layer: the experts that each token is routed to, where experts are divided."""
    linear: dict[int, bool] = field(default_factory=dict)
    """By layer: whether all sliced modules of a sliced block are linear maps."""
    reductions: dict[int, list[SliceCollective]] = field(default_factory=lambda: defaultdict(list))
    """By layer: every collective among the ranks that divide it."""
    kernel_plans: dict[int, Any] = field(default_factory=dict)
    """Inductor's decisions for compiled blocks that depend on sizes (`compiled.KernelPlan`), by number of the graph."""
    summed: set[str] = field(default_factory=set)
    """Names of the parameters whose gradients come from only a part of the sequence."""


STORAGE_HOLDERS, TENSOR_HOLDERS = 2, 4
"""Numbers of references to a gradient's storage, and to the gradient, if nothing but autograd uses it while a dispatch
mode has it as an argument. To the storage: the tensor, and Python's object for it. To the tensor: the engine's input
buffer, Python's object for it, and two in the dispatcher."""

ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""The Python function that starts autograd's engine."""
LINEAR_MAPS = {module.forward.__code__ for module in (nn.Linear, nn.RNN, nn.GRU)}
"""Forwards in which torch adds a bias to a product, and nothing else to anything of one dimension."""


class Recorder(TorchDispatchMode):
    """Dispatch mode that records every operation of a step for the current layer."""

    def __init__(self, record: Record, known: set[int]) -> None:
        super().__init__()
        self.record, self.known = record, known
        self.layer, self.phase = 0, "f"
        self.position: dict[tuple[int, str], int] = defaultdict(lambda: -1)
        self.live: dict[int, StorageLife] = {}
        self.first_use: dict[int, int] = {}
        self.recomputed: dict[tuple[int, str, Recompute], Work] = defaultdict(Work)
        """Work of the operations whose outputs are not kept, by layer, phase and kind of selective checkpointing."""
        self.products: Counter[tuple[int, str]] = Counter()
        self.allocating = False
        """Whether operations only allocate what a collective fills."""
        self.input: Callable[[], Tensor | None] = lambda: None
        """Weak reference to what the current layer takes from the one before."""
        self.saved_after: Mapping[int, int] = {}
        """`saved_after` of a record at another shape: number of operations after which `until_saved` is recorded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's guard against it takes a sixth of a trace's time."""
        return False

    def enter(self, layer: int, phase: str) -> None:
        """Record subsequent operations for a phase of a layer."""
        self.layer, self.phase = layer, phase

    def take(self, given: Tensor) -> None:
        """Note what the current layer takes from the one before."""
        self.input = weakref.ref(given)

    def work(self) -> Work:
        """Return the work of the current phase of the current layer so far."""
        place, record = (self.layer, self.phase), self.record
        return Work(record.flop[place], record.bytes_moved[place], record.operations[place], record.streamed[place])

    def again(self) -> dict[Recompute, Work]:
        """Return the work to recompute if the current layer's forward ended here, by kind of checkpointing."""
        again = {each: self.recomputed[self.layer, self.phase, each] for each in SELECTIVE}
        return {"full": self.work(), **again}

    def now(self) -> tuple[int, str, int]:
        """Return the current moment: layer, phase, position."""
        place = (self.layer, self.phase)
        return (*place, max(0, self.position[place]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = (self.layer, self.phase)
        self.position[place] += 1
        if func is prim_device and isinstance(args[0], FakeTensor):
            # two of three dispatches are this question of autograd's: answered here, for speed
            self._used(args[0])
            device: torch.device = args[0].device
            return device
        kwargs = kwargs or {}
        if func is aten.index_put.default:
            # torch adds the gradient of indexing to zeros in place, but out of place under a dispatch mode (torch 2.13,
            # FunctionsManual.cpp, index_backward; TensorSubclassLikeUtils.h)
            node = torch._C._current_autograd_node()
            if node is not None and node.name() == "IndexBackward0":
                func = aten.index_put_.default
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        for tensor in inputs:
            self._used(tensor)
        self._written(func, args)
        if self._sums_in_place(func, args, kwargs):
            self.live[args[0].untyped_storage()._cdata].summed_in_place = True
        self._note_bias(func, args)
        result = func(*args, **kwargs)
        outputs = [*_tensors((result,))]
        if not func.is_view and not self.allocating and (outputs or func._schema.is_mutable):
            self._count(func, args, kwargs, result, inputs, outputs, place)
        for tensor in outputs:
            self._born(tensor)
        self._note_operand_casts(func, args, outputs)
        if func is aten.mkldnn_rnn_layer.default:
            self._note_parts(func, args, result[3])
        if func is aten._to_copy.default:
            self._note_cast(args[0], result)
        return result

    def _used(self, tensor: Tensor) -> None:
        """Note that the current layer uses a tensor, if no layer did before."""
        key = tensor.untyped_storage()._cdata
        if key in self.known:
            self.first_use.setdefault(key, self.layer)

    def _sums_in_place(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operation is autograd's sum of two gradients of one tensor, which a run computes in place.

        torch adds the second gradient to the first in place if nothing else refers to the first or to its storage, as a
        view's base does (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace). Under a dispatch mode it never
        does. No Python code calls that sum, so that the calling frame is the one that started the engine.
        """
        if func is not aten.add.Tensor or len(args) != 2 or kwargs or torch.is_grad_enabled():
            return False
        if torch._C._current_autograd_node() is None or sys._getframe(2).f_code is not ENGINE:
            return False
        gradient: Any = args[0]  # torch's stubs leave `_use_count` out
        storage = gradient.untyped_storage()
        if storage._cdata not in self.live or torch._C._storage_Use_Count(storage._cdata) != STORAGE_HOLDERS:
            return False
        return gradient._use_count() <= TENSOR_HOLDERS and is_non_overlapping_and_dense_or_false(gradient)

    def _note_bias(self, func: Any, args: Any) -> None:
        """Note a product to which a linear map adds its bias, which a run does in place.

        torch adds it by itself where inputs of three or more dimensions are not contiguous, and under a dispatch mode
        out of place (aten/src/ATen/native/Linear.cpp). Only modules are looked at that add nothing else.
        """
        if func is not aten.add.Tensor or sys._getframe(2).f_code not in LINEAR_MAPS:
            return
        product = self.live.get(args[0].untyped_storage()._cdata)
        if product is not None and args[1].dim() == 1 < args[0].dim():
            # the map itself refers to the product until it returns
            product.summed_in_place, product.freed = True, self.now()

    def _note_parts(self, func: Any, args: Any, workspace: Tensor) -> None:
        """Note the parts of the workspace that an LSTM's layer keeps."""
        parts = workspace_parts(func, args)
        self.live[workspace.untyped_storage()._cdata].parts = parts if len(parts) > 1 else ()

    def _note_operand_casts(self, func: Any, args: Any, outputs: Sequence[Tensor]) -> None:
        """Note the copies of operands that a CPU makes inside an operation."""
        for size_bytes in operand_casts(func, args, outputs):
            self.record.alive.append(StorageLife(size_bytes, self.now(), self.now(), casts_operand=True))

    def _note_cast(self, source: Tensor, copy: Tensor) -> None:
        """Note of a copy in another data type what it copies, if autocast makes it."""
        if self.record.autocast is None or self.phase != "f":
            return
        if source.dtype == torch.float32 and copy.element_size() < source.element_size():
            cast = self.live[copy.untyped_storage()._cdata]
            cast.casts_input = source is self.input()  # not a view of it
            # can_try_cache in aten/src/ATen/autocast_mode.cpp
            cast.casts_parameter = source.is_leaf and source.requires_grad and not source._is_view()

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
        flop = flop_of(func, args, kwargs, result, [*inputs, *outputs])
        moved = sum({id(t): t.numel() * t.element_size() for t in [*inputs, *outputs]}.values())
        work = Work(flop, moved, 1, 0 if flop or _is_alias(func, inputs, outputs) else moved)
        if self.record.autocast is not None and all(t.dtype == torch.float32 for t in inputs if t.is_floating_point()):
            self.record.uncast_flop[place] += flop
        self.products[place] += func in PRODUCTS
        kept = [each for each in SELECTIVE if is_kept(func, each, products=self.products[place])]
        self._add(str(func._overloadpacket), work, place, kept=kept, called=str(func))
        for each in kept if place[1] == "f" else ():
            self.record.kept[place[0], each].append(self.position[place])

    def _add(
        self,
        name: str,
        work: Work,
        place: tuple[int, str],
        *,
        kept: Sequence[Recompute] = (),
        called: str | None = None,
    ) -> None:
        """Add one operation's work to the record of a phase of a layer; `kept`: checkpointing that keeps its output."""
        self.record.flop[place] += work.flop
        self.record.bytes_moved[place] += work.bytes_moved
        self.record.streamed[place] += work.streamed
        self.record.operations[place] += 1
        self.record.by_operation[place[0]][name] += work
        again = work if work.flop else Work(0, work.streamed, work.operations, work.streamed)
        for each in SELECTIVE:
            if each not in kept:
                self.recomputed[*place, each] += again
        self.record.counted[place].append(self.position[place])
        self.record.names[place].append(called or name)
        if place[1] == "f" and self.saved_after.get(place[0]) == len(self.record.counted[place]):
            self.record.until_saved[place[0]] = self.again()

    def count_kernel(self, name: str, moved: int) -> None:
        """Count a kernel of fused operations, which no operation of torch launches, by the bytes that it moves."""
        place = (self.layer, self.phase)
        self.position[place] += 1
        self._add(name, Work(0, moved, 1, moved), place)

    @contextmanager
    def allocation(self) -> Iterator[None]:
        """Count no operations for the duration of the context, because they only allocate."""
        self.allocating = True
        try:
            yield
        finally:
            self.allocating = False

    def _written(self, func: Any, args: Any) -> None:
        """Note the layer whose compute-heavy operation created a tensor that is changed in place."""
        if self.phase != "f" or not func._schema.is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, Tensor):
                alive = self.live.get(value.untyped_storage()._cdata)
                if alive is not None and alive.born[2] in self.record.kept[alive.born[0], "selective"]:
                    self.record.overwritten.add(alive.born[0])

    def reduce(self, tensor: Tensor, *, fixed: bool = False) -> Tensor:
        """Replace a sum over ranks by a copy, which is the effect of torch's functional all-reduce on its own rank.

        `fixed`: whether it has the same type in every precision.
        """
        copy = tensor.clone(memory_format=torch.contiguous_format)
        size_bytes = copy.numel() * copy.element_size()
        self.record.reductions[self.layer].append(SliceCollective(self.now(), size_bytes, "all-reduce", fixed))
        return copy

    def receive(self, sent: Tensor, kind: str, ranks: int) -> Tensor:
        """Replace an all-gather, reduce-scatter or all-to-all among `ranks` ranks by the tensor that it allocates."""
        rows = {"all-gather": len(sent) * ranks, "reduce-scatter": len(sent) // ranks}.get(kind, len(sent))
        with self.allocation():
            received = sent.new_empty((rows, *sent.shape[1:]))
        whole = max(sent.numel(), received.numel()) * sent.element_size()
        self.record.reductions[self.layer].append(SliceCollective(self.now(), whole, kind))
        return received

    def exchange(self, sent: Tensor, kind: str, rows: int) -> Tensor:
        """Replace an all-to-all of divided experts by the tensor of `rows` rows that it allocates."""
        with self.allocation():
            received = sent.new_empty((rows, *sent.shape[1:]))
        size = sent.numel() if kind == "counts" else received[0].numel()
        self.record.reductions[self.layer].append(SliceCollective(self.now(), size * sent.element_size(), kind))
        return received

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self.known:
            return
        # bytes alone are a workspace of kernels, which depends on the precision of what they compute
        fixed = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.uint8)
        alive = StorageLife(storage.nbytes(), self.now(), fixed=fixed)
        self.live[key] = alive
        self.record.alive.append(alive)
        weakref.finalize(storage, self._freed, key, alive)

    def _freed(self, key: int, alive: StorageLife) -> None:
        alive.freed = alive.freed or self.now()
        if self.live.get(key) is alive:
            del self.live[key]


def active_recorder() -> Recorder | None:
    """Return the innermost recorder whose context is entered, if there is one."""
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode for mode in modes if isinstance(mode, Recorder)), None)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results and in lists of them; its schema allows no others."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_alias(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether an operation writes nothing and returns only its inputs' storages."""
    if func._schema.is_mutable:
        return False
    there = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in there for tensor in outputs)
