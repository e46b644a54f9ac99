"""Parameters that travel together, and what their owners hold of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gsreal.master import master_type
from gssim import shares


class Bucket:
    """Parameters that travel together: one flat replica, cut into a range for every owner."""

    def __init__(self, index: int, parameters: list[nn.Parameter], shard_shares: Sequence[float], rank: int) -> None:
        self.index, self.parameters = index, parameters
        self.elements = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.empty(self.elements, dtype=parameters[0].dtype, device=parameters[0].device)
        self.ranges = shares.ranges(self.elements, shard_shares)
        self.own = slice(*self.ranges[rank])
        self.places: dict[nn.Parameter, slice] = {}
        start = 0
        for parameter in parameters:
            place = slice(start, start + parameter.numel())
            self.flat[place].copy_(parameter.detach().reshape(-1))
            parameter.data = self.flat[place].view(parameter.shape)
            self.places[parameter] = place
            start = place.stop
        self.shard: nn.Parameter
        self.gradient: Tensor | None = None
        self.missing = set(parameters)

    def take_shard(self) -> None:
        """Make what the owner updates: its range of the replica, or a master copy of it where that is below fp32."""
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype)))

    def collect(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a parameter's gradient."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.flat)
        self.gradient[self.places[parameter]].copy_(gradient.reshape(-1))
        self.missing.discard(parameter)

    def fill(self) -> None:
        """Complete the gradient with zeros for parameters that got none."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.flat)
        for parameter in self.missing:
            self.gradient[self.places[parameter]].zero_()
        self.missing.clear()

    def keep(self, gradient: Tensor, weight: float) -> None:
        """Keep the own range's gradient, which is never thresholded; later pushes of a step add to the first."""
        if self.shard.grad is None:
            self.shard.grad = gradient.to(self.shard.dtype, copy=True).mul_(weight)
        else:
            self.shard.grad.add_(gradient.to(self.shard.dtype), alpha=weight)

    def write_back(self) -> None:
        """Bring what was updated to the replica."""
        if self.shard.dtype != self.flat.dtype:
            self.flat[self.own].copy_(self.shard.detach())
