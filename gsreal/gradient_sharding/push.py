"""Push of gradients to the owners of their shards: one bucket at a time, thresholded and packed, with error feedback.

Order of operations: the carried residual (error feedback) is added to a rank's mean gradient, and the sum is compared
with the threshold; elements that are sent are cleared, the rest is carried to the next step. The own range is never
thresholded. The owner weights what it receives by the sender's fraction of the step's loss terms, and divides by the
received weight if the plan says so; its own gradient always counts. A rank without loss terms sends nothing and keeps
its residual.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gsreal.gradient_sharding.bucket import ABSENT, Bucket
from gsreal.gradient_sharding.messages import (
    Encoding,
    Scratch,
    ThresholdedRange,
    Thresholds,
    clip_ranges,
    is_on_host,
    mark,
    scratch_by_dtype,
)
from gsreal.gradient_sharding.point_to_point import Pending, all_to_all_v, is_staged
from gsreal.gradient_sharding.protocol import ExchangeProtocol, MessageKind, pack_tags, unpack_tags
from gsreal.gradient_sharding.side_stream import Observer
from gssim.plan import Push

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Residual:
    """Error feedback of a bucket on one rank: the unsent value of every element that another rank owns.

    It is in the unit of the rank's mean gradient, which the owner multiplies by the rank's weight: if that weight
    changes, the residual is rescaled, so that its contribution stays the same.
    """

    def __init__(self, elements: int, own: slice, dtype: torch.dtype, device: torch.device) -> None:
        self.elements, self.own = elements, own
        self.values = torch.full((elements - (own.stop - own.start),), ABSENT, dtype=dtype, device=device)
        """Initially negative zeros: added to an absent gradient, they leave it absent."""
        self.weight = 0.0
        """Weight of the rank's gradients when the residual was accumulated."""
        self.carried: Tensor | None = None
        """Residual of the own range from the time when other ranks owned it."""

    def part(self, first: int, last: int) -> Tensor:
        """Return the residual of a range that another rank owns."""
        shift = 0 if last <= self.own.start else self.own.stop - self.own.start
        return self.values[first - shift : last - shift]

    @property
    def places(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Half-open ranges that other ranks own: before the own range and after it."""
        return (0, self.own.start), (self.own.stop, self.elements)

    def accumulates_in_residual(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of a type are added to the residual (else the reverse).

        Whichever is more precise.
        """
        return torch.promote_types(dtype, self.values.dtype) == self.values.dtype

    def reshard(self, own: slice) -> None:
        """Change the own range; the residual of newly owned elements is added to the next gradient."""
        whole = self.values.new_full((self.elements,), ABSENT)
        for first, last in self.places:
            whole[first:last] = self.part(first, last)
        if self.carried is not None:
            whole[self.own] = self.carried
        self.own, self.carried = own, whole[own].clone()
        self.values = torch.cat([whole[: own.start], whole[own.stop :]])

    def add_carried(self, gradient: Tensor, weight: float) -> None:
        """Add to a bucket's gradient the residual of the own range from the time when others owned it."""
        if self.carried is not None:
            gradient[self.own].add_(self.carried.to(gradient.dtype), alpha=self._weight_ratio(weight))
            self.carried = None

    def _weight_ratio(self, weight: float) -> float:
        return self.weight / weight if self.weight else 1.0

    def accumulate(self, gradient: Tensor, weight: float, scratch: Scratch) -> None:
        """Add a bucket's gradient to the residual, or the residual to the gradient if that is the more precise one."""
        ratio = self._weight_ratio(weight)
        self.weight = weight
        in_residual = self.accumulates_in_residual(gradient.dtype)
        if in_residual and ratio != 1:
            self.values.mul_(ratio)
        for first, last in self.places:
            carried, new = self.part(first, last), gradient[first:last]
            if in_residual:
                scratch.add(carried, new)
            else:
                scratch.add(new, carried, ratio)

    def store_remainder(self, gradient: Tensor) -> None:
        """Store what remains of an accumulated gradient after entries were taken out."""
        for first, last in self.places:
            self.part(first, last).copy_(gradient[first:last])

    def drop_nonfinite(self) -> None:
        """Reset values that are not finite, so that a step with broken gradients has no lasting effect."""
        self.values.nan_to_num_(nan=ABSENT, posinf=ABSENT, neginf=ABSENT)


class Accumulated:
    """A bucket's gradient with its residual added, in whichever buffer holds the sum."""

    def __init__(self, bucket: Bucket, residual: Residual | None) -> None:
        self.bucket, self.residual = bucket, residual
        self.in_residual = residual is not None and residual.accumulates_in_residual(bucket.flat.dtype)
        """Whether other ranks' ranges are accumulated in the residual, not in the bucket."""

    def part(self, first: int, last: int) -> Tensor:
        """Return a range that another rank owns."""
        if self.in_residual and self.residual is not None:
            return self.residual.part(first, last)
        return self.bucket.collected_gradient[first:last]

    def pieces(self, first: int, last: int) -> list[Tensor]:
        """Return a range of the bucket, in pieces if the own range cuts it."""
        own = self.bucket.own
        cuts = sorted({first, last, *(end for end in (own.start, own.stop) if first < end < last)})
        return [
            self.bucket.collected_gradient[a:b] if own.start <= a < own.stop else self.part(a, b)
            for a, b in pairwise(cuts)
        ]

    def pieces_of_others(self, first: int, last: int) -> list[Tensor]:
        """Return what other ranks own of a range of the bucket, in pieces: all that may be sent of it."""
        own = self.bucket.own
        ends = [(first, min(last, own.start)), (max(first, own.stop), last)]
        return [self.part(a, b) for a, b in ends if a < b]

    def release(self) -> None:
        """Free the bucket's gradient if other ranks' ranges are in the residual.

        The own range has been added already.
        """
        if self.in_residual:
            self.bucket.gradient = None

    def finish(self) -> None:
        """Store the residual once all messages are packed, and free the bucket's gradient."""
        if self.residual is not None and not self.in_residual:
            self.residual.store_remainder(self.bucket.collected_gradient)
        self.bucket.gradient = None


Message = tuple[Tensor | None, int]
"""Message to an owner, and its number of entries; None to itself."""


@dataclass
class _Incoming:
    """A push in flight: the messages that this rank receives for its range of a bucket."""

    bucket: Bucket
    total: Tensor
    """Accumulator: the shard's gradient, or a buffer that is added to it later."""
    pending: Pending
    messages: list[tuple[int, Tensor, int | None]]
    """(sender, buffer, entries), with entries None for a dense push."""


@dataclass
class Sent:
    """Counts of what this rank pushed, or published."""

    entries: int = 0
    offered: int = 0
    """Elements that could have been sent: those outside its shard to push, those of its shard to publish."""
    bytes_of: Counter[int] = field(default_factory=Counter)
    """Bytes sent, by index of the bucket."""

    @property
    def by_bucket(self) -> list[int]:
        """Bytes for each bucket, in the order in which they are sent."""
        return list(self.bytes_of.values())

    @property
    def bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(self.bytes_of.values())


class Pusher:
    """Pushes buckets to their owners; at most one is in flight."""

    def __init__(
        self,
        push: Push,
        buckets: Sequence[Bucket],
        *,
        protocol: ExchangeProtocol,
        point_to_point: bool,
        observe: Observer,
        overlaps: bool = True,
    ) -> None:
        self.rules, self.point_to_point, self.observe = push, point_to_point, observe
        self.protocol = protocol
        self.overlaps = overlaps
        """Whether the backward continues while a push is in flight."""
        self.steps = 0
        """Updates so far."""
        self.loss_scale = 1.0
        """Factor of the loss: gradients are sent scaled, so absolute thresholds are scaled for the comparison."""
        self.sent = Sent()
        self._incoming: _Incoming | None = None
        self.encodings: dict[torch.dtype, Encoding] = {}
        self.residuals: dict[int, Residual] = {}
        self.thresholds: dict[int, Thresholds] = {}
        if push.threshold is not None:
            self._prepare(buckets)

    def _prepare(self, buckets: Sequence[Bucket]) -> None:
        """Allocate the persistent memory of thresholding."""
        self._take_scratch(buckets)
        for bucket in buckets:
            self.thresholds[bucket.index] = Thresholds(self.rules, [bucket.places[p] for p in bucket.parameters])
            if self.rules.error_feedback:
                precision = PRECISIONS[self.rules.error_feedback_precision]
                self.residuals[bucket.index] = Residual(bucket.elements, bucket.own, precision, bucket.flat.device)

    def _take_scratch(self, buckets: Sequence[Bucket]) -> None:
        for dtype, scratch in scratch_by_dtype(buckets).items():
            self.encodings[dtype] = Encoding(self.rules.encoding, dtype, scratch)

    @property
    def is_thresholded_now(self) -> bool:
        """Whether this step's pushes are thresholded: there is a threshold, and the warm-up steps are over."""
        return self.rules.threshold is not None and self.steps >= self.rules.warmup_steps

    def push(self, bucket: Bucket) -> None:
        """Wait for the push in flight, then start this bucket's and free its gradient."""
        self.drain()
        label = f"bucket {bucket.index}"
        with self.observe(f"threshold {label}", "compression"):
            self._add_carried(bucket)
            total = self._accumulate_own(bucket)
            sends = self._thresholded_messages(bucket) if self.is_thresholded_now else self._dense_messages(bucket)
        if bucket.owners.ranks == 1:
            return  # nothing is left to push
        self._count(bucket, sends)
        with self.protocol.exchange(f"push of {label}"):
            counts = self._exchange_counts([entries for _, entries in sends], bucket)
            with self.observe(f"post push {label}", "exposed_communication", group=bucket.owners.group):
                self._incoming = self._post(bucket, total, [message for message, _ in sends], counts)
            if not self.overlaps:
                with self.observe(f"push {label}", "exposed_communication", group=bucket.owners.group):
                    self._incoming.pending.end()

    def _add_carried(self, bucket: Bucket) -> None:
        residual, weight = self.residuals.get(bucket.index), bucket.owners.weights[bucket.owners.rank]
        if residual is not None and weight:
            residual.add_carried(bucket.collected_gradient, weight / self.loss_scale)

    def _count(self, bucket: Bucket, sends: Sequence[Message]) -> None:
        """Count the entries that are sent, and those that could have been."""
        size = sum(message.numel() * message.element_size() for message, _ in sends if message is not None)
        self.sent.bytes_of[bucket.index] += size
        self.sent.entries += sum(entries for _, entries in sends)
        self.sent.offered += bucket.elements - bucket.shard.numel()

    def _accumulate_own(self, bucket: Bucket) -> Tensor:
        """Add the own range's gradient, which is never thresholded; return the accumulator for other ranks' gradients.

        If the sum is divided by the received weight, it is a new tensor, without the gradient that an earlier push of
        the step has left: that one has been divided already.
        """
        own, weight = bucket.collected_gradient[bucket.own], bucket.owners.weights[bucket.owners.rank]
        if self._divides_by_weight(bucket) and bucket.shard.grad is not None:
            return own.to(bucket.shard.dtype, copy=True).mul_(weight)
        bucket.add_own_gradient(own, weight)
        assert bucket.shard.grad is not None
        return bucket.shard.grad

    def _divides_by_weight(self, bucket: Bucket) -> bool:
        return bucket.owners.ranks > 1 and self.is_thresholded_now and self.rules.aggregate == "received-weight"

    def _dense_messages(self, bucket: Bucket) -> list[Message]:
        """Return the messages of a dense push to every owner: views of the bucket, which keep its memory alive."""
        gradient, bucket.gradient = bucket.collected_gradient, None
        messages: list[Message] = []
        for owner, places in enumerate(bucket.ranges):
            part = gradient[slice(*places)] if owner != bucket.owners.rank else None
            messages.append((part, 0 if part is None else part.numel()))
        return messages

    def _thresholded_messages(self, bucket: Bucket) -> list[Message]:
        """Return the messages with the elements that reach a threshold, to every owner; free the bucket's gradient."""
        rank, encoding = bucket.owners.rank, self.encodings[bucket.flat.dtype]
        weight = bucket.owners.weights[rank]
        residual = self.residuals.get(bucket.index) if weight else None
        if residual is not None:
            residual.accumulate(bucket.collected_gradient, weight / self.loss_scale, encoding.scratch)
        accumulated = Accumulated(bucket, residual)
        thresholds: list[ThresholdedRange] = []
        if weight:
            step = self.steps - self.rules.warmup_steps
            # a target is met by what may be sent: the own range, which has no residual, is smaller
            pieces = accumulated.pieces_of_others if self.rules.kind == "target-density" else accumulated.pieces
            thresholds = self.thresholds[bucket.index].find(pieces, encoding.scratch, step=step, scale=self.loss_scale)
        accumulated.release()
        counts = self._counts(bucket, accumulated, thresholds)
        messages: list[Message] = []
        for owner, (first, last) in enumerate(bucket.ranges):
            if owner == rank:
                messages.append((None, 0))
                continue
            part = accumulated.part(first, last)
            flags = mark(part, clip_ranges(thresholds, first, last), encoding.scratch)
            messages.append(encoding.pack(part, flags, entries=counts[owner], clear=residual is not None))
        accumulated.finish()
        return messages

    def _counts(
        self, bucket: Bucket, accumulated: Accumulated, thresholds: Sequence[ThresholdedRange]
    ) -> Sequence[int | None]:
        """Return the number of entries for each owner, if the device must be synchronised with for it.

        Once for all owners.

        On the host each is counted as it is packed (None).
        """
        scratch, owners = self.encodings[bucket.flat.dtype].scratch, bucket.owners
        if is_on_host(scratch.flags):
            return [None] * owners.ranks
        counts = torch.zeros(owners.ranks, dtype=torch.int64, device=scratch.flags.device)
        for owner, (first, last) in enumerate(bucket.ranges):
            if owner != owners.rank:
                flags = mark(accumulated.part(first, last), clip_ranges(thresholds, first, last), scratch)
                counts[owner] = flags.sum()
        entries: list[int] = counts.tolist()
        return entries

    def _exchange_counts(self, entries: list[int], bucket: Bucket) -> list[int | None]:
        """Exchange the numbers of entries with all owners; dense pushes need none."""
        owners = bucket.owners
        if not self.is_thresholded_now:
            return [None] * owners.ranks
        tag, device = self.protocol.tag(MessageKind.PUSH_COUNTS, bucket.index), bucket.flat.device
        if is_staged(owners.group, device):
            device = torch.device("cpu")
        with self.observe(f"counts bucket {bucket.index}", "exposed_communication", group=owners.group):
            tags = [tag] * owners.ranks
            outgoing = torch.tensor(pack_tags(entries, tags), dtype=torch.int64, device=device)
            incoming = torch.zeros(owners.ranks, dtype=torch.int64, device=device)
            incoming[owners.rank] = outgoing[owners.rank]
            sends, receives = ([*counts.split(1)] for counts in (outgoing, incoming))
            size = 8 * (owners.ranks - 1)
            all_to_all_v(
                sends,
                receives,
                group=owners.group,
                declared_bytes=size,
                point_to_point=self.point_to_point,
                tag=tag,
            ).wait()
            return [*unpack_tags(incoming.tolist(), tags)]

    def _post(self, bucket: Bucket, total: Tensor, sends: list[Tensor | None], counts: list[int | None]) -> _Incoming:
        elements, flat, owners = bucket.shard.numel(), bucket.flat, bucket.owners
        messages: list[tuple[int, Tensor, int | None]] = []
        receives: list[Tensor | None] = [None] * owners.ranks
        for sender, count in enumerate(counts):
            if sender != owners.rank:
                if count is None:
                    buffer = torch.empty(elements, dtype=flat.dtype, device=flat.device)
                else:
                    buffer = self.encodings[flat.dtype].empty(count, elements, flat.device)
                receives[sender] = buffer
                messages.append((sender, buffer, count))
        pending = all_to_all_v(
            sends,
            receives,
            group=owners.group,
            declared_bytes=(bucket.elements - elements) * flat.element_size(),
            data_dependent=self.is_thresholded_now,
            point_to_point=self.point_to_point,
            tag=self.protocol.tag(MessageKind.PUSH, bucket.index),
        )
        return _Incoming(bucket, total, pending, messages)

    def drain(self) -> None:
        """Wait for the push in flight, if any, and add it."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return
        label, group = f"bucket {incoming.bucket.index}", incoming.bucket.owners.group
        waiting = self.observe(f"wait push {label}", "exposed_communication", group=group)
        with waiting, self.protocol.exchange(f"push of {label}"):
            incoming.pending.wait()
        with self.observe(f"add {label}", "compression"):
            self._add(incoming)

    def _add(self, incoming: _Incoming) -> None:
        """Add the received messages, weighted; divide by the received weight if the plan says so."""
        bucket, total, owners = incoming.bucket, incoming.total, incoming.bucket.owners
        received = torch.full_like(total, owners.weights[owners.rank]) if self._divides_by_weight(bucket) else None
        for sender, message, entries in incoming.messages:
            weight = owners.weights[sender]
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
    def persistent_tensors(self) -> list[Tensor]:
        """Tensors that are kept from step to step."""
        scratch_by_dtype = [encoding.scratch for encoding in self.encodings.values()]
        residuals = [residual.values for residual in self.residuals.values()]
        return [*residuals, *(each for scratch in scratch_by_dtype for each in (scratch.flags, scratch.magnitudes))]

    def end_step(self) -> None:
        """Count an update."""
        self.steps += 1

    def reshard(self, buckets: Sequence[Bucket]) -> None:
        """Continue after a change of owners: with other ranges of the same buckets, and their residuals."""
        if self.rules.threshold is not None:
            self._take_scratch(buckets)
        for thresholds in self.thresholds.values():
            thresholds.estimated = None  # they were those of other ranges
        for bucket in buckets:
            if bucket.index in self.residuals:
                self.residuals[bucket.index].reshard(bucket.own)

    def drop_nonfinite(self) -> None:
        """Reset residuals that are not finite: a step with broken gradients is over."""
        for residual in self.residuals.values():
            residual.drop_nonfinite()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later pushes depend on.

        Updates so far, and this rank's residual and thresholds by bucket.
        """
        residuals = {index: {"values": r.values, "weight": r.weight} for index, r in self.residuals.items()}
        return {
            "steps": self.steps,
            "residuals": residuals,
            "thresholds": {index: each.estimated for index, each in self.thresholds.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of a rank with the same ranges."""
        self.steps = state["steps"]
        for index, saved in state["residuals"].items():
            self.residuals[index].values.copy_(saved["values"])
            self.residuals[index].weight = saved["weight"]
        for index, estimated in state["thresholds"].items():
            self.thresholds[index].estimated = estimated
