"""Placeholder for a gradient that was pushed, and norm, clipping and NaN checks of gradients spread over owners."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALLOWED = frozenset(
    {
        "__get__",  # shape, dtype, device, and whatever else is asked without computing
        *("__deepcopy__", "__format__", "__repr__", "__set__", "_has_compatible_shallow_copy_type"),
        *("clone", "contiguous", "cpu", "cuda", "detach", "detach_", "requires_grad_", "to"),
        *("double", "float", "half", "bfloat16", "type", "is_complex", "is_floating_point"),
        *("dim", "element_size", "nelement", "numel", "size"),
    }
)
"""Tensor functions that compute nothing: those that `Module.to` and `Module.zero_grad` call."""


CLIPS = torch.nn.utils.clip_grad.__name__


class PushedGradient(torch.Tensor):
    """An empty sparse gradient, to which a later backward adds; computing with it raises RuntimeError.

    So code that reads `parameter.grad` (torch's `clip_grad_norm_`, say) fails instead of seeing nothing, and a missing
    placeholder shows that the gradient has been discarded.
    """

    is_zeroed: bool
    """Whether `zero_` was called: `Module.zero_grad(set_to_none=False)`."""

    @staticmethod
    def of(parameter: nn.Parameter) -> "PushedGradient":
        """Return the placeholder of a parameter's gradient."""
        places = torch.empty(parameter.dim(), 0, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        placeholder = torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False)
        placeholder.__class__ = PushedGradient  # as_subclass takes no sparse tensors
        assert isinstance(placeholder, PushedGradient)
        placeholder.is_zeroed = False
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute."""
        name = getattr(func, "__name__", "")
        if name == "zero_":
            args[0].is_zeroed = True
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        is_allowed = name in ALLOWED and attribute != "is_sparse"  # which torch's optimizers ask
        if not is_allowed and not isinstance(func, torch._ops.OpOverload):  # those are autograd's own additions
            raise RuntimeError(
                f"{attribute or name} of a gradient that was pushed to its owners in the backward: no rank has it "
                "whole. Clip with the clip_grad_norm_ of what shard_gradients returned, and step with that"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.is_sparse and not isinstance(result, PushedGradient):
                result.__class__ = PushedGradient  # p.grad.detach().float() is no gradient either
                result.is_zeroed = False  # type: ignore[attr-defined]
        return result

    def added(self) -> Tensor | None:
        """Return the gradient that later backwards added (only sparse ones are added in place), or None."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self._nnz():
                return None
            return torch.sparse_coo_tensor(self._indices(), self._values(), self.shape, check_invariants=False)


class ShardGradient(torch.Tensor):
    """The gradient of a shard: torch's `clip_grad_norm_` of it, which would clip by one rank's norm, raises an error.

    PyTorch Lightning, for one, clips what is in the optimizer's `param_groups`.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what plain tensors give; refuse the norms of torch.nn.utils.clip_grad."""
        if "norm" in getattr(func, "__name__", "") and sys._getframe(1).f_globals.get("__name__") == CLIPS:
            raise RuntimeError(
                "torch's clip_grad_norm_ of this rank's shards would clip by its part of the norm, other ranks by "
                "theirs: call the clip_grad_norm_ of what shard_gradients returned"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


AllReduce = Callable[[Tensor, Any], None]
"""All-reduces a tensor over all owners in place, with an operation."""
STABILISER = 1e-6
"""Added to the divisor as in torch.nn.utils.clip_grad_norm_."""


def total_norm(gradients: Sequence[Tensor], norm_type: float, all_reduce: AllReduce, device: torch.device) -> Tensor:
    """Return the norm of all owners' gradients together, the same on every rank (one scalar all-reduce).

        p < inf:  (sum over owners of sum |g|^p)^(1/p)        p = inf:  max over owners of max |g|

    NaN or infinite if any gradient is: both propagate through sums, and are mapped to infinity for a maximum.
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
    """Scale all gradients down to a norm of `max_norm` if theirs is larger."""
    factor = (max_norm / (norm + STABILISER)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))


def any_non_finite(gradients: Sequence[Tensor], all_reduce: AllReduce, device: torch.device) -> bool:
    """Return whether any owner's gradient has NaN or infinity, the same on every rank (one scalar all-reduce)."""
    nonfinite = torch.zeros((), device=device)
    for gradient in gradients:
        if gradient.numel():
            nonfinite = torch.maximum(nonfinite, (~gradient.isfinite().all()).to(device, nonfinite.dtype))
    all_reduce(nonfinite, dist.ReduceOp.MAX)
    return bool(nonfinite)
