"""How to divide the work: orthogonal policies, and the named methods that preset them.

A `Plan` keeps what the user wrote; `resolve` fills in the method's presets and gives `Policies`, which is all that
lowering and the real backend look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from gssim.mesh import Mesh
from gssim.units import Count, NonNegativeFloat, PositiveBytes, PositiveFloat, PositiveInt, Threshold, UserError, spec

Method = Literal[
    "single",
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "hsdp",
    "pipeline",
    "tensor",
    "gs",
    "gs_z3",
    "gs_wgrad",
    "gs_tp",
    "gs_hier",
]
Partition = Literal["data", "weight-gradient"]
ParameterPolicy = Literal["replicated", "gathered", "sharded"]
GradientPolicy = Literal["local", "all-reduce", "reduce-scatter", "push"]
OptimizerPolicy = Literal["replicated", "sharded"]
ExchangePolicy = Literal["point-to-point", "backend"]
Shares = tuple[Annotated[float, Field(ge=0, le=1)], ...]

MIB = 2**20
DDP_FIRST_BUCKET_BYTES = 1 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
DDP_BUCKET_BYTES = 25 * MIB  # DistributedDataParallel(bucket_cap_mb=25)

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


@spec
class Push:
    """How gradients go to the owner of their shard. All but the encoding's `auto` needs a threshold."""

    threshold: Threshold | None = None
    """Gradients of smaller magnitude are not sent; absent: all are sent, densely; inf: none, the control of studies."""
    kind: Literal["absolute", "relative", "target-density"] = "absolute"
    """`relative`: the threshold is multiplied by the mean magnitude of the tensor, as a rank has accumulated it.
    `target-density`: it is the fraction of a tensor's elements to be sent; the magnitude that so many of them reach is
    estimated on each rank, and used until it is estimated again."""
    error_feedback: bool | None = None
    """Keep what was not sent and add it to the next step's gradient. Absent: on for SGD, with or without momentum,
    where contributions that are dropped shorten the step; off where its `aggregate` mends that, and for Adam, whose
    step does not depend on the gradient's scale and whose second moment suffers from the bursts of what is sent late
    (gradient-sharding F.4)."""
    error_feedback_precision: Literal["fp32", "bf16"] = "fp32"
    aggregate: Literal["batch-weight", "received-weight"] = "batch-weight"
    """The owner weighs each rank's contribution by its part of the batch. `received-weight`: and divides the sum by the
    weight of those that came for an element, its own included."""
    encoding: Literal["auto", "coo", "bitmap", "dense"] = "auto"
    """`auto`: per message, whichever has the fewest bytes of `coo` (a value and an int32 index for each entry),
    `bitmap` (a value for each entry, a bit for each element) and `dense`; see `gssim.encodings`."""
    warmup_steps: Count = 0
    """Steps at the start that are pushed densely, as if there were no threshold."""
    reestimate_steps: PositiveInt = 32
    """For `target-density`: how often the threshold is estimated again."""

    @property
    def selects(self) -> bool:
        """Whether what is sent depends on the gradients: some may stay under a threshold."""
        everything = 1.0 if self.kind == "target-density" else 0.0
        return self.threshold is not None and self.threshold != everything


def resolved_push(push: Push, *, sgd: bool) -> Push:
    """Return the push with what follows from the optimizer filled in; `sgd`: whether it is SGD.

    >>> [resolved_push(Push(threshold=1e-3), sgd=sgd).error_feedback for sgd in (True, False)]
    [True, False]
    """
    if push.error_feedback is not None:
        return push
    drops = push.threshold is not None and push.aggregate == "batch-weight"
    return replace(push, error_feedback=sgd and drops)


@spec
class Publish:
    """How updated parameters go back to the replicas."""

    threshold: NonNegativeFloat | None = None
    """Send only parameters that are at least this far from what was published of them; absent: all, densely. What is
    not sent stays in that difference: owners keep a master copy of their shard, whatever the precision."""
    kind: Literal["absolute", "relative"] = "absolute"
    """`relative`: the threshold is times the learning rate, which is about what Adam moves a parameter by in a step."""
    encoding: Literal["auto", "coo", "bitmap", "dense"] = "auto"
    """As of a push; of parameters, a dense message holds the whole range, those that did not change as well."""
    overlap: bool | None = None
    """Let the next forward begin while published parameters are under way, each layer waiting for its own. Absent: on
    nccl, where the plan lets communication overlap at all. On gloo it gains nothing where every rank has but one core,
    which its threads share with the compute (measured on loopback: 1.02 times the step without, median of 20 pairs)."""

    @property
    def selects(self) -> bool:
        """Whether what is sent depends on the parameters: some may stay under a threshold."""
        return bool(self.threshold)


def absolute_threshold(publish: Publish, learning_rate: float) -> float | None:
    """Return how far a parameter must be from what was published of it to be sent, where that is thresholded.

    >>> absolute_threshold(Publish(threshold=0.5, kind="relative"), learning_rate=0.25)
    0.125
    """
    if publish.threshold is None or publish.kind == "absolute":
        return publish.threshold
    return publish.threshold * learning_rate


@spec
class Replanning:
    """When the batch is divided anew at run time; how these work together: `gssim.shares.replanning`."""

    ewma_weight: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Of the newest observation of a rank's pace, in its running mean."""
    drift_ratio: Annotated[float, Field(gt=1)] = 1.25
    """Changes of a rank's pace by less than this are noise."""
    drift_limit: PositiveFloat = 1.0
    """Sum of what a rank's pace changed beyond that, as natural logarithms, one a step, from which on it counts."""
    hysteresis_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Of the slowest rank's time: what a new division must be expected to gain."""
    minimum_steps: PositiveInt = 5
    """Between two divisions, and before the first."""


@spec
class ShareRules:
    """Who gets how much: of the batch, and of the parameters that are sharded."""

    batch: Literal["even", "throughput"] | Shares = "even"
    shards: Literal["even", "compute", "memory", "cost"] | Shares = "even"
    replan: bool = False
    """Change batch shares at run time as measured speeds change."""
    replanning: Replanning = field(default_factory=Replanning)


@spec
class Plan:
    """How to divide the work, as the user wrote it: a method, and any policy that overrides the method's."""

    method: Method
    dp_replicate: PositiveInt | None = None
    dp_shard: PositiveInt | None = None
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    partition: Partition | None = None
    parameters: ParameterPolicy | None = None
    gradients: GradientPolicy | None = None
    gradient_sync: Literal["step", "micro-batch"] | None = None
    optimizer_state: OptimizerPolicy | None = None
    push: Push = field(default_factory=Push)
    publish: Publish = field(default_factory=Publish)
    shares: ShareRules = field(default_factory=ShareRules)
    recompute: Literal["none", "selective", "full"] = "none"
    """`full`: each block keeps only its input, and its backward runs its forward again (gradient checkpointing).
    `selective`: it keeps the outputs of compute-heavy operations too (matrix products, convolutions, attention), and
    only the others run again: torch's selective activation checkpointing."""
    micro_batches: PositiveInt = 1
    """Parts in which each rank takes its samples, one after another, before it updates (gradient accumulation)."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    """Of a pipeline; absent: 1f1b, or gpipe where there are fewer micro-batches than stages."""
    stages: tuple[PositiveInt, ...] | None = None
    """Layers of each pipeline stage; the loss goes with the last and is not counted. Absent: balanced, one stage a
    rank, two where interleaved. Interleaved plans may give each rank more."""
    bucket_bytes: PositiveBytes = DDP_BUCKET_BYTES
    first_bucket_bytes: PositiveBytes = DDP_FIRST_BUCKET_BYTES
    overlap: bool = True
    """Let communication hide behind compute where the method and backend can."""
    exchange: ExchangePolicy | None = None
    """What carries reduce-scatters, gathers and pushes: point-to-point messages, in rings and exchanges of our own, or
    the backend's collectives. Absent: `point-to-point` on gloo (whose reduce-scatter moves an all-reduce's bytes) and
    for every push; else `backend`. All-reduces and broadcasts are always the backend's."""
    prefetch: Count | None = None

    @property
    def sends_by_data(self) -> bool:
        """Whether a threshold decides what is sent, so that a prediction needs gradient statistics."""
        return self.push.selects or self.publish.selects


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
        publish_overlaps=_publish_overlaps(plan, policies, backend=backend),
    )


def _publish_overlaps(plan: Plan, policies: dict[str, Any], *, backend: str) -> bool:
    """Return whether parameters are published beside the next forward."""
    if policies["gradients"] != "push" or policies["parameters"] != "replicated" or not plan.overlap:
        return False
    return backend == "nccl" if plan.publish.overlap is None else plan.publish.overlap


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


def bucket_limits(plan: Plan, policies: Policies) -> tuple[float, float]:
    """Return (first, further) bucket limits in bytes.

    DistributedDataParallel closes its first bucket early only where its cap is the default one.
    """
    if policies.gradients == "all-reduce" and plan.bucket_bytes != DDP_BUCKET_BYTES:
        return plan.bucket_bytes, plan.bucket_bytes
    return plan.first_bucket_bytes, plan.bucket_bytes


def refuse_what_cannot_run(plan: Plan, policies: Policies, *, file: str) -> None:
    """Raise UserError for a policy that the project knows but cannot execute yet; nothing is ignored in silence."""
    combination = (policies.parameters, policies.gradients, policies.optimizer_state)
    composed = policies.tp > 1 and (policies.partition == "weight-gradient" or policies.pp > 1)
    runs = DIVIDES_WEIGHT_GRADIENTS if policies.partition == "weight-gradient" else RUNS_TODAY
    if combination not in runs or composed:
        allowed = ", ".join(PRESETS)
        raise UserError(f"{file}: plan.method = '{plan.method}': cannot run yet; allowed today: {allowed}")
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


def _refuse_unless_default(table: Any, default: Any, key: str, path: str, file: str) -> None:
    value, allowed = getattr(table, key), getattr(default, key)
    if value != allowed:
        allowed_text = "leave it out" if allowed is None else f"allowed today: {allowed!r}"
        raise UserError(f"{file}: {path} = {value!r}: cannot run yet; {allowed_text}")


def assign_buckets(sizes_bytes: Sequence[float], *, first_bytes: float, cap_bytes: float) -> list[list[int]]:
    """Return tensors (by position in `sizes_bytes`, the order in which gradients become ready) grouped into buckets.

    PyTorch's rule: a bucket closes once it holds at least its limit, `first_bytes` for the first, then `cap_bytes`.
    Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size, as rebuilt after step one.

    >>> assign_buckets([3, 3, 3, 3], first_bytes=4, cap_bytes=100)
    [[0, 1], [2, 3]]
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0.0
    limit = first_bytes
    for position, size in enumerate(sizes_bytes):
        current.append(position)
        held += size
        if held >= limit:
            buckets.append(current)
            current, held, limit = [], 0.0, cap_bytes
    if current:
        buckets.append(current)
    return buckets
