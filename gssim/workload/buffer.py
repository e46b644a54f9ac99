"""Memory that a layer allocates, and when it lives.

[Note: moments] A moment is a place in one training step: `f3` is the 4th operation of the layer's own forward, `b7`
the 8th of its backward, `b7@+1` that of the backward of the next layer, `end` the end of the backward pass. Buffers
are born and freed at moments, so memory can be replayed for any plan without the module.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gssim.workload.polynomial import Polynomial

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
