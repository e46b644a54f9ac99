"""Shards that change their owners between two steps: the optimizer's state goes where the parameters go.

Replicas are whole on every rank, so that parameters never travel: only what an owner alone has does, which is the
master copy, where there is one, and every elementwise tensor of the optimizer's state. Values are moved, not made
again, so that training goes on exactly as it would have done.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

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

    To be called by all ranks between `step` and the next backward, with equal shares: gradients that wait to be used
    would be lost. Assumes that what has a shard's shape in the optimizer's state is elementwise. Raises RuntimeError
    where a shard is in pieces: its parameters have had unequal numbers of updates, which new owners would not know.
    """
    if not all(bucket.is_one_piece for bucket in buckets):
        raise RuntimeError(
            "shards cannot change their owners: the optimizer has parameters of them apart (whole_tensors, or some got "
            "no gradient in some steps); save state_dict() and load it into a new shard_gradients with other shares"
        )
    sent = 0
    rank = dist.get_rank(group)
    for bucket in buckets:
        before, after = bucket.ranges, list(splitting.ranges(bucket.elements, shard_shares))
        if before == after:
            continue
        if bucket.shard.grad is not None:
            raise RuntimeError("gradients of this step wait to be used; shards change their owners after `step` only")
        state = optimizer.state.get(bucket.shard, {})
        moving = {name: value for name, value in sorted(state.items()) if _is_elementwise(value, bucket.shard)}
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
        bucket.join()
    return sent


def _is_elementwise(value: object, shard: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.shape


def _moved(
    values: Tensor, before: Sequence[Range], after: Sequence[Range], group: dist.ProcessGroup, *, point_to_point: bool
) -> tuple[Tensor, int]:
    """Return the values of the range that this rank owns now, out of those that each owned; and the bytes sent."""
    rank = dist.get_rank(group)
    mine, new = before[rank], after[rank]
    found = values.new_empty(new[1] - new[0])
    sends = [_part(values, mine, _common(mine, theirs)) for theirs in after]
    receives = [_part(found, new, _common(new, theirs)) for theirs in before]
    receives[rank].copy_(sends[rank])
    size = sum(part.numel() * part.element_size() for other, part in enumerate(sends) if other != rank)
    others_s: list[Tensor | None] = [None if other == rank else part for other, part in enumerate(sends)]
    others_r: list[Tensor | None] = [None if other == rank else part for other, part in enumerate(receives)]
    all_to_all_v(others_s, others_r, group=group, declared_bytes=size, point_to_point=point_to_point).wait()
    return found, size


def _common(a: Range, b: Range) -> Range:
    """Return what two half-open ranges have in common, empty where they are apart."""
    first = max(a[0], b[0])
    return first, max(first, min(a[1], b[1]))


def _part(values: Tensor, owned: Range, part: Range) -> Tensor:
    """Return a part of a flat tensor that holds the range `owned`."""
    first = min(max(part[0] - owned[0], 0), len(values))
    return values[first : first + part[1] - part[0]]
