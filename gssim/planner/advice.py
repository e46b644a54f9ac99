"""What to change where a plan does not fit, and what memory would then look like: lowered, never run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce

from gssim.engine import MemoryTracker
from gssim.errors import UserError
from gssim.program import lower
from gssim.result import Remedy, Result
from gssim.scenario import Loaded, Scenario, check
from gssim.simulation import MemoryFootprint, footprints_of, tightest_margin, worst_misfit

STEPS = 2
"""Steps that are added up: what the first leaves is there in the second."""
MOST_RANKS = 8192
"""More ranks than these are not asked for."""

MOST_PASSES = 2**13
"""More micro-batches than come to so many, times layers, are not asked for: each is lowered, and a step's answer should
not take longer than the step's prediction."""

Change = tuple[str, Callable[[Scenario], Scenario]]
"""What to change, as `--set` takes it or in words, and what makes of a scenario one that is changed so."""


def with_remedies(loaded: Loaded, result: Result) -> Result:
    """Return a Result that does not fit with what would change that; any other as it is."""
    return replace(result, remedies=remedies(loaded)) if result.does_not_fit is not None else result


def remedies(loaded: Loaded) -> tuple[Remedy, ...]:
    """Return what each of the usual changes gives, what helps most first; those that cannot be made are left out.

    Each is made alone: all blocks recomputed, as many micro-batches as all ranks have samples for (up to
    `MOST_PASSES`), nothing kept of what
    is not pushed, parameters sharded at rest (by Gradient Sharding or FSDP2), more ranks. Then those to the plan that
    help are made together, with the method that is nearer to the plan's own.
    """
    now_bytes = _needed_bytes(_occupied(loaded))
    plan = _plan_changes(loaded.scenario)
    methods = _method_changes(loaded.scenario)
    found, helping = [], []
    for change in [*plan, *methods, *_rank_changes(loaded.scenario)]:
        remedy = _remedy(loaded, [change], now_bytes)
        if remedy is not None and remedy.saved_bytes > 0:
            found.append(remedy)
            helping.append(change)
    together = [each for each in plan if each in helping] + [each for each in methods if each in helping][:1]
    if len(together) > 1 and (remedy := _remedy(loaded, together, now_bytes)) is not None:
        found.append(remedy)
    return tuple(sorted(found, key=lambda each: -each.saved_bytes))


def _remedy(loaded: Loaded, changes: Sequence[Change], now_bytes: float) -> Remedy | None:
    """Return what changes give together; None where they cannot be made."""
    try:
        scenario = reduce(lambda changed, change: change[1](changed), changes, loaded.scenario)
        check(scenario, file=loaded.file)
        found = _occupied(replace(loaded, scenario=scenario))
    except UserError:
        return None
    return Remedy(
        change=", ".join(name for name, _ in changes),
        fits=worst_misfit(found) is None,
        margin=tightest_margin(found),
        saved_bytes=now_bytes - _needed_bytes(found),
    )


def _occupied(loaded: Loaded) -> list[MemoryFootprint]:
    """Return what the first rank of each role needs, all tasks taken in the order of the program."""
    scenario = loaded.scenario
    statistics = loaded.gradients if loaded.statistics_needed else None
    program = lower(scenario, statistics, step=scenario.run.warmup_steps + scenario.run.steps - 1)
    peaks = []
    for role, tasks in enumerate(program.tasks):
        memory = MemoryTracker(dict(program.persistent[role]))
        for _ in range(STEPS):
            for task in tasks:
                memory.begin(task.stream, task.need)
                memory.end(task.stream)
        peaks.append((program.role_of.index(role), memory.peak))
    return footprints_of(scenario, program, peaks)


def _needed_bytes(found: Sequence[MemoryFootprint]) -> float:
    """Return what the rank needs whose device has least to spare."""
    least = min(found, key=lambda each: each.margin_bytes)
    return least.allocated_bytes + least.outside_bytes


# Changes -------------------------------------------------------------------------------------------------------------


def _plan_changes(scenario: Scenario) -> list[Change]:
    """Return changes within the method that the plan has not made yet."""
    plan = scenario.plan
    most = min((samples for samples in scenario.batch_sizes if samples), default=1)  # no rank can have more
    most = min(most, max(1, MOST_PASSES // sum(layer.repeats for layer in scenario.workload.model.layers)))
    found: list[Change] = []
    if plan.recompute != "full":
        found.append(("plan.recompute=full", partial(_with_plan, recompute="full")))
    if most > plan.micro_batches:
        found.append((f"plan.micro_batches={most}", partial(_with_plan, micro_batches=most)))
    if scenario.policies.gradients == "push" and scenario.push.error_feedback:
        found.append(("plan.push.error_feedback=false", _without_feedback))
    return found


def _method_changes(scenario: Scenario) -> list[Change]:
    """Return methods that shard parameters at rest, the one that is nearer to the plan's own first."""
    if scenario.policies.parameters == "sharded":
        return []
    methods = ("gs_z3", "zero3") if scenario.policies.gradients == "push" else ("zero3", "gs_z3")
    return [(f"plan.method={name}", partial(_by_method, method=name)) for name in methods]


def _rank_changes(scenario: Scenario) -> list[Change]:
    if scenario.plan.shares.shards == "cost":  # which hangs on how more devices would be wired
        return []
    times = [times for times in (2, 4) if times * scenario.ranks <= MOST_RANKS]
    return [(f"{times} times the ranks", partial(_with_ranks, times=times)) for times in times]


def _with_plan(scenario: Scenario, **settings: object) -> Scenario:
    return replace(scenario, plan=replace(scenario.plan, **settings))  # type: ignore[arg-type]


def _by_method(scenario: Scenario, method: str) -> Scenario:
    """Return the scenario with another method, which says itself what becomes of parameters and gradients."""
    return _with_plan(
        scenario,
        method=method,
        partition=None,
        parameters=None,
        gradients=None,
        gradient_sync=None,
        optimizer_state=None,
        zero1_implementation="torch",
    )


def _without_feedback(scenario: Scenario) -> Scenario:
    return _with_plan(scenario, push=replace(scenario.plan.push, error_feedback=False))


def _with_ranks(scenario: Scenario, times: int) -> Scenario:
    """Return the scenario on so many times the devices it uses, without wiring: memory does not ask for it."""
    cluster, used = scenario.cluster, scenario.cluster.devices[: scenario.ranks]
    more = [
        replace(device, name=f"{device.name} ({again})", host=f"{device.host} ({again})")
        for again in range(2, times + 1)
        for device in used
    ]
    bare = replace(cluster, topology=None, devices=(*used, *more), switches=(), links=())
    return replace(scenario, cluster=bare, plan=replace(scenario.plan, ranks=None))
