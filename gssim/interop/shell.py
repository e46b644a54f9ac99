r"""Shell scripts, followed without being run, to find the commands that they would start, with variables replaced.

[Note: following a script] Assignments, arrays, `if`, `case`, loops, functions, `eval`, `bash -c` and here-documents of
bash are followed; other programs are not started and count as successful. Values from outside the script are open: a
variable that the script sets nowhere, `$1`, the output of a command. Open values appear in words as marks, `\0NAME\0`.
A variable that is not set counts as unset for `${NAME:-default}` and `-z`, and as open in every other test. Both
branches of an open test are followed. A variable that they leave with different values becomes a mark with these values
as alternatives; one that only other branches set is empty. Branches that exit before starting anything are not taken,
since the script is read for what it starts. Variables given by the caller keep their values, whatever the script
assigns.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partialmethod

from gssim.errors import UserError, one_line
from gssim.interop.shell_syntax import (
    ASSIGNMENT,
    DECLARING,
    MARK,
    NAME,
    Node,
    Parser,
    expression,
    is_open,
    mark,
    written,
)
from gssim.interop.shell_words import (
    MOST_CHARACTERS,
    Branch,
    Command,
    ExitError,
    LeftError,
    State,
    Variable,
    Words,
)

MOST_NESTED = 40
UNKNOWN_STATUS = {"grep", "egrep", "which", "command", "type", "nc", "diff", "cmp", "read", "getopts", "ping", "pgrep"}
SHELLS = re.compile(r"(.*/)?(bash|sh|zsh)")
OF_JOBS = ("srun", "jsrun", "mpirun", "mpiexec")
"""Launchers that start a shell on each rank."""
Source = Callable[[str, bool], str | None]
"""Returns the text of a file by its path, None if it cannot be read; the second argument: whether the path is relative
to the folder of the script, not to the working directory."""
IN_OPEN_FOLDER = re.compile(f"{MARK}([^{MARK}]*){MARK}/+(.*)")
"""The path of a file in a folder that is an open value."""
WORDS = re.compile(r"[^\s\"'`(){}\[\];&|<>$]+")
SCRIPT_WORDS = {"0", "BASH_SOURCE"}
FOLDER_WORDS = {"dirname", "realpath", "readlink", "-f", "cd", "pwd", "-P", "--", "/dev/null", "1", "2"} | SCRIPT_WORDS
"""Words of expressions for the folder of a script, such as $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)."""


@dataclass
class Script:
    """The outcome of following a script."""

    commands: list[Command]
    variables: dict[str, Variable]
    files: dict[str, str]
    """Texts that the script writes, by file name."""
    branches: dict[str, Branch]
    """Open tests, by the names of the marks that depend on them."""
    unread: list[str]
    """Names of the files that it includes and that could not be read, as the script writes them."""


def follow(text: str, *, file: str, given: Mapping[str, str] | None = None, source: Source | None = None) -> Script:
    r"""Return the commands that a script would start; `source` returns the texts of the files that it includes.

    Raises UserError where the text is no shell script.

    >>> script = follow('N=2\nif [ $SIZE = 7B ]; then L=32; else L=40; fi\nrun --n $N --l $L', file="example")
    >>> script.commands[0].words
    ('run', '--n', '2', '--l', '\x00L\x011\x00')
    >>> branch = script.branches["L\x011"]
    >>> branch.alternatives, branch.where
    (('32', '40'), 'if [ $SIZE = 7B ] in line 2')
    """
    shell = _Shell(file, dict(given or {}), source or (lambda name, is_beside: None))
    try:
        shell.framed(lambda: shell.run_text(_cleaned(text)), "return")
    except ExitError:
        pass
    except RecursionError:
        raise UserError(f"{file}: is nested too deep") from None
    return Script(shell.state.commands, shell.state.variables, shell.state.files, shell.branches, shell.unread)


@dataclass
class _Frame:
    """A function, an included file, a loop, or one pass of a loop."""

    kind: str
    """Command that ends it: return, break or continue."""
    left: list[tuple[State, str, str]] = field(default_factory=list)
    """States of branches that ended it early, each with its test and a variable of the test."""


class _Shell(Words):
    """Follows commands; see [Note: following a script]."""

    def __init__(self, file: str, given: dict[str, str], source: Source) -> None:
        super().__init__(file, given)
        self.source = source
        self.functions: dict[str, list[Node]] = {}
        self.frames: list[_Frame] = []
        self.unread: list[str] = []
        self.depth = 0
        self.launcher: tuple[str, ...] = ()
        """Words of a launcher that starts the shell whose script is followed: `srun -N 2 bash -c '...'`."""

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
        """Follow commands; return whether the last one succeeds, or None if that is open."""
        status: bool | None = True
        for node in nodes:
            self.count(1)
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
        return self.holds(node.words, is_double=True)

    def _counted(self, node: Node) -> bool | None:
        value = self.arithmetic(node.words[0])
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
        """Return the text of a test, and a variable in it."""
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
        """Follow a branch; one that exits before it starts anything is not taken."""
        before = self.state.copied()
        try:
            return work()
        except ExitError:
            if self.state.commands != before.commands:
                raise
            self.state = before
            return None

    def framed(self, work: Callable[[], bool | None], kind: str) -> bool | None:
        """Follow commands that return, break or continue may end; merge the states of all branches that end there."""
        frame = _Frame(kind)
        self.frames.append(frame)
        try:
            work()
        except LeftError as left:
            if left.kind != kind:
                raise
        finally:
            self.frames.pop()
        for state, where, variable in frame.left:
            self._merge([state, self.state], where, variable)
        return True

    def _fork(self, choices: Sequence[Callable[[], bool | None]], where: str, variable: str) -> bool | None:
        """Follow several branches, one of which is taken, and merge their resulting states."""
        before = self.state
        ends: list[State] = []
        left: list[tuple[str, State]] = []
        for choice in choices:
            self.state = before.copied()
            try:
                choice()
                ends.append(self.state)
            except ExitError:
                if self.state.commands != before.commands:
                    ends.append(self.state)
            except LeftError as error:
                left.append((error.kind, self.state))
        if not ends and not left:
            raise ExitError
        if not ends:
            self._merge([state for _, state in left], where, variable)
            raise LeftError(min(kind for kind, _ in left))
        for kind, state in left:
            frame = next(frame for frame in reversed(self.frames) if frame.kind == kind)
            frame.left.append((state, where, variable))
        self._merge(ends, where, variable)
        return None

    def _merge(self, ends: Sequence[State], where: str, variable: str) -> None:
        """Continue with the states that branches left, merged into one."""
        self.state = ends[0].copied()
        for end in ends[1:]:
            self.state.files |= end.files
            self.state.commands += [each for each in end.commands if each not in self.state.commands]
        for name in sorted({name for end in ends for name in end.variables}):
            values = tuple(dict.fromkeys(end.variables.get(name) for end in ends))
            if len(values) > 1:
                self.state.variables[name] = self._merged(name, values, where, variable)

    def _merged(self, name: str, values: Sequence[Variable | None], where: str, variable: str) -> Variable:
        """Return a variable's value after branches: the words with which all values begin, and a mark for the rest."""
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
        branch, number = Branch(alternatives, where, variable), 1
        while self.branches.setdefault(label := f"{name}\1{number}", branch) != branch:
            number += 1
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
            values = [mark(f"{name}\1of {node.line}")]

        def turns() -> bool | None:
            for value in values:
                self.assign(name, value)
                self.framed(lambda: self.run(node.inside[0]), "continue")
            return True

        self.framed(turns, "break")
        return True

    def _while(self, node: Node) -> bool | None:
        condition, body = node.inside
        status = self.run(condition)
        if node.kind == "until" or status is False or _reads_arguments(condition):
            return True

        def turn() -> bool | None:
            self.framed(lambda: self.framed(lambda: self.run(body), "continue"), "break")
            return True

        if status:
            return self._taken(turn)
        return self._fork([turn, lambda: True], *self._where(condition, "while"))

    # simple commands

    def _simple(self, node: Node) -> bool | None:
        if not node.words or node.words[0] in DECLARING:
            for token in node.assignments:
                self.assignment(token)
            return True
        words = [field for word in node.words for field in self.fields(word)]
        if not words:
            return True
        if words[0] in ("[", "test"):
            return self.holds([word for word in node.words[1:] if word != "]"], is_double=False)
        if words[0] in self.functions:
            return self._call(words[0], words[1:])
        document = next((text for sign, text in node.redirections if sign in ("<<", "<<-")), None)
        if document is not None:
            document = document[1:] if document[0] == "'" else self.inside_quotation(document[1:])
        if words[0] in ("echo", "printf", "cat", "tee"):
            self._write(node, " ".join(words[1:]) if words[0] in ("echo", "printf") else document)
            return True
        if words[0] == "read" and document is not None:
            self.assign(words[-1], document)
            return True
        special = getattr(self, f"_do_{words[0]}", None) if NAME.fullmatch(words[0]) else None
        if special is not None:
            result: bool | None = special(words[1:])
            return result
        return self._start(node, words, document)

    def _start(self, node: Node, words: Sequence[str], document: str | None) -> bool | None:
        """Follow the script that a shell is given, or record a command that would be started."""
        inner = self._script_in(words)
        if inner is None and (SHELLS.fullmatch(words[0]) or words[0] in ("sbatch", "srun", "ssh")):
            inner = document
        if inner is not None:
            outer, self.launcher = self.launcher, self.launcher or _launcher_in(words)
            try:
                return self.run_text(inner)
            finally:
                self.launcher = outer
        if words[0] == ".":
            return self._do_source(words[1:])
        if len(words) == 1 and is_open(words[0]):
            return None
        launcher = () if words[0].startswith("--") else self.launcher
        self.state.commands.append(Command((*launcher, *words), node.line))
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
            return self._nested(lambda: self.framed(lambda: self.run(self.functions[name]), "return"))
        finally:
            self.state.positional = before

    def _do_source(self, arguments: Sequence[str]) -> bool | None:
        name, is_beside = _place_of(arguments[0]) if arguments else ("", False)
        text = self.source(name, is_beside) if name and not is_open(name) else None
        if text is not None:
            self.framed(lambda: self.run_text(_cleaned(text)), "return")
        elif arguments:
            self.unread.append(written(arguments[0]))
        return True

    def _do_eval(self, arguments: Sequence[str]) -> bool | None:
        return self.run_text(" ".join(arguments))

    def _do_exec(self, arguments: Sequence[str]) -> bool | None:
        if arguments:
            self.state.commands.append(Command(tuple(arguments), 0))
        return True

    def _do_exit(self, arguments: Sequence[str]) -> bool | None:
        raise ExitError

    def _leave(self, kind: str, arguments: Sequence[str]) -> bool | None:
        for frame in reversed(self.frames):
            if frame.kind == kind:
                raise LeftError(kind)
            if frame.kind == "return":  # a function cannot end a loop of its caller
                break
        return True

    _do_return = partialmethod(_leave, "return")
    _do_break = partialmethod(_leave, "break")
    _do_continue = partialmethod(_leave, "continue")

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


def _reads_arguments(condition: Sequence[Node]) -> bool:
    """Return whether a loop runs over the script's arguments, of which there are none."""
    text = " ".join(word for each in condition for word in each.words)
    return "$#" in text or "$1" in text or text.startswith("getopts")


def _assigned(nodes: Sequence[Node]) -> set[str]:
    """Return the variables that commands set anywhere, except those set by loops over arguments."""
    names: set[str] = set()
    from_outside: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.kind in ("while", "until") and _reads_arguments(node.inside[0]):
            continue
        for token in node.assignments:
            match = ASSIGNMENT.match(token.value)
            name = token.value if token.kind == "array" else match[1] if match is not None else ""
            names.add(name)
            if name and re.search(rf"\$\{{?{name}\b", " ".join([token.value, *token.parts])):
                from_outside.add(name)  # such as PATH=$PATH:...
        waiting += [each for part in node.inside for each in part]
    return names - from_outside - {""}


def _place_of(path: str) -> tuple[str, bool]:
    """Return the path of a file that a script includes, and whether it is relative to the script's own folder.

    Otherwise it is relative to the working directory, as `pwd` is, or in a folder that is not known (an open path).
    """
    match = IN_OPEN_FOLDER.fullmatch(path)
    words = Counter(WORDS.findall(expression(match[1])) if match else ())
    if match and words and words.keys() <= {"pwd", "-P"}:
        return match[2], False
    if match and words.keys() <= FOLDER_WORDS and words["dirname"] == 1 and words.keys() & SCRIPT_WORDS:
        return match[2], True
    return path, False


def _cleaned(text: str) -> str:
    """Return a file's text without the characters that delimit marks."""
    return re.sub("[\0\1]", " ", text)


def _launcher_in(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a launcher before the shell that it starts; empty if none starts it.

    >>> _launcher_in(["env", "srun", "-n", "8", "bash", "-c", "python train.py"])
    ('srun', '-n', '8')
    """
    shell = next((i for i, word in enumerate(words) if SHELLS.fullmatch(word)), 0)
    first = next((i for i, word in enumerate(words[:shell]) if word.rpartition("/")[2] in OF_JOBS), shell)
    return tuple(words[first:shell])
