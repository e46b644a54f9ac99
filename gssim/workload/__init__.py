"""The workload: a model's layers as traced, the batch, the optimizer and the data of a training."""

from gssim.workload.layer import (
    Buffer,
    Layer,
    Moment,
    Parameter,
    PartialBackward,
    PartialRecomputation,
    Polynomial,
    Reduction,
    layer_input_gradient,
    layer_output,
    passed_bytes,
    sliced_layer,
)
from gssim.workload.model import (
    Adapters,
    HuggingFace,
    ImageInput,
    LayerInstance,
    Model,
    Module,
    TokenInput,
    gradient_order,
    unrolled,
)
from gssim.workload.optimizers import VALUES_KEPT, implementation_on, optimizer_moved_values, optimizer_state_bytes
from gssim.workload.shipped import shipped_models
from gssim.workload.workload import PATHS, Glue, ImageFolder, TextFolder, Workload

__all__ = [
    "PATHS",
    "VALUES_KEPT",
    "Adapters",
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
    "PartialRecomputation",
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
    "optimizer_state_bytes",
    "passed_bytes",
    "shipped_models",
    "sliced_layer",
    "unrolled",
]
