"""A run of which not all steps are alike: ranks that are slow for a while, and shares that follow the ranks' pace.

Each step is as a steady one under what holds in it; where that changes, steps of the new kind follow those of the old.
Ranks come together at the end of every step of such a plan, which is why nothing of the one is left in the other. What
it takes to move shards is left out: it is once, and small beside what it gains, or it would not be done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gssim.result import Division
from gssim.scenario import Scenario, after_step, begin


@dataclass(frozen=True)
class Segment:
    """What holds in a step: how batch and shards are divided, and which ranks are slow, by how much."""

    samples: tuple[int, ...]
    shard_shares: tuple[float, ...]
    slowed: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Passed:
    """A step that counts."""

    segment: Segment
    time_s: float


@dataclass(frozen=True)
class Walk:
    """All steps of a run."""

    steps: tuple[Passed, ...]
    """Those that count."""
    divisions: tuple[Division, ...]
    """New ones, from the first of the warm-up on."""

    @property
    def typical(self) -> Passed:
        """A step of median length."""
        ordered = sorted(range(len(self.steps)), key=lambda step: (self.steps[step].time_s, step))
        return self.steps[ordered[(len(ordered) - 1) // 2]]

    @property
    def last(self) -> Segment:
        """What holds in the end, after whoever was slow then."""
        if self.divisions:
            return Segment(self.divisions[-1].samples, self.divisions[-1].shard_shares, ())
        return Segment(self.steps[0].segment.samples, self.steps[0].segment.shard_shares, ())


class Told(NamedTuple):
    """A step: its time, and what every rank tells the others of its own part in it."""

    time_s: float
    compute_s: tuple[float, ...]
    update_s: tuple[float, ...]


def walk(scenario: Scenario, measure: Callable[[Segment, int], Told]) -> Walk:
    """Return a run step by step, warm-up first, with the plan's controller of shares where it has one.

    `measure`: what a step under a segment comes to; the number is the step's.
    """
    run = scenario.run
    following = begin(scenario)
    steps = []
    for step in range(-run.warmup_steps, run.steps):
        segment = Segment(following.samples, following.shard_shares, tuple(sorted(run.slowed(step).items())))
        told = measure(segment, step + run.warmup_steps)
        if step >= 0:
            steps.append(Passed(segment, told.time_s))
        if scenario.plan.shares.replan:
            following = after_step(following, step=step, compute_s=told.compute_s, update_s=told.update_s)
    return Walk(tuple(steps), following.divisions)
