"""Checks of a run: sizes, ranks, slow-downs and rebalancing."""

from gssim.errors import UserError
from gssim.plan import Policies
from gssim.scenario.scenario import Scenario
from gssim.units import excess


def check_sizes(scenario: Scenario, file: str) -> None:
    """Refuse steps whose lowering would exceed the limits."""
    layers = sum(layer.repeats for layer in scenario.workload.model.layers)
    run, micro_batches = scenario.run, scenario.plan.micro_batches
    sizes = [("layer_passes", layers * micro_batches, f"plan.micro_batches = {micro_batches}")]
    if scenario.plan.sends_by_data:
        sizes.append(("distinct_steps", run.warmup_steps + run.steps, f"run.steps = {run.steps}"))
    for name, size, key in sizes:
        if (why := excess(name, size)) is not None:
            raise UserError(f"{file}: {key}: {why}")


def check_slowdown(scenario: Scenario, policies: Policies, number: int, file: str) -> None:
    """Refuse a slow-down of a rank or at a step that does not exist, or under a plan that cannot have one yet."""
    where, slowdown = f"{file}: run.slowdowns[{number}]", scenario.run.slowdowns[number]
    if slowdown.rank >= policies.ranks:
        raise UserError(f"{where}.rank = {slowdown.rank}: the plan has {policies.ranks} ranks; allowed: a lower number")
    if slowdown.first_step >= scenario.run.steps:
        raise UserError(
            f"{where}.first_step = {slowdown.first_step}: the run has {scenario.run.steps} steps (run.steps); "
            "allowed: a lower number"
        )
    if policies.pp > 1:
        raise UserError(f"{where}: ranks of a pipeline cannot be slowed down yet; leave it out, or plan.pp")


def check_replanning(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse rebalancing where ranks have no samples of their own, or one has none at all."""
    if not scenario.plan.shares.replan:
        return
    where = f"{file}: plan.shares.replan = True"
    if policies.data_ranks != policies.ranks or policies.ranks == 1:
        raise UserError(
            f"{where}: method '{scenario.plan.method}' with plan.tp = {policies.tp} and plan.pp = {policies.pp} does "
            "not divide the batch among all ranks; allowed: ddp, zero1, zero2, zero3, gs, gs_z3, gs_hier on several"
        )
    if min(scenario.batch_sizes) == 0:
        rank = scenario.batch_sizes.index(0)
        raise UserError(f"{where}: rank {rank} has no samples to measure its speed by; give each rank at least one")


def check_ranks(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse mesh axes that the method does not use."""
    if scenario.plan.method == "single" and policies.ranks != 1:
        raise UserError(f"{file}: plan.method = 'single': takes one rank, but the mesh axes make {policies.ranks}")
    divided = policies.partition == "weight-gradient" or policies.pp > 1
    if policies.gradients == "local" and policies.data_ranks > 1 and not divided:
        raise UserError(
            f"{file}: plan.method = '{scenario.plan.method}': its gradients stay on the rank, but the mesh axes make "
            f"{policies.data_ranks} replicas; allowed: a method that divides the batch (ddp, zero1, zero2, zero3, gs) "
            "with plan.tp beside its own axis, or plan.gradients"
        )
    if policies.partition == "weight-gradient" and policies.dp_replicate > 1:
        raise UserError(
            f"{file}: plan.dp_replicate = {policies.dp_replicate}: method '{scenario.plan.method}' uses dp_shard"
        )
    both = policies.gradients == "reduce-scatter" or policies.push_axis == "dp_replicate"
    axis = {"all-reduce": "dp_replicate", "periodic": "dp_replicate", "push": "dp_shard"}.get(policies.gradients)
    for name in ("dp_replicate", "dp_shard"):
        if axis and not both and name != axis and getattr(policies, name) > 1:
            raise UserError(
                f"{file}: plan.{name} = {getattr(policies, name)}: method '{scenario.plan.method}' uses {axis}"
            )
