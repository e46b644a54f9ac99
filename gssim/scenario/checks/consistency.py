"""Consistency checks of a scenario: combinations of workload, plan and cluster that cannot run are refused."""

from typing import get_args

from gssim.cluster import applied, ends_of
from gssim.errors import UserError
from gssim.plan.policies import Policies, refuse_what_cannot_run
from gssim.scenario.checks.contexts import check_context
from gssim.scenario.checks.experts import check_experts
from gssim.scenario.checks.gradients import (
    check_compressor,
    check_exchange,
    check_offload,
    check_periods,
    check_publish,
    check_push,
    check_scalars,
    check_shares,
    check_weight_gradient_owners,
    refuse_unused_exchange,
)
from gssim.scenario.checks.pipelines import check_pipeline
from gssim.scenario.checks.slices import (
    check_divided_vocabulary,
    check_sequence_parts,
    check_slices,
    check_tensor_overlap,
)
from gssim.scenario.checks.training import (
    check_clipping,
    check_compiled,
    check_loss_scale,
    check_maps,
    check_muon,
    check_optimizer_state,
    check_recompute,
    check_reduction,
    check_traced_variants,
)
from gssim.scenario.scenario import Scenario
from gssim.units import excess
from gssim.workload import Implementation, Optimizer


def check(scenario: Scenario, *, file: str) -> None:
    """Raise UserError where workload, plan and cluster are inconsistent."""
    plan = scenario.plan
    try:
        policies = scenario.policies
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if not scenario.workload.model.layers:
        raise UserError(f"{file}: workload.model: has no layers; `gsreal trace` writes them")
    _check_measured_optimizers(scenario, file)
    check_traced_variants(scenario, policies, file)
    check_compiled(scenario, policies, file)
    check_sizes(scenario, file)
    check_push(scenario, policies, file)
    refuse_what_cannot_run(plan, policies, file=file)
    check_muon(scenario, policies, file)  # before shards are sized
    check_optimizer_state(scenario.workload, file)
    check_publish(scenario, policies, file)
    zero1 = (policies.gradients, policies.optimizer_state) == ("all-reduce", "sharded")
    if plan.zero1_implementation != "torch" and not zero1:
        raise UserError(
            f"{file}: plan.zero1_implementation = '{plan.zero1_implementation}': method '{plan.method}' is no ZeRO-1; "
            "allowed: method 'zero1', or leave it out"
        )
    check_exchange(scenario, policies, file)
    check_ranks(scenario, policies, file)
    check_shares(scenario, policies, file)
    check_pipeline(scenario, policies, file)
    check_slices(scenario, policies, file)
    check_sequence_parts(scenario, policies, file)
    check_tensor_overlap(scenario, policies, file)
    check_divided_vocabulary(scenario, policies, file)
    check_experts(scenario, policies, file)
    refuse_unused_exchange(plan, policies, file)
    check_context(scenario, policies, file)
    check_recompute(scenario, policies, file)
    _check_kept_gradients(scenario, policies, file)
    check_maps(scenario, file)
    check_reduction(scenario, policies, file)
    check_loss_scale(scenario, policies, file)
    check_clipping(scenario, policies, file)
    check_periods(scenario, policies, file)
    if policies.partition == "weight-gradient":
        check_weight_gradient_owners(scenario, policies, file)
    if scenario.network:
        try:
            ends_of(applied(scenario.cluster.wiring, scenario.network), scenario.network)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
    for number in range(len(scenario.run.slowdowns)):
        check_slowdown(scenario, policies, number, file)
    check_replanning(scenario, policies, file)
    check_compressor(scenario, policies, file)
    check_scalars(scenario, policies, file)
    check_offload(scenario, policies, file)


def _check_measured_optimizers(scenario: Scenario, file: str) -> None:
    """Raise UserError if a device has the time of an update that no workload could name."""
    names, implementations = get_args(Optimizer), get_args(Implementation)
    known = {*names, *(f"{name} {own}" for name in names for own in implementations)}
    for kind, device in scenario.cluster.device_types.items():
        unknown = sorted(device.optimizers.keys() - known)
        if unknown:
            raise UserError(
                f"{file}: cluster.device_types.{kind}.optimizers.{unknown[0]}: unknown key; allowed: "
                f"{', '.join(names)}, each alone or followed by {', '.join(implementations)}"
            )


def _check_kept_gradients(scenario: Scenario, policies: Policies, file: str) -> None:
    """Raise UserError if gradients are to be kept in a precision in which the plan has none."""
    workload = scenario.workload
    if workload.gradient_precision is None:
        return
    own = f"{file}: workload.gradient_precision = '{workload.gradient_precision}'"
    kept_whole = policies.partition == "data" and policies.parameters == "replicated" and policies.gradients != "push"
    if not kept_whole or (policies.frees_gradients and policies.pp == 1):
        method = scenario.plan.method
        raise UserError(f"{own}: method '{method}' keeps no whole gradients until the update; leave it out")
    if workload.precision == "fp64":
        raise UserError(
            f"{own}: workload.precision = 'fp64' has more digits; allowed: fp32, bf16, fp16, or leave it out"
        )


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
