"""Slicing rules of blocks: the modules that tensor-parallel ranks divide, by the class or the roles of linear maps.

A unit of a transformer block is a key-value head, with the query heads that share it and its part of the perceptron's
columns. A unit of a residual block is a norm group's channels.

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
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gsreal.methods.adapters import LowRankAdapter
from gsreal.methods.experts import experts_of
from gsreal.methods.mapped import Mapped

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
    sizes: tuple[str, ...] = ()
    """Numbers in a block's modules that are proportional to its units: heads, channels, widths. None where they are
    derived from the outputs of linear maps.
    """
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

    def resize(self, block: Any, held: int) -> None:
        """Set the sizes in a block's modules to a number of units."""
        units = self.units(block)
        for path in self.sizes:
            owner, _, name = path.rpartition(".")
            module = block.get_submodule(owner)
            setattr(module, name, getattr(module, name) * held // units)


CUTS: dict[str, Cut] = {
    "gsreal.models.TransformerBlock": Cut(
        units=lambda block: gcd(block.attention.heads, block.up.out_features),
        columns=("attention.qkv", "up"),
        rows=("attention.out", "down"),
        sizes=("attention.heads",),
        parts={"attention.qkv": 3},
        gathered=("attention", "up"),
    ),
    "gsreal.models.ResidualBlock": Cut(
        units=lambda block: block.norm1.num_groups,
        columns=("conv1",),
        rows=("conv2",),
        sizes=("norm1.num_channels", "norm1.num_groups"),
        between=("norm1",),
    ),
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": Cut(
        units=lambda block: gcd(block.attn.num_heads, block.mlp.c_fc.nf),
        columns=("attn.c_attn", "mlp.c_fc"),
        rows=("attn.c_proj", "mlp.c_proj"),
        sizes=("attn.num_heads", "attn.split_size", "attn.c_attn.nf", "mlp.c_fc.nf"),
        parts={"attn.c_attn": 3},
        gathered=("attn", "mlp"),
    ),
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": Cut(
        units=lambda block: gcd(
            block.self_attn.k_proj.out_features // block.self_attn.head_dim, block.mlp.up_proj.out_features
        ),
        columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        rows=("self_attn.o_proj", "mlp.down_proj"),
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


def known_cut(block: nn.Module) -> Cut:
    """Return the slicing rules of a block that can be cut, as the caller has checked."""
    cut = cut_of(block)
    assert cut is not None
    return cut


def cut_or_reason(block: nn.Module) -> Cut | str:
    """Return the slicing rules of a block, or why it cannot be cut, with the name of the module; see [Note: roles]."""
    kind = type(block)
    known = CUTS.get(f"{kind.__module__}.{kind.__qualname__}") or block.__dict__.get("_gsreal_cut")
    if known is not None:
        return known
    if _is_encoder(block):
        return ENCODER
    try:
        cut = _cut_by_roles(block)
    except _UnknownRoleError as error:
        return f"{kind.__name__}{error}"
    block.__dict__["_gsreal_cut"] = cut  # a sliced block would look different
    return cut


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
    paths = [path for path, _ in experts_of(block)]
    if not paths or "_gsreal_cut" in block.__dict__:
        return None
    try:
        cut = _mixture_cut(block) if type(block).__qualname__ == "MixtureBlock" else _cut_by_roles(block, paths)
    except _UnknownRoleError as error:
        return f"{type(block).__name__}{error}"
    block.__dict__["_gsreal_cut"] = cut
    return None


def _mixture_cut(block: Any) -> Cut:
    """Return the slicing rules of a `gsreal.models.MixtureBlock`."""
    shared = block.mixture.shared_down is not None
    units = gcd(block.attention.heads, block.mixture.shared_down.in_features if shared else 0)

    return Cut(
        units=lambda _block: units,
        columns=("attention.qkv", *(["mixture.shared_up"] if shared else [])),
        rows=("attention.out", *(["mixture.shared_down"] if shared else [])),
        sizes=("attention.heads",),
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

    numbers = {key: value for key, value in vars(attention).items() if isinstance(value, int)}
    sizes = [key for key in HEAD_COUNTS if key in numbers]
    sizes += [key for key in HEADS_WIDTHS if numbers.get(key) == heads_width]
    perceptron = first[0].rpartition(".")[0] if first else path
    gathered = tuple(dict.fromkeys((path, perceptron))) if perceptron else ()
    return Cut(
        lambda _block: units,
        (*inputs, *first),
        (output, *last),
        sizes=tuple(f"{path}.{key}" for key in sizes),
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
            if is_over_heads and not MeansOverRanks.types_of(module):
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


class MeansOverRanks(TorchFunctionMode):
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
        mean = func(*args, **(kwargs or {}))
        self.has_others |= func in OTHER_STATISTICS
        if func not in (torch.mean, Tensor.mean) or -1 not in (*args[1:], (kwargs or {}).get("dim")):
            return mean
        self.types.append(mean.dtype)
        return Mapped.apply(mean * self.fraction, self.all_reduce, self.all_reduce)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over the width: each position is normalised by itself."""
    kind = type(module).__name__.lower()
    flat = all(parameter.dim() <= 1 for parameter in module.parameters())
    return "norm" in kind and "batch" not in kind and "group" not in kind and flat and not list(module.children())


def is_linear(block: nn.Module, cut: Cut) -> bool:
    """Return whether all sliced modules of a block are linear maps: DTensor does not slice convolutions by channels."""
    return all(type(block.get_submodule(path)) is nn.Linear for path in (*cut.columns, *cut.between, *cut.rows))
