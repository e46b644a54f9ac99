"""Tensor parallelism of transformer and residual blocks as in Megatron-LM, by whole units in any shares.

DTensor makes the slices if they are even and it supports them, else this module's own code does.

A unit of a transformer block is a key-value head, with the query heads that share it and its part of the perceptron's
columns. A unit of a residual block is a norm group's channels. Each rank has the weights of a contiguous range of
units: the outputs (columns) of a block's first linear maps, the inputs (rows) of its last, so that one sum over the
ranks completes each pair. Everything else is whole and equal on every rank.

[Note: f and g] In Megatron-LM's paper (Shoeybi et al. 2019, section 3) f stands before the maps that are cut by
columns: it is the identity in the forward and a sum over the ranks in the backward. g stands after the maps that are
cut by rows, and is the reverse.

[Note: sequence parts] With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) f is an all-gather of the
ranks' parts of the sequence in the forward and a reduce-scatter in the backward, g the reverse. The first block's input
is divided, and the output of the last block, or of the norm after it, is gathered. Embedding, head and loss, before and
after, are whole and equal on every rank, so that the gradient of this gather is a rank's own part. Gradients of whole
parameters in between must be summed over the ranks, see `PartialGradients`.

[Note: roles] Blocks of unknown classes (of Hugging Face's models) are cut where the names of their linear maps tell
their roles: queries, keys and values (or one map with the rows of each head together), the attention's output, the
perceptron's first maps and its last. Norms inside the attention over the width of a head stay whole: a rank's gradient
is that of its own heads. Anything else is refused, by an error that names the module.

[Note: norms over all heads] OLMo 2 normalises queries and keys over the width of all heads together, of which a rank
has a part. Its means over this width are those over all ranks: each multiplies its mean by its fraction of the width,
and the products are all-reduced, in the forward and, as gradients, in the backward: one number for each position.
Its scale is cut like the outputs of the map before it. Transformers' own plan gathers queries, keys and values instead
(`colwise_gather_output`), so that every rank attends with all heads; Megatron Bridge sums as here (its FullDimQNorm for
MiniMax-M2).

[Note: routed experts] In a block with routed experts, the attention is cut, and so are shared experts, which all tokens
take, by the roles of their maps. Routed experts are divided among ranks by `gsreal.methods.expert_parallel`. They and
their router take the tokens of the rank's own part of the sequence, which is not gathered for them. Everything else
beside them is whole on every rank, and its gradient is summed like that of a norm.

[Note: sliced adapters] Beside a map that is cut by columns, a rank has the whole first matrix of a low-rank adapter and
its own rows of the second. Beside a map that is cut by rows, it has its own columns of the first matrix and the whole
second one, and the adapter's output is part of the sum over the ranks. On every rank, the gradient of a whole matrix is
only a part, that of a slice of the other matrix; see `PartialGradients`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gsreal.gradient_sharding.bucket import Bucket
from gsreal.measure import Timeline, wait_for_release
from gsreal.methods.adapters import LowRankAdapter, adapter_of
from gsreal.methods.checkpointing import blocks_of
from gsreal.methods.experts import experts_of
from gsreal.methods.mapped import Mapped
from gsreal.methods.overlapped_sums import Start, Started, can_overlap, gather_beside, sum_beside
from gsreal.model_files.build import build_module
from gssim.errors import UserError
from gssim.scenario import Scenario, units_of_ranks
from gssim.workload import LayerInstance, unrolled

AllReduce = Callable[[Tensor], Tensor]
"""Returns the sum of its argument over the ranks of a group, as a new tensor."""


@dataclass(frozen=True)
class Cut:
    """Slicing rules for blocks of a class: their modules by dotted path within the block."""

    units: Callable[[Any], int]
    """Returns the number of units of a block."""
    columns: tuple[str, ...]
    """Modules that take the whole input and compute a slice of the output."""
    rows: tuple[str, ...]
    """Modules that take a slice of the input, and whose outputs are summed."""
    resize: Callable[[Any, int], None]
    """Sets the sizes in a block's modules to a number of units."""
    between: tuple[str, ...] = ()
    """Norms between columns and rows, all of whose parameters are sliced."""
    over_heads: tuple[str, ...] = ()
    """Those of `between` that normalise over the width of all heads; see [Note: norms over all heads]."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors that a column module's output concatenates (query, key, value), each of all units."""
    gathered: tuple[str, ...] = ()
    """Modules whose input is gathered, once for all of their columns, if ranks divide sequences; they take nothing else
    that is divided. Empty: sequences cannot be divided.
    """
    heads: tuple[str, ...] = ()
    """Norms over single heads: whole on every rank, each of which has the gradient of its own heads."""
    experts: tuple[str, ...] = ()
    """Modules of routed experts, which are not cut; see [Note: routed experts]."""


def _resize_transformer(block: Any, held: int) -> None:
    attention = block.attention
    attention.heads = attention.heads * held // _transformer_units(block)


def _transformer_units(block: Any) -> int:
    return gcd(block.attention.heads, block.up.out_features)


def _resize_residual(block: Any, held: int) -> None:
    block.norm1.num_channels = block.norm1.num_channels * held // block.norm1.num_groups
    block.norm1.num_groups = held


def _resize_gpt2(block: Any, held: int) -> None:
    units = _gpt2_units(block)
    block.attn.num_heads = block.attn.num_heads * held // units
    block.attn.split_size = block.attn.split_size * held // units
    for module in (block.attn.c_attn, block.mlp.c_fc):
        module.nf = module.nf * held // units


def _gpt2_units(block: Any) -> int:
    return gcd(block.attn.num_heads, block.mlp.c_fc.nf)


def _resize_nothing(_block: Any, _held: int) -> None:
    """Change nothing: these modules derive the number of heads from the outputs of their linear maps."""


CUTS: dict[str, Cut] = {
    "gsreal.models.TransformerBlock": Cut(
        units=_transformer_units,
        columns=("attention.qkv", "up"),
        rows=("attention.out", "down"),
        resize=_resize_transformer,
        parts={"attention.qkv": 3},
        gathered=("attention", "up"),
    ),
    "gsreal.models.ResidualBlock": Cut(
        units=lambda block: block.norm1.num_groups,
        columns=("conv1",),
        rows=("conv2",),
        resize=_resize_residual,
        between=("norm1",),
    ),
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": Cut(
        units=_gpt2_units,
        columns=("attn.c_attn", "mlp.c_fc"),
        rows=("attn.c_proj", "mlp.c_proj"),
        resize=_resize_gpt2,
        parts={"attn.c_attn": 3},
        gathered=("attn", "mlp"),
    ),
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": Cut(
        units=lambda block: gcd(
            block.self_attn.k_proj.out_features // block.self_attn.head_dim, block.mlp.up_proj.out_features
        ),
        columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        rows=("self_attn.o_proj", "mlp.down_proj"),
        resize=_resize_nothing,
        gathered=("self_attn", "mlp"),
    ),
}
"""Slicing rules by the full name of the block's class."""

ENCODER = Cut(
    units=lambda block: gcd(
        block.attention.self.query.out_features // block.attention.self.attention_head_size,
        block.intermediate.dense.out_features,
    ),
    columns=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    rows=("attention.output.dense", "output.dense"),
    resize=_resize_nothing,
    gathered=("attention.self", "intermediate"),
)
"""Slicing rules of blocks whose linear maps have these paths, as BERT's, RoBERTa's and Electra's. Their attentions
derive the number of heads from the outputs of the maps."""


QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin")
FUSED_BY_HEADS = {"GPTNeoXLayer": "query_key_value", "FalconDecoderLayer": "query_key_value"}
"""The map, by class of the block, whose output has query, key and value of one head together, head after head."""
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense", "out_lin")
FIRST_MAPS = ("gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "lin1")
LAST_MAPS = ("down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "lin2")
HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
"""Attributes of an attention module that count heads."""
HEADS_WIDTHS = ("embed_dim", "hidden_size", "split_size")
"""Attributes of an attention module that may be the width of all heads together."""


def cut_of(block: nn.Module) -> Cut | None:
    """Return the slicing rules of a block: of its class, or by the roles of its linear maps; None: it cannot be cut."""
    cut = cut_or_reason(block)
    return cut if isinstance(cut, Cut) else None


def cut_or_reason(block: nn.Module) -> Cut | str:
    """Return the slicing rules of a block, or why it cannot be cut, with the name of the module; see [Note: roles]."""
    kind = type(block)
    known = CUTS.get(f"{kind.__module__}.{kind.__qualname__}") or block.__dict__.get("_gsreal_cut")
    if known is not None:
        return known
    if _is_encoder(block):
        return ENCODER
    try:
        found = _cut_by_roles(block)
    except _UnknownRoleError as error:
        return f"{kind.__name__}{error}"
    block.__dict__["_gsreal_cut"] = found  # a sliced block would look different
    return found


def _is_encoder(block: nn.Module) -> bool:
    """Return whether a block has the linear maps of `ENCODER` and no others, and besides them only norms."""
    maps = {path for path, module in block.named_modules() if isinstance(module, nn.Linear)}
    if maps != {*ENCODER.columns, *ENCODER.rows}:
        return False
    others = [
        module
        for path, module in block.named_modules()
        if path not in maps and not isinstance(module, LowRankAdapter) and any(True for _ in module.parameters(False))
    ]
    inner = block.get_submodule("attention.self")
    return isinstance(getattr(inner, "attention_head_size", None), int) and all(map(is_norm, others))


def cut_beside_experts(block: nn.Module) -> str | None:
    """Let a block be cut except for its routed experts; see [Note: routed experts]. Return why it cannot, or None."""
    found = [path for path, _ in experts_of(block)]
    if not found or "_gsreal_cut" in block.__dict__:
        return None
    try:
        cut = _mixture_cut(block) if type(block).__qualname__ == "MixtureBlock" else _cut_by_roles(block, found)
    except _UnknownRoleError as error:
        return f"{type(block).__name__}{error}"
    block.__dict__["_gsreal_cut"] = cut
    return None


def _mixture_cut(block: Any) -> Cut:
    """Return the slicing rules of a `gsreal.models.MixtureBlock`."""
    shared = block.mixture.shared_down is not None
    units = gcd(block.attention.heads, block.mixture.shared_down.in_features if shared else 0)

    def resize(part: Any, held: int) -> None:
        part.attention.heads = part.attention.heads * held // units

    return Cut(
        units=lambda _block: units,
        columns=("attention.qkv", *(["mixture.shared_up"] if shared else [])),
        rows=("attention.out", *(["mixture.shared_down"] if shared else [])),
        resize=resize,
        parts={"attention.qkv": 3, "mixture.shared_up": 2},
        gathered=("attention", *(["mixture.shared_up"] if shared else [])),
        experts=("mixture.experts",),
    )


class _UnknownRoleError(Exception):
    """A module whose role in a block is not known; the message begins with its path in the block, after a dot."""


def _cut_by_roles(block: Any, experts: Sequence[str] = ()) -> Cut:
    """Return the slicing rules of a block by the roles of its linear maps; see [Note: roles].

    `experts`: paths of its modules of routed experts; see [Note: routed experts].
    """
    fused = FUSED_BY_HEADS.get(type(block).__name__, "")
    beside = [path.rpartition(".")[0] for path in experts]
    if not all(beside):
        raise _UnknownRoleError(f".{experts[0]}: routed experts without a router beside them")
    maps = {path: module for path, module in block.named_modules() if isinstance(module, nn.Linear)}
    maps = {path: module for path, module in maps.items() if not _is_beside(path, beside) or _is_shared(path, maps)}
    inputs, (output,), first, last = _maps_by_role(maps, fused, routed=bool(experts))
    path = inputs[0].rpartition(".")[0]
    attention = block.get_submodule(path)
    widths = (getattr(attention, name, None) for name in ("head_dim", "head_size", "attention_head_size"))
    head_width = next((each for each in widths if each is not None), None)
    if not isinstance(head_width, int):
        raise _UnknownRoleError(f".{path}: does not tell the width of a head")
    if "alibi" in signature(type(block).forward).parameters and getattr(attention.config, "alibi", True):
        raise _UnknownRoleError(f".{path}: its attention has a bias of its own for every head")
    grouped = getattr(attention, "new_decoder_architecture", False)
    if fused and getattr(attention, "multi_query", False) and not grouped:
        raise _UnknownRoleError(f".{path}.{fused}: all heads share one key and value")
    shared_by = attention.num_kv_heads if grouped else min(maps[each].out_features for each in inputs) // head_width
    groups = shared_by // 3 if fused and not grouped else shared_by
    heads_width = maps[output].in_features
    units = gcd(groups, *(maps[each].out_features for each in first))
    norms, over_heads = _norms_in_attention(block, path, maps, head_width, beside)

    def resize(part: Any, held: int) -> None:
        inner = part.get_submodule(path)
        for key in (*HEAD_COUNTS, *HEADS_WIDTHS):
            value = inner.__dict__.get(key)
            if isinstance(value, int) and (key in HEAD_COUNTS or value == heads_width):
                setattr(inner, key, value * held // units)

    perceptron = first[0].rpartition(".")[0] if first else path
    gathered = tuple(dict.fromkeys((path, perceptron))) if perceptron else ()
    return Cut(
        lambda _block: units,
        (*inputs, *first),
        (output, *last),
        resize,
        between=over_heads,
        over_heads=over_heads,
        gathered=gathered,
        heads=norms,
        experts=tuple(experts),
    )


def _is_beside(path: str, routed: Sequence[str]) -> bool:
    """Return whether a module is part of one with routed experts."""
    return any(path.startswith(f"{module}.") for module in routed)


def _is_shared(path: str, maps: Mapping[str, nn.Linear]) -> bool:
    """Return whether a linear map belongs to a perceptron whose first and last maps have their usual names."""
    owner, _, leaf = path.rpartition(".")
    beside = {each.rpartition(".")[2] for each in maps if each.rpartition(".")[0] == owner}
    return leaf in (*FIRST_MAPS, *LAST_MAPS) and all(beside & {*names} for names in (FIRST_MAPS, LAST_MAPS))


def _maps_by_role(
    maps: Mapping[str, nn.Linear], fused: str, *, routed: bool
) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the paths of a block's linear maps: of the attention's inputs and output, and the perceptron's.

    `routed`: whether the block has routed experts, and so needs no perceptron that all tokens take.
    """
    inputs = (*QUERIES_KEYS_VALUES, fused)
    owners = {path.rpartition(".")[0] for path in maps if path.rpartition(".")[2] in inputs}
    by_role: dict[tuple[str, ...], list[str]] = {inputs: [], ATTENTION_OUTPUTS: [], FIRST_MAPS: [], LAST_MAPS: []}
    for path in maps:
        owner, _, leaf = path.rpartition(".")
        roles = (inputs, ATTENTION_OUTPUTS) if owner in owners else (FIRST_MAPS, LAST_MAPS)
        role = next((names for names in roles if leaf in names), None)
        if role is None:
            raise _UnknownRoleError(f".{path}: a linear map of unknown role")
        by_role[role].append(path)
    first, output, opening, closing = by_role.values()
    if len(owners) != 1 or len(first) != (1 if fused else 3) or len(output) != 1:
        raise _UnknownRoleError(": no attention with maps of query, key, value and output by their usual names")
    if (not opening or len(closing) != 1) and not (routed and not opening and not closing):
        raise _UnknownRoleError(": no perceptron with first and last maps by their usual names")
    return first, output, opening, closing


def _norms_in_attention(
    block: nn.Module, attention: str, maps: Mapping[str, Any], head_width: int, routed: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the norms inside the attention: those over single heads, and those over all heads.

    Refuses parameters of other modules than norms. `routed`: modules with routed experts, which may have others.
    """
    over_width: list[str] = []
    over_heads: list[str] = []
    for path, module in block.named_modules():
        is_map = path in maps or isinstance(module, LowRankAdapter)
        if is_map or not any(True for _ in module.parameters(recurse=False)):
            continue
        if path in routed or _is_beside(path, routed):
            continue
        if not is_norm(module):
            raise _UnknownRoleError(f".{path}: has parameters, and is neither a linear map nor a norm")
        if path.startswith(f"{attention}."):
            is_over_heads = any(parameter.shape != (head_width,) for parameter in module.parameters())
            if is_over_heads and not _MeansOverRanks.types_of(module):
                raise _UnknownRoleError(
                    f".{path}: a norm over all heads, of which each rank would have only some, and which takes not "
                    "only means, by torch.mean"
                )
            (over_heads if is_over_heads else over_width).append(path)
    return tuple(over_width), tuple(over_heads)


OTHER_STATISTICS = frozenset(
    getattr(owner, name) for owner in (torch, Tensor) for name in ("var", "std", "sum", "norm", "amax", "prod")
) | {torch.var_mean, torch.std_mean, torch.linalg.vector_norm, F.normalize, F.layer_norm, F.rms_norm}
"""Functions by which a norm may take other statistics than means."""


class _MeansOverRanks(TorchFunctionMode):
    """Replaces means over the last dimension, of which each rank has a part, by those over the parts of all ranks.

    `fraction`: the rank's part of the dimension. See [Note: norms over all heads].
    """

    def __init__(self, fraction: float, all_reduce: AllReduce) -> None:
        super().__init__()
        self.fraction, self.all_reduce = fraction, all_reduce
        self.types: list[torch.dtype] = []
        """Types of the means that it has replaced."""
        self.has_others = False
        """Whether the norm takes other statistics, which would be those of a rank's part."""

    @classmethod
    def types_of(cls, norm: nn.Module, dtype: torch.dtype | None = None) -> list[torch.dtype]:
        """Return the types of a norm's means; none if it takes other statistics. `dtype`: of parameters and input."""
        means = cls(1.0, lambda mean: mean)
        parameters = {name: parameter.detach().to(dtype) for name, parameter in norm.named_parameters()}
        like = next(iter(parameters.values()))
        with torch.no_grad(), means:
            functional_call(norm, parameters, (torch.zeros(1, len(like), dtype=like.dtype, device=like.device),))
        return [] if means.has_others else means.types

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.has_others |= func in OTHER_STATISTICS
        if func not in (torch.mean, Tensor.mean) or -1 not in (*args[1:], (kwargs or {}).get("dim")):
            return found
        self.types.append(found.dtype)
        return Mapped.apply(found * self.fraction, self.all_reduce, self.all_reduce)


def is_linear(block: nn.Module, cut: Cut) -> bool:
    """Return whether all sliced modules of a block are linear maps: DTensor does not slice convolutions by channels."""
    return all(type(block.get_submodule(path)) is nn.Linear for path in (*cut.columns, *cut.between, *cut.rows))


@dataclass(frozen=True)
class Slice:
    """A parameter as part of a whole tensor: ranges of one dimension, concatenated."""

    dimension: int
    size: int
    """Size of that dimension in the whole tensor."""
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return the slice of the whole tensor, as a tensor of its own."""
        pieces = [whole.narrow(self.dimension, first, last - first) for first, last in self.ranges]
        return torch.cat(pieces, self.dimension)


def slices_of(block: nn.Module, held: Sequence[int]) -> dict[tuple[str, str], Slice]:
    """Return the slice of every sliced parameter, by (module, parameter), for a rank with these units."""
    cut, runs = cut_of(block), _runs(held)
    assert cut is not None  # the caller has asked
    units, slices = cut.units(block), {}
    for path in (*cut.columns, *cut.between, *cut.rows):
        module = block.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            if path in cut.rows and name == "bias":
                continue
            # Hugging Face's linear map Conv1D has its inputs as rows
            transposed = type(module).__name__ == "Conv1D" and parameter.dim() > 1
            dimension = int((path in cut.rows) != transposed)
            parts, size = cut.parts.get(path, 1), parameter.shape[dimension]
            each = size // parts // units
            starts = [part * (size // parts) for part in range(parts)]
            ranges = tuple((start + each * first, start + each * stop) for start in starts for first, stop in runs)
            slices[path, name] = Slice(dimension, size, ranges)
            if name == "weight" and adapter_of(module) is not None:  # the same rows or columns; never transposed
                sliced, of_adapter = ("down", 1) if path in cut.rows else ("up", 0)
                slices[f"{path}.adapter", sliced] = Slice(of_adapter, size, ranges)
    return slices


def _runs(units: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive units as (first, stop).

    >>> _runs(range(2, 5)), _runs([0, 1, 0])
    ([(2, 5)], [(0, 2), (0, 1)])
    """
    runs: list[tuple[int, int]] = []
    for unit in units:
        if runs and runs[-1][1] == unit:
            runs[-1] = runs[-1][0], unit + 1
        else:
            runs.append((unit, unit + 1))
    return runs


def whole_with_parts(block: nn.Module) -> list[tuple[str, str]]:
    """Return the (module, parameter) of a sliced block whose gradient is only a part on every rank.

    That holds where ranks divide no sequences: for norms of heads, and for adapters' whole matrices.
    """
    heads = [(path, block.get_submodule(path)) for path in getattr(cut_of(block), "heads", ())]
    of_heads = [(path, name) for path, norm in heads for name, p in norm.named_parameters() if p.requires_grad]
    return of_heads + partial_adapters(block)


def partial_adapters(block: nn.Module) -> list[tuple[str, str]]:
    """Return the parameters of a sliced block's adapters that are whole, by (module, parameter).

    See [Note: sliced adapters].
    """
    cut = cut_of(block)
    assert cut is not None  # it is sliced
    return [
        (f"{path}.adapter", whole)
        for paths, whole in ((cut.columns, "down"), (cut.rows, "up"))
        for path in paths
        if adapter_of(block.get_submodule(path)) is not None
    ]


def slice_block(
    block: nn.Module,
    held: Sequence[int],
    all_reduce: AllReduce,
    *,
    ranks: int,
    group: dist.ProcessGroup | None = None,
    parts: "SequenceParts | None" = None,
    reduce_fixed: AllReduce | None = None,
    start: Start | None = None,
) -> None:
    """Reduce a block to a rank's units; `all_reduce` sums over the `ranks` ranks of its `group`.

    `parts`: how they divide sequences, if they do; see [Note: sequence parts]. `reduce_fixed`: sums what has one type
    in every precision; None: `all_reduce` does that too. `start`: begins the sum of an input's gradient, which then
    runs beside the products of weights' gradients; None: it follows them.
    """
    cut = cut_of(block)
    assert cut is not None  # the caller has asked
    slices = slices_of(block, held)
    for (path, name), part in slices.items():
        module = block.get_submodule(path)
        whole: nn.Parameter = getattr(module, name)
        own = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
        module.register_parameter(name, own)
        mark(module, name, part, group)
    for path in cut.over_heads:
        norm = block.get_submodule(path)
        size = len(next(norm.parameters()))
        fraction = size / next(part.size for (owner, _), part in slices.items() if owner == path)
        reduce = all_reduce
        if reduce_fixed is not None and _MeansOverRanks.types_of(norm, torch.float64) == _MeansOverRanks.types_of(norm):
            reduce = reduce_fixed
        norm.forward = partial(_norm_over_ranks, norm.forward, _MeansOverRanks(fraction, reduce))
    cut.resize(block, len(held))
    f: tuple[AllReduce, AllReduce]
    g: tuple[AllReduce, AllReduce]
    if parts is None:  # Megatron-LM's f copies, and sums gradients over the ranks; its g does the converse
        f, g = (lambda x: x.view_as(x), all_reduce), (all_reduce, _same)
    else:  # f gathers parts, and reduce-scatters gradients; g does the converse
        f, g = (parts.whole, parts.summed), (parts.summed, parts.whole)
    for path in cut.columns if parts is None else cut.gathered:
        module = block.get_submodule(path)
        change: Callable[[Tensor], Tensor] = partial(_mapped, *f)
        if start is not None and parts is None and can_overlap(module):
            sum_beside(module, start)
            continue
        if start is not None and parts is not None:
            reading = [each for each in cut.columns if each == path or each.startswith(f"{path}.")]
            maps = {each: block.get_submodule(each) for each in reading}
            change = gather_beside(module, maps, parts.whole, partial(parts.start_sum, start))
        module.register_forward_pre_hook(partial(_with_input, change), with_kwargs=True)
    for path in cut.rows:
        module = block.get_submodule(path)
        module.forward = partial(_row_forward, module, lambda y: Mapped.apply(y, *g), ranks)
        if (adapter := adapter_of(module)) is not None:
            adapter.added_by_hook = False


def _mapped(change: AllReduce, back: AllReduce, x: Tensor) -> Tensor:
    result: Tensor = Mapped.apply(x, change, back)
    return result


def _norm_over_ranks(forward: Callable[[Tensor], Tensor], means: _MeansOverRanks, x: Tensor) -> Tensor:
    """Return a norm of a rank's part of the width, whose means are over the parts of all ranks."""
    with means:
        return forward(x)


def mark(module: nn.Module, name: str, part: Slice, group: dist.ProcessGroup | None) -> None:
    """Record the slice of a whole tensor that a module's parameter is, and the group that has it whole."""
    module.__dict__.setdefault("_gsreal_slices", {})[name] = (part, group)


def _with_input(
    change: Callable[[Tensor], Tensor], _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change a module's first input, or its `hidden_states`, if they are passed by name."""
    if inputs:
        return (change(inputs[0]), *inputs[1:]), named
    return inputs, named | {"hidden_states": change(named["hidden_states"])}


def _row_forward(module: Any, summed: Callable[[Tensor], Tensor], ranks: int, x: Tensor) -> Tensor:
    """Return the sum of all ranks' outputs; each adds its fraction of the bias, as DTensor does.

    Every rank has the whole gradient of the bias already.
    """
    bias: Any = None if module.bias is None else Mapped.apply(module.bias, lambda whole: whole / ranks, _same)
    if isinstance(module, nn.Linear):
        y = F.linear(x, module.weight, bias)
    elif isinstance(module, nn.Conv2d):
        y = F.conv2d(x, module.weight, bias, module.stride, module.padding, module.dilation, module.groups)
    else:  # Hugging Face's Conv1D
        y = torch.addmm(bias, x.view(-1, x.size(-1)), module.weight).view(*x.shape[:-1], -1)
    adapter = adapter_of(module)
    return summed(y if adapter is None else y + adapter(x))


def _same(gradient: Tensor) -> Tensor:
    return gradient


class SequenceParts:
    """The division of sequences of shape (batch, sequence, width) among tensor-parallel ranks, in equal parts.

    `all_gather` maps a tensor to those of all ranks, one after another in its first dimension; `reduce_scatter` maps
    such a tensor to the sum over the ranks of this rank's part.
    """

    def __init__(self, ranks: int, rank: int, all_gather: AllReduce, reduce_scatter: AllReduce) -> None:
        self.ranks, self.rank, self.all_gather, self.reduce_scatter = ranks, rank, all_gather, reduce_scatter

    def whole(self, part: Tensor) -> Tensor:
        """Return whole sequences, of which each rank has a part; of a tensor with two dimensions, all ranks' rows."""
        if part.dim() == 2:
            return self.all_gather(part.contiguous())
        by_rank = self.all_gather(part.contiguous()).unflatten(0, (self.ranks, -1))
        return by_rank.transpose(0, 1).flatten(1, 2)

    def summed(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks."""
        return self.reduce_scatter(self._by_rank(whole))

    def start_sum(self, start: Start, whole: Tensor) -> Started:
        """Begin the sum over the ranks of this rank's part; `start` begins a reduce-scatter."""
        return start(self._by_rank(whole))

    def _by_rank(self, whole: Tensor) -> Tensor:
        """Return whole sequences with the parts of all ranks one after another in the first dimension."""
        return whole if whole.dim() == 2 else whole.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 1)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part, as a tensor of its own."""
        part = whole.unflatten(1, (self.ranks, -1)).select(1, self.rank)
        return part.clone(memory_format=torch.contiguous_format)


def end_of_parts(order: Sequence[str], blocks: Sequence[str], module: nn.Module) -> str:
    """Return the path of the module whose output is gathered where ranks divide sequences.

    It is the norm after the last block, or else that block. `order`: paths of the modules at which layers of the whole
    model begin, as they run; `blocks`: those of blocks.
    """
    following = order[order.index(blocks[-1]) + 1 :][:1]
    return next((path for path in following if is_norm(module.get_submodule(path))), blocks[-1])


def divide_sequences(
    blocks: Sequence[str], module: nn.Module, parts: SequenceParts, *, end: str, held: Collection[str] | None = None
) -> list[str]:
    """Divide sequences among ranks from a model's first block to its last, or to the norm after that.

    `blocks`: paths of the model's blocks, which are sliced already. `end`: see `end_of_parts`. Before and after them
    all ranks compute the same, so that the gradient at `end` is a rank's own part. `held`: paths of the layers that
    `module`, a stage, has; all by default. Returns the names of the parameters whose gradients are to be summed over
    the ranks.
    """
    held = (*blocks, end) if held is None else held

    def joined(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (Mapped.apply(output[0], parts.whole, parts.own), *output[1:])
        return Mapped.apply(output, parts.whole, parts.own)

    if blocks[0] in held:
        divided = partial(_with_input, lambda x: Mapped.apply(x, parts.own, parts.whole))
        module.get_submodule(blocks[0]).register_forward_pre_hook(divided, with_kwargs=True)
    names = []
    if end in held:
        module.get_submodule(end).register_forward_hook(joined)
        if end not in blocks:
            names = [f"{end}.{name}" for name, p in module.get_submodule(end).named_parameters() if p.requires_grad]
    for path in (each for each in blocks if each in held):
        cut = cut_of(block := module.get_submodule(path))
        assert cut is not None  # they are sliced
        adapters = partial_adapters(block)
        inside = {
            *cut.columns,
            *cut.between,
            *cut.rows,
            *(f"{each}.adapter" for each in (*cut.columns, *cut.rows)),
            *cut.experts,
        }
        trained = [name for name, parameter in block.named_parameters() if parameter.requires_grad]
        names += [f"{path}.{name}" for name in trained if name.rpartition(".")[0] not in inside]
        names += [f"{path}.{owner}.{name}" for owner, name in adapters]
    return names


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over the width: each position is normalised by itself."""
    kind = type(module).__name__.lower()
    flat = all(parameter.dim() <= 1 for parameter in module.parameters())
    return "norm" in kind and "batch" not in kind and "group" not in kind and flat and not list(module.children())


@dataclass(frozen=True)
class PartialGradients:
    """Sums gradients of whole parameters that ranks use on their parts of sequences or heads, in one all-reduce.

    Source: Megatron-LM, core/distributed/finalize_model_grads.py, `_allreduce_layernorm_grads`. For sharded parameters,
    a rank sums the gradients of its shards, padded to equal rows; for pushed gradients, the ranges that it owns.
    """

    places: Sequence[tuple[nn.Module, str]]
    """Modules and the names of their parameters: wrappers may replace these."""
    group: dist.ProcessGroup
    timeline: Timeline
    shards: int

    def sum(self) -> None:
        """Replace the gradients by their sums over the ranks (a collective)."""
        parameters = [getattr(module, name) for module, name in self.places]
        sizes = [-(-len(each) // self.shards) * (each.numel() // len(each)) for each in parameters]
        gradients = [each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad for each in parameters]
        self._sum(gradients, sizes)

    def sum_pushed(self, buckets: Sequence[Bucket]) -> None:
        """Do the same with the ranges of pushed gradients that this rank owns, if any (a collective)."""
        bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        gradients = []
        for parameter in (getattr(module, name) for module, name in self.places):
            bucket = bucket_of[parameter]
            _, own = bucket.owned(parameter)
            if own.start < own.stop:
                assert bucket.shard.grad is not None
                gradients.append(bucket.shard.grad[own])
        if gradients:
            self._sum(gradients, [len(each) for each in gradients])

    def _sum(self, gradients: Sequence[Tensor], sizes: list[int]) -> None:
        """All-reduce gradients in one flat tensor; `sizes`: the elements that each takes in it."""
        with self.timeline.span("all-reduce partial gradients", "exposed_communication", self.group):
            flat = gradients[0].new_zeros(sum(sizes))
            own = [part[: each.numel()] for part, each in zip(flat.split(sizes), gradients, strict=True)]
            for part, gradient in zip(own, gradients, strict=True):
                part.copy_(gradient.reshape(-1))
            dist.all_reduce(flat, group=self.group)
            for part, gradient in zip(own, gradients, strict=True):
                gradient.copy_(part.view_as(gradient))


def slice_blocks(
    scenario: Scenario,
    module: nn.Module,
    timeline: Timeline,
    mesh: DeviceMesh,
    *,
    layers: Sequence[LayerInstance] | None = None,
    end: str | None = None,
) -> list[tuple[nn.Module, str]]:
    """Reduce each block to this rank's slice; `mesh`: the tensor-parallel ranks, one axis.

    `layers`: those of the stage that `module` is; all by default. `end`: of a stage, see `end_of_parts`. Returns the
    parameters, by module and name, whose gradients are only a part on every rank. Raises UserError if a block cannot be
    sliced, or if dropout would differ between the ranks.
    """
    order = [instance for instance in unrolled(scenario.workload.model) if instance.layer.modules]
    held = {instance.module for instance in layers or order if instance.layer.modules}
    paths = [instance.module for instance in order if instance.layer.block]
    blocks = [module.get_submodule(path) for path in paths if path in held]
    _check(scenario, module, blocks)
    all_reduce = observed_all_reduce(mesh, timeline)
    parts = _observed_parts(mesh, timeline) if scenario.policies.sequence_parallel else None
    start: Start | None = None
    if scenario.plan.async_input_gradients:
        start = (started_all_reduce if parts is None else _started_reduce_scatter)(mesh, timeline)
    for block in blocks:
        cut = cut_of(block)
        assert cut is not None  # checked
        sizes = units_of_ranks(cut.units(block), scenario.slice_shares)
        position = mesh.get_local_rank()
        own = range(sum(sizes[:position]), sum(sizes[: position + 1]))
        if scenario.cuts_natively and is_linear(block, cut):
            distribute(block, cut, own, mesh, timeline)
        else:
            slice_block(block, own, all_reduce, ranks=len(sizes), group=mesh.get_group(), parts=parts, start=start)
    if parts is None:
        return [(block.get_submodule(path), name) for block in blocks for path, name in whole_with_parts(block)]
    end = end or end_of_parts([each.module for each in order], paths, module)
    names = divide_sequences(paths, module, parts, end=end, held=held)
    return [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]


def partial_gradients(
    scenario: Scenario, places: Sequence[tuple[nn.Module, str]], timeline: Timeline, mesh: DeviceMesh
) -> PartialGradients | None:
    """Return what sums these parameters' gradients before each update; None: there are none."""
    shards = scenario.policies.shards if scenario.policies.gradients == "reduce-scatter" else 1
    return PartialGradients(places, mesh.get_group(), timeline, shards) if places else None


def check_slices(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if the plan cuts blocks, but those of the real module cannot be, or it has dropout."""
    if scenario.policies.tp > 1:
        with torch.device("meta"):
            module = build_module(scenario.workload.model.module, where=where)
        _check(scenario, module, blocks_of(scenario.workload.model, module), where=f"{where}: ")


def _check(scenario: Scenario, module: nn.Module, blocks: Sequence[nn.Module], *, where: str = "") -> None:
    for block in blocks:
        cut = (cut_beside_experts(block) if scenario.policies.ep > 1 else None) or cut_or_reason(block)
        if isinstance(cut, str):
            raise UserError(f"{where}workload.model: a block cannot be cut: {cut}")
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        raise UserError(
            f"{where}plan.method = '{scenario.plan.method}': ranks draw their random numbers apart, so that dropout "
            "would make the parameters that all hold differ; allowed: dropout of 0"
        )


def observed_all_reduce(mesh: DeviceMesh, timeline: Timeline) -> AllReduce:
    """Return torch's functional all-reduce over the ranks of a mesh, awaited immediately and recorded as a span."""
    from torch.distributed import _functional_collectives as functional

    def all_reduce(tensor: Tensor) -> Tensor:
        with timeline.span("all-reduce", "exposed_communication", mesh.get_group()):
            return _released(functional.wait_tensor(functional.all_reduce(tensor, "sum", (mesh, 0))))

    return all_reduce


def started_all_reduce(mesh: DeviceMesh, timeline: Timeline) -> Start:
    """Return the start of an all-reduce in place over the ranks of a mesh, whose wait is recorded as a span."""
    group = mesh.get_group()

    def start(tensor: Tensor) -> Started:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return partial(_awaited, [work], [tensor], "all-reduce", timeline, group)

    return start


def _started_reduce_scatter(mesh: DeviceMesh, timeline: Timeline) -> Start:
    """Return the same of a reduce-scatter of all ranks' parts, one after another in the first dimension."""
    group, ranks = mesh.get_group(), mesh.size()

    def start(whole: Tensor) -> Started:
        part = whole.new_empty((len(whole) // ranks, *whole.shape[1:]))
        work = dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)
        # gloo has sent a copy, but nccl reads what it sends until the end
        return partial(_awaited, [work], [whole, part], "reduce-scatter sequence", timeline, group)

    return start


def _awaited(works: list[Any], tensors: list[Tensor], label: str, timeline: Timeline, group: Any) -> Tensor:
    """Return the last tensor once the collective has ended; empties both lists, in order to hold nothing."""
    with timeline.span(label, "exposed_communication", group):
        works.pop().wait()
    result = tensors.pop()
    tensors.clear()
    wait_for_release(result)
    return result


def _released(result: Tensor) -> Tensor:
    """Return the result of a collective once nothing but the caller holds it."""
    wait_for_release(result)
    return result


def _observed_parts(mesh: DeviceMesh, timeline: Timeline) -> SequenceParts:
    """Return the division of sequences among the ranks of a mesh by torch's functional collectives, as spans."""
    from torch.distributed import _functional_collectives as functional

    # torch before 2.13 has only the names with `tensor`
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

    group = mesh.get_group()

    def all_gather(part: Tensor) -> Tensor:
        with timeline.span("all-gather sequence", "exposed_communication", group):
            return _released(functional.wait_tensor(gather(part, 0, (mesh, 0))))

    def reduce_scatter(whole: Tensor) -> Tensor:
        with timeline.span("reduce-scatter sequence", "exposed_communication", group):
            return _released(functional.wait_tensor(scatter(whole, "sum", 0, (mesh, 0))))

    return SequenceParts(mesh.size(), mesh.get_local_rank(), all_gather, reduce_scatter)


def distribute(block: nn.Module, cut: Cut, held: range, mesh: DeviceMesh, timeline: Timeline) -> None:
    """Slice a block by torch.distributed.tensor.parallel.

    DTensor slices contiguous rows: those of query, key and value are first reordered by the rank that gets them.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    slices = slices_of(block, held)
    for path, count in cut.parts.items():
        with torch.no_grad():
            for parameter in block.get_submodule(path).parameters():  # from (part, rank, row) to (rank, part, row)
                rows = parameter.unflatten(0, (count, mesh.size(), -1))
                parameter.copy_(rows.transpose(0, 1).flatten(0, 2))
    columns, rows = _observed_styles(timeline, mesh.get_group())
    plan = {path: columns() for path in cut.columns} | {path: rows() for path in cut.rows}
    parallelize_module(block, mesh, plan)
    cut.resize(block, len(held))
    for (path, name), part in slices.items():
        mark(block.get_submodule(path), name, part, mesh.get_group())


def _observed_styles(timeline: Timeline, group: dist.ProcessGroup) -> tuple[type, type]:
    """Return torch's column and row styles, with their blocking all-reduces recorded as spans."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    class ObservedColumns(ColwiseParallel):
        """Measures the all-reduce of the input's gradient: from the gradient of its DTensor to its own."""

        @staticmethod
        def _prepare_input_fn(
            input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
        ) -> Any:
            marks: list[Any] = []
            own = inputs[0].view_as(inputs[0])
            shared = ColwiseParallel._prepare_input_fn(
                input_layouts, desired_input_layouts, mod, (own, *inputs[1:]), device_mesh
            )
            if own.requires_grad:
                shared.register_hook(lambda _: marks.append(timeline.mark()))

                def summed(gradient: Tensor) -> None:
                    wait_for_release(gradient, holders=2)  # the hook's and autograd's
                    timeline.between("all-reduce", "exposed_communication", marks.pop(), group=group)

                own.register_hook(summed)
            return shared

    class ObservedRows(RowwiseParallel):
        """Waits for the outputs where they are computed; the next operation needs them immediately anyway."""

        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
        ) -> Any:
            with timeline.span("all-reduce", "exposed_communication", group):
                summed = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
                if isinstance(summed, AsyncCollectiveTensor):
                    summed.trigger_wait()
                    arrived: Any = summed if summed._base is None else summed._base  # it may be a view
                    wait_for_release(arrived.elem)
            return summed

    return ObservedColumns, ObservedRows
