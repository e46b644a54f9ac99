"""How to divide the work, as the user wrote it; `gssim.plan.policies` resolves it on a cluster."""

from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import Field

from gssim.plan.methods import MethodName
from gssim.units import Count, NonNegativeFloat, PositiveBytes, PositiveFloat, PositiveInt, Threshold, spec

Partition = Literal["data", "weight-gradient"]
ParameterPolicy = Literal["replicated", "gathered", "sharded"]
GradientPolicy = Literal["local", "all-reduce", "reduce-scatter", "push"]
OptimizerPolicy = Literal["replicated", "sharded"]
ExchangePolicy = Literal["point-to-point", "backend"]
Shares = tuple[Annotated[float, Field(ge=0, le=1)], ...]

MIB = 2**20
DDP_FIRST_BUCKET_BYTES = 1 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
DDP_BUCKET_BYTES = 25 * MIB  # DistributedDataParallel(bucket_cap_mb=25)


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
    """Of what is kept."""
    aggregate: Literal["batch-weight", "received-weight"] = "batch-weight"
    """The owner weighs each rank's contribution by its part of the batch. `received-weight`: and divides the sum by the
    weight of those that came for an element, its own included."""
    encoding: Literal["auto", "coo", "bitmap", "dense"] = "auto"
    """`auto`: per message, whichever has the fewest bytes of `coo` (a value and an int32 index for each entry),
    `bitmap` (a value for each entry, a bit for each element) and `dense`; see `gssim.plan.encodings`."""
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
    """Let the next forward begin while published parameters are under way, each layer waiting for its own. Absent:
    false, for whatever else reads parameters after a step (a moving average, say) would find old values: it has to
    wait first. On gloo it gains nothing where every rank has but one core, which its threads share with the compute
    (measured on loopback: 1.02 times the step without, median of 20 pairs)."""

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
    """When the batch is divided anew at run time; how these work together: `gssim.plan.rebalancing`."""

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
    """`even`, `throughput` (by what the ranks can do in a time), or each part's fraction."""
    shards: Literal["even", "compute", "memory", "cost"] | Shares = "even"
    """What ranks own: `even`, in proportion to `compute` (the paper), `memory` (all devices equally full), `cost` (what
    pushes, updates and publications take, within memory), or each rank's fraction."""
    replan: bool = False
    """Change batch shares at run time as measured speeds change."""
    replanning: Replanning = field(default_factory=Replanning)
    """When, with `replan`."""


@spec
class Plan:
    """How to divide the work, as the user wrote it: a method, and any policy that overrides the method's."""

    method: MethodName
    """A preset of the policies below; what is set beside it counts."""
    ranks: PositiveInt | None = None
    """How many of the cluster's devices take part: the first so many. Absent: all of them (`single`: one). Those that
    are left out are named in the Result, as `idle_devices`."""
    dp_replicate: PositiveInt | None = None
    """Replicas of what is sharded, or of the whole model. Absent: what the other axes leave of the ranks, for methods
    that replicate, and for `zero2` and `zero3` where `dp_shard` is given; else 1. The sizes of all axes multiply to
    the number of ranks."""
    dp_shard: PositiveInt | None = None
    """Ranks among which state is sharded. Absent: what the other axes leave, for methods that shard; else 1."""
    tp: PositiveInt = 1
    """Ranks that share each block's tensors; of `tensor` and `gs_tp`, 1 means what the other axes leave."""
    pp: PositiveInt = 1
    """Ranks in a pipeline of stages; of `pipeline`, 1 means what the other axes leave."""
    partition: Partition | None = None
    """What ranks divide: the samples, or the weight gradients of the same samples. Absent: the method's."""
    parameters: ParameterPolicy | None = None
    """Whole on every rank; sharded at rest and gathered for a step; or gathered just in time. Absent: the method's."""
    gradients: GradientPolicy | None = None
    """How they come together. Absent: the method's."""
    gradient_sync: Literal["step", "micro-batch"] | None = None
    """When gradients leave a device under accumulation. Absent: the method's."""
    optimizer_state: OptimizerPolicy | None = None
    """Whole on every rank, or on the owners alone. Absent: the method's."""
    zero1_implementation: Literal["torch", "deepspeed"] = "torch"
    """Of `zero1`. `torch`: ZeroRedundancyOptimizer updates whole tensors, each broadcast by the rank that updates it.
    `deepspeed`: all parameters lie in one flat buffer, padded, of which each rank updates an even part, with a master
    copy of it whatever the precision; parts are all-gathered in buckets of 5e8 elements (predicted only)."""
    push: Push = field(default_factory=Push)
    """What is sent to owners."""
    publish: Publish = field(default_factory=Publish)
    """What owners send back."""
    shares: ShareRules = field(default_factory=ShareRules)
    """Who gets how much."""
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
    """Gradients are collected in buckets of so much (DDP, Gradient Sharding)."""
    first_bucket_bytes: PositiveBytes = DDP_FIRST_BUCKET_BYTES
    """The first one's, which is ready first."""
    overlap: bool = True
    """Let communication hide behind compute where the method and backend can."""
    exchange: ExchangePolicy | None = None
    """What carries reduce-scatters, gathers and pushes: point-to-point messages, in rings and exchanges of our own, or
    the backend's collectives. Absent: `point-to-point` on gloo (whose reduce-scatter moves an all-reduce's bytes) and
    for every push; else `backend`. All-reduces and broadcasts are always the backend's."""
    prefetch: Count | None = None
    """Not used yet: only its default is allowed."""

    @property
    def sends_by_data(self) -> bool:
        """Whether a threshold decides what is sent, so that a prediction needs gradient statistics."""
        return self.push.selects or self.publish.selects
