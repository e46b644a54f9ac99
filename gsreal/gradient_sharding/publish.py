"""Updated parameters on their way back from the owners to every replica."""

from collections.abc import Sequence

import torch.distributed as dist

from gsreal.exchanges import all_gather_v, broadcast_parts
from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.observer import Observer


def publish(buckets: Sequence[Bucket], group: dist.ProcessGroup, *, point_to_point: bool, observe: Observer) -> None:
    """Bring every owner's range of each bucket's replica to all ranks of `group`, densely."""
    exchange = all_gather_v if point_to_point else broadcast_parts
    for bucket in buckets:
        with observe(f"publish bucket {bucket.index}", "exposed_communication"):
            exchange(bucket.flat, bucket.ranges, group=group)
