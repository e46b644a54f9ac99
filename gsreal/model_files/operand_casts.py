"""Copies of operands that a CPU makes inside an operation on tensors of several data types.

A CPU has no kernels for operands of two data types. Before an elementwise operation, it copies each operand that has
not the common data type, whole and all at once, and what an operation in place writes if that has not (torch 2.13,
aten/src/ATen/TensorIterator.cpp, `compute_types`). Sums and means are of a copy of their input if they have another
data type (aten/src/ATen/native/ReduceOpsUtils.h, `make_reduction`), as a mean of 16 bits has. Conversions, and what
only moves values, copy nothing. CUDA's kernels convert what they read.

Copies of single numbers are left out, as they are of Python's numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

aten = torch.ops.aten

REDUCTIONS = {aten.sum, aten.mean, aten.prod, aten.cumsum, aten.cumprod, aten.linalg_vector_norm, aten.norm}
"""Operations that copy their first argument to the data type in which they sum."""
SELECTIONS = {aten.where: 0, aten.masked_fill: 1, aten.masked_fill_: 1}
"""Elementwise operations one of whose arguments only selects, and which of them."""
CONVERTING = {aten.clone, aten.copy, aten.copy_}
"""Elementwise operations that convert what they read."""


def operand_casts(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> list[int]:
    """Return the bytes of each copy that a CPU makes of an operand of an operation, of which all exist at once.

    >>> single, half = torch.ones(8, 8), torch.ones(8, dtype=torch.bfloat16)
    >>> operand_casts(torch.ops.aten.add.Tensor, (single, half), [single])
    [32]
    >>> operand_casts(torch.ops.aten.add_.Tensor, (half, single[0]), [half])
    [32, 32]
    """
    packet = func._overloadpacket
    if packet in REDUCTIONS:
        return _of_reduction(packet, args[0], outputs)
    if not (torch.Tag.pointwise in func.tags or packet is aten.rsub) or packet in CONVERTING or not outputs:
        return []
    operands = [each for place, each in enumerate(args) if place != SELECTIONS.get(packet)]
    tensors = [each for each in operands if isinstance(each, Tensor)]
    common = _common_type(operands, tensors, outputs[0])
    written = outputs[:1] if func._schema.is_mutable else []
    return [each.numel() * common.itemsize for each in (*tensors, *written) if each.dim() and each.dtype != common]


def _common_type(operands: Sequence[Any], tensors: Sequence[Tensor], output: Tensor) -> torch.dtype:
    """Return the data type to which the operands of an elementwise operation are converted."""
    types = {each.dtype for each in tensors}
    if len(types) == 1 and next(iter(types)).is_floating_point:
        return types.pop()  # all but few operations
    numbers = [each for each in operands if isinstance(each, (Tensor, int, float))]
    common = elementwise_dtypes(*numbers, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    # the quotient and the exponential of integers are computed in the data type of the result
    inexact = common.is_floating_point or common.is_complex
    return common if inexact or not output.is_floating_point() else output.dtype


def _of_reduction(packet: Any, given: Any, outputs: Sequence[Tensor]) -> list[int]:
    if not isinstance(given, Tensor) or not given.dim() or not outputs:
        return []
    if packet is aten.mean and outputs[0].dtype in (torch.bfloat16, torch.float16):  # its sum is made in fp32 too
        return [each.numel() * torch.float32.itemsize for each in (given, outputs[0]) if each.dtype != torch.float32]
    return [given.numel() * outputs[0].element_size()] if given.dtype != outputs[0].dtype else []
