"""Parameters that are frozen for a while stay as they are, though they travel in a bucket with others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gsreal.gradient_sharding.bucket import Bucket


@contextmanager
def frozen_kept(buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo inside what the optimizer does to frozen parameters and to their state: weight decay and momentum.

    torch's optimizers pass over what has no gradient. Here that has zeros, as the bucket is updated as one. Only the
    number of steps, by which Adam corrects its bias, is the bucket's. Takes a copy of what is frozen.
    """
    kept: list[tuple[Bucket, slice, Tensor, dict[str, Tensor]]] = []
    for bucket in buckets:
        state = optimizer.state.get(bucket.shard, {})
        for parameter in bucket.parameters:
            part = bucket.owned(parameter)[1]
            if not parameter.requires_grad and part.stop > part.start:
                before = {key: value[part].clone() for key, value in elementwise(state, bucket).items()}
                kept.append((bucket, part, bucket.shard.detach()[part].clone(), before))
    yield
    for bucket, part, values, before in kept:
        bucket.shard.detach()[part] = values
        for key, value in elementwise(optimizer.state.get(bucket.shard, {}), bucket).items():
            value[part] = before.get(key, value.new_zeros(()))


def elementwise(state: dict[str, object], bucket: Bucket) -> dict[str, Tensor]:
    """Return those of an optimizer's states that have a value for every element of the shard."""
    shape = bucket.shard.shape  # of one dimension, unlike numbers of steps
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
