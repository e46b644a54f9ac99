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
from gssim.workload.optimizers import (
    implementation_on,
    optimizer_moved_bytes,
    optimizer_state_bytes,
    state_element_bytes,
)
from gssim.workload.shipped import shipped_models
from gssim.workload.workload import PATHS, Glue, ImageFolder, TextFolder, Workload

__all__ = [
    "PATHS",
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
    "optimizer_moved_bytes",
    "optimizer_state_bytes",
    "passed_bytes",
    "shipped_models",
    "sliced_layer",
    "state_element_bytes",
    "unrolled",
]
