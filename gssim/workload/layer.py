"""One layer as it was traced.

Quantities as functions of batch size and sequence length.

Memory that a layer allocates, and when it lives.

[Note: moments] A moment is a place in one training step: `f3` is the 4th operation of the layer's own forward, `b7`
the 8th of its backward, `b7@+1` that of the backward of the next layer, `end` the end of the backward pass. Buffers
are born and freed at moments, so memory can be replayed for any plan without the module.

Parameters of a layer, and the sums over ranks that a cut one makes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, SerializerFunctionWrapHandler, WithJsonSchema, model_serializer

from gssim.units import Count, PositiveInt, spec

_TERM = re.compile(r"^(-?\d+)((?:\*(?:[bs](?:\^[12])?|u))*)$")
Terms = tuple[tuple[int, int, int], ...]
"""(Coefficient, power of b, power of s)."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A whole quantity as a function of batch size b and sequence length s: terms (coefficient, power of b, of s)."""

    terms: Terms
    unit_terms: Terms = ()
    """What counts once for each unit u that a rank holds; see [Note: units]."""

    @classmethod
    def parse(cls, text: object) -> "Polynomial":
        """Return the polynomial that `text` spells.

        >>> Polynomial.parse("3 + 2*b*s^2").at(b=10, s=4)
        323
        """
        if isinstance(text, Polynomial):
            return text
        if isinstance(text, bool) or not isinstance(text, (int, str)):
            raise ValueError('must be a polynomial in b and s, such as "512 + 4*b*s"')
        terms: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
        for term in str(text).replace(" ", "").split("+"):
            match = _TERM.match(term)
            if match is None:
                raise ValueError(f'has the term {term!r}; a polynomial in b and s is needed, such as "512 + 4*b*s"')
            powers = {"b": 0, "s": 0, "u": 0}
            for factor in match.group(2).split("*")[1:]:
                powers[factor[0]] += int(factor[2:] or 1)
            if max(powers.values()) > 2 or powers["u"] > 1:
                raise ValueError(f"has the term {term!r}; b and s may have powers up to 2, u up to 1")
            terms[powers["u"] == 1].append((int(match.group(1)), powers["b"], powers["s"]))
        return cls(tuple(terms[False]), tuple(terms[True]))

    def at(self, *, b: int, s: int) -> int:
        """Return the value at batch size `b` and sequence length `s`; what counts by units is left out."""
        return sum(c * b**i * s**j for c, i, j in self.terms)

    def held(self, units: int) -> "Polynomial":
        """Return the polynomial where a rank holds so many units.

        >>> str(Polynomial.parse("8*b + 3*b*u + 2*s*u").held(2))
        '14*b + 4*s'
        """
        if not self.unit_terms:
            return self
        sums: dict[tuple[int, int], int] = {}
        for factor, terms in ((1, self.terms), (units, self.unit_terms)):
            for c, i, j in terms:
                sums[i, j] = sums.get((i, j), 0) + factor * c
        return Polynomial(tuple((c, i, j) for (i, j), c in sums.items() if c) or ((0, 0, 0),))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        powers = ("", "*{0}", "*{0}^2")
        found = [
            f"{c}{powers[i].format('b')}{powers[j].format('s')}{unit}"
            for terms, unit in ((self.terms, ""), (self.unit_terms, "*u"))
            for c, i, j in terms
        ]
        return " + ".join(found) or "0"


Quantity = Annotated[
    Polynomial,
    BeforeValidator(Polynomial.parse),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "description": "polynomial in batch size b and sequence length s"}),
]


def text_of(cls: Any) -> Any:
    """Return the type of a value of `cls`, which has `parse`, as files have it: the text that `parse` reads."""
    schema = {"type": "string", "description": cls.parse.__doc__}
    return Annotated[cls, BeforeValidator(cls.parse), PlainSerializer(str), WithJsonSchema(schema)]


_MOMENT = re.compile(r"^(?:end|([fb])(\d+)(?:@([+-]\d+))?)$")


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in a step relative to a layer; see [Note: moments]."""

    phase: str
    """`f`, `b` or `end`."""
    position: int = 0
    layer_offset: int = 0

    @classmethod
    def parse(cls, text: object) -> "Moment":
        """Return the moment that `text` spells.

        >>> Moment.parse("b7@+1")
        Moment(phase='b', position=7, layer_offset=1)
        """
        if isinstance(text, Moment):
            return text
        match = _MOMENT.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} is not a moment such as f3, b7, b7@+1 or end")
        phase, position, offset = match.groups()
        return cls(phase or "end", int(position or 0), int(offset or 0))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        if self.phase == "end":
            return "end"
        return f"{self.phase}{self.position}" + (f"@{self.layer_offset:+d}" if self.layer_offset else "")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a layer allocates: size in bytes, category, when it is born and when it is freed."""

    born: Moment
    freed: Moment
    category: str
    size_bytes: Polynomial

    @classmethod
    def parse(cls, text: object) -> "Buffer":
        """Return the buffer that `text` spells.

        >>> str(Buffer.parse("f0 b3@+1 activations 512*b*s"))
        'f0 b3@+1 activations 512*b*s'
        """
        if isinstance(text, Buffer):
            return text
        if not isinstance(text, str) or len(text.split(maxsplit=3)) != 4:
            raise ValueError('must be "BORN FREED CATEGORY BYTES", such as "f0 b3 activations 512*b*s"')
        born, freed, category, size = text.split(maxsplit=3)
        if category not in BUFFER_CATEGORIES:
            raise ValueError(f"has the category {category!r}; allowed: {', '.join(BUFFER_CATEGORIES)}")
        return cls(Moment.parse(born), Moment.parse(freed), category, Polynomial.parse(size))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.born} {self.freed} {self.category} {self.size_bytes}"


def handed_on(buffers: Sequence[Buffer]) -> Buffer | None:
    """Return what a layer makes for the next: the last made of its buffers that live beyond it."""
    crossing = [b for b in buffers if b.born.phase == "f" and b.freed.layer_offset > 0]
    return max(crossing, key=lambda buffer: buffer.born.position, default=None)


def handed_back(buffers: Sequence[Buffer]) -> Buffer | None:
    """Return the gradient that a layer makes for the one before it."""
    crossing = [b for b in buffers if b.born.phase == b.freed.phase == "b" and b.freed.layer_offset == -1]
    return max(crossing, key=lambda buffer: buffer.born.position, default=None)


BUFFER_CATEGORIES = ("input", "activations", "temporaries")

_PARAMETER = re.compile(r"^(\S+) ((?:\d+u?(?:x\d+u?)*)|scalar) (\S+) (\S+)$")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter tensor: its name (`{}` stands for the layer's module), shape, and when its gradient is born, ready.

    Moments are relative to the layer that lists it.
    """

    name: str
    shape: tuple[int, ...]
    born: Moment
    ready: Moment
    cut: int | None = None
    """The dimension in which it is cut, whose size in `shape` is that of one unit; see [Note: units]."""

    @classmethod
    def parse(cls, text: object) -> "Parameter":
        """Return the parameter that `text` spells.

        >>> Parameter.parse("{}.weight 4x3 b1 b2").elements
        12
        """
        if isinstance(text, Parameter):
            return text
        match = _PARAMETER.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError('must be "NAME SHAPE BORN READY", such as "{}.weight 4x3 b1 b2"')
        name, shape, born, ready = match.groups()
        sizes = [] if shape == "scalar" else shape.split("x")
        cut = [dimension for dimension, size in enumerate(sizes) if size.endswith("u")]
        if len(cut) > 1:
            raise ValueError(f"has the shape {shape}; one dimension at most is cut in units (u)")
        whole = tuple(int(size.rstrip("u")) for size in sizes)
        return cls(name, whole, Moment.parse(born), Moment.parse(ready), cut[0] if cut else None)

    def held(self, units: int) -> "Parameter":
        """Return the parameter where a rank holds so many units of its layer.

        >>> str(Parameter.parse("{}.weight 8ux3 b1 b2").held(2))
        '{}.weight 16x3 b1 b2'
        """
        if self.cut is None:
            return self
        sizes = (size * units if dimension == self.cut else size for dimension, size in enumerate(self.shape))
        return Parameter(self.name, tuple(sizes), self.born, self.ready)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        sizes = [f"{size}u" if dimension == self.cut else str(size) for dimension, size in enumerate(self.shape)]
        return f"{self.name} {'x'.join(sizes) or 'scalar'} {self.born} {self.ready}"

    @property
    def elements(self) -> int:
        """Number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True)
class Reduction:
    """A sum over the ranks that share a cut block: an all-reduce of so many bytes right after a moment of the layer."""

    moment: Moment
    size_bytes: Polynomial

    @classmethod
    def parse(cls, text: object) -> "Reduction":
        """Return the reduction that `text` spells.

        >>> str(Reduction.parse("f5 64*b*s"))
        'f5 64*b*s'
        """
        if isinstance(text, Reduction):
            return text
        if not isinstance(text, str) or len(text.split(maxsplit=1)) != 2:
            raise ValueError('must be "MOMENT BYTES", such as "f5 64*b*s"')
        moment, size = text.split(maxsplit=1)
        return cls(Moment.parse(moment), Polynomial.parse(size))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.moment} {self.size_bytes}"


STREAMED = (
    "forward_streamed_bytes",
    "backward_streamed_bytes",
    "recompute_streamed_bytes",
    "selective_streamed_bytes",
)


@spec
class PartialBackward:
    """What is left of a layer's training where some parameters are frozen, so that others get their gradients alone.

    Its forward costs the same; what it keeps for the backward, and the backward, are less.
    """

    backward_flop: Quantity
    """Of this backward."""
    backward_bytes: Quantity
    """Bytes read and written in it."""
    backward_operations: Count
    """How many the host issues."""
    backward_streamed_bytes: Quantity | None = None
    """Of these bytes, those of operations that do next to no arithmetic; absent: not known apart."""
    parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """Those that are trained, with their moments in this backward."""
    buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """Tensors of the layer, with their lives in this backward."""
    input_freed: text_of(Moment) | None = None  # type: ignore[valid-type]
    """When it lets go of what the layer before handed on; absent: that one keeps it longer itself."""
    gradient_freed: text_of(Moment) | None = None  # type: ignore[valid-type]
    """When it lets go of the gradient of its output; absent: not known to differ."""

    @model_serializer(mode="wrap")
    def _as_traced(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data: what is not known apart makes no other calibration."""
        data: dict[str, Any] = inner(self)
        if data.get("backward_streamed_bytes") is None:
            data.pop("backward_streamed_bytes", None)
        return data


@spec
class Layer:
    """One layer, or `repeats` identical ones in a row; FLOP, bytes and buffers are of one, for a whole batch."""

    name: str
    """The name in profiles, and in traces of steps."""
    modules: tuple[str, ...]
    """Dotted path of each repetition's module in the model; empty for what runs outside any (the loss)."""
    block: bool = False
    """An element of the model's repeated stack: FSDP shards it on its own; all else belongs to the root."""
    parameters: tuple[text_of(Parameter), ...] = ()  # type: ignore[valid-type]
    """Each with its shape and its moments: when its gradient is born, and when it is ready."""
    forward_flop: Quantity
    """Multiply-adds count twice."""
    backward_flop: Quantity
    """The same; recomputation left out."""
    forward_bytes: Quantity
    """Bytes read and written by the operations of one forward."""
    backward_bytes: Quantity
    """The same for one backward."""
    saved_bytes: Quantity
    """Unique storages that autograd keeps for the backward, parameters and inputs left out."""
    output_bytes: Quantity
    """What the next layer gets."""
    forward_operations: Count
    """How many the host issues."""
    backward_operations: Count
    """The same in the backward."""
    recompute_flop: Quantity | None = None
    """Of the forward, what checkpointing runs again: up to the last tensor that autograd saves; absent: all of it."""
    recompute_bytes: Quantity | None = None
    """Bytes that this reads and writes."""
    recompute_operations: Count | None = None
    """How many the host issues for it."""
    recompute_positions: Count | None = None
    """How many of the forward's positions that takes."""
    recompute_releases: tuple[Count, ...] | None = None
    """Where in a forward that saves nothing those buffers go which are kept for the layer's own backward, in order."""
    selective_flop: Quantity | None = None
    """Of that, what is run again where the outputs of compute-heavy operations are kept; absent: not known."""
    selective_bytes: Quantity | None = None
    """Bytes that this reads and writes."""
    selective_operations: Count | None = None
    """How many the host issues for it."""
    selective_positions: tuple[Count, ...] | None = None
    """Of the forward's compute-heavy operations: matrix products, convolutions, attention."""
    forward_streamed_bytes: Quantity | None = None
    """Of `forward_bytes`, those of operations that do next to no arithmetic (norms, activations, softmax, sums): they
    take their time at memory bandwidth, beside that of matrix products. Absent: not known apart."""
    backward_streamed_bytes: Quantity | None = None
    """The same of `backward_bytes`."""
    recompute_streamed_bytes: Quantity | None = None
    """The same of `recompute_bytes`."""
    selective_streamed_bytes: Quantity | None = None
    """The same of `selective_bytes`."""
    buffers: tuple[text_of(Buffer), ...] = ()  # type: ignore[valid-type]
    """Every tensor that it makes, with its life: born and freed at which operation of which phase, category, size."""
    units: PositiveInt | None = None
    """Of a block that is cut: how many units there are of it; see [Note: units]."""
    reductions: tuple[text_of(Reduction), ...] = ()  # type: ignore[valid-type]
    """Of a block that is cut: the sums over ranks, in the order of their moments."""
    linear: bool | None = None
    """Of a block that is cut: whether all that is cut are linear maps, which DTensor cuts; absent: not known."""
    untrained_buffers: tuple[text_of(Buffer), ...] | None = None  # type: ignore[valid-type]
    """Its buffers where neither it nor a layer before it is trained: autograd keeps nothing; absent: not traced."""
    frozen: PartialBackward | None = None
    """Where a layer before it is trained, but not itself; absent in the first layer, and where not traced."""
    deepest: PartialBackward | None = None
    """Where it is trained, but no layer before it; absent in the first layer, whose backward is this, without
    parameters, and where not traced."""

    @model_serializer(mode="wrap")
    def _as_traced(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data: what is not known apart makes no other question."""
        data: dict[str, Any] = inner(self)
        for key in STREAMED:
            if data.get(key) is None:
                data.pop(key, None)  # where none are wanted, it is not there
        return data

    @property
    def repeats(self) -> int:
        """How many identical layers this entry stands for."""
        return max(1, len(self.modules))

    @property
    def elements(self) -> int:
        """Parameters of one repetition."""
        return sum(parameter.elements for parameter in self.parameters)
