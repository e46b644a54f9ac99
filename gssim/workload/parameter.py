"""Parameters of a layer, and the sums over ranks that a cut one makes."""

import re
from dataclasses import dataclass

from gssim.workload.buffer import Moment
from gssim.workload.polynomial import Polynomial

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
