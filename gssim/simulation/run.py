"""Scenario in, Result out: lower, wire, run, read."""

import gc
import platform
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from gssim.cache import Shared
from gssim.engine import Machine, RecordingTracker, is_jittery
from gssim.errors import UserError
from gssim.execution import NUMERICS, SHOWN, code_digest, installed_version
from gssim.program import Program, Steps, StepTraffic, lowering_key, unmeasured_host_time
from gssim.result import COMPUTE_PHASES, UPDATE_PHASES, Density, Result, Span, Step, typical_phases
from gssim.scenario import Loaded, Scenario, as_it_runs
from gssim.simulation.footprint import Occupancy, misfit, occupancies, tightest
from gssim.simulation.report import (
    collectives_of,
    cost_usd,
    energy_j,
    excess_bytes,
    links_of,
    mean_of_typical,
    rank_classes,
)
from gssim.simulation.timeline import step_of
from gssim.simulation.varying_run import Segment, Told, walk
from gssim.units import Floats

STEADY_STEPS = 2
"""The first step starts with all ranks together; the second shows the steady state."""
JITTERY_STEPS = 1 + 40
"""Where devices vary by chance, the median over many steps counts; they are drawn from the run's seed."""


@dataclass(frozen=True)
class Simulated:
    """A result and the spans of its steady step, which begins at 0."""

    result: Result
    typical: "_Steady"

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What occupied the streams in the steady step, from its beginning."""
        start_s, end_s = self.typical.start_s, self.typical.start_s + self.typical.time_s
        return tuple(
            Span(span.rank, span.stream, span.label, span.phase, span.start_s - start_s, span.end_s - start_s)
            for span in self.typical.machine.spans
            if span.end_s > start_s and span.start_s < end_s
        )

    @cached_property
    def paces(self) -> "Paces":
        """What the step tells where shares follow."""
        typical, ranks = self.typical, self.typical.scenario.ranks
        compute_s, update_s = (_times_in(typical, phases, ranks) for phases in (COMPUTE_PHASES, UPDATE_PHASES))
        return Paces(typical.times_s, compute_s, update_s)


@dataclass(frozen=True)
class Paces:
    """How long steady steps took, and each rank's own work in them: what it tells the others where shares follow."""

    step_times_s: tuple[float, ...]
    compute_s: Floats
    """By step and rank."""
    update_s: Floats
    """The same."""


@dataclass(frozen=True)
class _Steady:
    """A simulated run in its steady state."""

    scenario: Scenario
    machine: Machine
    ends_s: tuple[tuple[float, ...], ...]
    """By class of ranks: when the steps that count ended."""
    times_s: tuple[float, ...]
    """Of every steady step."""

    @cached_property
    def time_s(self) -> float:
        """The median step."""
        return median(self.times_s)

    @property
    def number(self) -> int:
        """Which step is of median length, of those that the machine has run."""
        ordered = sorted(range(len(self.times_s)), key=lambda step: (self.times_s[step], step))
        return ordered[(len(ordered) - 1) // 2]

    @property
    def start_s(self) -> float:
        """When a step of median length begins, on the last rank to begin it."""
        return max(ends[self.number] for ends in self.ends_s)


def simulate(loaded: Loaded, *, unfolded: bool = False, shared: Shared | None = None, spread: bool = True) -> Simulated:
    """Return the prediction for a scenario; `unfolded`: no ranks, links or flows are taken together.

    `shared`: what other scenarios that are simulated have in common with it. `spread`: whether `step_time_p10_s` is
    wanted; where steps' messages differ, it takes a simulation of its own, and is else the median step's.

    Where push or publish are thresholded, messages differ from step to step: the step with the median payload of the
    run stands for all that are thresholded; density, payloads and what ranks send are means over exactly the run's
    steps. Whether it fits goes by the dense steps at the start as well.
    """
    try:
        with no_collection():
            return _simulated(loaded, unfolded, shared or Shared(), spread=spread)
    except UserError as error:  # what shows only when the network is built
        raise UserError(f"{loaded.file}: {str(error).removeprefix(f'{loaded.file}: ')}") from None


def traced(simulated: Simulated, *, unfolded: bool = False) -> Step:
    """Return the steady step as a trace shows it: it is simulated once more, with an eye on memory."""
    program, scenario = simulated.typical.machine.program, simulated.typical.scenario
    with no_collection():
        steady = _run(scenario, program, unfolded, Shared(), recorded=True)
    return step_of(steady.machine, simulated.typical.number)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from looking for garbage: what a simulation makes lives as long as it does."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _simulated(loaded: Loaded, unfolded: bool, shared: Shared, *, spread: bool) -> Simulated:
    scenario = loaded.scenario
    if scenario.run.slowdowns or scenario.plan.shares.replan:
        return _walked(loaded, unfolded, shared)
    return _steady(loaded, unfolded, shared, spread=spread)


def _steady(
    loaded: Loaded,
    unfolded: bool,
    shared: Shared,
    slowed: Mapping[int, float] | None = None,
    *,
    spread: bool = True,
) -> Simulated:
    """Return the prediction where all steps are alike; `slowed`: ranks that are slower than their devices."""
    scenario = loaded.scenario
    steps = _steps(loaded, unfolded, shared, slowed or {})
    numbers = _distinct_steps(loaded)
    if len(numbers) == 1:
        steps.program(numbers[0])  # tells what it sends, too
    sent = [steps.traffic(number) for number in numbers]
    warm = _first_steady(scenario)
    ordered = sorted(range(warm, len(numbers)), key=lambda place: sent[place].whole_bytes)
    places = [ordered[(len(ordered) - 1) // part] for part in (2, 10)]
    middle, light = (numbers[place] for place in places)
    typical = _run(scenario, steps.program(middle), unfolded, shared)
    apart = spread and light != middle
    lightest = _run(scenario, steps.program(light), unfolded, shared) if apart else typical
    first = _run(scenario, steps.program(numbers[0]), unfolded, shared) if warm else typical
    excess = excess_bytes(typical.machine.program, sent, sent[places[0]])
    return Simulated(_result(loaded, typical, lightest, sent, first, shared, excess), typical)


MOST_STEPS = 4
"""Runs of other scenarios that are kept, with all that is known of their programs: those of many ranks are large."""


def _steps(loaded: Loaded, unfolded: bool, shared: Shared, slowed: Mapping[int, float]) -> Steps:
    """Return the programs of a run, the same for all scenarios that differ in nothing that lowering reads."""
    scenario, statistics = loaded.scenario, loaded.gradients if loaded.statistics_needed else None
    key = (*lowering_key(scenario, statistics, shared), unfolded, tuple(sorted(slowed.items())))

    def made() -> Steps:
        return Steps(scenario, statistics, unfolded=unfolded, slowed=slowed, shared=shared)

    return shared.once("steps", key, made, most=MOST_STEPS)


def program_of(loaded: Loaded, shared: Shared) -> Program:
    """Return the program of a steady step, where all steps are alike; a simulation with the same `shared` has it."""
    return _steps(loaded, False, shared, {}).program(_distinct_steps(loaded)[-1])


def _distinct_steps(loaded: Loaded) -> Sequence[int]:
    """Return the run's steps whose programs differ: the last, or all where messages depend on the data."""
    run = loaded.scenario.run
    steps = range(run.warmup_steps, run.warmup_steps + run.steps)
    return steps if loaded.statistics_needed else steps[-1:]


def _first_steady(scenario: Scenario) -> int:
    """Return how many of the run's steps are pushed densely before the threshold holds."""
    return max(0, scenario.push.warmup_steps - scenario.run.warmup_steps) if scenario.push.selects else 0


def _walked(loaded: Loaded, unfolded: bool, shared: Shared) -> Simulated:
    """Return the prediction where steps differ: what is by rank is that of the end, phases are of a median step."""
    scenario = loaded.scenario
    found: dict[Segment, Simulated] = {}

    def steady(segment: Segment) -> Simulated:
        if segment not in found:
            divided = replace(loaded, scenario=scenario.with_shares(segment.samples, segment.shard_shares))
            found[segment] = _steady(divided, unfolded, shared, dict(segment.slowed))
        return found[segment]

    def measure(segment: Segment, step: int) -> Told:
        paces = steady(segment).paces
        turn = step % len(paces.step_times_s)
        compute_s, update_s = paces.compute_s[turn].tolist(), paces.update_s[turn].tolist()
        return Told(paces.step_times_s[turn], tuple(compute_s), tuple(update_s))

    run = walk(scenario, measure)
    times_s = tuple(step.time_s for step in run.steps)
    typical, last = steady(run.typical.segment), steady(run.last)
    step_time_s = median(times_s)
    scale = step_time_s / typical.result.step_time_s
    misfits = [each.result.does_not_fit for each in found.values() if each.result.does_not_fit]
    margins = [each.result.margin for each in found.values() if each.result.margin]
    return Simulated(
        replace(
            last.result,
            scenario_id=scenario.identity(shared),
            scenario=scenario.resolved(shared),
            step_time_s=step_time_s,
            step_time_p10_s=sorted(times_s)[len(times_s) // 10],
            step_times_s=times_s,
            phases_s={name: value * scale for name, value in typical.result.phases_s.items()},
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


def _run(scenario: Scenario, program: Program, unfolded: bool, shared: Shared, *, recorded: bool = False) -> _Steady:
    seed = scenario.run.seed
    cluster = as_it_runs(scenario.cluster, scenario.workload)
    machine = Machine(cluster, program, conditions=scenario.network, seed=seed, unfolded=unfolded, shared=shared)
    if recorded:
        machine.memory = [RecordingTracker(memory.current, lambda: float(machine.env.now)) for memory in machine.memory]
    steps = JITTERY_STEPS if any(is_jittery(device) for device in machine.devices) else STEADY_STEPS
    # what is published meets the next step's work, which the last step of all does not have
    machine.run(steps + scenario.policies.publish_overlaps)
    ends_s = tuple(tuple(ends[:steps]) for ends in machine.ends_s)
    latest = [max(ends) for ends in zip(*ends_s, strict=True)]
    return _Steady(scenario, machine, ends_s, tuple(end - start for start, end in pairwise(latest)))


def _result(
    loaded: Loaded,
    typical: _Steady,
    lightest: _Steady,
    sent: Sequence[StepTraffic],
    first: _Steady,
    shared: Shared,
    excess: float,
) -> Result:
    scenario, machine = loaded.scenario, typical.machine
    phases = _phases(typical)
    counts = [len(each.members) for each in machine.classes]
    phases_s = {name: fmean([phase[name] for phase in phases], counts) for name in phases[0]}
    whole = sum(phases_s.values())  # ranks have their median steps at different times
    phases_s = {name: value * typical.time_s / whole for name, value in phases_s.items()} if whole else phases_s
    occupied = _occupied(scenario, typical)
    at_first = occupied if first is typical else _occupied(scenario, first)
    fit = misfit(occupied) or misfit(at_first)
    mean_ratio = mean_of_typical(machine, excess)
    ranks = rank_classes(scenario, machine, phases, occupied, mean_ratio=mean_ratio)
    return Result(
        source="simulated",
        scenario_id=scenario.identity(shared),
        calibration_id=loaded.calibration(shared),
        scenario=scenario.resolved(shared),
        step_time_s=typical.time_s,
        step_time_p10_s=sorted(lightest.times_s)[len(lightest.times_s) // 10],
        phases_s=phases_s,
        fits=fit is None,
        does_not_fit=fit,
        margin=tightest([*occupied, *at_first]),
        throughput_samples_per_s=scenario.workload.global_batch_size / typical.time_s,
        density=Density(
            push=_mean([each.push_density for each in sent]),
            publish=_mean([each.publish_density for each in sent]),
        ),
        collectives=collectives_of(machine.program, sent),
        links=links_of(machine, typical.time_s, mean_ratio=mean_ratio),
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
            **({"uncounted": list(left_out)} if (left_out := unmeasured_host_time(scenario)) else {}),
        },
    )


def _mean(values: list[float | None]) -> float | None:
    """Return the mean of those that there are."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def _phases(step: _Steady) -> list[dict[str, float]]:
    """Return the phases of each class's typical step."""
    ends_s, lockstep = step.ends_s, step.machine.vectorised
    if lockstep is not None and len(ends_s[0]) == STEADY_STEPS:
        return lockstep.phases(ends_s)
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in step.machine.spans:
        spans[span.rank].append(span)
    return [typical_phases(spans[each.representative], ends_s[each.index]) for each in step.machine.classes]


def _times_in(step: _Steady, phases: Collection[str], ranks: int) -> Floats:
    """Return how long each rank was in some phases, by steady step."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in step.machine.spans:
        if span.phase in phases and span.stream == "compute":
            spans[span.rank].append(span)
    found = np.zeros((len(step.times_s), ranks))
    for each in step.machine.classes:
        ends_s = np.array(step.ends_s[each.index])
        own = spans[each.representative]
        which = np.searchsorted(ends_s, [span.end_s for span in own], side="left") - 1
        lengths_s = np.array([span.end_s - span.start_s for span in own])
        for number in range(len(found)):
            found[number, each.members] = lengths_s[which == number].sum()
    return found


def _occupied(scenario: Scenario, step: _Steady) -> list[Occupancy]:
    """Return what each class of ranks needs of its device's memory."""
    machine = step.machine
    ranks = [each.representative for each in machine.classes]
    peaks = [(rank, memory.peak) for rank, memory in zip(ranks, machine.memory, strict=True)]
    return occupancies(scenario, machine.program, peaks)
