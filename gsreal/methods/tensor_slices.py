"""Blocks cut among the ranks of a tensor group, in whole units and in any shares: Megatron-LM's tensor parallelism.

A unit is an attention head (of keys and values, where several queries share them) with its part of the perceptron's
columns, or a norm group's channels. Each rank holds the weights of a run of units: of the first linear maps of a block
the outputs (columns), of the last the inputs (rows), so that one sum over the ranks completes each pair. All else is
whole on every rank, and the same everywhere.

[Note: f and g] In Megatron-LM's paper (Shoeybi et al. 2019, section 3) f is the identity in the forward and a sum over
the ranks in the backward, where a block's columns begin; g is the reverse, where its rows end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

AllReduce = Callable[[Tensor], Tensor]
"""Returns the sum of its argument over the ranks of a group, as a new tensor."""


@dataclass(frozen=True)
class Cut:
    """How blocks of a class are cut: their modules by dotted path within the block."""

    units: Callable[[Any], int]
    """Into how many units a block can be cut."""
    columns: tuple[str, ...]
    """Modules that take the whole input and make a slice of the output."""
    rows: tuple[str, ...]
    """Modules that take a slice of the input, and whose outputs are summed."""
    resize: Callable[[Any, int], None]
    """Tells the modules of a block of how many units it is now."""
    between: tuple[str, ...] = ()
    """Norms between columns and rows, all of whose parameters are cut."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Column modules whose outputs are several tensors side by side (query, key, value), each of all units."""


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


def _llama_units(block: Any) -> int:
    attention = block.self_attn
    return gcd(attention.k_proj.out_features // attention.head_dim, block.mlp.up_proj.out_features)


def _bert_units(block: Any) -> int:
    attention = block.attention.self
    return gcd(attention.query.out_features // attention.attention_head_size, block.intermediate.dense.out_features)


def _as_wide_as_its_maps(_block: Any, _held: int) -> None:
    """Leave modules as they are which take the number of heads from what their linear maps return."""


CUTS: dict[str, Cut] = {
    "gsreal.models.TransformerBlock": Cut(
        units=_transformer_units,
        columns=("attention.qkv", "up"),
        rows=("attention.out", "down"),
        resize=_resize_transformer,
        parts={"attention.qkv": 3},
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
    ),
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": Cut(
        units=_llama_units,
        columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        rows=("self_attn.o_proj", "mlp.down_proj"),
        resize=_as_wide_as_its_maps,
    ),
    "transformers.models.bert.modeling_bert.BertLayer": Cut(
        units=_bert_units,
        columns=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
        rows=("attention.output.dense", "output.dense"),
        resize=_as_wide_as_its_maps,
    ),
}
"""By the full name of the block's class."""


def cut_of(block: nn.Module) -> Cut | None:
    """Return how the block can be cut, if that is known."""
    kind = type(block)
    return CUTS.get(f"{kind.__module__}.{kind.__qualname__}")


def is_linear(block: nn.Module, cut: Cut) -> bool:
    """Return whether all that is cut of a block are linear maps: DTensor cuts no convolution by its channels."""
    return all(isinstance(block.get_submodule(path), nn.Linear) for path in (*cut.columns, *cut.between, *cut.rows))


@dataclass(frozen=True)
class Slice:
    """Which part of a whole tensor a parameter is: ranges of one dimension, side by side."""

    dimension: int
    size: int
    """Of that dimension of the whole tensor."""
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return the slice of the whole tensor, as a tensor of its own."""
        pieces = [whole.narrow(self.dimension, first, last - first) for first, last in self.ranges]
        return torch.cat(pieces, self.dimension)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the slice into the whole tensor."""
        sizes = [last - first for first, last in self.ranges]
        for (first, last), piece in zip(self.ranges, part.split(sizes, self.dimension), strict=True):
            whole.narrow(self.dimension, first, last - first).copy_(piece)


def slices_of(block: nn.Module, held: range) -> dict[tuple[str, str], Slice]:
    """Return the slice of every parameter that is cut, by (module, parameter), for a rank that holds these units."""
    cut = cut_of(block)
    assert cut is not None  # the caller has asked
    units, found = cut.units(block), {}
    for path in (*cut.columns, *cut.between, *cut.rows):
        module = block.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            if path in cut.rows and name == "bias":
                continue
            dimension = _dimension(module, parameter, rows=path in cut.rows)
            parts, size = cut.parts.get(path, 1), parameter.shape[dimension]
            each = size // parts // units
            starts = [part * (size // parts) for part in range(parts)]
            ranges = tuple((start + each * held.start, start + each * held.stop) for start in starts)
            found[path, name] = Slice(dimension, size, ranges)
    return found


def _dimension(module: nn.Module, parameter: Tensor, *, rows: bool) -> int:
    """Return the dimension of the outputs, or for `rows` that of the inputs."""
    transposed = type(module).__name__ == "Conv1D" and parameter.dim() > 1  # Hugging Face's linear map
    return int(rows != transposed)


def slice_block(
    block: nn.Module, held: range, all_reduce: AllReduce, *, ranks: int, group: dist.ProcessGroup | None = None
) -> None:
    """Leave of a block the units that a rank holds; `all_reduce` sums over the `ranks` ranks of its `group`."""
    cut = cut_of(block)
    assert cut is not None  # the caller has asked
    for (path, name), part in slices_of(block, held).items():
        module = block.get_submodule(path)
        whole: nn.Parameter = getattr(module, name)
        own = nn.Parameter(part.of(whole.detach()), requires_grad=whole.requires_grad)
        module.register_parameter(name, own)
        mark(module, name, part, group)
    cut.resize(block, len(held))
    for path in cut.columns:
        block.get_submodule(path).register_forward_pre_hook(partial(_shared_input, all_reduce))
    for path in cut.rows:
        module = block.get_submodule(path)
        module.forward = partial(_row_forward, module, all_reduce, ranks)


def mark(module: nn.Module, name: str, part: Slice, group: dist.ProcessGroup | None) -> None:
    """Remember which part of a whole tensor a module's parameter is, and who has the others; see `whole_parameter`."""
    module.__dict__.setdefault("_gsreal_slices", {})[name] = (part, group)


def whole_parameter(module: nn.Module, name: str) -> Tensor:
    """Return a parameter whole, put together from all ranks that hold parts of it (a collective where any do)."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter: Any = getattr(owner, leaf)
    held: Tensor = (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
    part, group = owner.__dict__.get("_gsreal_slices", {}).get(leaf, (None, None))
    if part is None:
        return held.clone()
    if held.shape[part.dimension] == part.size and dist.get_world_size(group) > 1:  # a DTensor's, in the ranks' order
        held = held.chunk(dist.get_world_size(group), part.dimension)[dist.get_rank(group)]
    shape = [part.size if dimension == part.dimension else size for dimension, size in enumerate(held.shape)]
    whole = torch.zeros(shape, dtype=held.dtype, device=held.device)
    part.put(held, whole)
    dist.all_reduce(whole, group=group)
    return whole


def _shared_input(all_reduce: AllReduce, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_CopyIn.apply(inputs[0], all_reduce), *inputs[1:])


def _row_forward(module: Any, all_reduce: AllReduce, ranks: int, x: Tensor) -> Tensor:
    """Return the sum of all ranks' outputs; each puts in its part of the bias, as DTensor does."""
    bias: Any = None if module.bias is None else _PartOf.apply(module.bias, ranks)
    if isinstance(module, nn.Linear):
        y = F.linear(x, module.weight, bias)
    elif isinstance(module, nn.Conv2d):
        y = F.conv2d(x, module.weight, bias, module.stride, module.padding, module.dilation, module.groups)
    else:  # Hugging Face's Conv1D
        y = torch.addmm(bias, x.view(-1, x.size(-1)), module.weight).view(*x.shape[:-1], -1)
    return _SumOut.apply(y, all_reduce)


class _CopyIn(torch.autograd.Function):
    """Megatron-LM's f: the input as it is; its gradient summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, all_reduce: AllReduce) -> Tensor:
        ctx.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.all_reduce(gradients[0]), None


class _SumOut(torch.autograd.Function):
    """Megatron-LM's g: the outputs summed over the ranks; their gradient as it is."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, all_reduce: AllReduce) -> Tensor:
        return all_reduce(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _PartOf(torch.autograd.Function):
    """A whole tensor's part in a sum over the ranks; every rank has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        return whole / ranks

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
