"""Words and commands of shell scripts: tokens, here-documents, and the tree of commands.

Quotations and expansions are kept in words as written; `gssim.interop.shell` resolves them. Open parts of a text are
represented by marks.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from gssim.errors import UserError, one_line

INSTEAD = "give the command line itself in place of the script"

MARK = "\0"
PRIVATE = 0xE000
"""Offset by which characters of a mark that a shell would interpret are moved, to a private area of Unicode."""
MARKS = re.compile(f"{MARK}([^{MARK}]*){MARK}")
NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n]*>(?=[\s\"'/;)]|$)")
"""Placeholders that the user is to fill in, which a shell would take for redirections."""
OPERATORS = (";;&", "<<<", "<<-", "&>>", ";;", ";&", "&&", "||", "&>", ">&", "<&", "<<", ">>", ">|", "|&")
REDIRECTIONS = {"<", ">", ">>", ">|", ">&", "<&", "&>", "&>>", "<<<", "<<", "<<-"}
OPENING = {"if", "for", "then", "else", "elif", "while", "until", "do", "{", "!", "time"}
"""Words after which a command begins."""
DECLARING = {"export", "declare", "local", "readonly", "typeset"}


def is_open(text: str) -> bool:
    """Return whether a text contains marks."""
    return MARKS.search(text) is not None


def written(text: str) -> str:
    r"""Return a text in which marks are written as in the script.

    >>> written("1-\0MODEL\0")
    '1-$MODEL'
    """
    return MARKS.sub(lambda match: shown_mark(match[1]), text)


def shown_mark(name: str) -> str:
    """Return the variable or expression that a mark stands for, as the script writes it."""
    shown = one_line(expression(name).partition("\1")[0], 60)
    return shown if shown.startswith(("$", "`", "<", ">")) else f"${shown}"


def expression(name: str) -> str:
    """Return the name in a mark with the characters that a shell would interpret."""
    return "".join(chr(ord(each) - PRIVATE) if 0 <= ord(each) - PRIVATE < 128 else each for each in name)


def mark(label: str) -> str:
    """Return the mark of an open value: a variable's name, or an expression as it is written."""
    shown = written(label)[:200]
    safe = (each if each.isalnum() or each in "_\1" else chr(ord(each) + PRIVATE) for each in shown if ord(each) < 128)
    return MARK + "".join(safe) + MARK


@dataclass(frozen=True)
class Token:
    """A word or sign: its line number, its parts, and the position after it."""

    kind: str
    """Kind: word, operator, newline, array (name, sign, words), test (words), counted (arithmetic), or document."""
    value: str
    line: int
    parts: tuple[str, ...] = ()
    end: int = 0


@dataclass
class Node:
    """A command: its kind, line and words as written, and the commands inside it."""

    kind: str
    line: int
    words: list[str] = field(default_factory=list)
    assignments: list[Token] = field(default_factory=list)
    redirections: list[tuple[str, str]] = field(default_factory=list)
    inside: list[list["Node"]] = field(default_factory=list)
    patterns: list[list[str]] = field(default_factory=list)


class Tokens:
    """Tokens of a text."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at = text, file, 0
        self.breaks = [match.start() for match in re.finditer("\n", text)]
        self.found: list[Token] = []
        self.documents: list[tuple[str, bool, bool]] = []
        while self.at < len(text):
            self._next()

    def line(self, at: int | None = None) -> int:
        """Return the line number of a position."""
        return bisect_right(self.breaks, (self.at if at is None else at) - 1) + 1

    def fail(self, reason: str) -> UserError:
        """Return the error for a text that is no script."""
        return UserError(f"{self.file}: line {self.line()}: {reason}; {INSTEAD}")

    def _add(self, kind: str, value: str, start: int, parts: Sequence[str] = ()) -> None:
        self.found.append(Token(kind, value, self.line(start), tuple(parts), self.at))

    def _begins_command(self) -> bool:
        last = self.found[-1] if self.found else None
        return last is None or last.kind == "newline" or last.value in OPENING | {";", "&&", "||", "|", "&", "(", ")"}

    def _next(self) -> None:
        text, start = self.text, self.at
        character = text[start]
        continued = re.compile(r"\\\r?\n").match(text, start)
        if continued is not None:
            self.at = continued.end()
        elif character == "\n":
            self._line_break()
        elif character.isspace():
            self.at += 1
        elif character == "#":
            end = text.find("\n", start)
            self.at = end if end >= 0 else len(text)
        elif text.startswith(("((", "[["), start) and self._begins_command():
            if character == "[":
                self._test()
                return
            self.at = self._balanced(start, "(", ")")
            self._add("counted", text[start + 2 : self.at - 2], start)
        elif character in ";&|()<>" and not PLACEHOLDER.match(text, start):
            self._sign(start)
        else:
            self._word(start)

    def _line_break(self) -> None:
        self.at += 1
        self._add("newline", "\n", self.at - 1)
        for delimiter, quoted, tabs in self.documents:
            self._document(delimiter, quoted=quoted, tabs=tabs)
        self.documents = []

    def _sign(self, start: int) -> None:
        operator = next((each for each in OPERATORS if self.text.startswith(each, start)), self.text[start])
        if operator in "<>" and self.text.startswith("(", start + 1):  # a process in place of a file
            self.at = self._balanced(start + 1, "(", ")")
            self._add("word", mark(self.text[start : self.at]), start)
            return
        self.at += len(operator)
        self._operator(operator, start)

    def _operator(self, operator: str, start: int) -> None:
        last = self.found[-1] if self.found else None
        if operator in REDIRECTIONS and last and last.kind == "word" and last.end == start and last.value.isdigit():
            self.found.pop()  # it is the number of a file descriptor, as in 2>&1
        self._add("operator", operator, start)
        if operator in ("<<", "<<-"):
            while self.at < len(self.text) and self.text[self.at] in " \t":
                self.at += 1
            begin = self.at
            self.at = self._end_of_word(begin)
            raw = self.text[begin : self.at]
            self._add("word", raw, begin)
            delimiter = re.sub(r"[\"'\\]", "", raw)
            self.documents.append((delimiter, delimiter != raw, operator == "<<-"))

    def _document(self, delimiter: str, *, quoted: bool, tabs: bool) -> None:
        start, lines = self.at, []
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = end if end >= 0 else len(self.text)
            line = self.text[self.at : end].rstrip("\r")
            self.at = min(end + 1, len(self.text))
            if (line.lstrip("\t") if tabs else line) == delimiter:
                break
            lines.append(line)
        self._add("document", "\n".join(lines), start, ["quoted"] if quoted else [])

    def _test(self) -> None:
        start, words = self.at, []
        self.at += 2
        while True:
            while self.at < len(self.text) and (self.text[self.at].isspace() or self.text.startswith("\\\n", self.at)):
                self.at += 2 if self.text[self.at] == "\\" else 1
            if self.at >= len(self.text):
                raise self.fail("[[ without ]]")
            if self.text.startswith("]]", self.at):
                self.at += 2
                break
            begin = self.at
            if self.text[begin : begin + 2] in ("&&", "||"):
                self.at += 2
            elif self.text[begin] in "()<>":
                self.at += 1
            else:
                self.at = self._end_of_word(begin, ends=" \t\r\n&")
                self.at = self.at if self.at > begin else begin + 1
            words.append(self.text[begin : self.at])
        self._add("test", self.text[start : self.at], start, words)

    def _word(self, start: int) -> None:
        self.at = self._end_of_word(start)
        raw = self.text[start : self.at]
        if self.text.startswith("(", self.at) and (match := ASSIGNMENT.fullmatch(raw)):
            inner, depth = Tokens.__new__(Tokens), 0
            inner.text, inner.file, inner.breaks = self.text, self.file, self.breaks
            inner.at, inner.found, inner.documents = self.at + 1, [], []
            while inner.at < len(self.text):
                inner._next()
                last = inner.found[-1] if inner.found else None
                if last is not None and last.kind == "operator" and last.value == ")":
                    if depth == 0:
                        break
                    depth -= 1
                elif last is not None and last.kind == "operator" and last.value == "(":
                    depth += 1
            else:
                raise self.fail(f"the array {match[1]} has no end")
            self.at = inner.at
            self._add(
                "array", match[1], start, [match[3], *(each.value for each in inner.found if each.kind == "word")]
            )
            return
        self._add("word", raw, start)

    def _end_of_word(self, at: int, ends: str = " \t\r\n;&|()<>") -> int:
        text = self.text
        while at < len(text):
            character = text[at]
            placeholder = PLACEHOLDER.match(text, at) if character == "<" else None
            if placeholder is not None:
                at = placeholder.end()
            elif character in ends:
                break
            elif character == "\\":
                at += 2
            elif character == "'":
                end = text.find("'", at + 1)
                if end < 0:
                    raise self.fail("a quotation has no end")
                at = end + 1
            elif character == '"':
                at = self._end_of_quotation(at)
            else:
                at = self._end_of_expansion(at)
        return min(at, len(text))

    def _end_of_quotation(self, at: int) -> int:
        at += 1
        while at < len(self.text):
            if self.text[at] == '"':
                return at + 1
            at = at + 2 if self.text[at] == "\\" else self._end_of_expansion(at)
        raise self.fail("a quotation has no end")

    def _end_of_expansion(self, at: int) -> int:
        """Return the position after an expansion that begins here, or after one character."""
        text = self.text
        if text.startswith("$(", at):
            return self._balanced(at + 1, "(", ")")
        if text.startswith("${", at):
            return self._balanced(at + 1, "{", "}")
        if text[at] == "`":
            end = text.find("`", at + 1)
            if end < 0:
                raise self.fail("a command in backquotes has no end")
            return end + 1
        return at + 1

    def _balanced(self, at: int, opening: str, closing: str) -> int:
        depth = 0
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            elif character == "'" and opening == "(":
                at = max(at, self.text.find("'", at + 1))
            elif character == '"':
                at = self._end_of_quotation(at) - 1
            elif character == opening:
                depth += 1
            elif character == closing:
                depth -= 1
                if depth == 0:
                    return at + 1
            at += 1
        raise self.fail(f"{opening} without {closing}")


class Parser:
    """Parses a text of shell into commands."""

    def __init__(self, text: str, file: str) -> None:
        self.tokens = Tokens(text, file)
        self.found, self.at = self.tokens.found, 0
        end = Token("end", "", self.tokens.line(len(text)))
        self.found.append(end)

    def all(self) -> list[Node]:
        """Return all commands."""
        nodes = self.commands(())
        if self.found[self.at].kind != "end":
            raise self.fail(f"'{self.found[self.at].value}' begins nothing")
        return nodes

    def fail(self, reason: str) -> UserError:
        """Return the error for a text that is no script."""
        line = self.found[min(self.at, len(self.found) - 1)].line
        return UserError(f"{self.tokens.file}: line {line}: {one_line(reason, 80)}; {INSTEAD}")

    def _is(self, *values: str) -> bool:
        token = self.found[self.at]
        return token.kind in ("word", "operator") and token.value in values

    def _skip(self) -> None:
        while self.found[self.at].kind in ("newline", "document") or self._is(";", "&"):
            self.at += 1

    def _expect(self, value: str) -> None:
        if not self._is(value):
            raise self.fail(f"'{value}' is missing")
        self.at += 1

    def commands(self, ends: Sequence[str]) -> list[Node]:
        """Return the commands up to one of these words."""
        nodes = []
        self._skip()
        while self.found[self.at].kind != "end" and not self._is(*ends, ")", "}", ";;", ";&", ";;&"):
            nodes.append(self._chain())
            self._skip()
        return nodes

    def _chain(self) -> Node:
        first = self._pipeline()
        chain = Node("chain", first.line, inside=[[first]])
        while self._is("&&", "||"):
            chain.words.append(self.found[self.at].value)
            self.at += 1
            while self.found[self.at].kind in ("newline", "document"):
                self.at += 1
            chain.inside.append([self._pipeline()])
        return chain if chain.words else first

    def _pipeline(self) -> Node:
        line = self.found[self.at].line
        if self._is("!"):
            self.at += 1
            return Node("not", line, inside=[[self._pipeline()]])
        if self._is("time"):
            self.at += 1
        parts = [self._command()]
        while self._is("|", "|&"):
            self.at += 1
            while self.found[self.at].kind in ("newline", "document"):
                self.at += 1
            parts.append(self._command())
        return parts[0] if len(parts) == 1 else Node("pipe", line, inside=[parts])

    def _command(self) -> Node:
        token = self.found[self.at]
        node = Node("simple", token.line)
        if token.kind in ("test", "counted"):
            self.at += 1
            node.kind, node.words = token.kind, list(token.parts) or [token.value]
        elif self._is("if"):
            self._if(node)
        elif self._is("while", "until"):
            node.kind = token.value
            self.at += 1
            node.inside.append(self.commands(("do",)))
            node.inside.append(self._body())
        elif self._is("for", "select"):
            self._for(node)
        elif self._is("case"):
            self._case(node)
        elif self._is("{", "("):
            self.at += 1
            node.kind = "group"
            node.inside.append(self.commands(()))
            self._expect({"{": "}", "(": ")"}[token.value])
        elif self._is("function") or self._defines():
            self._function(node)
        else:
            return self._simple(node)
        self._redirections(node)
        return node

    def _defines(self) -> bool:
        following = self.found[self.at + 1 : self.at + 3]
        return self.found[self.at].kind == "word" and [each.value for each in following] == ["(", ")"]

    def _function(self, node: Node) -> None:
        self.at += self._is("function")
        node.kind, node.words = "function", [self.found[self.at].value]
        self.at += 1
        if self._is("("):
            self.at += 1
            self._expect(")")
        while self.found[self.at].kind == "newline":
            self.at += 1
        node.inside.append([self._command()])

    def _if(self, node: Node) -> None:
        node.kind = "if"
        while self._is("if", "elif"):
            self.at += 1
            condition = self.commands(("then",))
            self._expect("then")
            node.inside += [condition, self.commands(("elif", "else", "fi"))]
        if self._is("else"):
            self.at += 1
            node.inside.append(self.commands(("fi",)))
        self._expect("fi")

    def _body(self) -> list[Node]:
        self._skip()
        self._expect("do")
        body = self.commands(("done",))
        self._expect("done")
        return body

    def _for(self, node: Node) -> None:
        node.kind = "for"
        self.at += 1
        name = self.found[self.at]
        self.at += 1
        node.words = [name.value] if name.kind == "word" else ["_"]
        while self.found[self.at].kind == "newline":
            self.at += 1
        if self._is("in"):
            self.at += 1
            while self.found[self.at].kind == "word":
                node.words.append(self.found[self.at].value)
                self.at += 1
        else:
            node.words.append('"$@"')
        node.inside.append(self._body())

    def _case(self, node: Node) -> None:
        node.kind = "case"
        self.at += 1
        node.words = [self.found[self.at].value]
        self.at += 1
        self._skip()
        self._expect("in")
        self._skip()
        while not self._is("esac"):
            if self.found[self.at].kind == "end":
                raise self.fail("'esac' is missing")
            self.at += self._is("(")
            patterns = []
            while not self._is(")"):
                if self.found[self.at].kind != "word" and not self._is("|"):
                    raise self.fail("a pattern is missing")
                patterns += [self.found[self.at].value] * (not self._is("|"))
                self.at += 1
            self.at += 1
            node.patterns.append(patterns)
            node.inside.append(self.commands(("esac",)))
            if self._is(";;", ";&", ";;&"):
                self.at += 1
            self._skip()
        self.at += 1

    def _simple(self, node: Node) -> Node:
        start = self.at
        while True:
            token = self.found[self.at]
            if token.kind == "array" or (
                token.kind == "word" and not node.words and ASSIGNMENT.match(token.value) is not None
            ):
                node.assignments.append(token)
            elif token.kind == "word":
                node.words.append(token.value)
                if token.value in DECLARING and len(node.words) == 1:
                    self._declared(node)
                    break
            elif token.kind == "operator" and token.value in REDIRECTIONS:
                self._redirections(node)
                continue
            else:
                break
            self.at += 1
        if self.at == start:
            raise self.fail(f"'{self.found[self.at].value}' begins nothing")
        return node

    def _declared(self, node: Node) -> None:
        self.at += 1
        while self.found[self.at].kind in ("word", "array"):
            node.assignments.append(self.found[self.at])
            self.at += 1

    def _redirections(self, node: Node) -> None:
        while self.found[self.at].kind == "operator" and self.found[self.at].value in REDIRECTIONS:
            operator = self.found[self.at].value
            self.at += 1
            target = self.found[self.at]
            if target.kind != "word":
                raise self.fail(f"nothing behind '{operator}'")
            self.at += 1
            if operator in ("<<", "<<-"):
                node.redirections.append((operator, self._document_of_line()))
            else:
                node.redirections.append((operator, target.value))

    def _document_of_line(self) -> str:
        """Return the next unused here-document; it is prefixed by a mark of whether it is expanded."""
        for position in range(self.at, len(self.found)):
            token = self.found[position]
            if token.kind == "document":
                self.found[position] = Token("newline", "\n", token.line)
                return ("'" if token.parts else '"') + token.value
        return "'"


def end_of(raw: str, at: int, file: str) -> int:
    """Return the position after a quotation or expansion in a word."""
    tokens = copy(_EMPTY)
    tokens.text, tokens.file = raw, file
    if raw[at] == '"':
        return tokens._end_of_quotation(at)
    if raw.startswith(("$(", "${"), at) or raw[at] == "`":
        return tokens._end_of_expansion(at)
    match = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])").match(raw, at)
    return match.end() if match is not None else at + 1


_EMPTY = Tokens("", "")
