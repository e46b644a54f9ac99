"""The workload: a model's layers as traced, the batch, the optimizer and the data of a training."""

from gssim.workload.layer import (
    FIELDS_OF_TERMS,
    NO_ROLES,
    Buffer,
    Layer,
    LayerRoles,
    Moment,
    Parameter,
    PartialBackward,
    PartialRecomputation,
    Polynomial,
    Reduction,
    SplitBackward,
    for_samples,
    layer_input_gradient,
    layer_output,
    passed_bytes,
    sliced_layer,
    with_quantities,
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
    shipped_models,
    unrolled,
)
from gssim.workload.optimizers import (
    Implementation,
    Optimizer,
    implementation_on,
    optimizer_moved_bytes,
    optimizer_state_bytes,
    state_element_bytes,
)
from gssim.workload.workload import PATHS, Glue, ImageFolder, TextFolder, Workload
