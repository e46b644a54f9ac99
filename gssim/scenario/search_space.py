"""The search space of `gssim search`: the table `[search]` of a scenario."""

from typing import Annotated, Literal

from pydantic import Field

from gssim.plan import METHODS, MethodName
from gssim.plan.pipeline_schedule import ScheduleName
from gssim.units import NonNegativeFloat, PositiveFloat, PositiveInt, Recompute, Threshold, spec

Objective = Literal["step-time", "cost", "energy"]
Choice = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
SEARCHED_METHODS: tuple[MethodName, ...] = tuple(name for name, method in METHODS.items() if method.searched)


@spec
class SearchSpace:
    """The plans to search: every valid combination of the options below. All else stays as in the scenario."""

    objective: Objective = "step-time"
    """Quantity to minimise: the time, the price or the energy of a step."""
    methods: Annotated[tuple[MethodName, ...], Field(min_length=1)] = SEARCHED_METHODS
    """Methods to search; those that cannot run on the cluster are left out."""
    devices: Choice | None = None
    """Numbers of devices; the cluster's first ones are used. Absent: all (or `plan.ranks`), and the devices up to the
    end of each host."""
    tp: Choice | None = None
    """Tensor-parallel sizes. Absent: divisors of the number of devices, up to the devices of the largest host."""
    pp: Choice | None = None
    """Pipeline sizes. Absent: all divisors of the number of devices."""
    cp: Choice | None = None
    """Context-parallel sizes. Absent: 1, and the size in the scenario's plan."""
    ep: Choice | None = None
    """Numbers of ranks among which experts are divided. Absent: 1, the size in the scenario's plan and, if the model's
    experts can be divided, the number of devices of a host."""
    sequence_parallel: Annotated[tuple[bool, ...], Field(min_length=1)] | None = None
    """Whether to use sequence parallelism (`plan.sequence_parallel`) with tensor parallelism; list both to try both.
    Absent: as in the scenario's plan, or where tensor-parallel ranks divide experts."""
    schedules: Annotated[tuple[ScheduleName, ...], Field(min_length=1)] | None = None
    """Schedules of pipelines. Absent: the scenario's own."""
    micro_batches: Choice | None = None
    """Numbers of micro-batches. Absent: powers of two, up to the samples of each part of an evenly split batch."""
    recompute: Annotated[tuple[Recompute, ...], Field(min_length=1)] = ("none", "selective", "full")
    """Activation recomputation policies."""
    offload: Annotated[tuple[Literal["none", "optimizer", "parameters"], ...], Field(min_length=1)] | None = None
    """State kept in host memory (`plan.offload`). Absent: as in the scenario's plan."""
    batch: Annotated[tuple[Literal["even", "throughput", "memory"], ...], Field(min_length=1)] = (
        "even",
        "throughput",
        "memory",
    )
    """Batch splits. `memory`: explicit shares with which every rank has memory for its samples, and at least one sample
    per micro-batch, chosen so that the slowest rank is as fast as possible."""
    shards: Annotated[tuple[Literal["even", "compute", "memory", "cost"], ...], Field(min_length=1)] = (
        "even",
        "compute",
        "memory",
        "cost",
    )
    """Shard sizes, for the methods that can shard unevenly."""
    thresholds: tuple[Threshold, ...] = ()
    """Push thresholds to search besides the plan's. They change the training, so `least_density` or `most_loss_change`
    must be set too. Absent: with these, two per decade or those of the study; else none."""
    least_density: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """Smallest fraction of the gradients that a plan may push."""
    study: str | None = None
    """Table of a study that measured the loss at several thresholds (`convergence.csv` of `analysis convergence`)."""
    most_loss_change: NonNegativeFloat | None = None
    """Largest allowed change of the final loss, in nats: of the study's thresholds, only those are searched whose
    change is no larger, by the upper end of its interval. The user asserts that the study's model and training resemble
    this one.
    """
    seconds: PositiveFloat | None = None
    """Time limit, after which no more plans are simulated and the best so far is returned; absent: search until no
    better plan is possible."""

    def __post_init__(self) -> None:
        """Refuse thresholds without a bound on density or loss, and a bound on loss without a study or the reverse."""
        if self.thresholds and not self.searches_thresholds:
            bounds = "set least_density, or study and most_loss_change, as well"
            raise ValueError(f"thresholds: they change the training; {bounds}")
        if (self.study is None) != (self.most_loss_change is None):
            raise ValueError("study, most_loss_change: one needs the other")

    @property
    def searches_thresholds(self) -> bool:
        """Whether the density or loss of searched thresholds is bounded."""
        return self.least_density is not None or self.most_loss_change is not None
