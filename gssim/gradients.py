"""Statistics of gradients, as measured by `gsreal gradients`: sketches of |g| and their scale over the steps.

Only data lives here; what a threshold makes of it is `density`.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gssim.units import Count, NonNegativeFloat, PositiveInt, UserError, spec, validated

Ratio = Annotated[float, Field(ge=0, le=1)]

EDGES_PER_DECADE = 6
LOWEST_DECADE, HIGHEST_DECADE = -4, 2
SKETCH_EDGES: tuple[float, ...] = tuple(
    10.0 ** (k / EDGES_PER_DECADE)
    for k in range(LOWEST_DECADE * EDGES_PER_DECADE, HIGHEST_DECADE * EDGES_PER_DECADE + 1)
)
"""Where tails are taken, as multiples of the tensor's rms at that step."""


@spec
class TensorTrace:
    """One parameter's gradient over the run."""

    rms: tuple[NonNegativeFloat, ...]
    """Root mean square, by step from the first."""
    tail_ratios: tuple[tuple[Ratio, ...], ...]
    """For each of `sampled_steps`: fraction of elements with |g| >= edge * rms, for each of `SKETCH_EDGES`."""


@spec
class RankTrace:
    """Gradients as a rank with `samples` samples per step sees them (its own mean, before any aggregation)."""

    samples: PositiveInt
    threshold: NonNegativeFloat = 0.0
    """Push threshold under which the model was trained (0: densely): what is dropped changes later gradients."""
    tensors: dict[str, TensorTrace]


@spec
class GradientStatistics:
    """What a training run's gradients looked like."""

    schema: Literal["gssim.gradients/1"] = "gssim.gradients/1"
    model: str
    precision: str
    optimizer: str
    learning_rate: float
    global_batch_size: PositiveInt
    sequence_length: PositiveInt | None = None
    seed: Count
    sampled_steps: tuple[Count, ...]
    traces: tuple[RankTrace, ...]
    source: str

    def __post_init__(self) -> None:
        """Refuse statistics with holes."""
        if not self.sampled_steps or any(b <= a for a, b in pairwise(self.sampled_steps)):
            raise ValueError("sampled_steps: at least one is needed, and they must increase")
        if not self.traces or any(not trace.tensors for trace in self.traces):
            raise ValueError("traces: at least one is needed, of at least one tensor")
        shape = (len(self.sampled_steps), len(SKETCH_EDGES))
        for trace in self.traces:
            for name, tensor in trace.tensors.items():
                tails = tensor.tail_ratios
                if len(tails) != shape[0] or any(len(tail) != shape[1] for tail in tails):
                    raise ValueError(f"tail_ratios of {name}: {shape[0]} rows (sampled_steps) of {shape[1]} are needed")

    @property
    def steps(self) -> int:
        """Number of steps covered, from the first."""
        return min(len(tensor.rms) for trace in self.traces for tensor in trace.tensors.values())


def read_gradients(path: Path) -> GradientStatistics:
    """Return the statistics in the JSON file `path`; raise UserError where it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; write it with `gsreal gradients SCENARIO --out {path}`") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file: {error}") from None
    return validated(GradientStatistics, data, file=str(path))
