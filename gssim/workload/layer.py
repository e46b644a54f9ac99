"""One layer of a model as traced: FLOP and bytes as polynomials, buffers with their lifetimes, parameters, reductions.

All quantities are functions of the batch size and the sequence length.

[Note: moments] A moment is a place in one training step: `f3` is the 4th operation of the layer's own forward, `b7`
the 8th of its backward, `b7@+1` that of the backward of the next layer, `end` the end of the backward pass. If the
backward is split, `i` stands for its first part, the gradient of the input, `w` for its second, the gradients of the
weights, and `input-end` is the end of the first. Buffers are allocated (born) and freed at moments, so memory can be
replayed for any plan without the module.

[Note: one sample] Strides along a dimension of size 1 do not matter, so of one sample torch copies fewer tensors. Where
attention has no fused kernel, for example, queries, keys and values of several samples are copied out of the output of
one map, while of one sample they stay views of it, which keep the whole output. So one sample is traced by itself.
Buffers of which only one sample has the like, or only several, say so; all others are of any number of samples. Moments
are those of several samples. Costs, and the buffers of partly trained layers and of split backwards, are functions of
the number of samples that are fitted to several.

[Note: sums in place] If a tensor has several uses, autograd adds their gradients one by one: into the memory of the
first, if nothing else refers to that. So no sum is in place if another operation has the first gradient too, or if it
is a view, as that of a linear map in fp32 is. Under a trace every sum is a buffer of its own. If a real step computes
it in place, the first gradient is marked `summed-in-place`: it is released just before the sum is allocated, which thus
takes its memory. Gradients that a pipeline's stage receives are never summed in place: the schedule refers to them.
So is the product marked to which a linear map adds its bias: where its input has three or more dimensions and is not
contiguous, a run adds the bias in place, and a trace in a new buffer.

[Note: routed rows] If ranks divide the routed experts of a layer, each rank holds u of them and processes r rows: one
row for every pair of a token of its group and an expert of that token that the rank holds. Quantities are polynomials
in r too; the number of rows follows from the load of the experts. If the block is also cut in u units, the rank holds e
experts instead.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from gssim.execution.cache import cached_by_identity
from gssim.units import PRECISION_BYTES, Count, PositiveFloat, PositiveInt, Recompute, omits_defaults, spec

_TERM = re.compile(r"^(-?\d+)((?:\*(?:[bs](?:\^[12])?|[uprea]))*)$")
Samples = TypeVar("Samples", int, float)
Terms = tuple[tuple[int, int, int], ...]
"""(Coefficient, power of b, power of s)."""
FIELDS_OF_TERMS = {
    "": "terms",
    "u": "unit_terms",
    "p": "part_terms",
    "r": "row_terms",
    "e": "expert_terms",
    "up": "unit_part_terms",
    "a": "rank_terms",
    "ua": "unit_rank_terms",
}
"""Fields of a polynomial in their order, keyed by the letters that multiply their terms besides powers of b and s."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A function of batch size b and sequence length s, as terms (coefficient, power of b, power of s)."""

    terms: Terms
    unit_terms: Terms = ()
    """Terms that count once for each unit u on a rank; see [Note: units] in `gssim.workload.model`."""
    part_terms: Terms = ()
    """Terms that count once for each position p of a rank's part of the sequence; see [Note: sequence parts] in
    `gssim.workload.model`.
    """
    row_terms: Terms = ()
    """Terms that count once for each row r that a rank's experts process; see [Note: routed rows]."""
    expert_terms: Terms = ()
    """Terms that count once for each expert e that a rank holds, if u counts other units; see [Note: routed rows]."""
    unit_part_terms: Terms = ()
    """Terms that count once for each unit u and position p: adapters of rank u on a rank's part of the sequence."""
    rank_terms: Terms = ()
    """Terms that count once for each rank a of adapters (their LoRA rank) in sliced blocks."""
    unit_rank_terms: Terms = ()
    """Terms that count once for each unit u on a rank and each LoRA rank a of adapters there."""

    @classmethod
    def parse(cls, text: object) -> "Polynomial":
        """Return the polynomial that `text` denotes.

        >>> Polynomial.parse("3 + 2*b*s^2").at(b=10, s=4)
        323
        """
        if isinstance(text, Polynomial):
            return text
        if isinstance(text, bool) or not isinstance(text, (int, str)):
            raise ValueError('must be a polynomial in b and s, such as "512 + 4*b*s"')
        return _polynomial(str(text))

    def at(self, *, b: Samples, s: int) -> Samples:
        """Return the value at batch size `b` and sequence length `s`, without the terms in units or positions."""
        value: Samples = sum(c * b**i * s**j for c, i, j in self.terms)
        return value

    def held(self, units: int, positions: int | None = 0, rows: int = 0, experts: int = 0) -> "Polynomial":
        """Return the polynomial for a rank with `units` units, `positions` positions of each sequence, `rows` rows per
        sample, and `experts` experts.

        If `positions` is None, it stays a function of the positions.

        >>> str(Polynomial.parse("8*b + 3*b*u + 2*s*u").held(2))
        '14*b + 4*s'
        >>> str(Polynomial.parse("8*b*s + 4*b*p").held(2, positions=16))
        '8*b*s + 64*b'
        >>> str(Polynomial.parse("8*b*s + 4*r").held(2, rows=32))
        '8*b*s + 128*b'
        >>> str(Polynomial.parse("8*b*s + 4*u + 2*e").held(2, experts=3))
        '8*b*s + 14'
        >>> str(Polynomial.parse("8*b + 4*b*p + 2*b*u*p").held(3, positions=None))
        '8*b + 10*b*p'
        """
        if not (self.unit_terms or self.part_terms or self.row_terms or self.expert_terms or self.unit_part_terms):
            return self
        of_parts = summed_terms((1, self.part_terms), (units, self.unit_part_terms))
        rows_terms = tuple((c, i + 1, j) for c, i, j in self.row_terms)
        whole = (1, self.terms), (units, self.unit_terms), (rows, rows_terms), (experts, self.expert_terms)
        if positions is None:
            return Polynomial(summed_terms(*whole) or ((0, 0, 0),) * (not of_parts), part_terms=of_parts)
        return Polynomial(summed_terms(*whole, (positions, of_parts)) or ((0, 0, 0),))

    def with_rank(self, rank: int) -> "Polynomial":
        """Return the polynomial for adapters of LoRA rank `rank`, as a function of the other variables.

        >>> str(Polynomial.parse("8*b + 3*b*u + 2*b*a + 5*b*u*a").with_rank(2))
        '12*b + 13*b*u'
        """
        if not (self.rank_terms or self.unit_rank_terms):
            return self
        return replace(
            self,
            terms=summed_terms((1, self.terms), (rank, self.rank_terms)),
            unit_terms=summed_terms((1, self.unit_terms), (rank, self.unit_rank_terms)),
            rank_terms=(),
            unit_rank_terms=(),
        )

    def plus(self, other: "Polynomial") -> "Polynomial":
        """Return the sum of two polynomials."""
        return Polynomial(*((*getattr(self, name), *getattr(other, name)) for name in FIELDS_OF_TERMS.values()))

    def __str__(self) -> str:
        powers = ("", "*{0}", "*{0}^2")
        terms_as_text = [
            "*".join([f"{c}{powers[i].format('b')}{powers[j].format('s')}", *letters])
            for letters, name in FIELDS_OF_TERMS.items()
            for c, i, j in getattr(self, name)
        ]
        return " + ".join(terms_as_text) or "0"


@lru_cache(maxsize=4096)
def _polynomial(text: str) -> Polynomial:
    """Return the polynomial that a text denotes; cached, as a model's layers have thousands of texts, mostly equal."""
    terms: dict[str, list[tuple[int, int, int]]] = {letters: [] for letters in FIELDS_OF_TERMS}
    for term in text.replace(" ", "").split("+"):
        match = _TERM.match(term)
        if match is None:
            raise ValueError(f'has the term {term!r}; a polynomial in b and s is needed, such as "512 + 4*b*s"')
        powers = dict.fromkeys("bsuprea", 0)
        for factor in match.group(2).split("*")[1:]:
            powers[factor[0]] += int(factor[2:] or 1)
        kind = "".join(name for name in "uprea" if powers[name])
        if max(powers.values()) > 2 or max(powers[name] for name in "uprea") > 1 or kind not in terms:
            raise ValueError(
                f"has the term {term!r}; b and s may have powers up to 2, u up to 1, p or a beside it too, or r or e "
                "instead"
            )
        terms[kind].append((int(match.group(1)), powers["b"], powers["s"]))
    return Polynomial(*map(tuple, terms.values()))


def summed_terms(*weighted: tuple[int, Terms]) -> Terms:
    """Return the sum of all terms, each list times its factor, with one term per power."""
    sums: dict[tuple[int, int], int] = {}
    for factor, terms in weighted:
        for c, i, j in terms:
            sums[i, j] = sums.get((i, j), 0) + factor * c
    return tuple((c, i, j) for (i, j), c in sums.items() if c)


NO_COST = Polynomial(((0, 0, 0),))

Quantity = Annotated[
    Polynomial,
    BeforeValidator(Polynomial.parse),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "description": "polynomial in batch size b and sequence length s"}),
]


def text_of(cls: Any) -> Any:
    """Return the field type for a `cls` with a method `parse`, which is a text in files."""
    schema = {"type": "string", "description": cls.parse.__doc__}
    return Annotated[cls, BeforeValidator(cls.parse), PlainSerializer(str), WithJsonSchema(schema)]


_MOMENT = re.compile(r"^(?:(end|input-end)|([fbiw])(\d+)(?:@([+-]\d+))?)$")


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in a step relative to a layer; see [Note: moments]."""

    phase: str
    """`f`, `b` or `end`; of a split backward also `i`, `w` or `input-end`."""
    position: int = 0
    layer_offset: int = 0

    @classmethod
    def parse(cls, text: object) -> "Moment":
        """Return the moment that `text` denotes.

        >>> Moment.parse("b7@+1")
        Moment(phase='b', position=7, layer_offset=1)
        """
        if isinstance(text, Moment):
            return text
        moment = _moment(text) if isinstance(text, str) else None
        if moment is None:
            raise ValueError(f"{text!r} is not a moment such as f3, b7, b7@+1 or end")
        return moment

    def __str__(self) -> str:
        if self.phase in ("end", "input-end"):
            return self.phase
        return f"{self.phase}{self.position}" + (f"@{self.layer_offset:+d}" if self.layer_offset else "")


@lru_cache(maxsize=4096)
def _moment(text: str) -> Moment | None:
    """Return the moment that a text denotes, if it does; see `_polynomial`."""
    match = _MOMENT.match(text)
    if match is None:
        return None
    end, phase, position, offset = match.groups()
    return Moment(phase or end, int(position or 0), int(offset or 0))


FIXED = " fixed"
"""End of the text of a buffer or a collective whose size is the same in every precision."""
CASTS_INPUT = " casts-input"
"""End of the text of a buffer that is one of several casts of its layer's input."""
SUMMED_IN_PLACE = " summed-in-place"
"""End of the text of a buffer to which autograd adds another gradient in place."""
PAGES = " pages"
"""End of the text of a buffer whose size is rounded up to pages."""
PAGE_BYTES = 4096
HANDED_ON = " handed-on="
"""In the text of a buffer, what comes before `Buffer.handed_on`."""
ONE_SAMPLE, SEVERAL_SAMPLES = " samples=1", " samples>1"
"""Ends of the texts of buffers that exist only for such numbers of samples."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a layer allocates: size in bytes, category, and the moments of allocation and release."""

    born: Moment
    freed: Moment
    category: str
    size_bytes: Polynomial
    fixed: bool = False
    """Whether its size is the same in every precision: it holds integers or truth values, such as indices and masks."""
    casts_input: bool = False
    """Whether it is one of several casts of the layer's input by torch.autocast; see [Note: cast once] in
    `gssim.program.stage_boundary`."""
    summed_in_place: bool = False
    """Whether the operation that frees it adds to it in place; see [Note: sums in place]."""
    pages: bool = False
    """Whether its size is rounded up to pages, as are the parts of what oneDNN keeps of an LSTM's layer."""
    samples: str = ""
    """`ONE_SAMPLE` or `SEVERAL_SAMPLES` if it exists only for so many samples; see [Note: one sample]."""
    handed_on: Moment | None = None
    """When autograd's saving aside it would be freed, if it is one of several tensors that a block returns to later
    layers (such as a residual beside the output) and the block's own backward needs it too; else None. See [Note:
    handed on] in `gssim.memory.recompute`."""

    @classmethod
    def parse(cls, text: object) -> "Buffer":
        """Return the buffer that `text` denotes.

        >>> str(Buffer.parse("f0 b3@+1 activations 512*b*s"))
        'f0 b3@+1 activations 512*b*s'
        >>> Buffer.parse("f0 b3 activations 8*b*s fixed").bytes_at(b=2, s=3, scale=0.5)
        48
        >>> Buffer.parse("f0 b3 activations 8*b*s casts-input").casts_input
        True
        >>> str(Buffer.parse("f0 b3 activations 8*b*s handed-on=f4@+1").handed_on)
        'f4@+1'
        >>> Buffer.parse("b2 b5 temporaries 8*b*s summed-in-place").released_at
        4.75
        >>> [Buffer.parse("f0 b3 activations 8*b*s pages").bytes_at(b=b, s=512, scale=1) for b in (1, 2)]
        [4096, 8192]
        >>> [Buffer.parse("f0 b3 activations 8*b*s samples>1").bytes_at(b=b, s=3, scale=1) for b in (1, 2)]
        [0, 48]
        """
        if isinstance(text, Buffer):
            return text
        if not isinstance(text, str) or len(text.split(maxsplit=3)) != 4:
            raise ValueError(
                'must be "BORN FREED CATEGORY BYTES", such as "f0 b3 activations 512*b*s", and may end in "fixed", '
                '"casts-input", "summed-in-place" or "pages", after that in "handed-on=MOMENT", and after that in '
                '"samples=1" or "samples>1"'
            )
        born, freed, category, size = text.split(maxsplit=3)
        samples = next((end for end in (ONE_SAMPLE, SEVERAL_SAMPLES) if size.endswith(end)), "")
        size, _, handed_on = size.removesuffix(samples).partition(HANDED_ON)
        fixed, casts, summed, pages = (size.endswith(end) for end in (FIXED, CASTS_INPUT, SUMMED_IN_PLACE, PAGES))
        if category not in BUFFER_CATEGORIES:
            raise ValueError(f"has the category {category!r}; allowed: {', '.join(BUFFER_CATEGORIES)}")
        polynomial = Polynomial.parse(without_mark(size))
        outlives = Moment.parse(handed_on) if handed_on else None
        moments = Moment.parse(born), Moment.parse(freed)
        return cls(*moments, category, polynomial, fixed, casts, summed, pages, samples, outlives)

    def bytes_at(self, *, b: Samples, s: int, scale: float) -> float:
        """Return its size for b samples of s tokens, 0 if it does not exist then; `scale`: bytes of an element relative
        to those in the trace.
        """
        if self.samples and not self.exists_at(b):
            return 0
        size = self.size_bytes.at(b=b, s=s)
        if self.pages:
            return ceil(scale * size / PAGE_BYTES) * PAGE_BYTES
        return size if self.fixed else scale * size

    def exists_at(self, samples: float) -> bool:
        """Return whether it exists for this number of samples."""
        return not self.samples or (self.samples == ONE_SAMPLE) == (samples == 1)

    @property
    def released_at(self) -> float:
        """Position at which its memory is released, in the phase of `freed`.

        If a gradient is added to it in place, that is a quarter before the position at which the sum is allocated, and
        so after a recomputation of the block, which comes half a position before.
        """
        return self.freed.position - 0.25 * self.summed_in_place

    @property
    def is_saved(self) -> bool:
        """Whether it is allocated in the forward for the backward of the same layer or of an earlier one."""
        return self.born.phase == "f" and self.freed.phase == "b" and self.freed.layer_offset <= 0

    def __str__(self) -> str:
        end = FIXED if self.fixed else CASTS_INPUT if self.casts_input else ""
        end = SUMMED_IN_PLACE if self.summed_in_place else PAGES if self.pages else end
        end += f"{HANDED_ON}{self.handed_on}" if self.handed_on is not None else ""
        return f"{self.born} {self.freed} {self.category} {self.size_bytes}{end}{self.samples}"


def without_mark(text: str) -> str:
    """Return the text of a buffer, or of its size, without `fixed`, `casts-input`, `summed-in-place`, `pages`
    and `handed-on`.

    `text`: without `samples=1` or `samples>1`, which come last.

    >>> without_mark("b2 b5 temporaries 8*b*s summed-in-place")
    'b2 b5 temporaries 8*b*s'
    """
    text = text.partition(HANDED_ON)[0]
    return text.removesuffix(FIXED).removesuffix(CASTS_INPUT).removesuffix(SUMMED_IN_PLACE).removesuffix(PAGES)


def layer_output(buffers: Sequence[Buffer], output_bytes: Quantity) -> Buffer | None:
    """Return a layer's output: of its buffers that outlive it and have the output's size, the last one allocated.

    `output_bytes` tells the output from other tensors made for later layers, such as a mask. It is the size of the
    gradient of the next layer's input (`passed_bytes`), or of what the layer's module returns; operations outside of
    modules may compute the output from that. If no buffer has that size, the last one that outlives the layer is
    returned.
    """
    crossing = [b for b in buffers if b.born.phase == "f" and b.freed.layer_offset > 0]
    as_large = [buffer for buffer in crossing if buffer.size_bytes == output_bytes]
    return max(as_large or crossing, key=lambda buffer: buffer.born.position, default=None)


def layer_input_gradient(buffers: Sequence[Buffer]) -> Buffer | None:
    """Return the gradient of a layer's input, which the backward of the layer before uses."""
    crossing = [b for b in buffers if b.born.phase == b.freed.phase == "b" and b.freed.layer_offset == -1]
    return max(crossing, key=lambda buffer: buffer.born.position, default=None)


def passed_bytes(layer: "Layer", after: "Layer | None") -> Polynomial:
    """Return the size of what a layer passes to the next: that of the next input's gradient, or of the module's output.

    Operations outside of modules may take only a part of a module's output, for example where ranks divide sequences. A
    block whose input has no gradient still adds to its input, so the input is as large as the block's output.
    """
    gradient = layer_input_gradient(after.buffers) if after else None
    if gradient is not None:
        return gradient.size_bytes
    crossing = [each.size_bytes for each in layer.buffers if each.born.phase == "f" and each.freed.layer_offset > 0]
    return after.output_bytes if after and after.block and after.output_bytes in crossing else layer.output_bytes


REPLACED = "replaced"
"""Category of a tensor that the module keeps in an attribute (not as torch's buffer) until its next forward makes
another, as torch.nn.utils.weight_norm does: it is always there, and while the forward replaces it there are two."""
OPERAND_CASTS = "operand-casts"
"""Category of a copy of an operand that a CPU makes inside an operation on tensors of several data types. It counts as
a kernel's workspace: not on other devices, whose kernels convert what they read, nor where workspaces are measured."""
BUFFER_CATEGORIES = ("input", "activations", "temporaries", REPLACED, OPERAND_CASTS)

_PARAMETER = re.compile(r"^(\S+) ((?:\d+[uea]?(?:x\d+[uea]?)*)|scalar) (\S+) (\S+?)( summed)?$")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter tensor: its name (`{}` stands for the layer's module), shape, and the moments of its gradient.

    The gradient is allocated at `born` and complete at `ready`; both are relative to the layer that lists the
    parameter.
    """

    name: str
    shape: tuple[int, ...]
    born: Moment
    ready: Moment
    cut: int | None = None
    """Dimension that is cut in units. Its size in `shape` is that of one unit; see [Note: units]."""
    summed: bool = False
    """Whether each tensor-parallel rank has only a partial sum of the gradient: from its own heads, or from its part of
    the sequence; see [Note: sequence parts]."""
    sliced_dimension: int | None = None
    """Dimension of which a rank holds a slice, while other ranks hold the rest; None: the parameter is whole."""
    of_experts: bool = False
    """Whether it belongs to routed experts that are divided among other ranks than the units of blocks."""
    of_rank: int | None = None
    """Dimension that is the LoRA rank of adapters in sliced blocks. Its size in `shape` is that of rank 1."""

    @classmethod
    def parse(cls, text: object) -> "Parameter":
        """Return the parameter that `text` denotes.

        >>> Parameter.parse("{}.weight 4x3 b1 b2").elements
        12
        >>> Parameter.parse("{}.weight 4 b1 b2 summed").summed
        True
        """
        if isinstance(text, Parameter):
            return text
        match = _PARAMETER.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError('must be "NAME SHAPE BORN READY", such as "{}.weight 4x3 b1 b2", and may end in "summed"')
        name, shape, born, ready, summed = match.groups()
        sizes = [] if shape == "scalar" else shape.split("x")
        cut = [dimension for dimension, size in enumerate(sizes) if size.endswith(("u", "e"))]
        if len(cut) > 1:
            raise ValueError(f"has the shape {shape}; one dimension at most is cut in units (u), or in experts (e)")
        of_rank = next((dimension for dimension, size in enumerate(sizes) if size.endswith("a")), None)
        whole = tuple(int(size.rstrip("uea")) for size in sizes)
        moments = Moment.parse(born), Moment.parse(ready)
        of_experts = any(size.endswith("e") for size in sizes)
        return cls(name, whole, *moments, cut[0] if cut else None, bool(summed), of_experts=of_experts, of_rank=of_rank)

    def with_rank(self, rank: int) -> "Parameter":
        """Return the parameter for adapters of LoRA rank `rank`.

        >>> str(Parameter.parse("{}.up 8ux1a b1 b2").with_rank(4))
        '{}.up 8ux4 b1 b2'
        """
        if self.of_rank is None:
            return self
        sizes = (size * rank if dimension == self.of_rank else size for dimension, size in enumerate(self.shape))
        return replace(self, shape=tuple(sizes), of_rank=None)

    def held(self, units: int, experts: int = 0) -> "Parameter":
        """Return the parameter for a rank with `units` units of its layer, and `experts` experts if these are no units.

        >>> str(Parameter.parse("{}.weight 8ux3 b1 b2").held(2))
        '{}.weight 16x3 b1 b2'
        >>> Parameter.parse("{}.experts 1ex8x3 b1 b2").held(2, experts=4).shape
        (4, 8, 3)
        """
        if self.cut is None:
            return self
        count = experts if self.of_experts else units
        sizes = tuple(size * count if dimension == self.cut else size for dimension, size in enumerate(self.shape))
        return replace(self, shape=sizes, cut=None, sliced_dimension=self.cut)

    def __str__(self) -> str:
        letters = {self.cut: "e" if self.of_experts else "u", self.of_rank: "a"}
        sizes = [f"{size}{letters.get(dimension, '')}" for dimension, size in enumerate(self.shape)]
        summed = " summed" if self.summed else ""
        return f"{self.name} {'x'.join(sizes) or 'scalar'} {self.born} {self.ready}{summed}"

    @property
    def sliced(self) -> bool:
        """Whether it is a rank's slice: other ranks hold the rest."""
        return self.sliced_dimension is not None

    @property
    def sliced_size(self) -> int:
        """Size of a rank's slice in the dimension that ranks divide; 0 if the parameter is whole."""
        return 0 if self.sliced_dimension is None else self.shape[self.sliced_dimension]

    @property
    def elements(self) -> int:
        """Number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product


EXPERT_EXCHANGES = ("counts", "dispatch", "combine")
"""Collectives of divided experts: row counts, rows to the ranks of their experts, and results back."""
GATHER_AGAIN = "gather-again"
"""A second all-gather of parts of sequences, which runs beside the compute that follows."""
REDUCTIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring", GATHER_AGAIN, *EXPERT_EXCHANGES)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A collective among the ranks that share a block, right after a moment of the layer.

    By default an all-reduce. If ranks have parts of the sequence, an all-gather of the parts or a reduce-scatter into
    them. In the attention of context parallelism, an all-to-all that exchanges parts of the sequence for parts of
    heads, or a ring of keys and values.
    """

    moment: Moment
    size_bytes: Polynomial
    """Bytes of the whole tensor, not of a rank's part; for an all-to-all or ring, of each rank's; for a dispatch or
    combine, of one row."""
    kind: str = "all-reduce"
    fixed: bool = False
    """Whether its size is the same in every precision: a norm that computes in fp32 sums its means in fp32."""
    awaited: int | None = None
    """Position at which the layer waits for it; until then it overlaps with compute. None: at once. Not in files."""

    @classmethod
    def parse(cls, text: object) -> "Reduction":
        """Return the reduction that `text` denotes.

        >>> str(Reduction.parse("f5 64*b*s")), Reduction.parse("b3 all-gather 64*b*s").kind
        ('f5 64*b*s', 'all-gather')
        >>> Reduction.parse("f5 4*b*s fixed").bytes_at(b=2, s=3, scale=0.5)
        24
        """
        if isinstance(text, Reduction):
            return text
        if not isinstance(text, str) or len(text.split(maxsplit=1)) != 2:
            raise ValueError(
                'must be "MOMENT BYTES", such as "f5 64*b*s", or "MOMENT KIND BYTES", and may end in "fixed"'
            )
        moment, size = text.split(maxsplit=1)
        fixed, size = size.endswith(FIXED), size.removesuffix(FIXED)
        kind, _, rest = size.partition(" ")
        if kind in REDUCTIONS:
            return cls(Moment.parse(moment), Polynomial.parse(rest), kind, fixed)
        return cls(Moment.parse(moment), Polynomial.parse(size), fixed=fixed)

    def bytes_at(self, *, b: Samples, s: int, scale: float) -> float:
        """Return its size for b samples of s tokens; `scale`: bytes of an element relative to those in the trace."""
        size = self.size_bytes.at(b=b, s=s)
        return size if self.fixed else scale * size

    def __str__(self) -> str:
        kind = "" if self.kind == "all-reduce" else f"{self.kind} "
        return f"{self.moment} {kind}{self.size_bytes}{FIXED if self.fixed else ''}"


@spec
class PartialRecomputation:
    """Costs of a recomputation that reuses the outputs of some operations from the first forward."""

    flop: Quantity
    """FLOP that are recomputed."""
    bytes: Quantity
    """Bytes that the recomputation reads and writes."""
    streamed_bytes: Quantity
    """The part of these bytes that belongs to operations with next to no arithmetic."""
    operations: Count
    """Number of operations that the host launches for the recomputation."""
    positions: tuple[Count, ...]
    """Positions of the forward's operations whose outputs are kept."""


@spec
class PartialBackward:
    """Costs of training a layer in which some parameters are frozen, so that only the others get gradients.

    The forward costs the same as without frozen parameters; fewer tensors are saved, and the backward costs less.
    """

    backward_flop: Quantity
    """FLOP of this backward."""
    backward_bytes: Quantity
    """Bytes that this backward reads and writes."""
    backward_operations: Count
    """Number of operations that the host launches for this backward."""
    backward_streamed_bytes: Quantity | None = None
    """The part of these bytes that belongs to operations with next to no arithmetic; absent: not traced."""
    parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """The trained parameters, with their moments in this backward."""
    buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """Tensors of the layer, with their lifetimes in this backward."""
    reductions: tuple[text_of(Reduction), ...] = ()  # type: ignore[valid-type]
    """Collectives of the layer among the ranks that divide it, with their moments in such a step."""
    input_freed: text_of(Moment) | None = None  # type: ignore[valid-type]
    """Moment at which it releases the previous layer's output; absent: the previous layer itself keeps it longer."""
    gradient_freed: text_of(Moment) | None = None  # type: ignore[valid-type]
    """Moment at which it releases the gradient of its output; absent: as in the full backward."""

    _serialized = omits_defaults("backward_streamed_bytes", "reductions")


@spec
class LayerRoles:
    """Costs of a layer where only some layers are trained: what of a `Layer` is `None` without them."""

    untrained_buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """See `Layer.untrained_buffers`."""
    untrained_reductions: tuple[text_of(Reduction), ...] = ()  # type: ignore[valid-type]
    """See `Layer.untrained_reductions`."""
    frozen: PartialBackward | None = None
    """See `Layer.frozen`."""
    deepest: PartialBackward | None = None
    """See `Layer.deepest`."""


@spec
class SplitBackward:
    """Costs of a backward in two parts: first the gradient of the layer's input, later those of its weights.

    Pipelines run it so under zero-bubble schedules. The forward costs the same as otherwise; most of the tensors that
    it saves are kept until the second part ends.
    """

    input_flop: Quantity
    """FLOP of the first part."""
    input_bytes: Quantity
    """Bytes that the first part reads and writes."""
    input_streamed_bytes: Quantity
    """The part of these bytes that belongs to operations with next to no arithmetic."""
    input_operations: Count
    """Number of operations that the host launches for the first part."""
    weight_flop: Quantity
    """FLOP of the second part."""
    weight_bytes: Quantity
    """Bytes that the second part reads and writes."""
    weight_streamed_bytes: Quantity
    """The part of these bytes that belongs to operations with next to no arithmetic."""
    weight_operations: Count
    """Number of operations that the host launches for the second part."""
    parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """The trained parameters, with the moments at which their gradients are allocated, and, if added to others,
    freed."""
    buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """Tensors of the layer, with their lifetimes in a step with this backward."""
    freed_as_last: tuple[Count, ...] = ()
    """Numbers of those buffers, from 0, that are freed when the first part ends if the layer is the last of a stage
    that sends its output: what its backward needs only after its last operation with parameters."""

    _serialized = omits_defaults("freed_as_last")


@spec
class Layer:
    """One layer, or `repeats` identical layers in a row; FLOP, bytes and buffers are of one, for a whole batch."""

    name: str
    """Name in profiles, and in traces of steps."""
    modules: tuple[str, ...]
    """Dotted path of each repetition's module in the model; empty for operations outside any module (the loss)."""
    block: bool = False
    """Whether it is an element of the model's repeated stack, which FSDP shards as a unit of its own."""
    parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """Trained parameters, each with its shape and the moments at which its gradient is allocated and ready."""
    forward_flop: Quantity
    """FLOP of one forward; multiply-adds count twice."""
    backward_flop: Quantity
    """FLOP of one backward, without recomputation."""
    forward_uncast_flop: Quantity | None = None
    """The part of `forward_flop` that runs in fp32 under autocast, which does not cast every product. Absent: none."""
    backward_uncast_flop: Quantity | None = None
    """The corresponding part of `backward_flop`."""
    forward_bytes: Quantity
    """Bytes read and written by the operations of one forward."""
    backward_bytes: Quantity
    """Bytes read and written by the operations of one backward."""
    saved_bytes: Quantity
    """Bytes of unique storages that autograd saves for the backward, without parameters and inputs."""
    output_bytes: Quantity
    """Bytes of the input of the next layer."""
    forward_operations: Count
    """Number of operations that the host launches in the forward."""
    backward_operations: Count
    """Number of operations that the host launches in the backward."""
    frozen_parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """Parameters that are not trained. They have no gradient; their moments are written as `end`."""
    recompute_flop: Quantity | None = None
    """FLOP of a forward that checkpointing recomputes, up to the last tensor that autograd saves; absent: all of it."""
    recompute_bytes: Quantity | None = None
    """Bytes read and written by the recomputation."""
    recompute_operations: Count | None = None
    """Number of operations that the host launches for the recomputation."""
    recompute_positions: Count | None = None
    """Number of the forward's operations that are recomputed."""
    recompute_after: PositiveInt | None = None
    """Number of the backward's positions before the recomputation begins: until then the gradient of the output is
    enough, and autograd needs no tensor that it saved. Absent: 0."""
    recompute_releases: tuple[Count, ...] | None = None
    """Positions, in a forward that saves nothing, where buffers for the layer's own backward are freed, in order."""
    selective_flop: Quantity | None = None
    """FLOP that are recomputed if the outputs of compute-heavy operations are kept; absent: not traced."""
    selective_bytes: Quantity | None = None
    """Bytes that this recomputation reads and writes."""
    selective_operations: Count | None = None
    """Number of operations that the host launches for this recomputation."""
    selective_positions: tuple[Count, ...] | None = None
    """Positions of the forward's compute-heavy operations: matrix products, convolutions, attention."""
    selective_rerun: tuple[Count, Count] | None = None
    """Positions of the first and last operation that this recomputation runs again, including the collectives among
    them (Megatron-LM: the attention's). Absent: as far as `recompute_positions`."""
    forward_streamed_bytes: Quantity | None = None
    """The part of `forward_bytes` that belongs to operations with next to no arithmetic (norms, activations, softmax,
    sums). Their time at memory bandwidth adds to that of matrix products. Absent: not traced."""
    backward_streamed_bytes: Quantity | None = None
    """The corresponding part of `backward_bytes`."""
    recompute_streamed_bytes: Quantity | None = None
    """The corresponding part of `recompute_bytes`."""
    selective_streamed_bytes: Quantity | None = None
    """The corresponding part of `selective_bytes`."""
    every_second_product: PartialRecomputation | None = None
    """Recomputation in which the second, the fourth, ... of the block's matrix products run again, while the outputs of
    all other compute-heavy operations are kept; absent: not traced."""
    buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """Every tensor that the layer allocates: the moments of its allocation and release, its category and its size;
    `fixed`: it holds integers or truth values, which are as large in every precision; `casts-input`: it is one of
    several casts of the layer's input by torch.autocast; `summed-in-place`: autograd adds another gradient to it in
    place, or a linear map its bias, so that its memory passes to the sum; `pages`: its size is rounded up to 4096
    bytes, as is each part of what oneDNN keeps of an LSTM for its backward on a CPU; `handed-on`: it is one of several
    tensors that a block returns to later layers, and would be freed at that moment if the block's backward did not need
    it. Tensors of the category `replaced` are kept by the module until its next forward; those of
    `operand-casts` are copies of operands that a CPU alone makes inside an operation, while that runs."""
    module_buffer_bytes: Count = 0
    """Bytes of the module's buffers (not parameters), such as running means, in fp32."""
    integer_buffer_bytes: Count = 0
    """The part of these bytes that is integers, which are not cast to a workload's precision."""
    units: PositiveInt | None = None
    """Number of units of a sliced block, see [Note: units]. Under context parallelism, the number of heads with keys of
    their own; for divided experts, the number of experts."""
    experts_per_token: PositiveInt | None = None
    """For divided experts: how many experts process each token; see [Note: routed rows]."""
    experts: PositiveInt | None = None
    """For divided experts in a block that is also cut in units: their number. In others, `units` is that number."""
    expert_capacity_ratio: PositiveFloat | None = None
    """Rows of each expert relative to an even share of a sequence's rows, rounded up. Further rows are dropped, and
    unused places are padded (Megatron-LM's `moe-pad-expert-input-to-capacity`). Absent: no token is dropped."""
    reductions: tuple[text_of(Reduction), ...] = ()  # type: ignore[valid-type]
    """Collectives of a sliced block, in the order of their moments."""
    linear: bool | None = None
    """Whether only the linear maps of a sliced block are cut, as DTensor can cut them; absent: not traced."""
    untrained_buffers: tuple[text_of(Buffer), ...] | None = None  # type: ignore[valid-type]
    """The layer's buffers if neither it nor a layer before it is trained: autograd saves none; absent: not traced."""
    untrained_reductions: tuple[text_of(Reduction), ...] = ()  # type: ignore[valid-type]
    """The layer's collectives in that case, among the ranks that divide it."""
    frozen: PartialBackward | None = None
    """Costs if a layer before it is trained, but not this layer; absent in the first layer, and if not traced."""
    deepest: PartialBackward | None = None
    """Costs if this layer is trained, but no layer before it. Absent if not traced, and in the first layer, of which
    these are the usual costs."""
    split: SplitBackward | None = None
    """Costs of its backward in two parts, in a pipeline's stages after the first; absent if not traced, and in the
    first layer, which is never in such a stage."""

    _serialized = omits_defaults(
        *("forward_streamed_bytes", "backward_streamed_bytes", "recompute_streamed_bytes", "selective_streamed_bytes"),
        *("forward_uncast_flop", "backward_uncast_flop", "module_buffer_bytes", "integer_buffer_bytes"),
        *("recompute_after", "selective_rerun", "every_second_product", "split"),
        *("experts_per_token", "experts", "expert_capacity_ratio", "frozen_parameters", "untrained_reductions"),
    )

    @property
    def routed_experts(self) -> int | None:
        """Number of routed experts that ranks divide; None if the layer has none."""
        return (self.experts or self.units) if self.experts_per_token is not None else None

    @property
    def is_recomputed(self) -> bool:
        """Whether checkpointing runs its forward again: true for every block that has a backward."""
        return self.block and bool(self.parameters or self.backward_operations or self.backward_flop != NO_COST)

    def kept_positions(self, recompute: Recompute) -> tuple[int, ...] | None:
        """Return the positions of the forward's operations whose outputs a recomputation keeps; None: not traced."""
        if recompute == "selective":
            return self.selective_positions
        if recompute == "every-second-product":
            return None if self.every_second_product is None else self.every_second_product.positions
        return ()

    @property
    def repeats(self) -> int:
        """Number of identical layers that this entry represents."""
        return max(1, len(self.modules))

    @property
    def elements(self) -> int:
        """Trained parameters of one repetition."""
        return sum(parameter.elements for parameter in self.parameters)

    def buffer_size(self, value_bytes: int) -> int:
        """Return the bytes of the module's buffers if parameters take `value_bytes` each; integers keep their size."""
        cast = self.module_buffer_bytes - self.integer_buffer_bytes
        return self.integer_buffer_bytes + cast * value_bytes // PRECISION_BYTES["fp32"]

    @property
    def frozen_elements(self) -> int:
        """Parameters of one repetition that are not trained."""
        return sum(parameter.elements for parameter in self.frozen_parameters)


NO_ROLES: dict[str, Any] = {"untrained_buffers": None, "untrained_reductions": (), "frozen": None, "deepest": None}
"""Fields of a layer of which no costs are known but those of training all layers."""


@cached_by_identity(maxsize=1024)
def _for_samples(whole: Layer, one: bool) -> Layer:
    buffers = tuple(_of_each_sample(each) for each in whole.buffers if each.exists_at(1 if one else 2))
    changes: dict[str, Any] = {"buffers": buffers}
    if whole.recompute_releases is not None:
        releases = zip((each for each in whole.buffers if each.is_saved), whole.recompute_releases, strict=False)
        changes["recompute_releases"] = tuple(
            position for each, position in releases if each.exists_at(1 if one else 2)
        )
    return replace(whole, **changes)


def _of_each_sample(buffer: Buffer) -> Buffer:
    """Return a buffer that one sample alone has with its size times the number of samples; any other as it is.

    So its size is equal to those of a layer's output and of other tensors of as many elements, which are functions of
    that number.
    """
    if buffer.samples != ONE_SAMPLE:
        return buffer
    kinds = (getattr(buffer.size_bytes, name) for name in FIELDS_OF_TERMS.values())
    times = (summed_terms((1, tuple((c, 1, j) for c, _, j in terms))) for terms in kinds)
    return replace(buffer, size_bytes=Polynomial(*times))


def for_samples(layer: Layer, samples: float) -> Layer:
    """Return a layer with only those of its buffers that exist for this number of samples; itself if all do.

    See [Note: one sample].
    """
    if not any(each.samples for each in layer.buffers):
        return layer
    return _for_samples(layer, samples == 1)


@lru_cache(maxsize=256)
def sliced_layer(layer: Layer, units: int, positions: int | None, rows: int = 0, experts: int = 0) -> Layer:
    """Return the slice of a layer that has `units` units, `positions` positions of each sequence, `rows` rows per
    sample, and `experts` experts if these are no units.

    If `positions` is None, it stays a function of the positions.
    """
    size = (units, positions, rows, experts)
    return with_quantities(layer, lambda quantity: quantity.held(*size), lambda each: each.held(units, experts))


@lru_cache(maxsize=256)
def layer_of_rank(layer: Layer, rank: int) -> Layer:
    """Return a layer with adapters of LoRA rank `rank` in its slices, which stay functions of the units of a slice."""
    return with_quantities(layer, lambda quantity: quantity.with_rank(rank), lambda each: each.with_rank(rank))


def _of_size(buffer: Buffer, size_bytes: Polynomial) -> Buffer:
    """Return a buffer with another size; itself, if that is the one that it has, as that of most is."""
    return buffer if size_bytes is buffer.size_bytes else replace(buffer, size_bytes=size_bytes)


def with_quantities(
    layer: Layer,
    of_quantity: Callable[[Polynomial], Polynomial],
    of_parameter: Callable[[Parameter], Parameter] = lambda parameter: parameter,
) -> Layer:
    """Return a layer with all quantities changed, sizes of buffers and reductions included, and its parameters."""
    changes: dict[str, Any] = {
        "parameters": tuple(map(of_parameter, layer.parameters)),
        "frozen_parameters": tuple(map(of_parameter, layer.frozen_parameters)),
        "buffers": tuple(_of_size(buffer, of_quantity(buffer.size_bytes)) for buffer in layer.buffers),
        "reductions": tuple(replace(each, size_bytes=of_quantity(each.size_bytes)) for each in layer.reductions),
    }
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, Polynomial):
            changes[field.name] = of_quantity(value)
    if again := layer.every_second_product:
        costs: dict[str, Any] = {
            name: of_quantity(getattr(again, name)) for name in ("flop", "bytes", "streamed_bytes")
        }
        changes["every_second_product"] = replace(again, **costs)
    return replace(layer, **changes)
