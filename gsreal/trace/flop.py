"""FLOP of PyTorch's operations: those of matrix products, convolutions and attention; all others take time by bytes.

Every operation on floating-point numbers is either counted by a formula, or known to be bound by the bytes it moves.
One that is neither is refused: it would count nothing, however much it computes.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class UnknownOperationError(Exception):
    """An operation on floating-point numbers that does an unknown number of FLOP."""


# torch counts no FLOP for these; their arguments begin as those of the operations that it counts
ALIASES = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable: aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: (
        aten._scaled_dot_product_efficient_attention_backward
    ),
    aten._addmm_activation: aten.addmm,
}


def _grouped_product_flop(a: Tensor, b: Tensor, *_rest: Any, **_settings: Any) -> int:
    """Return the FLOP of the products of a group's rows (or columns) with the group's matrix, of all groups.

    Each row of a belongs to one group, so that the groups' sizes make no difference. Two matrices of two dimensions
    are cut along what they have in common, as in the gradient of the groups' matrices.
    """
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    rows, common, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    return 2 * batch * rows * common * columns


def _convolution_backward_flop(gradient: Tensor, inputs: Tensor, weight: Tensor, *rest: Any, **_settings: Any) -> int:
    """Return the FLOP of the gradients of input and weight, each as many as the forward's.

    torch's own formula takes the weight's gradient of a convolution in groups for that of one without.
    """
    transposed, wanted = rest[4], rest[7]
    places = (inputs if transposed else gradient).shape
    return sum(wanted[:2]) * 2 * places[0] * prod(places[2:]) * prod(weight.shape)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped_product_flop,
    aten.convolution_backward: _convolution_backward_flop,
    aten.mv: lambda a, *_rest, **_settings: 2 * a.numel(),
    aten.addmv: lambda _bias, a, *_rest, **_settings: 2 * a.numel(),
    aten.dot: lambda a, *_rest, **_settings: 2 * a.numel(),
    aten.vdot: lambda a, *_rest, **_settings: 2 * a.numel(),
    aten.addbmm: lambda _bias, a, b, *_rest, **_settings: 2 * prod(a.shape) * b.shape[-1],
}
"""Of operations that torch's counter does not know, or miscounts; they take tensors."""

# without leading and trailing underscores, and without the suffixes below
SUFFIXES = ("_backward_data", "_backward", "_forward", "_functional", "_copy", "_impl")
FAMILIES = (
    *("adaptive_avg_pool", "adaptive_max_pool", "assert", "avg_pool", "batch_norm", "embedding_bag", "empty", "fake"),
    *("fractional_max_pool", "functional_assert", "grid_sampler_", "max_pool", "max_unpool", "native_batch_norm"),
    *("new_", "rand", "reflection_pad", "replication_pad", "unique", "upsample_"),
)
"""First words of operations that are bound by the bytes they move."""
BOUND_BY_BYTES = (
    # made, filled, drawn
    "arange bernoulli cauchy complex exponential eye fill full full_like geometric linspace log_normal logspace "
    "multinomial normal ones ones_like poisson polar scalar_tensor uniform zero zeros zeros_like "
    # moved
    "alias as_strided as_strided_scatter block_diag cat channel_shuffle chunk_cat clone col2im constant_pad_nd copy "
    "detach diag_embed diagonal diagonal_scatter embedding embedding_dense embedding_renorm expand flip gather im2col "
    "index index_add index_copy index_fill index_put index_reduce index_select lift_fresh masked_fill masked_scatter "
    "masked_select narrow nonzero nonzero_static permute pin_memory pixel_shuffle pixel_unshuffle put repeat "
    "repeat_interleave reshape resize resize_as roll rot90 scatter scatter_add scatter_reduce select select_scatter "
    "slice slice_scatter split split_with_sizes squeeze stack t take to to_copy trace transpose tril triu unbind "
    "unfold unsafe_index unsafe_index_put unsafe_masked_index unsafe_masked_index_put_accumulate unsafe_split "
    "unsafe_split_with_sizes unsafe_view unsqueeze view view_as_complex view_as_real "
    # element by element
    "addr amp_update_scale dequantize dropout elu fused_dropout gelu glu hardshrink hardsigmoid hardswish hardtanh "
    "leaky_relu local_scalar_dense log_sigmoid masked_scale native_dropout prelu_kernel rrelu_with_noise rsub softplus "
    "softshrink threshold "
    # norms, softmax, losses
    "binary_cross_entropy binary_cross_entropy_with_logits cudnn_batch_norm fused_rms_norm huber_loss log_softmax "
    "masked_softmax miopen_batch_norm mse_loss multi_margin_loss multilabel_margin_loss native_group_norm "
    "native_layer_norm native_norm nll_loss nll_loss2d renorm safe_softmax smooth_l1_loss soft_margin_loss softmax "
    "weight_norm_interface "
    # reductions, scans, sorts
    "all allclose amax amin aminmax any argmax argmin bincount bucketize count_nonzero cummax cummax_helper cummin "
    "cummin_helper cumprod cumsum dist equal fused_sdp_choice histc is_all_true is_any_true isin kthvalue "
    "linalg_cross linalg_vector_norm logcumsumexp logsumexp max mean median min mode nanmedian nansum norm prod "
    "searchsorted sort std std_mean sum topk var var_mean"
)
"""Operations that are bound by the bytes they move, beside those that torch marks as element by element."""
NAMES = frozenset(BOUND_BY_BYTES.split())
TAGS = {tag for tag in (torch.Tag.pointwise, getattr(torch.Tag, "reduction", None)) if tag is not None}


def flop_of(func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[Tensor]) -> int:
    """Return the FLOP of one operation; `tensors`: its inputs and outputs. Raises UnknownOperationError."""
    packet = ALIASES.get(func._overloadpacket, func._overloadpacket)
    if packet in FORMULAS:
        return FORMULAS[packet](*args, **kwargs)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if is_bound_by_bytes(func) or not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return 0
    raise UnknownOperationError(
        f"the operation {func._overloadpacket} does an unknown number of FLOP; where the module is defined, state it "
        "with torch.utils.flop_counter.register_flop_formula (0, where its time depends on the bytes that it moves)"
    )


def is_bound_by_bytes(func: Any) -> bool:
    """Return whether an operation's time is that of the bytes which it reads and writes."""
    if func.namespace not in ("aten", "prims", "prim"):
        return False
    if TAGS & set(func.tags):
        return True
    name = func._overloadpacket.__name__.strip("_")
    if name.startswith("foreach_"):
        return name != "foreach_mm"
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name in NAMES or name.startswith(FAMILIES)
