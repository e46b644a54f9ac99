"""Reading of other programs' files: bounded JSON, YAML, TOML and XML, and accounting for every key of a file.

[Note: hostile files] Files may come from strangers. At most `MOST_BYTES` are read. Brackets nested deeper than
`MOST_NESTED`, and more than `MOST_VALUES` values (which a YAML file of nine lines can create by aliases), are refused,
as are document types and entities in XML. Nothing in a file is executed, and no class that a file names is created.

[Note: every key counts] Each key of a file is read into the scenario, listed as having no effect on it, or refused:
because the plan cannot express it, or because its meaning is not known. `Keys` keeps track; `Keys.close` refuses the
rest. Refused keys are collected, so that all of them are reported at once.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tomli

from gssim.errors import UserError, one_line
from gssim.execution.files import refuse_repeated_keys

MOST_BYTES = 4 * 2**20
"""Size of the largest file that is read: topologies of thousands of hosts stay below it."""
MOST_YAML_BYTES = 2**20
"""Size of the largest YAML file that is read; its parser is slow."""
MOST_NESTED = 64
MOST_VALUES = 100_000
SHOWN_VALUE = 60
"""Number of characters of a value that messages show."""


def read_bounded(path: Path) -> str:
    """Return the text of a file; raise UserError where it is missing, too large or no UTF-8 text."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return decoded(content, file=str(path))


def decoded(content: bytes, *, file: str) -> str:
    """Return the text of a file's or a stream's first bytes; raise UserError if they are too many or no UTF-8."""
    if len(content) > MOST_BYTES:
        raise UserError(f"{file}: is larger than {MOST_BYTES} bytes, the most that is read of such a file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is no UTF-8 text: {error.reason} at byte {error.start}") from None


def standard_input() -> str:
    """Return the text on stdin; raise UserError where stdin is closed, too long or no UTF-8 text."""
    if sys.stdin is None:  # as Python sets it if the file descriptor is closed
        raise UserError("-: stdin is closed; pipe a file into it, or give the file's name")
    return decoded(sys.stdin.buffer.read(MOST_BYTES + 1), file="stdin")


def parsed_json(text: str, *, file: str) -> Any:
    """Return the content of a JSON file; raise UserError where it is invalid, or names a key twice."""
    try:
        return json.loads(text, object_pairs_hook=refuse_repeated_keys(file))
    except UserError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON: {_reason(error)}") from None


def parsed_toml(text: str, *, file: str) -> Any:
    """Return the content of a TOML file; raise UserError where it is invalid."""
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid TOML: {_reason(error)}") from None


def parsed_yaml(text: str, *, file: str) -> Any:
    """Return the content of a YAML file of plain data; raise UserError where it is invalid, expands too far, or names a
    key twice in one table: PyYAML would take the last one without a word.
    """
    import yaml  # here, as the commands that read no YAML need not wait for it

    seen: dict[int, Any] = {}
    """Mappings by identity: those that `<<` was merged into have keys twice, of which their own ones count."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc] # yaml has no annotations here
        """PyYAML's safe loader, with a limit on the expansion of merge keys."""

        merged = 0

        def flatten_mapping(self, node: Any) -> None:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and id(node) not in seen]
            names = [key.value for key in keys if key.tag != "tag:yaml.org,2002:merge"]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise UserError(f"{file}: {one_line(twice, SHOWN_VALUE)}: is given twice in one table")
            seen[id(node)] = node
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > MOST_VALUES:
                raise UserError(f"{file}: merge keys expand to more than {MOST_VALUES} values")

    if len(text) > MOST_YAML_BYTES:
        raise UserError(f"{file}: is larger than {MOST_YAML_BYTES} bytes, the most that is read of a YAML file")
    try:
        return yaml.load(text, Loader)  # a subclass of the safe loader
    except UserError:  # a ValueError too
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{file}: not valid YAML: {getattr(error, 'problem', None) or 'unreadable'}{place}") from None
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError) as error:
        # a date of month 13, brackets nested too deep, a list as the key of a mapping
        raise UserError(f"{file}: not valid YAML: {_reason(error)}") from None


def parsed_xml(text: str, *, file: str) -> ElementTree.Element:
    """Return the root of an XML file; raise UserError where it is invalid or has a document type (entities)."""
    if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
        raise UserError(f"{file}: has a document type or entities, which are not read")
    try:
        root = ElementTree.fromstring(text)  # entities are refused above, and the size is bounded
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{file}: not valid XML: {_reason(error)}") from None
    level, depth, seen = [root], 0, 0
    while level:
        depth, seen = depth + 1, seen + len(level)
        if depth > MOST_NESTED or seen > MOST_VALUES:
            raise UserError(f"{file}: has more than {MOST_NESTED} levels or {MOST_VALUES} elements")
        level = [child for element in level for child in element]
    return root


def _reason(error: BaseException) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else one_line(str(error), 120)


def flattened(data: Any, *, file: str) -> dict[str, Any]:
    """Return nested tables as a single one with dotted keys; lists stay values, empty tables are left out.

    >>> flattened({"betas": [0.9, 0.95], "zero_optimization": {"stage": 3}}, file="example")
    {'betas': [0.9, 0.95], 'zero_optimization.stage': 3}
    """
    if not isinstance(data, Mapping):
        held = "nothing" if data is None else f"a {type(data).__name__}"
        raise UserError(f"{file}: must hold a table of keys and values, it holds {held}")
    flat: dict[str, Any] = {}
    _measure(data, file)
    waiting: list[tuple[str, Any]] = [("", data)]
    while waiting:
        prefix, table = waiting.pop()
        for key, value in table.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                waiting.append((f"{path}.", value))
            else:
                flat[path] = value
    return flat


def _measure(data: Any, file: str) -> None:
    """Raise UserError for data with too many values or levels; a YAML alias counts each time it is used."""
    level, seen = [data], 0
    for _ in range(MOST_NESTED):
        below: list[Any] = []
        for value in level:
            parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
            below += parts
            if (seen := seen + len(parts)) > MOST_VALUES:
                raise UserError(f"{file}: has more than {MOST_VALUES} values")
        if not below:
            return
        level = below
    raise UserError(f"{file}: is nested deeper than {MOST_NESTED} levels")


def shown(value: Any) -> str:
    """Return a file's value for messages and comments, shortened to one line.

    >>> shown("auto"), shown(None), shown([1, 2])
    ('"auto"', 'null', '[1, 2]')
    """
    try:
        text = str(value) if isinstance(value, Undecided) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a date, a set, a list that holds itself
        text = str(value)
    return one_line(text, SHOWN_VALUE)


@dataclass(frozen=True)
class Value:
    """A value for the scenario, and the key from which it was read."""

    value: Any
    origin: str
    """The key and its value in the file, for a comment."""

    @property
    def key(self) -> str:
        """The key from which the value was read."""
        return self.origin.partition(" = ")[0]


@dataclass(frozen=True)
class Undecided:
    """A value that a file leaves open: it depends on a variable, or on a test, that the file does not determine."""

    text: str
    """The value as it is written in the file."""
    reason: str
    alternatives: tuple[Any, ...] = ()
    """Possible values, if they are known; None among them: the key is not given. Empty: any value."""

    def __str__(self) -> str:
        return self.text


@dataclass
class Keys:
    """The keys of one file, and how each was treated; see [Note: every key counts]."""

    file: str
    values: dict[str, Any]
    overridden: frozenset[str] = frozenset()
    """Scenario keys that `--set` gives; the file's keys that they replace need not be understood."""
    ignored: Sequence[str] = ()
    """Patterns of keys (`*` and `?` match) that the user wants to ignore."""
    read: set[str] = field(default_factory=set)
    listed: list[tuple[str, str]] = field(default_factory=list)
    """Keys without an effect on the scenario, each with the reason."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Keys that cannot be read, each with the reason."""

    def has(self, key: str) -> bool:
        """Return whether the file holds the key, with a value other than null."""
        return self.values.get(key) is not None

    def is_off(self, key: str) -> bool:
        """Return whether the file does not hold the key, or turns its feature off; the key does not count as read."""
        return Rule("").harmless(self.values.get(key))

    def raw(self, key: str, *, sets: str = "") -> Any:
        """Return the value of a key and count it as read; None if there is none, or if the file leaves it open."""
        if key in self.values:
            self.read.add(key)
        value = self.values.get(key)
        if isinstance(value, Undecided):
            if key not in self._refused_names():
                self.refuse(key, value.reason, replaced_by=[sets] if sets else [])
            return None
        return value

    def line(self, key: str) -> str:
        """Return a key and its value as messages show them."""
        name = one_line(key, 80)
        value = shown(self.values[key]) if key in self.values else name
        return name if value == name else f"{name} = {value}"  # a variable that may hold options has no value

    def note(self, key: str, reason: str) -> None:
        """List a key as having no effect."""
        self.read.add(key)
        self.listed.append((self.line(key), reason))

    def refuse(self, key: str, reason: str, *, replaced_by: Iterable[str] = ()) -> None:
        """Refuse a key, unless the user ignores it or overrides what it would set."""
        self.read.add(key)
        given = [name for name in replaced_by if name in self.overridden]
        if given:
            self.listed.append((self.line(key), f"replaced by --set {given[0]}"))
        elif any(fnmatchcase(key, pattern) for pattern in self.ignored):
            self.listed.append((self.line(key), f"ignored on request, although: {reason}"))
        else:
            hint = "".join(f"; or --set {name}=..." for name in list(replaced_by)[:1])
            self.refused.append((self.line(key), reason + hint))

    def add(self, other: "Keys", *, file: str) -> None:
        """Take over what was listed and refused of the keys of another file, which this file names."""
        self.listed += [(f"{file}: {line}", reason) for line, reason in other.listed]
        self.refused += [(f"{file}: {line}", reason) for line, reason in other.refused]

    def refuse_value(self, value: Value, reason: str, *replaced_by: str) -> None:
        """Refuse the key from which a value was read; a value from an option is named by that option."""
        key = value.origin if value.origin.startswith("--set ") else value.key
        self.refuse(key, reason, replaced_by=replaced_by)

    def number(self, *names: str, sets: str = "", least: float = 0.0) -> Value | None:
        """Return the value of the first of these keys that the file has, as a number; None if it has none.

        `sets`: the scenario key that the value is for. Texts of numbers count as numbers: YAML reads `1e-4` as a text.
        """
        return self._first_number(names, sets, f"a number from {least:g} to 1e18", lambda number: number >= least)

    def _first_number(
        self, names: Sequence[str], sets: str, allowed: str, is_allowed: Callable[[float], bool]
    ) -> Value | None:
        for name in names:
            value = self.raw(name, sets=sets)
            if value is None or name in self._refused_names():
                continue
            number = _number(value)
            if value == "auto":
                self.refuse(name, "what it becomes is not in the file", replaced_by=[sets] if sets else [])
            elif isinstance(value, str) and "$" in value:
                self.refuse(name, "the file does not say what this variable is", replaced_by=[sets] if sets else [])
            elif number is None or not is_allowed(number):
                self.refuse(name, f"must be {allowed}", replaced_by=[sets] if sets else [])
            else:
                return Value(number, self.line(name))
        return None

    def integer(self, *names: str, sets: str = "", least: int = 1) -> Value | None:
        """Return `number` as a whole number of at least `least`."""
        allowed = f"a whole number of at least {least}, and at most 1e15"
        first = self._first_number(
            names, sets, allowed, lambda number: number == int(number) and least <= number <= 10**15
        )
        return None if first is None else Value(int(first.value), first.origin)

    def seed(self, *names: str) -> Value | None:
        """Return the seed; one that a script leaves open, such as $RANDOM, is listed: it changes no prediction."""
        for name in names:
            if isinstance(self.values.get(name), Undecided):
                self.note(name, f"left open; it {NUMERICS}")
                return None
        return self.integer(*names, least=0)

    def flag(self, *names: str) -> Value | None:
        """Return the value of the first of these keys that the file holds, as true or false."""
        for name in names:
            value = self.raw(name)
            if value is None:
                continue
            word = str(value).lower()
            if word in ("true", "1", "yes", "on"):
                return Value(True, self.line(name))
            if word in ("false", "0", "no", "off", "none"):
                return Value(False, self.line(name))
            self.refuse(name, "what it becomes is not in the file" if word == "auto" else "must be true or false")
        return None

    def enabled(self, *names: str) -> Value | None:
        """Return the flag of `flag` where it is true; None where it is false or not given."""
        flag = self.flag(*names)
        return flag if flag is not None and flag.value else None

    def choice(self, choices: Mapping[str, Any], *names: str, sets: str = "", why: str = "") -> Value | None:
        """Return the meaning, by `choices`, of the value of the first of these keys, compared in lower case.

        Other values are refused with the reason `why`.
        """
        for name in names:
            value = self.raw(name, sets=sets)
            if value is None:
                continue
            word = "false" if value is False else "true" if value is True else str(value).lower()
            if word in choices:
                return Value(choices[word], self.line(name))
            allowed = ", ".join(dict.fromkeys(choices))
            reason = "what it becomes is not in the file" if word == "auto" else why or "no such choice here"
            self.refuse(name, f"{reason}; allowed: {allowed}", replaced_by=[sets] if sets else [])
        return None

    def _refused_names(self) -> set[str]:
        return {line.partition(" = ")[0] for line, _ in self.refused}

    def close(self, table: Mapping[str, "Rule"]) -> None:
        """Treat the keys that were not read: by the first pattern of `table` that matches, else refuse them."""
        for key in self.values:
            if key in self.read:
                continue
            # a script's variable that may hold arguments, whatever its name, is not in the table
            known = {} if key.startswith("$") else table
            rule = next((rule for pattern, rule in known.items() if fnmatchcase(key, pattern)), None)
            value = self.values[key]
            if value is None:
                self.note(key, "not set")
            elif rule is None:
                reason = value.reason if isinstance(value, Undecided) else "unknown key, which may change the answer"
                self.refuse(key, f"{reason}; --ignore it if it does not")
            elif rule.harmless(value):
                self.note(key, rule.reason if rule.no_effect else "off")
            else:
                reason = rule.reason
                if isinstance(value, Undecided):
                    reason += f", and it {value.reason}" if value.alternatives else f"; {value.reason}"
                self.refuse(key, reason, replaced_by=rule.replaced_by)


# Reasons that the tables of several programs give.
LOGGING = "logging, data, checkpoints and evaluation are no part of a step"
NUMERICS = "changes numbers, not step time or memory"
LAUNCHER = "how processes are started, not what they do"
MODEL = "the model is --model"


def named_file(keys: Keys, name: str) -> Path | None:
    """Return the file that a key names: beside the file that holds the key, in the working directory, or in a folder
    above that file, as names are often relative to the project's folder. None if there is none.
    """
    beside, *above = Path(keys.file).absolute().parents
    try:
        return next((path for folder in (beside, Path(), *above) if (path := folder / name).is_file()), None)
    except OSError:  # no name of a file: too long
        return None


OFF = (None, False, 0, "", "none", "None", "null", "no", "false", "off", "disabled", "disable")
"""Values that turn a feature off."""


@dataclass(frozen=True)
class Rule:
    """How a key is treated that is not read into the scenario."""

    reason: str
    no_effect: bool = False
    """Whether the key affects neither step time nor memory, whatever its value."""
    neutral: tuple[Any, ...] = ()
    """Values, besides those of `OFF`, with which the key has no effect."""
    replaced_by: tuple[str, ...] = ()
    """Scenario keys that can replace it."""

    def harmless(self, value: Any) -> bool:
        """Return whether a key with this value has no effect; texts of numbers, as in scripts, count as numbers.

        >>> Rule("LoRA").harmless(None), Rule("LoRA").harmless("lora"), Rule("cp", neutral=(1,)).harmless("1")
        (True, False, True)
        >>> Rule("kernels").harmless("False"), Rule("kernels").harmless("True")
        (True, False)
        """
        if self.no_effect or value in ([], {}):
            return True
        if isinstance(value, Undecided):
            return bool(value.alternatives) and all(self.harmless(each) for each in value.alternatives)
        number = _number(value)
        if isinstance(value, str) and value.lower() in OFF:  # as Python writes it: False
            return True
        return isinstance(value, (str, int, float, type(None))) and any(
            (value == each and isinstance(value, bool) == isinstance(each, bool))
            or (number is not None and number == each and not isinstance(each, bool))
            for each in (*OFF, *self.neutral)
        )


def listed(reason: str, patterns: str) -> dict[str, Rule]:
    """Return rules for keys without an effect; `patterns` are separated by spaces."""
    return {pattern: Rule(reason, no_effect=True) for pattern in patterns.split()}


def refused(
    reason: str, patterns: str, *, neutral: tuple[Any, ...] = (), or_set: tuple[str, ...] = ()
) -> dict[str, Rule]:
    """Return rules for keys that are refused unless they are off, or have one of the `neutral` values."""
    return {pattern: Rule(reason, neutral=neutral, replaced_by=or_set) for pattern in patterns.split()}


def _number(value: Any) -> float | int | None:
    """Return a number, or the number that a text is; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, int):
        return value if abs(value) < 10**18 else None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < 1e18 else None  # also where it is no number
