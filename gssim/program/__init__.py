"""What each rank does in one step, in order: tasks lowered from a scenario in passes, one pass per policy.

Tasks are known by their label, unique within a rank and the same as in a real run's trace. A task of the compute
stream runs after the one before it; `after` names tasks of other streams that it waits for as well.
"""

from collections.abc import Callable

from gssim.gradients import GradientStatistics
from gssim.program.compute import compute, cuts
from gssim.program.lowering import Bucket, Lowering
from gssim.program.optimizer import optimize, persistent
from gssim.program.push import mean_density, push_gradients
from gssim.program.replicated import all_reduce_gradients, keep_gradients
from gssim.program.sharded import Unit, gather_parameters, reduce_scatter_gradients, units
from gssim.program.task import Program, Task
from gssim.scenario import Scenario

__all__ = ["Bucket", "Lowering", "Program", "Task", "Unit", "lower", "units"]


def lower(scenario: Scenario, statistics: GradientStatistics | None = None, *, step: int = 0) -> Program:
    """Return the program of one training step; `step` (from the first) matters where the push is thresholded."""
    low = Lowering(scenario, statistics, step)
    policies = scenario.policies
    communicate: dict[str, Callable[[Lowering, int, list[Task]], list[Task]]] = {
        "local": keep_gradients,
        "all-reduce": all_reduce_gradients,
        "reduce-scatter": reduce_scatter_gradients,
        "push": push_gradients,
    }
    ranks = []
    for rank in low.group:
        tasks = compute(low, rank, cut_at=cuts(low, policies.gradients))
        tasks = communicate[policies.gradients](low, rank, tasks)
        if policies.parameters == "gathered":
            tasks = gather_parameters(low, rank, tasks)
        ranks.append(tuple(optimize(low, rank, tasks)))
    return Program(
        tasks=tuple(ranks),
        communications=low.communications,
        persistent=tuple(persistent(low, rank) for rank in low.group),
        push_density=mean_density(low) if scenario.plan.push.threshold is not None else None,
    )
