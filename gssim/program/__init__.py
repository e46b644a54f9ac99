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
from gssim.program.sharded import (
    Unit,
    gather_parameters,
    gather_parameters_twice,
    keep_parameters,
    reduce_scatter_gradients,
    units,
)
from gssim.program.task import Program, Task
from gssim.scenario import Scenario

__all__ = ["Bucket", "Lowering", "Program", "Task", "Unit", "lower", "units"]


def lower(
    scenario: Scenario, statistics: GradientStatistics | None = None, *, step: int = 0, unfolded: bool = False
) -> Program:
    """Return the program of one training step; `step` (from the first) matters where the push is thresholded.

    `unfolded`: every rank has a role of its own.
    """
    low = Lowering(scenario, statistics, step)
    policies = scenario.policies
    communicate: dict[str, Callable[[Lowering, int, list[Task]], list[Task]]] = {
        "local": keep_gradients,
        "all-reduce": all_reduce_gradients,
        "reduce-scatter": reduce_scatter_gradients,
        "push": push_gradients,
    }
    hold: dict[str, Callable[[Lowering, int, list[Task]], list[Task]]] = {
        "replicated": keep_parameters,
        "gathered": gather_parameters,
        "sharded": gather_parameters_twice,
    }
    roles, representatives = low.roles(unfolded=unfolded)
    alike: dict[tuple[object, ...], list[Task]] = {}
    ranks = []
    for rank in representatives:
        own = low.owned_ranges[rank] if low.deals_out_layers else policies.gradients == "push" and rank
        key = (low.scenario.cluster.devices[rank].type, low.batch_sizes[rank], own)
        if key not in alike:
            tasks = compute(low, rank, cut_at=cuts(low, policies.gradients))
            tasks = communicate[policies.gradients](low, rank, tasks)
            alike[key] = hold[policies.parameters](low, rank, tasks)
        ranks.append(tuple(optimize(low, rank, alike[key])))  # ranks that compute alike may own unequal shards
    return Program(
        tasks=tuple(ranks),
        communications=low.communications,
        persistent=tuple(persistent(low, rank) for rank in representatives),
        push_density=mean_density(low) if scenario.plan.push.threshold is not None else None,
        roles=tuple(roles.tolist()),
    )
