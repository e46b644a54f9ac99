"""Layers of a model file from a sequence of operations: FLOP, bytes, buffer lifetimes, reductions over tensor ranks.

An operation has an index in the forward and the mirrored index in the backward. Its output is freed after its last use:
in the backward where an operation saves it, else after the last forward operation that reads it. The gradient of an
output is allocated in the backward of its readers and freed in the backward of the operation that produced it.

`loss_of` gives the operations of the loss; which copies of the logits exist at once depends on the software.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gssim.workload import Buffer, Layer, Moment, Parameter, Polynomial, Reduction

ZERO_BYTES = Polynomial(((0, 0, 0),))
INPUT = "input"
"""Name of the layer's input, the output of the layer before it."""
ATTENTION = ("scores", "softmax", "dropout", "context")
"""Names of the operations from scores to context."""


@dataclass(frozen=True)
class TensorSplit:
    """Sizes of tensors as polynomials: of a whole layer, or of one that is split over `ranks` tensor ranks."""

    ranks: int = 1
    windows: tuple[int, int] | None = None
    """Number and length of a sample's windows, which then take the place of its sequence."""
    alone: bool = False
    """Sizes are those of one of the ranks, not of each unit that it holds (which are then experts)."""

    def size(self, *, one: float = 0, bs: float = 0, bss: float = 0, shared: bool = True) -> Polynomial:
        """Return one + bs * b * s + bss * b * s^2 bytes; `shared`: each rank stores its part of it (a unit).

        >>> str(TensorSplit(2).size(bs=8)), str(TensorSplit(2).size(bs=8, shared=False)), str(TensorSplit().size(bs=8))
        ('4*b*s*u', '8*b*s', '8*b*s')
        """
        parts = self.ranks if shared else 1
        coefficients = [(one, 0, 0), (bs, 1, 1), (bss, 1, 2)]
        if self.windows is not None:
            count, length = self.windows
            coefficients = [(one, 0, 0), (count * length * (bs + bss * length), 1, 0)]
        terms = tuple((math.ceil(value / parts), i, j) for value, i, j in coefficients if value) or ZERO_BYTES.terms
        return Polynomial((), terms) if shared and self.ranks > 1 and not self.alone else Polynomial(terms)


def total(sizes: Iterable[Polynomial], factor: float = 1) -> Polynomial:
    """Return the sum of sizes, times a factor.

    >>> str(total([Polynomial.parse("2*b + 1"), Polynomial.parse("3*b")], 2))
    '10*b + 2'
    """
    sums: tuple[dict[tuple[int, int], float], ...] = ({}, {}, {})
    for size in sizes:
        for counts, size_terms in zip(sums, (size.terms, size.unit_terms, size.row_terms), strict=True):
            for value, i, j in size_terms:
                counts[i, j] = counts.get((i, j), 0) + factor * value
    own, units, rows = (tuple((round(v), i, j) for (i, j), v in terms.items() if v) for terms in sums)
    return Polynomial(own, units, (), rows) if own or units or rows else ZERO_BYTES


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of an operation; `sharded_dim`: the dimension in which tensor ranks shard it."""

    name: str
    shape: tuple[int, ...]
    sharded_dim: int | None = None
    per_expert: bool = False
    """Whether ranks divide it by its first dimension, which has one place for each expert."""

    def parameter(self, ranks: int, moment: Moment, *, alone: bool = False) -> Parameter:
        """Return the parameter as a model file has it; sizes that `ranks` does not divide are padded.

        `alone`: one rank's shard as a parameter of its own, whose sharded dimension is not marked.
        """
        if self.per_expert:
            return Parameter(self.name, self.shape, moment, moment, 0)
        if self.sharded_dim is None or ranks == 1:
            return Parameter(self.name, self.shape, moment, moment)
        sizes = (math.ceil(n / ranks) if i == self.sharded_dim else n for i, n in enumerate(self.shape))
        return Parameter(self.name, tuple(sizes), moment, moment, None if alone else self.sharded_dim)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A computation of one or a few kernels; sizes in bytes for one call on a whole batch."""

    name: str
    reads: tuple[str, ...] = (INPUT,)
    """Names of the operations whose outputs it reads."""
    output: Polynomial
    flop: Polynomial = ZERO_BYTES
    """FLOP of the forward; the backward has twice as many, unless `backward_flop` is given."""
    backward_flop: Polynomial | None = None
    operands: Polynomial = ZERO_BYTES
    """Bytes that a matrix product reads and writes in the forward; twice as many in the backward."""
    streamed: Polynomial = ZERO_BYTES
    """Bytes of the forward that are memory-bound."""
    backward_streamed: Polynomial = ZERO_BYTES
    saves: tuple[str, ...] = ()
    """Names of the operations (possibly this one) whose outputs are saved for its backward."""
    also_saved: Polynomial = ZERO_BYTES
    """Bytes saved for the backward beside outputs: masks, statistics."""
    weights: tuple[Weight, ...] = ()
    kept: bool = False
    """Whether selective recomputation keeps its output."""
    passes_gradient: bool = False
    """Whether the gradient of its output is also that of its inputs, without a copy (a sum)."""
    kernels: int = 1
    """Operations that the host launches in the forward; twice as many in the backward, unless given."""
    backward_kernels: int | None = None
    backward_scratch: Polynomial = ZERO_BYTES
    """Bytes that exist during its backward alone."""
    reduced: Polynomial | None = None
    """Bytes that tensor ranks all-reduce after the forward; None: nothing."""
    backward_reduced: Polynomial | None = None
    """Bytes that tensor ranks all-reduce after the backward; None: nothing."""
    in_wide_format: bool = False
    """Whether its product is in 16 bits although the other products of blocks are in float8."""
    ring: Polynomial | None = None
    """Bytes of keys and values that context ranks pass around after each pass; None: nothing."""


@dataclass(frozen=True)
class LayerOperations:
    """The operations of a layer in order."""

    operations: tuple[Operation, ...]
    split: TensorSplit
    early_stop: bool = True
    """Whether recomputation ends once all tensors exist that the backward needs (torch does so, Megatron does not)."""
    gathers_alone: bool = False
    """Whether ranks gather and reduce-scatter parts of the sequence in calls of their own; see `Software`."""
    attention_alone: bool = False
    """Whether selective recomputation reruns the attention, and nothing else."""
    gathered_ratio: float = 1.0
    """Ratio of gathered bytes to the tensor's bytes with `gathers_alone`; below 1 if it is cast to float8 before."""
    last: int = field(init=False)

    def __post_init__(self) -> None:
        """Set the index of the last operation."""
        object.__setattr__(self, "last", len(self.operations) - 1)

    def readers(self, name: str) -> list[int]:
        """Return the indices of the operations that read an output."""
        return [i for i, operation in enumerate(self.operations) if name in operation.reads]

    def buffers(self, input_bytes: Polynomial, freed_at: int) -> Iterable[Buffer]:
        """Yield all buffers; the gradient of the input is freed at index `freed_at` of the layer before."""
        yield from self._output_buffers()
        yield from self._gradient_buffers()
        for place, operation in enumerate(self.operations):
            if operation.backward_scratch != ZERO_BYTES:
                moment = Moment("b", self.last - place)
                yield Buffer(moment, moment, "temporaries", operation.backward_scratch)
        if self.readers(INPUT):
            born, freed = Moment("b", self.last - min(self.readers(INPUT))), Moment("b", freed_at, -1)
            yield Buffer(born, freed, "temporaries", input_bytes)

    def _output_buffers(self) -> Iterable[Buffer]:
        for place, operation in enumerate(self.operations):
            born = Moment("f", place)
            savers = [i for i, other in enumerate(self.operations) if operation.name in other.saves]
            if place == self.last:
                yield Buffer(born, Moment("b", self.last, 1), "activations", operation.output)
            elif savers:
                yield Buffer(born, Moment("b", self.last - min(savers)), "activations", operation.output)
            else:
                end = max(self.readers(operation.name), default=place)
                yield Buffer(born, Moment("f", end), "temporaries", operation.output)
            if operation.also_saved != ZERO_BYTES:
                yield Buffer(born, Moment("b", self.last - place), "activations", operation.also_saved)

    def _gradient_buffers(self) -> Iterable[Buffer]:
        for place, operation in enumerate(self.operations[:-1]):
            producers = [i for i in self.readers(operation.name) if not self.operations[i].passes_gradient]
            if producers:
                born, freed = Moment("b", self.last - max(producers)), Moment("b", self.last - place)
                yield Buffer(born, freed, "temporaries", operation.output)

    @property
    def recomputed(self) -> tuple[Operation, ...]:
        """The operations that a checkpointed block recomputes."""
        if not self.early_stop:
            return self.operations
        saved = [
            i
            for i, operation in enumerate(self.operations)
            if operation.also_saved != ZERO_BYTES or operation.name in self._saved()
        ]
        return self.operations[: max(saved, default=-1) + 1]

    @property
    def rerun_selectively(self) -> tuple[Operation, ...]:
        """The operations that selective recomputation reruns."""
        if self.attention_alone:
            return tuple(operation for operation in self.operations if operation.name in ATTENTION)
        return tuple(operation for operation in self.recomputed if not operation.kept)

    @property
    def kept_positions(self) -> tuple[int, ...]:
        """The places of the operations whose outputs selective recomputation keeps from the first forward.

        Where it reruns the attention alone, its result is kept too: the next layer saves it.
        """
        if not self.attention_alone:
            return tuple(i for i, operation in enumerate(self.operations) if operation.kept)
        return tuple(
            i
            for i, operation in enumerate(self.operations)
            if operation.name not in ATTENTION[:-1]
            and (operation.name in self._saved() or operation.also_saved != ZERO_BYTES)
        )

    def _rerun_alone(self) -> tuple[int, int] | None:
        """Return the places of the first and last operation of the attention where it alone is rerun."""
        places = [i for i, operation in enumerate(self.operations) if operation.name in ATTENTION]
        return (places[0], places[-1]) if self.attention_alone and places else None

    def _saved(self) -> set[str]:
        return {name for operation in self.operations for name in operation.saves}

    def layer(
        self, name: str, modules: Sequence[str], *, block: bool, input_bytes: Polynomial, freed_at: int = 0
    ) -> Layer:
        """Return the layer, repeated once for each of `modules`; for the last two arguments see `buffers`."""
        every, again = self.operations, self.recomputed
        rerun = self.rerun_selectively
        moved = [total([operation.operands, operation.streamed]) for operation in every]
        return Layer(
            name=name,
            modules=tuple(modules),
            block=block,
            parameters=tuple(
                weight.parameter(self.split.ranks, Moment("b", self.last - place), alone=self.split.alone)
                for place, operation in enumerate(every)
                for weight in operation.weights
            ),
            forward_flop=total(operation.flop for operation in every),
            backward_flop=total(
                total([operation.flop], 2) if operation.backward_flop is None else operation.backward_flop
                for operation in every
            ),
            forward_bytes=total(moved),
            backward_bytes=total([*(total([operation.operands], 2) for operation in every), *_streamed_back(every)]),
            forward_streamed_bytes=total(operation.streamed for operation in every),
            backward_streamed_bytes=total(_streamed_back(every)),
            saved_bytes=total(operation.output for operation in every if operation.name in self._saved()),
            output_bytes=every[-1].output,
            forward_operations=sum(operation.kernels for operation in every),
            backward_operations=sum(
                2 * operation.kernels if operation.backward_kernels is None else operation.backward_kernels
                for operation in every
            ),
            recompute_flop=total(operation.flop for operation in again),
            recompute_bytes=total(total([operation.operands, operation.streamed]) for operation in again),
            recompute_streamed_bytes=total(operation.streamed for operation in again),
            recompute_operations=sum(operation.kernels for operation in again),
            recompute_positions=len(again),
            selective_flop=total(operation.flop for operation in rerun),
            selective_bytes=total(total([operation.operands, operation.streamed]) for operation in rerun),
            selective_streamed_bytes=total(operation.streamed for operation in rerun),
            selective_operations=sum(operation.kernels for operation in rerun),
            selective_positions=self.kept_positions,
            selective_rerun=self._rerun_alone(),
            buffers=tuple(self.buffers(input_bytes, freed_at)),
            units=self.split.ranks if self.split.ranks > 1 and not self.split.alone else None,
            reductions=(*(self._reductions() if self.split.ranks > 1 else ()), *self._rings()),
            linear=True if self.split.ranks > 1 and not self.split.alone else None,
        )

    def _rings(self) -> Iterable[Reduction]:
        for place, operation in enumerate(self.operations):
            if operation.ring is not None:
                for moment in (Moment("f", place), Moment("b", self.last - place)):
                    yield Reduction(moment, operation.ring, "ring")

    def _gathers(self) -> Iterable[Reduction]:
        """Yield the gathers of column-parallel layers' inputs, and the reduce-scatters of row-parallel layers' outputs.

        In the backward, inputs are gathered again, and gradients take the same ways back.
        """
        for place, operation in enumerate(self.operations):
            if operation.backward_reduced is not None and operation.reads[0] != INPUT:
                reader = next(place for place, each in enumerate(self.operations) if each.name == operation.reads[0])
                gathered = self._gathered(operation, operation.backward_reduced)
                yield Reduction(Moment("f", reader), gathered, "all-gather")
            if operation.reduced is not None:
                yield Reduction(Moment("f", place), operation.reduced, "reduce-scatter")
        for place, operation in reversed(list(enumerate(self.operations))):
            if operation.reduced is not None:
                moment = Moment("b", max(0, self.last - place - 1))
                yield Reduction(moment, self._gathered(operation, operation.reduced), "all-gather")
            if operation.backward_reduced is not None:
                moment = Moment("b", self.last - place)
                yield Reduction(moment, self._gathered(operation, operation.backward_reduced), "all-gather")
                yield Reduction(moment, operation.backward_reduced, "reduce-scatter")

    def _gathered(self, operation: Operation, size: Polynomial) -> Polynomial:
        """Return the bytes of the gather of a linear layer's input, or of the gradient of its output."""
        is_cast = self.gathered_ratio != 1 and not operation.in_wide_format
        return total([size], self.gathered_ratio) if is_cast else size

    def _reductions(self) -> Iterable[Reduction]:
        if self.gathers_alone:
            yield from self._gathers()
            return
        for place, operation in enumerate(self.operations):
            if operation.reduced is not None:
                yield Reduction(Moment("f", place), operation.reduced)
        for place, operation in reversed(list(enumerate(self.operations))):
            if operation.backward_reduced is not None:
                yield Reduction(Moment("b", self.last - place), operation.backward_reduced)


def _streamed_back(operations: Iterable[Operation]) -> list[Polynomial]:
    return [operation.backward_streamed for operation in operations]


FLOAT = 4
