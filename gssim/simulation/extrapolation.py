"""Extrapolates a step of many micro-batches from simulated steps of few.

[Note: period] Once a pipeline is filled, its schedule repeats itself. Its period is one micro-batch or, with
interleaved stages, as many micro-batches as a pipeline has ranks. Steps are simulated whose numbers of micro-batches
differ by one period. Each missing period takes as long as the difference of the two longest, and sends as many bytes.
Step times are within 0.5 % of those of a simulation of all micro-batches (tests/laws/test_micro_batches.py); of a
pipeline on gloo, 1.5 % was seen.

[Note: settled] A filled pipeline does not have its final pace at once. As long as the slowest stage still has slack,
a further period takes what the way through all stages takes, which is less than the work of the slowest rank; messages
that wait for a link show only after some more. So three steps in a row are simulated. If the second period takes as
long as the first, and no less than the busiest rank computes in it, it counts; else all is done again with twice as
many micro-batches, until the pace has settled or the step has no more of them.

[Note: further memory] A rank's peak grows with the number of micro-batches because torch's pipelines have a receive
buffer for each of them, GPipe keeps the activations of all, and inputs are those of the whole batch. It does not grow
evenly: in a short step the peak may be in the update, in a long one before the first backward, and more outputs may be
on their way to a slower stage. So the program of all micro-batches is lowered, but not simulated. It has no messages
between stages, which take no memory. The allocator's overhead is that of the longest simulated step. It depends on
which freed blocks the tensors take, and so erratically on the number of micro-batches: of 32 MB, 24 micro-batches
showed 0.8 MB (the remainder of a block, which is less than 1 MiB), 20 or 30 of them 8 kB.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gssim.engine import MEMORY_STEPS, memory_after
from gssim.execution.cache import Shared
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.program import Program
from gssim.result import WAITING_PHASES, Collective, LinkUse, RankClass, Result
from gssim.scenario import Scenario
from gssim.simulation.footprint import Peak
from gssim.simulation.report import cost_usd, energy_j

SETTLED_RATIO = 1e-3
"""Largest difference of two periods, as a fraction, that counts as none; see [Note: settled]."""


def simulated_counts(scenario: Scenario, *, longer: int = 1) -> tuple[int, int, int] | None:
    """Return the three numbers of micro-batches to simulate, or None to simulate all of them: see [Note: period].

    All are simulated if there are hardly more than in the longest step, or if the micro-batches of a step differ,
    because batches are uneven or messages depend on the data. `longer`: factor on the shortest step, if the pace of
    shorter ones has not settled.
    """
    plan, ranks = scenario.plan, scenario.policies.pp
    interleaved = ranks > 1 and (len(scenario.stages) > ranks or plan.schedule in INTERLEAVED)
    period, few = (ranks, 2 * ranks) if interleaved else (1, max(2, ranks))
    count = plan.micro_batches
    uneven = plan.shares.batch != "even" or any(samples % count for samples in scenario.data_batch_sizes)
    varying = plan.sends_by_data or plan.shares.replan or bool(scenario.run.slowdowns)
    few *= longer
    if uneven or varying or count <= few + 2 * period or count % period:
        return None
    return few, few + period, few + 2 * period


def is_settled(steps: Sequence[Result]) -> bool:
    """Return whether further periods take as long as the last one, as far as two or three simulated steps show it.

    Two steps show it for the busiest rank alone; the periods between three are also compared. See [Note: settled].
    """
    periods_s = [after.step_time_s - before.step_time_s for before, after in pairwise(steps)]
    last_s = periods_s[-1]
    earlier = {rank: each for each in steps[-2].ranks for rank in each.ranks}

    def computed_s(each: RankClass) -> float:
        return sum(time_s for name, time_s in each.phases_s.items() if name not in WAITING_PHASES)

    busiest_s = max(computed_s(each) - computed_s(earlier[each.ranks[0]]) for each in steps[-1].ranks)
    steady = max(periods_s) - min(periods_s) <= SETTLED_RATIO * last_s
    return steady and last_s >= (1 - SETTLED_RATIO) * busiest_s


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


def further_peaks(simulated: Program, whole: Program) -> Mapping[int, Peak]:
    """Return what further micro-batches add to the peak of each role, in bytes by category; see [Note: further memory].

    Args:
        simulated: the program of the longest step that is simulated.
        whole: the program of the step with all micro-batches.
    """
    further = {}
    for role in range(len(simulated.tasks)):
        same_role = whole.role_of[simulated.role_of.index(role)]
        before = simulated.once(memory_after, role, MEMORY_STEPS).peak
        after = whole.once(memory_after, same_role, MEMORY_STEPS).peak
        added = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in before.keys() | after.keys()}
        further[role] = {category: size for category, size in sorted(added.items()) if size}
    return further


def extrapolate(scenario: Scenario, few: Result, more: Result, counts: tuple[int, int], shared: Shared) -> Result:
    """Return the Result of all micro-batches of a scenario.

    Args:
        scenario: the scenario, with its full number of micro-batches.
        few: the Result of the last but one of the simulated steps.
        more: the Result of the longest, which has one period more.
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
    before = {(each.kind, each.group, each.bytes): each for each in few}
    return tuple(_add_periods(before.get((each.kind, each.group, each.bytes)), each, periods) for each in more)


def _add_periods(before: Collective | None, after: Collective, periods: int) -> Collective:
    """Return a collective's calls, and what routers let these carry, after so many further periods."""
    count, carried_bytes = (0, 0.0) if before is None else (before.count, before.payload_bytes)
    payload_bytes = after.payload_bytes
    if payload_bytes is not None:
        payload_bytes += periods * (payload_bytes - (carried_bytes or 0.0))
    return replace(after, count=after.count + periods * (after.count - count), payload_bytes=payload_bytes)


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
