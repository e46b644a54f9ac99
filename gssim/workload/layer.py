"""One layer as it was traced."""

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from gssim.units import Count, PositiveInt, spec
from gssim.workload.buffer import Buffer, Moment
from gssim.workload.parameter import Parameter, Reduction
from gssim.workload.polynomial import Quantity, text_of

STREAMED = (
    "forward_streamed_bytes",
    "backward_streamed_bytes",
    "recompute_streamed_bytes",
    "selective_streamed_bytes",
)


@spec
class PartialBackward:
    """What is left of a layer's training where some parameters are frozen, so that others get their gradients alone.

    Its forward costs the same; what it keeps for the backward, and the backward, are less.
    """

    backward_flop: Quantity
    """Of this backward."""
    backward_bytes: Quantity
    """Bytes read and written in it."""
    backward_operations: Count
    """How many the host issues."""
    backward_streamed_bytes: Quantity | None = None
    """Of these bytes, those of operations that do next to no arithmetic; absent: not known apart."""
    parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """Those that are trained, with their moments in this backward."""
    buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """Tensors of the layer, with their lives in this backward."""
    input_freed: text_of(Moment) | None = None  # type: ignore[valid-type]
    """When it lets go of what the layer before handed on; absent: that one keeps it longer itself."""
    gradient_freed: text_of(Moment) | None = None  # type: ignore[valid-type]
    """When it lets go of the gradient of its output; absent: not known to differ."""

    @model_serializer(mode="wrap")
    def _as_traced(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data: what is not known apart makes no other calibration."""
        data: dict[str, Any] = inner(self)
        if data.get("backward_streamed_bytes") is None:
            data.pop("backward_streamed_bytes", None)
        return data


@spec
class Layer:
    """One layer, or `repeats` identical ones in a row; FLOP, bytes and buffers are of one, for a whole batch."""

    name: str
    """The name in profiles, and in traces of steps."""
    modules: tuple[str, ...]
    """Dotted path of each repetition's module in the model; empty for what runs outside any (the loss)."""
    block: bool = False
    """An element of the model's repeated stack: FSDP shards it on its own; all else belongs to the root."""
    parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """Each with its shape and its moments: when its gradient is born, and when it is ready."""
    forward_flop: Quantity
    """Multiply-adds count twice."""
    backward_flop: Quantity
    """The same; recomputation left out."""
    forward_bytes: Quantity
    """Bytes read and written by the operations of one forward."""
    backward_bytes: Quantity
    """The same for one backward."""
    saved_bytes: Quantity
    """Unique storages that autograd keeps for the backward, parameters and inputs left out."""
    output_bytes: Quantity
    """What the next layer gets."""
    forward_operations: Count
    """How many the host issues."""
    backward_operations: Count
    """The same in the backward."""
    recompute_flop: Quantity | None = None
    """Of the forward, what checkpointing runs again: up to the last tensor that autograd saves; absent: all of it."""
    recompute_bytes: Quantity | None = None
    """Bytes that this reads and writes."""
    recompute_operations: Count | None = None
    """How many the host issues for it."""
    recompute_positions: Count | None = None
    """How many of the forward's positions that takes."""
    recompute_releases: tuple[Count, ...] | None = None
    """Where in a forward that saves nothing those buffers go which are kept for the layer's own backward, in order."""
    selective_flop: Quantity | None = None
    """Of that, what is run again where the outputs of compute-heavy operations are kept; absent: not known."""
    selective_bytes: Quantity | None = None
    """Bytes that this reads and writes."""
    selective_operations: Count | None = None
    """How many the host issues for it."""
    selective_positions: tuple[Count, ...] | None = None
    """Of the forward's compute-heavy operations: matrix products, convolutions, attention."""
    forward_streamed_bytes: Quantity | None = None
    """Of `forward_bytes`, those of operations that do next to no arithmetic (norms, activations, softmax, sums): they
    take their time at memory bandwidth, beside that of matrix products. Absent: not known apart."""
    backward_streamed_bytes: Quantity | None = None
    """The same of `backward_bytes`."""
    recompute_streamed_bytes: Quantity | None = None
    """The same of `recompute_bytes`."""
    selective_streamed_bytes: Quantity | None = None
    """The same of `selective_bytes`."""
    buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """Every tensor that it makes, with its life: born and freed at which operation of which phase, category, size."""
    units: PositiveInt | None = None
    """Of a block that is cut: how many units there are of it; see [Note: units]."""
    reductions: tuple[text_of(Reduction), ...] = ()  # type: ignore[valid-type]
    """Of a block that is cut: the sums over ranks, in the order of their moments."""
    linear: bool | None = None
    """Of a block that is cut: whether all that is cut are linear maps, which DTensor cuts; absent: not known."""
    untrained_buffers: tuple[text_of(Buffer), ...] | None = None  # type: ignore[valid-type]
    """Its buffers where neither it nor a layer before it is trained: autograd keeps nothing; absent: not traced."""
    frozen: PartialBackward | None = None
    """Where a layer before it is trained, but not itself; absent in the first layer, and where not traced."""
    deepest: PartialBackward | None = None
    """Where it is trained, but no layer before it; absent in the first layer, whose backward is this, without
    parameters, and where not traced."""

    @model_serializer(mode="wrap")
    def _as_traced(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data: what is not known apart makes no other question."""
        data: dict[str, Any] = inner(self)
        for key in STREAMED:
            if data.get(key) is None:
                data.pop(key, None)  # where none are wanted, it is not there
        return data

    @property
    def repeats(self) -> int:
        """How many identical layers this entry stands for."""
        return max(1, len(self.modules))

    @property
    def elements(self) -> int:
        """Parameters of one repetition."""
        return sum(parameter.elements for parameter in self.parameters)
