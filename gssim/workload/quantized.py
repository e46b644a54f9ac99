"""Frozen weights that are kept in fewer bits than they are multiplied in: the linear maps under adapters (QLoRA).

[Note: quantized weights] In bitsandbytes 0.45 (nn/modules.py: Linear4bit and Linear8bitLt, which transformers puts in
the place of linear maps, the head apart) weights are kept in 4 or 8 bits, with a scale for each block or row. Forward
and backward each make a copy in the precision of the training, multiply with that, and drop it. `nf4`: 4 bits and an
fp32 scale for each 64 values (Dettmers et al. 2023, "QLoRA"); `nf4-double`: those scales are in 8 bits, with an fp32
scale for each 256 of them. `int8`: 8 bits and an fp32 scale for each row; assumed is that forwards multiply the copy
too. Embeddings, norms, biases and the head keep the precision of the training.
"""

import math
from typing import Literal, NamedTuple

from gssim.workload.layer import Layer, Parameter

FrozenPrecision = Literal["nf4", "nf4-double", "int8"]
BLOCK = 64
"""Values that share a scale in 4 bits."""
SCALES_BLOCK = 256
"""Scales that share one of theirs."""


class Stored(NamedTuple):
    """Bytes of a weight in few bits."""

    values_bytes: int
    """Of the values, which FSDP shards."""
    scales_bytes: int
    """Of the scales, which every rank keeps whole."""


def stored(parameter: Parameter, precision: FrozenPrecision) -> Stored:
    """Return what a quantized weight takes.

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
    """Return the weights of a layer that are quantized: a block's frozen matrices."""
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
