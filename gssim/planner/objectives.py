"""What a plan must beat to be wanted, as of what has been found so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gssim.planner.bounds import Bound
from gssim.result import Result
from gssim.scenario import Objective

FRONT_RATIO = 1.25
"""Few train so much longer to save memory that nothing else wants."""

ROUNDING = 1e-9
"""By which bounds may exceed what they bound: they add up the same numbers in another order."""


def objective_of(result: Result, objective: Objective) -> float:
    """Return what is searched for, of a plan."""
    values = {"step-time": result.step_time_s, "cost": result.cost_usd_per_step, "energy": result.energy_j_per_step}
    found = values[objective]
    assert found is not None
    return found


@dataclass(frozen=True)
class Limits:
    """What one plan must beat: small enough to be handed to another process with it."""

    objective: Objective
    index: int
    """The plan's: of equally good ones the first counts."""
    order: tuple[float, float]
    """Objective and index of what it must come before, to be among the best of some kind."""
    front: Sequence[tuple[float, float]]
    """Times and how full the fullest device is, of the plans on the front so far, the fastest first."""
    next_objective: float = math.inf
    """The least that a plan can reach which waits: one that takes long to simulate lets it go first."""

    def rule_out(self, bound: Bound) -> bool:
        """Return whether a plan with such a bound fits nowhere, or can be neither on the front nor among the best."""
        if bound.full_ratio > 1 + ROUNDING:
            return True
        before = (bound.objective * (1 - ROUNDING), self.index) < self.order
        return not before and not self.can_be_on_front(bound)

    def can_be_on_front(self, bound: Bound) -> bool:
        """Return whether a plan with such a bound may be on the front: nothing found is better than it in both."""
        fastest_s = self.front[0][0] if self.front else math.inf
        least_s, least_full = bound.time_s * (1 - ROUNDING), bound.full_ratio * (1 - ROUNDING)
        return least_s <= FRONT_RATIO * fastest_s and not any(
            time_s <= least_s and full <= least_full and (time_s < least_s or full < least_full)
            for time_s, full in self.front
        )
