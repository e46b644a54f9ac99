"""What `gssim search` looks through: the table `[search]` of a scenario."""

from typing import Annotated, Literal

from pydantic import Field

from gssim.plan import METHODS, MethodName
from gssim.units import NonNegativeFloat, PositiveFloat, PositiveInt, Threshold, spec

Objective = Literal["step-time", "cost", "energy"]
Choice = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
SEARCHED_METHODS: tuple[MethodName, ...] = tuple(name for name in METHODS if name != "fsdp")
"""All; `fsdp` is another name of `zero3`."""


@spec
class SearchSpace:
    """The plans that are searched: every combination that can run. The rest of a plan stays as the scenario has it."""

    objective: Objective = "step-time"
    """What is to be least: the time, the price or the energy of a step."""
    methods: Annotated[tuple[MethodName, ...], Field(min_length=1)] = SEARCHED_METHODS
    """Those that cannot run on the cluster are left out."""
    devices: Choice | None = None
    """How many devices, always the cluster's first. Absent: all (or `plan.ranks`), and those up to the end
    of each host."""
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
    """Whether and how blocks run their forward again."""
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
    """Of pushes, besides what the plan has. They change the training: with `least_density` or `most_loss_change`, or
    none at all. Absent: two a decade, or those of the study."""
    least_density: Annotated[float, Field(gt=0, le=1)] | None = None
    """Plans that push a smaller part of the gradients than this are not wanted."""
    study: str | None = None
    """Table of a study that measured what thresholds cost in loss (`convergence.csv` of `analysis convergence`)."""
    most_loss_change: NonNegativeFloat | None = None
    """In nats: only thresholds are searched whose change of the last loss in the study is no more, by the upper end of
    its interval. It is of the study's model and training, which the user takes to be like this one."""
    seconds: PositiveFloat | None = None
    """After so many, no more plans are begun and the best of those so far counts; absent: until nothing better can
    be left."""

    def __post_init__(self) -> None:
        """Refuse thresholds without a bound on what they drop or cost, and half of such a bound."""
        if self.thresholds and not self.searches_thresholds:
            said = "say how far by least_density, or by study and most_loss_change, as well"
            raise ValueError(f"thresholds: they change the training; {said}")
        if (self.study is None) != (self.most_loss_change is None):
            raise ValueError("study, most_loss_change: one needs the other")

    @property
    def searches_thresholds(self) -> bool:
        """Whether it is bounded what thresholds may drop or cost."""
        return self.least_density is not None or self.most_loss_change is not None
