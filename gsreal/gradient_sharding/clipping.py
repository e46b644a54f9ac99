"""Gradients clipped by their norm where every owner has a part of them: one scalar is all-reduced."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

AllReduce = Callable[[Tensor, Any], None]
"""Puts all owners' values of a tensor together, by an operation."""
STABILISER = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


def total_norm(gradients: Sequence[Tensor], norm_type: float, all_reduce: AllReduce, device: torch.device) -> Tensor:
    """Return the norm of all owners' gradients taken together, the same on every rank (one scalar all-reduce).

        p < inf:  (sum over owners of sum |g|^p)^(1/p)        p = inf:  max over owners of max |g|

    Not a number, or infinite, where any gradient is: both survive sums, and a maximum is told of them.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if not gradient.numel():
            continue
        norm = torch.linalg.vector_norm(gradient, norm_type).double().to(device)
        total = torch.maximum(total, norm) if norm_type == torch.inf else total + norm**norm_type
    if norm_type == torch.inf:
        total = torch.where(total.isnan(), torch.inf, total)  # backends disagree about a maximum with NaN
        all_reduce(total, dist.ReduceOp.MAX)
        return total
    all_reduce(total, dist.ReduceOp.SUM)
    return total ** (1.0 / norm_type)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients down to a norm of `max_norm` where theirs is larger."""
    factor = (max_norm / (norm + STABILISER)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))


def any_non_finite(gradients: Sequence[Tensor], all_reduce: AllReduce, device: torch.device) -> bool:
    """Return whether any owner's gradient holds NaN or infinity, alike on every rank (one scalar all-reduce)."""
    found = torch.zeros((), device=device)
    for gradient in gradients:
        if gradient.numel():
            found = torch.maximum(found, (~gradient.isfinite().all()).to(device, found.dtype))
    all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
