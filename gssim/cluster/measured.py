"""What devices were measured to take: curves by size, layer by layer and operation by operation."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from gssim.cluster.kernel_workspace import ScratchText
from gssim.units import NonNegativeFloat, PositiveFloat, PositiveInt, Precision, Seconds, TimeRatio, spec

Slowdown = TimeRatio


@spec
class Curve:
    """A measured quantity by size: piecewise linear between the points, proportional to the size outside them."""

    sizes: tuple[PositiveFloat, ...]
    """Increasing."""
    values: tuple[NonNegativeFloat, ...]
    """At each size."""

    def __post_init__(self) -> None:
        """Refuse points that are not a function of the size."""
        if not self.sizes or len(self.sizes) != len(self.values):
            raise ValueError("sizes and values must be equally many, and at least one")
        if any(right <= left for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("sizes must increase")

    def at(self, size: float) -> float:
        """Return the value at `size`; beyond the last point the last slope continues, below the first it scales.

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


Way = Annotated[str, Field(pattern=r"^(whole|frozen|deepest|untrained|units-[1-9]\d*)$")]


@spec
class LayerProfile:
    """Measured cost of one layer, by batch size (samples): `sizes` of every curve are batch sizes."""

    forward_s: Curve
    """Of the whole batch."""
    backward_s: Curve
    """The same; of a checkpointed block without its forward."""
    forward_peak_bytes: Curve | None = None
    """Most bytes alive during the forward, above what was alive when it began; kernel scratch included."""
    backward_peak_bytes: Curve | None = None
    """The same for the backward, parameter gradients included."""
    scratch_bytes: dict[Way, tuple[ScratchText, ...]] | None = None
    """What kernels take for themselves, by the way in which the layer is run: `whole`; `units-N` of a cut block; and
    where others are frozen, `frozen` itself, `deepest` of those that are trained, or `untrained` (all before it too).
    Absent: not known by operation; peaks tell how much it is at most.
    """


@spec
class Profile:
    """Layer costs of one model on one device type, at one sequence length."""

    model: str
    """Its name in the model file."""
    precision: Precision
    """In which the layers were run."""
    sequence_length: PositiveInt | None = None
    """Tokens of a sample; absent for images."""
    measurements: PositiveInt = 1
    """How many calibrations, at different times, the curves are means of."""
    layers: dict[str, LayerProfile]
    """By layer name of the model file."""
    pause_excess_s: Curve | None = None
    """How much longer compute takes in all after so many seconds (`sizes`) in which the device has waited, for what it
    works with is no longer in the caches; after the last of them nothing changes."""
    neighbour_slowdown_ratio: Slowdown | None = None
    """The device's, for this model: it depends on how much memory the layers go through; absent: the device's own."""
    communicating_excess_ratio: Curve | None = None
    """How much longer compute takes beside communication, over compute alone, by the bytes/s that the device sends and
    receives meanwhile; beyond the last nothing changes. Absent: by the device's `communicating_slowdown_ratio`."""


@spec
class OptimizerCost:
    """Time of an optimizer step: `tensor_s` for each tensor, and a curve of seconds by elements."""

    tensor_s: Seconds
    """For each tensor, whatever its size."""
    sharded_tensor_s: Seconds = 0.0
    """More for each tensor that is a DTensor (what FSDP2 hands to the optimizer)."""
    elements_s: Curve
    """By the elements that are updated."""


@spec
class PostingCost:
    """Host time of a device to hand over point-to-point messages, whatever their size."""

    exchange_s: Seconds
    """Of an exchange of one message, sent and received."""
    message_s: Seconds
    """For each more."""


@spec
class CompressionCost:
    """Time to find, pack and add gradients over a threshold, per element; what is absent goes by memory bandwidth."""

    call_s: Seconds
    """Fixed part of one pass, and of one pack or add."""
    threshold_element_s: Seconds
    """Magnitude, compare, count, list: per element looked at."""
    pack_element_s: Seconds
    """Gather values and their places: per element sent."""
    scatter_element_s: Seconds
    """Scatter-add at the owner: per element received."""
    clear_element_s: Seconds | None = None
    """With error feedback: clear what is sent, per element sent."""
    residual_element_s: Seconds | None = None
    """With error feedback: add what was kept, per element that others own."""
    mean_element_s: Seconds | None = None
    """For a relative threshold: the mean magnitude, per element."""
    estimate_element_s: Seconds | None = None
    """For a target density: pick and select, per element of the sample."""
    pack_bit_s: Seconds | None = None
    """For a bitmap: per element of the message's range."""
    unpack_bit_s: Seconds | None = None
    """The same at the owner."""
    dense_element_s: Seconds | None = None
    """To fill a dense message, zeros where nothing is sent: per element of its range."""

    @model_serializer(mode="wrap")
    def _as_measured(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data: what is absent makes no other calibration."""
        return {key: value for key, value in inner(self).items() if value is not None}


@spec
class ShardedUnitCost:
    """Host time that FSDP2 adds for each sharded unit and each parameter in it, without the communication."""

    forward_unit_s: Seconds
    """For each unit and forward."""
    forward_tensor_s: Seconds
    """For each parameter of a unit and forward."""
    backward_unit_s: Seconds
    """For each unit and backward."""
    backward_tensor_s: Seconds
    """For each parameter of a unit and backward."""
    copied_byte_s: Seconds
    """Per byte that is copied into or out of a communication buffer."""


@spec
class CutBlockCost:
    """Host time that cut blocks add, without the communication, by the bytes of a sum over ranks.

    The more there are, the less of the host's code and objects do caches keep from one map to the next. Between points
    it is interpolated; outside of them it is what it is at the nearest.
    """

    forward_pair_s: Curve
    """DTensor's own, of a pair of linear maps: the first cut by columns, the second by rows."""
    backward_pair_s: Curve
    """The same, in the backward."""
    sum_s: Curve
    """Of a sum over ranks by torch's functional collectives, DTensor's or not, beyond a plain call."""

    def at(self, kind: Literal["forward_pair_s", "backward_pair_s", "sum_s"], sum_bytes: float) -> float:
        """Return a time where a sum over ranks is of so many bytes."""
        curve: Curve = getattr(self, kind)
        return curve.at(min(max(sum_bytes, curve.sizes[0]), curve.sizes[-1]))
