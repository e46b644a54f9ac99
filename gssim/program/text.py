"""The text form of a rank's program: a line for each task, which reads back into the same task.

    backward layer=h.0 | phase=backward stream=compute duration_s=0.0012 kept=activations:-4096.0
    all-gather/issue layer=h.1 micro_batch=0 | phase=forward stream=compute duration_s=0.0 after=[forward layer=h.0]

Before the bar is the task's identity: its operation, then `/` and the action if it serves another task, then its other
fields. Behind the bar is how the task runs, and, by category, its memory at the peak and the memory it leaves
allocated; for a collective also its identity, kind, ranks and size. Text with spaces is in double quotes. Reading skips
lines that begin with `#`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from gssim.cluster import Curve
from gssim.errors import UserError
from gssim.memory import Footprint
from gssim.program.task import Action, Issue, Operation, Program, Task, TaskId

PLAIN = re.compile(r"[\w.{}*/-]+")
"""Text that needs no quotes."""
NUMBERS = ("bucket", "part", "place", "samples", "micro_batch", "stage", "step")


def program_text(program: Program, rank: int) -> str:
    """Return the tasks of a rank as text, one a line."""
    return "".join(f"{_line(task)}\n" for task in program.tasks[program.role_of[rank]])


def read_tasks(text: str, *, file: str = "program") -> tuple[Task, ...]:
    """Return the tasks in a text; raise UserError if it is not a program's text.

    They equal the tasks that were written. The text does not hold the order of allocations within a task, nor the
    collectives themselves (`Task.exchange`).
    """
    tasks = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            try:
                tasks.append(_task(line))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{file}:{number}: not a task as `gssim program` writes it: {error}") from None
    return tuple(tasks)


def program_table(program: Program, rank: int) -> list[dict[str, Any]]:
    """Return the tasks of a rank as plain data, with their labels; an identity is a table of its non-default fields."""
    rows = []
    for task in program.tasks[program.role_of[rank]]:
        row: dict[str, Any] = {"label": task.label, "id": _fields_of(task.id), "phase": task.phase}
        row |= {
            "stream": task.stream,
            "duration_s": task.duration_s,
            "after": [_fields_of(each) for each in task.after],
        }
        row |= {"peak_bytes": dict(task.need.peak), "kept_bytes": dict(task.need.kept)}
        if task.issue is not None:
            row["issue"] = {"host_s": task.issue.host_s, "goes_on": task.issue.goes_on}
        if task.communication is not None:
            row["collective"] = {"id": _fields_of(task.communication)}
            if task.exchange is not None:
                exchange = task.exchange
                row["collective"] |= {
                    "kind": exchange.kind,
                    "ranks": list(exchange.group),
                    "bytes": exchange.size_bytes,
                }
        rows.append(row)
    return rows


def _fields_of(identity: TaskId) -> dict[str, Any]:
    """Return the fields of an identity that differ from their defaults."""
    fields = {
        name: value for name, value in identity._asdict().items() if value not in ("", None, ()) and value is not False
    }
    if identity.group is not None:
        fields["group"] = list(identity.group)
    if identity.messages:
        fields["messages"] = [_fields_of(message) for message in identity.messages]
    return fields


# Writing --------------------------------------------------------------------------------------------------------------


def _line(task: Task) -> str:
    words = [f"phase={task.phase}", f"stream={_quoted(task.stream)}", f"duration_s={task.duration_s!r}"]
    if task.communication is not None:
        words.append(f"collective={_identities_text([task.communication])}")
    if task.after:
        words.append(f"after={_identities_text(task.after)}")
    for name, sizes in (("peak", task.need.peak), ("kept", task.need.kept)):
        if sizes:
            words.append(f"{name}={_pairs(sizes)}")
    if task.after_pauses is not None:
        words.append(f"after_pauses={_pairs(zip(task.after_pauses.sizes, task.after_pauses.values, strict=True))}")
    if task.issue is not None:
        words += [f"host_s={task.issue.host_s!r}", f"goes_on={int(task.issue.goes_on)}"]
    if task.exchange is not None:
        exchange = task.exchange
        words += [f"kind={exchange.kind}", f"ranks={_ranks(exchange.group)}", f"bytes={float(exchange.size_bytes)!r}"]
    return f"{_identity(task.id)} | {' '.join(words)}"


def _identity(identity: TaskId) -> str:
    words = [identity.op + (f"/{identity.action}" if identity.action else "")]
    if identity.layer:
        words.append(f"layer={_quoted(identity.layer)}")
    if identity.during:
        words.append(f"during={identity.during}")
    words += [f"{name}={value}" for name in NUMBERS if (value := getattr(identity, name)) is not None]
    if identity.group is not None:
        words.append(f"group={_ranks(identity.group)}")
    if identity.messages:
        words.append(f"messages={_identities_text(identity.messages)}")
    return " ".join(words)


def _quoted(text: str) -> str:
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def _identities_text(identities: Iterable[TaskId]) -> str:
    return f"[{'; '.join(map(_identity, identities))}]"


def _pairs(pairs: Iterable[tuple[object, object]]) -> str:
    return ",".join(f"{first}:{second!r}" for first, second in pairs)


def _ranks(group: Sequence[int]) -> str:
    """Return ranks as text: a range as first-last (with /step, if not 1), others separated by commas."""
    if isinstance(group, range):
        return f"{group[0]}-{group[-1]}" + (f"/{group.step}" if group.step > 1 else "")
    return ",".join(map(str, group))


# Reading --------------------------------------------------------------------------------------------------------------


def _task(line: str) -> Task:
    identity, *rest = _split_outside_quotes(line, "|")
    if not rest:
        raise ValueError("there is no bar behind its identity")
    given = dict(_settings(_split_outside_quotes("|".join(rest), " ")))
    points = [(float(size), float(value)) for size, value in _read_pairs(given.get("after_pauses", ""))]
    curve = Curve(sizes=tuple(s for s, _ in points), values=tuple(v for _, v in points)) if points else None
    issue = Issue(float(given["host_s"]), given["goes_on"] == "1") if "host_s" in given else None
    need = Footprint(peak=_sizes(given.get("peak", "")), kept=_sizes(given.get("kept", "")))
    return Task(
        _read_identity(identity),
        given["phase"],
        _unquoted(given["stream"]),
        float(given["duration_s"]),
        _read_list(given["collective"])[0] if "collective" in given else None,
        _read_list(given.get("after", "[]")),
        need,
        curve,
        issue,
    )


def _read_identity(text: str) -> TaskId:
    first, *words = _split_outside_quotes(text, " ")
    op, _, action = first.partition("/")
    if op not in get_args(Operation) or action not in get_args(Action):
        raise ValueError(f"unknown operation {first!r}")
    readers: Mapping[str, Callable[[str], object]] = {
        "layer": _unquoted,
        "during": str,
        "group": _read_ranks,
        "messages": _read_list,
        **dict.fromkeys(NUMBERS, int),
    }
    fields: dict[str, Any] = {name: readers[name](value) for name, value in _settings(words)}
    return TaskId(op, action, **fields)  # type: ignore[arg-type]  # checked above


def _settings(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} has no value")
        yield name, value


def _read_list(text: str) -> tuple[TaskId, ...]:
    return tuple(map(_read_identity, _split_outside_quotes(text[1:-1], ";")))


def _read_pairs(text: str) -> Iterator[tuple[str, str]]:
    for pair in filter(None, text.split(",")):
        first, _, second = pair.partition(":")
        yield first, second


def _sizes(text: str) -> tuple[tuple[str, float], ...]:
    return tuple((category, float(size)) for category, size in _read_pairs(text))


def _read_ranks(text: str) -> Sequence[int]:
    bounds, _, step = text.partition("/")
    first, is_range, last = bounds.partition("-")
    if is_range:
        return range(int(first), int(last) + 1, int(step or 1))
    return tuple(map(int, text.split(",")))


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _split_outside_quotes(text: str, separator: str) -> list[str]:
    """Split a text at separators outside quotes and brackets; return the non-empty parts.

    >>> _split_outside_quotes('a=[b c; d] e="f g"', " ")
    ['a=[b c; d]', 'e="f g"']
    """
    parts, depth, quoted, begin = [], 0, False, 0
    for found in re.finditer(rf'["\[\]{re.escape(separator)}]', text):
        place, character = found.start(), found[0]
        if character == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {"[": 1, "]": -1}.get(character, 0)
            if character == separator and not depth:
                parts.append(text[begin:place])
                begin = place + 1
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip()]
