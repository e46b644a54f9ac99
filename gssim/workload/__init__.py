"""What to compute: a model's layers as traced from the real module, and how it is trained."""

from gssim.workload.buffer import BUFFER_CATEGORIES, Buffer, Moment, handed_back, handed_on
from gssim.workload.layer import Layer, PartialBackward
from gssim.workload.model import (
    HuggingFace,
    ImageInput,
    LayerInstance,
    Model,
    Module,
    TokenInput,
    gradient_order,
    unrolled,
)
from gssim.workload.parameter import Parameter, Reduction
from gssim.workload.polynomial import Polynomial, Quantity, Terms
from gssim.workload.workload import Workload

__all__ = [
    "BUFFER_CATEGORIES",
    "Buffer",
    "HuggingFace",
    "ImageInput",
    "Layer",
    "LayerInstance",
    "Model",
    "Module",
    "Moment",
    "Parameter",
    "PartialBackward",
    "Polynomial",
    "Quantity",
    "Reduction",
    "Terms",
    "TokenInput",
    "Workload",
    "gradient_order",
    "handed_back",
    "handed_on",
    "unrolled",
]
