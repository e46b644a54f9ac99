"""The optimizer that `shard_gradients` returns, and the autograd hooks by which it collects and pushes gradients."""

import atexit
import copy
import gc
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from gsreal.gradient_sharding import state
from gsreal.gradient_sharding.bucket import Bucket, skip_parameters_without_gradient
from gsreal.gradient_sharding.guards import ModelGuard, check_fractions, check_shares, describe_optimizer
from gsreal.gradient_sharding.hierarchy import Hierarchy, IntraNodeReducer
from gsreal.gradient_sharding.protocol import called_by_torch_state_dict, collective_call
from gsreal.gradient_sharding.publish import Publisher
from gsreal.gradient_sharding.push import Pusher, Sent
from gsreal.gradient_sharding.pushed_gradient import PushedGradient, any_non_finite, clip, total_norm
from gsreal.gradient_sharding.sharded_parameters import NO_BACKWARD, Unit
from gsreal.gradient_sharding.state import migrate
from gssim.plan import splitting

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their bytes."""
BACKWARD = "a backward, and what it pushes"
OPTIMIZERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Weak reference, by parameter, to the optimizer whose buckets have it."""


LIVE: weakref.WeakSet["GradientSharding"] = weakref.WeakSet()
"""All optimizers, which refer to their process groups."""


@atexit.register
def _release_destroyed_groups() -> None:
    """Let go of groups that `destroy_process_group` has destroyed, so that their threads end before the interpreter.

    gloo's threads are joined as the last reference to a group goes. One that outlives the interpreter aborts the
    process if it then frees a tensor that Python has known, for which it needs the interpreter's lock.
    """
    if not dist.is_initialized():
        for optimizer in list(LIVE):
            for handle in optimizer._handles:
                handle.remove()
            vars(optimizer).clear()
        gc.collect()


class GradientSharding(torch.optim.Optimizer):
    """The optimizer that `shard_gradients` returns: used like any of torch's.

    Its `param_groups` are those of the wrapped optimizer, over this rank's shards: schedulers and `GradScaler` work on
    them. Set their options alike on all ranks: `state_dict` checks that, but not each step, so that a scheduler must
    not follow one rank's own loss (ReduceLROnPlateau: all-reduce it first). Change values between `step` and the next
    forward in the model's parameters, on all ranks (weight decay of your own, Lookahead): what you write to these
    shards then, other ranks get with the next step only. Gradients of the model's parameters have
    been pushed to their owners after each backward: `clip_grad_norm_` here includes all of them, and torch's raises an
    error, of the model's parameters as of these shards. `model.zero_grad()` discards pushed gradients, as `zero_grad`
    here does. Load the model's state on all ranks; its `load_state_dict` compares what they have loaded.

    Every rank makes the same number of steps, and of backwards outside `no_sync` between two of them. A rank that makes
    none between two steps pushes zeros in `step`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: torch.optim.Optimizer,
        pusher: Pusher,
        publisher: Publisher,
        hierarchy: Hierarchy,
        reducer: IntraNodeReducer,
        *,
        model: nn.Module,
        names: Mapping[nn.Parameter, str],
        scaler: torch.amp.GradScaler | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.buckets, self.optimizer, self.pusher, self.publisher = buckets, optimizer, pusher, publisher
        self.hierarchy, self.reducer, self.names = hierarchy, reducer, names
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.scaler, self.skip_nonfinite = scaler, skip_nonfinite
        self.skipped_steps = 0
        """Steps skipped because a gradient was NaN or infinite, the same on every rank."""
        self.guard = ModelGuard(model, buckets, names)
        for bucket in buckets:
            if isinstance(bucket, Unit):
                bucket.check = self.guard.check_places
        self._others = [p for p in model.parameters() if p not in names]
        self._norm: Tensor | None = None
        self._has_nonfinite = False
        self._weights = splitting.even(len(hierarchy.ranks))
        self.weights = self._pushed_weights = self._weights
        self._next = 0
        self._push_enabled = True
        self._backwards: set[int] = set()
        """Autograd's ids of the current backward and those nested in it."""
        self._pushing = True
        """Whether the current backward pushes its gradients."""
        self._not_awaited: Collection[Bucket] = ()
        """Buckets that were still in flight as the current backward began: no module has waited for them."""
        self._handles: list[RemovableHandle] = []
        LIVE.add(self)
        self.is_replaced = False
        """Whether another optimizer owns the model's parameters now."""
        for bucket in buckets:
            for parameter in bucket.parameters:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(bucket)))
        if len(names) == 1:  # once it has its next gradient, nothing shows whether it had lost the one before
            self._handles.append(next(iter(names)).register_hook(lambda _gradient: self._discard_if_removed()))
        for parameter in names:
            OPTIMIZERS[parameter] = weakref.ref(self)
        self._handles.append(model.register_forward_pre_hook(_refuse_wrapped))
        if all(bucket.is_replica for bucket in buckets) and len(hierarchy.ranks) > 1:
            self._handles.append(model.register_load_state_dict_post_hook(_CheckAfterLoad(self)))

    @property
    def weights(self) -> tuple[float, ...]:
        """Each rank's fraction of the step's loss terms: the weight of its mean gradient. Even by default.

        The fractions sum to 1: of 48 samples, (32 / 48, 16 / 48). To be set before the backward that pushes gradients,
        and alike on all ranks, which is checked as `state_dict` is called. Ranks that divide a sequence (context
        parallelism) get gradients of each other's losses in the backward: give them equal weights, and where their loss
        terms are unequally many, multiply each one's mean loss by the ratio of its terms to their mean number.
        """
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        fractions = check_fractions("weights", weights, len(self.hierarchy.ranks))
        self.hierarchy.set_weights(fractions, self.buckets)
        self._weights = fractions

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that train the model, in the order of `weights` and of shard shares."""
        return self.hierarchy.ranks

    @property
    def sent(self) -> Sent:
        """Counts of pushed entries and bytes since the last `reset_counts`."""
        return self.pusher.sent

    @property
    def published(self) -> Sent:
        """Counts of published entries and bytes since the last `reset_counts`, if publishing is thresholded."""
        return self.publisher.sent

    def reset_counts(self) -> None:
        """Reset the counts of entries and bytes sent."""
        self.pusher.sent, self.publisher.sent = Sent(), Sent()

    # In the backward --------------------------------------------------------------------------------------------------

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        @_disable_dynamo
        def collect(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if parameter.grad is None:
                return  # it was frozen after the forward: autograd calls, but adds nothing
            backward = torch._C._current_graph_task_id()
            if backward not in self._backwards:
                self._begin_backward(backward)
            if bucket in self._not_awaited:
                raise RuntimeError(
                    f"{self.names[parameter]} was read before its published values had arrived: no module was called "
                    "that waits for it, or torch.compile left out its hook (if it had compiled another such module); "
                    "call finish() of what shard_gradients returned before the forward"
                )
            if self._pushing:
                self._check_gradient(parameter, bucket)
            bucket.on_gradient(parameter, pushes=self._pushing)
            if self._pushing:
                with collective_call(BACKWARD):
                    self._push_complete()

        return collect

    def _begin_backward(self, backward: int) -> None:
        if _is_inside_another():
            if self._push_enabled:
                raise RuntimeError(
                    "a backward inside a backward (reentrant checkpointing) would push all gradients each time: "
                    "checkpoint with use_reentrant=False"
                )
            if self._backwards:
                self._backwards.add(backward)
                return
        self._check_no_interruption()
        if len(self.names) > 1:
            self._discard_if_removed()
        self._not_awaited = self.publisher.finish()  # what no module has waited for uses the memory that pushes use
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._backwards.add(backward)
        self._pushing = self._push_enabled
        if self._pushing:
            for bucket in self.buckets:
                bucket.clear_placeholders()
        self._update_loss_scale()

    def _update_loss_scale(self) -> None:
        if self.scaler is not None:
            self.pusher.loss_scale = self.scaler.get_scale()

    def set_loss_scale(self, scale: float) -> None:
        """Set the factor by which you multiply the losses of the next backwards, if you use no `GradScaler`.

        To be called alike on every rank. Thresholds apply to gradients divided by the factor. After the backwards,
        divide `received_gradients` by it; if one of them is not finite on any rank, call `skip_step` on all ranks.
        Raises ValueError if the factor is not finite and positive.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"set_loss_scale takes a finite factor above 0, not {scale}")
        if self.scaler is not None:
            raise RuntimeError("set_loss_scale: the loss is scaled by the GradScaler that shard_gradients was given")
        self.pusher.loss_scale = scale

    @_disable_dynamo
    def received_gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's shards, which `step` will use and which may be changed in place.

        To be called by every rank after the last backward of the step.
        """
        self._check_not_replaced()
        with collective_call("received_gradients"):
            self._push_remaining()
        return self._gradients()

    def skip_step(self) -> None:
        """Make the next `step` discard the gradients and update nothing; to be called by every rank."""
        self._mark_nonfinite()

    def _check_no_interruption(self) -> None:
        """Raise RuntimeError if a backward was started but never ended, or exchanges have become impossible."""
        self.hierarchy.protocol.check()
        if self._backwards:
            raise RuntimeError(
                "an exception has ended the last backward: its gradients are incomplete, and other ranks may wait for "
                "them; call zero_grad() of what shard_gradients returned on every rank, then make the backward again"
            )

    def _discard_if_removed(self) -> None:
        """Discard gradients pushed since the last step if the model's own `zero_grad` has been called after that.

        Raises RuntimeError if only some parameters' gradients were removed.
        """
        pushed = [parameter for bucket in self.buckets for parameter in bucket.reached]
        placeholders = [isinstance(p.grad, PushedGradient) and not p.grad.is_zeroed for p in pushed]
        zeroed = [p.grad is None or (isinstance(p.grad, PushedGradient) and p.grad.is_zeroed) for p in pushed]
        gone = [p for p, is_zeroed in zip(pushed, zeroed, strict=True) if is_zeroed]
        if gone and any(placeholders):
            raise RuntimeError(
                f"{self.names[gone[0]]}: its gradient was removed, but it has been pushed with those of the other "
                "parameters; freeze it before the backward, or discard all with zero_grad"
            )
        if gone:
            self._discard(set_to_none=gone[0].grad is None)

    def _check_gradient(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Raise RuntimeError if a gradient would be lost: it has a graph of its own, or is computed twice."""
        assert parameter.grad is not None
        if parameter.grad.requires_grad:
            raise RuntimeError(
                f"{self.names[parameter]}: gradients that leave in the backward cannot be differentiated again "
                "(create_graph=True); take what you differentiate with torch.autograd.grad"
            )
        if parameter not in bucket.pending_parameters:
            raise RuntimeError(
                f"{self.names[parameter]}: got two gradients in one backward; a backward inside a backward (reentrant "
                "checkpointing) does that: checkpoint with use_reentrant=False"
            )

    def _push_complete(self) -> None:
        """Push complete buckets in order, so that all ranks push in the same order."""
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self.buckets[self._next].end_backward(pushes=True)  # those that are frozen have no gradient
            self._push_reduced()
            self.reducer.begin(self.buckets[self._next])
            if not self.reducer.runs_beside:
                self._push_reduced()
            self._next += 1

    def _push_reduced(self) -> None:
        """Push the bucket that has been reduced inside the node, if any."""
        bucket = self.reducer.take()
        if bucket is not None:
            self.pusher.push(bucket)

    @_disable_dynamo
    def _end_backward(self) -> None:
        """Finish a backward's pushes, without the gradients of parameters that got none."""
        for bucket in self.buckets[self._next :]:
            bucket.end_backward(pushes=self._pushing)
        if self._pushing:
            with collective_call(BACKWARD):
                self._push_complete()
                self._push_reduced()
                self.pusher.drain()
            self.hierarchy.protocol.pushes += 1
            self._pushed_weights = self._weights
        self._reset_backward()
        if self.scaler is not None and self._pushing:
            self._report_to_scaler()

    def _reset_backward(self) -> None:
        """Reset the buckets for the next backward."""
        self._backwards.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.pending_parameters = set(bucket.parameters)
            bucket.assign_piece_gradients()

    def _push_remaining(self) -> None:
        """Push remaining gradients before a step: existing ones, or zeros if no backward has pushed anything.

        Other ranks wait for that. Raises RuntimeError if it is impossible.
        """
        self._check_no_interruption()
        self._discard_if_removed()
        left = [p for bucket in self.buckets for p in bucket.parameters if _has_own_gradient(p)]
        if self.hierarchy.protocol.pushes:
            if self._pushed_weights != self._weights:
                raise RuntimeError(
                    f"weights were set to {self._weights} after the backward, whose gradients were pushed with "
                    f"{self._pushed_weights}: set them before it"
                )
            if left:
                raise RuntimeError(
                    f"{self.names[left[0]]}: its gradient was not pushed; make the last backward before a step outside "
                    "no_sync"
                )
        elif left or len(self.hierarchy.ranks) > 1:
            if not all(bucket.is_replica for bucket in self.buckets):
                raise RuntimeError(
                    "no gradients were pushed since the last step. Where parameters are sharded, every rank must make "
                    "every backward, in which the others gather parameters: where a batch is not to count, multiply "
                    "its loss by 0"
                )
            self._pushing = True
            self._update_loss_scale()
            self._end_backward()

    def _report_to_scaler(self) -> None:
        """Make every rank's scaler see a NaN that one owner found: each scaler inspects its own shard alone."""
        if any_non_finite(self._gradients(), self.hierarchy.all_reduce, self._device):
            self._mark_nonfinite()
            self.pusher.drop_nonfinite()
            for gradient in self._gradients():
                gradient[:1] = torch.nan

    @_disable_dynamo
    def push(self) -> None:
        """Push what backwards inside `no_sync` have left, if nothing has been pushed since the last step.

        `step` does so itself; this is for what must happen between, as sums of what owners have received. To be called
        by every rank.
        """
        with collective_call("push"):
            self._push_remaining()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backwards inside; the first backward outside pushes the sum."""
        outside, self._push_enabled = self._push_enabled, False
        try:
            yield
        finally:
            self._push_enabled = outside

    # Owners -----------------------------------------------------------------------------------------------------------

    def reshard(self, shard_shares: Sequence[float]) -> int:
        """Change each rank's share of the parameters, with their optimizer state; return the bytes sent.

        To be called by all ranks alike, between `step` and the next backward. Training continues exactly as without it;
        the error-feedback residual of a range that the rank now owns is added to its next gradient. Raises RuntimeError
        unless every rank keeps a replica and pushes to all others.
        """
        everywhere = all(bucket.is_replica and bucket.owners.ranks == len(self.ranks) for bucket in self.buckets)
        if not everywhere:
            raise RuntimeError("shards change owners only where every rank keeps a replica and pushes to all others")
        self._check_not_replaced()
        shard_shares = check_shares(shard_shares, len(self.hierarchy.ranks), self.scaler)
        described = describe_optimizer(self.optimizer) | {"reshard: shard_shares": repr(shard_shares)}
        self.hierarchy.check_equal_on_all_ranks(described, self._device)
        if self._gradients() or any(_has_own_gradient(p) for bucket in self.buckets for p in bucket.parameters):
            raise RuntimeError("gradients of this step are pending; shards can change owners only after `step`")
        self.finish()
        pusher = self.pusher
        group = self.hierarchy.inter_node
        sent = migrate(self.buckets, self.optimizer, shard_shares, group, point_to_point=pusher.point_to_point)
        pusher.reshard(self.buckets)
        self.publisher.reshard(pusher, self.buckets)
        return sent

    # Between backward and step ----------------------------------------------------------------------------------------

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        stages: dist.ProcessGroup | None = None,
        copies: Collection[nn.Parameter] = (),
    ) -> Tensor:
        """Scale the gradients of all ranks to a norm of at most `max_norm`.

        Return the norm before (a scalar all-reduce).

        As torch.nn.utils.clip_grad_norm_ of the whole model's mean gradient. Raises RuntimeError if the norm is not
        finite and `error_if_nonfinite`. To be called by every rank, after `scaler.unscale_(self)` if there is a scaler.

        Of a pipeline: `stages` are the ranks that hold this replica's stages (one more scalar all-reduce); `copies` are
        this stage's copies of parameters that another stage counts.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(f"clip_grad_norm_ takes max_norm >= 0 and norm_type > 0, not {max_norm} and {norm_type}")
        self._check_not_replaced()
        self._check_unscaled("clip_grad_norm_: call scaler.unscale_(optimizer) before")
        with collective_call("clip_grad_norm_"):
            self._push_remaining()
            counted = [part for bucket in self.buckets for part in bucket.gradients_without(set(copies))]
            norm = total_norm(counted, norm_type, partial(self._all_reduce_over_stages, stages), self._device)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {float(norm)}, so they cannot be clipped")
        clip(self._gradients(), norm, max_norm)
        self._norm = norm
        return norm

    def _all_reduce_over_stages(self, stages: dist.ProcessGroup | None, tensor: Tensor, op: Any) -> None:
        self.hierarchy.all_reduce(tensor, op)
        if stages is not None:
            dist.all_reduce(tensor, op, group=stages)

    def _gradients(self) -> list[Tensor]:
        return [bucket.shard.grad for bucket in self.buckets if bucket.shard.grad is not None]

    @property
    def _device(self) -> torch.device:
        return self.buckets[0].flat.device

    def _mark_nonfinite(self) -> None:
        if not self._has_nonfinite:
            self.skipped_steps += 1
        self._has_nonfinite = True

    def _must_skip(self) -> bool:
        """Return whether this step must be skipped.

        If clipping has computed the norm, no further exchange is needed.
        """
        if self.skip_nonfinite and not self._has_nonfinite:
            norm = self._norm
            if norm is not None:
                nonfinite = not bool(norm.isfinite())
            else:
                nonfinite = any_non_finite(self._gradients(), self.hierarchy.all_reduce, self._device)
            if nonfinite:
                self._mark_nonfinite()
        return self._has_nonfinite

    # Step -------------------------------------------------------------------------------------------------------------

    @_disable_dynamo  # as torch's optimizers: a function that is compiled as a whole may call what exchanges
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the own shard and publish it.

        The gradients are consumed: another step without a backward updates nothing, and where `zero_grad` is forgotten
        they do not add up. Returns the result of `closure`, called once.
        """
        if called_by_torch_state_dict():
            return None  # it would make state by a step; state_dict says what to call
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_not_replaced()
        self._check_unscaled("gradients are still scaled: call scaler.step(optimizer), not optimizer.step()")
        self._sync_param_groups()
        self.finish()
        self._check_parameters()
        with collective_call("step"):
            self._push_remaining()
        self.guard.update_masters_from_writes()
        if self._must_skip():
            self._forget_shard_gradients(set_to_none=True)
            self.pusher.drop_nonfinite()
        else:
            self._update()
        self.hierarchy.protocol.end_step()
        return loss

    def _update(self) -> None:
        with self.pusher.observe("optimizer", "optimizer"):
            for bucket in self.buckets:
                skip_parameters_without_gradient(bucket, self.optimizer)
            self.optimizer.step()
            self._forget_shard_gradients(set_to_none=True)
            self.publisher.write_back(self.buckets)
        self.pusher.end_step()
        with collective_call("step"):
            self.publisher.publish([bucket for bucket in self.buckets if bucket.is_published], self.optimizer)
        # A graph of a forward before the update must not be used again, as after an update by torch's optimizers
        torch.autograd.graph.increment_version([parameter for parameter in self.names if parameter.requires_grad])
        for bucket in self.buckets:
            if isinstance(bucket, Unit):
                bucket.record_versions()
        self.publisher.record_versions()
        self.guard.record_versions()

    @_disable_dynamo
    def finish(self) -> None:
        """Wait until this replica has all published parameters, which may still be in flight when `step` returns.

        Needed with `publish_overlaps` alone. A forward and `state_dict` call it, but code that reads parameters
        directly must call it first.
        """
        self.publisher.finish()

    def release_model(self) -> None:
        """Release the model to another `shard_gradients`."""
        self.finish()
        for handle in self._handles:
            handle.remove()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if isinstance(parameter.grad, PushedGradient):
                    parameter.grad = None
        self.is_replaced = True

    def _check_not_replaced(self) -> None:
        if self.is_replaced:
            raise RuntimeError("shard_gradients was called again with this model: use the optimizer that it returned")

    def _check_unscaled(self, remedy: str) -> None:
        """Raise RuntimeError if the scaler has not divided the gradients by its scale yet."""
        if self.scaler is not None and self.scaler.is_enabled():
            stage = self.scaler._per_optimizer_states.get(id(self), {}).get("stage", OptState.READY)
            if stage is OptState.READY:
                raise RuntimeError(remedy)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler.step: whether the optimizer takes scaled gradients."""
        if self.scaler is None:
            raise RuntimeError(
                "a GradScaler looks at this rank's gradients alone, and ranks would skip different steps: pass it to "
                "shard_gradients (scaler=)"
            )
        return False

    def _sync_param_groups(self) -> None:
        """Hand the user's options to the wrapped optimizer; raise RuntimeError if it would lack a shard."""
        self.optimizer.param_groups = self.param_groups
        given = Counter(id(p) for group in self.param_groups for p in group["params"])
        if given != Counter(id(piece.tensor) for bucket in self.buckets for piece in bucket.pieces):
            raise RuntimeError(
                "the params of param_groups are this rank's shards, and were changed: change their options alone; to "
                "train other parameters, freeze them (requires_grad_), or call shard_gradients again"
            )

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse to be copied or saved: it is tied to a model and to a process group."""
        raise RuntimeError("this optimizer can be neither copied nor saved as a whole: take its state_dict()")

    def _check_parameters(self) -> None:
        """Raise RuntimeError if parameters would not be trained: moved out of the buckets, or unfrozen later."""
        if any(parameter.requires_grad for parameter in self._others):
            raise RuntimeError(
                "a parameter that was frozen when shard_gradients was called requires gradients now, but has no owner; "
                "call shard_gradients with all that will ever be trained, and freeze after that"
            )
        self.guard.check()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients since the last step: those of the own shard, and those accumulated in `no_sync`.

        Not `set_to_none`: parameters that had gradients have zero ones in the next step, so that momentum and decay
        continue where a backward does not reach them. After an exception in a backward, this pushes the gradients that
        other ranks wait for, so that all can repeat it.
        """
        self._check_not_replaced()
        if self._backwards and torch._C._current_graph_task_id() == NO_BACKWARD:
            self._end_interrupted()
        self._discard(set_to_none=set_to_none)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _discard(self, *, set_to_none: bool) -> None:
        """Discard gradients pushed since the last step."""
        for bucket in self.buckets:
            bucket.zeroed = set() if set_to_none else bucket.zeroed | bucket.updated | bucket.reached
        self._forget_shard_gradients(set_to_none=set_to_none)

    def _end_interrupted(self) -> None:
        """End a backward in which an exception was raised; no exchange follows if an exchange has raised it."""
        if self._pushing and not self.hierarchy.protocol.failed:
            self._end_backward()
        else:
            for bucket in self.buckets:
                bucket.gradient = None
            self._reset_backward()

    def _forget_shard_gradients(self, *, set_to_none: bool) -> None:
        for bucket in self.buckets:
            bucket.clear_gradients(set_to_none=set_to_none)
        self._norm, self._has_nonfinite = None, False

    # State ------------------------------------------------------------------------------------------------------------

    def _refuse_divided_experts(self, call: str) -> None:
        """Raise RuntimeError if ranks divide experts, of which no rank has all."""
        if self.hierarchy.expert_owners is not None:
            raise RuntimeError(f"{call}: ranks divide experts, whose state is neither gathered nor saved yet")

    @property
    def _parts(self) -> state.OptimizerParts:
        return state.OptimizerParts(
            self.buckets, self.optimizer, self.param_groups, self.pusher, self.hierarchy, self.names
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state, of every owner, by parameter name (a collective; all ranks get it).

        As torch.distributed.checkpoint.state_dict's full dictionaries. The model's own `state_dict` has its parameters:
        replicas are whole. To save sharded state, use `sharded()`.
        """
        if called_by_torch_state_dict():
            raise RuntimeError(
                "get_optimizer_state_dict looks for the model's parameters in param_groups, where this optimizer has "
                "shards: take optimizer.state_dict(), which is whole and by parameter name, or save optimizer.sharded()"
            )
        self._refuse_divided_experts("state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.finish()
        with collective_call("the optimizer's state_dict"):
            described = describe_optimizer(self.optimizer) | {"weights": repr(self._weights)}
            self.hierarchy.check_equal_on_all_ranks(described, self._device)
            gathered = state.gather_state(self._parts)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, gathered)
            gathered = gathered if changed is None else changed
        return gathered

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the own part of a `state_dict`, saved by any number of ranks with any shares; no collective.

        After `model.load_state_dict`: owners without master copies update the model's parameters themselves.
        """
        self._refuse_divided_experts("load_state_dict")
        state_dict = copy.copy(state_dict)  # hooks may change it, but not the caller's, as in torch
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.finish()
        self.guard.update_masters_from_writes()
        if not state.load_gathered_state(self._parts, state_dict):
            self.take_parameters()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def sharded(self) -> state.Sharded:
        """Return an object to save and load with torch.distributed.checkpoint: every rank its own part.

        The residuals of error feedback belong to ranks, not to parameters: with other ranks they are dropped, which
        loses each element less than the threshold, once. If the same ranks continue with the same shares, each may save
        its `pusher.state_dict()` too, and then continues exactly.
        """
        self._refuse_divided_experts("sharded")
        self.finish()
        return state.Sharded(self._parts)

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy the model's parameters into the owners' master copies.

        Needed after writes that torch's version counters do not record (`parameter.data.clamp_()`); others
        (`load_state_dict`, in place under `no_grad`) are detected by the next step.
        """
        self.finish()
        for bucket in self.buckets:
            if bucket.has_master and bucket.has_values_between_steps:  # units do so as the model's state is loaded
                bucket.update_master(slice(None), rounded=False)
        self.guard.record_versions()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: parameters that are in no bucket have no owner."""
        if hasattr(self, "buckets"):
            raise RuntimeError("groups cannot be added later: give them all to shard_gradients as param_groups")
        super().add_param_group(param_group)


class _CheckAfterLoad:
    """Hook of a replica's `load_state_dict`: compares what ranks have loaded (an all-reduce of two integers).

    What one rank alone has loaded would be replaced by what the owners publish, but for its own shard.
    """

    def __init__(self, optimizer: GradientSharding | None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self, _model: nn.Module, _incompatible_keys: Any) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or not torch.distributed.is_initialized():
            return
        loaded = {}
        for bucket in optimizer.buckets:
            if bucket.owners is not optimizer.hierarchy.owners:
                continue  # experts that other ranks do not hold
            flat = torch.view_as_real(bucket.whole) if bucket.whole.is_complex() else bucket.whole
            bits = flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)  # exact, whatever the order
            loaded[f"loaded values, bucket {bucket.index}, sum of bits"] = str(int(bits))
        with collective_call("load_state_dict of the model"):
            optimizer.hierarchy.check_equal_on_all_ranks(loaded, optimizer._device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Check nothing in a copy of the model, or in what is saved of it: the optimizer has no part in it."""
        return _CheckAfterLoad, (None,)


def _refuse_wrapped(model: nn.Module, _inputs: Any) -> None:
    """Hook of the model's forward: raise RuntimeError where DDP, which reduces gradients too, was wrapped around it.

    DDP of other parameters may call the model in its own forward.
    """
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    if wrapper is not None and find_optimizers(set(model.parameters()).intersection(wrapper._module_parameters)):
        raise RuntimeError(
            "the model is wrapped in DistributedDataParallel (as some trainers do), which would reduce the gradients "
            "once more: shard_gradients replaces it; call the model itself"
        )


def find_optimizers(parameters: Iterable[nn.Parameter]) -> list[GradientSharding]:
    """Return the optimizers that own some of these parameters now."""
    optimizers = dict.fromkeys(OPTIMIZERS[p]() for p in parameters if p in OPTIMIZERS)
    return [each for each in optimizers if each is not None and not each.is_replaced]


RUNS_BACKWARD = getattr(torch.autograd.graph._engine_run_backward, "__code__", None)
"""Code object of the function that runs every backward."""
IN_BACKWARD = getattr(torch.autograd.function.BackwardCFunction.apply, "__code__", None)
"""Code object of the function through which a backward calls functions written in Python."""


def _is_inside_another() -> bool:
    """Return whether the current backward was started inside another one, which may run in another thread."""
    runs, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is RUNS_BACKWARD:
            runs += 1
        if runs > 1 or (runs and frame.f_code is IN_BACKWARD):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _has_own_gradient(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that was not pushed."""
    gradient = parameter.grad
    return gradient is not None and parameter.requires_grad and not isinstance(gradient, PushedGradient)
