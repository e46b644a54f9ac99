"""Frozen weights that are kept in fewer bits than they are multiplied in: the linear maps under adapters (QLoRA).

[Note: quantized weights] In bitsandbytes 0.45 (nn/modules.py: Linear4bit and Linear8bitLt, with which transformers
replaces linear maps other than the head) weights are kept in 4 or 8 bits, with a scale for each block or row. Forward
and backward each make a copy in the training precision, multiply by it, and free it. `nf4`: 4 bits and an fp32 scale
for each 64 values (Dettmers et al. 2023, "QLoRA"). `nf4-double`: these scales are in 8 bits, with an fp32 scale for
each 256 of them. `int8`: 8 bits and an fp32 scale for each row; it is assumed that forwards multiply by a copy too.
Embeddings, norms, biases and the head keep the training precision.
"""

import math
from typing import Literal, NamedTuple

from gssim.workload.layer import Layer, Parameter

FrozenPrecision = Literal["nf4", "nf4-double", "int8"]
BLOCK = 64
"""Number of 4-bit values that share a scale."""
SCALES_BLOCK = 256
"""Number of 8-bit scales that share an fp32 scale."""


class Stored(NamedTuple):
    """Bytes of a weight in few bits."""

    values_bytes: int
    """Bytes of the values, which FSDP shards."""
    scales_bytes: int
    """Bytes of the scales, which every rank keeps in full."""


def stored(parameter: Parameter, precision: FrozenPrecision) -> Stored:
    """Return the bytes that a quantized weight takes.

    >>> weight = Parameter.parse("{}.weight 128x64 end end")
    >>> [stored(weight, each) for each in ("nf4", "nf4-double", "int8")]  # doctest: +NORMALIZE_WHITESPACE
    [Stored(values_bytes=4096, scales_bytes=512), Stored(values_bytes=4096, scales_bytes=132),
     Stored(values_bytes=8192, scales_bytes=512)]
    """
    if precision == "int8":
        return Stored(parameter.elements, 4 * parameter.shape[0])
    scales = math.ceil(parameter.elements / BLOCK)
    values = math.ceil(parameter.elements / 2)
    return Stored(values, 4 * scales if precision == "nf4" else scales + 4 * math.ceil(scales / SCALES_BLOCK))


def quantized_weights(layer: Layer, precision: FrozenPrecision | None) -> tuple[Parameter, ...]:
    """Return the weights of a layer that are quantized: the frozen matrices of a block."""
    if precision is None or not layer.block:
        return ()
    return tuple(parameter for parameter in layer.frozen_parameters if len(parameter.shape) == 2)


def frozen_bytes(layer: Layer, precision: FrozenPrecision | None, *, value_bytes: int) -> list[int]:
    """Return the bytes of each tensor of a layer's frozen parameters; a quantized weight has one of scales too."""
    quantized = set(map(id, quantized_weights(layer, precision)))
    sizes: list[int] = []
    for parameter in layer.frozen_parameters:
        if precision is not None and id(parameter) in quantized:
            sizes += stored(parameter, precision)
        else:
            sizes.append(parameter.elements * value_bytes)
    return sizes
