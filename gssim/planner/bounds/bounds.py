"""Lower bounds of a plan's step time, objective and memory.

[Note: bounds] Each rank computes all of its micro-batches through all of its layers, at best at its device's own speed,
and adds the gradients of later ones to those of earlier ones. Everything else (communication, waiting for others, the
update, contention with neighbouring devices) only adds time. While its largest micro-batch goes forward and backward, a
rank holds its activations as well as its persistent memory. Its collectives run one after another on their stream, and
take no less than each takes alone on idle links; links take no less than the bytes that cross them. (A GPU's host goes
on launching a layer while the device waits for a collective inside it, so that host times are not added to these.)
Terms that are not known to be lower bounds are left out. There are three bounds, each tighter and more expensive than
the one before: `of`, from the plan alone; `closer`, which adds communication, the memory of pipeline stages, and how
stages wait for each other; and the bounds of `LoweredBounds`, for a lowered plan (three in turn).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gssim.execution.cache import Same, Shared
from gssim.plan import Plan, Policies
from gssim.planner.bounds import jittered, lowered
from gssim.planner.bounds.collectives import CollectiveBounds
from gssim.planner.bounds.compute import ComputeBounds
from gssim.planner.bounds.memory import MemoryBounds
from gssim.planner.bounds.parts import ModelParts
from gssim.planner.bounds.pipeline import PipelineBounds
from gssim.planner.bounds.traffic import TrafficBounds
from gssim.scenario import Loaded, Objective, Scenario
from gssim.simulation import footprints_of, independent_peaks, is_steady, program_of, worst_misfit


@dataclass(frozen=True)
class Bound:
    """Lower bounds of a plan."""

    time_s: float
    objective: float
    """Lower bound of the objective, in its unit: seconds, USD or J per step."""
    full_ratio: float
    """Lower bound of the fraction of memory used on the fullest device."""

    def with_(self, other: "Bound") -> "Bound":
        """Return the tighter of two bounds in each respect.

        >>> Bound(2.0, 2.0, 0.5).with_(Bound(1.0, 1.0, 0.75))
        Bound(time_s=2.0, objective=2.0, full_ratio=0.75)
        """
        return Bound(
            max(self.time_s, other.time_s),
            max(self.objective, other.objective),
            max(self.full_ratio, other.full_ratio),
        )


class Bounds:
    """Lower bounds for plans of one workload on one cluster; values shared by many plans are computed once."""

    def __init__(self, scenario: Scenario, objective: Objective = "step-time") -> None:
        self.objective = objective
        self.parts = ModelParts(scenario)
        self.compute, self.memory, self.traffic = (
            ComputeBounds(self.parts),
            MemoryBounds(self.parts),
            TrafficBounds(self.parts),
        )
        self.pipeline = PipelineBounds(self.parts, self.compute, self.memory, self.traffic)

    def of(self, plan: Plan) -> Bound:
        """Return the bounds of a plan; raise UserError if it evidently cannot run."""
        policies = self.parts.policies(plan)
        by_rank = self._samples(plan, policies)
        busy_s = self.compute.busy_s(plan, policies, by_rank)
        time_s = max(*busy_s, self.compute.bubble_s(plan, policies, busy_s))
        full_ratio = self.memory.full_ratio(plan, policies, by_rank)
        return Bound(time_s, self._objective(time_s, busy_s), full_ratio)

    def closer(self, plan: Plan, bound: Bound) -> Bound:
        """Return a plan's bounds with communication and the memory of pipeline stages; `bound`: those without."""
        policies = self.parts.policies(plan)
        by_rank = self._samples(plan, policies)
        bound = replace(bound, full_ratio=max(bound.full_ratio, self.memory.stages_full_ratio(plan, policies, by_rank)))
        if bound.full_ratio > 1:  # the plan is ruled out by memory, however fast it may be
            return bound
        busy_s = self.compute.busy_s(plan, policies, by_rank)
        device_s = self.compute.busy_s(plan, policies, by_rank, issued=False)[0]
        least_s = self.traffic.least_s(plan, policies, busy_s=device_s)
        least_s = max(least_s, self.pipeline.least_s(plan, policies, by_rank))
        if least_s <= bound.time_s:
            return bound
        return replace(bound, time_s=least_s, objective=self._objective(least_s, busy_s))

    def _samples(self, plan: Plan, policies: Policies) -> tuple[int, ...]:
        """Return the number of samples that each rank trains on in a step."""
        sizes = self.parts.batch_sizes(plan, policies)
        return tuple(sizes[policies.data_rank(rank)] for rank in range(policies.ranks))

    def _objective(self, time_s: float, busy_s: Sequence[float]) -> float:
        """Return the lower bound of the objective (s, USD or J) for a step time and each rank's compute time."""
        return least(self.parts.scenario, self.objective, time_s, busy_s)


def least(scenario: Scenario, objective: Objective, time_s: float, busy_s: Sequence[float]) -> float:
    """Return the lower bound of the objective (s, USD or J) for a step time and each rank's compute time."""
    used = [scenario.cluster.type_of(rank) for rank in range(len(busy_s))]
    if objective == "cost":
        return sum(device.price_usd_per_h or 0.0 for device in used) * time_s / 3600
    if objective == "energy":
        idle_w = [min(device.idle_power_w or 0.0, device.busy_power_w or 0.0) for device in used]
        more_w = [max(0.0, (device.busy_power_w or 0.0) - idle) for device, idle in zip(used, idle_w, strict=True)]
        return sum(idle_w) * time_s + sum(w * s for w, s in zip(more_w, busy_s, strict=True))
    return time_s


class LoweredBounds:
    """Bounds of a plan from its lowered program; see [Note: lowered] in `lowered`.

    If thresholds let pass more in some steps than in others, the program is that of the step that stands for all.
    The program is cached in `shared`, for the simulation that may follow.
    """

    def __init__(self, loaded: Loaded, objective: Objective, shared: Shared) -> None:
        self.loaded, self.objective, self.shared = loaded, objective, shared
        self.program = program_of(loaded, shared)
        self.peaks = lowered.peaks(self.program)
        self.tasks = sum(map(len, self.program.tasks))
        """Number of tasks over all roles."""
        scenario = loaded.scenario
        key = (Same(scenario.cluster), scenario.network.faults, scenario.ranks)
        self.collectives = shared.once("bounded collectives", key, lambda: CollectiveBounds(scenario, shared))

    @staticmethod
    def apply_to(loaded: Loaded) -> bool:
        """Return whether a plan has such bounds, because its steps all do the same."""
        return is_steady(loaded.scenario)

    def allocated_bound(self) -> Bound:
        """Return the bound from the least step time and the allocated memory, without the allocator's overhead."""
        scenario = self.loaded.scenario
        full = 0.0 if self.peaks is None else lowered.full_ratio(scenario, self.program, self.peaks)
        alone_s = lowered.step_time_s(scenario, self.program, self.collectives)
        return self.of_time(max(alone_s, jittered.median_step_s(scenario, self.program, self.collectives)), full)

    def with_shared_links(self, bound: Bound) -> Bound:
        """Return a bound that includes the sharing of links by equal groups; see [Note: shared links] in `lowered`."""
        if not any(each.beside for each, _ in self.program.exchanges):
            return bound
        time_s = lowered.step_time_on_shared_links_s(self.loaded.scenario, self.program, self.collectives, self.shared)
        return bound if time_s <= bound.time_s else bound.with_(self.of_time(time_s, bound.full_ratio))

    def of_time(self, time_s: float, full_ratio: float) -> Bound:
        """Return the bound that follows from lower bounds of the step's time and of the memory."""
        if self.objective == "step-time":  # the compute of all ranks is not asked for
            return Bound(time_s, time_s, full_ratio)
        busy_s = lowered.busy_s(self.loaded.scenario, self.program)
        return Bound(time_s, least(self.loaded.scenario, self.objective, time_s, busy_s), full_ratio)

    def with_allocator_overhead(self, bound: Bound, rule_out: Callable[[Bound], bool] = lambda bound: False) -> Bound:
        """Return a bound that includes the allocator's overhead; its memory is as exact as a simulation's.

        Replaying the steps of ranks takes long: the fullest come first, and the others are left out once `rule_out`
        says that the bound so far suffices.
        """
        if self.peaks is None:
            return bound
        scenario, program = self.loaded.scenario, self.program
        for peaks in independent_peaks(scenario, program, self.peaks):
            occupied = footprints_of(scenario, program, peaks)
            fits = worst_misfit(occupied) is None
            full = max((each.reserved_bytes + each.outside_bytes) / each.memory_bytes for each in occupied)
            bound = replace(bound, full_ratio=max(bound.full_ratio, full) if fits else math.inf)
            if rule_out(bound):
                break
        return bound
