"""Buckets: parameters in one flat replica, its partition among owners, and the owners' shards of them.

[Absent gradients] A parameter that no backward reached on a rank has an absent gradient there, like `None` on one
device: its slot in the bucket is filled with negative zeros. A sum stays a negative zero only if all ranks are absent,
and existing gradients are stored without negative zeros, so that owners can tell from the received values whether a
parameter has a gradient at all.

`Partition` divides buckets among owners: by elements, or at parameter boundaries.

Shards are split into pieces at parameters that got no gradient in a step. torch's optimizers skip a parameter without
a gradient: no decay, no momentum, no step counted. A shard is updated as one tensor, so it is split permanently where
such a parameter begins and ends; values and state stay in place.

Assignment of a model's parameters to buckets: one data type, one device and one optimizer group per bucket.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.master import master_type
from gsreal.gradient_sharding.pushed_gradient import PushedGradient, ShardGradient
from gssim.plan import Division, assign_buckets, divide, splitting

Address = tuple[int, torch.Size, tuple[int, ...]]
"""Data pointer, shape and strides of a tensor."""
ABSENT = -0.0
"""Fills the slot of a gradient that does not exist."""
CHUNK_ELEMENTS = 1 << 20
"""Elements examined at once, which bounds the memory of a search for absent gradients."""


class Owners:
    """The ranks that own the shards of buckets, one on each node: they push to one another, and publish."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.weights: tuple[float, ...] = splitting.even(self.ranks)
        """Each node's fraction of the step's loss terms: the weight of its mean gradient."""


@dataclass(eq=False)
class Piece:
    """A range of an owner's shard that the optimizer updates as one tensor."""

    tensor: nn.Parameter
    """The parameter that the optimizer holds: the shard itself, or a view of a range of it."""
    place: slice
    """Its range of the shard."""
    is_whole: bool = False
    """Whether it is one whole parameter, in its shape."""


class Bucket:
    """Parameters in one flat replica, partitioned by rank within the node.

    And each of those parts by owner across nodes.

    Pushing and publishing across nodes handle this rank's part: the whole bucket if every node is a single rank.
    """

    is_replica = True
    """Whether every owner keeps the whole bucket."""
    is_published = True
    """Whether updates must be published: not of experts that one rank alone holds."""

    def __init__(
        self, index: int, parameters: list[nn.Parameter], division: Division, *, owners: Owners, place: int = 0
    ) -> None:
        self.index, self.parameters, self.owners = index, parameters, owners
        self.group_index = 0
        """Index of the optimizer's group that has its pieces."""
        size = sum(parameter.numel() for parameter in parameters)
        self.whole = torch.empty(size, dtype=parameters[0].dtype, device=parameters[0].device)
        """The replica of the whole bucket."""
        self.node_ranges = division.place_ranges
        """Half-open range of `whole` for every rank within the node."""
        self.is_divided_in_node = len(self.node_ranges) > 1
        """Whether ranks of a node have parts of the bucket: not of experts, whose owners are on one level."""
        self.slots = _moved(parameters, self.whole)
        """Range of `whole` for each parameter."""
        first, end = self.node_ranges[place]
        self._first = first
        self.flat, self.elements = self.whole[first:end], end - first
        """This rank's part of the replica, and its size."""
        self.ranges = [(start - first, stop - first) for start, stop in division.ranges(place)]
        """Every owner's half-open range of `flat`."""
        self.own = slice(*self.ranges[owners.rank])
        self.places = {
            parameter: slice(*(min(max(edge, first), end) - first for edge in (slot.start, slot.stop)))
            for parameter, slot in self.slots.items()
        }
        """Range of `flat` for each parameter, clipped to it."""
        self.shard: nn.Parameter
        self.pieces: list[Piece] = []
        """The optimizer's tensors of the shard: usually the whole shard in one piece."""
        self.reached: set[nn.Parameter] = set()
        """Parameters that a backward of this step reached on this rank."""
        self.updated: set[nn.Parameter] = set()
        """Parameters that got a gradient in the last step."""
        self.zeroed: set[nn.Parameter] = set()
        """Parameters whose gradients were set to zero, not to None: they have a gradient in the next step."""
        self.has_master = False
        """Whether the shard has values that the model's parameters lack: of higher precision, or unpublished."""
        self.weight = 1.0
        """Factor for collected gradients: this rank's fraction of its node's loss terms, or, of experts, of those whose
        tokens they got.
        """
        self.gradient: Tensor | None = None
        """Gradient of the whole bucket; after the reduction inside the node, of this rank's part."""
        self.pending_parameters = set(parameters)
        self._addresses = [(p.data_ptr(), p.shape, p.stride()) for p in parameters]
        self._placeholders: dict[nn.Parameter, PushedGradient] = {}
        """Takes the place of each parameter's gradient after the push."""

    def create_shard(self, *, master: bool = False) -> None:
        """Create the shard that the owner updates: its range of the replica, or a master copy if that is below fp32.

        `master`: a copy in any case.
        """
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype), copy=master))
        self.has_master = master or self.shard.dtype != own.dtype
        self.merge_pieces()

    def merge_pieces(self) -> None:
        """Give the optimizer the shard in one piece."""
        self.pieces = [Piece(self.shard, slice(0, self.shard.numel()))]

    @property
    def is_one_piece(self) -> bool:
        """Whether the optimizer has the shard itself."""
        return len(self.pieces) == 1 and self.pieces[0].tensor is self.shard

    def split_by_parameter(self) -> None:
        """Give the optimizer a separate piece for every parameter of the shard, in the parameter's shape."""
        values = self.shard.detach()
        parts = [(parameter.shape or (1,), self.owned(parameter)[1]) for parameter in self.parameters]
        self.pieces = [
            Piece(nn.Parameter(values[part].view(shape)), part, is_whole=True)
            for shape, part in parts
            if part.stop > part.start
        ]

    def on_gradient(self, parameter: nn.Parameter, *, pushes: bool) -> None:
        """Collect a parameter's gradient from the backward, unless it accumulates locally (`pushes` is False)."""
        if pushes:
            self.collect_gradient(parameter)
            self.pending_parameters.discard(parameter)

    def collect_gradient(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient into the bucket, or mark it as absent."""
        if isinstance(parameter.grad, PushedGradient):
            parameter.grad = parameter.grad.added()
            if parameter.grad is not None:
                del self._placeholders[parameter]  # it has the added values
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole)
        gradient, slot = parameter.grad, self.gradient[self.slots[parameter]]
        if gradient is None:
            slot.fill_(ABSENT)
        else:
            self.reached.add(parameter)
            if gradient.is_sparse:
                slot.zero_().view(parameter.shape).add_(gradient, alpha=self.weight)
            else:  # adding it to zero turns negative zeros into positive ones, in as many passes as a copy
                torch.add(slot.new_zeros(()), gradient.reshape(-1), alpha=self.weight, out=slot)
        parameter.grad = self._placeholder(parameter) if parameter in self.reached else None

    @property
    def collected_gradient(self) -> Tensor:
        """`gradient`, between its collection in the backward and its push."""
        assert self.gradient is not None
        return self.gradient

    def _placeholder(self, parameter: nn.Parameter) -> PushedGradient:
        """Return the placeholder for a pushed gradient."""
        placeholder = self._placeholders.get(parameter)
        if placeholder is None:
            placeholder = self._placeholders[parameter] = PushedGradient.of(parameter)
        placeholder.is_zeroed = False
        return placeholder

    def clear_placeholders(self) -> None:
        """Set gradients that were pushed to None, so that autograd does not accumulate into the placeholders."""
        for parameter in self.reached:
            if isinstance(parameter.grad, PushedGradient):
                parameter.grad = None

    @property
    def complete(self) -> bool:
        """Whether every parameter that requires a gradient has one."""
        return not any(parameter.requires_grad for parameter in self.pending_parameters)

    def end_backward(self, *, pushes: bool) -> None:
        """Collect the gradients that earlier backwards left on parameters which this one did not reach."""
        if pushes:
            for parameter in self.parameters:
                if parameter in self.pending_parameters:
                    self.collect_gradient(parameter)
            self.pending_parameters.clear()

    def owned(self, parameter: nn.Parameter) -> tuple[int, slice]:
        """Return the offset in a parameter of this rank's part of it.

        And the range of the shard that holds this part.
        """
        slot, begin = self.slots[parameter], self._first + self.own.start
        first, end = max(slot.start, begin), min(slot.stop, self._first + self.own.stop)
        if first >= end:
            return 0, slice(0, 0)
        return first - slot.start, slice(first - begin, end - begin)

    def piece_of(self, parameter: nn.Parameter) -> tuple[Piece, int, slice] | None:
        """Return the piece with this rank's part of a parameter, the part's offset in the parameter.

        And its range of the piece.

        None if this rank owns nothing of it.
        """
        start, part = self.owned(parameter)
        for piece in self.pieces:
            if piece.place.start <= part.start < part.stop <= piece.place.stop:
                return piece, start, slice(part.start - piece.place.start, part.stop - piece.place.start)
        return None

    def assign_piece_gradients(self) -> None:
        """Give every piece its view of the shard's gradient."""
        if self.shard.grad is not None and not self.is_one_piece:
            is_part = isinstance(self.shard.grad, ShardGradient)
            for piece in self.pieces:
                part = self.shard.grad[piece.place].view(piece.tensor.shape)
                piece.tensor.grad = part.as_subclass(ShardGradient) if is_part else part

    def gradients_without(self, parameters: Set[nn.Parameter]) -> list[Tensor]:
        """Return the parts of the shard's gradient that are not of these parameters, if it has one."""
        gradient = self.shard.grad
        if gradient is None:
            return []
        left_out = sorted(
            (part.start, part.stop) for part in (self.owned(each)[1] for each in self.parameters if each in parameters)
        )
        edges = [0, *(edge for part in left_out for edge in part), gradient.numel()]
        return [gradient[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True) if last > first]

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the shard; unless `set_to_none`, existing ones are set to zero."""
        self.clear_placeholders()
        self.reached.clear()
        if set_to_none or self.shard.grad is None:
            self.shard.grad = None
            for piece in self.pieces:
                piece.tensor.grad = None
        else:
            self.shard.grad.zero_()

    def parameters_without_gradient(self) -> set[nn.Parameter]:
        """Return the parameters of the shard that got a gradient on no rank.

        Only those that this rank did not reach either are examined: steps without such parameters never synchronise
        with the device.
        """
        owned = [(p, self.owned(p)[1]) for p in self.parameters if p not in self.reached and p not in self.zeroed]
        owned = [(parameter, part) for parameter, part in owned if part.stop > part.start]
        gradient = self.shard.grad
        if not owned or gradient is None:
            return set()
        firsts = torch.stack([gradient[part.start] for _, part in owned])
        candidates = [each for each, is_absent in zip(owned, _are_absent(firsts).tolist(), strict=True) if is_absent]
        return {
            parameter
            for parameter, part in candidates
            if all(bool(_are_absent(chunk).all()) for chunk in gradient[part].split(CHUNK_ELEMENTS))
        }

    def add_own_gradient(self, gradient: Tensor, weight: float) -> None:
        """Add the own range's gradient, which is never thresholded, to the shard's.

        The first push of a step creates it.
        """
        if self.shard.grad is None:
            first = gradient.to(self.shard.dtype, copy=True).mul_(weight)
            is_part = type(first) is Tensor and first.numel() < self.whole.numel()
            self.shard.grad = first.as_subclass(ShardGradient) if is_part else first
        else:
            self.shard.grad.add_(gradient.to(self.shard.dtype), alpha=weight)

    @property
    def has_values_between_steps(self) -> bool:
        """Whether parameters have their values between steps."""
        return True

    def addresses(self) -> list[Address]:
        """Return the expected place of every parameter's values."""
        return self._addresses

    def update_master(self, part: slice, *, rounded: bool = True) -> None:
        """Copy a part of the replica into the master copy, after it was written to from outside.

        `rounded`: the replica is the master rounded to its precision; where that still holds, the master's value stays.
        """
        master, replica = self.shard.detach()[part], self.flat[self.own][part]
        if rounded:
            replica = torch.where(master.to(replica.dtype) == replica, master, replica.to(master.dtype))
        master.copy_(replica)

    def write_back(self) -> None:
        """Copy the updated shard to the replica."""
        if self.shard.dtype != self.flat.dtype:
            self.flat[self.own].copy_(self.shard.detach())


def _are_absent(values: Tensor) -> Tensor:
    """Return a mask of the values that are the negative zero of an absent gradient."""
    values = values.real if values.is_complex() else values
    return values.signbit().logical_and_(values == 0)


def _moved(parameters: list[nn.Parameter], flat: Tensor) -> dict[nn.Parameter, slice]:
    """Make parameters consecutive views of a flat tensor; return their ranges."""
    slots, start = {}, 0
    for parameter in parameters:
        slots[parameter] = slot = slice(start, start + parameter.numel())
        flat[slot].copy_(parameter.detach().reshape(-1))
        parameter.data = flat[slot].view(parameter.shape)
        start = slot.stop
    return slots


class Partition:
    """Divides the buckets of a model one after another by the ranks' shares.

    Divides by node first, then among the ranks of a node.

    With `whole_tensors` every parameter has one owner: a bucket is divided at the parameter boundaries nearest to each
    owner's deficit against its share of all buckets so far, so that one bucket's deviation is compensated in the next.
    """

    def __init__(self, by_node: Sequence[Sequence[float]], *, whole_tensors: bool) -> None:
        self.by_node, self.whole_tensors = by_node, whole_tensors
        self._shares = [share for of_place in zip(*by_node, strict=True) for share in of_place]
        self._owned = [0] * len(self._shares)

    def divide(self, sizes: Sequence[int]) -> Division:
        """Return the division of the next bucket, given the elements of its parameters.

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
        """Whether an owner got no parameter of any bucket so far, with `whole_tensors`."""
        return self.whole_tensors and not all(self._owned)


def skip_parameters_without_gradient(bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer skip the parameters of a bucket that got a gradient on no rank in this step."""
    absent = bucket.parameters_without_gradient()
    bucket.updated = {parameter for parameter in bucket.parameters if parameter not in absent}
    if not absent:
        return
    split_pieces(bucket, optimizer, lambda parameter: parameter in absent)
    for parameter in absent:
        owned_piece = bucket.piece_of(parameter)
        assert owned_piece is not None
        owned_piece[0].tensor.grad = None


def split_pieces(bucket: Bucket, optimizer: torch.optim.Optimizer, kind: Callable[[nn.Parameter], Any]) -> None:
    """Split a shard's pieces wherever adjacent parameters differ in `kind`."""
    pieces: list[Piece] = []
    for piece in bucket.pieces:
        runs: list[slice] = []
        last: Any = None
        for parameter in bucket.parameters:
            owned_piece, part = bucket.piece_of(parameter), bucket.owned(parameter)[1]
            if owned_piece is None or owned_piece[0] is not piece:
                continue
            if runs and kind(parameter) == last:
                runs[-1] = slice(runs[-1].start, part.stop)
            else:
                runs.append(part)
            last = kind(parameter)
        pieces += [piece] if len(runs) < 2 else _cut(bucket, piece, runs, optimizer)
    bucket.pieces = pieces
    bucket.assign_piece_gradients()


def _cut(bucket: Bucket, piece: Piece, places: list[slice], optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Replace a piece of the optimizer by several, and split its state among them."""
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
        optimizer.state[each.tensor] = {
            key: flat[key][part] if key in flat else value.clone() if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
    return pieces


def elementwise(state: Mapping[str, Any], piece: Piece) -> dict[str, Tensor]:
    """Return those states of an optimizer that have a value for every element of a piece, as flat views.

    Raises RuntimeError if a piece that is no whole parameter has a tensor of another size (scales of blocks, as of
    moments in 8 bits): which of its values belong to which parameter cannot be told.
    """
    shape = piece.tensor.shape  # of at least one dimension, unlike numbers of steps
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != shape and not piece.is_whole:
            raise RuntimeError(
                f"the optimizer's state '{key}' has {value.numel()} values for a shard of {piece.tensor.numel()} "
                "elements, so that it cannot be saved, loaded, moved or split by parameter: pass whole_tensors=True to "
                "shard_gradients"
            )
    return {key: value.view(-1) for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape}


COMPILED = "_orig_mod."
"""Prefix that torch.compile puts before the names of a module's parameters."""


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of one future bucket, in the order in which their gradients become ready."""

    parameters: list[nn.Parameter]
    group: int
    """Index of the optimizer's group that they belong to."""
    of_experts: bool
    """Whether fewer ranks own them: those that hold the same experts."""


def trained_parameters(model: nn.Module, order: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name, in the order in which their gradients become ready.

    Tied parameters appear once, under their first name. `order`: names; reversed registration by default.
    """
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no parameters that require gradients: there is nothing to shard")
    names = list(reversed(named)) if order is None else [plain_name(name) for name in order]
    if sorted(names) != sorted(named):
        odd = sorted(set(names) ^ set(named)) or names
        raise ValueError(f"parameter_order must name every parameter that requires gradients once; see '{odd[0]}'")
    return {name: named[name] for name in names}


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile adds to it.

    >>> plain_name("_orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return name.replace(COMPILED, "")


def plan_buckets(
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[Mapping[str, Any]] | None,
    *,
    first_bytes: float,
    cap_bytes: float,
    experts: Set[str] = frozenset(),
) -> list[BucketPlan]:
    """Return the buckets of the parameters, ordered by when their gradients are complete.

    As in DistributedDataParallel, every data type and device fills buckets of its own, and here every group as well,
    and the parameters of `experts`, which have other owners.
    """
    group_of = _groups_of(parameters, groups)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    ordered = list(parameters.values())
    for place, (name, parameter) in enumerate(parameters.items()):
        kind = (parameter.dtype, parameter.device, group_of[parameter], name in experts)
        kinds.setdefault(kind, []).append(place)
    buckets: list[list[int]] = []
    for places in kinds.values():
        sizes = [ordered[place].numel() * ordered[place].element_size() for place in places]
        assigned = assign_buckets(sizes, first_bytes=first_bytes, cap_bytes=cap_bytes)
        buckets += [[places[member] for member in members] for members in assigned]
    buckets.sort(key=max)
    apart = {parameters[name] for name in experts}
    return [
        BucketPlan([ordered[place] for place in each], group_of[ordered[each[0]]], ordered[each[0]] in apart)
        for each in buckets
    ]


def _groups_of(
    parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]] | None
) -> dict[nn.Parameter, int]:
    """Return the group number of each parameter; `groups` as torch's optimizers take them, by parameter or name."""
    if groups is None:
        return dict.fromkeys(parameters.values(), 0)
    group_of = _members_of(parameters, groups)
    for name, parameter in parameters.items():
        if parameter not in group_of:
            raise ValueError(f"'{name}' is in none of param_groups; freeze it, or put it into one")
    trained = set(parameters.values())
    for parameter, number in group_of.items():
        if parameter not in trained and parameter.requires_grad:
            raise ValueError(
                f"param_groups[{number}] has a parameter of {tuple(parameter.shape)} that is not in the model"
            )
    return group_of


def _members_of(parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, int]:
    """Return the group number of each parameter that is in a group; raise ValueError if one is in two."""
    group_of: dict[nn.Parameter, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f"param_groups[{number}] must be a dict with parameters under 'params', not {group!r:.80}")
        members = group["params"]
        for given in [members] if isinstance(members, nn.Parameter | str) else members:
            member = given[1] if isinstance(given, tuple) and len(given) == 2 else given  # as named_parameters gives
            parameter = parameters.get(plain_name(member)) if isinstance(member, str) else member
            if parameter is None:
                raise ValueError(f"param_groups[{number}] names '{member}', which is no parameter that is trained")
            if not isinstance(parameter, nn.Parameter):
                raise ValueError(f"param_groups[{number}] has {parameter!r:.80}, which is no parameter of the model")
            if parameter in group_of:
                raise ValueError(f"a parameter is in param_groups[{group_of[parameter]}] and in param_groups[{number}]")
            group_of[parameter] = number
    return group_of
