"""The blocks of a real module: what is checkpointed, and what FSDP2 shards on its own."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from gsreal.recompute import selective_contexts
from gssim.workload import Model, unrolled


def blocks_of(model: Model, module: nn.Module) -> list[nn.Module]:
    """Return the modules of the model's blocks: the elements of its repeated stack."""
    inner = dict(module.named_modules())
    return [inner[layer.module] for layer in unrolled(model) if layer.layer.block]


def checkpoint_blocks(model: Model, module: nn.Module, *, selective: bool = False) -> None:
    """Run every block of the module under torch's checkpoint, with its default settings (it keeps random states).

    `selective`: it keeps the outputs of compute-heavy operations too, and runs only the others again.

    The blocks' own forward is replaced: wrappers come around it, as they should, and parameters keep their names.
    """
    for block in blocks_of(model, module):
        checkpoint_block(block, selective=selective)


def checkpoint_block(block: nn.Module, *, selective: bool = False) -> None:
    """Run one block under torch's checkpoint."""
    context: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
