"""The optimizer that `shard_gradients` returns, and the hooks by which it takes gradients out of the backward."""

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from gsreal.gradient_sharding import state
from gsreal.gradient_sharding.bucket import Bucket, pass_over_absent
from gsreal.gradient_sharding.guards import Watch
from gsreal.gradient_sharding.hierarchy import InNode, Levels
from gsreal.gradient_sharding.migration import migrate
from gsreal.gradient_sharding.options import checked_shares, described_optimizer
from gsreal.gradient_sharding.protocol import called_by_torchs_state_dict, every_rank
from gsreal.gradient_sharding.publish import Publisher
from gsreal.gradient_sharding.push import Pusher, Sent
from gsreal.gradient_sharding.pushed_gradient import PushedGradient, any_non_finite, clip, total_norm
from gsreal.gradient_sharding.sharded_parameters import Unit
from gssim.plan import splitting

BACKWARD = "a backward, and what it pushes"
OPTIMIZERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By parameter, a reference to the optimizer whose buckets it is in."""


class GradientSharding(torch.optim.Optimizer):
    """The optimizer that `shard_gradients` returns: used like any of torch's.

    Its `param_groups` are those of the optimizer inside, over this rank's shards: schedulers and `GradScaler` work on
    them. Gradients of the model's parameters have gone to their owners after each backward: `clip_grad_norm_` here sees
    them all, and torch's raises an error. `model.zero_grad()` discards what was pushed, as `zero_grad` here does.

    Every rank makes the same number of steps, and of backwards outside `no_sync` between two of them. A rank that makes
    none between two steps pushes zeros in `step`.
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
        self._weights = splitting.even(len(levels.ranks))
        self.weights = self._weights
        self._next = 0
        self._collecting = True
        self._backwards: set[int] = set()
        """The backward that goes on, and those inside it, by autograd's numbers."""
        self._leaves = True
        """Whether gradients are pushed in the backward that goes on."""
        self._handles: list[RemovableHandle] = []
        self.is_replaced = False
        """Whether another optimizer owns the model's parameters now."""
        for bucket in buckets:
            for parameter in bucket.parameters:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(bucket)))
        if len(names) == 1:  # once it has its next gradient, nothing shows whether it had lost the one before
            self._handles.append(next(iter(names)).register_hook(lambda _gradient: self._discard_if_removed()))
        for parameter in names:
            OPTIMIZERS[parameter] = weakref.ref(self)

    @property
    def weights(self) -> tuple[float, ...]:
        """Each rank's part of the step's loss terms: what its mean gradient counts. Even until it is set.

        The parts sum to 1: of 48 samples, (32 / 48, 16 / 48).
        """
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        weights = tuple(float(weight) for weight in weights)
        ranks, total = len(self.levels.ranks), sum(weights)
        if (
            len(weights) != ranks
            or not all(weight >= 0 for weight in weights)
            or not math.isclose(total, 1, abs_tol=1e-6)
        ):
            raise ValueError(
                f"weights must be {ranks} fractions that sum to 1, every rank's part of the step's samples, not "
                f"{weights}: divide what every rank has by what all have together"
            )
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
            if parameter.grad is None:
                return  # it was frozen after the forward: autograd calls, but adds nothing
            backward = torch._C._current_graph_task_id()
            if backward not in self._backwards:
                self._begin_backward(backward)
            if self._leaves:
                self._check_gradient(parameter, bucket)
            bucket.take(parameter, leaves=self._leaves)
            if self._leaves:
                with every_rank(BACKWARD):
                    self._push_complete()

        return collect

    def _begin_backward(self, backward: int) -> None:
        if _is_inside_another():
            if self._collecting:
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
        self.publisher.finish()  # what no module has waited for uses the memory that pushes use
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._backwards.add(backward)
        self._leaves = self._collecting
        if self._leaves:
            for bucket in self.buckets:
                bucket.clear_stand_ins()
        self._take_loss_scale()

    def _take_loss_scale(self) -> None:
        if self.scaler is not None:
            self.pusher.loss_scale = self.scaler.get_scale()

    def _check_no_interruption(self) -> None:
        """Raise RuntimeError where a backward was begun that never ended, or nothing can be exchanged any more."""
        self.levels.protocol.check()
        if self._backwards:
            raise RuntimeError(
                "an exception has ended the last backward: its gradients are incomplete, and other ranks may wait for "
                "them; call zero_grad() of what shard_gradients returned on every rank, then make the backward again"
            )

    def _discard_if_removed(self) -> None:
        """Forget what was pushed since the last step if the model's own `zero_grad` has been called after that.

        Raises RuntimeError where it was one parameter's gradient that was removed.
        """
        pushed = [parameter for bucket in self.buckets for parameter in bucket.reached]
        stand_ins = [isinstance(p.grad, PushedGradient) and not p.grad.is_zeroed for p in pushed]
        gone = [p for p, there in zip(pushed, stand_ins, strict=True) if not there and _is_none_or_zeroed(p)]
        if gone and any(stand_ins):
            raise RuntimeError(
                f"{self.names[gone[0]]}: its gradient was removed, but it has been pushed with those of the other "
                "parameters; freeze it before the backward, or discard all with zero_grad"
            )
        if gone:
            self._discard(set_to_none=gone[0].grad is None)

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
        for bucket in self.buckets[self._next :]:
            bucket.end_backward(leaves=self._leaves)
        if self._leaves:
            with every_rank(BACKWARD):
                self._push_complete()
                self._push_reduced()
                self.pusher.drain()
            self.levels.protocol.pushes += 1
        self._expect_backward()
        if self.scaler is not None and self._leaves:
            self._tell_scaler()

    def _expect_backward(self) -> None:
        """Wait for the next backward's gradients."""
        self._backwards.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
            bucket.show_gradients()

    def _end_backwards(self) -> None:
        """Push what is left to push before a step: all that there is, or zeros, if no backward has pushed anything.

        Other ranks wait for that. Raises RuntimeError where it cannot be done.
        """
        self._check_no_interruption()
        self._discard_if_removed()
        left = [p for bucket in self.buckets for p in bucket.parameters if _has_own_gradient(p)]
        if self.levels.protocol.pushes:
            if left:
                raise RuntimeError(
                    f"{self.names[left[0]]}: its gradient was not pushed; make the last backward before a step outside "
                    "no_sync"
                )
        elif left or len(self.levels.ranks) > 1:
            if not all(bucket.is_replica for bucket in self.buckets):
                raise RuntimeError(
                    "no gradients were pushed since the last step. Where parameters are sharded, every rank must make "
                    "every backward, in which the others gather parameters: where a batch is not to count, multiply "
                    "its loss by 0"
                )
            self._leaves = True
            self._take_loss_scale()
            self._end_backward()

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
        self._check_not_replaced()
        shard_shares = checked_shares(shard_shares, len(self.levels.ranks), self.scaler)
        self.levels.check_alike({"reshard: shard_shares": repr(shard_shares)}, self._device)
        if self._gradients() or any(_has_own_gradient(p) for bucket in self.buckets for p in bucket.parameters):
            raise RuntimeError("gradients of this step wait to be used; shards change their owners after `step` only")
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
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(f"clip_grad_norm_ takes max_norm >= 0 and norm_type > 0, not {max_norm} and {norm_type}")
        self._check_not_replaced()
        self._check_unscaled("clip_grad_norm_: call scaler.unscale_(optimizer) before")
        with every_rank("clip_grad_norm_"):
            self._end_backwards()
            norm = total_norm(self._gradients(), norm_type, self.levels.all_reduce, self._device)
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
        if called_by_torchs_state_dict():
            return None  # it would make state by a step; state_dict says what to call
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_not_replaced()
        self._check_unscaled("gradients are scaled still: call scaler.step(optimizer), not optimizer.step()")
        self._take_groups()
        self.finish()
        self._check_parameters()
        with every_rank("step"):
            self._end_backwards()
        self.watch.adopt_writes()
        if self._is_spoilt():
            self._forget_shard_gradients(set_to_none=True)
            self.pusher.drop_broken()
        else:
            self._update()
        self.levels.protocol.end_step()
        return loss

    def _update(self) -> None:
        with self.pusher.observe("optimizer", "optimizer"):
            for bucket in self.buckets:
                pass_over_absent(bucket, self.optimizer)
            self.optimizer.step()
            self._forget_shard_gradients(set_to_none=True)
            self.publisher.write_back(self.buckets)
        self.pusher.end_step()
        with every_rank("step"):
            self.publisher.publish([bucket for bucket in self.buckets if bucket.is_replica], self.optimizer)

    def finish(self) -> None:
        """Wait until this replica has all that was published, which may still be under way when `step` returns.

        With `publish_overlaps` alone. A forward and `state_dict` do so themselves, but what reads parameters directly
        must call this first.
        """
        self.publisher.finish()

    def retire(self) -> None:
        """Let go of the model, which another `shard_gradients` takes."""
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
        """Raise RuntimeError where the scaler has not divided the gradients by its scale yet."""
        if self.scaler is not None and self.scaler.is_enabled():
            stage = self.scaler._per_optimizer_states.get(id(self), {}).get("stage", OptState.READY)
            if stage is OptState.READY:
                raise RuntimeError(remedy)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by GradScaler.step of the optimizer: whether it wants gradients scaled."""
        if self.scaler is None:
            raise RuntimeError(
                "a GradScaler looks at this rank's gradients alone, and ranks would skip different steps: pass it to "
                "shard_gradients (scaler=)"
            )
        return False

    def _take_groups(self) -> None:
        """Give the optimizer inside the options that users see; raise RuntimeError where it would lack a shard."""
        self.optimizer.param_groups = self.param_groups
        held = Counter(id(p) for group in self.param_groups for p in group["params"])
        if held != Counter(id(piece.tensor) for bucket in self.buckets for piece in bucket.pieces):
            raise RuntimeError(
                "the params of param_groups are this rank's shards, and were changed: change their options alone; to "
                "train other parameters, freeze them (requires_grad_), or call shard_gradients again"
            )

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse to be copied or saved: it is tied to a model and to a process group."""
        raise RuntimeError("this optimizer can be neither copied nor saved as a whole: take its state_dict()")

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
        on where a backward does not reach them. After an exception in a backward, this pushes what other ranks wait
        for, so that all can make it again.
        """
        self._check_not_replaced()
        if self._backwards and torch._C._current_graph_task_id() == NO_BACKWARD:
            self._end_interrupted()
        self._discard(set_to_none=set_to_none)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _discard(self, *, set_to_none: bool) -> None:
        """Forget what was pushed since the last step."""
        for bucket in self.buckets:
            bucket.zeroed = set() if set_to_none else bucket.zeroed | bucket.updated | bucket.reached
        self._forget_shard_gradients(set_to_none=set_to_none)

    def _end_interrupted(self) -> None:
        """End a backward in which an exception was raised; nothing is exchanged where an exchange has raised it."""
        if self._leaves and not self.levels.protocol.failed:
            self._end_backward()
        else:
            for bucket in self.buckets:
                bucket.gradient = None
            self._expect_backward()

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
        if called_by_torchs_state_dict():
            raise RuntimeError(
                "get_optimizer_state_dict looks for the model's parameters in param_groups, where this optimizer has "
                "shards: take optimizer.state_dict(), which is whole and by parameter name, or save optimizer.sharded()"
            )
        self.finish()
        with every_rank("the optimizer's state_dict"):
            self.levels.check_alike(described_optimizer(self.optimizer), self._device)
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


def optimizers_of(parameters: Iterable[nn.Parameter]) -> list[GradientSharding]:
    """Return the optimizers that own some of these parameters now."""
    found = dict.fromkeys(OPTIMIZERS[p]() for p in parameters if p in OPTIMIZERS)
    return [each for each in found if each is not None and not each.is_replaced]


NO_BACKWARD = -1
"""autograd's number of the backward that goes on where none does."""
RUNS_BACKWARD = getattr(torch.autograd.graph._engine_run_backward, "__code__", None)
"""Of the function by which every backward is run."""
IN_BACKWARD = getattr(torch.autograd.function.BackwardCFunction.apply, "__code__", None)
"""Of the function by which a backward calls those that are written in Python."""


def _is_inside_another() -> bool:
    """Return whether the backward that goes on was begun inside another one, which may run in another thread."""
    runs, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is RUNS_BACKWARD:
            runs += 1
        if runs > 1 or (runs and frame.f_code is IN_BACKWARD):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_none_or_zeroed(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return gradient is None or (isinstance(gradient, PushedGradient) and gradient.is_zeroed)


def _has_own_gradient(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that was not pushed."""
    gradient = parameter.grad
    return gradient is not None and parameter.requires_grad and not isinstance(gradient, PushedGradient)
