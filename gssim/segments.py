"""A run of which not all steps are alike: ranks that are slow for a while, and a batch that is divided anew.

Each step is as a steady one under what holds in it; where that changes, steps of the new kind follow those of the old.
Ranks come together at the end of every step of such a plan, which is why nothing of the one is left in the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gssim import shares
from gssim.scenario import Scenario


@dataclass(frozen=True)
class Segment:
    """What holds in a step: how the batch is divided, and which ranks are slow, by how much."""

    batch: tuple[int, ...]
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
    divisions: tuple[tuple[int, tuple[int, ...]], ...]
    """(First step, batch) of each new division of the batch; steps of the warm-up have negative numbers."""

    @property
    def typical(self) -> Passed:
        """A step of median length."""
        ordered = sorted(range(len(self.steps)), key=lambda step: (self.steps[step].time_s, step))
        return self.steps[ordered[(len(ordered) - 1) // 2]]

    @property
    def last(self) -> Segment:
        """What holds in the end, after whoever was slow then."""
        return Segment(self.divisions[-1][1] if self.divisions else self.steps[0].segment.batch, ())


Measure = Callable[[Segment, int], tuple[float, tuple[float, ...]]]
"""Returns the time of a step under a segment, and how long each rank computed in it; the number is the step's."""


def walk(scenario: Scenario, measure: Measure) -> Walk:
    """Return a run step by step, warm-up first, with the plan's controller of batch shares where it has one."""
    run, rules = scenario.run, scenario.plan.shares
    watch = shares.Watch(scenario.batch_sizes)
    most = scenario.most_samples if rules.replan else None
    steps, divisions = [], []
    for step in range(-run.warmup_steps, run.steps):
        segment = Segment(watch.batch, tuple(sorted(run.slowed(step).items())))
        time_s, compute_s = measure(segment, step + run.warmup_steps)
        if step >= 0:
            steps.append(Passed(segment, time_s))
        if rules.replan:
            watch = shares.observe(watch, compute_s, rules.replanning, least=scenario.plan.micro_batches, most=most)
        if watch.batch != segment.batch:
            divisions.append((step + 1, watch.batch))
    return Walk(tuple(steps), tuple(divisions))
