r"""Shell scripts, followed without being run: the commands that they would start, with their variables replaced.

[Note: following a script] Assignments, arrays, `if`, `case`, loops, functions, `eval`, `bash -c` and here-documents of
bash are followed; other programs are not started and count as successful. What a script takes from outside is open: a
variable that it sets nowhere, `$1`, the output of a command. Open values stand in words as marks, `\0NAME\0`. A
variable that is not set is unset for `${NAME:-default}` and for `-z`; in every other test it is open. Of a test that is
open, both branches are followed, and a variable that they leave with different values becomes a mark with these as its
alternatives; one that other branches alone set is empty. Branches that exit before they start anything are not taken,
as the script is read for what it starts. Variables that the caller gives stay as given, whatever the script assigns.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gssim.errors import UserError, one_line
from gssim.interop.shell_syntax import (
    ASSIGNMENT,
    DECLARING,
    INSTEAD,
    MARKS,
    NAME,
    Node,
    Parser,
    Token,
    end_of,
    is_open,
    mark,
)

MOST_STEPS = 20_000
"""Commands and tests of a script that are followed."""
MOST_NESTED = 40
MOST_CHARACTERS = 50_000
"""Of a variable; a script can double one in each line."""

PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^\]]*\])?(.*)", re.DOTALL)
UNKNOWN_STATUS = {"grep", "egrep", "which", "command", "type", "nc", "diff", "cmp", "read", "getopts", "ping", "pgrep"}
SHELLS = re.compile(r"(.*/)?(bash|sh|zsh)")

Variable = str | tuple[str, ...]
"""Text, or the elements of an array."""


@dataclass(frozen=True)
class Branch:
    """What an open test decides."""

    alternatives: tuple[str | None, ...]
    """Texts, of which one it is; None: not set."""
    where: str
    """The test, as it is written, and its line."""
    variable: str
    """A variable that decides it; empty where none does."""


@dataclass(frozen=True)
class Command:
    """A command that a script starts."""

    words: tuple[str, ...]
    line: int


@dataclass
class Script:
    """What is left of a script once it is followed."""

    commands: list[Command]
    variables: dict[str, Variable]
    files: dict[str, str]
    """Texts that it writes, by the names of the files."""
    branches: dict[str, Branch]
    """By the names of the marks that stand for what they decide."""


def follow(
    text: str, *, file: str, given: Mapping[str, str] | None = None, source: Callable[[str], str | None] | None = None
) -> Script:
    r"""Return what a script would start; `source` returns the text of a file that it includes, None for none.

    Raises UserError where the text is no shell script.

    >>> script = follow('N=2\nif [ $SIZE = 7B ]; then L=32; else L=40; fi\nrun --n $N --l $L', file="example")
    >>> script.commands[0].words
    ('run', '--n', '2', '--l', '\x00L\x00')
    >>> script.branches["L"].alternatives, script.branches["L"].where
    (('32', '40'), 'if [ $SIZE = 7B ] in line 2')
    """
    shell = _Shell(file, dict(given or {}), source or (lambda name: None))
    try:
        shell.run_text(_cleaned(text))
    except _LeftError:
        pass
    except RecursionError:
        raise UserError(f"{file}: is nested too deep") from None
    return Script(shell.state.commands, shell.state.variables, shell.state.files, shell.branches)


class _LeftError(Exception):
    """The script, or a function of it, ends here."""


class _BrokenError(Exception):
    """A loop ends here."""


@dataclass
class _State:
    variables: dict[str, Variable] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    positional: tuple[str, ...] | None = None
    """Arguments of the function that runs; None: those of the script."""

    def copied(self) -> "_State":
        return _State(dict(self.variables), list(self.commands), dict(self.files), self.positional)


class _Shell:
    """Follows commands; see [Note: following a script]."""

    def __init__(self, file: str, given: dict[str, str], source: Callable[[str], str | None]) -> None:
        self.file, self.given, self.source = file, given, source
        self.state = _State()
        self.branches: dict[str, Branch] = {}
        self.functions: dict[str, list[Node]] = {}
        self.own: set[str] = set()
        self.steps, self.depth = 0, 0

    def run_text(self, text: str) -> bool | None:
        nodes = Parser(text, self.file).all()
        self.own |= _assigned(nodes)
        return self._nested(lambda: self.run(nodes))

    def _nested(self, work: Callable[[], bool | None]) -> bool | None:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise UserError(f"{self.file}: is nested too deep")
        try:
            return work()
        finally:
            self.depth -= 1

    def run(self, nodes: Sequence[Node]) -> bool | None:
        """Follow commands; return whether the last one succeeds, None where that is open."""
        status: bool | None = True
        for node in nodes:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise UserError(f"{self.file}: runs too long to be followed; {INSTEAD}")
            status = self._one(node)
        return status

    def _one(self, node: Node) -> bool | None:
        """Follow one command."""
        kind = "while" if node.kind == "until" else node.kind
        status: bool | None = getattr(self, f"_{kind}")(node)
        return status

    def _pipe(self, node: Node) -> bool | None:
        return [self._one(part) for part in node.inside[0]][-1]

    def _not(self, node: Node) -> bool | None:
        status = self.run(node.inside[0])
        return None if status is None else not status

    def _group(self, node: Node) -> bool | None:
        return self._nested(lambda: self.run(node.inside[0]))

    def _function(self, node: Node) -> bool | None:
        self.functions[node.words[0]] = node.inside[0]
        return True

    def _test(self, node: Node) -> bool | None:
        return self._holds(node.words, is_double=True)

    def _counted(self, node: Node) -> bool | None:
        value = self._arithmetic(node.words[0])
        return None if is_open(value) else value != "0"

    # branches

    def _if(self, node: Node, at: int = 0) -> bool | None:
        if at + 1 >= len(node.inside):
            return self.run(node.inside[at]) if at < len(node.inside) else True
        status = self.run(node.inside[at])
        if status is False:
            return self._if(node, at + 2)
        if status:
            return self._taken(lambda: self.run(node.inside[at + 1]))
        where = self._where(node.inside[at])
        return self._fork([lambda: self.run(node.inside[at + 1]), lambda: self._if(node, at + 2)], *where)

    def _where(self, condition: Sequence[Node], word: str = "if") -> tuple[str, str]:
        """Return how a test is written, and a variable in it."""
        pieces: list[str] = []
        line, waiting = condition[0].line if condition else 0, list(condition)
        while waiting:
            each = waiting.pop(0)
            brackets = ("[[ ", " ]]") if each.kind == "test" else ("", "")
            pieces.append(brackets[0] + " ".join(each.words) + brackets[1] if each.kind != "chain" else "")
            waiting = [inner for part in each.inside for inner in part] + waiting
        text = " ".join(piece for piece in pieces if piece)
        names = re.findall(r"\$\{?([A-Za-z_]\w*|\d)", text)
        return f"{word} {one_line(text, 60)} in line {line}", names[0] if names else ""

    def _taken(self, work: Callable[[], bool | None]) -> bool | None:
        """Follow a branch; one that leaves before it starts anything is not taken."""
        before = self.state.copied()
        try:
            return work()
        except _LeftError:
            if self.state.commands != before.commands:
                raise
            self.state = before
            return None

    def _fork(self, choices: Sequence[Callable[[], bool | None]], where: str, variable: str) -> bool | None:
        """Follow several branches of which one is taken, and merge what they leave."""
        before, ends = self.state, []
        for choice in choices:
            self.state = before.copied()
            try:
                choice()
            except _LeftError:
                if self.state.commands == before.commands:
                    continue
            ends.append(self.state)
        if not ends:
            raise _LeftError
        self.state = ends[0].copied()
        for end in ends[1:]:
            self.state.files |= end.files
            self.state.commands += [each for each in end.commands if each not in self.state.commands]
        for name in sorted({name for end in ends for name in end.variables}):
            values = tuple(dict.fromkeys(end.variables.get(name) for end in ends))
            if len(values) > 1:
                self.state.variables[name] = self._merged(name, values, where, variable)
        return None

    def _merged(self, name: str, values: Sequence[Variable | None], where: str, variable: str) -> Variable:
        """Return what a variable is behind branches: the words that all have at its beginning, and a mark."""
        is_array = any(isinstance(value, tuple) for value in values)
        words = [value if isinstance(value, tuple) else tuple((value or "").split()) for value in values]
        same = 0
        while all(len(each) > same for each in words) and len({each[same] for each in words}) == 1:
            same += 1
        takes_options = is_array or same > 0 or any(each and each[0].startswith("-") for each in words)
        if takes_options:
            alternatives: tuple[str | None, ...] = tuple(" ".join(each[same:]) for each in words)
        else:
            alternatives = tuple(None if value is None else str(value) for value in values)
        label, number = name, 1
        branch = Branch(alternatives, where, variable)
        while self.branches.setdefault(label, branch) != branch:
            number += 1
            label = f"{name}\1{number}"
        merged = (*(words[0][:same] if takes_options else ()), mark(label))
        return merged if is_array else " ".join(merged)

    def _chain(self, node: Node) -> bool | None:
        status = self.run(node.inside[0])
        for word, part in zip(node.words, node.inside[1:], strict=True):
            if status is None:
                where = self._where(node.inside[0], "")
                status = self._fork([lambda part=part: self.run(part), lambda: True], where[0].strip(), where[1])  # type: ignore[misc]
            elif status == (word == "&&"):
                part_status = self._taken(lambda part=part: self.run(part))  # type: ignore[misc]
                status = part_status
        return status

    def _case(self, node: Node) -> bool | None:
        text = self.text(node.words[0])
        if not is_open(text):
            for patterns, body in zip(node.patterns, node.inside, strict=True):
                if any(fnmatchcase(text, self.text(pattern)) for pattern in patterns):
                    return self._taken(lambda body=body: self.run(body))  # type: ignore[misc]
            return True
        choices: list[Callable[[], bool | None]] = [lambda body=body: self.run(body) for body in node.inside]  # type: ignore[misc]
        if not any("*" in patterns for patterns in node.patterns):
            choices.append(lambda: True)
        names = re.findall(r"\$\{?([A-Za-z_]\w*|\d)", node.words[0])
        where = f"case {one_line(node.words[0], 60)} in line {node.line}"
        return self._fork(choices, where, names[0] if names else "")

    def _for(self, node: Node) -> bool | None:
        name, *words = node.words
        values = [field for word in words for field in self.fields(word)]
        if any(is_open(value) for value in values) or name == "_":
            values = [mark(name)]
        for value in values:
            self._assign(name, value)
            try:
                self.run(node.inside[0])
            except _BrokenError:
                break
        return True

    def _while(self, node: Node) -> bool | None:
        condition, body = node.inside
        status = self.run(condition)
        if node.kind == "until" or status is False or _reads_arguments(condition):
            return True

        def turn() -> bool | None:
            try:
                return self.run(body)
            except _BrokenError:
                return True

        if status:
            return self._taken(turn)
        return self._fork([turn, lambda: True], *self._where(condition, "while"))

    # simple commands

    def _simple(self, node: Node) -> bool | None:
        if not node.words or node.words[0] in DECLARING:
            for token in node.assignments:
                self._assignment(token)
            return True
        words = [field for word in node.words for field in self.fields(word)]
        if not words:
            return True
        if words[0] in ("[", "test"):
            return self._holds([word for word in node.words[1:] if word != "]"], is_double=False)
        if words[0] in self.functions:
            return self._call(words[0], words[1:])
        document = next((text for sign, text in node.redirections if sign in ("<<", "<<-")), None)
        if document is not None:
            document = document[1:] if document[0] == "'" else self._inside_quotation(document[1:])
        if words[0] in ("echo", "printf", "cat", "tee"):
            self._write(node, " ".join(words[1:]) if words[0] in ("echo", "printf") else document)
            return True
        if words[0] == "read" and document is not None:
            self._assign(words[-1], document)
            return True
        special = getattr(self, f"_do_{words[0]}", None) if NAME.fullmatch(words[0]) else None
        if special is not None:
            result: bool | None = special(words[1:])
            return result
        return self._start(node, words, document)

    def _start(self, node: Node, words: Sequence[str], document: str | None) -> bool | None:
        """Follow what a shell is given, or keep a command that would be started."""
        inner = self._script_in(words)
        if inner is None and (SHELLS.fullmatch(words[0]) or words[0] in ("sbatch", "srun", "ssh")):
            inner = document
        if inner is not None:
            return self.run_text(inner)
        if words[0] == ".":
            return self._do_source(words[1:])
        if len(words) == 1 and is_open(words[0]):
            return None
        self.state.commands.append(Command(tuple(words), node.line))
        return None if words[0] in UNKNOWN_STATUS else True

    def _write(self, node: Node, text: str | None) -> None:
        """Keep what is written to a file."""
        for sign, target in node.redirections:
            if sign in (">", ">|") and text is not None:
                self.state.files[self.text(target)] = text[:MOST_CHARACTERS]

    @staticmethod
    def _script_in(words: Sequence[str]) -> str | None:
        """Return the text that a shell is given by -c."""
        for position, word in enumerate(words[:-2]):
            if SHELLS.fullmatch(word) and re.fullmatch(r"-\w*c\w*", words[position + 1]):
                return words[position + 2]
        return None

    def _call(self, name: str, arguments: Sequence[str]) -> bool | None:
        before, self.state.positional = self.state.positional, tuple(arguments)
        try:
            return self._nested(lambda: self.run(self.functions[name]))
        except _LeftError as left:
            if left.args != ("return",):
                raise
            return True
        finally:
            self.state.positional = before

    def _do_source(self, arguments: Sequence[str]) -> bool | None:
        text = self.source(arguments[0]) if arguments and not is_open(arguments[0]) else None
        return True if text is None else self.run_text(_cleaned(text))

    def _do_eval(self, arguments: Sequence[str]) -> bool | None:
        return self.run_text(" ".join(arguments))

    def _do_exec(self, arguments: Sequence[str]) -> bool | None:
        if arguments:
            self.state.commands.append(Command(tuple(arguments), 0))
        return True

    def _do_exit(self, arguments: Sequence[str]) -> bool | None:
        raise _LeftError("exit")

    def _do_return(self, arguments: Sequence[str]) -> bool | None:
        raise _LeftError("return")

    def _do_break(self, arguments: Sequence[str]) -> bool | None:
        raise _BrokenError

    def _do_continue(self, arguments: Sequence[str]) -> bool | None:
        raise _BrokenError

    def _do_true(self, arguments: Sequence[str]) -> bool | None:
        return True

    def _do_false(self, arguments: Sequence[str]) -> bool | None:
        return False

    def _do_unset(self, arguments: Sequence[str]) -> bool | None:
        for name in arguments:
            self.state.variables.pop(name, None)
        return True

    def _do_set(self, arguments: Sequence[str]) -> bool | None:
        if "--" in arguments:
            self.state.positional = tuple(arguments[arguments.index("--") + 1 :])
        return True

    def _do_shift(self, arguments: Sequence[str]) -> bool | None:
        if self.state.positional:
            self.state.positional = self.state.positional[1:]
        return True

    # variables and words

    def _assignment(self, token: Token) -> None:
        if token.kind == "array":
            sign, *words = token.parts
            values: Variable = tuple(field for word in words for field in self.fields(word))
            self._assign(token.value, values, adds=sign == "+")
        elif (match := ASSIGNMENT.match(token.value)) is not None:
            value = self.text(token.value[match.end() :])
            self._assign(
                match[1], value if match[2] is None else (value,), adds=match[3] == "+" or match[2] is not None
            )

    def _assign(self, name: str, value: Variable, *, adds: bool = False) -> None:
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
        self.state.variables[name] = value if size <= MOST_CHARACTERS else mark(name)

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
        """Return a word as one text."""
        text = ""
        for part, kind in self._expanded(raw):
            text += (" " if kind == "next" and text else "") + part
        return text

    def fields(self, raw: str) -> list[str]:
        """Return the words that a word becomes."""
        found: list[str] = []
        current: str | None = None
        for part, kind in self._expanded(raw):
            if kind == "next" and current is not None:
                found.append(current)
                current = None
            if kind != "split":
                current = (current or "") + part
                continue
            pieces = part.split()
            if current is not None and part and part[0].isspace():
                found.append(current)
                current = None
            for position, piece in enumerate(pieces):
                if position and current is not None:
                    found.append(current)
                    current = None
                current = (current or "") + piece
            if pieces and part[-1].isspace() and current is not None:
                found.append(current)
                current = None
        return found if current is None else [*found, current]

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

    def _inside_quotation(self, raw: str) -> str:
        return "".join((" " if kind == "next" else "") + part for part, kind in self._quoted(raw))

    def _expansion(self, raw: str) -> Variable:
        """Return what an expansion becomes, from its `$` or backquote on."""
        if raw.startswith("$(("):
            return self._arithmetic(raw[3:-2])
        if raw.startswith(("$(", "`")):
            return self._output(raw[2:-1] if raw.startswith("$") else raw[1:-1], raw)
        if raw.startswith("${"):
            return self._parameter(raw[2:-1], raw)
        return self._parameter(raw[1:], raw) if len(raw) > 1 else raw

    def _output(self, text: str, raw: str) -> str:
        """Return the output of a command: of echo and cat of a here-document, else a mark."""
        before, self.state = self.state, self.state.copied()
        try:
            nodes = Parser(text, self.file).all()
            if len(nodes) == 1 and nodes[0].kind == "simple" and nodes[0].words[:1] in (["echo"], ["cat"]):
                document = next((body for sign, body in nodes[0].redirections if sign in ("<<", "<<-")), None)
                if nodes[0].words[0] == "echo":
                    words = [field for word in nodes[0].words[1:] for field in self.fields(word)]
                    return " ".join(word for word in words if word not in ("-n", "-e"))
                if document is not None:
                    return document[1:] if document[0] == "'" else self._inside_quotation(document[1:])
        except (UserError, _LeftError, _BrokenError):
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
            value = (value[int(number)] if int(number) < len(value) else "") if number.isdigit() else mark(raw)
        if not rest:
            return mark(name) if value is None else value
        default = re.match(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
        if default is None:
            return self._cut(value, rest, raw)
        is_unset = name in self.own and name not in self.state.variables and name not in self.given
        is_set = value is not None and not is_unset and not (default[1] and not value)
        if default[2] == "+":
            return self._inside_quotation(default[3]) if is_set else ""
        if is_set and value is not None:
            return value
        if default[2] == "?":
            return mark(name)
        text = self.text(default[3])
        if default[2] == "=" and NAME.fullmatch(name):
            self._assign(name, text)
        return text

    @staticmethod
    def _cut(value: Variable | None, rest: str, raw: str) -> str:
        """Return a text in other case, or without its beginning or end; a mark where it cannot be told."""
        if not isinstance(value, str) or is_open(value) or re.search(r"[$`]", rest):
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

    def _arithmetic(self, text: str) -> str:
        """Return the value of an integer expression, or a mark."""
        expanded = self._inside_quotation(text)

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

    def _holds(self, words: Sequence[str], *, is_double: bool) -> bool | None:
        """Return whether a test holds; None where that is open."""
        for operators, stop in ((("||", "-o"), True), (("&&", "-a"), False)):
            places = [place for place, word in enumerate(words) if word in operators]
            if places and 0 < places[0] < len(words) - 1:
                sides = [words[: places[0]], words[places[0] + 1 :]]
                statuses = [self._holds(side, is_double=is_double) for side in sides]
                return stop if stop in statuses else None if None in statuses else not stop
        if words and words[0] == "!":
            status = self._holds(words[1:], is_double=is_double)
            return None if status is None else not status
        if words and words[0] == "(" and words[-1] == ")":
            return self._holds(words[1:-1], is_double=is_double)
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
        """Return whether a text is empty; a variable that nothing sets is."""
        if MARKS.sub("", text):
            return False
        labels = MARKS.findall(text)
        known = all(
            NAME.fullmatch(label) and label not in self.branches and self.value(label) is None for label in labels
        )
        return True if known else None


def _reads_arguments(condition: Sequence[Node]) -> bool:
    """Return whether a loop goes over the script's arguments, of which there are none."""
    text = " ".join(word for each in condition for word in each.words)
    return "$#" in text or "$1" in text or text.startswith("getopts")


def _assigned(nodes: Sequence[Node]) -> set[str]:
    """Return the variables that commands set, wherever they stand; those of loops over arguments are left out."""
    found: set[str] = set()
    from_outside: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.kind in ("while", "until") and _reads_arguments(node.inside[0]):
            continue
        for token in node.assignments:
            match = ASSIGNMENT.match(token.value)
            name = token.value if token.kind == "array" else match[1] if match is not None else ""
            found.add(name)
            if name and re.search(rf"\$\{{?{name}\b", " ".join([token.value, *token.parts])):
                from_outside.add(name)  # such as PATH=$PATH:...
        waiting += [each for part in node.inside for each in part]
    return found - from_outside - {""}


def _cleaned(text: str) -> str:
    """Return a text of a file without the characters of marks."""
    return re.sub("[\0\1]", " ", text)


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
