"""Gradient Sharding: data-parallel training in which every rank owns a shard of the gradients and optimizer state.

    optimizer = shard_gradients(model, lambda shard: torch.optim.AdamW(shard, lr=1e-3), threshold=1e-4)
    for inputs, targets in batches:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

As soon as a bucket of gradients is complete in the backward, each rank sends to the owner of every element its mean
gradient, where its magnitude reaches the threshold (push). Owners add what they receive, weighted by each rank's part
of the batch, to their own gradient, which is never thresholded, and update. The updated parameters go back to
everybody (publish). At threshold 0 this is the same training as on a single device.

Parameters in bf16 or fp16 are replicas: owners keep an fp32 master copy of their shard, add up gradients in fp32, and
update and publish from it.

Memory beside the model, per rank: optimizer state and one gradient for the own shard, and at most two buckets. Bytes
sent per step and rank, n parameters, own share s: (1-s)*n values densely, or (value + 4) bytes for each element over
the threshold, and (ranks-1)/ranks*n values published (even shares).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.exchanges import Pending, all_gather_v, all_to_all_v, broadcast_parts
from gsreal.master import master_type
from gssim import shares as share_solver
from gssim.plan import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES, assign_buckets

INDEX_BYTES = 4

Observer = Callable[[str, str], AbstractContextManager[None]]
"""Called with a label and a phase; what it returns is entered while that goes on."""


def _unobserved(label: str, phase: str) -> AbstractContextManager[None]:
    return nullcontext()


class _Bucket:
    """Parameters that travel together: one flat replica, cut into a range for every owner."""

    def __init__(self, index: int, parameters: list[nn.Parameter], shard_shares: Sequence[float], rank: int) -> None:
        self.index, self.parameters = index, parameters
        self.elements = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.empty(self.elements, dtype=parameters[0].dtype, device=parameters[0].device)
        self.ranges = share_solver.ranges(self.elements, shard_shares)
        self.own = slice(*self.ranges[rank])
        self.places: dict[nn.Parameter, slice] = {}
        start = 0
        for parameter in parameters:
            place = slice(start, start + parameter.numel())
            self.flat[place].copy_(parameter.detach().reshape(-1))
            parameter.data = self.flat[place].view(parameter.shape)
            self.places[parameter] = place
            start = place.stop
        self.shard: nn.Parameter
        self.gradient: Tensor | None = None
        self.missing = set(parameters)

    def take_shard(self) -> None:
        """Make what the owner updates: its range of the replica, or a master copy of it where that is below fp32."""
        own = self.flat[self.own]
        self.shard = nn.Parameter(own.to(master_type(own.dtype)))

    def write_back(self) -> None:
        """Bring what was updated to the replica."""
        if self.shard.dtype != self.flat.dtype:
            self.flat[self.own].copy_(self.shard.detach())


class _Incoming:
    """A push under way: what this rank will receive for its range of a bucket."""

    def __init__(self, bucket: _Bucket, pending: Pending, messages: list[tuple[int, Tensor, int | None]]) -> None:
        self.bucket, self.pending, self.messages = bucket, pending, messages
        """messages: (sender, buffer, entries), entries None where the buffer is dense."""


class GradientSharding:
    """The optimizer that `shard_gradients` returns: `step` and `zero_grad` as usual."""

    def __init__(
        self,
        buckets: list[_Bucket],
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        threshold: float | None,
        encoding: str,
        point_to_point: bool,
        observe: Observer,
    ) -> None:
        self.buckets, self.optimizer, self.group = buckets, optimizer, group
        self.threshold, self.encoding, self.observe = threshold, encoding, observe
        self.point_to_point = point_to_point
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.weights: tuple[float, ...] = share_solver.even(self.ranks)
        """Each rank's part of the step's loss terms: what its mean gradient counts."""
        self.sent_entries = self.offered_entries = 0
        """Off-shard elements that this rank sent, and could have sent, since the last `reset_counts`."""
        self.sent_bytes = [0] * len(buckets)
        """Bytes that this rank pushed for each bucket since then."""
        self._next = 0
        self._collecting = True
        self._in_backward = False
        self._incoming: _Incoming | None = None
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            if not self._collecting:
                return
            if not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if bucket.gradient is None:
                bucket.gradient = torch.empty_like(bucket.flat)
            bucket.gradient[bucket.places[parameter]].copy_(parameter.grad.reshape(-1))
            parameter.grad = None
            bucket.missing.discard(parameter)
            self._push_complete()

        return collect

    def _push_complete(self) -> None:
        """Push buckets in order, as far as they are complete, so that all ranks push in the same order."""
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._push(self.buckets[self._next])
            self._next += 1

    def _push(self, bucket: _Bucket) -> None:
        self._drain()
        assert bucket.gradient is not None
        label = f"bucket {bucket.index}"
        with self.observe(f"threshold {label}", "compression"):
            self._keep_own(bucket, bucket.gradient[bucket.own], self.weights[self.rank])
            sends = [self._packed(bucket, owner) for owner in range(self.ranks)]
            bucket.gradient = None  # dense messages are views of it and keep it until they are sent
        self.sent_bytes[bucket.index] += sum(m.numel() * m.element_size() for m, _ in sends if m is not None)
        counts = self._exchange_counts([entries for _, entries in sends], label)
        with self.observe(f"post push {label}", "exposed_communication"):
            self._incoming = self._posted(bucket, [message for message, _ in sends], counts)

    @staticmethod
    def _keep_own(bucket: _Bucket, gradient: Tensor, weight: float) -> None:
        """Keep the own range's gradient, which is never thresholded; later pushes of a step add to the first."""
        if bucket.shard.grad is None:
            bucket.shard.grad = gradient.to(bucket.shard.dtype, copy=True).mul_(weight)
        else:
            bucket.shard.grad.add_(gradient.to(bucket.shard.dtype), alpha=weight)

    def _packed(self, bucket: _Bucket, owner: int) -> tuple[Tensor | None, int]:
        """Return the message for an owner and how many entries it holds."""
        if owner == self.rank:
            return None, 0
        assert bucket.gradient is not None
        part = bucket.gradient[slice(*bucket.ranges[owner])]
        self.offered_entries += part.numel()
        if self.threshold is None:
            self.sent_entries += part.numel()
            return part, part.numel()
        mask = part.abs() >= self.threshold
        entries = int(mask.count_nonzero())
        self.sent_entries += entries
        if self._is_dense(entries, part.numel()):
            return torch.where(mask, part, part.new_zeros(())), entries
        index = mask.nonzero().view(-1)
        del mask
        size = part.element_size()
        message = torch.empty(entries * (size + INDEX_BYTES), dtype=torch.uint8, device=part.device)
        values, places = _parts(message, entries, part.dtype)
        torch.index_select(part, 0, index, out=values)
        places.copy_(index)
        return message, entries

    def _is_dense(self, entries: int, elements: int) -> bool:
        """Return whether a message of `entries` out of `elements` goes densely: both ends decide alike."""
        if self.encoding != "auto":
            return self.encoding == "dense"
        size = self.buckets[0].flat.element_size()
        return entries * (size + INDEX_BYTES) >= elements * size

    def _exchange_counts(self, entries: list[int], label: str) -> list[int | None]:
        """Tell every owner how many entries come, and learn the same from everybody; dense pushes need not."""
        if self.threshold is None:
            return [None] * self.ranks
        with self.observe(f"counts {label}", "exposed_communication"):
            outgoing = torch.tensor(entries, dtype=torch.int64).split(1)
            incoming = torch.zeros(self.ranks, dtype=torch.int64)
            size = 8 * (self.ranks - 1)
            all_to_all_v(
                outgoing, incoming.split(1), group=self.group, declared_bytes=size, point_to_point=self.point_to_point
            ).wait()
        return [int(count) for count in incoming]

    def _posted(self, bucket: _Bucket, sends: list[Tensor | None], counts: list[int | None]) -> _Incoming:
        elements = bucket.shard.numel()
        dtype, device = bucket.flat.dtype, bucket.flat.device
        messages: list[tuple[int, Tensor, int | None]] = []
        receives: list[Tensor | None] = [None] * self.ranks
        for sender, count in enumerate(counts):
            if sender == self.rank:
                continue
            if count is None or self._is_dense(count, elements):
                messages.append((sender, torch.empty(elements, dtype=dtype, device=device), None))
            else:
                size = count * (bucket.flat.element_size() + INDEX_BYTES)
                messages.append((sender, torch.empty(size, dtype=torch.uint8, device=device), count))
            receives[sender] = messages[-1][1]
        pending = all_to_all_v(
            sends,
            receives,
            group=self.group,
            declared_bytes=(bucket.elements - elements) * bucket.flat.element_size(),
            data_dependent=self.threshold is not None,
            point_to_point=self.point_to_point,
        )
        return _Incoming(bucket, pending, messages)

    def _drain(self) -> None:
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
                self._add(gradient, message, entries, self.weights[sender])

    def _add(self, gradient: Tensor, message: Tensor, entries: int | None, weight: float) -> None:
        """Add a contribution in the owner's precision."""
        if entries is None:
            gradient.add_(message.to(gradient.dtype), alpha=weight)
            return
        values, index = _parts(message, entries, self.buckets[0].flat.dtype)
        gradient.index_add_(0, index, values.to(gradient.dtype), alpha=weight)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank in backwards inside; the first one outside pushes the sum."""
        self._collecting = False
        try:
            yield
        finally:
            self._collecting = True

    def _end_backward(self) -> None:
        """Finish a backward's pushes, with zeros for parameters that got no gradient."""
        self._in_backward = False
        for bucket in self.buckets[self._next :]:
            if bucket.gradient is None:
                bucket.gradient = torch.empty_like(bucket.flat)
            for parameter in bucket.missing:
                bucket.gradient[bucket.places[parameter]].zero_()
            bucket.missing.clear()
        self._push_complete()
        self._drain()
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    def step(self) -> None:
        """Update the own shard, publish it."""
        with self.observe("optimizer", "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            for bucket in self.buckets:
                bucket.write_back()
        publish = all_gather_v if self.point_to_point else broadcast_parts
        for bucket in self.buckets:
            with self.observe(f"publish bucket {bucket.index}", "exposed_communication"):
                publish(bucket.flat, bucket.ranges, group=self.group)

    def reset_counts(self) -> None:
        """Begin to count sent and offered elements and bytes anew."""
        self.sent_entries = self.offered_entries = 0
        self.sent_bytes = [0] * len(self.buckets)

    def zero_grad(self) -> None:
        """Do nothing: gradients never outlive the bucket that they are collected in."""


def _parts(message: Tensor, entries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values and the indices in a sparse message; the wider of them come first, so that both are aligned."""
    values, indices = dtype.itemsize * entries, INDEX_BYTES * entries
    if dtype.itemsize >= INDEX_BYTES:
        return message[:values].view(dtype), message[values:].view(torch.int32)
    return message[indices:].view(dtype), message[:indices].view(torch.int32)


def shard_gradients(
    model: nn.Module,
    optimizer_factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    group: dist.ProcessGroup | None = None,
    shard_shares: Sequence[float] | None = None,
    threshold: float | None = None,
    encoding: str = "auto",
    point_to_point: bool = True,
    bucket_bytes: float = DDP_BUCKET_BYTES,
    first_bucket_bytes: float = DDP_FIRST_BUCKET_BYTES,
    parameter_order: Sequence[str] | None = None,
    observe: Observer = _unobserved,
) -> GradientSharding:
    """Shard the gradients and the optimizer state of `model` over `group`, and return what to call `step` on.

    Parameters are moved into flat buckets (they stay views of them) and made equal to the group's first rank's.
    `optimizer_factory` gets this rank's shards and must return an elementwise optimizer. `shard_shares`: each rank's
    fraction of every bucket (even by default). `threshold`: gradients of smaller magnitude are not sent; None sends
    all, densely. `point_to_point`: exchange by point-to-point messages; else by the backend's all_to_all_single and
    broadcasts. `parameter_order`: the order in which gradients become ready (reversed registration by default).
    Assumes that the loss is the mean over the rank's own samples; set `.weights` where ranks have unequal batches.
    """
    group = group or dist.group.WORLD
    assert group is not None
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    order = list(parameter_order) if parameter_order is not None else list(reversed(named))
    parameters = [named[name] for name in order]
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    found = assign_buckets(sizes, first_bytes=first_bucket_bytes, cap_bytes=bucket_bytes)
    shares = tuple(shard_shares) if shard_shares is not None else share_solver.even(ranks)
    buckets = [_Bucket(i, [parameters[p] for p in members], shares, rank) for i, members in enumerate(found)]
    for tensor in [*(bucket.flat for bucket in buckets), *model.buffers()]:
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    for bucket in buckets:
        bucket.take_shard()
    optimizer = optimizer_factory([bucket.shard for bucket in buckets])
    return GradientSharding(buckets, optimizer, group, threshold, encoding, point_to_point, observe)
