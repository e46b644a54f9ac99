"""Limits that a plan must beat to be among the best, or on the front of time and memory, given the results so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gssim.planner.bounds import Bound
from gssim.result import Result
from gssim.scenario import Objective

FRONT_RATIO = 1.25
"""Longest step time on the front relative to the fastest: few users train even slower to save memory."""

ROUNDING = 1e-9
"""Relative tolerance of bounds, because they add up the same numbers in another order."""


def objective_of(result: Result, objective: Objective) -> float:
    """Return what a step takes by the objective: seconds, USD or J. The Result must have it."""
    values = {"step-time": result.step_time_s, "cost": result.cost_usd_per_step, "energy": result.energy_j_per_step}
    value = values[objective]
    assert value is not None
    return value


@dataclass(frozen=True)
class Limits:
    """Limits that one plan must beat; small enough to be sent to another process with the plan."""

    objective: Objective
    index: int
    """Index of the plan; of equally good plans, the one with the lowest index is preferred."""
    order: tuple[float, float]
    """(Objective, index) that the plan must be below to be among the best of some kind."""
    front: Sequence[tuple[float, float]]
    """Points (time, memory) of the plans on the front so far, the fastest first."""
    next_objective: float = math.inf
    """Least lower bound in the queue; a plan that takes long to simulate lets that one go first."""
    least_density: float | None = None
    """Smallest fraction of the gradients that the plan may push; None: any."""

    def rule_out(self, bound: Bound) -> bool:
        """Return whether a plan with this bound does not fit, or can be neither on the front nor among the best."""
        if bound.full_ratio > 1 + ROUNDING:
            return True
        before = (bound.objective * (1 - ROUNDING), self.index) < self.order
        return not before and not self.can_be_on_front(bound)

    def can_be_on_front(self, bound: Bound) -> bool:
        """Return whether a plan with this bound may be on the front: no result so far is better in both respects."""
        fastest_s = self.front[0][0] if self.front else math.inf
        least_s, least_full = bound.time_s * (1 - ROUNDING), bound.full_ratio * (1 - ROUNDING)
        return least_s <= FRONT_RATIO * fastest_s and not any(
            time_s <= least_s and full <= least_full and (time_s < least_s or full < least_full)
            for time_s, full in self.front
        )
