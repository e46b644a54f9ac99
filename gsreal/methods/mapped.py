"""Autograd function of collectives inside divided models: one map of the tensor, and another of its gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Mapped(torch.autograd.Function):
    """One map of a tensor, and another of its gradient; `Mapped.apply(x, change, back)`. Saves no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `change(x)`."""
        ctx.back = back
        return change(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return `back(gradient)` for the tensor; the two functions have no gradient."""
        return ctx.back(gradients[0]), None, None
