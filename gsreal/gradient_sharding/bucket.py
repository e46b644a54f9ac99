"""Parameters that travel together, and what their owners hold of them.

A parameter that no backward reached on a rank is absent there, as `None` is on one device: its place in the bucket is
filled with negative zeros. Sums keep them only where all ranks are absent, and gradients that exist are stored without
them, so that owners see in what comes anyway whether a parameter has a gradient at all.

Divides buckets among owners: by elements, or at the edges of parameters.

Shards cut into pieces where the parameters in them have different histories: those that got no gradient in a step.

torch's optimizers pass over a parameter without a gradient: no decay, no momentum, no step counted. A shard is updated
as one tensor, so it is cut, once and for good, where such a parameter begins and ends; values and state stay in place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.master import master_type
from gsreal.gradient_sharding.pushed_gradient import PushedGradient
from gssim.plan import Division, divide

ABSENT = -0.0
"""In place of every element of a gradient that does not exist."""
CHUNK_ELEMENTS = 1 << 20
"""Looked at together, so that a search for absent gradients takes little memory."""


@dataclass(eq=False)
class Piece:
    """A range of an owner's shard that the optimizer updates as one tensor."""

    tensor: nn.Parameter
    """What the optimizer has: the shard itself, or a view of a range of it."""
    place: slice
    """Where it is in the shard."""


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
        self.group_index = 0
        """Which of the optimizer's groups has its pieces."""
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
        self.pieces: list[Piece] = []
        """What the optimizer has of the shard: usually all of it in one piece."""
        self.reached: set[nn.Parameter] = set()
        """Parameters that a backward of this step reached on this rank."""
        self.updated: set[nn.Parameter] = set()
        """Parameters that got a gradient in the last step."""
        self.zeroed: set[nn.Parameter] = set()
        """Parameters whose gradients were set to zero, not to None: they have one in the next step."""
        self.has_master = False
        """Whether the shard has values that the model's parameters do not have: finer ones, or unpublished ones."""
        self.weight = 1.0
        """What gradients are multiplied by as they are collected: this rank's part of its node's loss terms."""
        self.gradient: Tensor | None = None
        """Of all places; once it is reduced in the node, of this rank's."""
        self.missing = set(parameters)
        self._addresses = [(p.data_ptr(), p.shape) for p in parameters]
        self._stand_ins: dict[nn.Parameter, PushedGradient] = {}
        """What takes the place of each parameter's gradient once it has been pushed."""

    def take_shard(self, *, master: bool = False) -> None:
        """Make what the owner updates: its range of the replica, or a master copy of it where that is below fp32.

        `master`: a copy in any case.
        """
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype), copy=master))
        self.has_master = master or self.shard.dtype != own.dtype
        self.join()

    def join(self) -> None:
        """Let the optimizer have the shard in one piece."""
        self.pieces = [Piece(self.shard, slice(0, self.shard.numel()))]

    @property
    def is_one_piece(self) -> bool:
        """Whether the optimizer has the shard itself."""
        return len(self.pieces) == 1 and self.pieces[0].tensor is self.shard

    def cut_by_parameter(self) -> None:
        """Let the optimizer have every parameter of the shard for itself, in its shape."""
        values = self.shard.detach()
        parts = [(parameter.shape or (1,), self.owned(parameter)[1]) for parameter in self.parameters]
        self.pieces = [
            Piece(nn.Parameter(values[part].view(shape)), part) for shape, part in parts if part.stop > part.start
        ]

    def take(self, parameter: nn.Parameter, *, leaves: bool) -> None:
        """Take a parameter's gradient out of the backward, unless it stays there to add up."""
        if leaves:
            self.collect(parameter)
            self.missing.discard(parameter)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient into the bucket; where it has none, note that."""
        if isinstance(parameter.grad, PushedGradient):
            parameter.grad = parameter.grad.added()
            if parameter.grad is not None:
                del self._stand_ins[parameter]  # what was added is in it
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole)
        if parameter.grad is not None:
            self.reached.add(parameter)
        _copy_gradient(parameter, self.gradient[self.slots[parameter]], self.weight)
        parameter.grad = self._stand_in(parameter) if parameter in self.reached else None

    def _stand_in(self, parameter: nn.Parameter) -> PushedGradient:
        """Return what takes the place of a gradient."""
        found = self._stand_ins.get(parameter)
        if found is None:
            found = self._stand_ins[parameter] = PushedGradient.of(parameter)
        found.is_zeroed = False
        return found

    def clear_stand_ins(self) -> None:
        """Leave parameters whose gradients were pushed without any, so that autograd has nothing to add the next to."""
        for parameter in self.reached:
            if isinstance(parameter.grad, PushedGradient):
                parameter.grad = None

    @property
    def complete(self) -> bool:
        """Whether every parameter has its gradient that will get one: frozen ones do not."""
        return not any(parameter.requires_grad for parameter in self.missing)

    def end_backward(self, *, leaves: bool) -> None:
        """Complete what leaves by what earlier backwards left of parameters that this one did not reach."""
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

    def piece_of(self, parameter: nn.Parameter) -> tuple[Piece, int, slice] | None:
        """Return the piece that has what this rank owns of a parameter, where that begins in it, and its place there.

        None where it owns nothing of it.
        """
        start, part = self.owned(parameter)
        for piece in self.pieces:
            if piece.place.start <= part.start < part.stop <= piece.place.stop:
                return piece, start, slice(part.start - piece.place.start, part.stop - piece.place.start)
        return None

    def show_gradients(self) -> None:
        """Let every piece see its part of the shard's gradient."""
        if self.shard.grad is not None and not self.is_one_piece:
            for piece in self.pieces:
                piece.tensor.grad = self.shard.grad[piece.place].view(piece.tensor.shape)

    def forget_gradients(self, *, set_to_none: bool) -> None:
        """Forget the gradients of the shard; `set_to_none`: else they are zero where there were any."""
        self.clear_stand_ins()
        self.reached.clear()
        if set_to_none or self.shard.grad is None:
            self.shard.grad = None
            for piece in self.pieces:
                piece.tensor.grad = None
        else:
            self.shard.grad.zero_()

    def absent(self) -> set[nn.Parameter]:
        """Return which parameters of the shard got a gradient on no rank.

        Only those are looked for that this rank did not reach either: a device is waited for in steps without them
        in no case.
        """
        owned = [(p, self.owned(p)[1]) for p in self.parameters if p not in self.reached and p not in self.zeroed]
        owned = [(parameter, part) for parameter, part in owned if part.stop > part.start]
        gradient = self.shard.grad
        if not owned or gradient is None:
            return set()
        firsts = torch.stack([gradient[part.start] for _, part in owned])
        candidates = [each for each, is_absent in zip(owned, _are_absent(firsts).tolist(), strict=True) if is_absent]
        return {parameter for parameter, part in candidates if _all_absent(gradient[part])}

    def keep(self, gradient: Tensor, weight: float) -> None:
        """Keep the own range's gradient, which is never thresholded; later pushes of a step add to the first."""
        if self.shard.grad is None:
            self.shard.grad = gradient.to(self.shard.dtype, copy=True).mul_(weight)
        else:
            self.shard.grad.add_(gradient.to(self.shard.dtype), alpha=weight)

    @property
    def holds_values(self) -> bool:
        """Whether parameters have their values between steps."""
        return True

    def addresses(self) -> list[tuple[int, torch.Size]]:
        """Return where the values of every parameter must be, and in which shape."""
        return self._addresses

    def adopt(self, part: slice, *, rounded: bool = True) -> None:
        """Make a part of the replica the master copy's, after it was written to from outside.

        `rounded`: the replica has what the master has, but in its own precision; where that is so still, it is kept.
        """
        master, replica = self.shard.detach()[part], self.flat[self.own][part]
        if rounded:
            replica = torch.where(master.to(replica.dtype) == replica, master, replica.to(master.dtype))
        master.copy_(replica)

    def write_back(self) -> None:
        """Bring what was updated to the replica."""
        if self.shard.dtype != self.flat.dtype:
            self.flat[self.own].copy_(self.shard.detach())


def _are_absent(values: Tensor) -> Tensor:
    """Return for every value whether it is the negative zero of a gradient that does not exist."""
    values = values.real if values.is_complex() else values
    return values.signbit().logical_and_(values == 0)


def _all_absent(gradient: Tensor) -> bool:
    return all(bool(_are_absent(part).all()) for part in gradient.split(CHUNK_ELEMENTS))


def _copy_gradient(parameter: nn.Parameter, slot: Tensor, weight: float) -> None:
    """Write a parameter's gradient times `weight`, dense or sparse, into its flat place, or that it has none.

    To add it to zero turns negative zeros into positive ones, in as many passes as to copy it.
    """
    gradient = parameter.grad
    if gradient is None:
        slot.fill_(ABSENT)
    elif gradient.is_sparse:
        slot.zero_().view(parameter.shape).add_(gradient, alpha=weight)
    else:
        torch.add(slot.new_zeros(()), gradient.reshape(-1), alpha=weight, out=slot)


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


class Partition:
    """Divides the buckets of a model one after another, by the shares of the ranks: node by node, in each by place.

    With `whole_tensors` every parameter has one owner: a bucket is cut at the edges nearest to what each owner lacks of
    its share of all buckets so far, so that what one bucket cannot give is made up for in the next.
    """

    def __init__(self, by_node: Sequence[Sequence[float]], *, whole_tensors: bool) -> None:
        self.by_node, self.whole_tensors = by_node, whole_tensors
        self._shares = [share for of_place in zip(*by_node, strict=True) for share in of_place]
        self._owned = [0] * len(self._shares)

    def divide(self, sizes: Sequence[int]) -> Division:
        """Return how the next bucket is divided, of parameters with as many elements.

        >>> partition = Partition([[0.5], [0.5]], whole_tensors=True)
        >>> partition.divide([6, 3]).owned, partition.divide([1, 5]).owned
        (((6, 3),), ((1, 5),))
        """
        elements = sum(sizes)
        if not self.whole_tensors:
            return divide(elements, by_node=self.by_node)
        total = sum(self._owned) + elements
        lacking = [max(0.0, share * total - owned) for share, owned in zip(self._shares, self._owned, strict=True)]
        scale = elements / (sum(lacking) or 1.0)
        edges = list(accumulate(sizes, initial=0))
        cuts = [min(edges, key=lambda edge: abs(edge - wanted * scale)) for wanted in accumulate(lacking, initial=0.0)]
        parts = [last - first for first, last in pairwise([*cuts[:-1], elements])]
        self._owned = [owned + part for owned, part in zip(self._owned, parts, strict=True)]
        nodes = len(self.by_node)
        return Division(tuple(tuple(parts[i : i + nodes]) for i in range(0, len(parts), nodes)))

    @property
    def idle_owners(self) -> bool:
        """Whether an owner got nothing of any bucket so far that is cut at the edges of parameters."""
        return self.whole_tensors and not all(self._owned)


def pass_over_absent(bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer pass over the parameters of a bucket that got a gradient on no rank in this step."""
    absent = bucket.absent()
    bucket.updated = {parameter for parameter in bucket.parameters if parameter not in absent}
    if not absent:
        return
    cut_where(bucket, optimizer, lambda parameter: parameter in absent)
    for parameter in absent:
        found = bucket.piece_of(parameter)
        assert found is not None
        found[0].tensor.grad = None


def cut_where(bucket: Bucket, optimizer: torch.optim.Optimizer, kind: Callable[[nn.Parameter], Any]) -> None:
    """Cut a shard's pieces wherever the parameters on both sides are of different kinds."""
    found: list[Piece] = []
    for piece in bucket.pieces:
        runs: list[slice] = []
        last: Any = None
        for parameter in bucket.parameters:
            held, part = bucket.piece_of(parameter), bucket.owned(parameter)[1]
            if held is None or held[0] is not piece:
                continue
            if runs and kind(parameter) == last:
                runs[-1] = slice(runs[-1].start, part.stop)
            else:
                runs.append(part)
            last = kind(parameter)
        found += [piece] if len(runs) < 2 else _cut(bucket, piece, runs, optimizer)
    bucket.pieces = found
    bucket.show_gradients()


def _cut(bucket: Bucket, piece: Piece, places: list[slice], optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Give the optimizer several pieces in the place of one, with their parts of its state."""
    values = bucket.shard.detach()
    pieces = [Piece(nn.Parameter(values[place]), place) for place in places]
    members = next(g["params"] for g in optimizer.param_groups if any(p is piece.tensor for p in g["params"]))
    at = next(i for i, member in enumerate(members) if member is piece.tensor)
    members[at : at + 1] = [each.tensor for each in pieces]
    state = optimizer.state.pop(piece.tensor, None)
    for each in pieces if state else ():
        first = each.place.start - piece.place.start
        part = slice(first, first + each.tensor.numel())
        flat = elementwise(state, piece)
        optimizer.state[each.tensor] = {key: flat[key][part] if key in flat else _copy(state[key]) for key in state}
    return pieces


def elementwise(state: Mapping[str, Any], piece: Piece) -> dict[str, Tensor]:
    """Return those of an optimizer's states that have a value for every element of a piece, as flat views."""
    shape = piece.tensor.shape  # of at least one dimension, unlike numbers of steps
    return {key: value.view(-1) for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
