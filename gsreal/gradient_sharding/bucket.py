"""Parameters that travel together, and what their owners hold of them."""

import torch
from torch import Tensor, nn

from gsreal.master import master_type
from gssim.division import Division


class Bucket:
    """Parameters that travel together: one flat replica, cut by place in the node, and of each place by owner."""

    is_replica = True
    """Whether every rank keeps all of it, so that what owners update must be published."""

    def __init__(
        self, index: int, parameters: list[nn.Parameter], division: Division, *, node: int, place: int = 0
    ) -> None:
        self.index, self.parameters = index, parameters
        self.elements = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.empty(self.elements, dtype=parameters[0].dtype, device=parameters[0].device)
        self.node_ranges = division.place_ranges
        """What every device of a node reduces and publishes, as half-open ranges of the bucket."""
        first, end = self.node_ranges[place]
        self.part = self.flat[first:end]
        """That of this rank's place, which is pushed and published across nodes; all of it where there is one place."""
        self.ranges = [(start - first, stop - first) for start, stop in division.ranges(place)]
        """What every owner of this place has, as half-open ranges of the part."""
        self.own = slice(*self.ranges[node])
        self.places: dict[nn.Parameter, slice] = {}
        """Where each parameter is in the bucket."""
        start = 0
        for parameter in parameters:
            own_place = slice(start, start + parameter.numel())
            self.flat[own_place].copy_(parameter.detach().reshape(-1))
            parameter.data = self.flat[own_place].view(parameter.shape)
            self.places[parameter] = own_place
            start = own_place.stop
        self.shard: nn.Parameter
        self.weight = 1.0
        """What gradients are multiplied by as they are collected: this rank's part of its node's loss terms."""
        self.gradient: Tensor | None = None
        """Of the whole bucket; once it is reduced in the node, of the part."""
        self.missing = set(parameters)

    def take_shard(self) -> None:
        """Make what the owner updates: its range of the replica, or a master copy of it where that is below fp32."""
        own = self.part[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype)))

    def take(self, parameter: nn.Parameter, *, leaves: bool) -> None:
        """Take a parameter's gradient out of the backward, unless it stays there to add up."""
        if leaves:
            self.collect(parameter)
            self.missing.discard(parameter)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient, zeros where it has none, into the bucket."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.flat)
        slot, gradient = self.gradient[self.places[parameter]], parameter.grad
        if gradient is None:
            slot.zero_()
        elif self.weight == 1:
            slot.copy_(gradient.reshape(-1))
        else:
            torch.mul(gradient.reshape(-1), self.weight, out=slot)
        parameter.grad = None

    def end_backward(self, *, leaves: bool) -> None:
        """Complete what leaves: by what earlier backwards left of parameters that got nothing in this one, or zeros."""
        if leaves:
            for parameter in self.parameters:
                if parameter in self.missing:
                    self.collect(parameter)
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
            self.part[self.own].copy_(self.shard.detach())
