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

    def take_shard(self, *, master: bool = False) -> None:
        """Make what the owner updates: its range of the replica, or a master copy of it where that is below fp32.

        `master`: a copy in any case.
        """
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype), copy=master))

    def collect(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient, zeros where it has none, into the bucket."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.flat)
        _copy_gradient(parameter, self.gradient[self.places[parameter]])
        parameter.grad = None

    @property
    def complete(self) -> bool:
        """Whether every parameter has its gradient that will get one: frozen ones do not."""
        return not any(parameter.requires_grad for parameter in self.missing)

    def fill(self) -> None:
        """Complete the gradient: with what earlier backwards left of parameters that this one did not reach."""
        for parameter in self.parameters:
            if parameter in self.missing:
                self.collect(parameter)
        self.missing.clear()

    def owned(self, parameter: nn.Parameter) -> tuple[int, slice]:
        """Return where this rank's part of a parameter begins in it, and which part of the shard that is."""
        place = self.places[parameter]
        first, end = max(place.start, self.own.start), min(place.stop, self.own.stop)
        if first >= end:
            return 0, slice(0, 0)
        return first - place.start, slice(first - self.own.start, end - self.own.start)

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


def _copy_gradient(parameter: nn.Parameter, slot: Tensor) -> None:
    """Write a parameter's gradient, dense or sparse, or zeros where it has none, into its place in a flat one."""
    gradient = parameter.grad
    if gradient is None:
        slot.zero_()
    elif gradient.is_sparse:
        slot.zero_().view(parameter.shape).add_(gradient)
    else:
        slot.copy_(gradient.reshape(-1))
