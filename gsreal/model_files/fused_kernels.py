"""Records attention and dropout as torch runs them on a CUDA GPU, although the tensors are fake ones of a CPU.

On a CPU, `torch.nn.functional.scaled_dot_product_attention` with dropout runs in parts: a batch's scores, dropout mask
and probabilities are tensors of heads x length x length. A GPU runs it as one kernel, which keeps the logarithms of the
sums and the state of the random numbers in their place. A dropout draws its mask as numbers of the input's precision
on a CPU, and as one byte for each element on a GPU. Without dropout both run one kernel, but a GPU's in 16 bits copies
heads whose width is no multiple of 8 to padded ones.

The kernel of an attention is chosen as by torch 2.13 for GPUs of compute capability 8.0 and above (its
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `can_use_flash_attention` and
`can_use_mem_efficient_attention`). What it allocates is what torch's shape functions say. cuDNN's attention, which
torch prefers on H100 and B200 if the dropout is a multiple of 1/16, keeps as many bytes as flash attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

IN_PARTS = 0
"""Number of the attention that is made of other operations, among those that torch chooses from."""
FLASH_HEAD_WIDTH = 256
"""Widest head of flash attention."""
FLASH_MULTIPLE = 8
"""Flash attention pads heads to a multiple of so many elements."""
ALIGNED_BYTES = 16
"""Rows of a head are multiples of so many bytes for memory-efficient attention (128 bits for tensor cores)."""


@contextmanager
def cuda_kernels() -> Iterator[list[str]]:
    """Run attention and dropout of fake tensors as a CUDA GPU does, for the duration of the context.

    Yields a list, to which the name of each operation is added that a CPU would have run otherwise.
    """
    replaced: list[str] = []

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        inputs = query, key, value, attn_mask, dropout_p, is_causal
        named = {"scale": scale, "enable_gqa": enable_gqa}
        # by its key, as torch asks: fake tensors would be asked through their own, which has no kernels to choose from
        parts = aten._fused_sdp_choice.default._op_dk(torch._C.DispatchKey.CPU, *inputs, **named) == IN_PARTS
        differs = parts or query.shape[-1] % FLASH_MULTIPLE  # a CPU's fused attention pads no heads
        if differs and _allows_flash(query, key, value, attn_mask, is_causal=is_causal):
            replaced.append("flash attention")
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if parts and _allows_memory_efficient(query, key, value):
            replaced.append("memory-efficient attention")
            bias = _bias(attn_mask, query)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, dropout_p, is_causal, scale=scale
            )[0]
        return aten.scaled_dot_product_attention.default.decompose(*inputs, **named)

    def dropout(given: Tensor, p: float, train: bool) -> Tensor:
        if not train or not 0 < p < 1 or not given.numel():
            return aten.dropout.default.decompose(given, p, train)
        replaced.append("dropout")
        return aten.native_dropout(given, p, train)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        library.impl("dropout", dropout, "AutogradCPU")
        yield replaced


def _allows_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool) -> bool:
    """Return whether torch runs flash attention on these."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == 4
        and mask is None
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= FLASH_HEAD_WIDTH
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None) -> Tensor:
    """Return the output of flash attention; heads are padded for it, and the output's padding is cut off."""
    width = query.shape[-1]
    if missing := -width % FLASH_MULTIPLE:
        query, key, value = (F.pad(each, (0, missing)) for each in (query, key, value))
    scale = width**-0.5 if scale is None else scale
    output: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=scale
    )[0]
    return output[..., :width] if missing else output


def _allows_memory_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch runs memory-efficient attention on these; queries that share keys are left to parts."""
    return (
        query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[-1] == key.shape[-1]
        and all(
            each.shape[-1] * each.element_size() % ALIGNED_BYTES == 0
            and each.storage_offset() * each.element_size() % ALIGNED_BYTES == 0
            and each.stride(-1) == 1
            for each in (query, key, value)
        )
    )


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return what is added to the scores, for every sample and head: a mask of truth values as numbers."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=mask.device)
        mask = torch.where(mask.logical_not(), float("-inf"), zero)
    samples, heads, length = query.shape[:3]
    return mask.expand(samples, heads, length, mask.shape[-1])
