"""Policy of selective activation checkpointing.

The outputs of compute-heavy operations are saved, all else is recomputed.
"""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
