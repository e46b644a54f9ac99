"""Low-rank adapters (LoRA) beside the linear maps of a model whose own parameters are frozen.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1: a map W of
shape (outputs, inputs) becomes W + (alpha / rank) B A, with A of shape (rank, inputs) drawn at random and B of shape
(outputs, rank) zero at first. Only A and B are trained.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsreal.model_files.layers import layer_modules
from gssim.errors import UserError
from gssim.units import shown_value
from gssim.workload import Adapters

SEPARATE = ("q_proj", "query", "q_lin", "wq"), ("v_proj", "value", "v_lin", "wv")
"""Usual names of the maps of queries, and of values."""
FUSED = ("qkv", "c_attn", "query_key_value", "Wqkv", "qkv_proj")
"""Usual names of one map of queries, keys and values."""


class LowRankAdapter(nn.Module):
    """Two matrices whose scaled product is added to a linear map."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.added_by_hook = True
        """Whether a hook adds its output; False: the forward of its map adds it, before a sum over ranks."""
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the map's output for its input `x` (..., inputs)."""
        return F.linear(F.linear(x, self.down), self.up) * self.scale


def _add(linear: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    adapter = linear.adapter
    assert isinstance(adapter, LowRankAdapter)
    adapted: Tensor = output + adapter(args[0]) if adapter.added_by_hook else output
    return adapted


def adapter_of(linear: nn.Module) -> LowRankAdapter | None:
    """Return the adapter beside a linear map; None: it has none."""
    adapter = linear._modules.get("adapter")
    return adapter if isinstance(adapter, LowRankAdapter) else None


def adapt(module: nn.Module, adapters: Adapters, *, where: str) -> None:
    """Freeze all parameters of a module, and add trained adapters beside its targets, in place."""
    module.requires_grad_(False)
    targets = adapters.targets
    names = adapted_maps(module, targets, where=f"{where}: adapters.targets = {shown_value(targets)}")
    for path, linear in linear_maps(module):
        if path.rpartition(".")[2] in names:
            inputs, outputs = linear.weight.shape if type(linear).__name__ == "Conv1D" else linear.weight.shape[::-1]
            scale = adapters.alpha / adapters.rank
            linear.adapter = LowRankAdapter(inputs, outputs, adapters.rank, scale)
            linear.register_forward_hook(_add)


def linear_maps(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear maps inside the module's blocks, with their paths; Hugging Face's Conv1D is one."""
    blocks = tuple(f"{path}." for path, is_block in layer_modules(module).items() if is_block)
    for path, inner in module.named_modules():
        if path.startswith(blocks) and (isinstance(inner, nn.Linear) or type(inner).__name__ == "Conv1D"):
            yield path, inner


def adapted_maps(module: nn.Module, targets: str | Sequence[str], *, where: str) -> tuple[str, ...]:
    """Return the names of the maps that get adapters: the last parts of their paths.

    `targets`: such names; `query-value`: the maps of queries and of values, or the one that has both; `all-linear`:
    every linear map of the blocks. Raises UserError where there is none; `where`: the key or option that names them,
    and its value.
    """
    known = tuple(dict.fromkeys(path.rpartition(".")[2] for path, _ in linear_maps(module)))
    if targets == "all-linear":
        maps = known
    elif targets == "query-value":
        pair = tuple(name for names in SEPARATE for name in names if name in known)
        maps = pair if len(pair) == 2 else tuple(name for name in FUSED if name in known)
    else:
        maps = tuple(name for name in targets if name in known)
    if not maps or (not isinstance(targets, str) and len(maps) < len(targets)):
        raise UserError(f"{where}: the blocks have the linear maps {', '.join(known) or '(none)'}")
    return maps
