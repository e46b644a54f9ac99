"""The blocks of a model's module: gradient checkpointing, and compilation of each by itself, as torchtitan does."""

import os
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gsreal.compiled import SCRATCH_KERNELS, cache_folder, compiler
from gsreal.methods.ring_attention import RING_ATTENTION
from gssim.units import Recompute
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
) | {RING_ATTENTION}
"""Matrix products (of experts too), convolutions, fused attention (composed operations are seen as their parts)."""
PRODUCTS: frozenset[Any] = frozenset((aten.mm.default, aten.addmm.default))
"""Matrix products of which torchtitan's per-operation selective checkpointing recomputes every second one."""


SELECTIVE: tuple[Recompute, ...] = ("selective", "every-second-product")
"""Kinds of checkpointing that keep the outputs of some operations."""


def is_kept(operation: Any, recompute: Recompute, *, products: int) -> bool:
    """Return whether selective checkpointing keeps an operation's output.

    `products`: number of matrix products that the block's forward has run, including this one.
    """
    is_second = operation in PRODUCTS and recompute == "every-second-product" and products % 2 == 0
    return operation in COMPUTE_HEAVY and not is_second


def _settings(recompute: Recompute) -> dict[str, Any]:
    """Return the arguments of torch's checkpoint for a recomputation; a selective one has a policy for each forward."""

    def contexts() -> Any:
        products = {False: 0, True: 0}  # in the first forward, and in its recomputation

        def policy(context: Any, operation: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
            products[context.is_recompute] += operation in PRODUCTS
            kept = is_kept(operation, recompute, products=products[context.is_recompute])
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return {"use_reentrant": False} | ({} if recompute == "full" else {"context_fn": contexts})


def blocks_of(model: Model, module: nn.Module) -> list[nn.Module]:
    """Return the modules of the model's blocks: the elements of its repeated stack."""
    inner = dict(module.named_modules())
    return [inner[layer.module] for layer in unrolled(model) if layer.layer.block]


def checkpoint_blocks(model: Model, module: nn.Module, recompute: Recompute) -> None:
    """Run every block of the module under torch's checkpoint, with its default settings (it restores random states).

    `recompute`: what each block recomputes in its backward; see `plan.recompute`. The blocks' own forward is replaced,
    so that wrappers enclose the checkpoint, and parameters keep their names.
    """
    for block in blocks_of(model, module):
        checkpoint_block(block, recompute)


def checkpoint_block(block: nn.Module, recompute: Recompute) -> None:
    """Run one block under torch's checkpoint."""
    block.forward = partial(checkpoint, block.forward, **_settings(recompute))


def checkpoint_inside(block: nn.Module, recompute: Recompute) -> None:
    """Put the checkpoint inside the block's forward method, so that its compiled graph contains the recomputation."""
    settings = _settings(recompute)
    plain = type(block).forward

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        return checkpoint(plain, self, *args, **settings, **named)

    block.forward = MethodType(forward, block)


KERNELS = "TORCHINDUCTOR_CACHE_DIR"


def compile_blocks(model: Model, module: nn.Module) -> None:
    """Let each block's forward be one graph that inductor compiles at its first call, if the model is compiled.

    Identical blocks share compiled kernels, and so do later runs: kernels are cached beside the other code that this
    package compiles, unless the user names a folder. The forward itself is replaced: hooks of wrappers (FSDP2's
    gathers, DDP's buckets) stay outside of the graph, and parameters keep their names. A forward that cannot be
    captured as a single graph fails.
    """
    if not model.compiled:
        return
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config as inductor_config  # takes seconds

    blocks = blocks_of(model, module)
    if Path(os.environ.get(KERNELS, SCRATCH_KERNELS)).name == SCRATCH_KERNELS:
        threads = torch.get_num_threads()  # kernels are compiled for this number of threads
        os.environ[KERNELS] = str(cache_folder() / f"inductor-{torch.__version__}-{threads}")
    settings: Any = inductor_config
    settings.compile_threads = 1  # no pool of processes beside each rank
    cxx = compiler()
    if cxx is not None:
        settings.cpp.cxx = (cxx,)
    dynamo_config.optimize_ddp = False  # a block is not cut at DDP's buckets
    dynamo_config.recompile_limit = len(blocks) + 8  # every block may need a compilation of its own
    for block in blocks:
        if model.compiled_recompute != "none":
            checkpoint_inside(block, model.compiled_recompute)
        forward: Any = block.forward
        # a method, so that a copy of the block (which a rank with several stages makes) runs on its own parameters
        block.forward = MethodType(torch.compile(forward.__func__, fullgraph=True, dynamic=False), block)
