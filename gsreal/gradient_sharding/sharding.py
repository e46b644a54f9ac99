"""The optimizer that `shard_gradients` returns, and the hooks by which it takes gradients out of the backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.gradient_sharding import state
from gsreal.gradient_sharding.at_rest import Unit
from gsreal.gradient_sharding.bucket import Bucket
from gsreal.gradient_sharding.clipping import any_non_finite, clip, total_norm
from gsreal.gradient_sharding.hierarchy import InNode, Levels
from gsreal.gradient_sharding.migration import migrate
from gsreal.gradient_sharding.pieces import pass_over_absent
from gsreal.gradient_sharding.publish import Publisher
from gsreal.gradient_sharding.push import Pusher, Sent
from gsreal.gradient_sharding.watch import Watch
from gssim import shares as share_solver


class GradientSharding(torch.optim.Optimizer):
    """The optimizer that `shard_gradients` returns: used like any of torch's.

    Its `param_groups` are those of the optimizer inside, over this rank's shards: schedulers and `GradScaler` work on
    them. Gradients of the model's parameters are None after each backward, for they have gone to their owners:
    `clip_grad_norm_` here, not torch's, sees them all.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: torch.optim.Optimizer,
        pusher: Pusher,
        publisher: Publisher,
        levels: Levels,
        in_node: InNode,
        *,
        model: nn.Module,
        names: Mapping[nn.Parameter, str],
        scaler: torch.amp.GradScaler | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.buckets, self.optimizer, self.pusher, self.publisher = buckets, optimizer, pusher, publisher
        self.levels, self.in_node, self.names = levels, in_node, names
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.scaler, self.skip_nonfinite = scaler, skip_nonfinite
        self.skipped_steps = 0
        """Steps that were not made because a gradient was NaN or infinite, the same on every rank."""
        self.watch = Watch(model, buckets, names)
        for bucket in buckets:
            if isinstance(bucket, Unit):
                bucket.check = self.watch.check_places
        self._others = [p for p in model.parameters() if p not in names]
        self._norm: Tensor | None = None
        self._spoilt = False
        self._weights = share_solver.even(len(levels.ranks))
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

    @property
    def published(self) -> Sent:
        """What this rank published since the last `reset_counts`, where that is thresholded."""
        return self.publisher.sent

    def reset_counts(self) -> None:
        """Begin to count what is sent anew."""
        self.pusher.sent, self.publisher.sent = Sent(), Sent()

    # In the backward --------------------------------------------------------------------------------------------------

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if not self._in_backward:
                self._begin_backward()
            if self._collecting:
                self._check_gradient(parameter, bucket)
            bucket.take(parameter, leaves=self._collecting)
            if self._collecting:
                self._push_complete()

        return collect

    def _begin_backward(self) -> None:
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self.scaler is not None:
            self.pusher.loss_scale = self.scaler.get_scale()

    def _check_gradient(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Raise RuntimeError where a gradient would be lost: it has a graph of its own, or comes twice."""
        assert parameter.grad is not None
        if parameter.grad.requires_grad:
            raise RuntimeError(
                f"{self.names[parameter]}: gradients that leave in the backward cannot be differentiated again "
                "(create_graph=True); take what you differentiate with torch.autograd.grad"
            )
        if parameter not in bucket.missing:
            raise RuntimeError(
                f"{self.names[parameter]}: got two gradients in one backward; a backward inside a backward (reentrant "
                "checkpointing) does that: checkpoint with use_reentrant=False"
            )

    def _push_complete(self) -> None:
        """Push buckets in order, as far as they are complete, so that all ranks push in the same order."""
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self.buckets[self._next].end_backward(leaves=True)  # those that are frozen have no gradient
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
        """Finish a backward's pushes, without the gradients of parameters that got none."""
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
            bucket.show_gradients()
        if self.scaler is not None and self._collecting:
            self._tell_scaler()

    def _tell_scaler(self) -> None:
        """Let every rank's scaler find what one owner found: each looks at its own shard alone."""
        if any_non_finite(self._gradients(), self.levels.all_reduce, self._device):
            self._spoil()
            self.pusher.drop_broken()
            for gradient in self._gradients():
                gradient[:1] = torch.nan

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank in backwards inside; the first one outside pushes the sum."""
        self._collecting = False
        try:
            yield
        finally:
            self._collecting = True

    # Owners -----------------------------------------------------------------------------------------------------------

    def reshard(self, shard_shares: Sequence[float]) -> int:
        """Give each rank another share of the parameters, with their optimizer state; return the bytes sent.

        By all ranks alike, between `step` and the next backward. Training goes on as it would have done; what
        error feedback has kept for a range that is now the rank's own goes into its next gradient.
        Only where every rank keeps a replica and pushes to all others.
        """
        if len(self.levels.ranks) != self.pusher.ranks or not all(bucket.is_replica for bucket in self.buckets):
            raise RuntimeError("shards change owners only where every rank keeps a replica and pushes to all others")
        self.finish()
        pusher = self.pusher
        sent = migrate(self.buckets, self.optimizer, shard_shares, pusher.group, point_to_point=pusher.point_to_point)
        pusher.reshard(self.buckets)
        self.publisher.reshard(pusher, self.buckets)
        return sent

    # Between backward and step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients of all ranks to a norm of at most `max_norm`; return what it was (a scalar all-reduce).

        As torch.nn.utils.clip_grad_norm_ of the whole model's mean gradient. Raises RuntimeError where the norm is not
        finite and `error_if_nonfinite`. To be called by every rank, after `scaler.unscale_(self)` where there is one.
        """
        norm = total_norm(self._gradients(), float(norm_type), self.levels.all_reduce, self._device)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {float(norm)}, so they cannot be clipped")
        clip(self._gradients(), norm, max_norm)
        self._norm = norm
        return norm

    def _gradients(self) -> list[Tensor]:
        return [bucket.shard.grad for bucket in self.buckets if bucket.shard.grad is not None]

    @property
    def _device(self) -> torch.device:
        return self.buckets[0].flat.device

    def _spoil(self) -> None:
        if not self._spoilt:
            self.skipped_steps += 1
        self._spoilt = True

    def _is_spoilt(self) -> bool:
        """Return whether this step must not be made; where clipping has found the norm, nothing more is exchanged."""
        if self.skip_nonfinite and not self._spoilt:
            norm = self._norm
            found = self._any_non_finite() if norm is None else not bool(norm.isfinite())
            if found:
                self._spoil()
        return self._spoilt

    def _any_non_finite(self) -> bool:
        return any_non_finite(self._gradients(), self.levels.all_reduce, self._device)

    # Step -------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the own shard and publish it; the gradients are used up. Returns what `closure` does, called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish()
        self._check_parameters()
        self.watch.adopt_writes()
        if self._is_spoilt():
            self._forget_shard_gradients(set_to_none=True)
            self.pusher.drop_broken()
        else:
            self._update()
        return loss

    def _update(self) -> None:
        with self.pusher.observe("optimizer", "optimizer"):
            for bucket in self.buckets:
                pass_over_absent(bucket, self.optimizer)
            self.optimizer.step()
            self._forget_shard_gradients(set_to_none=True)
            self.publisher.write_back(self.buckets)
        self.pusher.end_step()
        self.publisher.publish([bucket for bucket in self.buckets if bucket.is_replica], self.optimizer)

    def finish(self) -> None:
        """Wait until this replica has all that was published, which may still be under way when `step` returns.

        With `publish_overlaps` alone. A forward and `state_dict` do so themselves, but what reads parameters directly
        must call this first.
        """
        self.publisher.finish()

    def _check_parameters(self) -> None:
        """Raise RuntimeError where parameters are trained by nobody: moved out of the buckets, or thawed later."""
        if any(parameter.requires_grad for parameter in self._others):
            raise RuntimeError(
                "a parameter that was frozen when shard_gradients was called requires gradients now, but has no owner; "
                "call shard_gradients with all that will ever be trained, and freeze after that"
            )
        self.watch.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step: those of the own shard, and those that add up in `no_sync`.

        Not `set_to_none`: parameters that had gradients have zero ones in the next step, so that momentum and decay go
        on where a backward does not reach them.
        """
        for bucket in self.buckets:
            bucket.zeroed = set() if set_to_none else bucket.zeroed | bucket.updated | bucket.reached
        self._forget_shard_gradients(set_to_none=set_to_none)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _forget_shard_gradients(self, *, set_to_none: bool) -> None:
        for bucket in self.buckets:
            bucket.forget_gradients(set_to_none=set_to_none)
        self._norm, self._spoilt = None, False

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state, of every owner, by parameter name (a collective; all ranks get it).

        As torch.distributed.checkpoint.state_dict's full dictionaries. The model's own `state_dict` has its
        parameters: replicas are whole. Where state should stay where it is, save `sharded()`.
        """
        self.finish()
        return state.whole(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the own part of a `state_dict`, saved by any number of ranks with any shares; no collective.

        After `model.load_state_dict`: where owners keep no master copy, the model's parameters are what they update.
        """
        self.finish()
        self.watch.adopt_writes()
        state.load_whole(self, state_dict)

    def sharded(self) -> "state.Sharded":
        """Return what to save and load with torch.distributed.checkpoint: every rank its own part.

        What ranks have kept of gradients under the threshold (error feedback) is theirs, not the parameters': with
        other ranks it is dropped, which loses each element less than the threshold, once. Where the same ranks go on
        with the same shares, each may save its `pusher.state_dict()` too, and then goes on exactly.
        """
        self.finish()
        return state.Sharded(self)

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Take the model's parameters into the owners' master copies.

        After they were written to in ways that torch's version counters do not see (`parameter.data.clamp_()`); of
        others (`load_state_dict`, in place under `no_grad`) the next step knows by itself.
        """
        self.finish()
        for bucket in self.buckets:
            if bucket.has_master and bucket.holds_values:  # units do so as the model's state is loaded
                bucket.adopt(slice(None), rounded=False)
        self.watch.note_versions()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: what is not in a bucket from the start has no owner."""
        if hasattr(self, "buckets"):
            raise RuntimeError("groups cannot be added later: give them all to shard_gradients as param_groups")
        super().add_param_group(param_group)
