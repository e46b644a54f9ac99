"""Extrapolates a step of many micro-batches from two simulated steps of few.

[Note: period] Once a pipeline is filled, its schedule repeats itself. Its period is one micro-batch or, with
interleaved stages, as many micro-batches as a pipeline has ranks. Two steps are simulated whose numbers of
micro-batches differ by one period. Each missing period takes as long as that difference, and sends as many bytes. Step
times are within 0.5 % of those of a simulation of all micro-batches (tests/laws/test_micro_batches.py); of a pipeline
on gloo, 1.5 % was seen.

[Note: further memory] A rank's peak is a linear function of the number of micro-batches if it is reached in the
repeated part of the step, as it is in the larger of the two steps. It grows because torch's pipelines have a receive
buffer for each micro-batch, GPipe keeps the activations of all, and inputs are those of the whole batch. A third
program, one period longer, is lowered but not simulated: its peak shows what each further period adds.
It has no messages between stages, which take no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gssim.engine import MEMORY_STEPS, memory_after
from gssim.execution.cache import Shared
from gssim.program import Program
from gssim.result import Collective, LinkUse, RankClass, Result
from gssim.scenario import Scenario
from gssim.simulation.footprint import Peak
from gssim.simulation.report import cost_usd, energy_j


def simulated_counts(scenario: Scenario) -> tuple[int, int] | None:
    """Return the two numbers of micro-batches to simulate, or None to simulate all of them: see [Note: period].

    All are simulated if there are hardly more than in the larger step, or if the micro-batches of a step differ,
    because batches are uneven or messages depend on the data.
    """
    plan, ranks = scenario.plan, scenario.policies.pp
    interleaved = ranks > 1 and len(scenario.stages) > ranks
    period, few = (ranks, 2 * ranks) if interleaved else (1, max(2, ranks))
    count = plan.micro_batches
    uneven = plan.shares.batch != "even" or any(samples % count for samples in scenario.data_batch_sizes)
    varying = plan.sends_by_data or plan.shares.replan or bool(scenario.run.slowdowns)
    if uneven or varying or count <= few + period or count % period:
        return None
    return few, few + period


def with_micro_batches(scenario: Scenario, count: int) -> Scenario:
    """Return the scenario with `count` micro-batches of the same size."""
    workload, plan = scenario.workload, scenario.plan
    samples = workload.global_batch_size // plan.micro_batches * count
    return replace(
        scenario,
        workload=replace(workload, global_batch_size=samples),
        plan=replace(plan, micro_batches=count),
        run=replace(scenario.run, extrapolate_micro_batches=False),
    )


def further_peaks(more: Program, longest: Program, *, periods: float) -> Mapping[int, Peak]:
    """Return what further periods add to the peak of each role, in bytes by category; see [Note: further memory].

    Args:
        more: the program of the larger step that is simulated.
        longest: the program of a step with one period more.
        periods: how many periods the step to be predicted has beyond `more`.
    """
    further = {}
    for role in range(len(more.tasks)):
        same_role = longest.role_of[more.role_of.index(role)]
        before = more.once(memory_after, role, MEMORY_STEPS).peak
        after = longest.once(memory_after, same_role, MEMORY_STEPS).peak
        added = {category: size - before.get(category, 0.0) for category, size in after.items()}
        further[role] = {category: periods * size for category, size in added.items() if size}
    return further


def extrapolated(scenario: Scenario, few: Result, more: Result, counts: tuple[int, int], shared: Shared) -> Result:
    """Return the Result of all micro-batches of a scenario.

    Args:
        scenario: the scenario, with its full number of micro-batches.
        few: the Result of the step with fewer micro-batches.
        more: the Result of the step with one period more.
        counts: micro-batches of these two steps.
        shared: cache of the parts that scenarios have in common.
    """
    lacking, period = scenario.plan.micro_batches - counts[1], counts[1] - counts[0]

    def further(before: float, after: float) -> float:
        return after + lacking * (after - before) / period

    step_time_s = further(few.step_time_s, more.step_time_s)
    ranks = _ranks(few.ranks, more.ranks, lacking / period)
    links_before = {link.name: link for link in few.links}
    return replace(
        more,
        scenario_id=scenario.identity(shared),
        scenario=scenario.resolved(shared),
        step_time_s=step_time_s,
        step_time_p10_s=further(few.step_time_p10_s, more.step_time_p10_s),
        phases_s={name: further(few.phases_s[name], after) for name, after in more.phases_s.items()},
        throughput_samples_per_s=scenario.workload.global_batch_size / step_time_s,
        collectives=_collectives(few.collectives, more.collectives, lacking // period),
        links=tuple(
            LinkUse(
                name=link.name,
                count=link.count,
                bytes=further(links_before[link.name].bytes, link.bytes),
                utilisation_ratio=further(
                    links_before[link.name].utilisation_ratio * few.step_time_s,
                    link.utilisation_ratio * more.step_time_s,
                )
                / step_time_s,
            )
            for link in more.links
        ),
        ranks=ranks,
        cost_usd_per_step=cost_usd(scenario, step_time_s),
        energy_j_per_step=energy_j(scenario, step_time_s, ranks),
        provenance=more.provenance | {"simulated_micro_batches": counts[1]},
    )


def _collectives(few: Sequence[Collective], more: Sequence[Collective], periods: int) -> tuple[Collective, ...]:
    """Return the collectives of all micro-batches: each further period adds the same ones."""
    before = {(each.kind, each.group, each.bytes): each.count for each in few}
    counts = {each: each.count - before.get((each.kind, each.group, each.bytes), 0) for each in more}
    return tuple(replace(each, count=each.count + periods * further) for each, further in counts.items())


def _ranks(few: Sequence[RankClass], more: Sequence[RankClass], periods: float) -> tuple[RankClass, ...]:
    """Return the classes of ranks, with time and traffic extrapolated to all micro-batches; memory is the larger
    step's.
    """
    by_rank = {rank: rank_class for rank_class in few for rank in rank_class.ranks}

    def further(before: float | None, after: float | None) -> float | None:
        return None if before is None or after is None else after + periods * (after - before)

    ranks = []
    for after in more:
        before = by_rank[after.ranks[0]]
        phases_s = {name: s + periods * (s - before.phases_s[name]) for name, s in after.phases_s.items()}
        ranks.append(
            replace(
                after,
                phases_s=phases_s,
                bytes_sent=further(before.bytes_sent, after.bytes_sent),
                bytes_received=further(before.bytes_received, after.bytes_received),
            )
        )
    return tuple(ranks)
