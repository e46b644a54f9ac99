"""Gradients on their way to the owners of their shards: one bucket at a time, thresholded and packed."""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.exchanges import Pending, all_to_all_v
from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.messages import Encoding
from gsreal.gradient_sharding.observer import Observer
from gssim import shares
from gssim.plan import Push


@dataclass
class _Incoming:
    """A push under way: what this rank will receive for its range of a bucket."""

    bucket: Bucket
    pending: Pending
    messages: list[tuple[int, Tensor, int | None]]
    """(sender, buffer, entries), entries None where no threshold was."""


@dataclass
class Sent:
    """What this rank pushed."""

    entries: int = 0
    offered: int = 0
    """Off-shard elements that it could have sent."""
    bytes_of: Counter[int] = field(default_factory=Counter)
    """By bucket."""

    @property
    def by_bucket(self) -> list[int]:
        """Bytes for each bucket, in the order in which they are pushed."""
        return [self.bytes_of[index] for index in sorted(self.bytes_of)]


class Pusher:
    """Pushes buckets to their owners; at most one is under way."""

    def __init__(
        self, push: Push, group: dist.ProcessGroup, dtype: torch.dtype, *, point_to_point: bool, observe: Observer
    ) -> None:
        self.rules, self.group, self.point_to_point, self.observe = push, group, point_to_point, observe
        self.encoding = Encoding(push.encoding, dtype)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.weights: tuple[float, ...] = shares.even(self.ranks)
        """Each rank's part of the step's loss terms: what its mean gradient counts."""
        self.sent = Sent()
        self._incoming: _Incoming | None = None

    def push(self, bucket: Bucket) -> None:
        """Take in the push that is under way, then send this bucket's gradient on its way and give the bucket back."""
        self.drain()
        assert bucket.gradient is not None
        label = f"bucket {bucket.index}"
        with self.observe(f"threshold {label}", "compression"):
            bucket.keep(bucket.gradient[bucket.own], self.weights[self.rank])
            sends = [self._packed(bucket, owner) for owner in range(self.ranks)]
            bucket.gradient = None  # dense messages are views of it and keep it until they are sent
        size = sum(message.numel() * message.element_size() for message, _ in sends if message is not None)
        self.sent.bytes_of[bucket.index] += size
        counts = self._exchange_counts([entries for _, entries in sends], label)
        with self.observe(f"post push {label}", "exposed_communication"):
            self._incoming = self._posted(bucket, [message for message, _ in sends], counts)

    def _packed(self, bucket: Bucket, owner: int) -> tuple[Tensor | None, int]:
        """Return the message for an owner and how many entries it holds."""
        if owner == self.rank:
            return None, 0
        assert bucket.gradient is not None
        part = bucket.gradient[slice(*bucket.ranges[owner])]
        self.sent.offered += part.numel()
        if self.rules.threshold is None:
            self.sent.entries += part.numel()
            return part, part.numel()
        message, entries = self.encoding.pack(part, part.abs() >= self.rules.threshold)
        self.sent.entries += entries
        return message, entries

    def _exchange_counts(self, entries: list[int], label: str) -> list[int | None]:
        """Tell every owner how many entries come, and learn the same from everybody; dense pushes need not."""
        if self.rules.threshold is None:
            return [None] * self.ranks
        with self.observe(f"counts {label}", "exposed_communication"):
            outgoing = torch.tensor(entries, dtype=torch.int64).split(1)
            incoming = torch.zeros(self.ranks, dtype=torch.int64)
            size = 8 * (self.ranks - 1)
            all_to_all_v(
                outgoing, incoming.split(1), group=self.group, declared_bytes=size, point_to_point=self.point_to_point
            ).wait()
        return [int(count) for count in incoming]

    def _posted(self, bucket: Bucket, sends: list[Tensor | None], counts: list[int | None]) -> _Incoming:
        elements = bucket.shard.numel()
        messages: list[tuple[int, Tensor, int | None]] = []
        receives: list[Tensor | None] = [None] * self.ranks
        for sender, count in enumerate(counts):
            if sender != self.rank:
                receives[sender] = buffer = self.encoding.empty(count, elements, bucket.flat.device)
                messages.append((sender, buffer, count))
        pending = all_to_all_v(
            sends,
            receives,
            group=self.group,
            declared_bytes=(bucket.elements - elements) * bucket.flat.element_size(),
            data_dependent=self.rules.threshold is not None,
            point_to_point=self.point_to_point,
        )
        return _Incoming(bucket, pending, messages)

    def drain(self) -> None:
        """Take in the push that is under way, if any."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return
        label = f"bucket {incoming.bucket.index}"
        with self.observe(f"wait push {label}", "exposed_communication"):
            incoming.pending.wait()
        with self.observe(f"add {label}", "compression"):
            gradient = incoming.bucket.shard.grad
            assert gradient is not None
            for sender, message, entries in incoming.messages:
                self.encoding.add(gradient, message, entries, self.weights[sender])
