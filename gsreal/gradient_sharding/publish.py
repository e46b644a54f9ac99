"""Updated parameters on their way back from the owners to every replica."""

from collections.abc import Sequence

from gsreal.exchanges import all_gather_v, broadcast_parts
from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.hierarchy import Levels
from gsreal.gradient_sharding.observer import Observer


def publish(buckets: Sequence[Bucket], levels: Levels, *, point_to_point: bool, observe: Observer) -> None:
    """Bring every owner's range of each bucket's replica to all ranks, densely: across nodes first, then inside."""
    exchange = all_gather_v if point_to_point else broadcast_parts
    for bucket in buckets:
        label = f"publish bucket {bucket.index}"
        if levels.nodes > 1 or levels.inside is None:
            with observe(label, "exposed_communication"):
                exchange(bucket.flat, bucket.ranges, group=levels.across)
        if levels.inside is not None:
            with observe(f"{label} in the node", "exposed_communication"):
                exchange(bucket.whole, bucket.node_ranges, group=levels.inside)
