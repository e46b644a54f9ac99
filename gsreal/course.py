"""How the timed steps of a run went, one by one: what was pushed in each, and between them how good the model was."""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import torch

from gsreal.evaluation import HeldOut
from gsreal.gradient_sharding import GradientSharding
from gsreal.lab.counters import Carried
from gsreal.methods import Training
from gssim.result import Evaluation
from gssim.scenario import Scenario
from gssim.units import UserError


class Course:
    """Notes of one rank, made after every step; `evaluations` are the same on all."""

    def __init__(self, scenario: Scenario, training: Training, rank: int, device: torch.device) -> None:
        self.run, self.training = scenario.run, training
        self.every = self.run.evaluate_every_steps
        self.held_out = HeldOut(scenario, rank, device) if self.every else None
        self.evaluations: list[Evaluation] = []
        self.carried = Carried()
        self.restart()

    def restart(self) -> None:
        """Forget what was pushed and carried: what is counted begins anew."""
        self._pushed = [(0, 0)]
        self.carried.restart()

    def note(self, step: int) -> None:
        """Take notes of a step, counted from 0 with the warm-up's; evaluates, a collective, where the run says so."""
        done = step + 1 - self.run.warmup_steps
        if done <= 0:
            return
        optimizer = self.training.optimizer
        if isinstance(optimizer, GradientSharding):
            self._pushed.append((optimizer.sent.entries, optimizer.sent.offered))
        else:
            self._pushed.append((0, 0))
        self.carried.note()
        if self.held_out and self.every and (done == self.run.steps or done % self.every == 0):
            with self.training.timeline.pause():
                self.training.finish()
                self.evaluations.append(self.held_out.evaluate(self.training.module, step=step + 1))
                self.carried.leave_out()

    @property
    def pushed_by_step(self) -> list[tuple[int, int]]:
        """Entries that this rank sent off its shard in each timed step, and those that it could have sent."""
        return [(now[0] - before[0], now[1] - before[1]) for before, now in pairwise(self._pushed)]


def density_by_step(ranks: Sequence[Sequence[tuple[int, int]]], threshold: float | None) -> tuple[float, ...]:
    """Return what all ranks sent of what they could, by step; nothing where all always is.

    >>> density_by_step([[(1, 4), (2, 4)], [(1, 4), (0, 4)]], threshold=0.1)
    (0.25, 0.25)
    """
    steps = [tuple(map(sum, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
    if threshold is None or not any(offered for _, offered in steps):
        return ()
    return tuple(sent / offered if offered else 0.0 for sent, offered in steps)


def refuse_divergence(losses: Sequence[float], evaluations: Sequence[Evaluation]) -> None:
    """Raise UserError where a loss is no finite number: JSON has none, and the training is of no use."""
    if all(map(isfinite, (*losses, *(each.loss for each in evaluations)))):
        return
    first = next((step for step, loss in enumerate(losses, start=1) if not isfinite(loss)), len(losses))
    raise UserError(
        f"workload.learning_rate: training diverged: after {first} timed steps the loss is no finite number; "
        "allowed: a rate at which it falls"
    )
