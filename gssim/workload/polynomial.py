"""Quantities as functions of batch size and sequence length."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

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
