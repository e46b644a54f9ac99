"""A module made ready for a plan, and one step of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gsreal.build import logits_of, loss_of
from gsreal.gradient_sharding import GradientSharding
from gsreal.measure import Timeline


@dataclass
class Training:
    """A module made ready for a plan: `step` trains it once on this rank's rows."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | GradientSharding
    timeline: Timeline
    scale: float
    """Factor on the weighted loss before backward: the ranks, where a wrapper averages over them; 0: leave the rank's
    mean as it is (the owner weighs it)."""
    last_gradient: list[Any]
    """DDP: the mark of the last gradient hook in this backward."""

    def step(self, inputs: Tensor, targets: Tensor, weights: Sequence[float], rank: int) -> Tensor:
        """Train on one batch; `weights`: every rank's part of the step's loss terms. Returns this rank's mean loss."""
        timeline = self.timeline
        if isinstance(self.optimizer, GradientSharding):
            self.optimizer.weights = tuple(weights)
        self.last_gradient.clear()
        with timeline.span("forward", "forward"):
            loss = loss_of(logits_of(self.module(inputs)), targets)
        factor = self.scale * weights[rank] if self.scale else 1.0
        with timeline.span("backward", "backward"):
            (loss if factor == 1 else loss * factor).backward()
        if self.last_gradient:
            timeline.between("wait for all-reduce", "exposed_communication", self.last_gradient[0])
        self._update()
        timeline.end_step()
        return loss.detach()

    def _update(self) -> None:
        if isinstance(self.optimizer, GradientSharding):
            self.optimizer.step()  # it observes its own parts
            return
        with self.timeline.span("optimizer", "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
