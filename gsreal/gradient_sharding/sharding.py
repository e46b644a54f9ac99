"""The optimizer that `shard_gradients` returns, and the hooks by which it takes gradients out of the backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding.at_rest import gather_just_in_time, make_units
from gsreal.gradient_sharding.beside import runs_beside
from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.hierarchy import InNode, Levels, levels_of
from gsreal.gradient_sharding.observer import Observer, unobserved
from gsreal.gradient_sharding.publish import publish
from gsreal.gradient_sharding.push import Pusher, Sent
from gssim import shares as share_solver
from gssim.plan import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES, Push, assign_buckets


class GradientSharding:
    """The optimizer that `shard_gradients` returns: `step` and `zero_grad` as usual."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: torch.optim.Optimizer,
        pusher: Pusher,
        levels: Levels,
        in_node: InNode,
    ) -> None:
        self.buckets, self.optimizer, self.pusher = buckets, optimizer, pusher
        self.levels, self.in_node = levels, in_node
        self._weights = share_solver.even(len(self.levels.ranks))
        self.weights = self._weights
        self._next = 0
        self._collecting = True
        self._in_backward = False
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    @property
    def weights(self) -> tuple[float, ...]:
        """Each rank's part of the step's loss terms: what its mean gradient counts. Even until it is set."""
        return self._weights

    @weights.setter
    def weights(self, weights: tuple[float, ...]) -> None:
        self._weights = weights
        self.pusher.weights, in_node = self.levels.weigh(weights)
        for bucket in self.buckets:
            bucket.weight = in_node

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that train the model, in the order of `weights` and of shard shares."""
        return self.levels.ranks

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
            if not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            bucket.take(parameter, leaves=self._collecting)
            if self._collecting:
                self._push_complete()

        return collect

    def _push_complete(self) -> None:
        """Push buckets in order, as far as they are complete, so that all ranks push in the same order."""
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._push_reduced()
            self.in_node.begin(self.buckets[self._next])
            if not self.in_node.overlaps:
                self._push_reduced()
            self._next += 1

    def _push_reduced(self) -> None:
        """Push the bucket that has been reduced inside the node, if any."""
        bucket = self.in_node.take()
        if bucket is not None:
            self.pusher.push(bucket)

    def _end_backward(self) -> None:
        """Finish a backward's pushes, with zeros for parameters that got no gradient."""
        self._in_backward = False
        for bucket in self.buckets[self._next :]:
            bucket.end_backward(leaves=self._collecting)
        if self._collecting:
            self._push_complete()
            self._push_reduced()
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
        replicas = [bucket for bucket in self.buckets if bucket.is_replica]
        publish(replicas, self.levels, point_to_point=pusher.point_to_point, observe=pusher.observe)

    def zero_grad(self) -> None:
        """Do nothing: gradients never outlive the bucket that they are collected in."""


def shard_gradients(
    model: nn.Module,
    optimizer_factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    parameters: Literal["replicated", "gathered", "sharded"] = "replicated",
    units: Sequence[nn.Module] = (),
    shard_shares: Sequence[float] | None = None,
    push: Push | None = None,
    point_to_point: bool = True,
    bucket_bytes: float = DDP_BUCKET_BYTES,
    first_bucket_bytes: float = DDP_FIRST_BUCKET_BYTES,
    parameter_order: Sequence[str] | None = None,
    overlap: bool | None = None,
    observe: Observer = unobserved,
) -> GradientSharding:
    """Shard the gradients and the optimizer state of `model`, and return what to call `step` on.

    Parameters are moved into flat buckets (they stay views of them) and made equal to the first rank's.
    `optimizer_factory` gets this rank's shards and must return an elementwise optimizer. Assumes that the loss is the
    mean over the rank's own samples; set `.weights` where ranks have unequal batches.

    `mesh`, `group`: the ranks, all by default. On a mesh of two axes, (nodes, devices of a node), gradients are
    reduce-scattered inside the node first, and pushed across nodes.
    `parameters`: `sharded`: nothing is published, but every rank keeps its shard of the parameters alone, and those of
    each of `units` (modules, in the order in which they run: a transformer's blocks) are gathered just before its
    forward, freed, and gathered again for its backward. `gathered`: they stay from forward to backward. What no unit
    has stays all the while. Between steps, parameters have no values; `model.state_dict()`, on all ranks, has them.
    `shard_shares`: each rank's fraction of every bucket (even by default). `push`: what is sent, and how; by default
    all, densely. `point_to_point`: exchange by point-to-point messages; else by the backend's all_to_all_single and
    broadcasts. `bucket_bytes`, `first_bucket_bytes`: when a bucket closes; units are buckets of their own.
    `parameter_order`: the order in which gradients become ready (reversed registration by default). `overlap`: whether
    gathers and reductions inside nodes begin early, to go on beside the compute: by default where they can (nccl).

    Raises ValueError where units are given without being used, or are no distinct parts of the model.
    """
    if units and parameters == "replicated":
        raise ValueError("units are gathered just in time: set parameters to 'sharded' or 'gathered'")
    levels = levels_of(mesh, group)
    shares = tuple(shard_shares) if shard_shares is not None else share_solver.even(len(levels.ranks))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    order = list(parameter_order) if parameter_order is not None else list(reversed(named))
    trained = [named[name] for name in order]
    buckets: Sequence[Bucket]
    if parameters == "replicated":
        buckets = make_buckets(trained, levels, shares, first_bytes=first_bucket_bytes, cap_bytes=bucket_bytes)
    else:
        buckets = make_units(model, units, trained, levels, shares, observe=observe)
    levels.make_equal([*(bucket.whole for bucket in buckets), *model.buffers()])
    for bucket in buckets:
        bucket.take_shard()
    first = buckets[0].flat
    overlap = runs_beside(levels.across, first.device) if overlap is None else overlap
    gather_just_in_time(model, kept=parameters == "gathered", prefetch=overlap)
    optimizer = optimizer_factory([bucket.shard for bucket in buckets])
    pusher = Pusher(push or Push(), levels.across, first.dtype, point_to_point=point_to_point, observe=observe)
    in_node = InNode(levels.inside, first.device, overlap=overlap, observe=observe)
    return GradientSharding(buckets, optimizer, pusher, levels, in_node)


def make_buckets(
    parameters: Sequence[nn.Parameter],
    levels: Levels,
    shard_shares: Sequence[float],
    *,
    first_bytes: float,
    cap_bytes: float,
) -> list[Bucket]:
    """Return replicated parameters in buckets by PyTorch's rule, given the order in which gradients become ready."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    found = []
    for index, positions in enumerate(assign_buckets(sizes, first_bytes=first_bytes, cap_bytes=cap_bytes)):
        members = [parameters[position] for position in positions]
        division = levels.division(sum(parameter.numel() for parameter in members), shard_shares)
        found.append(Bucket(index, members, division, node=levels.node, place=levels.place))
    return found
