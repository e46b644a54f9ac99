"""The workload: a model's layers as traced, the batch, the optimizer and the data of a training."""

from gssim.workload.layer import (
    EXPERT_EXCHANGES,
    Buffer,
    Layer,
    Moment,
    Parameter,
    PartialBackward,
    Polynomial,
    Reduction,
    layer_input_gradient,
    layer_output,
)
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
from gssim.workload.optimizers import (
    COUNTS_STEPS,
    VALUES_KEPT,
    implementation_on,
    optimizer_moved_values,
    optimizer_operations,
    optimizer_state_bytes,
    optimizer_temporary_bytes,
)
from gssim.workload.shipped import shipped_models
from gssim.workload.workload import PATHS, Glue, ImageFolder, TextFolder, Workload

__all__ = [
    "COUNTS_STEPS",
    "EXPERT_EXCHANGES",
    "PATHS",
    "VALUES_KEPT",
    "Buffer",
    "Glue",
    "HuggingFace",
    "ImageFolder",
    "ImageInput",
    "Layer",
    "LayerInstance",
    "Model",
    "Module",
    "Moment",
    "Parameter",
    "PartialBackward",
    "Polynomial",
    "Reduction",
    "TextFolder",
    "TokenInput",
    "Workload",
    "gradient_order",
    "implementation_on",
    "layer_input_gradient",
    "layer_output",
    "optimizer_moved_values",
    "optimizer_operations",
    "optimizer_state_bytes",
    "optimizer_temporary_bytes",
    "shipped_models",
    "unrolled",
]
