"""Compiles the blocks of a model's module with torch.compile, each by itself, as torchtitan does."""

import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from gsreal.compiled import SCRATCH_KERNELS, cache_folder, compiler
from gsreal.methods.checkpointing import blocks_of, checkpoint_inside
from gssim.workload import Model

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
    found = compiler()
    if found is not None:
        settings.cpp.cxx = (found,)
    dynamo_config.optimize_ddp = False  # a block is not cut at DDP's buckets
    dynamo_config.recompile_limit = len(blocks) + 8  # every block may need a compilation of its own
    for block in blocks:
        if model.compiled_recompute != "none":
            checkpoint_inside(block, model.compiled_recompute)
        forward: Any = block.forward
        # a method, so that a copy of the block (which a rank with several stages makes) runs on its own parameters
        block.forward = MethodType(torch.compile(forward.__func__, fullgraph=True, dynamic=False), block)
