"""Conditions that select points of a sweep, such as `plan.method == "gs_hier" and ranks <= 8`; parsed, never executed.

Their syntax is a subset of Python's, and Python's parser reads it:

    condition   either or either ...        either: both and both ...       both: not both, or a comparison
    comparison  sum == sum (or != < <= > >=), several in a row; sum in [value, ...]; sum not in [value, ...]
    sum         product + product - ...     product: value * value / value % value ...
    value       a number, a "text", true, false, inf, absent, a name, or (condition)

A name is the path of a scenario's key, or a fact about the point. A key that a point does not have is `absent`: it
equals nothing else, and is not ordered. A text compared with a key that has a unit is a quantity: `...
.bandwidth_bytes_per_s < "10 Gb/s"`.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gssim.errors import UserError
from gssim.units import parse_quantity, quantity_of

Values = Mapping[str, Any]
"""A point's keys and facts, by name."""
Test = Callable[[Values], Any]

TOKEN = re.compile(
    r"""(?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    |(?P<text>"[^"]*"|'[^']*')
    |(?P<name>[A-Za-z_][\w-]*(?:\.[\w-]+)*)
    |(?P<sign>==|!=|<=|>=|[<>+\-*/%()\[\],])
    |(?P<space>\s+)""",
    re.VERBOSE,
)
WORDS = {"true": True, "false": False, "inf": math.inf, "absent": None}
RESERVED = ("and", "or", "not", "in")
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
ALLOWED = 'allowed: keys, facts, numbers, "texts", + - * / %, comparisons, in [...], and, or, not, (...)'


@dataclass(frozen=True)
class Condition:
    """A condition: its text, the names in it, and its test function."""

    text: str
    names: frozenset[str]
    _test: Test

    def holds(self, values: Values) -> bool:
        """Return whether it holds for a point; raise UserError if its values cannot be compared or computed with.

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
    """Return the condition of a text; raise UserError, without the file's name, if it is invalid."""
    parser = _Parser(text)
    try:
        test, _ = parser.test_of(ast.parse(parser.masked, mode="eval").body)
    except SyntaxError as error:
        if "nested" in error.msg:
            raise _too_deep(text) from None
        place = parser.start + error.offset - 1 if error.offset else len(text)
        raise parser.fault(place) from None
    except (RecursionError, MemoryError):
        raise _too_deep(text) from None
    return Condition(text, frozenset(parser.names), test)


def _too_deep(text: str) -> UserError:
    return UserError(f"'{text[:40]}...': nested too deep")


class _Parser:
    """Reads the syntax tree that Python makes of a condition, and allows only few kinds of nodes.

    Keys have dots, hyphens and digits, and texts have no escapes, which Python would read differently. So Python parses
    a text in which they are replaced by names and constants of the same lengths; the originals are looked up by
    position.
    """

    def __init__(self, text: str) -> None:
        self.text, self.names = text, set[str]()
        self.start = len(text) - len(text.lstrip())
        self._tokens: dict[int, tuple[str, str]] = {}
        masked, end = "", self.start
        while text[end:].strip():
            match = TOKEN.match(text, end)
            if match is None or match.lastgroup is None:
                raise UserError(f"'{text}': character {end + 1}: '{text[end:].strip()[:20]}' cannot be read")
            kind, word = match.lastgroup, match[0]
            if kind == "name" and word in RESERVED:
                kind = "sign"
            if kind != "space":
                self._tokens[end] = kind, word
            fill = {"number": "1", "space": " "}.get(kind, "_") * len(word)
            masked += word if kind == "sign" else f"'{fill[2:]}'" if kind == "text" else fill
            end = match.end()
        self.masked = masked

    def fault(self, place: int) -> UserError:
        """Return the error for the word at a position of the text."""
        if not any(start >= place for start in self._tokens):
            return UserError(f"'{self.text}': ends too early; {ALLOWED}")
        start = min(start for start in self._tokens if start >= place)
        word = self._tokens[start][1]
        if word in "([" and self.text.count(word) > self.text.count(")" if word == "(" else "]"):
            return UserError(f"'{self.text}': character {start + 1}: '{word}' is not closed")
        return UserError(f"'{self.text}': character {start + 1}: '{word}' is not allowed here; {ALLOWED}")

    def test_of(self, node: ast.expr) -> tuple[Test, str | None]:
        """Return a function that gives a node's value for a point, and the node's kind of quantity."""
        if isinstance(node, (ast.Name, ast.Constant)):
            return self._value(node)
        if isinstance(node, ast.BoolOp):
            tests = [self.test_of(value)[0] for value in node.values]
            joined = any if isinstance(node.op, ast.Or) else all
            return lambda values: joined(test(values) for test in tests), None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            test, kind = self.test_of(node.operand)
            if isinstance(node.op, ast.Not):
                return lambda values: not test(values), None
            return _reckoned(operator.sub, lambda values: 0, test), kind
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, kind = self.test_of(node.left)
            return _reckoned(ARITHMETIC[type(node.op)], left, self.test_of(node.right)[0]), kind
        if isinstance(node, ast.Compare):
            return self._comparison(node), None
        first = next(ast.iter_child_nodes(node), None)  # the fault comes after it: `**`, or the bracket of a call
        place = node.col_offset
        if isinstance(first, ast.expr) and first.col_offset == place:
            place = first.end_col_offset or place
        raise self.fault(self.start + place)

    def _value(self, node: ast.Name | ast.Constant) -> tuple[Test, str | None]:
        kind, word = self._tokens[self.start + node.col_offset]
        if node.end_col_offset != node.col_offset + len(word):  # Python joins adjacent texts
            raise self.fault(self.start + node.col_offset + len(word))
        if kind == "name" and word not in WORDS:
            self.names.add(word)
            return lambda values: values.get(word), quantity_of(word)
        constant: Any
        if kind == "text":
            constant = word[1:-1]
        elif kind == "name":
            constant = WORDS[word]
        else:
            digits = word.replace("_", "")
            constant = int(digits) if digits.isdecimal() else float(digits)
        return lambda values: constant, None

    def _comparison(self, node: ast.Compare) -> Test:
        """Return the test of chained comparisons; what follows `in [...]` is compared with the value before it."""
        tests: list[Test] = []
        left, kind = self.test_of(node.left)
        for sign, operand in zip(node.ops, node.comparators, strict=True):
            if isinstance(sign, (ast.In, ast.NotIn)):
                tests.append(self._membership(left, kind, operand, wanted=isinstance(sign, ast.In)))
            elif type(sign) in COMPARISONS:
                right, right_kind = self.test_of(operand)
                tests.append(_compared(COMPARISONS[type(sign)], _read(left, right_kind), _read(right, kind)))
                left, kind = right, right_kind
            else:
                raise self.fault(self.start + operand.col_offset)
        return lambda values: all(test(values) for test in tests)

    def _membership(self, left: Test, kind: str | None, members: ast.expr, *, wanted: bool) -> Test:
        if not isinstance(members, ast.List) or not members.elts:
            raise self.fault(self.start + members.col_offset)
        before_end = self.masked[: members.end_col_offset].rstrip("]").rstrip()
        if before_end.endswith(","):
            raise self.fault(self.start + len(before_end) - 1)
        for member in members.elts:
            is_test = isinstance(member, (ast.BoolOp, ast.Compare)) or isinstance(getattr(member, "op", None), ast.Not)
            if is_test and not self.masked[: member.col_offset].rstrip().endswith("("):
                raise self.fault(self.start + member.col_offset)  # `in ["a" or "b"]` would be `in [true]`
        tests = [_read(self.test_of(member)[0], kind) for member in members.elts]
        return lambda values: any(left(values) == test(values) for test in tests) == wanted


def _read(test: Test, kind: str | None) -> Test:
    """Return a function that also parses a text as a quantity, if it is compared with one."""
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


def _reckoned(reckon: Callable[[Any, Any], Any], left: Test, right: Test) -> Test:
    def reckoned(values: Values) -> Any:
        a, b = left(values), right(values)
        return None if a is None or b is None else reckon(a, b)

    return reckoned
