"""Updated parameters on their way back from the owners to every replica.

With a threshold, an owner sends only what is at least that far from what it published last: it keeps a master copy of
its range, and what was not sent stays in the difference of the two until it has grown enough (error feedback that takes
no memory of its own; gradient-sharding A.3, step 5). What is sent is the parameter's new value, not its change: as many
bytes, and the replica is then the master rounded to its precision, whatever was rounded before. The owner trains on
what was published too, so that all replicas stay equal bit for bit.

A module's forward, which waits for the parameters that it reads, where they are still under way to the replica.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.messages import Encoding, Scratch, count, scratches
from gsreal.gradient_sharding.point_to_point import (
    Pending,
    Ranges,
    all_gather_into_tensor,
    all_gather_messages,
    all_gather_v,
    backend_of,
    broadcast_parts,
    is_staged,
    post_to_all,
)
from gsreal.gradient_sharding.protocol import Kind, own_communicator, with_tag, without_tag
from gsreal.gradient_sharding.push import Pusher, Sent
from gssim.plan import Publish, absolute_threshold


class Arrivals(Protocol):
    """Parameters that may still be under way (a `Publisher`)."""

    @property
    def under_way(self) -> bool:
        """Whether any are."""

    def wait(self, bucket: Bucket) -> None:
        """Return once a bucket's are there."""

    def finish(self) -> None:
        """Return once all are there."""


class ForwardWaits:
    """Hooks that let every module wait for the buckets of its own parameters just before its forward.

    Some modules' parameters are read by another's forward, without a call of their own (`nn.MultiheadAttention` reads
    its `out_proj`): whoever is above a module that was never called yet waits for its buckets too. So the first forward
    waits for everything at its beginning, and later ones just in time. Reading a whole model's state waits for all.
    Copies of the model wait for nothing, and are refused while anything is under way.
    """

    def __init__(self, module: nn.Module, buckets: list[Bucket], arrivals: Arrivals | None) -> None:
        self.arrivals = arrivals
        self.called: set[nn.Module] = set()
        of_parameter = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self.read_by = {
            each: list(dict.fromkeys(of_parameter[p] for p in each.parameters(recurse=False) if p in of_parameter))
            for each in module.modules()
        }
        for each in module.modules():
            each.register_forward_pre_hook(self._before_forward)
            each.register_state_dict_pre_hook(self._before_state)
            each.register_load_state_dict_pre_hook(self._before_state)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self.arrivals is None:
            return
        self.called.add(module)
        for each in module.modules():
            if each is module or each not in self.called:
                for bucket in self.read_by.get(each, ()):
                    self.arrivals.wait(bucket)

    def _before_state(self, *_arguments: Any) -> None:
        if self.arrivals is not None:
            self.arrivals.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copied or saved model gets hooks that wait for nothing."""
        if self.arrivals is not None and self.arrivals.under_way:
            raise RuntimeError("parameters are under way to this model: call optimizer.finish() before it is copied")
        return ForwardWaits, (nn.Module(), [], None)


class Publisher:
    """Brings what owners have updated to every replica, bucket by bucket.

    Where it overlaps, `publish` only begins that; `wait` ends it for a bucket.
    """

    def __init__(
        self,
        rules: Publish,
        pusher: Pusher,
        buckets: Sequence[Bucket],
        *,
        overlaps: bool,
        inside: dist.ProcessGroup | None = None,
    ) -> None:
        """`inside`: the ranks of this one's node, where it is not alone: they publish to one another after that."""
        device = buckets[0].flat.device
        backend = backend_of(pusher.group, device)
        self.inside = None if inside is None else own_communicator(inside, backend, device)
        self.rules, self.overlaps, self.protocol = rules, overlaps, pusher.protocol
        self.group = own_communicator(pusher.group, backend, device) if buckets[0].is_replica else pusher.group
        self.point_to_point, self.observe = pusher.point_to_point, pusher.observe
        self.rank, self.ranks = pusher.rank, pusher.ranks
        self.sent = Sent()
        self.encodings: dict[torch.dtype, Encoding] = {}
        self.reshard(pusher, buckets)
        self._arrivals: dict[Bucket, Callable[[], None]] = {}
        self._stream: torch.cuda.Stream | None = None

    def reshard(self, pusher: Pusher, buckets: Sequence[Bucket]) -> None:
        """Take what thresholding needs all the time, the push's where that has it; anew once owners have changed."""
        if self.rules.threshold is not None:
            scratch = {dtype: each.scratch for dtype, each in pusher.encodings.items()} or scratches(buckets)
            self.encodings = {dtype: Encoding(self.rules.encoding, dtype, each) for dtype, each in scratch.items()}

    @property
    def held(self) -> list[Tensor]:
        """What is used from step to step."""
        return [each for e in self.encodings.values() for each in (e.scratch.flags, e.scratch.magnitudes)]

    def write_back(self, buckets: Sequence[Bucket]) -> None:
        """Bring what the owner updated to its own replica; with a threshold, `publish` does that."""
        if self.rules.threshold is None:
            for bucket in buckets:
                bucket.write_back()

    @torch.no_grad()
    def publish(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
        """Bring every owner's range of each bucket's replica to all ranks of the group.

        `optimizer`: what updated them; a relative threshold is times its learning rate of now. Gradients are complete
        from the last layer on, so that the last bucket is the first that a forward reads.
        """
        order = list(reversed(buckets)) if self.overlaps else list(buckets)
        if self.rules.threshold is None:
            for bucket in order:
                self._send(bucket, partial(self._gather, bucket))
            return
        messages, entries = map(list, zip(*(self._thresholded(bucket, optimizer) for bucket in order), strict=True))
        with self.protocol.exchange("exchange of publish counts"):
            counts = self._exchange_counts(order, entries)
        for bucket, sent in zip(order, zip(*counts, strict=True), strict=True):
            self._send(bucket, partial(self._exchange, bucket, messages.pop(0), sent))

    def wait(self, bucket: Bucket) -> None:
        """Return once a bucket's replica is complete (on a GPU: let the current stream wait for it)."""
        arrival = self._arrivals.pop(bucket, None)
        if arrival is not None:
            with self.protocol.exchange(f"publishing of bucket {bucket.index}"):
                arrival()

    @property
    def under_way(self) -> bool:
        """Whether parameters have yet to arrive at this replica."""
        return bool(self._arrivals)

    def finish(self) -> None:
        """Wait for all buckets."""
        for bucket in list(self._arrivals):
            self.wait(bucket)

    def _send(self, bucket: Bucket, exchange: Callable[[], Callable[[], None]]) -> None:
        """Exchange a bucket's messages now, or begin to; on a GPU in a stream beside that of the compute."""
        with self.protocol.exchange(f"publishing of bucket {bucket.index}"):
            if not self.overlaps:
                exchange()()
            elif bucket.flat.is_cuda:
                self._arrivals[bucket] = self._aside(exchange)
            else:
                self._arrivals[bucket] = exchange()

    def _aside(self, exchange: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Do it in a stream of its own, and return what lets the current stream wait for it.

        Messages that the compute's stream has packed are kept until then: their memory would go to its next tensors
        while they are being sent.
        """
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            exchange()()
        event = self._stream.record_event()
        return partial(_wait_for, event, exchange)

    def _gather(self, bucket: Bucket) -> Callable[[], None]:
        """Send a whole bucket round; return what ends that."""
        tag = self.protocol.tag(Kind.PUBLISH, bucket.index)
        with self.observe(f"publish bucket {bucket.index}", "exposed_communication"):
            if not self._posts(bucket):
                if self.ranks > 1 or self.inside is None:
                    self._bring_round(bucket.flat, bucket.ranges, self.group, tag)
                return partial(self._gather_in_node, bucket)
            parts = [bucket.flat[slice(*places)] for places in bucket.ranges]
            pending = post_to_all(parts, group=self.group, declared_bytes=bucket.flat.nbytes, tag=tag)
        return partial(self._awaited, bucket, pending, _nothing)

    def _gather_in_node(self, bucket: Bucket) -> None:
        """Bring the node's ranks one another's places, densely."""
        if self.inside is not None:
            tag = self.protocol.tag(Kind.PUBLISH_IN_NODE, bucket.index)
            with self.observe(f"publish bucket {bucket.index} in the node", "exposed_communication"):
                self._bring_round(bucket.whole, bucket.node_ranges, self.inside, tag)

    def _bring_round(self, flat: Tensor, ranges: Ranges, group: dist.ProcessGroup, tag: int) -> None:
        """Bring every owner's range to all, by messages or by the backend's broadcasts."""
        if self.point_to_point:
            all_gather_v(flat, ranges, group=group, tag=tag)
        else:
            broadcast_parts(flat, ranges, group=group)

    def _posts(self, bucket: Bucket) -> bool:
        """Return whether messages are posted now and waited for later; a GPU's stream waits without holding us up."""
        return self.overlaps and self.point_to_point and not bucket.flat.is_cuda and self.inside is None

    def _awaited(self, bucket: Bucket, pending: Pending, then: Callable[[], None]) -> None:
        with self.observe(f"wait publish bucket {bucket.index}", "exposed_communication"):
            pending.wait()
        then()

    def _thresholded(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> tuple[Tensor, int]:
        """Bring the own replica to what the threshold lets through; return that as a message, and how much it is.

        A dense message is a view of the replica.
        """
        threshold = absolute_threshold(self.rules, float(optimizer.param_groups[bucket.group_index]["lr"]))
        assert threshold is not None
        with self.observe(f"threshold publish bucket {bucket.index}", "compression"):
            replica, encoding = bucket.flat[bucket.own], self.encodings[bucket.flat.dtype]
            flags = update_reaching(replica, bucket.shard.detach(), threshold, encoding.scratch)
            entries = count(flags)
            self.sent.entries += entries
            self.sent.offered += replica.numel()
            dense = encoding.of(entries, replica.numel()) == "dense"
            return (replica if dense else encoding.pack(replica, flags)[0]), entries

    def _exchange_counts(self, buckets: Sequence[Bucket], entries: Sequence[int]) -> list[list[int]]:
        """Return how many entries each rank sends (rows) of each bucket (columns)."""
        device, tags = buckets[0].flat.device, [self.protocol.tag(Kind.PUBLISH_COUNTS, each.index) for each in buckets]
        if is_staged(self.group, device):
            device = torch.device("cpu")
        with self.observe("counts publish", "exposed_communication"):
            counts = torch.zeros(self.ranks, len(entries), dtype=torch.int64, device=device)
            counts[self.rank] = torch.tensor(with_tag(entries, tags), device=device)
            all_gather_into_tensor(counts, counts[self.rank], group=self.group, tag=tags[0])
            return [without_tag(row, tags) for row in counts.tolist()]

    def _exchange(self, bucket: Bucket, own: Tensor, entries: Sequence[int]) -> Callable[[], None]:
        """Send everybody's messages of a bucket round; return what ends that and brings them to the replica."""
        encoding, parts = self.encodings[bucket.flat.dtype], [bucket.flat[slice(*places)] for places in bucket.ranges]
        tag = self.protocol.tag(Kind.PUBLISH, bucket.index)
        dense = [encoding.of(n, part.numel()) == "dense" for n, part in zip(entries, parts, strict=True)]
        messages = [
            part if dense[i] else own if i == self.rank else encoding.empty(entries[i], part.numel(), own.device)
            for i, part in enumerate(parts)
        ]
        come = [i for i in range(self.ranks) if not dense[i] and i != self.rank]

        def put() -> None:
            with self.observe(f"put publish bucket {bucket.index}", "compression"), torch.no_grad():
                for i in come:
                    encoding.put(parts[i], messages[i], entries[i])
            self._gather_in_node(bucket)

        size = bucket.flat.nbytes
        with self.observe(f"publish bucket {bucket.index}", "exposed_communication"):
            if not self._posts(bucket):
                sent = all_gather_messages(messages, group=self.group, declared_bytes=size, tag=tag)
                self.sent.bytes_of[bucket.index] += sent
                return put
            pending = post_to_all(messages, group=self.group, declared_bytes=size, data_dependent=True, tag=tag)
        self.sent.bytes_of[bucket.index] += (self.ranks - 1) * messages[self.rank].nbytes
        return partial(self._awaited, bucket, pending, put)


def _nothing() -> None:
    """There is nothing left to do."""


def _wait_for(event: torch.cuda.Event, _exchange: object) -> None:
    """Let the current stream wait for an event; what was exchanged until then is let go of behind that."""
    torch.cuda.current_stream().wait_event(event)


def update_reaching(replica: Tensor, master: Tensor, threshold: float, scratch: Scratch) -> Tensor:
    """Bring those of the replica to the master that are at least `threshold` away, or no numbers; flag them."""
    flags = scratch.flags[: replica.numel()]
    for first, last in scratch.chunks(replica.numel()):
        old, new, far = replica[first:last], master[first:last], flags[first:last]
        distance = scratch.magnitudes[: last - first].copy_(old).sub_(new).abs_()
        torch.lt(distance, threshold, out=far).logical_not_()
        if old.dtype == new.dtype:
            torch.where(far, new, old, out=old)
        else:
            old.copy_(torch.where(far, new, distance.copy_(old), out=distance))
    return flags
