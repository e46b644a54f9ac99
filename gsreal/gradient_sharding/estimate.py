"""Estimate of the memory and traffic of training with Gradient Sharding before it runs, by closed forms."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import BucketPlan, Partition, plan_buckets, trained_parameters
from gsreal.gradient_sharding.guards import check_shares, check_sizes
from gsreal.gradient_sharding.master import master_type
from gsreal.gradient_sharding.push import PRECISIONS
from gssim.plan import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    Push,
    chosen,
    message_bytes,
    resolved_push,
    scratch_elements,
)

COUNT_BYTES = 8
"""A count of entries, sent to every owner for each bucket."""
SHAPE = torch.Size((32, 32))
PROBE_ELEMENTS = SHAPE.numel()
"""Elements of the parameter on which an optimizer is tried, to measure the size of its state."""


@dataclass(frozen=True)
class Needs:
    """Memory and traffic of one rank, without activations: persistent bytes, bytes of a backward, bytes sent."""

    parameters_bytes: int
    """The whole model: every rank has a replica, including frozen parameters and buffers."""
    master_bytes: int
    """The own shard in fp32, if parameters have a lower precision."""
    optimizer_state_bytes: int
    """Optimizer state of the own shard."""
    threshold_bytes: int
    """Persistent memory of thresholding: scratch to find entries in, and the residuals of error feedback."""
    gradient_bytes: int
    """Gradient of the own shard, in the precision of its update: allocated from the pushes to the step."""
    backward_bytes: int
    """Peak of gradients in a backward.

    Allocated then are the gradient of the own shard so far, the bucket that is being filled, the gradient that it is
    filled from, the bucket before it, which is in flight, and the messages received for that.
    """
    push_bytes: float
    """Bytes sent to owners in one step, at the given density."""
    publish_bytes: int
    """Bytes sent around the ring in one step: every part of each bucket but the next rank's."""

    @property
    def held_bytes(self) -> int:
        """Persistent memory from step to step."""
        return self.parameters_bytes + self.master_bytes + self.optimizer_state_bytes + self.threshold_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a backward, without activations and kernel workspaces.

        It is that of dense pushes. Thresholded ones have less in flight, as long as few elements reach the threshold.
        """
        return self.held_bytes + self.backward_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes sent in one step."""
        return self.push_bytes + self.publish_bytes

    def __str__(self) -> str:
        """Return a summary in two lines, in MiB."""
        mib = {name: value / 2**20 for name, value in self.__dict__.items()}
        return (
            f"memory: {self.held_bytes / 2**20:.2f} MiB (parameters {mib['parameters_bytes']:.2f}, "
            f"master {mib['master_bytes']:.2f}, optimizer {mib['optimizer_state_bytes']:.2f}, "
            f"threshold {mib['threshold_bytes']:.2f}); in the backward "
            f"{self.peak_bytes / 2**20:.2f} MiB and activations\n"
            f"sent per step: {self.sent_bytes / 2**20:.2f} MiB (push {mib['push_bytes']:.2f}, "
            f"publish {mib['publish_bytes']:.2f})"
        )


def memory_and_traffic(
    model: nn.Module,
    optimizer_factory: Callable[[list[Any]], torch.optim.Optimizer],
    *,
    rank: int,
    ranks: int,
    shard_shares: Sequence[float] | None = None,
    push: Push | None = None,
    density: float = 1.0,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    bucket_bytes: float = DDP_BUCKET_BYTES,
    first_bucket_bytes: float = DDP_FIRST_BUCKET_BYTES,
    parameter_order: Sequence[str] | None = None,
    whole_tensors: bool = False,
) -> Needs:
    """Return the memory and traffic of `shard_gradients` with the same arguments on `rank`; the model may be on `meta`.

    `density`: the fraction of off-shard elements that reaches the threshold, which depends on the data; 1: all of them.
    With n elements, own share s and value bytes v:

        memory  = n * v + s * n * (master + optimizer state);  in the backward + s * n * gradient + two buckets
        push    = (1 - s) * n * v densely, or with a threshold whichever is least of that, COO, and bitmaps:
                  (1 - s) * n * density * (v + 4)   and   (1 - s) * n * (density * v + 1/8)
        publish = (1 - s of the next rank) * n * v

    `optimizer_factory` is tried on a parameter of its own, with zero gradients, to measure its state. Of a model whose
    experts ranks divide (`experts`), all parameters count as those that every rank holds.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be one of {ranks} from 0 on, not {rank}")
    if not 0 <= density <= 1:
        raise ValueError(f"density must be a fraction from 0 to 1, not {density}")
    check_sizes(bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    shares = check_shares(shard_shares, ranks, None)
    parameters = trained_parameters(model, parameter_order)
    buckets = plan_buckets(parameters, param_groups, first_bytes=first_bucket_bytes, cap_bytes=bucket_bytes)
    partition = Partition([[share] for share in shares], whole_tensors=whole_tensors)
    sizes = [_Size.of(bucket, partition, rank) for bucket in buckets]
    flat, scalars, sgd = _state_bytes(optimizer_factory, param_groups, {size.dtype for size in sizes})
    state_bytes = sum(int(flat[size.dtype] * size.own) + scalars[size.dtype] for size in sizes)
    if whole_tensors:
        owned = Counter(p for bucket, size in zip(buckets, sizes, strict=True) for p in size.owned(bucket, rank))
        state_bytes = 0
        for (shape, dtype), count in owned.items():
            _, state = _probe_optimizer(optimizer_factory, param_groups, shape, dtype)
            state_bytes += count * sum(t.numel() * t.element_size() for t in state)
    rules = resolved_push(push or Push(), sgd=sgd)
    return Needs(
        parameters_bytes=sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())),
        master_bytes=sum(size.shard_bytes for size in sizes if size.is_cast),
        optimizer_state_bytes=state_bytes,
        threshold_bytes=_threshold_bytes(sizes, rules),
        gradient_bytes=sum(size.shard_bytes for size in sizes),
        backward_bytes=_peak_gradient_bytes(sizes, ranks),
        push_bytes=sum(_pushed_bytes(size, rules, density, rank) for size in sizes),
        publish_bytes=sum((size.elements - size.parts[(rank + 1) % ranks]) * size.value_bytes for size in sizes),
    )


@dataclass(frozen=True)
class _Size:
    """A bucket's elements, and the number that each rank owns."""

    dtype: torch.dtype
    parts: tuple[int, ...]
    own: int
    largest: int
    """Elements of its largest parameter."""
    device: torch.device

    @staticmethod
    def of(bucket: BucketPlan, partition: Partition, rank: int) -> "_Size":
        elements = [parameter.numel() for parameter in bucket.parameters]
        parts = partition.divide(elements).owned[0]
        return _Size(bucket.parameters[0].dtype, parts, parts[rank], max(elements), bucket.parameters[0].device)

    @property
    def elements(self) -> int:
        return sum(self.parts)

    def owned(self, bucket: BucketPlan, rank: int) -> list[tuple[torch.Size, torch.dtype]]:
        """Return shape and type of the parameters whose first element a rank owns (with whole tensors.

        All its parameters).
        """
        first, last = sum(self.parts[:rank]), sum(self.parts[: rank + 1])
        starts = accumulate((p.numel() for p in bucket.parameters), initial=0)
        placed = zip(bucket.parameters, starts, strict=False)
        return [(p.shape or torch.Size((1,)), p.dtype) for p, start in placed if first <= start < last]

    @property
    def value_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def is_cast(self) -> bool:
        """Whether it is updated in a higher precision than its own."""
        return master_type(self.dtype) != self.dtype

    @property
    def shard_bytes(self) -> int:
        """Bytes of the own part, in the precision in which it is updated."""
        return self.own * master_type(self.dtype).itemsize


def _peak_gradient_bytes(sizes: Sequence[_Size], ranks: int) -> int:
    """Return the peak memory of gradients: while a bucket is filled, is in flight, or is added by its owner.

    Messages in a lower precision than the owner's are cast as they are added, one after another.
    """
    peak = shards = in_flight = 0
    for size in sizes:
        filled = size.value_bytes * (size.elements + size.largest)
        peak = max(peak, shards + in_flight + filled)
        shards += size.shard_bytes
        received = (ranks - 1) * size.own * size.value_bytes
        cast = size.shard_bytes if size.is_cast and received else 0
        in_flight = size.value_bytes * size.elements + received
        peak = max(peak, shards + in_flight, shards + received + cast)
    return peak


def _pushed_bytes(size: _Size, push: Push, density: float, rank: int) -> float:
    """Return the bytes of the messages to all owners, and of the counts before them."""
    if push.threshold is None:
        return float((size.elements - size.own) * size.value_bytes)
    others = [part for owner, part in enumerate(size.parts) if owner != rank]
    total = 0.0
    for elements in others:
        entries = density * elements
        encoding = chosen(push.encoding, entries=entries, elements=elements, value_bytes=size.value_bytes)
        message = message_bytes(encoding, entries=entries, elements=elements, value_bytes=size.value_bytes)
        total += COUNT_BYTES + message
    return total


def _threshold_bytes(sizes: Sequence[_Size], push: Push) -> int:
    """Return the bytes of the scratch memory of each data type, and of the residuals of the other owners' elements."""
    if push.threshold is None:
        return 0
    total = 0
    for dtype in dict.fromkeys(size.dtype for size in sizes):
        alike = [size for size in sizes if size.dtype == dtype]
        part, largest = max(max(size.parts) for size in alike), max(size.elements for size in alike)
        flags, magnitudes = scratch_elements(part, largest, chunked=alike[0].device.type == "cpu")
        total += flags + magnitudes * master_type(dtype).itemsize
    if push.error_feedback:
        residual_elements = sum(size.elements - size.own for size in sizes)
        total += residual_elements * PRECISIONS[push.error_feedback_precision].itemsize
    return total


def _state_bytes(
    factory: Callable[[list[Any]], torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]] | None,
    dtypes: set[torch.dtype],
) -> tuple[dict[torch.dtype, float], dict[torch.dtype, int], bool]:
    """Return the optimizer's bytes per element, and per shard, by data type; and whether it is SGD."""
    sgd = False
    flat: dict[torch.dtype, float] = {}
    scalars: dict[torch.dtype, int] = {}
    for dtype in dtypes:
        optimizer, state = _probe_optimizer(factory, groups, SHAPE, dtype)
        sgd = isinstance(optimizer, torch.optim.SGD)
        flat[dtype] = sum(t.numel() * t.element_size() for t in state if t.shape == SHAPE) / PROBE_ELEMENTS
        scalars[dtype] = sum(t.numel() * t.element_size() for t in state if t.shape != SHAPE)
    return flat, scalars, sgd


def _probe_optimizer(
    factory: Callable[[list[Any]], torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]] | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Return the optimizer of one parameter of a shape after a step with zero gradients, and its state's tensors."""
    probe = nn.Parameter(torch.zeros(shape, dtype=master_type(dtype)))
    probe.grad = torch.zeros_like(probe)
    rest = [{**group, "params": []} for group in groups[1:]] if groups else []
    optimizer = factory([{**groups[0], "params": [probe]}, *rest] if groups else [probe])
    optimizer.step()
    return optimizer, [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
