"""One training step of a module prepared for a plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gsreal.gradient_sharding import GradientSharding
from gsreal.gradient_sharding.master import MasterCopy
from gsreal.measure import Timeline
from gsreal.methods.experts import PARAMETERS
from gsreal.model_files.build import autocast, logits_of, loss_of
from gsreal.run.rank_speed import Rebalancer, SlowDevice
from gssim.plan import splitting

if TYPE_CHECKING:
    from gsreal.methods.compressed import Compressor
    from gsreal.methods.expert_parallel import ExpertGradients, ShardedExpertGradients
    from gsreal.methods.periodic import Synchronization
    from gsreal.methods.tensor_slices import PartialGradients


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weighted(loss: Tensor, factor: float) -> Tensor:
    """Return a loss times a factor; a loss in fp16 is cast to fp32, whose range the product may need."""
    if factor == 1:
        return loss
    return (loss.float() if loss.dtype == torch.float16 else loss) * factor


@dataclass(frozen=True)
class Weights:
    """Weights of ranks and micro-batches in the loss.

    The loss is a mean over loss terms, and ranks and micro-batches may have unequal numbers of these.
    """

    ranks: tuple[float, ...]
    """Every rank's fraction of the step's loss terms."""
    micro_batches: tuple[float, ...] = (1.0,)
    """Every micro-batch's fraction of this rank's loss terms."""
    joined_ranks: int = 1
    """Number of consecutive ranks whose losses contribute to one another's gradients: ranks that divide sequences, hold
    slices of blocks, or divide experts."""

    @property
    def pushed(self) -> tuple[float, ...]:
        """Weight of the gradient that each rank pushes to its owners.

        Gradients of keys and values come from the losses of all ranks that divide a sequence, and gradients of experts
        from the losses of all ranks whose tokens they received. Their parts cannot be weighted separately afterwards.
        So owners weight these ranks equally, and each rank weights its own loss before the backward.
        """
        if self.joined_ranks == 1:
            return self.ranks
        firsts = range(0, len(self.ranks), self.joined_ranks)
        means = [fmean(self.ranks[first : first + self.joined_ranks]) for first in firsts]
        return tuple(mean for mean in means for _ in range(self.joined_ranks))


def master_copies(optimizer: torch.optim.Optimizer) -> list[MasterCopy]:
    """Return the optimizers with master copies in an optimizer; empty if it updates the parameters themselves.

    Experts that ranks divide have an optimizer of their own, and ZeroRedundancyOptimizer wraps one.
    """
    apart = getattr(optimizer, "optimizers", [optimizer])
    return [each for each in (getattr(one, "optim", one) for one in apart) if isinstance(each, MasterCopy)]


GROWTH_STEPS = 2000
"""Clean steps after which a dynamic factor is doubled (torch.amp.GradScaler's default)."""
FIRST_SCALE = 2.0**16
"""Initial dynamic factor (likewise). It is infinite in fp16, and so is the gradient of a loss in fp16: the first step
is skipped if it has one micro-batch. With several, whose losses are weighted, it may not be skipped. Losses then
differ.
"""


class LossScaler:
    """The factor on the loss of a training in fp16; its gradients are checked and divided before the update.

    torch's GradScaler refuses gradients in fp16. Here they are checked in fp16, and divided once they are cast for the
    master copy. Ranks that hold different gradients agree by all-reducing a flag in `groups`.
    """

    def __init__(self, scale: float | str, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self.dynamic = scale == "dynamic"
        self.scale = FIRST_SCALE if isinstance(scale, str) else scale
        self.groups = groups
        self.clean_steps = 0

    def unscale(self, module: nn.Module, optimizer: torch.optim.Optimizer, timeline: Timeline) -> bool:
        """Divide gradients by the factor; return whether all are finite, on every rank."""
        copies = master_copies(optimizer)
        cast = bool(copies)
        for each in copies:
            each.gradient_factor = 1 / self.scale
        owners = optimizer if isinstance(optimizer, GradientSharding) else None
        if owners is not None:
            own = owners.received_gradients()
        else:
            own = [own_part(p.grad) for p in module.parameters() if p.grad is not None]
        device = next(module.parameters()).device
        nonfinite = torch.zeros((), device=device)
        inverse = torch.full((), 1.0 if cast else 1 / self.scale, device=device)
        with timeline.span("unscale gradients", "optimizer"):
            if own:  # a rank may own no shard
                torch._amp_foreach_non_finite_check_and_unscale_(own, nonfinite, inverse)
        if owners is not None:
            with timeline.span("all-reduce infinite gradients", "exposed_communication"):
                owners.hierarchy.all_reduce(nonfinite)
        for group in self.groups:
            with timeline.span("all-reduce infinite gradients", "exposed_communication", group):
                dist.all_reduce(nonfinite, group=group)
        return not nonfinite.item()

    def update(self, finite: bool) -> None:
        """Adapt a dynamic factor after a step."""
        if not self.dynamic:
            return
        self.clean_steps = self.clean_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.clean_steps == GROWTH_STEPS:
            self.scale, self.clean_steps = 2 * self.scale, 0


@dataclass
class Training:
    """A module prepared for a plan: `step` trains it once on this rank's rows."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | GradientSharding
    timeline: Timeline
    scale: float
    """Factor on the weighted loss before the backward: the number of ranks, if a wrapper averages over them.

    0: the rank's mean is used unchanged, because the owner weights it.
    """
    replica: Sequence[int] = ()
    """Ranks of this rank's replica, if replicas train apart: weights are then parts of the replica's loss terms."""
    last_gradient: list[Any] = field(default_factory=list)
    """DDP: the mark of the last gradient hook in this backward."""
    replicas: Any = None
    """DDP: the process group of its replicas."""
    sync_each: bool = False
    """Whether gradients are synchronised in every micro-batch, or in the last one only."""
    syncing: Callable[[bool], AbstractContextManager[None]] = lambda _pushes: nullcontext()
    """Context of a micro-batch's forward and backward.

    Its argument is True if gradients are synchronised, False if they accumulate.
    """
    periods: "Synchronization | None" = None
    """Synchronizes parameters every few steps, if ranks train apart otherwise."""
    compressor: "Compressor | None" = None
    """Compresses gradients, if the plan does so beyond their precision."""
    slow: SlowDevice | None = None
    """Emulates a slower device for a while, if the run says so."""
    rebalancer: Rebalancer | None = None
    """Rebalances shares by the measured rank speeds, if the plan says so."""
    clip_norm: float | None = None
    """Largest norm of all gradients together, to which they are scaled down before the update."""

    norm_groups: Sequence[dist.ProcessGroup] | None = None
    """If ranks hold slices of blocks, or some of the experts: the groups over which norms are summed, in turn."""

    whole_in: dist.ProcessGroup | None = None
    """The group of `norm_groups` whose ranks all hold the other gradients whole; None: nothing is held twice."""

    slice_ranks: int | None = None
    """Number of ranks at the front of `whole_in` that hold different slices of blocks; the others hold the same slices
    again. None: all ranks hold different ones.
    """

    autocast: str | None = None
    """Precision of torch.autocast in forwards, if the workload has it."""

    scaler: LossScaler | None = None
    """Factor on the loss, if the workload has one."""

    experts: "ExpertGradients | ShardedExpertGradients | None" = None
    """Reduction of the gradients of experts, where ranks divide these."""

    loss: Callable[[Tensor, Tensor], Tensor] = loss_of
    """Returns the mean loss of logits and targets."""

    partial_gradients: "PartialGradients | None" = None
    """Gradients to be summed over tensor-parallel ranks before the update, because each rank has only a part."""

    def step(self, inputs: Tensor, targets: Tensor, weights: Weights, rank: int) -> Tensor:
        """Train on one batch, micro-batch by micro-batch. Returns this rank's mean loss."""
        scale = self.scale * weights.ranks[rank] if self.scale else 1.0
        if isinstance(self.optimizer, GradientSharding):
            pushed = weights.pushed
            self.optimizer.weights = tuple(pushed[each] for each in self.optimizer.ranks)
            scale = weights.ranks[rank] / pushed[rank] if pushed[rank] else 1.0
        if self.replica:
            scale /= sum(weights.ranks[each] for each in self.replica)
        scale *= self.begin_scaled_step()
        losses = []
        for leaves, part, targets_part, weight in self._micro_batches(inputs, targets, weights.micro_batches):
            if self.experts is not None:
                self.experts.leaves = leaves
            with self.syncing(leaves):
                loss = self._forward_backward(part, targets_part, scale * weight)
                losses.append(weight * loss if weight else torch.zeros_like(loss))  # the mean over no terms is NaN
        with self._phase("optimizer"):
            self._update()
        if self.periods is not None:
            self.periods.after_step()
        if self.rebalancer is not None:
            self.rebalancer.exchange_times(self.timeline)
        self.timeline.end_step()
        return torch.stack(losses).sum()

    def finish(self) -> None:
        """Wait for exchanges that a step may leave in flight.

        Needed before parameters are read other than by a forward.
        """
        if isinstance(self.optimizer, GradientSharding):
            self.optimizer.finish()
        if self.periods is not None:
            self.periods.finish()

    def _micro_batches(
        self, inputs: Tensor, targets: Tensor, weights: Sequence[float]
    ) -> list[tuple[bool, Tensor, Tensor, float]]:
        """Return (whether gradients are synchronised, inputs, targets, weight) of each micro-batch."""
        sizes = splitting.split(len(inputs), splitting.even(len(weights)))
        leaves = [self.sync_each or number == len(weights) - 1 for number in range(len(weights))]
        return list(zip(leaves, inputs.split(sizes), targets.split(sizes), weights, strict=True))

    def _forward_backward(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        timeline = self.timeline
        self.last_gradient.clear()
        cast = autocast(self.autocast, inputs.device.type)
        with self._phase("forward", len(inputs)), timeline.span("forward", "forward"), cast:
            loss = self.loss(logits_of(self.module(inputs)), targets)
        with self._phase("backward", len(inputs)):
            with timeline.span("backward", "backward"):
                weighted(loss, factor).backward()
                if self.experts is not None:
                    self.experts.wait()
            if self.last_gradient:
                timeline.between(
                    "wait for all-reduce", "exposed_communication", self.last_gradient[0], group=self.replicas
                )
        return loss.detach()

    def slow_down(self, ratio: float) -> None:
        """Slow this rank down by `ratio` from now on; 1: full speed (for runs with slowdowns)."""
        if self.slow is not None:
            self.slow.ratio = ratio

    def _phase(self, phase: str, units: int = 1) -> AbstractContextManager[None]:
        return nullcontext() if self.slow is None else self.slow.phase(phase, units)

    def clip_pushed_gradients(self, optimizer: GradientSharding, norm: float) -> None:
        """Scale what owners have received down to a norm of at most `norm`."""
        optimizer.clip_grad_norm_(norm)

    def clip_gradients(self, norm: float) -> None:
        """Scale all gradients down to a norm of at most `norm`, by torch's function; it sums over FSDP2's shards.

        Where ranks hold slices of some gradients, or some of the experts, and others whole, only the first rank counts
        the whole ones. Gradients in fp16 that are yet to be divided by the loss's factor are clipped by that division,
        after the cast for the master copy.
        """
        gradients = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        if self.norm_groups is not None:
            total = self._squares_over_groups(gradients, next(iter(gradients.values())).device).sqrt()
        elif self.scaled_copies:
            total = self._total_norm(gradients.values())
        else:
            nn.utils.clip_grad_norm_(self.module.parameters(), norm)
            return
        self._scale_down(list(gradients.values()), norm, total)

    @property
    def scaled_copies(self) -> list[MasterCopy]:
        """Master copies whose gradients, whole and in fp16, are divided by the loss's factor once they are cast."""
        return master_copies(self.optimizer) if self.scaler is not None else []

    def _total_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the norm of gradients, in their precision, or in fp32 if the loss's factor is still in them.

        A norm in fp16 is infinite above 65504, which multiplied gradients often exceed.
        """
        gradients = list(gradients)
        if self.scaled_copies and gradients:
            return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()
        return nn.utils.get_total_norm(gradients)  # zero of none

    def _squares_over_groups(self, gradients: Mapping[nn.Parameter, Tensor], device: torch.device) -> Tensor:
        """Return the sum of the squares of gradients over the ranks that have parts of them."""
        assert self.norm_groups is not None
        place = 0 if self.whole_in is None else dist.get_rank(self.whole_in)
        counts_slices = self.slice_ranks is None or place < self.slice_ranks
        parts = {
            getattr(module, name)
            for module in self.module.modules()
            for name in module.__dict__.get("_gsreal_slices", {})
            if counts_slices or name in PARAMETERS
        }
        counted = [own_part(gradient) for p, gradient in gradients.items() if place == 0 or p in parts]
        squares = self._total_norm(counted).to(device=device, dtype=torch.float64).square()
        for group in self.norm_groups:
            with self.timeline.span("all-reduce gradient norm of parts", "exposed_communication", group):
                dist.all_reduce(squares, group=group)
        return squares

    def _scale_down(self, gradients: Sequence[Tensor], norm: float, total: Tensor) -> None:
        """Scale gradients of norm `total` down to a norm of at most `norm`.

        torch's `clip_grads_with_norm_` does the same, but takes only parameters. Gradients in fp16 with the loss's
        factor in them are scaled by their master copies.
        """
        copies = self.scaled_copies
        if not copies:
            ratio = torch.clamp(norm / (total.to(gradients[0].dtype) + 1e-6), max=1.0)
            torch._foreach_mul_([own_part(each) for each in gradients], ratio)
            return
        scaled_norm = float(total)
        for each in copies:
            each.gradient_factor *= min(1.0, norm / (scaled_norm * each.gradient_factor + 1e-6))

    def begin_scaled_step(self) -> float:
        """Return the factor on the step's loss, which pushes need to know; 1: it is not scaled."""
        if self.scaler is None:
            return 1.0
        if isinstance(self.optimizer, GradientSharding):
            self.optimizer.set_loss_scale(self.scaler.scale)
        return self.scaler.scale

    def _update_shards(self, optimizer: GradientSharding) -> None:
        """Update and publish the shards whose gradients this rank has received."""
        if self.partial_gradients is not None:
            self.partial_gradients.sum_pushed(optimizer.buckets)
        if not self._gradients_are_finite():
            optimizer.skip_step()
        elif self.clip_norm is not None:
            with self.timeline.span("clip gradients", "optimizer"):
                self.clip_pushed_gradients(optimizer, self.clip_norm)
        optimizer.step()  # it records its own spans

    def _gradients_are_finite(self) -> bool:
        """Divide gradients by the loss's factor, if it has one; return whether all of them are finite, on every rank.

        True without a factor, where nobody looks.
        """
        if self.scaler is None:
            return True
        finite = self.scaler.unscale(self.module, self.optimizer, self.timeline)
        self.scaler.update(finite)
        return finite

    def _update(self) -> None:
        if isinstance(self.optimizer, GradientSharding):
            self._update_shards(self.optimizer)
            return
        if self.partial_gradients is not None:
            self.partial_gradients.sum()
        if self.experts is not None:
            self.experts.divide()
        if not self._gradients_are_finite():
            self.optimizer.zero_grad(set_to_none=True)
            return
        if self.clip_norm is not None:
            with self.timeline.span("clip gradients", "optimizer"):
                self.clip_gradients(self.clip_norm)
        with self.timeline.span("optimizer", "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
