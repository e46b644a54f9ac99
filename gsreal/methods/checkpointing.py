"""Gradient checkpointing of the blocks of a model's module."""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gssim.workload import Model, unrolled

aten = torch.ops.aten
COMPUTE_HEAVY: frozenset[Any] = frozenset(
    packet.default
    for packet in (
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten._grouped_mm,
        aten.convolution,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_fused_attention_overrideable,
    )
)
"""Matrix products (of experts too), convolutions, fused attention (composed operations are seen as their parts).

Source: torchtitan's list for selective checkpointing per operation, which saves only every second matrix product.
"""


def _policy(_context: Any, operation: Any, *_args: Any, **_settings: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COMPUTE_HEAVY else CheckpointPolicy.PREFER_RECOMPUTE


selective_contexts = partial(create_selective_checkpoint_contexts, _policy)
"""For `checkpoint(..., context_fn=selective_contexts)`: compute-heavy operations run once, all others twice."""


def blocks_of(model: Model, module: nn.Module) -> list[nn.Module]:
    """Return the modules of the model's blocks: the elements of its repeated stack."""
    inner = dict(module.named_modules())
    return [inner[layer.module] for layer in unrolled(model) if layer.layer.block]


def checkpoint_blocks(model: Model, module: nn.Module, *, selective: bool = False) -> None:
    """Run every block of the module under torch's checkpoint, with its default settings (it restores random states).

    `selective`: the outputs of compute-heavy operations are saved too, and only the others are recomputed.

    The blocks' own forward is replaced: wrappers then enclose it, as intended, and parameters keep their names.
    """
    for block in blocks_of(model, module):
        checkpoint_block(block, selective=selective)


def checkpoint_block(block: nn.Module, *, selective: bool = False) -> None:
    """Run one block under torch's checkpoint."""
    context: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)


def checkpoint_inside(block: nn.Module, *, selective: bool = False) -> None:
    """Let a block's forward recompute itself, as a method of its own: what is compiled then contains both."""
    context: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}
    plain = type(block).forward

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        return checkpoint(plain, self, *args, use_reentrant=False, **context, **named)

    block.forward = MethodType(forward, block)
