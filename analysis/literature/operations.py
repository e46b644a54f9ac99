"""A layer from the chain of its operations: sizes, times of their lives and sums over ranks, as model files have them.

An operation has a place in the forward, and the mirrored place in the backward. Its output lives until the last
operation that needs it is done: one of the backward where one saves it, else the last of the forward that reads it.
The gradient of an output is made by the backward of what reads it, and goes with the backward of what made it.

The loss behind a model's logits: which tensors of them there are at once depends on the software.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gssim.workload import Buffer, Layer, Moment, Parameter, Polynomial, Reduction

if TYPE_CHECKING:
    from analysis.literature.transformer import Writer

NOTHING = Polynomial(((0, 0, 0),))
INPUT = "input"
"""What the layer before hands on."""


@dataclass(frozen=True)
class Cut:
    """How sizes are written: of a whole layer, or of one that `ranks` ranks share, a unit each."""

    ranks: int = 1

    def size(self, *, one: float = 0, bs: float = 0, bss: float = 0, shared: bool = True) -> Polynomial:
        """Return one + bs * b * s + bss * b * s^2; `shared`: each rank has its part of it.

        >>> str(Cut(2).size(bs=8)), str(Cut(2).size(bs=8, shared=False)), str(Cut().size(bs=8))
        ('4*b*s*u', '8*b*s', '8*b*s')
        """
        parts = self.ranks if shared else 1
        found = [(one, 0, 0), (bs, 1, 1), (bss, 1, 2)]
        terms = tuple((math.ceil(value / parts), i, j) for value, i, j in found if value) or NOTHING.terms
        return Polynomial((), terms) if shared and self.ranks > 1 else Polynomial(terms)


def total(sizes: Iterable[Polynomial], factor: float = 1) -> Polynomial:
    """Return the sum of sizes, times a factor.

    >>> str(total([Polynomial.parse("2*b + 1"), Polynomial.parse("3*b")], 2))
    '10*b + 2'
    """
    sums: dict[bool, dict[tuple[int, int], float]] = {False: {}, True: {}}
    for size in sizes:
        for shared, terms in ((False, size.terms), (True, size.unit_terms)):
            for value, i, j in terms:
                sums[shared][i, j] = sums[shared].get((i, j), 0) + factor * value
    own, units = (tuple((round(v), i, j) for (i, j), v in each.items() if v) for each in sums.values())
    return Polynomial(own, units) if own or units else NOTHING


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of an operation; `cut`: the dimension in which ranks share it."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None

    def parameter(self, ranks: int, moment: Moment) -> Parameter:
        """Return it as a model file has it; sizes that ranks do not divide are padded."""
        if self.cut is None or ranks == 1:
            return Parameter(self.name, self.shape, moment, moment)
        sizes = (math.ceil(n / ranks) if i == self.cut else n for i, n in enumerate(self.shape))
        return Parameter(self.name, tuple(sizes), moment, moment, self.cut)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What is computed by one kernel, or a few; sizes in bytes, of one call for a whole batch."""

    name: str
    reads: tuple[str, ...] = (INPUT,)
    """The operations, by name, whose outputs it reads."""
    output: Polynomial
    flop: Polynomial = NOTHING
    """Of the forward; the backward of a matrix product has twice as many, unless `backward_flop` says otherwise."""
    backward_flop: Polynomial | None = None
    operands: Polynomial = NOTHING
    """Bytes that a matrix product reads and writes; of its backward, twice as many."""
    streamed: Polynomial = NOTHING
    """Bytes of the forward that no arithmetic hides."""
    backward_streamed: Polynomial = NOTHING
    saves: tuple[str, ...] = ()
    """The operations, itself perhaps, whose outputs its backward needs."""
    noted: Polynomial = NOTHING
    """Bytes saved besides: masks, statistics."""
    weights: tuple[Weight, ...] = ()
    kept: bool = False
    """Whether selective recomputation keeps its output."""
    passes_gradient: bool = False
    """Whether the gradients of what it reads are that of its output (a sum)."""
    kernels: int = 1
    summed: Polynomial | None = None
    """After the forward, ranks sum so many bytes."""
    backward_summed: Polynomial | None = None


@dataclass(frozen=True)
class Chain:
    """The operations of a layer in order."""

    operations: tuple[Operation, ...]
    cut: Cut
    early_stop: bool = True
    """Whether a forward that is run again stops once all is there that the backward needs (torch does, Megatron does
    not)."""
    last: int = field(init=False)

    def __post_init__(self) -> None:
        """Number the last operation."""
        object.__setattr__(self, "last", len(self.operations) - 1)

    def readers(self, name: str) -> list[int]:
        """Return the places of the operations that read an output."""
        return [i for i, each in enumerate(self.operations) if name in each.reads]

    def buffers(self, passed: Polynomial, held: int) -> Iterable[Buffer]:
        """Give all buffers; `passed`: bytes of its input, whose gradient goes at place `held` of the layer before."""
        yield from self._made()
        yield from self._gradients()
        if self.readers(INPUT):
            born, freed = Moment("b", self.last - min(self.readers(INPUT))), Moment("b", held, -1)
            yield Buffer(born, freed, "temporaries", passed)

    def _made(self) -> Iterable[Buffer]:
        for place, each in enumerate(self.operations):
            born = Moment("f", place)
            savers = [i for i, other in enumerate(self.operations) if each.name in other.saves]
            if place == self.last:
                yield Buffer(born, Moment("b", self.last, 1), "activations", each.output)
            elif savers:
                yield Buffer(born, Moment("b", self.last - min(savers)), "activations", each.output)
            else:
                end = max(self.readers(each.name), default=place)
                yield Buffer(born, Moment("f", end), "temporaries", each.output)
            if each.noted != NOTHING:
                yield Buffer(born, Moment("b", self.last - place), "activations", each.noted)

    def _gradients(self) -> Iterable[Buffer]:
        for place, each in enumerate(self.operations[:-1]):
            makers = [i for i in self.readers(each.name) if not self.operations[i].passes_gradient]
            if makers:
                born, freed = Moment("b", self.last - max(makers)), Moment("b", self.last - place)
                yield Buffer(born, freed, "temporaries", each.output)

    @property
    def again(self) -> tuple[Operation, ...]:
        """What a checkpointed block runs again."""
        if not self.early_stop:
            return self.operations
        saved = [i for i, each in enumerate(self.operations) if each.noted != NOTHING or each.name in self._saved()]
        return self.operations[: max(saved, default=-1) + 1]

    def _saved(self) -> set[str]:
        return {name for each in self.operations for name in each.saves}

    def layer(self, name: str, modules: Sequence[str], *, block: bool, passed: Polynomial, held: int = 0) -> Layer:
        """Return the layer, `modules` of them in a row; see `buffers`."""
        every, again = self.operations, self.again
        rerun = tuple(each for each in again if not each.kept)
        moved = [total([each.operands, each.streamed]) for each in every]
        return Layer(
            name=name,
            modules=tuple(modules),
            block=block,
            parameters=tuple(
                weight.parameter(self.cut.ranks, Moment("b", self.last - place))
                for place, each in enumerate(every)
                for weight in each.weights
            ),
            forward_flop=total(each.flop for each in every),
            backward_flop=total(
                total([each.flop], 2) if each.backward_flop is None else each.backward_flop for each in every
            ),
            forward_bytes=total(moved),
            backward_bytes=total([*(total([each.operands], 2) for each in every), *_streamed_back(every)]),
            forward_streamed_bytes=total(each.streamed for each in every),
            backward_streamed_bytes=total(_streamed_back(every)),
            saved_bytes=total(each.output for each in every if each.name in self._saved()),
            output_bytes=every[-1].output,
            forward_operations=sum(each.kernels for each in every),
            backward_operations=sum(2 * each.kernels for each in every),
            recompute_flop=total(each.flop for each in again),
            recompute_bytes=total(total([each.operands, each.streamed]) for each in again),
            recompute_streamed_bytes=total(each.streamed for each in again),
            recompute_operations=sum(each.kernels for each in again),
            recompute_positions=len(again),
            selective_flop=total(each.flop for each in rerun),
            selective_bytes=total(total([each.operands, each.streamed]) for each in rerun),
            selective_streamed_bytes=total(each.streamed for each in rerun),
            selective_operations=sum(each.kernels for each in rerun),
            selective_positions=tuple(i for i, each in enumerate(every) if each.kept),
            buffers=tuple(self.buffers(passed, held)),
            units=self.cut.ranks if self.cut.ranks > 1 else None,
            reductions=tuple(self._sums()) if self.cut.ranks > 1 else (),
            linear=True if self.cut.ranks > 1 else None,
        )

    def _sums(self) -> Iterable[Reduction]:
        for place, each in enumerate(self.operations):
            if each.summed is not None:
                yield Reduction(Moment("f", place), each.summed)
        for place, each in reversed(list(enumerate(self.operations))):
            if each.backward_summed is not None:
                yield Reduction(Moment("b", self.last - place), each.backward_summed)


def _streamed_back(operations: Iterable[Operation]) -> list[Polynomial]:
    return [each.backward_streamed for each in operations]


FLOAT = 4


def loss_of(writer: "Writer", vocabulary: int) -> tuple[Operation, ...]:
    """Return the operations from the logits on, of so many rows, to the loss."""
    if writer.software.fused_loss:
        return (_fused(writer, vocabulary),)
    if writer.software.in_place_loss:
        return (_cast(writer, vocabulary, saves=("float_logits",)), _in_place(writer, vocabulary))
    return (_cast(writer, vocabulary), *_softmax_and_loss(writer, vocabulary))


def _cast(writer: "Writer", vocabulary: int, saves: tuple[str, ...] = ()) -> Operation:
    """Return the cast of the logits to float."""
    return Operation(
        name="float_logits",
        reads=("logits",),
        output=writer.tokens(vocabulary, value=FLOAT),
        streamed=writer.tokens(vocabulary, value=writer.value + FLOAT),
        backward_streamed=writer.tokens(vocabulary, value=writer.value + FLOAT),
        saves=saves,
    )


def _softmax_and_loss(writer: "Writer", vocabulary: int) -> tuple[Operation, ...]:
    """Return torch's loss: tensors of their own for what becomes of the logits."""
    size = writer.tokens(vocabulary, value=FLOAT)
    parallel = writer.software.parallel_loss and writer.cut.ranks > 1
    shifted = Operation(name="shifted", reads=("float_logits",), output=size)
    softmax = Operation(
        name="log_softmax",
        reads=("shifted",) if parallel else ("float_logits",),
        output=size,
        streamed=writer.tokens(2 * vocabulary, value=FLOAT),
        backward_streamed=writer.tokens(3 * vocabulary, value=FLOAT),
        saves=("log_softmax",),
    )
    loss = Operation(
        name="loss",
        # in parallel, four tensors in float are there at once: what is kept, zeros, their sum and its product
        reads=("log_softmax", "float_logits") if parallel else ("log_softmax",),
        output=writer.cut.size(one=FLOAT, shared=False),
        backward_streamed=size,
    )
    return (shifted, softmax, loss) if parallel else (softmax, loss)


def _in_place(writer: "Writer", vocabulary: int) -> Operation:
    """Return the loss that makes the softmax of its logits in their place, and their gradient in that one's."""
    return Operation(
        name="loss",
        reads=("float_logits",),
        output=writer.cut.size(one=FLOAT, shared=False),
        streamed=writer.tokens(2 * vocabulary, value=FLOAT),
        backward_streamed=writer.tokens(4 * vocabulary, value=FLOAT),
        saves=("float_logits",),
        passes_gradient=True,
        kernels=2,
    )


def _fused(writer: "Writer", vocabulary: int) -> Operation:
    """Return the loss that reads the logits twice, for their maxima and sums, and writes their gradient at once."""
    return Operation(
        name="loss",
        reads=("logits",),
        output=writer.cut.size(one=FLOAT, shared=False),
        streamed=writer.tokens(2 * vocabulary),
        backward_streamed=writer.tokens(2 * vocabulary),
        saves=("logits",),
        noted=writer.tokens(1, shared=False, value=2 * FLOAT),
    )
