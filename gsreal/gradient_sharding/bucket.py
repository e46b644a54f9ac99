"""Parameters that travel together, and what their owners hold of them."""

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.pushed_gradient import PushedGradient
from gsreal.master import master_type
from gssim.division import Division


class Bucket:
    """Parameters that travel together: one flat replica, cut by place in the node, and of each place by owner.

    What is pushed and published across nodes is this rank's place: all of it where nodes are ranks.
    """

    is_replica = True
    """Whether every rank keeps all of it, so that what owners update must be published."""

    def __init__(
        self, index: int, parameters: list[nn.Parameter], division: Division, *, node: int, place: int = 0
    ) -> None:
        self.index, self.parameters = index, parameters
        size = sum(parameter.numel() for parameter in parameters)
        self.whole = torch.empty(size, dtype=parameters[0].dtype, device=parameters[0].device)
        """The replica of all places."""
        self.node_ranges = division.place_ranges
        """Every place's half-open range of it."""
        self.slots = _moved(parameters, self.whole)
        """Where each parameter is in it."""
        first, end = self.node_ranges[place]
        self._first = first
        self.flat, self.elements = self.whole[first:end], end - first
        """The replica of this rank's place, and its size."""
        self.ranges = [(start - first, stop - first) for start, stop in division.ranges(place)]
        """Every owner's half-open range of the place."""
        self.own = slice(*self.ranges[node])
        self.places = {parameter: _clipped(slot, first, end) for parameter, slot in self.slots.items()}
        """Where each parameter is in the place, as far as it is there."""
        self.shard: nn.Parameter
        self.has_master = False
        """Whether the shard is a copy, not a part of the replica."""
        self.weight = 1.0
        """What gradients are multiplied by as they are collected: this rank's part of its node's loss terms."""
        self.gradient: Tensor | None = None
        """Of all places; once it is reduced in the node, of this rank's."""
        self.missing = set(parameters)
        self._stand_ins: dict[nn.Parameter, PushedGradient] = {}
        """What takes the place of each parameter's gradient once it has been pushed."""
        self.pushed: set[nn.Parameter] = set()
        """Parameters whose gradients were pushed since the last step."""

    def take_shard(self, *, master: bool = False) -> None:
        """Make what the owner updates: its range of the replica, or a master copy of it where that is below fp32.

        `master`: a copy in any case.
        """
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype), copy=master))
        self.has_master = master or self.shard.dtype != own.dtype

    def take(self, parameter: nn.Parameter, *, leaves: bool) -> None:
        """Take a parameter's gradient out of the backward, unless it stays there to add up."""
        if leaves:
            self.collect(parameter)
            self.missing.discard(parameter)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient, zeros where it has none, into the bucket."""
        if isinstance(parameter.grad, PushedGradient):
            parameter.grad = parameter.grad.added()
            if parameter.grad is not None:
                del self._stand_ins[parameter]  # what was added is in it
        if parameter.grad is not None:
            self.pushed.add(parameter)
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole)
        _copy_gradient(parameter, self.gradient[self.slots[parameter]], self.weight)
        parameter.grad = self._stand_in(parameter) if parameter in self.pushed else None

    def _stand_in(self, parameter: nn.Parameter) -> PushedGradient:
        """Return what takes the place of a gradient."""
        found = self._stand_ins.get(parameter)
        if found is None:
            found = self._stand_ins[parameter] = PushedGradient.of(parameter)
        found.is_zeroed = False
        return found

    def clear_stand_ins(self) -> None:
        """Leave parameters whose gradients were pushed without any, so that autograd has nothing to add the next to."""
        for parameter in self.pushed:
            if isinstance(parameter.grad, PushedGradient):
                parameter.grad = None

    def forget_pushed(self) -> None:
        """Leave parameters without gradients: those that were pushed have been used, or discarded."""
        self.clear_stand_ins()
        self.pushed.clear()

    @property
    def complete(self) -> bool:
        """Whether every parameter has its gradient that will get one: frozen ones do not."""
        return not any(parameter.requires_grad for parameter in self.missing)

    def end_backward(self, *, leaves: bool) -> None:
        """Complete what leaves: by what earlier backwards left of parameters that got nothing in this one, or zeros."""
        if leaves:
            for parameter in self.parameters:
                if parameter in self.missing:
                    self.collect(parameter)
            self.missing.clear()

    def owned(self, parameter: nn.Parameter) -> tuple[int, slice]:
        """Return where this rank's part of a parameter begins in it, and which part of the shard that is."""
        slot, begin = self.slots[parameter], self._first + self.own.start
        first, end = max(slot.start, begin), min(slot.stop, self._first + self.own.stop)
        if first >= end:
            return 0, slice(0, 0)
        return first - slot.start, slice(first - begin, end - begin)

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


def _copy_gradient(parameter: nn.Parameter, slot: Tensor, weight: float) -> None:
    """Write a parameter's gradient times `weight`, dense or sparse, or zeros where it has none, into its flat place."""
    gradient = parameter.grad
    if gradient is None:
        slot.zero_()
    elif gradient.is_sparse:
        slot.zero_().view(parameter.shape).add_(gradient, alpha=weight)
    elif weight == 1:
        slot.copy_(gradient.reshape(-1))
    else:
        torch.mul(gradient.reshape(-1), weight, out=slot)


def _moved(parameters: list[nn.Parameter], flat: Tensor) -> dict[nn.Parameter, slice]:
    """Make parameters views of a flat tensor, one after another; return where they are."""
    slots, start = {}, 0
    for parameter in parameters:
        slots[parameter] = slot = slice(start, start + parameter.numel())
        flat[slot].copy_(parameter.detach().reshape(-1))
        parameter.data = flat[slot].view(parameter.shape)
        start = slot.stop
    return slots


def _clipped(slot: slice, first: int, end: int) -> slice:
    """Return what of a slice is in [first, end), counted from there."""
    return slice(*(min(max(edge, first), end) - first for edge in (slot.start, slot.stop)))
