"""Workspace memory that the kernels of an operation allocate while it runs, by batch size."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_SCRATCH = re.compile(r"^([fb])(\d+)((?: \d+:\d+)+)$")


@dataclass(frozen=True, slots=True)
class Scratch:
    """Workspace of one operation's kernels, by batch size."""

    phase: str
    """`f` (forward) or `b` (backward)."""
    position: int
    """Position of the operation in its layer's forward or backward, as in model files."""
    points: tuple[tuple[int, int], ...]
    """(samples, bytes), by increasing samples."""

    @classmethod
    def parse(cls, text: object) -> "Scratch":
        """Return the workspace that `text` denotes.

        >>> str(Scratch.parse("b28 4:1000 8:1800"))
        'b28 4:1000 8:1800'
        """
        if isinstance(text, Scratch):
            return text
        match = _SCRATCH.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError('must be "MOMENT SAMPLES:BYTES...", such as "b28 4:1000 8:1800"')
        pairs = [pair.split(":") for pair in match.group(3).split()]
        points = tuple((int(samples), int(size)) for samples, size in pairs)
        if any(right[0] <= left[0] for left, right in pairwise(points)):
            raise ValueError("samples must increase")
        return cls(match.group(1), int(match.group(2)), points)

    def __str__(self) -> str:
        """Return the text form, which `parse` reads."""
        return f"{self.phase}{self.position} " + " ".join(f"{samples}:{size}" for samples, size in self.points)

    def at(self, samples: float) -> float:
        """Return the bytes at a batch size, linear between the points and beyond the outermost ones.

        Assumes that kernels repack the weights (a fixed part) and inputs or outputs (in proportion to samples).

        >>> Scratch.parse("b28 4:1000 8:1800").at(2)
        600.0
        """
        if len(self.points) == 1:
            return float(self.points[0][1])
        inner = [i for i, (size, _) in enumerate(self.points[1:-1], 1) if size < samples]
        (x0, y0), (x1, y1) = self.points[max(inner, default=0) :][:2]
        return float(max(0, round(y0 + (y1 - y0) * (samples - x0) / (x1 - x0))))


ScratchText = Annotated[
    Scratch,
    BeforeValidator(Scratch.parse),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "description": Scratch.parse.__doc__}),
]
