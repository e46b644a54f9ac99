"""Assembles the Result of a run in periods: inner steps without communication, and outer steps that synchronize.

[Note: periods simulated] Replicas do not communicate with each other in an inner step, so an inner step is simulated on
its own. A rank begins an outer step after the sum of its inner steps. (The ranks of a sharded replica communicate among
themselves, and may share links with other replicas' ranks.) One simulated period stands for all periods with the same
slow ranks. The period lasts until the last rank has ended the outer step; a rank's own outer step is the rest of the
period after its inner steps. Step times are means over ranks, as in real runs. The step time of the run is the mean of
a period of H steps: H - 1 median inner steps and one median outer step.

Where fragments are synchronized, exchanges are in flight during inner steps and slow them down. So a whole period is
simulated as one program until it is steady, and a rank's steps end with their tasks on its compute stream. No exchange
is in flight from one period to the next. Here too, one period stands for all with the same slow ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import numpy as np

from gssim.execution.cache import Shared
from gssim.plan.buckets import fragment_steps
from gssim.result import PHASES, Collective, Periods, Result, fragment_periods
from gssim.scenario import Scenario
from gssim.simulation.report import Carried, cost_usd, energy_j, scale_utilisation
from gssim.simulation.varying_run import comparable_s
from gssim.units import Floats

Slowed = tuple[tuple[int, float], ...]
"""Ranks that are slow in a step, with their time ratio."""


@dataclass(frozen=True)
class InnerStep:
    """An inner step of every rank."""

    times_s: Floats
    """By rank."""
    phases_s: Mapping[str, Floats]
    """By phase and rank."""
    carried: Carried | None = None
    """Bytes sent within replicas; None if a replica is a single rank."""


@dataclass(frozen=True)
class Period:
    """Steps of ranks from one synchronization to the next."""

    inner: tuple[InnerStep, ...]
    outer_s: Floats
    """Seconds of each rank's outer step: the rest of the period after its inner steps."""
    result: Result
    """Result of the whole period as one step, in which the inner steps are idle time."""
    outer_bytes_sent: float
    """Bytes that a rank sends to other replicas, for the rank that sends the most."""


def inner_steps_s(inner: Sequence[InnerStep], ranks: int) -> Floats:
    """Return each rank's time in all inner steps of a period, in seconds (shape: ranks)."""
    return np.sum([step.times_s for step in inner], axis=0) if inner else np.zeros(ranks)


def inner_traffic(inner: Sequence[InnerStep]) -> Carried | None:
    """Return the total bytes of a period's inner steps; None if there are none, or if a replica is a single rank."""
    each = [step.carried for step in inner if step.carried is not None]
    return Carried(*(np.sum(column, axis=0) for column in zip(*each, strict=True))) if each else None


def outer_bytes(scenario: Scenario, collectives: Sequence[Collective]) -> float:
    """Return the total size of the collectives whose group spans several replicas, in bytes."""
    return sum(each.bytes * each.count for each in collectives if scenario.policies.joins_replicas(each.group))


def slowed_steps(scenario: Scenario, *, multiple: int = 1) -> list[Slowed]:
    """Return the slow ranks of every step of a run, including the warm-up; and of as many more steps after the end as
    make their number a multiple of `multiple`.
    """
    run = scenario.run
    steps = math.ceil((run.warmup_steps + run.steps) / multiple) * multiple
    return [tuple(sorted(run.slowed(step - run.warmup_steps).items())) for step in range(steps)]


def periodic_result(
    scenario: Scenario,
    inner: Callable[[Slowed], InnerStep],
    period_of: Callable[[tuple[InnerStep, ...], Slowed], Period],
    shared: Shared,
) -> tuple[Result, Period]:
    """Return the Result of a run in periods, and a period of median length; see [Note: periods simulated].

    Args:
        scenario: a scenario whose plan synchronizes periodically.
        inner: function that simulates an inner step, given the slow ranks.
        period_of: function that simulates a period, given its inner steps and the slow ranks of its outer step.
        shared: cache of the parts that scenarios have in common.
    """
    every, run = scenario.policies.sync_every_steps or 1, scenario.run
    inner = cache(inner)
    slowed = slowed_steps(scenario)
    by_slowed: dict[tuple[Slowed, ...], Period] = {}
    inner_s: list[float] = []
    outer_s: list[float] = []
    times_s: list[float] = []
    counted: list[Period] = []
    for step, slow in enumerate(slowed):
        is_counted = step >= run.warmup_steps
        if (step + 1) % every:
            if is_counted:
                inner_s.append(float(inner(slow).times_s.mean()))
                times_s.append(inner_s[-1])
            continue
        key = tuple(slowed[step + 1 - every : step + 1])
        if is_counted:
            if key not in by_slowed:
                by_slowed[key] = period_of(tuple(inner(each) for each in key[:-1]), slow)
            counted.append(by_slowed[key])
            outer_s.append(float(counted[-1].outer_s.mean()))
            times_s.append(outer_s[-1])
    ordered = sorted(counted, key=lambda each: comparable_s(each.result.step_time_s))
    typical = ordered[(len(ordered) - 1) // 2]
    result = typical.result
    periods = Periods(
        every_steps=every,
        inner_step_time_s=median(inner_s) if inner_s else None,
        outer_step_time_s=median(outer_s),
        outer_bytes=outer_bytes(scenario, result.collectives),
        outer_bytes_sent=typical.outer_bytes_sent,
    )
    by_rank = [_phases(each.phases_s, typical, each.ranks[0], periods.step_time_s) for each in result.ranks]
    return _mean_step_result(scenario, result, by_slowed, periods, by_rank, times_s, shared), typical


@dataclass(frozen=True)
class FragmentPeriod:
    """A period in which fragments of the parameters are synchronized."""

    times_s: Sequence[float]
    """For every step of the period, its mean time over ranks."""
    result: Result
    """Result of the whole period as if it were one step."""
    outer_bytes_sent: float
    """As in `Period`."""


def fragments_result(
    scenario: Scenario, period_of: Callable[[tuple[Slowed, ...]], FragmentPeriod], shared: Shared
) -> tuple[Result, FragmentPeriod]:
    """Return the Result of a run whose periods synchronize fragments, and a period of median length.

    See [Note: periods simulated]. If the run ends within a period, that one goes on as if the run did, but only its
    steps before the end count. (The run has a whole period, too.)

    Args:
        scenario: a scenario whose plan synchronizes fragments.
        period_of: function that simulates a period, given the slow ranks of each of its steps; called once per kind.
        shared: cache of the parts that scenarios have in common.
    """
    every, run = scenario.policies.sync_every_steps or 1, scenario.run
    slowed, last = slowed_steps(scenario, multiple=every), run.warmup_steps + run.steps
    by_slowed: dict[tuple[Slowed, ...], FragmentPeriod] = {}
    times_s: list[float] = []
    counted: list[FragmentPeriod] = []
    for first in range(0, len(slowed), every):
        key = tuple(slowed[first : first + every])
        if first + every <= run.warmup_steps:
            continue
        if key not in by_slowed:
            by_slowed[key] = period_of(key)
        times_s += by_slowed[key].times_s[max(0, run.warmup_steps - first) : last - first]
        if first + every <= last:
            counted.append(by_slowed[key])
    ordered = sorted(counted, key=lambda each: sum(each.times_s))
    typical = ordered[(len(ordered) - 1) // 2]
    result, steps = typical.result, fragment_steps(scenario.plan, scenario.policies)
    periods = fragment_periods(
        times_s,
        last=last,
        every=every,
        fragments=steps,
        outer_bytes=outer_bytes(scenario, result.collectives),
        outer_bytes_sent=typical.outer_bytes_sent,
    )
    by_rank = [_scale_phases(each.phases_s, periods.step_time_s) for each in result.ranks]
    return _mean_step_result(scenario, result, by_slowed, periods, by_rank, times_s, shared), typical


def _mean_step_result(
    scenario: Scenario,
    whole: Result,
    by_slowed: Mapping[tuple[Slowed, ...], Period | FragmentPeriod],
    periods: Periods,
    by_rank: Sequence[Mapping[str, float]],
    times_s: Sequence[float],
    shared: Shared,
) -> Result:
    """Return the Result of the mean step of a run.

    Args:
        scenario: the simulated scenario.
        whole: Result of a typical period as one step.
        by_slowed: all distinct periods, by the slow ranks of their steps.
        periods: times and bytes of inner and outer steps.
        by_rank: for each of the ranks of `whole`, the seconds of each phase of the mean step.
        times_s: times of all timed steps.
        shared: cache of the parts that scenarios have in common.
    """
    every, step_time_s = periods.every_steps, periods.step_time_s
    varies = len(by_slowed) > 1 or any(any(key) for key in by_slowed)
    links = scale_utilisation(whole.links, every * step_time_s / whole.step_time_s)  # other periods may have slow ranks
    ranks = tuple(
        replace(
            each,
            phases_s=dict(phases_s),
            bytes_sent=(each.bytes_sent or 0.0) / every,
            bytes_received=(each.bytes_received or 0.0) / every,
        )
        for each, phases_s in zip(whole.ranks, by_rank, strict=True)
    )
    count = sum(each.count for each in ranks)
    phases = {name: sum(each.phases_s[name] * each.count for each in ranks) / count for name in PHASES}
    misfits = [fit for each in by_slowed.values() if (fit := each.result.does_not_fit)]
    return replace(
        whole,
        scenario_id=scenario.identity(shared),
        scenario=scenario.resolved(shared),
        step_time_s=step_time_s,
        step_time_p10_s=sorted(times_s)[len(times_s) // 10],
        step_times_s=tuple(times_s) if varies else (),
        phases_s=phases,
        fits=not misfits,
        does_not_fit=max(misfits, key=lambda fit: fit.excess_bytes, default=None),
        throughput_samples_per_s=scenario.workload.global_batch_size / step_time_s,
        periods=periods,
        links=tuple(replace(link, bytes=link.bytes / every) for link in links),
        ranks=ranks,
        cost_usd_per_step=cost_usd(scenario, step_time_s),
        energy_j_per_step=energy_j(scenario, step_time_s, ranks),
    )


def _phases(whole: Mapping[str, float], period: Period, rank: int, step_time_s: float) -> dict[str, float]:
    """Return a rank's phases of the mean step; `whole` has those of its period, with the inner steps as idle time.

    They are scaled to the mean step, which differs from this period's if some steps of the run are slow.
    """
    phases = dict(whole)
    apart_s = float(sum(step.times_s[rank] for step in period.inner))
    phases["idle"] = max(0.0, phases["idle"] - apart_s)
    for step in period.inner:
        for name in PHASES:
            phases[name] += float(step.phases_s[name][rank])
    return _scale_phases(phases, step_time_s)


def _scale_phases(phases_s: Mapping[str, float], step_time_s: float) -> dict[str, float]:
    """Return the phases, scaled so that they add up to the step time."""
    scale = step_time_s / sum(phases_s.values())
    return {name: value * scale for name, value in phases_s.items()}
