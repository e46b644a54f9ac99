"""State dictionaries of the optimizer by parameter name: gathered on every rank, or sharded for torch's checkpoints.

Both are independent of buckets, ranks and shares, so that any number of ranks with any shares can load them. A
parameter that no step has updated yet has no state in the gathered one, as in torch's.

`PartialTensor` is a tensor spread over ranks, as torch.distributed.checkpoint reads and writes it.

Migration of shards to other owners between two steps, with their optimizer state.

Replicas are whole on every rank, so parameters are never sent: only tensors that exist on the owner alone are, which
are the master copy, if there is one, and every elementwise tensor of the optimizer's state. Values are moved, not
recomputed, so that training continues exactly as without the migration.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from gsreal.gradient_sharding.bucket import Bucket, Piece, elementwise, split_pieces
from gsreal.gradient_sharding.hierarchy import Hierarchy
from gsreal.gradient_sharding.point_to_point import all_to_all_v
from gsreal.gradient_sharding.push import Pusher
from gssim.plan import splitting

COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
"""Operations applied to each piece."""


class PartialTensor(torch.Tensor):
    """A tensor of which this rank has some pieces: torch.distributed.checkpoint reads and writes those alone."""

    pieces: dict[tuple[int, ...], Tensor]
    """By the index of their first element in the whole; some may be empty."""

    @staticmethod
    def __new__(cls, pieces: Mapping[tuple[int, ...], Tensor], size: Sequence[int]) -> "PartialTensor":
        """Create it from this rank's pieces, of which there must be at least one, and the size of the whole."""
        like = next(iter(pieces.values()))
        tensor = torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=like.dtype, device=like.device)
        tensor.pieces = dict(pieces)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copy the pieces, as `async_save` does before it writes.

        Refuse to compute: most elements are on other ranks.
        """
        if func is torch.ops.aten.new_empty.default:  # the pieces follow as an attribute
            device = (kwargs or {}).get("device")
            return cls({first: piece.new_empty(0, device=device) for first, piece in args[0].pieces.items()}, args[1])
        if func in COPIES:
            pieces = {first: func(piece, *args[1:], **(kwargs or {})) for first, piece in args[0].pieces.items()}
            return cls(pieces, args[0].shape)
        raise NotImplementedError(f"{func} on a part of a tensor")

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        pieces = ", ".join(f"{tuple(piece.shape)} at {first}" for first, piece in self.pieces.items())
        return f"PartialTensor({pieces} of {tuple(self.shape)}, {self.dtype})"

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        for first, piece in self.pieces.items():
            if piece.numel():
                yield ChunkStorageMetadata(torch.Size(first), piece.size())

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return the items to write: the pieces that are not empty."""
        properties = TensorProperties.create_from_tensor(next(iter(self.pieces.values())))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks to read."""
        return list(self._chunks())

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the piece to read into or write from."""
        assert index.offset is not None
        return self.pieces[tuple(index.offset)]


MASTER = "master"
"""Key of the owner's master copy of a parameter, if there is one."""
State = dict[str, Any]
"""State of one tensor, by key."""


@dataclass(frozen=True, eq=False)
class OptimizerParts:
    """The parts of a `GradientSharding` that its state is read from and loaded into."""

    buckets: Sequence[Bucket]
    optimizer: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]
    """Groups as the user sees and changes them."""
    pusher: Pusher
    hierarchy: Hierarchy
    names: Mapping[nn.Parameter, str]


# Whole ---------------------------------------------------------------------------------------------------------------


def gather_state(parts: OptimizerParts) -> dict[str, Any]:
    """Return every owner's state by parameter name (a collective: keys are exchanged, then values all-reduced)."""
    described: dict[str, dict[str, torch.dtype]] = {}
    others: dict[str, State] = {}
    own = {name: (bucket, *_owned_state(parts, bucket, p)) for name, bucket, p in _owned(parts)}
    descriptions = {
        name: (
            {key: value.dtype for key, value in values.items()},
            {key: value.cpu() if isinstance(value, Tensor) else value for key, value in rest.items()},
        )
        for name, (_, values, rest) in own.items()
    }
    for of_rank in parts.hierarchy.gather_objects(descriptions):
        for name, (dtypes, rest) in of_rank.items():
            described.setdefault(name, {}).update(dtypes)
            others.setdefault(name, {}).update(rest)
    states: dict[str, State] = {}
    for bucket in parts.buckets:
        names = {parameter: parts.names[parameter] for parameter in bucket.parameters}
        keys = {key: dtype for name in names.values() for key, dtype in described.get(name, {}).items()}
        gathered = {key: _gathered(parts, bucket, key, keys[key]) for key in sorted(keys)}
        for parameter, name in names.items():
            values = {key: gathered[key][bucket.slots[parameter]] for key in described.get(name, {})}
            state = {key: value.clone().view(parameter.shape) for key, value in values.items()}
            for key, value in others.get(name, {}).items():  # step counts stay on torch's device
                on_device = isinstance(value, Tensor) and value.dim()
                state[key] = value.to(bucket.flat.device) if on_device else value
            if state:
                states[name] = state
    return {"state": states, "param_groups": _groups(parts), "updates": parts.pusher.steps}


def load_gathered_state(parts: OptimizerParts, saved: dict[str, Any]) -> bool:
    """Load the own part of a result of `gather_state`; return whether it has any, master copies included.

    Raises ValueError if it is another optimizer's or model's.
    """
    groups, states = (saved.get("param_groups"), saved.get("state")) if isinstance(saved, Mapping) else (None, None)
    if groups is None or not isinstance(states, Mapping):
        raise ValueError("this is no state_dict of an optimizer: it must have 'state' and 'param_groups'")
    if not all(isinstance(name, str) for group in groups for name in group["params"]):
        raise ValueError(
            "this state_dict has parameters by number, as torch's own optimizers save them: give them names (rename "
            "each number in 'state' and 'param_groups' by the order of model.named_parameters())"
        )
    load_groups(parts, groups)
    parts.pusher.steps = saved.get("updates", 0)
    known = {*states, *(name for group in groups for name in group["params"])}
    if not any(set(state) - {MASTER} for state in states.values()):
        parts.optimizer.state.clear()
        if not states:
            return False
    else:
        initialise(parts.optimizer)
    for bucket in parts.buckets:
        for name in (parts.names[parameter] for parameter in bucket.parameters):
            if name not in known:
                raise ValueError(f"nothing was saved of parameter '{name}': another model")
        loaded = {p: states.get(parts.names[p], {}) for p in bucket.parameters}  # empty: no step has updated it
        _separate(parts, bucket, loaded)
        for parameter, state in loaded.items():
            _load_state(parts, bucket, parameter, state)
    return True


def _load_state(parts: OptimizerParts, bucket: Bucket, parameter: nn.Parameter, saved: State) -> None:
    """Load the own part of a parameter's saved state, if this rank owns any of it.

    Raises ValueError if it is another optimizer's or model's.
    """
    owned_piece = bucket.piece_of(parameter)
    if owned_piece is None:
        return
    name, (piece, start, part) = parts.names[parameter], owned_piece
    if not set(saved) - {MASTER}:  # no step has updated it
        parts.optimizer.state.pop(piece.tensor, None)
    values, rest = _state(parts, bucket, piece, part)
    missing = sorted({*values, *rest} - {MASTER} - set(saved))
    if missing:
        raise ValueError(f"nothing was saved of '{missing[0]}' of parameter '{name}': another optimizer or model")
    for key, value in values.items():
        if key not in saved and not bucket.is_replica:
            continue  # the model's state has brought it
        source = parameter.detach() if key not in saved else saved[key]  # without a master: the parameter
        if source.numel() != parameter.numel():
            raise ValueError(
                f"'{key}' of parameter '{name}' was saved in shape {tuple(source.shape)}, but the model has "
                f"{tuple(parameter.shape)}: another model"
            )
        taken = source.reshape(-1)[start : start + part.stop - part.start]
        value.copy_(taken.to(value.device, value.dtype))
    for key, value in rest.items():
        _replace(parts, piece, key, value, saved[key])


def load_groups(parts: OptimizerParts, saved: list[dict[str, Any]]) -> None:
    """Load the options of saved groups, such as learning rates; raise ValueError if their number differs."""
    if len(saved) != len(parts.param_groups):
        raise ValueError(f"saved with {len(saved)} param_groups, but there are {len(parts.param_groups)}")
    for group, options in zip(parts.param_groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


# Before the first step -----------------------------------------------------------------------------------------------


class _FirstValues(dict[str, Any]):
    """A tensor's state that records the initial value of every key, before a step changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first: State = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, _own_memory(value))
        super().__setitem__(key, value)


class _FirstStates(defaultdict[Tensor, dict[str, Any]]):
    """States of an optimizer, created on first access, that record their initial values."""

    def __init__(self) -> None:
        super().__init__(_FirstValues)

    def __setitem__(self, key: Tensor, value: dict[str, Any]) -> None:
        if isinstance(value, _FirstValues):
            super().__setitem__(key, value)
            return
        state = self[key] = _FirstValues()
        for name, each in value.items():
            state[name] = each


def first_states(optimizer: torch.optim.Optimizer) -> dict[Tensor, State]:
    """Return the initial state of each tensor that has none yet, as its first step would create it; nothing is changed.

    The optimizer creates it in a step with zero gradients and without decay, whose other effects are undone: so it is
    zeros for Adam's moments, but ones for NAdam's product, and the learning rate for Rprop's step sizes.
    """
    fresh = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    if not fresh:
        return {}
    saved = {p: (p.detach().clone(), p.grad) for p in fresh}
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in saved]
    gradients = {p: p.grad for p in others}
    state, optimizer.state = optimizer.state, _FirstStates()
    try:
        for p in fresh:
            p.grad = torch.zeros_like(p)
        for p in others:
            p.grad = None
        with _unchanged_options(optimizer), torch.no_grad():
            for group in optimizer.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            optimizer.step()
        return {p: dict(optimizer.state[p].first) for p in fresh if p in optimizer.state}  # type: ignore[attr-defined]
    finally:
        optimizer.state = state
        for p, (values, gradient) in saved.items():
            p.detach().copy_(values)
            p.grad = gradient
        for p, gradient in gradients.items():
            p.grad = gradient


@contextmanager
def _unchanged_options(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the options of all groups at the end; some optimizers count their steps there."""
    options = [
        {key: (value, _own_copy(value)) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, options, strict=True):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            for key, (value, copied) in before.items():
                group[key] = value if isinstance(value, Tensor) else copied
                if isinstance(value, Tensor):  # which a scheduler may hold too
                    value.detach().copy_(copied)


def initialise(optimizer: torch.optim.Optimizer) -> None:
    """Give every tensor that has no state yet its initial one; loading overwrites it."""
    optimizer.state.update(first_states(optimizer))


# For torch.distributed.checkpoint ------------------------------------------------------------------------------------


class Sharded:
    """State of a GradientSharding for torch.distributed.checkpoint: each rank's own part, by element.

    dcp.save({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=folder), and dcp.load alike.
    """

    def __init__(self, parts: OptimizerParts) -> None:
        self.parts = parts
        self._first: dict[Tensor, State] = {}
        """Initial state of tensors that have none yet, as last returned."""

    def state_dict(self) -> dict[str, Any]:
        """Return the own part: views, so that values are loaded in place."""
        self._first = first_states(self.parts.optimizer)
        states: dict[str, Any] = {}
        for name, bucket, parameter in _owned(self.parts):
            values, others = _owned_state(self.parts, bucket, parameter, self._first)
            start = bucket.owned(parameter)[0]
            owned = {key: PartialTensor({(start,): value}, (parameter.numel(),)) for key, value in values.items()}
            states[name] = owned | {key: _own_memory(value) for key, value in others.items()}
        # a tuple is saved as one object: its lists and numbers are replaced as a whole when it is loaded
        updates = torch.tensor(self.parts.pusher.steps)
        return {"state": states, "param_groups": tuple(_groups(self.parts)), "updates": updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Apply a loaded dictionary: the tensors of the state are in place already."""
        parts = self.parts
        load_groups(parts, list(state_dict["param_groups"]))
        parts.pusher.steps = int(state_dict["updates"])
        parts.optimizer.state.update(self._first)
        self._first = {}
        for bucket in parts.buckets:
            states = {p: state_dict["state"].get(parts.names[p], {}) for p in bucket.parameters}
            _separate(parts, bucket, states)
            for parameter in bucket.parameters:
                owned_piece = bucket.piece_of(parameter)
                if owned_piece is not None:
                    for key, value in _state(parts, bucket, owned_piece[0], owned_piece[2])[1].items():
                        _replace(parts, owned_piece[0], key, value, states[parameter][key])


# By parameter --------------------------------------------------------------------------------------------------------


def _owned(parts: OptimizerParts) -> list[tuple[str, Bucket, nn.Parameter]]:
    """Return (name, bucket, parameter) of the parameters of which this rank owns elements."""
    return [
        (parts.names[parameter], bucket, parameter)
        for bucket in parts.buckets
        for parameter in bucket.parameters
        if bucket.piece_of(parameter) is not None
    ]


def _owned_state(
    parts: OptimizerParts, bucket: Bucket, parameter: nn.Parameter, first: Mapping[Tensor, State] | None = None
) -> tuple[dict[str, Tensor], State]:
    """Return `_state` of the own part of a parameter."""
    owned_piece = bucket.piece_of(parameter)
    assert owned_piece is not None
    return _state(parts, bucket, owned_piece[0], owned_piece[2], first)


def _state(
    parts: OptimizerParts,
    bucket: Bucket,
    piece: Piece,
    part: slice,
    first: Mapping[Tensor, State] | None = None,
) -> tuple[dict[str, Tensor], State]:
    """Return the elementwise states of a part of a piece, including the master copy, and the other states.

    `first`: initial states of tensors that have none yet.
    """
    state = parts.optimizer.state.get(piece.tensor) or (first or {}).get(piece.tensor, {})
    flat = elementwise(state, piece)
    values = {key: value[part] for key, value in flat.items()}
    others = {key: value for key, value in state.items() if key not in values and value is not None}
    if bucket.has_master:
        values[MASTER] = piece.tensor.detach().view(-1)[part]
    return values, others


def _gathered(parts: OptimizerParts, bucket: Bucket, key: str, dtype: torch.dtype) -> Tensor:
    """Return all owners' values of a bucket: each adds its own to zeros."""
    flat = torch.zeros(bucket.whole.numel(), dtype=dtype, device=bucket.whole.device)
    for parameter in bucket.parameters:
        if bucket.piece_of(parameter) is None:
            continue
        value = _owned_state(parts, bucket, parameter)[0].get(key)
        if value is not None:
            first = bucket.slots[parameter].start + bucket.owned(parameter)[0]
            flat[first : first + value.numel()] = value
    parts.hierarchy.all_reduce(flat)
    return flat


def _separate(parts: OptimizerParts, bucket: Bucket, states: Mapping[nn.Parameter, State]) -> None:
    """Split a bucket's pieces where parameters had unequal numbers of updates.

    Parameters of which this rank owns nothing do not count.
    """

    def kind(parameter: nn.Parameter) -> Any:  # of elementwise states only that they exist; of others, their values
        return {
            key: (value.item() if value.dim() == 0 else None) if isinstance(value, Tensor) else value
            for key, value in states[parameter].items()
            if key != MASTER
        }

    split_pieces(bucket, parts.optimizer, kind)


def _own_memory(value: Any) -> Any:
    """Return a tensor that keeps no larger one alive."""
    return value.clone() if isinstance(value, Tensor) else value


def _own_copy(value: Any) -> Any:
    """Return a copy of a group's option; a tensor's is detached from its graph."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _groups(parts: OptimizerParts) -> list[dict[str, Any]]:
    """Return the options of the groups, with the names of their parameters."""
    return [
        {
            **group,
            "params": sorted(parts.names[p] for b in parts.buckets if b.group_index == number for p in b.slots),
        }
        for number, group in enumerate(parts.param_groups)
    ]


def _replace(parts: OptimizerParts, piece: Piece, key: str, value: Any, saved: Any) -> None:
    """Set a state of a piece that is not elementwise, such as the number of steps."""
    if isinstance(value, Tensor):
        value.copy_(torch.as_tensor(saved))
    else:
        parts.optimizer.state[piece.tensor][key] = saved


Range = tuple[int, int]


def migrate(
    buckets: Sequence[Bucket],
    optimizer: torch.optim.Optimizer,
    shard_shares: Sequence[float],
    group: dist.ProcessGroup,
    *,
    point_to_point: bool = True,
) -> int:
    """Give every rank of `group` its share of each bucket; return the bytes that this rank sent (a collective).

    To be called by all ranks between `step` and the next backward, with equal shares: pending gradients would be lost.
    Assumes that tensors with a shard's shape in the optimizer's state are elementwise. Raises RuntimeError if a shard
    is in pieces: its parameters have had unequal numbers of updates, which new owners could not reproduce.
    """
    if not all(bucket.is_one_piece for bucket in buckets):
        raise RuntimeError(
            "shards cannot change owners: the optimizer updates parameters of them separately (whole_tensors, or some "
            "got no gradient in some steps); save state_dict() and load it into a new shard_gradients with other shares"
        )
    sent = 0
    rank = dist.get_rank(group)
    for bucket in buckets:
        before, after = bucket.ranges, list(splitting.ranges(bucket.elements, shard_shares))
        if before == after:
            continue
        if bucket.shard.grad is not None:
            raise RuntimeError("gradients of this step are pending; shards can change owners only after `step`")
        state = optimizer.state.get(bucket.shard, {})
        moving = dict(sorted(elementwise(state, bucket.pieces[0]).items()))
        is_view = bucket.shard.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        if not is_view:
            moving["master copy"] = bucket.shard.detach()
        bucket.ranges, bucket.own = after, slice(*after[rank])
        for name, values in moving.items():
            moved, size = _moved(values, before, after, group, point_to_point=point_to_point)
            sent += size
            if name == "master copy":
                bucket.shard.data = moved
            else:
                state[name] = moved
        if is_view:
            bucket.shard.data = bucket.flat[bucket.own]
        bucket.merge_pieces()
    return sent


def _moved(
    values: Tensor, before: Sequence[Range], after: Sequence[Range], group: dist.ProcessGroup, *, point_to_point: bool
) -> tuple[Tensor, int]:
    """Return the values of this rank's new range, exchanged with the previous owners, and the bytes sent."""
    rank = dist.get_rank(group)
    mine, new = before[rank], after[rank]
    received = values.new_empty(new[1] - new[0])
    sends = [_part(values, mine, _common(mine, theirs)) for theirs in after]
    receives = [_part(received, new, _common(new, theirs)) for theirs in before]
    receives[rank].copy_(sends[rank])
    size = sum(part.numel() * part.element_size() for other, part in enumerate(sends) if other != rank)
    sends_to_others: list[Tensor | None] = [None if other == rank else part for other, part in enumerate(sends)]
    receives_from_others: list[Tensor | None] = [None if other == rank else part for other, part in enumerate(receives)]
    all_to_all_v(
        sends_to_others, receives_from_others, group=group, declared_bytes=size, point_to_point=point_to_point
    ).wait()
    return received, size


def _common(a: Range, b: Range) -> Range:
    """Return the intersection of two half-open ranges, empty if they are disjoint."""
    first = max(a[0], b[0])
    return first, max(first, min(a[1], b[1]))


def _part(values: Tensor, owned: Range, part: Range) -> Tensor:
    """Return a part of a flat tensor that holds the range `owned`."""
    first = min(max(part[0] - owned[0], 0), len(values))
    return values[first : first + part[1] - part[0]]
