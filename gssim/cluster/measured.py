"""Measured costs of a device type: curves by size for layers, optimizers, compression, messages and sharded units, and
the workspace memory that the kernels of an operation allocate while it runs.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from gssim.units import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Precision,
    Seconds,
    TimeRatio,
    omits_defaults,
    spec,
)

_SCRATCH = re.compile(r"^([fb])(\d+)((?: \d+:\d+)+)$")


@dataclass(frozen=True, slots=True)
class Scratch:
    """Workspace of one operation's kernels, by batch size."""

    phase: str
    """`f` (forward) or `b` (backward)."""
    position: int
    """Position of the operation in its layer's forward or backward, as in model files."""
    points: tuple[tuple[int, int], ...]
    """(samples, bytes), by increasing samples."""

    @classmethod
    def parse(cls, text: object) -> "Scratch":
        """Return the workspace that `text` denotes.

        >>> str(Scratch.parse("b28 4:1000 8:1800"))
        'b28 4:1000 8:1800'
        """
        if isinstance(text, Scratch):
            return text
        match = _SCRATCH.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError('must be "MOMENT SAMPLES:BYTES...", such as "b28 4:1000 8:1800"')
        pairs = [pair.split(":") for pair in match.group(3).split()]
        points = tuple((int(samples), int(size)) for samples, size in pairs)
        if any(right[0] <= left[0] for left, right in pairwise(points)):
            raise ValueError("samples must increase")
        return cls(match.group(1), int(match.group(2)), points)

    def __str__(self) -> str:
        return f"{self.phase}{self.position} " + " ".join(f"{samples}:{size}" for samples, size in self.points)

    def at(self, samples: float) -> float:
        """Return the bytes at a batch size, interpolated linearly between the points and extrapolated beyond them.

        Assumes that kernels repack the weights (a fixed part) and inputs or outputs (in proportion to samples).

        >>> Scratch.parse("b28 4:1000 8:1800").at(2)
        600.0
        """
        if len(self.points) == 1:
            return float(self.points[0][1])
        inner = [i for i, (size, _) in enumerate(self.points[1:-1], 1) if size < samples]
        (x0, y0), (x1, y1) = self.points[max(inner, default=0) :][:2]
        return float(max(0, round(y0 + (y1 - y0) * (samples - x0) / (x1 - x0))))


ScratchText = Annotated[
    Scratch,
    BeforeValidator(Scratch.parse),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "description": Scratch.parse.__doc__}),
]


Slowdown = TimeRatio


@spec
class Curve:
    """A measured quantity by size: piecewise linear between the points, extrapolated outside them."""

    sizes: tuple[PositiveFloat, ...]
    """Increasing sizes."""
    values: tuple[NonNegativeFloat, ...]
    """Value at each size."""

    def __post_init__(self) -> None:
        """Refuse points that are not a function of the size."""
        if not self.sizes or len(self.sizes) != len(self.values):
            raise ValueError("sizes and values must have equal lengths, of at least one")
        if any(right <= left for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("sizes must increase")

    def at(self, size: float) -> float:
        """Return the value at `size`. Beyond the last point the last slope continues; below the first, it is
        proportional.

        >>> curve = Curve(sizes=(1.0, 2.0), values=(10.0, 30.0))
        >>> curve.at(1.5), curve.at(3.0), curve.at(0.5)
        (20.0, 50.0, 5.0)
        """
        if size <= self.sizes[0] or len(self.sizes) == 1:
            return self.values[0] * size / self.sizes[0]
        right = next((i for i, s in enumerate(self.sizes) if s >= size), len(self.sizes) - 1)
        x0, x1 = self.sizes[right - 1], self.sizes[right]
        y0, y1 = self.values[right - 1], self.values[right]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


Way = Annotated[str, Field(pattern=r"^(autocast-(bf16|fp16)-)?(whole|frozen|deepest|untrained|units-[1-9]\d*)$")]


@spec
class LayerProfile:
    """Measured cost of one layer, by batch size: `sizes` of every curve are numbers of samples."""

    forward_s: Curve
    """Time of the forward for the whole batch."""
    backward_s: Curve
    """Time of the backward; for a checkpointed block, without the recomputed forward."""
    forward_host_s: Curve | None = None
    """On a GPU: host time to issue the forward's operations, ahead of the device if it can. `forward_s` is then the
    device's own time. Absent: `forward_s` includes waits for the host."""
    backward_host_s: Curve | None = None
    """`forward_host_s` of the backward."""
    forward_peak_bytes: Curve | None = None
    """Peak of allocated bytes during the forward, above the bytes at its start; includes kernel workspaces."""
    backward_peak_bytes: Curve | None = None
    """Peak of allocated bytes during the backward, above the bytes at its start; includes parameter gradients."""
    scratch_bytes: dict[Way, tuple[ScratchText, ...]] | None = None
    """Workspaces of kernels, by the way in which the layer is run: `whole`; `units-N` for a slice of a block; and with
    frozen parameters `frozen` (the layer itself), `deepest` (of the trained layers) or `untrained` (like all before
    it). Those under torch.autocast begin with `autocast-bf16-` or `autocast-fp16-`, and are in the profile of training
    without it. Absent: not measured by operation; the peaks bound them.
    """

    _serialized = omits_defaults("forward_host_s", "backward_host_s")


@spec
class Profile:
    """Layer costs of one model on a device type, at one precision and sequence length."""

    model: str
    """Name of the model in its file."""
    precision: Precision
    """Precision of the measured layers."""
    sequence_length: PositiveInt | None = None
    """Tokens of a sample; absent for images."""
    measurements: PositiveInt = 1
    """Number of calibrations, made at different times, over which the curves are averages."""
    layers: dict[str, LayerProfile]
    """Costs by layer name, as in the model file."""
    pause_excess_s: Curve | None = None
    """Total extra compute time after the device has waited for a number of seconds (`sizes`), because caches have lost
    its data; constant after the last point."""
    neighbour_slowdown_ratio: Slowdown | None = None
    """`neighbour_slowdown_ratio` for this model, as it depends on layers' memory traffic; absent: the device's."""
    communicating_excess_ratio: Curve | None = None
    """Extra compute time during communication, relative to compute alone, by the bytes/s that the device sends and
    receives meanwhile; constant after the last point. Absent: from the device's `communicating_slowdown_ratio`."""


@spec
class OptimizerCost:
    """Time of an optimizer step: `tensor_s` for each tensor, and a curve of seconds by elements."""

    tensor_s: Seconds
    """Time for each tensor, whatever its size."""
    sharded_tensor_s: Seconds = 0.0
    """Extra time for each tensor that is a DTensor (as FSDP2's parameters are)."""
    elements_s: Curve
    """Time by the number of updated elements."""
    host_s: Seconds | None = None
    """On a GPU: host time to issue an update, whatever its tensors; the times above are then the device's own. Absent:
    they include waits for the host."""
    host_tensor_s: Seconds | None = None
    """Added to `host_s` for each tensor."""

    _serialized = omits_defaults("host_s", "host_tensor_s")


@spec
class PostingCost:
    """Host time of a device to post point-to-point messages, whatever their size."""

    exchange_s: Seconds
    """Time for an exchange of one message, sent and received."""
    message_s: Seconds
    """Time for each further message."""


@spec
class LowRankCost:
    """Time of PowerSGD's operations on one matrix, by the rank of its factors."""

    call_s: Seconds
    """Fixed time of one product."""
    project_element_s: Curve
    """P = M Q: per element of M."""
    factor_element_s: Curve
    """Q = M^T P: per element of M."""
    restore_element_s: Curve
    """M = P Q^T: per element of M."""
    orthogonalize_call_s: Curve
    """Fixed time of one orthogonalization."""
    orthogonalize_row_s: Curve
    """Orthogonalization: per row of the factor."""


@spec
class CompressionCost:
    """Time to select, pack and add gradients over a threshold. Absent values are derived from memory bandwidth."""

    call_s: Seconds
    """Fixed time of one pass, and of packing or adding one message."""
    threshold_element_s: Seconds
    """Time per inspected element: magnitude, compare, count, list."""
    pack_element_s: Seconds
    """Time per sent element: gather values and their indices."""
    scatter_element_s: Seconds
    """Time per received element: scatter-add at the owner."""
    pack_call_s: Seconds | None = None
    """Fixed time of packing a message on a GPU: launching its operations. Absent: `call_s`."""
    add_call_s: Seconds | None = None
    """Fixed time of adding a message; absent: `call_s`."""
    add_dense_call_s: Seconds | None = None
    """Fixed time of adding a dense message; absent: that of one operation."""
    clear_element_s: Seconds | None = None
    """With error feedback: time per sent element to clear it."""
    residual_element_s: Seconds | None = None
    """With error feedback: time per element that others own to add the residual."""
    mean_element_s: Seconds | None = None
    """For a relative threshold: time per element to compute the mean magnitude."""
    estimate_element_s: Seconds | None = None
    """For a target density: time per sampled element to sample and select."""
    pack_bit_s: Seconds | None = None
    """For a bitmap: time per element of the message's range to pack it."""
    unpack_bit_s: Seconds | None = None
    """For a bitmap: time per element of the message's range to unpack it at the owner."""
    dense_element_s: Seconds | None = None
    """Time per element of a dense message's range to fill it, with zeros for elements that are not sent."""
    largest_element_s: Seconds | None = None
    """For `topk`: time per element of a bucket to find the largest."""
    largest_entry_s: Seconds | None = None
    """For `topk`: time per sent element to find, copy and clear it."""
    low_rank: LowRankCost | None = None
    """For `powersgd`."""

    _serialized = omits_defaults()


@spec
class UnitCost:
    """Host time that a wrapper adds per gathered unit of parameters, and per parameter in it, besides communication."""

    forward_unit_s: Seconds
    """Time per unit and forward."""
    forward_tensor_s: Seconds
    """Time per parameter of a unit and forward."""
    backward_unit_s: Seconds
    """Time per unit and backward."""
    backward_tensor_s: Seconds
    """Time per parameter of a unit and backward."""


@spec
class ShardedUnitCost(UnitCost):
    """The costs of FSDP2's units, including their copies."""

    copied_byte_s: Seconds | None = None
    """Time per byte that is copied into or out of a communication buffer; absent, as for a GPU: that of any copy."""


@spec
class CutBlockCost:
    """Extra host time of sliced (tensor-parallel) blocks besides the communication, by the bytes of an all-reduce.

    The larger the all-reduce, the less of the host's code and objects stays in caches from one linear map to the next.
    The curves are interpolated between points and constant beyond them.
    """

    forward_pair_s: Curve
    """DTensor's extra time in the forward for a pair of linear maps: the first cut by columns, the second by rows."""
    backward_pair_s: Curve
    """DTensor's extra time in the backward for a pair of linear maps."""
    sum_s: Curve
    """Extra time of an all-reduce through torch's functional collectives (DTensor's or others), over a plain call."""

    def at(self, kind: Literal["forward_pair_s", "backward_pair_s", "sum_s"], sum_bytes: float) -> float:
        """Return an extra time for an all-reduce of `sum_bytes`."""
        curve: Curve = getattr(self, kind)
        return curve.at(min(max(sum_bytes, curve.sizes[0]), curve.sizes[-1]))
