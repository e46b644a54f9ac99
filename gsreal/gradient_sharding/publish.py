"""Updated parameters on their way back from the owners to every replica.

With a threshold, an owner sends only what is at least that far from what it published last: it keeps a master copy of
its range, and what was not sent stays in the difference of the two until it has grown enough (error feedback that takes
no memory of its own; gradient-sharding A.3, step 5). What is sent is the parameter's new value, not its change: as many
bytes, and the replica is then the master rounded to its precision, whatever was rounded before. The owner trains on
what was published too, so that all replicas stay equal bit for bit.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.exchanges import all_gather_into_tensor, all_gather_messages, all_gather_v, broadcast_parts
from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.messages import Encoding
from gsreal.gradient_sharding.observer import Observer
from gsreal.gradient_sharding.push import Sent
from gssim.plan import Publish


class Publisher:
    """Brings what owners have updated to every replica, bucket by bucket."""

    def __init__(
        self, rules: Publish, group: dist.ProcessGroup, dtype: torch.dtype, *, point_to_point: bool, observe: Observer
    ) -> None:
        self.rules, self.group, self.point_to_point, self.observe = rules, group, point_to_point, observe
        self.encoding = Encoding(rules.encoding, dtype)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent = Sent()

    def write_back(self, buckets: Sequence[Bucket]) -> None:
        """Bring what the owner updated to its own replica; with a threshold, `publish` does that."""
        if self.rules.threshold is None:
            for bucket in buckets:
                bucket.write_back()

    @torch.no_grad()
    def publish(self, buckets: Sequence[Bucket]) -> None:
        """Bring every owner's range of each bucket's replica to all ranks of the group."""
        if self.rules.threshold is None:
            exchange = all_gather_v if self.point_to_point else broadcast_parts
            for bucket in buckets:
                with self.observe(f"publish bucket {bucket.index}", "exposed_communication"):
                    exchange(bucket.flat, bucket.ranges, group=self.group)
            return
        messages, entries = map(list, zip(*(self._thresholded(bucket) for bucket in buckets), strict=True))
        counts = self._exchange_counts(entries)
        for bucket, sent in zip(buckets, counts.unbind(1), strict=True):
            self._exchange(bucket, messages.pop(0), sent.tolist())

    def _thresholded(self, bucket: Bucket) -> tuple[Tensor, int]:
        """Bring the own replica to what the threshold lets through; return that as a message, and how much it is.

        A dense message is a view of the replica.
        """
        assert self.rules.threshold is not None
        with self.observe(f"threshold publish bucket {bucket.index}", "compression"):
            replica, master = bucket.flat[bucket.own], bucket.shard.detach()
            mask = _reaching(replica, master, self.rules.threshold)
            torch.where(mask, master.to(replica.dtype), replica, out=replica)
            entries = int(mask.count_nonzero())
            self.sent.entries += entries
            self.sent.offered += replica.numel()
            dense = self.encoding.is_dense(entries, replica.numel())
            return (replica if dense else self.encoding.pack(replica, mask)[0]), entries

    def _exchange_counts(self, entries: Sequence[int]) -> Tensor:
        """Return how many entries each rank sends (rows) of each bucket (columns)."""
        with self.observe("counts publish", "exposed_communication"):
            counts = torch.zeros(self.ranks, len(entries), dtype=torch.int64)
            counts[self.rank] = torch.tensor(entries)
            all_gather_into_tensor(counts, counts[self.rank], group=self.group)
        return counts

    def _exchange(self, bucket: Bucket, own: Tensor, entries: Sequence[int]) -> None:
        """Pass everybody's messages of a bucket round, and bring them to the replica."""
        label = f"publish bucket {bucket.index}"
        parts = [bucket.flat[slice(*places)] for places in bucket.ranges]
        sparse = [i for i, part in enumerate(parts) if not self.encoding.is_dense(entries[i], part.numel())]
        messages = list(parts)
        for i in sparse:
            messages[i] = self.encoding.empty(entries[i], parts[i].numel(), own.device) if i != self.rank else own
        with self.observe(label, "exposed_communication"):
            size = bucket.flat.numel() * bucket.flat.element_size()
            self.sent.bytes_of[bucket.index] += all_gather_messages(messages, group=self.group, declared_bytes=size)
        with self.observe(f"put {label}", "compression"):
            for i in sparse:
                if i != self.rank:
                    self.encoding.put(parts[i], messages[i], entries[i])


def _reaching(replica: Tensor, master: Tensor, threshold: float) -> Tensor:
    """Return where the master is at least `threshold` away from the replica, or not a number."""
    distance = replica.to(master.dtype, copy=True).sub_(master).abs_()
    return distance.lt(threshold).logical_not_()
