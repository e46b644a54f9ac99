"""State, temporary memory, operations and memory traffic of torch's optimizers, by kind and implementation.

[Note: implementations] torch has three implementations of each optimizer (torch 2.13, torch/optim: sgd.py, adam.py).
`for-loop` updates one tensor after another, each with several operations. `foreach` runs the same operations over lists
of tensors: on CUDA one launch handles many tensors; on a CPU each operation is a loop over them again. `fused` does
everything in one kernel. torch's default is foreach on CUDA and for-loop on a CPU. On a TPU, XLA compiles the whole
step: whatever the implementation, an update reads and writes every value once, like `fused`.

[Note: Muon] The momentum of each matrix of a block is orthogonalised before it is applied; AdamW updates everything
else. The matrices are the two-dimensional parameters of the model's blocks. AdamW updates embeddings, the head, norms
and biases, as the authors of Muon advise and as Megatron-LM does. `optimizer_implementation` applies to AdamW only:
torch has a single Muon, which updates one matrix after another. The figures are those of torch.optim.Muon (torch 2.13,
torch/optim/_muon.py). With the momentum in fp32, an update casts a copy of it to bf16, and takes five Newton-Schulz
steps of three matrix products each:

    A = X X^T;  B = b A + c A A;  X = a X + B X

X is m x n with m <= n: a matrix with more rows than columns is transposed. Jordan et al. 2024, "Muon: An optimizer for
hidden layers in neural networks".
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

from gssim.workload.layer import Layer, Parameter

NEWTON_SCHULZ_STEPS = 5
"""torch's default, and Megatron-LM's."""
BF16_BYTES = 2
OPERATIONS_PER_MATRIX = 8 + 3 * NEWTON_SCHULZ_STEPS
"""Two interpolations, a cast, a norm, its bound, a division, the products, the decay and the update."""
Matrix = tuple[int, int]
"""Rows and columns."""


def is_matrix(layer: Layer, parameter: Parameter) -> bool:
    """Return whether Muon updates a parameter of a layer: a matrix of a block."""
    return layer.block and len(parameter.shape) == 2


def matrices_of(layer: Layer, parameter: Parameter, *, stacks: bool = False) -> tuple[Matrix, ...]:
    """Return the matrices that Muon orthogonalises in a parameter of a layer.

    `stacks`: whether each expert's matrix in a three-dimensional tensor counts as a matrix, as in Megatron-LM, which
    keeps them apart. Otherwise AdamW updates the tensor, since torch.optim.Muon refuses it.
    """
    shape = parameter.shape
    if is_matrix(layer, parameter):
        return ((shape[0], shape[1]),)
    if stacks and layer.block and len(shape) == 3:
        return ((shape[1], shape[2]),) * shape[0]
    return ()


def all_matrices(layers: Iterable[Layer], *, stacks: bool = False) -> list[Matrix]:
    """Return the matrices of all layers and their repetitions; `stacks`: see `matrices_of`."""
    return [
        matrix
        for layer in layers
        for parameter in layer.parameters
        for matrix in matrices_of(layer, parameter, stacks=stacks) * layer.repeats
    ]


def elements_of(matrices: Iterable[Matrix]) -> int:
    """Return the number of elements of all matrices together."""
    return sum(rows * columns for rows, columns in matrices)


def newton_schulz_products(rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Return (FLOP, bytes read and written) of each product of a Newton-Schulz step.

    The products whose result is added to another matrix (with `beta`) read that matrix too.

    >>> newton_schulz_products(2, 3)
    ((24, 32), (16, 32), (24, 44))
    >>> newton_schulz_products(3, 2) == newton_schulz_products(2, 3)
    True
    """
    m, n = sorted((rows, columns))
    square, whole = m * m, m * n
    return (
        (2 * m * whole, BF16_BYTES * (2 * whole + square)),
        (2 * m * square, BF16_BYTES * 4 * square),
        (2 * m * whole, BF16_BYTES * (3 * whole + square)),
    )


def elementwise_bytes(rows: int, columns: int, *, value_bytes: int) -> int:
    """Return the bytes that the other operations of a matrix's update read and write, assuming no cache hits.

    Momentum and update are interpolated (3 values each); the update is cast, its norm is taken, and it is divided by
    it; the parameter is decayed (torch does so even by 0), and the bf16 update is added.

    >>> elementwise_bytes(1, 1, value_bytes=4)
    54
    """
    return rows * columns * (11 * value_bytes + 5 * BF16_BYTES)


def largest_temporaries(matrices: Iterable[Matrix], *, value_bytes: int) -> tuple[float, ...]:
    """Return the bytes of the tensors that an update of these matrices holds at its peak, besides its state.

    The peak is in the last product of a step of the largest matrix: the update in the optimizer's precision, X before
    and after, A and B. The workspace of the products' kernels is not included (on a CPU, a packed copy of an operand).

    >>> largest_temporaries([(2, 3), (4, 3)], value_bytes=4)
    (48.0, 24.0, 18.0, 18.0, 24.0)
    """

    def held(matrix: Matrix) -> tuple[float, ...]:
        whole, square = matrix[0] * matrix[1], min(matrix) ** 2
        x, gram = float(BF16_BYTES * whole), float(BF16_BYTES * square)
        return (float(value_bytes * whole), x, gram, gram, x)

    return max(map(held, matrices), key=sum, default=())


Optimizer = Literal["sgd", "sgd-momentum", "adam", "adamw", "muon"]
Implementation = Literal["for-loop", "foreach", "fused"]
StatePrecision = Literal["8-bit", "4-bit"]

DEFAULT_IMPLEMENTATIONS: dict[str, Implementation] = {"cpu": "for-loop", "cuda": "foreach", "tpu": "fused"}
"""Default implementation by kind of device; see [Note: implementations]."""
STEP_COUNTER_BYTES = 4
"""torch's Adam keeps a float32 step counter for each tensor."""
BITS: dict[StatePrecision, int] = {"8-bit": 8, "4-bit": 4}
BLOCKS: dict[StatePrecision, int] = {"8-bit": 256, "4-bit": 128}
"""Number of low-bit values of a moment that share one fp32 scale; Dettmers et al. 2021, "8-bit Optimizers via
Block-wise Quantization"; bitsandbytes 0.45, optim/optimizer.py; torchao 0.14, optim/adam.py."""
LEAST_ELEMENTS = 4096
"""Smaller tensors keep their moments in fp32 (`min_8bit_size`)."""
VALUES_KEPT = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2, "muon": 1}
"""Values per element in the optimizer's state. For Muon, those of its matrices; AdamW updates the rest."""
COUNTS_STEPS = ("adam", "adamw")
DECOUPLES_DECAY = ("adamw",)
"""Optimizers whose weight decay scales the parameters in place; the others add it to (a copy of) the gradient."""
OPERATIONS = {"sgd": 1, "sgd-momentum": 3, "adam": 7, "adamw": 7}
"""Operations per tensor, or per list of tensors, without weight decay, which adds one."""
VALUES_MOVED = {"sgd": 3, "sgd-momentum": 8, "adam": 18, "adamw": 18}
"""Values per element that these operations read and write in sequence, assuming no cache hits.

Adam: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4; momentum: mul 2, add 3, add 3. A calibrated H200's
slope agrees: 71, 33 and 14 bytes an element for foreach AdamW, momentum and SGD.
"""
FUSED_VALUES_MOVED = {"sgd": 3, "sgd-momentum": 5, "adam": 7, "adamw": 7}
"""Values per element, each once: parameter and state read and written, the gradient read."""
TENSORS_PER_LAUNCH = 36
"""Tensors per kernel launch for kernels on four lists; ATen/native/cuda/MultiTensorApply.cuh, depth_to_max_tensors."""


def implementation_on(device_kind: str, wanted: str) -> Implementation:
    """Return the implementation that runs on a kind of device where the user set `wanted`.

    >>> [implementation_on(kind, "default") for kind in ("cpu", "cuda", "tpu")], implementation_on("cuda", "fused")
    (['for-loop', 'foreach', 'fused'], 'fused')
    """
    if wanted == "default":
        return DEFAULT_IMPLEMENTATIONS[device_kind]
    assert wanted in ("for-loop", "foreach", "fused"), wanted
    return wanted  # type: ignore[return-value]


def state_tensor_bytes(
    optimizer: str, *, elements: int, value_bytes: int, precision: StatePrecision | None = None
) -> tuple[float, ...]:
    """Return the bytes of each tensor of the state of one parameter, without step counters.

    >>> state_tensor_bytes("adamw", elements=2560, value_bytes=4)
    (10240.0, 10240.0)
    >>> state_tensor_bytes("adamw", elements=5120, value_bytes=4, precision="8-bit")
    (5120.0, 5120.0, 80.0, 80.0)
    """
    kept = VALUES_KEPT[optimizer]
    if precision is None or elements < LEAST_ELEMENTS:
        return (float(elements * value_bytes),) * kept
    scales = math.ceil(elements / BLOCKS[precision])
    return (float(math.ceil(elements * BITS[precision] / 8)),) * kept + (4.0 * scales,) * kept


def state_element_bytes(optimizer: str, *, value_bytes: int, precision: StatePrecision | None = None) -> float:
    """Return the bytes of the optimizer's state for an element of a large tensor.

    >>> state_element_bytes("adamw", value_bytes=4), state_element_bytes("adamw", value_bytes=4, precision="8-bit")
    (8.0, 2.03125)
    """
    if precision is None:
        return float(VALUES_KEPT[optimizer] * value_bytes)
    return VALUES_KEPT[optimizer] * (BITS[precision] / 8 + 4 / BLOCKS[precision])


def optimizer_state_bytes(
    optimizer: str, *, elements: int, tensors: int, value_bytes: int, matrices: Sequence[Matrix] = ()
) -> float:
    """Return the bytes of the optimizer's state; `matrices`: the tensors that Muon updates, if it is the optimizer.

    >>> optimizer_state_bytes("adamw", elements=1000, tensors=2, value_bytes=4)
    8008.0
    >>> optimizer_state_bytes("muon", elements=1000, tensors=2, value_bytes=4, matrices=[(30, 30)])
    4404.0
    """
    if optimizer == "muon":
        own, others = elements_of(matrices), tensors - len(matrices)
        rest = optimizer_state_bytes("adamw", elements=elements - own, tensors=others, value_bytes=value_bytes)
        return VALUES_KEPT["muon"] * own * value_bytes + rest
    counters = tensors * STEP_COUNTER_BYTES if optimizer in COUNTS_STEPS else 0
    return float(VALUES_KEPT[optimizer] * elements * value_bytes + counters)


def optimizer_temporary_bytes(
    optimizer: str,
    *,
    implementation: Implementation,
    tensor_elements: Sequence[int],
    value_bytes: int,
    weight_decay: float = 0.0,
    matrices: Sequence[Matrix] = (),
) -> float:
    """Return the peak memory of an optimizer step besides its state (not of the first step, which allocates the state).

    `matrices`: the tensors that Muon updates, if it is the optimizer; they come first in `tensor_elements`.

    fused: nothing. foreach: one value of every element, either Adam's root of the second moment or the gradients with
    weight decay added, which are freed before the root is computed. for-loop: a copy of the gradient if weight decay is
    added to it, and for Adam the root and its quotient; the name `denom` still holds the previous tensor then.

    >>> optimizer_temporary_bytes("adamw", implementation="for-loop", tensor_elements=[10, 20], value_bytes=4)
    200.0
    """
    if optimizer == "muon":
        of_the_rest = optimizer_temporary_bytes(
            "adamw",
            implementation=implementation,
            tensor_elements=tensor_elements[len(matrices) :],
            value_bytes=value_bytes,
        )
        return max(sum(largest_temporaries(matrices, value_bytes=value_bytes)), of_the_rest)
    adds_decay = weight_decay > 0 and optimizer not in DECOUPLES_DECAY
    is_adam = optimizer in COUNTS_STEPS
    sizes = [0, *tensor_elements]
    if implementation == "fused" or len(sizes) == 1 or not (is_adam or adds_decay):
        return 0.0
    if implementation == "foreach":
        return float(sum(sizes) * value_bytes)
    copies = 2 * is_adam + adds_decay
    return float(max(is_adam * before + copies * now for before, now in pairwise(sizes)) * value_bytes)


def optimizer_operations(
    optimizer: str,
    *,
    implementation: Implementation,
    tensors: int,
    device_kind: str,
    weight_decay: float = 0.0,
    precision: StatePrecision | None = None,
) -> int:
    """Return the number of operations that the host launches in a step.

    for-loop, and foreach on a CPU: all operations for each tensor. foreach on CUDA: each operation once per group of
    tensors that fits a launch, plus Adam's step counters, which are on the host, one by one. fused: one operation per
    such group, or on a CPU per tensor. With a state of another `precision`, a launch handles one tensor.

    >>> optimizer_operations("adamw", implementation="for-loop", tensors=100, device_kind="cuda")
    700
    >>> optimizer_operations("adamw", implementation="foreach", tensors=100, device_kind="cuda")
    121
    """
    launches = tensors if device_kind == "cpu" or precision is not None else math.ceil(tensors / TENSORS_PER_LAUNCH)
    if implementation == "fused":
        return launches
    each = OPERATIONS[optimizer] + (weight_decay > 0)
    if implementation == "for-loop" or device_kind == "cpu":
        return tensors * each
    return launches * each + (tensors if optimizer in COUNTS_STEPS else 0)


def optimizer_moved_bytes(
    optimizer: str,
    *,
    implementation: Implementation,
    value_bytes: int,
    weight_decay: float = 0.0,
    precision: StatePrecision | None = None,
) -> float:
    """Return the bytes per element that a step reads and writes.

    >>> optimizer_moved_bytes("adamw", implementation="foreach", value_bytes=4, weight_decay=0.01)
    80.0
    >>> optimizer_moved_bytes("adamw", implementation="fused", value_bytes=4, precision="8-bit")
    16.0625
    """
    if implementation == "fused":
        state = 2 * VALUES_KEPT[optimizer]
        others = (FUSED_VALUES_MOVED[optimizer] - state) * value_bytes
        return others + 2 * state_element_bytes(optimizer, value_bytes=value_bytes, precision=precision)
    decay = 0 if weight_decay == 0 else 2 if optimizer in DECOUPLES_DECAY else 3
    return float((VALUES_MOVED[optimizer] + decay) * value_bytes)
