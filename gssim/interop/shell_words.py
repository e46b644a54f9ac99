"""Words of shell scripts: variables and expansions, arithmetic and tests, as far as the script determines them.

Open values appear in texts as marks: see [Note: following a script] in `gssim.interop.shell`.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gssim.errors import UserError
from gssim.interop.shell_syntax import ASSIGNMENT, INSTEAD, MARKS, NAME, Parser, Token, end_of, is_open, mark

MOST_STEPS = 20_000
"""Largest number of followed commands; every `STEP` characters of their words count as one more command."""
STEP = 2000
MOST_CHARACTERS = 50_000
"""Largest number of characters of a variable; a script can double one in each line."""

PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^\]]*\])?(.*)", re.DOTALL)

Variable = str | tuple[str, ...]
"""Text, or the elements of an array."""


@dataclass(frozen=True)
class Branch:
    """The values between which an open test decides."""

    alternatives: tuple[str | None, ...]
    """Possible texts; None stands for an unset variable."""
    where: str
    """The test as written, and its line."""
    variable: str
    """A variable on which the test depends; empty if there is none."""


@dataclass(frozen=True)
class Command:
    """A command that a script starts."""

    words: tuple[str, ...]
    line: int


class ExitError(Exception):
    """The script ends here."""


class LeftError(Exception):
    """The script leaves a function or an included file (return), a loop (break) or one pass of it (continue)."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class State:
    """Everything that a script has done so far."""

    variables: dict[str, Variable] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    positional: tuple[str, ...] | None = None
    """Arguments of the running function; None: the script's own arguments apply."""

    def copied(self) -> "State":
        """Return a state that a branch can change."""
        return State(dict(self.variables), list(self.commands), dict(self.files), self.positional)


class Words:
    """Variables of a script, and the expansion of words with them."""

    def __init__(self, file: str, given: dict[str, str]) -> None:
        """Start with the given variables, whose values do not change."""
        self.file, self.given = file, given
        self.state = State()
        self.branches: dict[str, Branch] = {}
        self.own: set[str] = set()
        """Variables that the script sets somewhere."""
        self.steps = 0

    def count(self, steps: int) -> None:
        """Raise UserError if a script runs for too long."""
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise UserError(f"{self.file}: runs too long to be followed; {INSTEAD}")

    def assignment(self, token: Token) -> None:
        """Set a variable to a text or to an array, as it is written."""
        if token.kind == "array":
            sign, *words = token.parts
            values: Variable = tuple(field for word in words for field in self.fields(word))
            self.assign(token.value, values, adds=sign == "+")
        elif (match := ASSIGNMENT.match(token.value)) is not None:
            value = self.text(token.value[match.end() :])
            self.assign(match[1], value if match[2] is None else (value,), adds=match[3] == "+" or match[2] is not None)

    def assign(self, name: str, value: Variable, *, adds: bool = False) -> None:
        """Set a variable, unless the caller gave it."""
        if name in self.given:
            return
        old = self.state.variables.get(name, "")
        if adds and isinstance(value, tuple):
            value = (*(old if isinstance(old, tuple) else [old] if old else []), *value)
        elif adds and isinstance(old, tuple):
            value = (old[0] + str(value), *old[1:]) if old else (str(value),)
        elif adds:
            value = f"{old}{value}"
        size = len(value) if isinstance(value, str) else sum(map(len, value)) + len(value)
        self.state.variables[name] = value if size <= MOST_CHARACTERS else mark(f"{name}\1of its size")

    def value(self, name: str) -> Variable | None:
        """Return a variable or an argument; None where it is not set."""
        if name in self.given:
            return self.given[name]
        if name in ("@", "*"):
            if self.state.positional is not None:
                return self.state.positional
            given = [self.given[str(i)] for i in range(1, 100) if str(i) in self.given]
            return tuple(given)
        if name == "#":
            return str(len(self.state.positional)) if self.state.positional is not None else None
        if name.isdigit() and self.state.positional is not None:
            return self.state.positional[int(name) - 1] if 0 < int(name) <= len(self.state.positional) else ""
        return self.state.variables.get(name, "" if name in self.own else None)

    def text(self, raw: str) -> str:
        """Return the text to which a word expands; where it expands to several words, they are joined by spaces."""
        text = ""
        for part, kind in self._expanded(raw):
            text += (" " if kind == "next" and text else "") + part
        return text

    def fields(self, raw: str) -> list[str]:
        """Return the words to which a word expands."""
        fields: list[str] = []
        current: str | None = None
        for part, kind in self._expanded(raw):
            if kind == "next" and current is not None:
                fields.append(current)
                current = None
            if kind != "split":
                current = (current or "") + part
                continue
            pieces = part.split()
            if current is not None and part and part[0].isspace():
                fields.append(current)
                current = None
            for position, piece in enumerate(pieces):
                if position and current is not None:
                    fields.append(current)
                    current = None
                current = (current or "") + piece
            if pieces and part[-1].isspace() and current is not None:
                fields.append(current)
                current = None
        fields += [current] if current is not None else []
        self.count(sum(map(len, fields)) // STEP)
        return fields

    def _expanded(self, raw: str) -> list[tuple[str, str]]:
        """Return the parts of a word: literal, split (words that an expansion may become), or next (a further word)."""
        parts: list[tuple[str, str]] = []
        at = 0
        while at < len(raw):
            character = raw[at]
            if character == "\\":
                if raw[at + 1 : at + 2] not in ("\n", "\r"):
                    parts.append((raw[at + 1 : at + 2], "literal"))
                at += 2
            elif character == "'":
                end = raw.find("'", at + 1)
                end = end if end >= 0 else len(raw)
                parts.append((raw[at + 1 : end], "literal"))
                at = end + 1
            elif character == '"':
                end = end_of(raw, at, self.file)
                parts += self._quoted(raw[at + 1 : end - 1])
                at = end
            elif character in "$`":
                end = end_of(raw, at, self.file)
                value = self._expansion(raw[at:end])
                values = [value] if isinstance(value, str) else list(value)
                parts += [(each, "split" if not position else "next") for position, each in enumerate(values)]
                at = end
            else:
                end = at
                while end < len(raw) and raw[end] not in "\\'\"$`":
                    end += 1
                parts.append((raw[at:end], "literal"))
                at = end
        return parts

    def _quoted(self, raw: str) -> list[tuple[str, str]]:
        parts: list[tuple[str, str]] = [("", "literal")]
        at = 0
        while at < len(raw):
            if raw[at] == "\\" and raw[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
                parts.append((raw[at + 1].strip("\n"), "literal"))
                at += 2
            elif raw[at] in "$`":
                end = end_of(raw, at, self.file)
                value = self._expansion(raw[at:end])
                if isinstance(value, tuple) and raw[at:end].endswith(("[*]}", "$*")):
                    value = " ".join(value)
                if isinstance(value, str):
                    parts.append((value, "literal"))
                else:
                    parts += [(each, "literal" if not position else "next") for position, each in enumerate(value)]
                    if not value and raw == raw[at:end]:
                        return []  # "$@" of nothing is no word
                at = end
            else:
                parts.append((raw[at], "literal"))
                at += 1
        return parts

    def inside_quotation(self, raw: str) -> str:
        """Return the text between double quotation marks, expanded."""
        return "".join((" " if kind == "next" else "") + part for part, kind in self._quoted(raw))

    def _expansion(self, raw: str) -> Variable:
        """Return the value of an expansion, which begins with `$` or a backquote."""
        if raw.startswith("$(("):
            return self.arithmetic(raw[3:-2])
        if raw.startswith(("$(", "`")):
            return self._output(raw[2:-1] if raw.startswith("$") else raw[1:-1], raw)
        if raw.startswith("${"):
            return self._parameter(raw[2:-1], raw)
        return self._parameter(raw[1:], raw) if len(raw) > 1 else raw

    def _output(self, text: str, raw: str) -> str:
        """Return the output of a command: of `echo`, or of `cat` with a here-document; a mark for other commands."""
        before, self.state = self.state, self.state.copied()
        try:
            nodes = Parser(text, self.file).all()
            if len(nodes) == 1 and nodes[0].kind == "simple" and nodes[0].words[:1] in (["echo"], ["cat"]):
                document = next((body for sign, body in nodes[0].redirections if sign in ("<<", "<<-")), None)
                if nodes[0].words[0] == "echo":
                    words = [field for word in nodes[0].words[1:] for field in self.fields(word)]
                    return " ".join(word for word in words if word not in ("-n", "-e"))
                if document is not None:
                    return document[1:] if document[0] == "'" else self.inside_quotation(document[1:])
        except (UserError, ExitError, LeftError):
            pass
        finally:
            self.state = before
        return mark(raw)

    def _parameter(self, body: str, raw: str) -> Variable:
        match = PARAMETER.fullmatch(body)
        if match is None:
            return mark(raw)
        name, index, rest = match.groups()
        value = self.value(name)
        if index in ("[@]", "[*]"):
            value = (value,) if isinstance(value, str) else value
        elif isinstance(value, tuple) and name not in "@*":
            number = index[1:-1] if index else "0"
            if not number.isdigit() or any(map(is_open, value[: int(number) + 1])):  # an open element may be several
                return mark(raw)
            value = value[int(number)] if int(number) < len(value) else ""
        if not rest:
            return mark(name) if value is None else value
        default = re.match(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
        if default is None:
            return self._cut(value, rest, raw)
        return self._defaulted(name, value, default, raw)

    def _defaulted(self, name: str, value: Variable | None, default: re.Match[str], raw: str) -> Variable:
        """Return a variable, or the text that replaces it if it is (or is not) set."""
        is_unset = name in self.own and name not in self.state.variables and name not in self.given
        is_set: bool | None = value is not None and not is_unset and not (default[1] and not value)
        if is_set and default[1]:
            nothing = self._stands_for_nothing(value)
            is_set = None if nothing is None else not nothing
        if is_set is None:
            return mark(raw)
        if default[2] == "+":
            return self.inside_quotation(default[3]) if is_set else ""
        if is_set and value is not None:
            return value
        if default[2] == "?":
            return mark(name)
        text = self.text(default[3])
        if default[2] == "=" and NAME.fullmatch(name):
            self.assign(name, text)
        return text

    def _stands_for_nothing(self, value: Variable | None) -> bool | None:
        """Return whether an open value is empty: True for a variable or argument not set, None if that is open."""
        if not isinstance(value, str) or not is_open(value) or MARKS.sub("", value):
            return False
        empty: list[bool | None] = []
        for label in MARKS.findall(value):
            branch = self.branches.get(label)
            if branch is None:
                empty.append((NAME.fullmatch(label) is not None or label.isdigit()) and self.value(label) is None)
            else:
                empty.append(None if any(not each or is_open(each) for each in branch.alternatives) else False)
        return None if None in empty else all(empty)

    @staticmethod
    def _cut(value: Variable | None, rest: str, raw: str) -> str:
        """Return a text in another case, or without its beginning or end; a mark if it cannot be determined."""
        if not isinstance(value, str) or len(value) > STEP or is_open(value) or re.search(r"[$`]", rest):
            return mark(raw)
        if rest in (",,", "^^"):
            return value.lower() if rest == ",," else value.upper()
        if (match := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL)) is not None:
            cuts = range(len(value) + 1)
            front, pattern = match[1][0] == "#", match[2]
            fits = [i for i in cuts if fnmatchcase(value[:i] if front else value[i:], pattern)]
            if not fits:
                return value
            at = max(fits) if (len(match[1]) == 2) == front else min(fits)
            return value[at:] if front else value[:at]
        return mark(raw)

    def arithmetic(self, text: str) -> str:
        """Return the value of an integer expression, or a mark."""
        expanded = self.inside_quotation(text)

        def replaced(match: re.Match[str]) -> str:
            value = self.value(match[0])
            return value if isinstance(value, str) and value else mark(match[0])

        expanded = NAME.sub(replaced, expanded) if not is_open(expanded) else expanded
        if is_open(expanded) or not re.fullmatch(r"[\d\s()+\-*/%<>=!&|]{1,200}", expanded):
            return mark(f"$(({text}))")
        try:
            tree = ast.parse(expanded.replace("&&", " and ").replace("||", " or ").strip(), mode="eval")
            return str(int(_number(tree.body)))
        except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError):
            return mark(f"$(({text}))")

    # tests

    def holds(self, words: Sequence[str], *, is_double: bool) -> bool | None:
        """Return whether a test holds; None if that is open."""
        for operators, stop in ((("||", "-o"), True), (("&&", "-a"), False)):
            places = [place for place, word in enumerate(words) if word in operators]
            if places and 0 < places[0] < len(words) - 1:
                sides = [words[: places[0]], words[places[0] + 1 :]]
                statuses = [self.holds(side, is_double=is_double) for side in sides]
                return stop if stop in statuses else None if None in statuses else not stop
        if words and words[0] == "!":
            status = self.holds(words[1:], is_double=is_double)
            return None if status is None else not status
        if words and words[0] == "(" and words[-1] == ")":
            return self.holds(words[1:-1], is_double=is_double)
        texts = [self.text(word) for word in words]
        match texts:
            case [text]:
                empty = self._is_empty(text)
                return None if empty is None else not empty
            case ["-z" | "-n" as sign, text]:
                empty = self._is_empty(text)
                return None if empty is None else empty == (sign == "-z")
            case [str() as first, str() as sign, str() as second] if not is_open(first + second):
                return _compared(first, sign, second, has_patterns=is_double and words[2][:1] not in "\"'")
            case _:
                return None

    def _is_empty(self, text: str) -> bool | None:
        """Return whether a text is empty; a variable that nothing sets counts as empty."""
        if MARKS.sub("", text):
            return False
        labels = MARKS.findall(text)
        known = all(
            NAME.fullmatch(label) and label not in self.branches and self.value(label) is None for label in labels
        )
        return True if known else None


def _compared(left: str, sign: str, right: str, *, has_patterns: bool) -> bool | None:
    if sign in ("=", "==", "!="):
        same = fnmatchcase(left, right) if has_patterns else left == right
        return same == (sign != "!=")
    numbers = {"-eq": "==", "-ne": "!=", "-lt": "<", "-gt": ">", "-le": "<=", "-ge": ">="}
    if sign not in numbers or not all(re.fullmatch(r"\s*-?\d{1,15}\s*", side) for side in (left, right)):
        return None
    a, b = int(left), int(right)
    return {"==": a == b, "!=": a != b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b}[numbers[sign]]


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # C truncates


OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - _quotient(a, b) * b,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.And: lambda a, b: bool(a) and bool(b),
    ast.Or: lambda a, b: bool(a) or bool(b),
}


def _number(node: ast.expr) -> int:
    """Return the value of an integer expression of C; raise ValueError or KeyError for anything else."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case (
            ast.BinOp(left=left, op=operation, right=right)
            | ast.Compare(left=left, ops=[operation], comparators=[right])
            | ast.BoolOp(values=[left, right], op=operation)
        ):
            a, b = _number(left), _number(right)
            if max(abs(a), abs(b)) > 10**15:
                raise ValueError
            return int(OPERATIONS[type(operation)](a, b))
    raise ValueError
