"""Migration of shards to other owners between two steps, with their optimizer state.

Replicas are whole on every rank, so parameters are never sent: only tensors that exist on the owner alone are, which
are the master copy, if there is one, and every elementwise tensor of the optimizer's state. Values are moved, not
recomputed, so that training continues exactly as without the migration.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.point_to_point import all_to_all_v
from gssim.plan import splitting

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
        moving = {
            name: value
            for name, value in sorted(state.items())
            if isinstance(value, Tensor) and value.shape == bucket.shard.shape
        }
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
