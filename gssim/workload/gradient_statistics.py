"""Statistics of gradients, measured by `gsreal gradients`: sketches of |g| at some steps of a training run.

This module holds the data only; `gssim.sparsity` derives densities from them.
"""

from dataclasses import field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gssim.errors import UserError
from gssim.execution.files import read_json
from gssim.units import Count, NonNegativeFloat, PositiveFloat, PositiveInt, spec, validated

SCHEMA: Literal["gssim.gradients/3"] = "gssim.gradients/3"
Ratio = Annotated[float, Field(ge=0, le=1)]
Correlation = Annotated[float, Field(ge=-1, le=1)]

EDGES_PER_DECADE = 6
LOWEST_DECADE, HIGHEST_DECADE = -12, 4
SKETCH_EDGES: tuple[float, ...] = tuple(
    10.0 ** (k / EDGES_PER_DECADE)
    for k in range(LOWEST_DECADE * EDGES_PER_DECADE, HIGHEST_DECADE * EDGES_PER_DECADE + 1)
)
"""Magnitudes at which tails are recorded."""


@spec
class Sketch:
    """Distribution of the magnitudes of many numbers."""

    mean: NonNegativeFloat
    rms: NonNegativeFloat
    first_edge: Count = 0
    """Index in `SKETCH_EDGES` of the first edge of `tail_ratios`; the tail is constant below it."""
    tail_ratios: tuple[Ratio, ...] = (0.0,)
    """Fraction of the numbers that reach each edge, from `first_edge` on; none reach the edges after the last."""

    def __post_init__(self) -> None:
        """Refuse an invalid tail."""
        if not self.tail_ratios or any(b > a for a, b in pairwise(self.tail_ratios)):
            raise ValueError("tail_ratios: at least one is needed, and they must not rise")
        if self.first_edge + len(self.tail_ratios) > len(SKETCH_EDGES):
            raise ValueError(f"tail_ratios: there are {len(SKETCH_EDGES)} edges, and first_edge is {self.first_edge}")


@spec
class FeedbackDensity:
    """Density under error feedback at one step; unsent gradients are added to the next ones."""

    sent_ratios: tuple[Ratio, ...]
    """Fraction of elements that are sent, for each of the statistics' `feedback_thresholds`."""
    held_ratios: tuple[tuple[Ratio, ...], ...] = ()
    """In older files: fractions that reach multiples of each threshold. Not used, and no longer measured."""


@spec
class RelativeDensity:
    """Density of relative thresholds at one step."""

    sent_ratios: tuple[Ratio, ...]
    """Fraction of elements that reach each of the statistics' `multiples` of the tensor's mean magnitude."""
    feedback_ratios: tuple[Ratio, ...]
    """Fraction with error feedback: of gradients plus residuals, relative to their mean."""


@spec
class BlockTrace:
    """One block of a tensor (consecutive elements; all blocks are equally large), over the run."""

    sketches: tuple[Sketch, ...]
    """Sketch of |g| for each of `sampled_steps`."""
    feedback: tuple[FeedbackDensity, ...] = ()
    """Densities for each of `sampled_steps`; empty if error feedback was not measured."""
    relative: tuple[RelativeDensity, ...] = ()
    """Densities for each of `sampled_steps`. Measured only in dense training, as they depend little on the gradients'
    scale."""
    first: Sketch | None = None
    """Sketch of |g| at `first_step`, if measured."""


@spec
class TensorTrace:
    """One parameter's gradient over the run."""

    blocks: tuple[BlockTrace, ...]
    correlations: tuple[Correlation, ...] = ()
    """Cosine between the gradients of two ranks, for each of `sampled_steps`; empty if no two ranks were compared."""


@spec
class RankTrace:
    """Gradients of a rank with `samples` samples per step: the rank's own mean, before any aggregation."""

    samples: PositiveInt
    threshold: NonNegativeFloat = 0.0
    """Push threshold of the training (0: dense), which influences later gradients."""
    error_feedback: bool = False
    """Whether the training used error feedback."""
    tensors: dict[str, TensorTrace]


@spec
class ChangeTrace:
    """One parameter's published changes over the run; unsent ones accumulate."""

    blocks: tuple[tuple[tuple[Ratio, ...], ...], ...]
    """By block, sampled step, and threshold in the statistics' `publish_thresholds`: the fraction of elements that is
    sent after the step."""


@spec
class Transfer:
    """Origin and error of statistics that were transferred from other models; see `gradient_family`."""

    family: str
    """Name of the family of models from which they are transferred."""
    digest: str
    """Identity of the family's file and of the question that was asked."""
    scale_error_ratio: Annotated[float, Field(ge=1)]
    """Factor on the scale of |g| that covers nine in ten of the family's held-out trainings."""
    density_error_ratio: Annotated[float, Field(ge=1)]
    """The corresponding factor on densities of relative thresholds, which do not depend on the scale."""
    scale_ratio: PositiveFloat = 1.0
    """Factor on all magnitudes; differs from 1 only at an end of the band."""
    density_ratio: PositiveFloat = 1.0
    """Factor on densities of relative thresholds."""


@spec
class GradientStatistics:
    """Gradient magnitudes of training runs, and the pushes and publications that thresholds would have caused.

    `gsreal gradients` measures them, and writes the file that `workload.gradients` names; they predict densities.
    """

    schema: Literal["gssim.gradients/3"] = SCHEMA
    model: str
    precision: str
    optimizer: str
    learning_rate: float
    global_batch_size: PositiveInt
    sequence_length: PositiveInt | None = None
    seed: Count
    steps: PositiveInt
    """Number of steps that are covered, counted from the first."""
    sampled_steps: tuple[Count, ...]
    first_step: Count = 0
    """First step with error feedback; earlier pushes are dense."""
    feedback_thresholds: tuple[PositiveFloat, ...] = ()
    """Thresholds, increasing, at which error feedback was measured."""
    multiples: tuple[PositiveFloat, ...] = ()
    """Multiples of a tensor's mean magnitude, increasing, at which relative thresholds were measured."""
    publish_thresholds: tuple[PositiveFloat, ...] = ()
    """Thresholds, increasing, at which publishing was measured."""
    traces: tuple[RankTrace, ...]
    changes: dict[str, ChangeTrace] = field(default_factory=dict)
    """Changes by parameter; empty if publishing was not measured."""
    source: str
    transfer: Transfer | None = None
    """Origin and error, if the statistics were not measured on this model."""

    def __post_init__(self) -> None:
        """Refuse incomplete statistics."""
        if self.transfer is not None:  # made by our own code, and too many tensors to check for a large model
            return
        steps = self.sampled_steps
        if not steps or any(b <= a for a, b in pairwise(steps)) or steps[-1] >= self.steps:
            raise ValueError("sampled_steps: at least one is needed, they must increase, and be less than steps")
        grids = (self.feedback_thresholds, self.publish_thresholds, self.multiples)
        if any(b <= a for grid in grids for a, b in pairwise(grid)):
            raise ValueError("feedback_thresholds, publish_thresholds, multiples: must increase")
        if not self.traces or any(not trace.tensors for trace in self.traces):
            raise ValueError("traces: at least one is needed, of at least one tensor")
        for trace in self.traces:
            for name, tensor in trace.tensors.items():
                self._check_tensor(name, tensor)
                for block in tensor.blocks:
                    feedback = [(len(row.sent_ratios), len(row.sent_ratios)) for row in block.feedback]
                    needed = trace.error_feedback or not trace.threshold
                    self._check_rows(f"feedback of {name}", feedback, len(self.feedback_thresholds), needed=needed)
                    relative = [(len(row.sent_ratios), len(row.feedback_ratios)) for row in block.relative]
                    points, needed = len(self.multiples), not trace.threshold
                    self._check_rows(f"relative of {name}", relative, points, needed=needed)
        for name, change in self.changes.items():
            rows = [len(self.publish_thresholds)] * len(steps)
            if not change.blocks or any([len(row) for row in block] != rows for block in change.blocks):
                raise ValueError(f"changes of {name}: {len(steps)} rows (sampled_steps) of {rows[0]} are needed")

    def _check_tensor(self, name: str, tensor: TensorTrace) -> None:
        count = len(self.sampled_steps)
        if not tensor.blocks or any(len(block.sketches) != count for block in tensor.blocks):
            raise ValueError(f"sketches of {name}: {count} are needed, one for each of sampled_steps")
        if len(tensor.correlations) not in (0, count):
            raise ValueError(f"correlations of {name}: {count} are needed, one for each of sampled_steps, or none")

    def _check_rows(self, what: str, rows: list[tuple[int, int]], points: int, *, needed: bool) -> None:
        """Refuse missing or surplus rows, and rows whose two lists do not match the grid's `points`."""
        count = len(self.sampled_steps)
        if (rows or needed) and points and rows != [(points, points)] * count:
            raise ValueError(f"{what}: {count} rows (sampled_steps) of {points} are needed")


def at_end(statistics: GradientStatistics, *, high: bool) -> GradientStatistics:
    """Return transferred statistics at one end of their band: all magnitudes raised or lowered by the error."""
    transfer = statistics.transfer
    assert transfer is not None
    scale, density = transfer.scale_error_ratio, transfer.density_error_ratio
    if not high:
        scale, density = 1 / scale, 1 / density
    return replace(statistics, transfer=replace(transfer, scale_ratio=scale, density_ratio=density))


def read_gradients(path: Path) -> GradientStatistics:
    """Return the statistics in the JSON file `path`; raise UserError where it is not one."""
    data = read_json(path)
    if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise UserError(
            f"{path}: schema: {data['schema']!r} is not {SCHEMA!r}; take the statistics again, with "
            f"`gsreal gradients SCENARIO --out {path}`"
        )
    return validated(GradientStatistics, data, file=str(path))
