"""Simulates a run whose steps differ: temporarily slow ranks, and rebalancing of batch split and shard sizes.

Each step is simulated as a steady step under the conditions that hold in it. Where the conditions change, steps of the
new kind follow those of the old. In such plans ranks synchronise at the end of every step, so no step affects the next.
The time to move shards is left out: it occurs once, and is small compared to what it saves, or it would not be done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gssim.result import Division
from gssim.scenario import Scenario, after_step, begin


@dataclass(frozen=True)
class Segment:
    """Conditions that hold in a step: batch split, shard sizes, and slow ranks with their time ratios."""

    samples: tuple[int, ...]
    shard_shares: tuple[float, ...]
    slowed: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CountedStep:
    """A step after the warm-up."""

    segment: Segment
    time_s: float


@dataclass(frozen=True)
class VaryingRun:
    """The steps of a run whose conditions change: slow ranks, and rebalanced batches and shards."""

    steps: tuple[CountedStep, ...]
    """Steps after the warm-up."""
    divisions: tuple[Division, ...]
    """New batch splits and shard sizes, from the first step of the warm-up on."""

    @property
    def last(self) -> Segment:
        """Conditions at the end of the run, but without slow ranks."""
        if self.divisions:
            return Segment(self.divisions[-1].samples, self.divisions[-1].shard_shares, ())
        return Segment(self.steps[0].segment.samples, self.steps[0].segment.shard_shares, ())


def typical_of(steps: Sequence[CountedStep]) -> CountedStep:
    """Return a step of median length, of equally long ones the earliest."""
    ordered = sorted(range(len(steps)), key=lambda step: (comparable_s(steps[step].time_s), step))
    return steps[ordered[(len(ordered) - 1) // 2]]


def comparable_s(time_s: float) -> float:
    """Return a time without the digits in which equal ones differ, by the order in which their parts were added up.

    >>> comparable_s(0.1 + 0.2) == comparable_s(0.3)
    True
    """
    return float(f"{time_s:.9g}")


class StepReport(NamedTuple):
    """A step's time, and every rank's own compute in it as reported to the others."""

    time_s: float
    compute_s: tuple[float, ...]
    update_s: tuple[float, ...]


def simulate_steps(scenario: Scenario, measure: Callable[[Segment, int], StepReport]) -> VaryingRun:
    """Return a run, simulated step by step from the warm-up on, and rebalanced where the plan says so.

    `measure`: function that returns a step's report, given its conditions and its number.
    """
    run = scenario.run
    state = begin(scenario)
    steps = []
    for step in range(-run.warmup_steps, run.steps):
        segment = Segment(state.samples, state.shard_shares, tuple(sorted(run.slowed(step).items())))
        report = measure(segment, step + run.warmup_steps)
        if step >= 0:
            steps.append(CountedStep(segment, report.time_s))
        if scenario.plan.shares.replan:
            state = after_step(state, step=step, compute_s=report.compute_s, update_s=report.update_s)
    return VaryingRun(tuple(steps), state.divisions)
