"""Gradients on their way to the owners of their shards: one bucket at a time, thresholded and packed.

The order of operations: a rank's mean gradient, plus what it has kept (error feedback), is compared with the threshold;
what is sent is cleared, the rest is kept. The own range is never thresholded. The owner weighs what comes by the
sender's part of the step's loss terms, and divides by the weight that it received where the plan says so; its own
always counts. A rank without loss terms sends nothing and keeps what it has.

Error feedback: what a rank has not sent of a bucket is kept, and added to what it finds there next.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.gradient_sharding.bucket import ABSENT, Bucket
from gsreal.gradient_sharding.messages import Encoding, Scratch, is_on_host, scratches
from gsreal.gradient_sharding.point_to_point import Pending, all_to_all_v, is_staged
from gsreal.gradient_sharding.protocol import Kind, Protocol, with_tag, without_tag
from gsreal.gradient_sharding.side_stream import Observer
from gsreal.gradient_sharding.thresholds import Part, Thresholds, mark, within
from gssim.plan import Push, splitting

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Residual:
    """What a rank has kept of a bucket: a value for every element that another rank owns.

    It is in the unit of the rank's mean gradient, which its owner multiplies by the rank's weight: where that weight
    has changed, what is kept is scaled, so that it counts as it would have done.
    """

    def __init__(self, elements: int, own: slice, dtype: torch.dtype, device: torch.device) -> None:
        self.elements, self.own = elements, own
        self.values = torch.full((elements - (own.stop - own.start),), ABSENT, dtype=dtype, device=device)
        """Nothing kept is a negative zero: added to an absent gradient, it leaves it absent."""
        self.weight = 0.0
        """What the rank's gradients counted when this was kept."""
        self.owed: Tensor | None = None
        """What was kept of the own range while others owned it."""

    def part(self, first: int, last: int) -> Tensor:
        """Return what is kept of a range that another rank owns."""
        shift = 0 if last <= self.own.start else self.own.stop - self.own.start
        return self.values[first - shift : last - shift]

    @property
    def places(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What others own: half-open ranges before the own one and after it."""
        return (0, self.own.start), (self.own.stop, self.elements)

    def accumulates(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of a type are added to what is kept; else it to them, whichever is more precise."""
        return torch.promote_types(dtype, self.values.dtype) == self.values.dtype

    def reshard(self, own: slice) -> None:
        """Keep the same where the rank now owns another range: what it owns itself goes into its next gradient."""
        whole = self.values.new_full((self.elements,), ABSENT)
        for first, last in self.places:
            whole[first:last] = self.part(first, last)
        if self.owed is not None:
            whole[self.own] = self.owed
        self.own, self.owed = own, whole[own].clone()
        self.values = torch.cat([whole[: own.start], whole[own.stop :]])

    def pay(self, gradient: Tensor, weight: float) -> None:
        """Add to a bucket's gradient what was kept of the own range while others owned it."""
        if self.owed is not None:
            gradient[self.own].add_(self.owed.to(gradient.dtype), alpha=self._ratio(weight))
            self.owed = None

    def _ratio(self, weight: float) -> float:
        return self.weight / weight if self.weight else 1.0

    def accumulate(self, gradient: Tensor, weight: float, scratch: Scratch) -> None:
        """Add a bucket's gradient and what is kept: here, or in the gradient where that is more precise."""
        ratio = self._ratio(weight)
        self.weight = weight
        here = self.accumulates(gradient.dtype)
        if here and ratio != 1:
            self.values.mul_(ratio)
        for first, last in self.places:
            kept, new = self.part(first, last), gradient[first:last]
            if here:
                scratch.add(kept, new)
            else:
                scratch.add(new, kept, ratio)

    def keep(self, gradient: Tensor) -> None:
        """Keep what is left of an accumulated gradient from which entries were taken."""
        for first, last in self.places:
            self.part(first, last).copy_(gradient[first:last])

    def drop_broken(self) -> None:
        """Forget what is not finite, so that a step with broken gradients does not last."""
        self.values.nan_to_num_(nan=ABSENT, posinf=ABSENT, neginf=ABSENT)


class Accumulated:
    """A bucket's gradient with what was kept of it added: where it is, and how it is left."""

    def __init__(self, bucket: Bucket, residual: Residual | None) -> None:
        self.bucket, self.residual = bucket, residual
        self.elsewhere = residual is not None and residual.accumulates(bucket.flat.dtype)
        """Whether others' ranges are accumulated in what is kept, not in the bucket."""

    def part(self, first: int, last: int) -> Tensor:
        """Return a range that another rank owns."""
        if self.elsewhere and self.residual is not None:
            return self.residual.part(first, last)
        assert self.bucket.gradient is not None
        return self.bucket.gradient[first:last]

    def pieces(self, first: int, last: int) -> list[Tensor]:
        """Return a range of the bucket, in pieces where the own range cuts it."""
        assert self.bucket.gradient is not None
        own = self.bucket.own
        cuts = sorted({first, last, *(end for end in (own.start, own.stop) if first < end < last)})
        return [self.bucket.gradient[a:b] if own.start <= a < own.stop else self.part(a, b) for a, b in pairwise(cuts)]

    def release(self) -> None:
        """Give the bucket back if others' ranges are elsewhere: the own range is taken, and nothing else is needed."""
        if self.elsewhere:
            self.bucket.gradient = None

    def finish(self) -> None:
        """Keep what is left once all messages are packed, and give the bucket back."""
        if self.residual is not None and not self.elsewhere:
            assert self.bucket.gradient is not None
            self.residual.keep(self.bucket.gradient)
        self.bucket.gradient = None


Message = tuple[Tensor | None, int]
"""What goes to an owner, and how many entries it holds; nothing to itself."""


@dataclass
class _Incoming:
    """A push under way: what this rank will receive for its range of a bucket."""

    bucket: Bucket
    total: Tensor
    """To what it is added: the shard's gradient, or what later becomes a part of it."""
    pending: Pending
    messages: list[tuple[int, Tensor, int | None]]
    """(sender, buffer, entries), entries None where no threshold was."""


@dataclass
class Sent:
    """What this rank pushed, or published."""

    entries: int = 0
    offered: int = 0
    """Elements that it could have sent: those off its shard to push, those of its shard to publish."""
    bytes_of: Counter[int] = field(default_factory=Counter)
    """By bucket."""

    @property
    def by_bucket(self) -> list[int]:
        """Bytes for each bucket, in the order in which they are sent."""
        return list(self.bytes_of.values())


class Pusher:
    """Pushes buckets to their owners; at most one is under way."""

    def __init__(
        self,
        push: Push,
        group: dist.ProcessGroup,
        buckets: Sequence[Bucket],
        *,
        protocol: Protocol,
        point_to_point: bool,
        observe: Observer,
        overlaps: bool = True,
    ) -> None:
        self.rules, self.group, self.point_to_point, self.observe = push, group, point_to_point, observe
        self.protocol = protocol
        self.overlaps = overlaps
        """Whether the backward goes on while a push is under way."""
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.weights: tuple[float, ...] = splitting.even(self.ranks)
        """Each node's part of the step's loss terms: what its mean gradient counts."""
        self.steps = 0
        """Updates so far."""
        self.loss_scale = 1.0
        """What the loss was multiplied by: gradients travel scaled, so absolute thresholds are scaled for them."""
        self.sent = Sent()
        self._incoming: _Incoming | None = None
        self.encodings: dict[torch.dtype, Encoding] = {}
        self.residuals: dict[int, Residual] = {}
        self.thresholds: dict[int, Thresholds] = {}
        if push.threshold is not None:
            self._prepare(buckets)

    def _prepare(self, buckets: Sequence[Bucket]) -> None:
        """Take the memory that thresholding needs all the time."""
        self._take_scratch(buckets)
        for bucket in buckets:
            self.thresholds[bucket.index] = Thresholds(self.rules, [bucket.places[p] for p in bucket.parameters])
            if self.rules.error_feedback:
                precision = PRECISIONS[self.rules.error_feedback_precision]
                self.residuals[bucket.index] = Residual(bucket.elements, bucket.own, precision, bucket.flat.device)

    def _take_scratch(self, buckets: Sequence[Bucket]) -> None:
        for dtype, scratch in scratches(buckets).items():
            self.encodings[dtype] = Encoding(self.rules.encoding, dtype, scratch)

    @property
    def thresholds_now(self) -> bool:
        """Whether this step's pushes are thresholded: there is a threshold, and the dense steps are over."""
        return self.rules.threshold is not None and self.steps >= self.rules.warmup_steps

    def push(self, bucket: Bucket) -> None:
        """Take in the push that is under way, then send this bucket's gradient on its way and give the bucket back."""
        self.drain()
        assert bucket.gradient is not None
        label = f"bucket {bucket.index}"
        with self.observe(f"threshold {label}", "compression"):
            self._pay(bucket)
            total = self._own(bucket)
            sends = self._thresholded(bucket) if self.thresholds_now else self._dense(bucket)
        if self.ranks == 1:
            return  # nothing is left to push
        self._count(bucket, sends)
        with self.protocol.exchange(f"push of {label}"):
            counts = self._exchange_counts([entries for _, entries in sends], bucket)
            with self.observe(f"post push {label}", "exposed_communication"):
                self._incoming = self._posted(bucket, total, [message for message, _ in sends], counts)
            if not self.overlaps:
                with self.observe(f"push {label}", "exposed_communication"):
                    self._incoming.pending.end()

    def _pay(self, bucket: Bucket) -> None:
        residual, weight = self.residuals.get(bucket.index), self.weights[self.rank]
        if residual is not None and weight:
            assert bucket.gradient is not None
            residual.pay(bucket.gradient, weight / self.loss_scale)

    def _count(self, bucket: Bucket, sends: Sequence[Message]) -> None:
        """Count what is sent, and what could have been."""
        size = sum(message.numel() * message.element_size() for message, _ in sends if message is not None)
        self.sent.bytes_of[bucket.index] += size
        self.sent.entries += sum(entries for _, entries in sends)
        self.sent.offered += bucket.elements - bucket.shard.numel()

    def _own(self, bucket: Bucket) -> Tensor:
        """Take the own range's gradient, which is never thresholded; return that to which others' are added.

        Where the sum is divided by the weight received, that of an earlier push of the step stays out of it.
        """
        assert bucket.gradient is not None
        own, weight = bucket.gradient[bucket.own], self.weights[self.rank]
        if self._divides and bucket.shard.grad is not None:
            return own.to(bucket.shard.dtype, copy=True).mul_(weight)
        bucket.keep(own, weight)
        assert bucket.shard.grad is not None
        return bucket.shard.grad

    @property
    def _divides(self) -> bool:
        return self.ranks > 1 and self.thresholds_now and self.rules.aggregate == "received-weight"

    def _dense(self, bucket: Bucket) -> list[Message]:
        """Return what goes to every owner where nothing is thresholded: views of the bucket, which they keep."""
        assert bucket.gradient is not None
        gradient, bucket.gradient = bucket.gradient, None
        found: list[Message] = []
        for owner, places in enumerate(bucket.ranges):
            part = gradient[slice(*places)] if owner != self.rank else None
            found.append((part, 0 if part is None else part.numel()))
        return found

    def _thresholded(self, bucket: Bucket) -> list[Message]:
        """Return what goes to every owner where only what reaches a threshold is sent; give the bucket back."""
        weight, encoding = self.weights[self.rank], self.encodings[bucket.flat.dtype]
        residual = self.residuals.get(bucket.index) if weight else None
        if residual is not None:
            assert bucket.gradient is not None
            residual.accumulate(bucket.gradient, weight / self.loss_scale, encoding.scratch)
        accumulated = Accumulated(bucket, residual)
        thresholds: list[Part] = []
        if weight:
            step = self.steps - self.rules.warmup_steps
            thresholds = self.thresholds[bucket.index].find(
                accumulated.pieces, encoding.scratch, step=step, scale=self.loss_scale
            )
        accumulated.release()
        counts = self._counts(bucket, accumulated, thresholds)
        found: list[Message] = []
        for owner, (first, last) in enumerate(bucket.ranges):
            if owner == self.rank:
                found.append((None, 0))
                continue
            part = accumulated.part(first, last)
            flags = mark(part, within(thresholds, first, last), encoding.scratch)
            found.append(encoding.pack(part, flags, entries=counts[owner], clear=residual is not None))
        accumulated.finish()
        return found

    def _counts(self, bucket: Bucket, accumulated: Accumulated, thresholds: Sequence[Part]) -> Sequence[int | None]:
        """Return how many entries go to each owner, where the device has to be waited for to know: once for all.

        On the host, each is known as it is packed (None).
        """
        scratch = self.encodings[bucket.flat.dtype].scratch
        if is_on_host(scratch.flags):
            return [None] * self.ranks
        counts = torch.zeros(self.ranks, dtype=torch.int64, device=scratch.flags.device)
        for owner, (first, last) in enumerate(bucket.ranges):
            if owner != self.rank:
                flags = mark(accumulated.part(first, last), within(thresholds, first, last), scratch)
                counts[owner] = flags.count_nonzero()
        found: list[int] = counts.tolist()
        return found

    def _exchange_counts(self, entries: list[int], bucket: Bucket) -> list[int | None]:
        """Tell every owner how many entries come, and learn the same from everybody; dense pushes need not."""
        if not self.thresholds_now:
            return [None] * self.ranks
        tag, device = self.protocol.tag(Kind.PUSH_COUNTS, bucket.index), bucket.flat.device
        if is_staged(self.group, device):
            device = torch.device("cpu")
        with self.observe(f"counts bucket {bucket.index}", "exposed_communication"):
            tags = [tag] * self.ranks
            outgoing = torch.tensor(with_tag(entries, tags), dtype=torch.int64, device=device)
            incoming = torch.zeros(self.ranks, dtype=torch.int64, device=device)
            incoming[self.rank] = outgoing[self.rank]
            sends, receives = ([*counts.split(1)] for counts in (outgoing, incoming))
            size = 8 * (self.ranks - 1)
            all_to_all_v(
                sends,
                receives,
                group=self.group,
                declared_bytes=size,
                point_to_point=self.point_to_point,
                tag=tag,
            ).wait()
            return [*without_tag(incoming.tolist(), tags)]

    def _posted(self, bucket: Bucket, total: Tensor, sends: list[Tensor | None], counts: list[int | None]) -> _Incoming:
        elements, flat = bucket.shard.numel(), bucket.flat
        messages: list[tuple[int, Tensor, int | None]] = []
        receives: list[Tensor | None] = [None] * self.ranks
        for sender, count in enumerate(counts):
            if sender != self.rank:
                if count is None:
                    buffer = torch.empty(elements, dtype=flat.dtype, device=flat.device)
                else:
                    buffer = self.encodings[flat.dtype].empty(count, elements, flat.device)
                receives[sender] = buffer
                messages.append((sender, buffer, count))
        pending = all_to_all_v(
            sends,
            receives,
            group=self.group,
            declared_bytes=(bucket.elements - elements) * flat.element_size(),
            data_dependent=self.thresholds_now,
            point_to_point=self.point_to_point,
            tag=self.protocol.tag(Kind.PUSH, bucket.index),
        )
        return _Incoming(bucket, total, pending, messages)

    def drain(self) -> None:
        """Take in the push that is under way, if any."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return
        label = f"bucket {incoming.bucket.index}"
        with self.observe(f"wait push {label}", "exposed_communication"), self.protocol.exchange(f"push of {label}"):
            incoming.pending.wait()
        with self.observe(f"add {label}", "compression"):
            self._add(incoming)

    def _add(self, incoming: _Incoming) -> None:
        """Add what came, weighted; divide by the weight that came, where the plan says so."""
        bucket, total = incoming.bucket, incoming.total
        received = torch.full_like(total, self.weights[self.rank]) if self._divides else None
        for sender, message, entries in incoming.messages:
            weight = self.weights[sender]
            if entries is None:
                total.add_(message.to(total.dtype), alpha=weight)
            else:
                self.encodings[bucket.flat.dtype].add(total, message, entries, weight, received)
        if received is None:
            return
        total.div_(received.clamp_min_(torch.finfo(received.dtype).tiny))  # where nothing came, the sum is 0
        if bucket.shard.grad is not total:
            assert bucket.shard.grad is not None
            bucket.shard.grad.add_(total)

    @property
    def held(self) -> list[Tensor]:
        """What is kept and used from step to step."""
        scratches = [encoding.scratch for encoding in self.encodings.values()]
        kept = [residual.values for residual in self.residuals.values()]
        return [*kept, *(each for scratch in scratches for each in (scratch.flags, scratch.magnitudes))]

    def end_step(self) -> None:
        """Note that what was pushed has been used in an update."""
        self.steps += 1

    def reshard(self, buckets: Sequence[Bucket]) -> None:
        """Go on after owners have changed: with other ranges of the same buckets, and what was kept of them."""
        if self.rules.threshold is not None:
            self._take_scratch(buckets)
        for bucket in buckets:
            if bucket.index in self.residuals:
                self.residuals[bucket.index].reshard(bucket.own)

    def drop_broken(self) -> None:
        """Forget what is not finite of what was kept: a step with broken gradients is over."""
        for residual in self.residuals.values():
            residual.drop_broken()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next pushes depend on: updates so far, and for every bucket what this rank keeps of it."""
        kept = {index: {"values": r.values, "weight": r.weight} for index, r in self.residuals.items()}
        return {
            "steps": self.steps,
            "residuals": kept,
            "thresholds": {index: each.estimated for index, each in self.thresholds.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on a rank with the same ranges."""
        self.steps = state["steps"]
        for index, kept in state["residuals"].items():
            self.residuals[index].values.copy_(kept["values"])
            self.residuals[index].weight = kept["weight"]
        for index, estimated in state["thresholds"].items():
            self.thresholds[index].estimated = estimated
