"""Publish of updated parameters from their owners to every replica, dense or thresholded, optionally overlapping.

With a threshold, an owner sends only parameters that differ from their last published value by at least it: the owner
keeps a master copy of its range, and unsent changes remain in the difference of the two until they are large enough
(error feedback without memory of its own). The parameter's new value is sent, not its change: as many bytes, and the
replica is then the master rounded to its precision, without accumulated rounding. The owner trains on the published
values too, so that all replicas stay equal bit for bit.

`WaitBeforeForward` delays each module's forward until its parameters have arrived.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.messages import Encoding, Scratch, count, scratch_by_dtype
from gsreal.gradient_sharding.point_to_point import (
    Ranges,
    all_gather_by_broadcasts,
    all_gather_into_tensor,
    all_gather_messages,
    all_gather_v,
    backend_of,
    is_staged,
    post_all_gather,
    runs_on_device,
)
from gsreal.gradient_sharding.protocol import MessageKind, pack_tags, separate_communicator, unpack_tags
from gsreal.gradient_sharding.push import Pusher, Sent
from gsreal.gradient_sharding.side_stream import SideStream
from gssim.plan import Publish, absolute_threshold


class ParameterUpdates(Protocol):
    """Parameters that may still be in flight (a `Publisher`)."""

    @property
    def in_flight(self) -> bool:
        """Whether any are."""

    def wait(self, bucket: Bucket) -> None:
        """Wait for a bucket's parameters."""

    def finish(self) -> object:
        """Wait for all parameters."""


class WaitBeforeForward:
    """Hooks that make every module wait for the buckets of its own parameters just before its forward.

    Some modules' parameters are read by another's forward, without a call of their own (`nn.MultiheadAttention` reads
    its `out_proj`): an ancestor of a module that has never been called therefore waits for that module's buckets too.
    So the first forward waits for all buckets at its beginning, and later ones just in time. Reading a whole model's
    state waits for all. Copies of the model wait for nothing; copying is refused while parameters are in flight.
    """

    def __init__(self, module: nn.Module, buckets: list[Bucket], arrivals: ParameterUpdates | None) -> None:
        self.arrivals = arrivals
        self.called: set[nn.Module] = set()
        of_parameter = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self.read_by = {
            each: list(dict.fromkeys(of_parameter[p] for p in each.parameters(recurse=False) if p in of_parameter))
            for each in module.modules()
        }
        for each in module.modules():
            each.register_forward_pre_hook(self._before_forward, prepend=True)  # others may read parameters
            each.register_state_dict_pre_hook(self._before_state)
            each.register_load_state_dict_pre_hook(self._before_state)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self.arrivals is None:
            return
        self.called.add(module)
        for inner in module.modules():
            if inner is module or inner not in self.called:
                for bucket in self.read_by.get(inner, ()):
                    self.arrivals.wait(bucket)

    def _before_state(self, *_arguments: Any) -> None:
        if self.arrivals is not None:
            self.arrivals.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the hooks of a copied or saved model, which wait for nothing."""
        if self.arrivals is not None and self.arrivals.in_flight:
            raise RuntimeError("parameters are under way to this model: call optimizer.finish() before it is copied")
        return WaitBeforeForward, (nn.Module(), [], None)


class Publisher:
    """Sends updated shards to every replica, bucket by bucket.

    If it overlaps, `publish` only starts the exchange; `wait` ends it for a bucket.
    """

    def __init__(
        self,
        rules: Publish,
        pusher: Pusher,
        buckets: Sequence[Bucket],
        *,
        overlaps: bool,
        names: Mapping[nn.Parameter, str],
        intra_node: dist.ProcessGroup | None = None,
    ) -> None:
        """`names`: of the parameters; `intra_node`: this rank's node, if it has other ranks.

        They exchange their parts after the exchange across nodes.
        """
        device = buckets[0].flat.device
        backend = backend_of(buckets[0].owners.group, device)
        self.intra_node = None if intra_node is None else separate_communicator(intra_node, backend, device)
        self.rules, self.overlaps, self.protocol, self.names = rules, overlaps, pusher.protocol, names
        self.groups = {
            owners: separate_communicator(owners.group, backend, device) if buckets[0].is_replica else owners.group
            for owners in dict.fromkeys(bucket.owners for bucket in buckets)
        }
        """Group over which the owners of buckets publish."""
        self.point_to_point, self.observe = pusher.point_to_point, pusher.observe
        self.sent = Sent()
        self.encodings: dict[torch.dtype, Encoding] = {}
        self.reshard(pusher, buckets)
        self._arrivals: dict[Bucket, Callable[[], None]] = {}
        self._versions: dict[Bucket, list[int]] = {}
        self._side_streams: dict[torch.device, SideStream] = {}

    def reshard(self, pusher: Pusher, buckets: Sequence[Bucket]) -> None:
        """Allocate the memory of a thresholded publish, or share that of the push. Called again if owners change."""
        if self.rules.threshold is not None:
            scratch = {dtype: each.scratch for dtype, each in pusher.encodings.items()} or scratch_by_dtype(buckets)
            self.encodings = {dtype: Encoding(self.rules.encoding, dtype, each) for dtype, each in scratch.items()}

    @property
    def persistent_tensors(self) -> list[Tensor]:
        """Tensors that are kept from step to step."""
        return [each for e in self.encodings.values() for each in (e.scratch.flags, e.scratch.magnitudes)]

    def write_back(self, buckets: Sequence[Bucket]) -> None:
        """Copy the owner's update to its own replica; with a threshold, `publish` does that."""
        for bucket in buckets:
            if self.rules.threshold is None or not bucket.is_published:
                bucket.write_back()

    @torch.no_grad()
    def publish(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
        """Send every owner's range of each bucket's replica to all ranks of the group.

        `optimizer`: the one that updated them; a relative threshold is multiplied by its current learning rate.
        Gradients are complete from the last layer on, so the last bucket is the first that a forward reads.
        """
        order = list(reversed(buckets)) if self.overlaps else list(buckets)
        if self.rules.threshold is None:
            for bucket in order:
                self._start_or_run(bucket, partial(self._gather, bucket))
            return
        messages, entries = map(list, zip(*(self._thresholded(bucket, optimizer) for bucket in order), strict=True))
        counts: dict[Bucket, Sequence[int]] = {}
        for owners in dict.fromkeys(bucket.owners for bucket in order):
            own = {bucket: n for bucket, n in zip(order, entries, strict=True) if bucket.owners is owners}
            with self.protocol.exchange("exchange of publish counts"):
                by_rank = self._exchange_counts(list(own), list(own.values()))
            counts |= zip(own, zip(*by_rank, strict=True), strict=True)
        for bucket in order:
            self._start_or_run(bucket, partial(self._exchange, bucket, messages.pop(0), counts[bucket]))

    def record_versions(self) -> None:
        """Record the versions of parameters in flight: what is written to them now is lost when they arrive."""
        self._versions = {bucket: [p._version for p in bucket.parameters] for bucket in self._arrivals}

    def wait(self, bucket: Bucket) -> None:
        """Wait until a bucket's replica is complete (on a GPU: make the current stream wait for it).

        Raises RuntimeError if a parameter was written to while it was in flight.
        """
        arrival = self._arrivals.pop(bucket, None)
        if arrival is None:
            return
        with self.protocol.exchange(f"publishing of bucket {bucket.index}"):
            arrival()
        for parameter, version in zip(bucket.parameters, self._versions.pop(bucket, ()), strict=False):
            if parameter._version != version:
                raise RuntimeError(
                    f"{self.names[parameter]} was written to while published parameters were in flight, which have "
                    "replaced what was written: call finish() of what shard_gradients returned before"
                )

    @property
    def in_flight(self) -> bool:
        """Whether parameters have yet to arrive at this replica."""
        return bool(self._arrivals)

    def finish(self) -> list[Bucket]:
        """Wait for all buckets; return those that were in flight."""
        in_flight = list(self._arrivals)
        for bucket in in_flight:
            self.wait(bucket)
        return in_flight

    def _start_or_run(self, bucket: Bucket, exchange: Callable[[], Callable[[], None]]) -> None:
        """Exchange a bucket's messages, or only start it if it overlaps; on a GPU in a side stream of its own."""
        with self.protocol.exchange(f"publishing of bucket {bucket.index}"):
            if not self.overlaps:
                exchange()()
            elif bucket.flat.is_cuda:
                device = bucket.flat.device
                if device not in self._side_streams:
                    self._side_streams[device] = SideStream(device)
                wait = self._side_streams[device].begin(lambda: exchange()())
                self._arrivals[bucket] = partial(self._wait_and_finish, bucket, wait, _nothing)
            else:
                self._arrivals[bucket] = exchange()

    def _span(
        self, bucket: Bucket, label: str, phase: str, group: dist.ProcessGroup | None = None
    ) -> AbstractContextManager[None]:
        """Return the span of a part of a bucket's exchange; none where that runs in a stream beside the compute.

        Spans are times of the compute, which goes on meanwhile: only its wait for that stream counts.
        """
        is_beside = self.overlaps and runs_on_device(self.groups[bucket.owners], bucket.flat.device)
        return nullcontext() if is_beside else self.observe(label, phase, group=group)

    def _gather(self, bucket: Bucket) -> Callable[[], None]:
        """All-gather a whole bucket; return the function that completes it."""
        tag = self.protocol.tag(MessageKind.PUBLISH, bucket.index)
        with self._span(bucket, f"publish bucket {bucket.index}", "exposed_communication", bucket.owners.group):
            if not self._is_asynchronous(bucket):
                if self._crosses_nodes(bucket):
                    self._all_gather(bucket.flat, bucket.ranges, self.groups[bucket.owners], tag)
                return partial(self._gather_intra_node, bucket)
            parts = [bucket.flat[slice(*places)] for places in bucket.ranges]
            group = self.groups[bucket.owners]
            pending = post_all_gather(parts, group=group, declared_bytes=bucket.flat.nbytes, tag=tag)
        return partial(self._wait_and_finish, bucket, pending.wait, _nothing)

    def _gather_intra_node(self, bucket: Bucket) -> None:
        """All-gather the parts of the node's ranks inside the node, densely."""
        if self.intra_node is not None and bucket.is_divided_in_node:
            tag = self.protocol.tag(MessageKind.PUBLISH_INTRA_NODE, bucket.index)
            label = f"publish bucket {bucket.index} in the node"
            with self._span(bucket, label, "exposed_communication", self.intra_node):
                self._all_gather(bucket.whole, bucket.node_ranges, self.intra_node, tag)

    def _all_gather(self, flat: Tensor, ranges: Ranges, group: dist.ProcessGroup, tag: int) -> None:
        """All-gather every owner's range, by messages or by the backend's broadcasts."""
        if self.point_to_point:
            all_gather_v(flat, ranges, group=group, tag=tag)
        else:
            all_gather_by_broadcasts(flat, ranges, group=group)

    def _is_asynchronous(self, bucket: Bucket) -> bool:
        """Return whether messages are posted now and awaited later; a GPU's stream waits without blocking the host."""
        return self.overlaps and self.point_to_point and not bucket.flat.is_cuda and self.intra_node is None

    def _crosses_nodes(self, bucket: Bucket) -> bool:
        """Return whether owners exchange their messages: not where all of them are on one node, of which each has a
        part.
        """
        return bucket.owners.ranks > 1 or self.intra_node is None

    def _wait_and_finish(self, bucket: Bucket, wait: Callable[[], None], then: Callable[[], None]) -> None:
        with self.observe(f"wait publish bucket {bucket.index}", "exposed_communication", group=bucket.owners.group):
            wait()
        then()

    def _thresholded(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> tuple[Tensor, int]:
        """Update the own replica where the threshold is reached; return that as a message, and its number of entries.

        A dense message is a view of the replica.
        """
        threshold = absolute_threshold(self.rules, float(optimizer.param_groups[bucket.group_index]["lr"]))
        assert threshold is not None
        with self.observe(f"threshold publish bucket {bucket.index}", "compression"):
            replica, encoding = bucket.flat[bucket.own], self.encodings[bucket.flat.dtype]
            flags = copy_changed_values(replica, bucket.shard.detach(), threshold, encoding.scratch)
            entries = count(flags)
            self.sent.entries += entries
            self.sent.offered += replica.numel()
            is_dense = encoding.choose(entries, replica.numel()) == "dense"
            return (replica if is_dense else encoding.pack(replica, flags, entries=entries)[0]), entries

    def _exchange_counts(self, buckets: Sequence[Bucket], entries: Sequence[int]) -> list[list[int]]:
        """Return the number of entries that each owner sends (rows) of each bucket (columns), all of these owners."""
        owners, device = buckets[0].owners, buckets[0].flat.device
        tags = [self.protocol.tag(MessageKind.PUBLISH_COUNTS, each.index) for each in buckets]
        group = self.groups[owners]
        if is_staged(group, device):
            device = torch.device("cpu")
        with self.observe("counts publish", "exposed_communication", group=owners.group):
            counts = torch.zeros(owners.ranks, len(entries), dtype=torch.int64, device=device)
            counts[owners.rank] = torch.tensor(pack_tags(entries, tags), device=device)
            all_gather_into_tensor(counts, counts[owners.rank], group=group, tag=tags[0])
            return [unpack_tags(row, tags) for row in counts.tolist()]

    def _exchange(self, bucket: Bucket, own: Tensor, entries: Sequence[int]) -> Callable[[], None]:
        """All-gather a bucket's messages; return the function that completes it and writes them to the replica."""
        encoding, parts = self.encodings[bucket.flat.dtype], [bucket.flat[slice(*places)] for places in bucket.ranges]
        rank, group = bucket.owners.rank, self.groups[bucket.owners]
        tag = self.protocol.tag(MessageKind.PUBLISH, bucket.index)
        dense = [encoding.choose(n, part.numel()) == "dense" for n, part in zip(entries, parts, strict=True)]
        messages = [
            part if dense[i] else own if i == rank else encoding.empty(entries[i], part.numel(), own.device)
            for i, part in enumerate(parts)
        ]
        sparse_senders = [i for i in range(bucket.owners.ranks) if not dense[i] and i != rank]

        def put() -> None:
            with self._span(bucket, f"put publish bucket {bucket.index}", "compression"), torch.no_grad():
                for i in sparse_senders:
                    encoding.overwrite(parts[i], messages[i], entries[i])
            self._gather_intra_node(bucket)

        size = bucket.flat.nbytes
        with self._span(bucket, f"publish bucket {bucket.index}", "exposed_communication", bucket.owners.group):
            if not self._is_asynchronous(bucket):
                if self._crosses_nodes(bucket):
                    sent = all_gather_messages(messages, group=group, declared_bytes=size, tag=tag)
                    self.sent.bytes_of[bucket.index] += sent
                return put
            pending = post_all_gather(messages, group=group, declared_bytes=size, data_dependent=True, tag=tag)
        self.sent.bytes_of[bucket.index] += (bucket.owners.ranks - 1) * messages[rank].nbytes
        return partial(self._wait_and_finish, bucket, pending.wait, put)


def _nothing() -> None:
    """No operation: the exchange is complete."""


def copy_changed_values(replica: Tensor, master: Tensor, threshold: float, scratch: Scratch) -> Tensor:
    """Copy to the replica the master's values that differ by at least `threshold`, or are NaN; return their flags."""
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
