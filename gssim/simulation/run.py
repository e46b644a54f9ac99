"""Predicts a scenario: lowers it, executes its steps until they are steady, and returns the Result."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from gssim.engine import Machine
from gssim.errors import UserError
from gssim.execution import NUMERICS, SHOWN, code_digest, installed_version
from gssim.execution.cache import Same, Shared
from gssim.execution.garbage import no_collection
from gssim.program import (
    Program,
    Steps,
    StepTraffic,
    after_inner_steps,
    lowering_key,
    unmeasured_host_time,
    unmeasured_workspace,
)
from gssim.result import (
    COMPUTE_PHASES,
    PHASES,
    UPDATE_PHASES,
    Density,
    Result,
    Span,
    Step,
)
from gssim.result.result import Band
from gssim.scenario import Loaded, Scenario
from gssim.scenario.device_rates import check_rates
from gssim.simulation.extrapolation import (
    extrapolate,
    further_peaks,
    is_settled,
    simulated_counts,
    with_micro_batches,
)
from gssim.simulation.footprint import (
    MemoryFootprint,
    Overheads,
    Peak,
    PeakOfRank,
    allocator_overheads,
    footprints_of,
    host_misfit,
    tightest_margin,
    worst_misfit,
)
from gssim.simulation.periodic_run import (
    FragmentPeriod,
    InnerStep,
    Period,
    Slowed,
    fragments_result,
    inner_steps_s,
    inner_traffic,
    periodic_result,
)
from gssim.simulation.report import (
    Carried,
    busiest_of,
    carried_by,
    collectives_of,
    cost_usd,
    energy_j,
    links_of,
    mean_excess_bytes,
    mean_over_typical,
    rank_classes,
    scale_utilisation,
    with_phases_of,
)
from gssim.simulation.steady_run import (
    SteadyRun,
    mean_phases,
    outer_bytes_sent,
    phases_of,
    run_until_steady,
    settled_phases,
    times_in,
    times_of_steps,
)
from gssim.simulation.timeline import step_of
from gssim.simulation.varying_run import Segment, StepReport, simulate_steps, typical_of
from gssim.units import Floats
from gssim.workload.gradient_statistics import GradientStatistics, at_end


@dataclass(frozen=True)
class Simulated:
    """A result and the spans of its steady step, which begins at 0."""

    result: Result
    typical: "SteadyRun"
    shown: Program | None = None
    """Program that a trace shows instead of the typical step's: in a run of periods, an inner step and the
    outer one.
    """

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Busy intervals of the streams in the steady step, from its beginning."""
        start_s, end_s = self.typical.start_s, self.typical.start_s + self.typical.time_s
        return tuple(
            span.span(start_s)
            for span in self.typical.machine.task_spans
            if span.end_s > start_s and span.start_s < end_s
        )


@dataclass(frozen=True)
class StepTimes:
    """Durations of steady steps, and the compute time that each rank reports for rebalancing."""

    step_times_s: tuple[float, ...]
    compute_s: Floats
    """By step and rank."""
    update_s: Floats
    """By step and rank."""

    @classmethod
    def of(cls, steady: SteadyRun) -> "StepTimes":
        """Return the times of a run: the inputs of rebalancing batch split and shard sizes."""
        compute_s, update_s = (times_in(steady, phases) for phases in (COMPUTE_PHASES, UPDATE_PHASES))
        return cls(steady.times_s, compute_s, update_s)


class _Sizing(NamedTuple):
    """Settings of the simulation of memory: whether reserved bytes are computed, and figures that are known before."""

    reserved: bool = True
    """Whether to compute reserved memory, with the allocator's overhead."""
    overheads: Overheads | None = None
    """The allocator's overheads in thresholded steps, if known."""
    further: Mapping[int, Peak] | None = None
    """Bytes to be added to the peak of each role."""


RESERVED = _Sizing()


@dataclass(frozen=True)
class _Simulation:
    """A loaded scenario, and the cache and options with which it is predicted."""

    loaded: Loaded
    shared: Shared
    """Cache shared with other predictions."""
    unfolded: bool = False
    """Whether equal ranks, links and flows are not merged."""

    @property
    def scenario(self) -> Scenario:
        """The scenario."""
        return self.loaded.scenario

    @property
    def statistics(self) -> GradientStatistics | None:
        """Gradient statistics, if messages depend on them."""
        return self.loaded.gradients if self.loaded.statistics_needed else None

    @property
    def distinct_steps(self) -> Sequence[int]:
        """The run's steps with distinct programs: the last step, or all steps if messages depend on the data.

        Where parameters are synchronized periodically: one outer step.
        """
        run = self.scenario.run
        if every := self.scenario.policies.sync_every_steps:
            return [every - 1]  # an outer step: it contains everything that inner steps do
        steps = range(run.warmup_steps, run.warmup_steps + run.steps)
        return steps if self.loaded.statistics_needed else steps[-1:]

    def of(self, scenario: Scenario) -> "_Simulation":
        """Return the simulation of a scenario that was derived from this one, with the same cache and options."""
        return replace(self, loaded=replace(self.loaded, scenario=scenario))

    def steps(self, slowed: Slowed = (), slowed_steps: Sequence[Slowed] = ()) -> Steps:
        """Return the programs of a run, shared by all scenarios with the same lowering key.

        `slowed`: slow ranks with their compute time ratios. `slowed_steps`: those of every step of a period, if a
        program covers a whole period.
        """
        settings = (self.unfolded, tuple(sorted(slowed)), tuple(slowed_steps))

        def first_steps() -> Steps:
            return Steps(
                self.scenario,
                self.statistics,
                unfolded=self.unfolded,
                slowed=dict(slowed),
                slowed_steps=list(map(dict, slowed_steps)),
                shared=self.shared,
            )

        def new_steps() -> Steps:
            key = (*lowering_key(self.scenario, None, self.shared, any_threshold=True), *settings)
            first = self.shared.once("steps of any densities", key, first_steps, most=1)
            return first.under(self.scenario, self.statistics)

        key = (*lowering_key(self.scenario, self.statistics, self.shared), *settings)
        return self.shared.once("steps", key, new_steps, most=_cached_runs(self.scenario))

    def run(
        self,
        program: Program,
        *,
        peaks: bool = True,
        replicas: int = 1,
        is_too_slow: Callable[[float], bool] | None = None,
    ) -> SteadyRun:
        """Return a run of the program until its steps are steady; see `run_until_steady`."""
        return run_until_steady(
            self.scenario,
            program,
            self.unfolded,
            self.shared,
            peaks=peaks,
            replicas=replicas,
            is_too_slow=is_too_slow,
        )


def simulate(
    loaded: Loaded,
    *,
    unfolded: bool = False,
    shared: Shared | None = None,
    spread: bool = True,
    banded: bool = True,
    listed: bool = True,
    is_too_slow: Callable[[float], bool] | None = None,
) -> Simulated:
    """Return the prediction for a scenario; `unfolded`: do not merge equal ranks, links or flows.

    `shared`: cache shared with other scenarios. `spread`: whether to compute `step_time_p10_s`. Where messages differ
    between steps, that needs another simulation; without it, it is the median step's time. `banded`: whether to compute
    the prediction's range if gradient statistics were transferred from other models, by two more simulations. `listed`:
    whether the Result lists all collectives and links; else it may have no collectives, and of the links the busiest.
    `is_too_slow`: whether a step of at least so many seconds is not wanted; TooSlowError is then raised as soon as that
    is known of the step, where it is known before the end.

    Where push or publish are thresholded, messages differ from step to step. The step with the median payload then
    stands for all thresholded steps, while density, payloads and bytes sent are means over exactly the run's steps.
    Whether the plan fits also depends on the dense steps at the start.
    """
    simulation = _Simulation(loaded, shared or Shared(), unfolded)
    try:
        with no_collection():
            check_rates(loaded.scenario.cluster, loaded.scenario.workload, ranks=loaded.scenario.ranks)
            simulated = _predict(simulation, spread=spread, listed=listed, is_too_slow=is_too_slow)
            return _with_band(simulation, simulated) if banded else simulated
    except UserError as error:  # not found by earlier checks: raised only when the network is built
        raise UserError(f"{loaded.file}: {str(error).removeprefix(f'{loaded.file}: ')}") from None
    finally:
        if shared is None:
            simulation.shared.clear()


def with_spread_and_band(loaded: Loaded, simulated: Simulated, shared: Shared) -> Simulated:
    """Return a prediction that `simulate` made without its spread and its band as it is with both.

    Nothing that the prediction took is simulated again.
    """
    simulation = _Simulation(loaded, shared)
    with no_collection():
        if is_steady(loaded.scenario):
            steps = simulation.steps()
            light_run = _run_light_step(simulation, steps, _median_step(simulation, steps), simulated.typical)
            p10_s = _tenth_percentile_s(simulated.typical, light_run)
            simulated = replace(simulated, result=replace(simulated.result, step_time_p10_s=p10_s))
        return _with_band(simulation, simulated)


def is_steady(scenario: Scenario) -> bool:
    """Return whether all of a run's steps do the same, but for what thresholds let pass."""
    return not (scenario.policies.sync_every_steps or scenario.run.slowdowns or scenario.plan.shares.replan)


def push_density(loaded: Loaded, shared: Shared) -> float | None:
    """Return the push density of a scenario's Result, without simulating it: the mean over the steps of the run.

    None if nothing is pushed by a threshold, or if steps differ (see `is_steady`), so that it is not known before.
    """
    if not is_steady(loaded.scenario):
        return None
    simulation = _Simulation(loaded, shared)
    steps = simulation.steps()
    return _mean([steps.push_density(number) for number in simulation.distinct_steps])


def _with_band(simulation: _Simulation, simulated: Simulated) -> Simulated:
    """Return a prediction with its range, if its gradient statistics were transferred from other models.

    Both ends of the range reuse the prediction's allocator overhead, since only message sizes differ: their peaks are
    within 0.2 % of those of replayed steps.
    """
    statistics, result = simulation.statistics, simulated.result
    if statistics is None or statistics.transfer is None:
        return simulated
    machine = simulated.typical.machine
    sizing = _Sizing(overheads=allocator_overheads(simulation.scenario, machine.program, _peaks(machine)))
    # the statistics of both ends are created once, because densities are cached by statistics object
    both = simulation.shared.once(
        "ends of a band", Same(statistics), lambda: [at_end(statistics, high=high) for high in (False, True)]
    )
    ends = [replace(simulation, loaded=replace(simulation.loaded, gradients=end)) for end in both]
    every = [result, *(_predict(end, spread=False, listed=False, sizing=sizing).result for end in ends)]

    def between(values: Sequence[float | None]) -> tuple[float | None, float | None]:
        known = [value for value in values if value is not None]
        return (min(known), max(known)) if known else (None, None)

    push, publish = (between([getattr(each.density, name) for each in every]) for name in ("push", "publish"))
    error_ratios = [1.0]
    for middle, (low, high) in ((result.density.push, push), (result.density.publish, publish)):
        if middle is not None and low is not None and high is not None:  # the range always includes the prediction
            least, middle, most = (max(LEAST_DENSITY, density) for density in (low, middle, high))
            error_ratios += [middle / least, most / middle]
    times_s = [each.step_time_s for each in every]
    sent = [sum(each.count * (each.bytes_sent or 0.0) for each in one.ranks) for one in every]
    peaks = [max(each.peak_allocated_bytes for each in one.ranks) for one in every]
    band = Band(
        family=statistics.transfer.family,
        scale_error_ratio=statistics.transfer.scale_error_ratio,
        density_error_ratio=max(error_ratios),
        step_time_low_s=min(times_s),
        step_time_high_s=max(times_s),
        bytes_sent_low=min(sent),
        bytes_sent_high=max(sent),
        peak_allocated_low_bytes=min(peaks),
        peak_allocated_high_bytes=max(peaks),
        fits_at_both_ends=all(each.fits for each in every),
    )
    density = replace(
        result.density, push_low=push[0], push_high=push[1], publish_low=publish[0], publish_high=publish[1]
    )
    provenance = {**result.provenance, "gradient_statistics": statistics.source}
    return replace(simulated, result=replace(result, density=density, band=band, provenance=provenance))


LEAST_DENSITY = 1e-6
"""Lower densities count as this one when densities are compared."""


def record_steady_step(simulated: Simulated, *, unfolded: bool = False) -> Step:
    """Return the steady step for a trace: it is simulated again, with memory recorded over time."""
    program, scenario = simulated.shown or simulated.typical.machine.program, simulated.typical.scenario
    if "simulated_micro_batches" in simulated.result.provenance:
        raise UserError(
            f"{scenario.name}: run.extrapolate_micro_batches = true: a trace has all micro-batches of a step; "
            "allowed with a trace: false"
        )
    with no_collection():
        steady = run_until_steady(scenario, program, unfolded, Shared(), recorded=True)
    return step_of(steady.machine, steady.number)


def _predict(
    simulation: _Simulation,
    *,
    spread: bool,
    listed: bool,
    sizing: _Sizing = RESERVED,
    is_too_slow: Callable[[float], bool] | None = None,
) -> Simulated:
    scenario = simulation.scenario
    if scenario.policies.in_fragments:
        return _predict_fragments(simulation)
    if scenario.policies.sync_every_steps:
        return _predict_periods(simulation)
    if scenario.run.slowdowns or scenario.plan.shares.replan:
        return _predict_varying(simulation)
    if scenario.run.extrapolate_micro_batches:
        short = _predict_by_extrapolation(simulation, spread=spread)
        if short is not None:
            return short
    return _predict_steady(simulation, spread=spread, listed=listed, sizing=sizing, is_too_slow=is_too_slow)


def _predict_by_extrapolation(simulation: _Simulation, *, spread: bool) -> Simulated | None:
    """Return the prediction extrapolated from steps of few micro-batches; None if all of them must be simulated."""
    scenario, longer, allocated = simulation.scenario, 1, _Sizing(reserved=False)
    while (counts := simulated_counts(scenario, longer=longer)) is not None:
        *shorter, longest = (simulation.of(with_micro_batches(scenario, count)) for count in counts)
        few = [  # the last but one is extrapolated from; the first only shows whether the pace has settled
            _predict_steady(each, spread=spread, listed=each is shorter[-1], sizing=allocated).result
            for each in shorter
        ]
        if is_settled(few):
            [step] = longest.distinct_steps
            further = further_peaks(longest.steps().program(step), _program_for_memory(simulation))
            more = _predict_steady(longest, spread=spread, sizing=_Sizing(further=further))
            if is_settled([*few, more.result]):
                return Simulated(
                    extrapolate(scenario, few[-1], more.result, counts[1:], simulation.shared), more.typical
                )
        longer *= 2
    return None


def _predict_steady(
    simulation: _Simulation,
    slowed: Slowed = (),
    *,
    spread: bool = True,
    listed: bool = True,
    sizing: _Sizing = RESERVED,
    is_too_slow: Callable[[float], bool] | None = None,
) -> Simulated:
    """Return the prediction where all steps are equal; `spread`, `listed` and `is_too_slow`: see `simulate`.

    `slowed`: slow ranks with their compute time ratios.
    """
    steps, numbers = simulation.steps(slowed), simulation.distinct_steps
    median_step = _median_step(simulation, steps)
    typical = simulation.run(steps.program(median_step.number), is_too_slow=is_too_slow)
    traffic = [steps.traffic(number) for number in numbers]
    result = _result(
        simulation,
        typical,
        traffic,
        light_run=_run_light_step(simulation, steps, median_step, typical) if spread else typical,
        first=simulation.run(steps.program(numbers[0])) if median_step.first_thresholded else typical,
        excess_bytes=mean_excess_bytes(typical.machine.program, traffic, steps.traffic(median_step.number)),
        listed=listed,
        sizing=sizing,
    )
    return Simulated(result, typical)


class _MedianStep(NamedTuple):
    """The step that stands for all thresholded ones, and others of the run."""

    number: int
    """The step with the median payload."""
    light: int
    """The step whose payload a tenth of the thresholded steps do not exceed."""
    first_thresholded: int
    """Number of dense steps of the run before thresholding begins."""


def _median_step(simulation: _Simulation, steps: Steps) -> _MedianStep:
    numbers, first_thresholded = simulation.distinct_steps, _dense_steps(simulation.scenario)
    if len(numbers) == 1:
        steps.program(numbers[0])  # which also has its traffic
    sent_bytes = [steps.sent_bytes(number) for number in numbers]
    ordered = sorted(range(first_thresholded, len(numbers)), key=lambda place: sent_bytes[place])
    middle, light = (numbers[ordered[(len(ordered) - 1) // part]] for part in (2, 10))
    return _MedianStep(middle, light, first_thresholded)


def _dense_steps(scenario: Scenario) -> int:
    """Return the number of dense steps of the run before thresholding begins."""
    return max(0, scenario.push.warmup_steps - scenario.run.warmup_steps) if scenario.push.selects else 0


def _run_light_step(simulation: _Simulation, steps: Steps, median_step: _MedianStep, typical: SteadyRun) -> SteadyRun:
    """Return a run of `median_step.light`, without memory peaks; `typical`, the median step's run, if it is equal."""
    if steps.first_equal(median_step.light) == steps.first_equal(median_step.number):
        return typical
    return simulation.run(steps.program(median_step.light), peaks=False)


def _tenth_percentile_s(typical: SteadyRun, light_run: SteadyRun) -> float:
    """Return the tenth percentile of step times: that of the light step, but never more than the median step's time."""
    ordered_s = sorted(light_run.times_s)
    # a step that sends less may take longer, if more of it goes to the owner that others wait for
    return min(typical.time_s, ordered_s[len(ordered_s) // 10])


MAX_CACHED_RUNS = 4
"""Number of other scenarios whose runs and programs are always cached; few, because those of many ranks are large."""
MAX_CACHED_LAYERS = 2**15
"""Total number of layers (over all ranks and micro-batches) up to which further runs are cached: small runs, which a
sweep repeats on other networks. A layer is a few tasks of about 500 bytes each.
"""


def _cached_runs(scenario: Scenario) -> int:
    """Return how many runs to keep in the cache after simulating a scenario of this size."""
    of_model = sum(layer.repeats for layer in scenario.workload.model.layers)
    layers = scenario.ranks * of_model * scenario.plan.micro_batches
    return max(MAX_CACHED_RUNS, MAX_CACHED_LAYERS // layers)


def program_of(loaded: Loaded, shared: Shared, *, step: int | None = None) -> Program:
    """Return the program of a given step, or of the one that stands for all; it is cached in `shared` for the
    simulation.
    """
    simulation = _Simulation(loaded, shared)
    steps = simulation.steps()
    return steps.program(_median_step(simulation, steps).number if step is None else step)


def _program_for_memory(simulation: _Simulation) -> Program:
    """Return the program of the last step for the memory of its ranks alone."""
    scenario, statistics, shared = simulation.scenario, simulation.statistics, simulation.shared

    def new_program() -> Program:
        steps = Steps(scenario, statistics, unfolded=simulation.unfolded, shared=shared, for_memory=True)
        return steps.program(simulation.distinct_steps[-1])

    key = (*lowering_key(scenario, statistics, shared), simulation.unfolded)
    return shared.once("program for memory", key, new_program, most=MAX_CACHED_RUNS)


def _predict_varying(simulation: _Simulation) -> Simulated:
    """Return the prediction where steps differ. Shares, memory and bytes are those at the end of the run; phases, and
    the step by which links are measured, are a median step's. Where messages differ from step to step, so do the steps'
    times; the dense steps before thresholding begins count for neither the median nor the tenth percentile.
    """
    scenario, shared = simulation.scenario, simulation.shared
    by_segment: dict[Segment, Simulated] = {}
    times_of: dict[tuple[Segment, int], StepTimes] = {}
    """By the conditions of a step, and the first step with an equal program."""

    def under(segment: Segment) -> _Simulation:
        return simulation.of(scenario.with_shares(segment.samples, segment.shard_shares))

    def steady(segment: Segment) -> Simulated:
        if segment not in by_segment:
            by_segment[segment] = _predict_steady(under(segment), segment.slowed, spread=False)
        return by_segment[segment]

    def step_times(segment: Segment, step: int) -> StepTimes:
        typical, alike = steady(segment).typical, len(simulation.distinct_steps) == 1
        steps = under(segment).steps(segment.slowed)
        key = segment, 0 if alike else steps.first_equal(step)
        if key not in times_of:
            run = typical if alike else under(segment).run(steps.program(step), peaks=False)
            times_of[key] = StepTimes.of(run)
        return times_of[key]

    def measure(segment: Segment, step: int) -> StepReport:
        times = step_times(segment, step)
        number = step % len(times.step_times_s)
        compute_s, update_s = times.compute_s[number].tolist(), times.update_s[number].tolist()
        return StepReport(times.step_times_s[number], tuple(compute_s), tuple(update_s))

    run = simulate_steps(scenario, measure)
    times_s, counted = tuple(step.time_s for step in run.steps), run.steps[_dense_steps(scenario) :]
    counted_s = sorted(step.time_s for step in counted)
    typical, last = steady(typical_of(counted).segment), steady(run.last)
    step_time_s = median(counted_s)
    scale = step_time_s / typical.result.step_time_s
    misfits = [simulated.result.does_not_fit for simulated in by_segment.values() if simulated.result.does_not_fit]
    margins = [simulated.result.margin for simulated in by_segment.values() if simulated.result.margin]
    return Simulated(
        replace(
            last.result,
            scenario_id=scenario.identity(shared),
            scenario=scenario.resolved(shared),
            step_time_s=step_time_s,
            step_time_p10_s=counted_s[len(counted_s) // 10],
            step_times_s=times_s,
            phases_s={name: value * scale for name, value in typical.result.phases_s.items()},
            ranks=with_phases_of(last.result.ranks, typical.result.ranks, scale=scale),
            links=scale_utilisation(last.result.links, step_time_s / last.result.step_time_s),
            fits=not misfits,
            does_not_fit=max(misfits, key=lambda fit: fit.excess_bytes, default=None),
            margin=min(margins, key=lambda margin: margin.margin_bytes, default=None),
            throughput_samples_per_s=scenario.workload.global_batch_size / step_time_s,
            divisions=run.divisions,
            cost_usd_per_step=cost_usd(scenario, step_time_s),
            energy_j_per_step=energy_j(scenario, step_time_s, typical.result.ranks),
        ),
        typical.typical,
    )


def _predict_periods(simulation: _Simulation) -> Simulated:
    """Return the prediction where parameters are synchronized periodically; see [Note: periods simulated] in
    `periodic_run`.
    """
    scenario, every = simulation.scenario, simulation.scenario.policies.sync_every_steps or 1
    ranks = scenario.ranks
    runs: dict[int, SteadyRun] = {}
    """By identity of the period."""

    def inner(slowed: Slowed) -> InnerStep:
        steady = simulation.run(simulation.steps(slowed).program(0), replicas=scenario.policies.dp_replicate)
        times_s, phases_s = np.zeros(ranks), {name: np.zeros(ranks) for name in PHASES}
        for each, phases in zip(steady.machine.classes, phases_of(steady), strict=True):
            times_s[each.members] = median(end - start for start, end in pairwise(steady.ends_s[each.index]))
            for name in PHASES:
                phases_s[name][each.members] = phases[name]
        carried = carried_by(steady.machine) if scenario.policies.divides_replicas else None
        return InnerStep(times_s, phases_s, carried)

    def period_of(before: tuple[InnerStep, ...], slowed: Slowed) -> Period:
        steps = simulation.steps(slowed)
        apart_s = inner_steps_s(before, ranks)
        program = after_inner_steps(steps.program(every - 1), apart_s, count=len(before))
        steady = simulation.run(program)
        traffic, beside = [steps.traffic(every - 1)], inner_traffic(before)
        result = _result(simulation, steady, traffic, beside=beside)
        period = Period(before, steady.time_s - apart_s, result, outer_bytes_sent(steady))
        runs[id(period)] = steady
        return period

    result, typical = periodic_result(scenario, inner, period_of, simulation.shared)
    if not typical.inner:
        return Simulated(result, runs[id(typical)])
    steps = simulation.steps()
    apart_s = inner_steps_s(typical.inner[:-1], ranks)
    shown = after_inner_steps(steps.program(every - 1), apart_s, count=len(typical.inner), shown=steps.program(0))
    return Simulated(result, runs[id(typical)], shown)


def _predict_fragments(simulation: _Simulation) -> Simulated:
    """Return the prediction where fragments of the parameters are synchronized; see [Note: periods simulated] in
    `periodic_run`.
    """
    runs: dict[int, SteadyRun] = {}
    """By identity of the period."""

    def period_of(slowed: tuple[Slowed, ...]) -> FragmentPeriod:
        steps = simulation.steps(slowed_steps=slowed if any(slowed) else ())
        steady = simulation.run(steps.program(0))
        result = _result(simulation, steady, [steps.traffic(0)])
        period = FragmentPeriod(times_of_steps(steady).tolist(), result, outer_bytes_sent(steady))
        runs[id(period)] = steady
        return period

    result, typical = fragments_result(simulation.scenario, period_of, simulation.shared)
    return Simulated(result, runs[id(typical)])


def _result(
    simulation: _Simulation,
    typical: SteadyRun,
    traffic: Sequence[StepTraffic],
    *,
    light_run: SteadyRun | None = None,
    first: SteadyRun | None = None,
    excess_bytes: float = 0.0,
    listed: bool = True,
    beside: Carried | None = None,
    sizing: _Sizing = RESERVED,
) -> Result:
    """Return the Result of a run whose typical step is simulated.

    Args:
        simulation: the scenario, and how it is simulated.
        typical: the step that stands for all; of thresholded steps, the one with the median payload.
        traffic: traffic of every step of the run.
        light_run: the step whose payload a tenth of the steps do not exceed, if it differs from `typical`.
        first: the run's first step, if it differs from `typical`; the plan has to fit there as well.
        excess_bytes: see `mean_excess_bytes`.
        listed: see `simulate`.
        beside: bytes of other steps of the period, in which parameters are synchronized once.
        sizing: how the memory of `typical` is computed.
    """
    scenario, shared, machine = simulation.scenario, simulation.shared, typical.machine
    phases = settled_phases(typical)
    footprints = _footprints(scenario, typical, shared, sizing)
    first_footprints = footprints
    if first is not None and first is not typical:
        first_footprints = _footprints(scenario, first, shared, _Sizing(reserved=sizing.reserved))
    fit = worst_misfit(footprints) or worst_misfit(first_footprints) or host_misfit(scenario, machine.program)
    carried = machine.carried_by_rank()
    mean_ratio = mean_over_typical(float(carried[0].sum()) / machine.steps, excess_bytes)
    ranks = rank_classes(scenario, machine, phases, footprints, carried, mean_ratio=mean_ratio, beside=beside)
    left_out = (*unmeasured_host_time(scenario), *unmeasured_workspace(scenario))
    return Result(
        source="simulated",
        scenario_id=scenario.identity(shared),
        calibration_id=simulation.loaded.calibration(shared),
        scenario=scenario.resolved(shared),
        step_time_s=typical.time_s,
        step_time_p10_s=_tenth_percentile_s(typical, light_run or typical),
        phases_s=mean_phases(typical, phases),
        fits=fit is None,
        does_not_fit=fit,
        margin=tightest_margin([*footprints, *first_footprints]),
        throughput_samples_per_s=scenario.workload.global_batch_size / typical.time_s,
        density=Density(
            push=_mean([step.push_density for step in traffic]),
            publish=_mean([step.publish_density for step in traffic]),
        ),
        collectives=collectives_of(machine.program, traffic) if listed else (),
        links=(
            links_of(machine, typical.time_s, mean_ratio=mean_ratio, beside=beside)
            if listed
            else busiest_of(machine, typical.time_s, mean_ratio=mean_ratio)
        ),
        ranks=ranks,
        idle_devices=scenario.idle_devices,
        cost_usd_per_step=cost_usd(scenario, typical.time_s),
        energy_j_per_step=energy_j(scenario, typical.time_s, ranks),
        provenance={
            "gssim": installed_version("gssim"),
            "code": code_digest()[:SHOWN],
            **{name: installed_version(name) for name in NUMERICS},
            "python": platform.python_version(),
            "seed": scenario.run.seed,
            **({"uncounted": list(left_out)} if left_out else {}),
            **({"scaled_bytes": scaled} if (scaled := scenario.workload.scaled_bytes) else {}),
            **({"attention_of_cpu": why} if (why := scenario.attention_of_cpu) else {}),
        },
    )


def _mean(values: list[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _peaks(machine: Machine) -> list[PeakOfRank]:
    """Return for each class of ranks its first rank and its memory peak."""
    return [(each.representative, memory.peak) for each, memory in zip(machine.classes, machine.memory, strict=True)]


def _footprints(scenario: Scenario, steady: SteadyRun, shared: Shared, sizing: _Sizing) -> list[MemoryFootprint]:
    """Return the memory footprint of each class of ranks.

    They depend only on the program and its peaks, not on the network, and are cached accordingly.
    """
    program, peaks = steady.machine.program, _peaks(steady.machine)
    reserved, overheads, further = sizing
    key = (
        Same(program),
        reserved,
        tuple(rank for rank, _ in peaks),
        tuple(Same(peak) for _, peak in peaks),
        Same(overheads),
        Same(further),
    )
    return shared.once(
        "footprints",
        key,
        lambda: footprints_of(scenario, program, peaks, reserved=reserved, overheads=overheads, beside=further),
        most=_cached_runs(scenario),
    )
