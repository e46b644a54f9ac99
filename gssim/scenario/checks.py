"""What of workload, plan and cluster does not go together."""

from gssim.conditions import applied, ends_of
from gssim.plan import Plan, Policies, refuse_what_cannot_run
from gssim.scenario.question import Scenario
from gssim.units import UserError


def check(scenario: Scenario, *, file: str) -> None:
    """Raise UserError where workload, plan and cluster do not go together."""
    policies = scenario.policies
    _check_push(scenario.plan, policies, file)
    refuse_what_cannot_run(scenario.plan, policies, file=file)
    _check_ranks(scenario, policies, file)
    _check_shares(scenario, policies, file)
    if scenario.network:
        _check_conditions(scenario, file)


def _check_conditions(scenario: Scenario, file: str) -> None:
    try:
        ends_of(applied(scenario.cluster.wiring, scenario.network), scenario.network)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _check_ranks(scenario: Scenario, policies: Policies, file: str) -> None:
    devices = len(scenario.cluster.devices)
    if policies.ranks > devices:
        raise UserError(f"{file}: plan: needs {policies.ranks} ranks, but the cluster has {devices} devices")
    if scenario.plan.method == "single" and policies.ranks != 1:
        raise UserError(f"{file}: plan.method = 'single': takes one rank, but the mesh axes make {policies.ranks}")
    axis = {"all-reduce": "dp_replicate", "reduce-scatter": "dp_shard", "push": "dp_shard"}.get(policies.gradients)
    for name in ("dp_replicate", "dp_shard"):
        if axis and name != axis and getattr(policies, name) > 1:
            raise UserError(
                f"{file}: plan.{name} = {getattr(policies, name)}: method '{scenario.plan.method}' uses {axis}"
            )


def _check_push(plan: Plan, policies: Policies, file: str) -> None:
    if policies.gradients == "push":
        return
    default = Plan(method=plan.method).push
    for key in ("threshold", "kind", "error_feedback", "aggregate", "encoding", "warmup_steps"):
        value = getattr(plan.push, key)
        if value != getattr(default, key):
            raise UserError(
                f"{file}: plan.push.{key} = {value!r}: method '{plan.method}' pushes no gradients; "
                "allowed with gs, gs_z3, gs_hier"
            )
    if plan.publish.threshold is not None:
        raise UserError(f"{file}: plan.publish.threshold: method '{plan.method}' publishes no parameters")


def _check_shares(scenario: Scenario, policies: Policies, file: str) -> None:
    rules, total, ranks = scenario.plan.shares, scenario.workload.global_batch_size, policies.data_ranks
    for name, wanted in (("batch", rules.batch), ("shards", rules.shards)):
        if isinstance(wanted, str):
            continue
        if len(wanted) != ranks:
            raise UserError(f"{file}: plan.shares.{name}: {len(wanted)} shares for {ranks} ranks; give one per rank")
        if abs(sum(wanted) - 1) > 1e-6:
            raise UserError(f"{file}: plan.shares.{name} = {list(wanted)}: sums to {sum(wanted):.6g}, must sum to 1")
    _check_batch(rules.batch, total, ranks, file)
    if rules.shards != "even" and policies.gradients != "push":
        raise UserError(
            f"{file}: plan.shares.shards = {rules.shards!r}: method '{scenario.plan.method}' cannot shard unevenly; "
            "allowed: 'even'"
        )


def _check_batch(wanted: object, total: int, ranks: int, file: str) -> None:
    if wanted == "even" and total % ranks:
        raise UserError(
            f"{file}: workload.global_batch_size = {total}: cannot be divided evenly among {ranks} ranks; "
            "set plan.shares.batch or another size"
        )
    if isinstance(wanted, tuple):
        broken = [share for share in wanted if abs(share * total - round(share * total)) > 1e-6]
        if broken:
            raise UserError(
                f"{file}: plan.shares.batch = {list(wanted)}: {broken[0]} of global_batch_size = {total} "
                "is no whole number of samples"
            )
