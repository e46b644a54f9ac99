"""The orthogonal policies that a plan comes to on a cluster: all that lowering and the real backend look at."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gssim.mesh import Mesh
from gssim.plan import Plan
from gssim.units import UserError

PRESETS: dict[str, dict[str, Any]] = {
    "single": {"parameters": "replicated", "gradients": "local", "optimizer_state": "replicated"},
    "ddp": {"parameters": "replicated", "gradients": "all-reduce", "optimizer_state": "replicated"},
    "zero1": {"parameters": "replicated", "gradients": "all-reduce", "optimizer_state": "sharded"},
    "zero2": {
        "parameters": "gathered",
        "gradients": "reduce-scatter",
        "optimizer_state": "sharded",
        "gradient_sync": "micro-batch",
    },
    "zero3": {
        "parameters": "sharded",
        "gradients": "reduce-scatter",
        "optimizer_state": "sharded",
        "gradient_sync": "micro-batch",
    },
    "pipeline": {"parameters": "replicated", "gradients": "local", "optimizer_state": "replicated"},
    "tensor": {"parameters": "replicated", "gradients": "local", "optimizer_state": "replicated"},
    "gs": {"parameters": "replicated", "gradients": "push", "optimizer_state": "sharded"},
    "gs_z3": {
        "parameters": "sharded",
        "gradients": "push",
        "optimizer_state": "sharded",
        "gradient_sync": "micro-batch",
    },
    "gs_wgrad": {
        "partition": "weight-gradient",
        "parameters": "replicated",
        "gradients": "local",
        "optimizer_state": "sharded",
    },
    "gs_tp": {
        "parameters": "replicated",
        "gradients": "local",
        "optimizer_state": "replicated",
        "slices": "shares",
    },
    "gs_hier": {
        "parameters": "replicated",
        "gradients": "push",
        "optimizer_state": "sharded",
        "push_axis": "dp_replicate",
    },
}
PRESETS["fsdp"] = PRESETS["zero3"]
PRESETS["hsdp"] = PRESETS["zero3"]

DATA_AXIS = {"ddp": "dp_replicate", "zero1": "dp_replicate", "pipeline": "pp", "tensor": "tp", "gs_tp": "tp"}
"""The mesh axis that takes all devices where the user sizes none; `dp_shard` for every method that is not here."""

TWO_LEVELS = ("hsdp", "gs_hier")
"""Methods that, where the user sizes no axis, shard inside hosts and replicate across them."""

RUNS_TODAY = frozenset(
    {
        ("replicated", "local", "replicated"),
        ("replicated", "all-reduce", "replicated"),
        ("replicated", "all-reduce", "sharded"),
        ("gathered", "reduce-scatter", "sharded"),
        ("sharded", "reduce-scatter", "sharded"),
        ("replicated", "push", "sharded"),
        ("gathered", "push", "sharded"),
        ("sharded", "push", "sharded"),
    }
)
"""(parameters, gradients, optimizer_state) that can be simulated; what cannot run for real yet, `gsreal` refuses."""
DIVIDES_WEIGHT_GRADIENTS = frozenset({("replicated", "local", "sharded")})
"""The same, where `partition` is weight-gradient."""


@dataclass(frozen=True)
class Policies:
    """A plan with every policy resolved: what lowering and the real backend go by."""

    partition: str
    parameters: str
    gradients: str
    gradient_sync: str
    optimizer_state: str
    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int
    push_axis: str = field(default="dp_shard", repr=False)
    """The data axis along which gradients are pushed; along the other one they are reduce-scattered first. It follows
    from the method, which is why it is no part of a scenario's identity."""
    slices: str = field(default="even", repr=False)
    """How the axis tp cuts blocks: `even`, natively where PyTorch can, or by the shard `shares`. (The method tells it
    already, so that it is no part of what identifies a scenario.)"""
    publish_overlaps: bool = field(default=False, repr=False)
    """Whether the next forward begins while published parameters are under way."""
    exchange: str = field(default="backend", repr=False)
    """`point-to-point` or `backend`. The scenario's identity, which goes by the repr, takes it up on its own."""

    @property
    def cuts_natively(self) -> bool:
        """Whether blocks of linear maps are cut by DTensor: evenly, where gradients are not those of replicas.

        DistributedDataParallel and Gradient Sharding take no DTensors.
        """
        replicas = self.gradients in ("all-reduce", "push") and self.data_ranks > 1
        return self.tp > 1 and self.slices == "even" and not replicas

    @property
    def point_to_point(self) -> bool:
        """Whether exchanges are made of point-to-point messages, not by the backend's collectives."""
        return self.exchange == "point-to-point"

    @property
    def mesh(self) -> Mesh:
        """The axes on which ranks stand."""
        return Mesh(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, tp=self.tp)

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the mesh axes."""
        return self.mesh.ranks

    @property
    def data_ranks(self) -> int:
        """Number of parts into which the batch is divided: one, for all, where ranks divide the weight gradients."""
        return 1 if self.partition == "weight-gradient" else self.mesh.data_ranks

    def data_rank(self, rank: int) -> int:
        """Return which of these parts a rank takes."""
        return 0 if self.partition == "weight-gradient" else self.mesh.data_rank(rank)


def usual_exchange(gradients: str, *, backend: str = "gloo") -> str:
    """Return what carries a method's gradients where the plan does not say.

    >>> usual_exchange("reduce-scatter"), usual_exchange("reduce-scatter", backend="nccl"), usual_exchange("all-reduce")
    ('point-to-point', 'backend', 'backend')
    """
    own = gradients == "push" or (gradients == "reduce-scatter" and backend == "gloo")
    return "point-to-point" if own else "backend"


def resolve(plan: Plan, *, devices: int, hosts: Sequence[str] = (), backend: str = "gloo") -> Policies:
    """Return the plan's policies on a cluster: the method's presets, overridden by what the user set.

    Axes that the user does not size take all `devices` on the method's own axis; `single` takes one. Methods of two
    levels take the devices of a host on one axis and the hosts on the other; `hosts` names each device's. Raises
    UserError where these are not equal.
    """
    preset = {"partition": "data", "gradient_sync": "step"} | PRESETS[plan.method]
    policies: dict[str, Any] = {
        name: getattr(plan, name) or preset[name]
        for name in ("partition", "parameters", "gradients", "gradient_sync", "optimizer_state")
    }
    policies["exchange"] = plan.exchange or usual_exchange(policies["gradients"], backend=backend)
    axes = {
        "dp_replicate": plan.dp_replicate or 1,
        "dp_shard": plan.dp_shard or 1,
        "tp": plan.tp,
        "pp": plan.pp,
    }
    sized = (plan.dp_replicate or plan.dp_shard) is not None or plan.tp > 1 or plan.pp > 1
    if plan.method in TWO_LEVELS:
        axes |= _levels(plan, hosts)
    elif not sized and plan.method != "single":
        axes[DATA_AXIS.get(plan.method, "dp_shard")] = devices
    return Policies(
        **policies | axes,
        push_axis=preset.get("push_axis", "dp_shard"),
        slices=preset.get("slices", "even"),
        publish_overlaps=_publish_overlaps(plan, policies),
    )


def _publish_overlaps(plan: Plan, policies: dict[str, Any]) -> bool:
    """Return whether parameters are published beside the next forward: only where the plan asks for it."""
    publishes = policies["gradients"] == "push" and policies["parameters"] == "replicated"
    return publishes and plan.overlap and bool(plan.publish.overlap)


def _levels(plan: Plan, hosts: Sequence[str]) -> dict[str, int]:
    """Return the sizes of the axes inside hosts and across them."""
    if (plan.dp_replicate is None) != (plan.dp_shard is None):
        given, missing = ("dp_shard", "dp_replicate") if plan.dp_shard else ("dp_replicate", "dp_shard")
        raise UserError(
            f"plan.{missing}: missing; beside plan.{given} = {plan.dp_shard or plan.dp_replicate}, method "
            f"'{plan.method}' needs it too, or neither: then a host's devices are dp_shard, and hosts dp_replicate"
        )
    if plan.dp_replicate and plan.dp_shard:
        return {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard}
    runs = [len(list(devices)) for _, devices in groupby(hosts)]
    if len(set(runs)) > 1 or len(runs) > len(set(hosts)):
        raise UserError(
            f"plan.method = '{plan.method}': hosts have {', '.join(map(str, runs))} devices one after another; "
            "set plan.dp_replicate and plan.dp_shard"
        )
    return {"dp_replicate": len(runs), "dp_shard": runs[0]} if runs else {}


def refuse_what_cannot_run(plan: Plan, policies: Policies, *, file: str) -> None:
    """Raise UserError for a policy that the project knows but cannot execute yet; nothing is ignored in silence."""
    _refuse_combination(plan, policies, file)
    if policies.parameters != "replicated" and policies.push_axis == "dp_replicate":
        raise UserError(
            f"{file}: plan.parameters = '{policies.parameters}': cannot run yet with method '{plan.method}'; "
            "allowed today: 'replicated'"
        )
    plain = policies.parameters == "replicated" and policies.push_axis == "dp_shard"
    if policies.gradients == "push" and not plain and not policies.point_to_point:
        raise UserError(
            f"{file}: plan.exchange = '{policies.exchange}': cannot run yet with method '{plan.method}'; "
            "allowed today: 'point-to-point'"
        )
    today = Plan(method=plan.method)
    if policies.gradients == "all-reduce":
        _refuse_unless_default(plan, today, "first_bucket_bytes", "plan.first_bucket_bytes", file)
    _refuse_unless_default(plan, today, "prefetch", "plan.prefetch", file)


def _refuse_combination(plan: Plan, policies: Policies, file: str) -> None:
    combination = (policies.parameters, policies.gradients, policies.optimizer_state)
    divides = policies.partition == "weight-gradient"
    if combination not in (DIVIDES_WEIGHT_GRADIENTS if divides else RUNS_TODAY):
        names = ("parameters", "gradients", "optimizer_state")
        chosen = ", ".join(f"{name} = '{value}'" for name, value in zip(names, combination, strict=True))
        raise UserError(
            f"{file}: plan.method = '{plan.method}': cannot run yet with {chosen}; allowed today: "
            f"what the methods {', '.join(PRESETS)} set themselves"
        )
    if policies.tp > 1 and divides:
        raise UserError(
            f"{file}: plan.tp = {policies.tp}: cannot run yet beside plan.partition = 'weight-gradient'; "
            "allowed today: 1"
        )


def _refuse_unless_default(table: Any, default: Any, key: str, path: str, file: str) -> None:
    value, allowed = getattr(table, key), getattr(default, key)
    if value != allowed:
        allowed_text = "leave it out" if allowed is None else f"allowed today: {allowed!r}"
        raise UserError(f"{file}: {path} = {value!r}: cannot run yet; {allowed_text}")
