"""The optimizer that `shard_gradients` returns, and the hooks by which it takes gradients out of the backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.migration import migrate
from gsreal.gradient_sharding.observer import Observer, unobserved
from gsreal.gradient_sharding.publish import publish
from gsreal.gradient_sharding.push import Pusher, Sent
from gssim import shares as share_solver
from gssim.plan import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES, Push, assign_buckets, resolved_push


class GradientSharding:
    """The optimizer that `shard_gradients` returns: `step` and `zero_grad` as usual."""

    def __init__(self, buckets: list[Bucket], optimizer: torch.optim.Optimizer, pusher: Pusher) -> None:
        self.buckets, self.optimizer, self.pusher = buckets, optimizer, pusher
        self._next = 0
        self._collecting = True
        self._in_backward = False
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    @property
    def weights(self) -> tuple[float, ...]:
        """Each rank's part of the step's loss terms: what its mean gradient counts. Even until it is set."""
        return self.pusher.weights

    @weights.setter
    def weights(self, weights: tuple[float, ...]) -> None:
        self.pusher.weights = weights

    @property
    def sent(self) -> Sent:
        """What this rank pushed since the last `reset_counts`."""
        return self.pusher.sent

    def reset_counts(self) -> None:
        """Begin to count what is sent anew."""
        self.pusher.sent = Sent()

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            if not self._collecting:
                return
            if not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            bucket.collect(parameter, parameter.grad)
            parameter.grad = None
            self._push_complete()

        return collect

    def _push_complete(self) -> None:
        """Push buckets in order, as far as they are complete, so that all ranks push in the same order."""
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.pusher.push(self.buckets[self._next])
            self._next += 1

    def _end_backward(self) -> None:
        """Finish a backward's pushes, with zeros for parameters that got no gradient."""
        self._in_backward = False
        for bucket in self.buckets[self._next :]:
            bucket.fill()
        self._push_complete()
        self.pusher.drain()
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank in backwards inside; the first one outside pushes the sum."""
        self._collecting = False
        try:
            yield
        finally:
            self._collecting = True

    def step(self) -> None:
        """Update the own shard, publish it."""
        pusher = self.pusher
        with pusher.observe("optimizer", "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            for bucket in self.buckets:
                bucket.write_back()
        pusher.end_step()
        publish(self.buckets, pusher.group, point_to_point=pusher.point_to_point, observe=pusher.observe)

    def reshard(self, shard_shares: Sequence[float]) -> int:
        """Give each rank another share of the parameters, with their optimizer state; return the bytes sent.

        By all ranks alike, between `step` and the next backward. Training goes on as it would have done; what
        error feedback has kept for a range that is now the rank's own goes into its next gradient.
        """
        pusher = self.pusher
        sent = migrate(self.buckets, self.optimizer, shard_shares, pusher.group, point_to_point=pusher.point_to_point)
        pusher.reshard(self.buckets)
        return sent

    def zero_grad(self) -> None:
        """Do nothing: gradients never outlive the bucket that they are collected in."""


def shard_gradients(
    model: nn.Module,
    optimizer_factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    group: dist.ProcessGroup | None = None,
    shard_shares: Sequence[float] | None = None,
    push: Push | None = None,
    point_to_point: bool = True,
    bucket_bytes: float = DDP_BUCKET_BYTES,
    first_bucket_bytes: float = DDP_FIRST_BUCKET_BYTES,
    parameter_order: Sequence[str] | None = None,
    observe: Observer = unobserved,
) -> GradientSharding:
    """Shard the gradients and the optimizer state of `model` over `group`, and return what to call `step` on.

    Parameters are moved into flat buckets (they stay views of them) and made equal to the group's first rank's.
    `optimizer_factory` gets this rank's shards and must return an elementwise optimizer. `shard_shares`: each rank's
    fraction of every bucket (even by default). `push`: what is sent, and how; by default all, densely.
    `point_to_point`: exchange by point-to-point messages; else by the backend's all_to_all_single and broadcasts.
    `parameter_order`: the order in which gradients become ready (reversed registration by default). Assumes that the
    loss is the mean over the rank's own samples; set `.weights` where ranks have unequal batches.
    """
    group = group or dist.group.WORLD
    assert group is not None
    ranks = dist.get_world_size(group)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    order = list(parameter_order) if parameter_order is not None else list(reversed(named))
    parameters = [named[name] for name in order]
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    found = assign_buckets(sizes, first_bytes=first_bucket_bytes, cap_bytes=bucket_bytes)
    shares = tuple(shard_shares) if shard_shares is not None else share_solver.even(ranks)
    buckets = [
        Bucket(i, [parameters[p] for p in members], shares, dist.get_rank(group)) for i, members in enumerate(found)
    ]
    for tensor in [*(bucket.flat for bucket in buckets), *model.buffers()]:
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    for bucket in buckets:
        bucket.take_shard()
    optimizer = optimizer_factory([bucket.shard for bucket in buckets])
    rules = resolved_push(push or Push(), sgd=isinstance(optimizer, torch.optim.SGD))
    pusher = Pusher(rules, group, buckets, point_to_point=point_to_point, observe=observe)
    return GradientSharding(buckets, optimizer, pusher)
