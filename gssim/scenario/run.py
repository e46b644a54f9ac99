"""The run: length of a training, its seed, and ranks that are slower for some steps."""

from gssim.units import RANGES, Count, PositiveInt, TimeRatio, excess, spec


@spec
class SlowDown:
    """A rank that computes slower than its device for some steps."""

    rank: Count
    """Index of the rank."""
    first_step: Count
    """First slow step; timed steps count from 0."""
    steps: PositiveInt | None = None
    """Number of slow steps; absent: until the end of the run."""
    compute_ratio: TimeRatio
    """Time of the rank's forwards, backwards and updates relative to normal. (A real run computes that much more.)"""

    def covers(self, step: int) -> bool:
        """Return whether the rank is slow in a step."""
        return self.first_step <= step and (self.steps is None or step < self.first_step + self.steps)


@spec
class Run:
    """Length of a training run, its seed, and disturbances."""

    steps: PositiveInt = 20
    """Number of timed steps, after the warm-up."""
    warmup_steps: Count = 5
    """Number of untimed steps before them."""
    seed: Count = 0
    """Seed of parameters, batches and all other randomness."""
    evaluate_every_steps: PositiveInt | None = None
    """Number of steps between evaluations on held-out data, counted from the end of the warm-up; one more follows the
    last step (real runs). Absent: no evaluation."""
    extrapolate_micro_batches: bool = False
    """Simulate only as many micro-batches as it takes until each further period of the schedule takes as long as the
    one before; the others take as long as the last. Memory is that of all micro-batches. Step times are within 0.5 % of
    those with all micro-batches on NCCL; on gloo 1.5 % was seen. Predicted only: for long pipelines."""
    slowdowns: tuple[SlowDown, ...] = ()
    """Ranks that are slower than their devices for some steps, in predictions and in real runs."""

    def __post_init__(self) -> None:
        """Refuse too many steps, and slow-downs of one rank whose product is over the limit for a single one."""
        if (why := excess("steps", self.warmup_steps + self.steps)) is not None:
            raise ValueError(f"steps, warmup_steps: {why}")
        for slowdown in self.slowdowns:
            ratio = self.slowed(slowdown.first_step)[slowdown.rank]
            if ratio > RANGES["ratio of times"][1]:
                raise ValueError(f"slowdowns: together rank {slowdown.rank} takes {ratio:g} times as long in a step")

    def slowed(self, step: int) -> dict[int, float]:
        """Return the compute-time ratio of each rank that is slow in a counted step (from 0)."""
        ratios: dict[int, float] = {}
        for slowdown in self.slowdowns:
            if slowdown.covers(step):
                ratios[slowdown.rank] = ratios.get(slowdown.rank, 1.0) * slowdown.compute_ratio
        return ratios
