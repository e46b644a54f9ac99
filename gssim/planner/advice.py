"""Advice for a plan that does not fit: changes that save memory, each with its margin, found without simulation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from gssim.cluster import memory_node
from gssim.engine import MEMORY_STEPS, memory_after
from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.execution.garbage import no_collection
from gssim.program import Program, lower
from gssim.result import Result
from gssim.result.result import Remedy
from gssim.scenario import Loaded, Scenario, check
from gssim.simulation import (
    MemoryFootprint,
    deciding_footprints,
    host_margin,
    host_misfit,
    program_of,
    tightest_margin,
    worst_misfit,
)

MAX_RANKS = 8192
"""Suggestions use no more ranks than this."""

MAX_LAYER_PASSES = 2**13
"""Largest product of micro-batches and layers in suggestions: each is lowered, and advice should not take longer than
the prediction of a step.
"""

METHOD_DEFAULTS: dict[str, Any] = {
    "partition": None,
    "parameters": None,
    "gradients": None,
    "gradient_sync": None,
    "optimizer_state": None,
    "zero1_implementation": "torch",
    "zero2_implementation": "torch",
}
"""Settings of a plan that are reset to None with a change of method, so that the new method resolves them itself."""

Change = tuple[str, Callable[[Scenario], Scenario]]
"""A change (as `--set` takes it, or in words), and the function that applies it to a scenario."""


def with_suggested_changes(loaded: Loaded, result: Result, *, shared: Shared | None = None) -> Result:
    """Return a Result, with suggested changes if it does not fit.

    `shared`: the cache with which it was simulated; its program need not be lowered again then.
    """
    if result.does_not_fit is None:
        return result
    with no_collection():
        return replace(result, remedies=suggested_changes(loaded, shared))


def suggested_changes(loaded: Loaded, shared: Shared | None = None) -> tuple[Remedy, ...]:
    """Return the effect of each of the usual changes, the most helpful first; impossible ones are left out.

    Each change is applied alone: recompute all blocks; use as many micro-batches as all ranks have samples for (up to
    `MAX_LAYER_PASSES`); shard replicas that synchronize periodically inside hosts; keep state in host memory, if its
    size is known; drop the residuals of thresholded pushes; shard parameters at rest (with Gradient Sharding or FSDP2);
    use more ranks. Finally the helpful changes to the plan are applied together, with the method that is closer to the
    plan's own.
    """
    scenario, run, shared = loaded.scenario, loaded.scenario.run, shared or Shared()
    program = program_of(loaded, shared, step=run.warmup_steps + run.steps - 1)
    footprints = _footprints(scenario, program)
    of_host = worst_misfit(footprints) is None and host_misfit(scenario, program) is not None
    now_bytes = _needed_bytes(scenario, program, footprints, of_host=of_host)
    plan, methods, ranks = _plan_changes(scenario), list[Change](), list[Change]()
    if scenario.policies.parameters != "sharded":  # the method that is closer to the plan's own first
        names = ("gs_z3", "zero3") if scenario.policies.gradients == "push" else ("zero3", "gs_z3")
        methods = [(f"plan.method={name}", partial(_with_plan, method=name, **METHOD_DEFAULTS)) for name in names]
    if scenario.plan.shares.shards != "cost":  # which depends on the wiring of the added devices
        multiples = [times for times in (2, 4) if times * scenario.ranks <= MAX_RANKS]
        ranks = [(f"{times} times the ranks", partial(_with_ranks, times=times)) for times in multiples]
    remedy_of = partial(_remedy, loaded, shared, now_bytes=now_bytes, of_host=of_host)
    suggestions, helpful = [], []
    for change in [*plan, *methods, *ranks]:
        remedy = remedy_of([change])
        if remedy is not None and remedy.saved_bytes > 0:
            suggestions.append(remedy)
            helpful.append(change)
    combined = [each for each in plan if each in helpful] + [each for each in methods if each in helpful][:1]
    if len(combined) > 1 and (remedy := remedy_of(combined)) is not None:
        suggestions.append(remedy)
    return tuple(sorted(suggestions, key=lambda each: -each.saved_bytes))


def _remedy(
    loaded: Loaded, shared: Shared, changes: Sequence[Change], *, now_bytes: float, of_host: bool
) -> Remedy | None:
    """Return the effect of changes applied together; None if they are impossible.

    `of_host`: whether it is the hosts' memory that is lacking, in which they then have to save.
    """
    try:
        scenario = reduce(lambda changed, change: change[1](changed), changes, loaded.scenario)
        check(scenario, file=loaded.file)
        statistics = loaded.gradients if replace(loaded, scenario=scenario).statistics_needed else None
        program = lower(scenario, statistics, step=scenario.run.warmup_steps + scenario.run.steps - 1, shared=shared)
        footprints = _footprints(scenario, program)
    except UserError:
        return None
    devices_suffice, hosts_suffice = worst_misfit(footprints) is None, host_misfit(scenario, program) is None
    margin = tightest_margin(footprints)
    if devices_suffice and not hosts_suffice:
        margin = host_margin(scenario, program) or margin
    return Remedy(
        change=", ".join(name for name, _ in changes),
        fits=devices_suffice and hosts_suffice,
        margin=margin,
        saved_bytes=now_bytes - _needed_bytes(scenario, program, footprints, of_host=of_host),
    )


def _footprints(scenario: Scenario, program: Program) -> Sequence[MemoryFootprint]:
    """Return the footprint of the first rank of each role, with all tasks in the order of the program."""
    roles = range(len(program.tasks))
    peaks = [(program.role_of.index(role), program.once(memory_after, role, MEMORY_STEPS).peak) for role in roles]
    return deciding_footprints(scenario, program, peaks)


def _needed_bytes(
    scenario: Scenario, program: Program, footprints: Sequence[MemoryFootprint], *, of_host: bool
) -> float:
    """Return the bytes needed by the rank whose device has the least to spare, or (`of_host`) on the fullest host."""
    if of_host:
        on_host = host_margin(scenario, program)
        return 0.0 if on_host is None else on_host.memory_bytes - on_host.margin_bytes
    least = min(footprints, key=lambda each: each.margin_bytes)
    return least.allocated_bytes + least.outside_bytes


# Changes -------------------------------------------------------------------------------------------------------------


def _plan_changes(scenario: Scenario) -> list[Change]:
    """Return the changes within the plan's method that the plan has not made yet."""
    plan = scenario.plan
    most = min((samples for samples in scenario.batch_sizes if samples), default=1)  # no rank can have more
    most = min(most, max(1, MAX_LAYER_PASSES // sum(layer.repeats for layer in scenario.workload.model.layers)))
    changes: list[Change] = []
    if plan.recompute != "full":
        changes.append(("plan.recompute=full", partial(_with_plan, recompute="full")))
    if scenario.policies.sync_every_steps and scenario.policies.replica_size == 1:
        on_host = sum(device.host == scenario.cluster.devices[0].host for device in scenario.cluster.devices)
        if on_host > 1 and scenario.ranks % on_host == 0:
            axes: dict[str, Any] = {"dp_shard": on_host}
            if plan.dp_replicate:
                axes["dp_replicate"] = scenario.ranks // on_host
            named = ", ".join(f"plan.{name}={size}" for name, size in axes.items())
            changes.append((named, partial(_with_plan, **axes)))
    if plan.offload is None and scenario.cluster.host is not None:
        kind = "parameters" if scenario.policies.gradients == "reduce-scatter" else "optimizer"
        changes.append((f"plan.offload={kind}", partial(_with_plan, offload=kind)))
    if most > plan.micro_batches:
        changes.append((f"plan.micro_batches={most}", partial(_with_plan, micro_batches=most)))
    if scenario.policies.gradients == "push" and scenario.push.error_feedback:
        without_residuals = replace(plan.push, error_feedback=False)
        changes.append(("plan.push.error_feedback=false", partial(_with_plan, push=without_residuals)))
    return changes


def _with_plan(scenario: Scenario, **settings: object) -> Scenario:
    return replace(scenario, plan=replace(scenario.plan, **settings))  # type: ignore[arg-type]


def _with_ranks(scenario: Scenario, times: int) -> Scenario:
    """Return the scenario on a multiple of its devices, without wiring, on which memory does not depend."""
    cluster, used = scenario.cluster, scenario.cluster.devices[: scenario.ranks]
    more = [
        replace(device, name=f"{device.name} ({again})", host=f"{device.host} ({again})")
        for again in range(2, times + 1)
        for device in used
    ]
    memories = tuple(dict.fromkeys(memory_node(device.host) for device in (*used, *more)))  # offloaded state needs them
    bare = replace(cluster, topology=None, devices=(*used, *more), switches=memories, links=())
    return replace(scenario, cluster=bare, plan=replace(scenario.plan, ranks=None))
