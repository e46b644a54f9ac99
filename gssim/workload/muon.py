"""Muon: the momentum of each matrix of a block is orthogonalised before it is applied; AdamW updates everything else.

The matrices are the two-dimensional parameters of the model's blocks. AdamW updates embeddings, the head, norms and
biases, as the authors of Muon advise and as Megatron-LM does. `optimizer_implementation` applies to AdamW only: torch
has a single Muon, which updates one matrix after another.

The figures are those of torch.optim.Muon (torch 2.13, torch/optim/_muon.py). With the momentum in fp32, an update casts
a copy of it to bf16, and takes five Newton-Schulz steps of three matrix products each:

    A = X X^T;  B = b A + c A A;  X = a X + B X

X is m x n with m <= n: a matrix with more rows than columns is transposed. Jordan et al. 2024, "Muon: An optimizer for
hidden layers in neural networks".
"""

from collections.abc import Iterable

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
