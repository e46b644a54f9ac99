"""What `gssim search` looks through: the table `[search]` of a scenario."""

from typing import Annotated, Literal

from pydantic import Field

from gssim.plan import Method
from gssim.units import PositiveFloat, PositiveInt, Threshold, spec

Objective = Literal["step-time", "cost", "energy"]
Choice = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
SEARCHED_METHODS: tuple[Method, ...] = (
    "single",
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "hsdp",
    "pipeline",
    "tensor",
    "gs",
    "gs_z3",
    "gs_wgrad",
    "gs_tp",
    "gs_hier",
)


@spec
class SearchSpace:
    """The plans that are searched: every combination that can run. The rest of a plan stays as the scenario has it."""

    objective: Objective = "step-time"
    """What is to be least: the time, the price or the energy of a step."""
    methods: Annotated[tuple[Method, ...], Field(min_length=1)] = SEARCHED_METHODS
    devices: Choice | None = None
    """How many devices, always the cluster's first. Absent: all, and those up to the end of each host."""
    tp: Choice | None = None
    """Absent: divisors of the number of devices, up to those of the largest host."""
    pp: Choice | None = None
    """Absent: all divisors of the number of devices."""
    micro_batches: Choice | None = None
    """Absent: powers of two, up to as many as each part of the batch has samples where it is divided evenly."""
    recompute: Annotated[tuple[Literal["none", "selective", "full"], ...], Field(min_length=1)] = (
        "none",
        "selective",
        "full",
    )
    batch: Annotated[tuple[Literal["even", "throughput", "memory"], ...], Field(min_length=1)] = (
        "even",
        "throughput",
        "memory",
    )
    """`memory`: explicit shares, the slowest rank as fast as can be with no rank given more samples than it has memory
    for, nor fewer than there are micro-batches."""
    shards: Annotated[tuple[Literal["even", "compute", "memory", "cost"], ...], Field(min_length=1)] = (
        "even",
        "compute",
        "memory",
        "cost",
    )
    """Of the methods that can shard unevenly."""
    thresholds: tuple[Threshold, ...] = ()
    """Of pushes, besides what the plan has. They change the training: `least_density` or none at all."""
    least_density: Annotated[float, Field(gt=0, le=1)] | None = None
    """Plans that push a smaller part of the gradients than this are not wanted; absent: no thresholds are searched."""
    seconds: PositiveFloat | None = None
    """After so many, no more plans are begun and the best of those so far counts; absent: until nothing better can
    be left."""

    def __post_init__(self) -> None:
        """Refuse thresholds without a bound on what they drop."""
        if self.thresholds and self.least_density is None:
            raise ValueError("thresholds: they change the training; say how far by least_density as well")
