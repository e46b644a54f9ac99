"""Conditions that select points of a sweep, such as `plan.method == "gs_hier" and ranks <= 8`; parsed, never executed.

    condition   either or either ...        either: both and both ...       both: not both, or a comparison
    comparison  sum == sum (or != < <= > >=), several in a row; sum in [value, ...]; sum not in [value, ...]
    sum         product + product - ...     product: value * value / value % value ...
    value       a number, a "text", true, false, inf, absent, a name, or (condition)

A name is the path of a scenario's key, or a fact. A key that a point does not have is `absent`: it equals nothing else,
and is not ordered. Text beside a key with a unit is a quantity: `... .bandwidth_bytes_per_s < "10 Gb/s"`.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gssim.errors import UserError
from gssim.units import parse_quantity, quantity_of

Values = Mapping[str, Any]
"""A point's keys and facts, by name."""
Test = Callable[[Values], Any]

TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    |(?P<text>"[^"]*"|'[^']*')
    |(?P<name>[A-Za-z_][\w-]*(?:\.[\w-]+)*)
    |(?P<sign>==|!=|<=|>=|[<>+\-*/%()\[\],]))""",
    re.VERBOSE,
)
WORDS = {"true": True, "false": False, "inf": math.inf, "absent": None}
RESERVED = ("and", "or", "not", "in")
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
SUMS = {"+": operator.add, "-": operator.sub}
PRODUCTS = {"*": operator.mul, "/": operator.truediv, "%": operator.mod}


@dataclass(frozen=True)
class Condition:
    """A condition: its text, the names in it, and its test."""

    text: str
    names: frozenset[str]
    _test: Test

    def holds(self, values: Values) -> bool:
        """Return whether it holds for a point; raise UserError where its values cannot be compared or computed with.

        >>> condition('plan.method in ["gs", "gs_z3"] and ranks % 8 == 0').holds({"plan.method": "gs", "ranks": 16})
        True
        >>> condition("plan.push.threshold >= 1e-3").holds({})
        False
        """
        try:
            return bool(self._test(values))
        except (TypeError, ValueError, ArithmeticError) as error:
            values_of = ", ".join(f"{name} = {values.get(name)!r}" for name in sorted(self.names))
            why = "these cannot be compared" if isinstance(error, TypeError) else error
            raise UserError(f"'{self.text}': {values_of}: {why}") from None


def condition(text: str) -> Condition:
    """Return the condition of a text; raise UserError, which does not name its file, where it is invalid."""
    parser = _Parser(text)
    try:
        test = parser.either()
    except RecursionError:
        raise UserError(f"'{text[:40]}...': nested too deep") from None
    if parser.at is not None:
        raise parser.fault("the end, 'and' or 'or'")
    return Condition(text, frozenset(parser.names), test)


class _Parser:
    """A recursive-descent parser of conditions."""

    def __init__(self, text: str) -> None:
        self.text, self.names = text, set[str]()
        self._words = _tokens(text)
        self.at: tuple[str, str] | None = next(self._words, None)

    def fault(self, wanted: str) -> UserError:
        found = f"'{self.at[1]}'" if self.at else "the end"
        return UserError(f"'{self.text}': {found} where {wanted} is needed")

    def taken(self, *words: str) -> str | None:
        """Consume the next word and return it, if it is one of these."""
        if self.at is None or self.at[1] not in words or self.at[0] == "text":
            return None
        word = self.at[1]
        self.at = next(self._words, None)
        return word

    def needed(self, word: str) -> None:
        if not self.taken(word):
            raise self.fault(f"'{word}'")

    def either(self) -> Test:
        tests = [self.both()]
        while self.taken("or"):
            tests.append(self.both())
        return tests[0] if len(tests) == 1 else lambda values: any(test(values) for test in tests)

    def both(self) -> Test:
        tests = [self.denied()]
        while self.taken("and"):
            tests.append(self.denied())
        return tests[0] if len(tests) == 1 else lambda values: all(test(values) for test in tests)

    def denied(self) -> Test:
        if self.taken("not"):
            test = self.denied()
            return lambda values: not test(values)
        return self.comparison()

    def comparison(self) -> Test:
        left, kind = self.sum()
        tests = []
        while sign := self.taken(*COMPARISONS, "in", "not"):
            if sign == "not":
                self.needed("in")
            if sign in COMPARISONS:
                right, right_kind = self.sum()
                tests.append(_compared(COMPARISONS[sign], _read(left, right_kind), _read(right, kind)))
                left, kind = right, right_kind
            else:
                members = [_read(member, kind) for member in self.members()]
                tests.append(_contained(left, members, wanted=sign == "in"))
        if not tests:
            return left
        return lambda values: all(test(values) for test in tests)

    def members(self) -> list[Test]:
        self.needed("[")
        members = [self.sum()[0]]
        while self.taken(","):
            members.append(self.sum()[0])
        self.needed("]")
        return members

    def sum(self) -> tuple[Test, str | None]:
        return self.chained(self.product, SUMS)

    def product(self) -> tuple[Test, str | None]:
        return self.chained(self.value, PRODUCTS)

    def chained(
        self, part: Callable[[], tuple[Test, str | None]], signs: Mapping[str, Callable[[Any, Any], Any]]
    ) -> tuple[Test, str | None]:
        left, kind = part()
        while sign := self.taken(*signs):
            left = _reckoned(signs[sign], left, part()[0])
        return left, kind

    def value(self) -> tuple[Test, str | None]:
        """Return the getter of a value, and its kind of quantity."""
        if self.taken("("):
            test = self.either()
            self.needed(")")
            return test, None
        if self.taken("-"):
            test, kind = self.value()
            return _reckoned(operator.sub, lambda values: 0, test), kind
        if self.at is None or self.at[0] == "sign" or self.at[1] in RESERVED:
            raise self.fault('a key, a fact, a number or a "text"')
        (kind_of_word, word), self.at = self.at, next(self._words, None)
        if kind_of_word == "name" and word not in WORDS:
            self.names.add(word)
            return lambda values: values.get(word), quantity_of(word)
        if kind_of_word == "text":
            constant: Any = word[1:-1]
        elif kind_of_word == "name":
            constant = WORDS[word]
        else:
            constant = int(word) if word.replace("_", "").isdecimal() else float(word)
        return lambda values: constant, None


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each token."""
    end = 0
    while text[end:].strip():
        match = TOKEN.match(text, end)
        if match is None or match.lastgroup is None:
            raise UserError(f"'{text}': '{text[end:].strip()[:20]}' cannot be read")
        yield match.lastgroup, match[match.lastgroup]
        end = match.end()


def _read(test: Test, kind: str | None) -> Test:
    """Return a getter that parses text as a quantity, if it is beside one."""
    if kind is None:
        return test

    def quantity(values: Values) -> Any:
        value = test(values)
        try:
            return parse_quantity(value, kind) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{value!r} {error}") from None

    return quantity


def _compared(compare: Callable[[Any, Any], Any], left: Test, right: Test) -> Test:
    def compared(values: Values) -> Any:
        a, b = left(values), right(values)
        if (a is None or b is None) and compare not in (operator.eq, operator.ne):
            return False
        return compare(a, b)

    return compared


def _contained(left: Test, members: list[Test], *, wanted: bool) -> Test:
    return lambda values: any(left(values) == member(values) for member in members) == wanted


def _reckoned(reckon: Callable[[Any, Any], Any], left: Test, right: Test) -> Test:
    def reckoned(values: Values) -> Any:
        a, b = left(values), right(values)
        return None if a is None or b is None else reckon(a, b)

    return reckoned
