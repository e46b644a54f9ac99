"""Scenario in, Result out: lower, wire, run, read."""

import platform
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from gssim.machine import Machine
from gssim.program import Program, lower
from gssim.result import (
    Collective,
    Density,
    Fit,
    LinkUse,
    RankClass,
    Result,
    Span,
    merge_collectives,
    typical_phases,
)
from gssim.scenario import Loaded, Scenario

STEADY_STEPS = 2
"""The first step starts with all ranks together; the second shows the steady state."""
JITTERY_STEPS = 1 + 40
"""Where devices vary by chance, the median over many steps counts; they are drawn from the run's seed."""


@dataclass(frozen=True)
class Simulated:
    """A result and the spans of its steady step, which begins at 0."""

    result: Result
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Steady:
    """A simulated run in its steady state."""

    machine: Machine
    times_s: tuple[float, ...]
    """Of every steady step."""

    @property
    def time_s(self) -> float:
        """The median step."""
        return median(self.times_s)

    @property
    def start_s(self) -> float:
        """When a step of median length begins, on the last rank to begin it."""
        ordered = sorted(range(len(self.times_s)), key=lambda step: (self.times_s[step], step))
        return max(ends[ordered[(len(ordered) - 1) // 2]] for ends in self.machine.ends_s)


def simulate(loaded: Loaded) -> Simulated:
    """Return the prediction for a scenario.

    Where the push is thresholded, messages differ from step to step: the step with the median payload of the run
    stands for all, and density and payloads are means over exactly the run's steps.
    """
    scenario = loaded.scenario
    programs = _programs(loaded)
    ordered = sorted(programs, key=_payload_bytes)
    typical = _run(scenario, ordered[(len(ordered) - 1) // 2])
    lightest = _run(scenario, ordered[(len(ordered) - 1) // 10]) if len(ordered) > 1 else typical
    start_s, end_s = typical.start_s, typical.start_s + typical.time_s
    spans = tuple(
        replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in typical.machine.spans
        if span.end_s > start_s and span.start_s < end_s
    )
    return Simulated(_result(loaded, typical, lightest, programs), spans)


def _programs(loaded: Loaded) -> list[Program]:
    """Return the distinct programs of the run's steps: one, or one a step where messages depend on the data."""
    run = loaded.scenario.run
    if loaded.statistics_needed:
        steps = range(run.warmup_steps, run.warmup_steps + run.steps)
        return [lower(loaded.scenario, loaded.gradients, step=step) for step in steps]
    return [lower(loaded.scenario)]


def _payload_bytes(program: Program) -> float:
    return sum(c.payload_bytes for c in program.communications.values() if c.data_dependent)


def _run(scenario: Scenario, program: Program) -> _Steady:
    types = [scenario.cluster.type_of(rank) for rank in range(scenario.ranks)]
    jittery = any(device.step_jitter_ratio or device.task_jitter_ratio for device in types)
    machine = Machine(scenario.cluster, program, seed=scenario.run.seed)
    machine.run(JITTERY_STEPS if jittery else STEADY_STEPS)
    latest = [max(ends) for ends in zip(*machine.ends_s, strict=True)]
    return _Steady(machine, tuple(end - start for start, end in pairwise(latest)))


def _result(loaded: Loaded, typical: _Steady, lightest: _Steady, programs: list[Program]) -> Result:
    scenario, machine = loaded.scenario, typical.machine
    phases = [_phases(typical, rank) for rank in machine.ranks]
    phases_s = {name: fmean(phase[name] for phase in phases) for name in phases[0]}
    whole = sum(phases_s.values())  # ranks have their median steps at different times
    phases_s = {name: value * typical.time_s / whole for name, value in phases_s.items()} if whole else phases_s
    contexts = [scenario.cluster.type_of(rank).context_bytes for rank in machine.ranks]
    peaks = [memory.peak_bytes + context for memory, context in zip(machine.memory, contexts, strict=True)]
    fit = _misfit(scenario, machine, peaks)
    densities = [p.push_density for p in programs if p.push_density is not None]
    return Result(
        source="simulated",
        scenario_id=scenario.scenario_id,
        calibration_id=loaded.calibration_id,
        scenario=scenario.resolved(),
        step_time_s=typical.time_s,
        step_time_p10_s=sorted(lightest.times_s)[len(lightest.times_s) // 10],
        phases_s=phases_s,
        fits=fit is None,
        does_not_fit=fit,
        throughput_samples_per_s=scenario.workload.global_batch_size / typical.time_s,
        density=Density(push=fmean(densities) if densities else None),
        collectives=_collectives(programs),
        links=_links(machine, typical),
        ranks=_rank_classes(scenario, machine, phases),
        cost_usd_per_step=_cost_usd(scenario, typical.time_s),
        provenance={
            "gssim": _version("gssim"),
            "simpy": _version("simpy"),
            "python": platform.python_version(),
            "seed": scenario.run.seed,
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _phases(step: _Steady, rank: int) -> dict[str, float]:
    spans = [span for span in step.machine.spans if span.rank == rank]
    return typical_phases(spans, step.machine.ends_s[rank])


def _misfit(scenario: Scenario, machine: Machine, peaks: list[float]) -> Fit | None:
    """Return where memory is exceeded most, if anywhere."""
    excess = [peak - scenario.cluster.type_of(rank).memory_bytes for rank, peak in enumerate(peaks)]
    worst = max(machine.ranks, key=lambda rank: excess[rank])
    if excess[worst] <= 0:
        return None
    peak = machine.memory[worst].peak
    return Fit(rank=worst, category=max(peak, key=lambda category: peak[category]), excess_bytes=excess[worst])


def _collectives(programs: list[Program]) -> tuple[Collective, ...]:
    """Return one steady step's collectives; payloads of data-dependent ones are means over the programs."""
    entries = []
    for name, communication in programs[0].communications.items():
        payload = None
        if communication.data_dependent:
            payload = fmean(program.communications[name].payload_bytes for program in programs)
        entries.append(
            Collective(
                kind=communication.kind,
                group=communication.group,
                bytes=communication.size_bytes,
                count=1,
                payload_bytes=payload,
            )
        )
    return merge_collectives(entries)


def _links(machine: Machine, step: _Steady) -> tuple[LinkUse, ...]:
    network = machine.network
    return tuple(
        LinkUse(
            name=f"{source} -> {target}",
            bytes=carried / machine.steps,
            utilisation_ratio=min(1.0, carried / machine.steps / network.capacities[source, target] / step.time_s),
        )
        for (source, target), carried in network.carried.items()
    )


def _rank_classes(scenario: Scenario, machine: Machine, phases: list[dict[str, float]]) -> tuple[RankClass, ...]:
    """Return ranks with equal outcomes together."""
    classes: dict[str, dict[str, Any]] = {}
    members: dict[str, list[int]] = defaultdict(list)
    total = scenario.workload.global_batch_size
    for rank in machine.ranks:
        memory = machine.memory[rank]
        outcome = {
            "device": scenario.cluster.devices[rank].type,
            "peak_allocated_bytes": memory.peak_bytes,
            "peak_by_category_bytes": {k: v for k, v in sorted(memory.peak.items()) if v},
            "phases_s": phases[rank],
            "bytes_sent": machine.sent[rank] / machine.steps,
            "bytes_received": machine.received[rank] / machine.steps,
            "batch_share": scenario.batch_sizes[rank] / total,
            "shard_share": scenario.shard_shares[rank],
        }
        key = repr(outcome)
        classes[key] = outcome
        members[key].append(rank)
    return tuple(
        RankClass(ranks=tuple(members[key]), count=len(members[key]), **outcome) for key, outcome in classes.items()
    )


def _cost_usd(scenario: Scenario, step_time_s: float) -> float | None:
    prices = [scenario.cluster.type_of(rank).price_usd_per_h for rank in range(scenario.ranks)]
    known = [price for price in prices if price is not None]
    return sum(known) * step_time_s / 3600 if len(known) == len(prices) else None
