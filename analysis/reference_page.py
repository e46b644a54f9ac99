"""The reference page in Markdown: shipped files with their questions, then the keys of every table.

Each key has its type, unit, limits, default and meaning, taken from the classes' fields and their docstrings.
"""

import ast
import inspect
import os
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from inspect import isclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from analysis.study.study import Study
from gssim.cluster import Cluster
from gssim.cluster.presets import presets
from gssim.errors import UserError
from gssim.execution.files import read_text
from gssim.scenario import Scenario
from gssim.scenario.loading import first_comment
from gssim.scenario.sweep import Sweep
from gssim.units import EXAMPLES, LIMITS, RANGES, UNITS, UNSAID, human_bytes, parse_quantity
from gssim.workload import Model

PLAIN = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "any value"}
COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
MOST = 10**15
"""Limit of counts, left out of the page since it is never reached in practice."""


def is_table(kind: Any) -> bool:
    """Return whether a type is a table of keys."""
    return isclass(kind) and hasattr(kind, "__pydantic_fields__")


def tables_in(kind: Any) -> list[type]:
    """Return the tables nested in a type, in order."""
    if is_table(kind):
        return [kind]
    parts = get_args(kind)[:1] if get_origin(kind) is typing.Annotated else get_args(kind)
    return [table for part in parts for table in tables_in(part)]


def value_in_words(kind: Any, link: Any) -> str:
    """Return the description of a type's values; `link` returns the link to a table's section.

    >>> from gssim.units import PositiveInt, Seconds
    >>> value_in_words(Seconds | None, str), value_in_words(tuple[PositiveInt, ...], str)
    ('seconds, such as `"5 us"`', 'array: whole number > 0')
    """
    origin = get_origin(kind)
    if origin is typing.Annotated:
        return _annotated(*get_args(kind), link=link)
    if origin in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not NoneType]
        return ", or ".join(dict.fromkeys(value_in_words(option, link) for option in options))
    if origin is Literal:
        return ", ".join(f"`{_toml(option)}`" for option in get_args(kind))
    if origin is tuple:
        parts = get_args(kind)
        inner = [value_in_words(part, link) for part in parts if part is not Ellipsis]
        if Ellipsis in parts or len(set(inner)) > 1:
            return f"array: {', '.join(inner)}"
        return f"array of {len(inner)}: {inner[0]}"
    if origin is dict:
        key, value = get_args(kind)
        names = f"each of {value_in_words(key, link)}" if get_origin(key) is Literal else "name"
        return f"table, by {names}: {value_in_words(value, link)}"
    if is_table(kind):
        return f"table {link(kind)}"
    return PLAIN.get(kind) or f"text ({kind.__name__.lower()})"


def _annotated(base: Any, *notes: Any, link: Any) -> str:
    for note in notes:
        described = (
            note.json_schema.get("description", "") if isinstance(note, WithJsonSchema) and note.json_schema else ""
        )
        unit, _, example = described.partition(", e.g. ")
        if unit in UNITS:
            return f'{unit}, such as `"{example.strip(chr(39))}"`'
        if described and base is not float and not is_dataclass(base):
            return f"text: {described}"
    limits = []
    for constraint in (each for note in notes if isinstance(note, FieldInfo) for each in note.metadata):
        for name, sign in COMPARISONS.items():
            limit = getattr(constraint, name, None)
            if limit is not None and limit not in (MOST, *UNSAID):
                limits.append(f"{sign} {limit:g}")
        if (fewest := getattr(constraint, "min_length", None)) is not None:
            limits.append(f"(at least {fewest})")
    return " ".join([value_in_words(base, link), " and ".join(limits)]).strip()


def default_in_words(name: str, field: FieldInfo) -> str:
    """Return the description of a key's default."""
    if field.default_factory is not None:
        default = field.default_factory()  # type: ignore[call-arg]  # none of our factories takes the data
        return f"`{_toml(default)}`"
    if field.default in (PydanticUndefined, MISSING):
        return "**needed**"
    if is_dataclass(field.default):
        return "its keys' own"
    if field.default is None:
        return "absent"
    shown = f"`{_toml(field.default)}`"
    if name.endswith("_bytes") and field.default:
        return f"{shown} ({human_bytes(field.default)})"
    return shown


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return f"{value:g}" if not value.is_integer() or abs(value) >= 1e6 else f"{value:.0f}"
    return str(value)


ROOTS: dict[type, str] = {
    Scenario: "Scenario files",
    Cluster: "Cluster files",
    Model: "Model files",
    Sweep: "Sweep files",
    Study: "Study files",
}
FILLED_IN = {
    (Scenario, "name"): "the file's name",
    (Scenario, "question"): "the first line",
    (Sweep, "question"): "the first line",
}
"""Defaults that loading a file fills in."""
FOLDERS = {"": "Scenarios", "sweeps": "Sweeps", "studies": "Studies"}
INTRODUCTION = """# Scenarios: the files, and every key in them

Data only, in TOML; everything here can be read without Python. *(Made from the code by `python -m analysis keys`; a
test holds that it is up to date.)*

A scenario is a question: a cluster, a workload, a plan and the length of a run. Both `gssim run` and `gsreal run` take
it as it is. Its first line says what it answers. Where it needs a cluster, a model or gradient statistics it names a
file, looked up beside it, or has the table inline. Any key can be overridden by its whole path, where
entries of an array are counted from 0 (`cluster.topology.servers.0.count=4`):

```sh
gssim check scenarios/demo.toml --set plan.method=ddp --set 'plan.shares.batch=[0.75, 0.25]'
```

Quantities are numbers in the unit that ends the key's name, or texts with a unit and a decimal or, of bytes, binary
prefix: {units}. An unknown key is refused, with the allowed ones. What is
*needed* has no default; *absent* means that the key may be left out; its meaning says what applies then.

- `clusters/`, `devices/`: devices, links and measured costs; every number has a `source`
- `models/`: models as traced by `gsreal trace`, from real modules
- `gradients/`: gradient statistics, written by `gsreal gradients`, never by hand
- `sweeps/`, `studies/`: many points of one question; variants that are trained for real
- `measured/`: results of real runs: [the lab's matrix](measured/lab/README.md), [again on another
  machine](measured/lab-2026-11-29/README.md), [further plans there](measured/lab-plans/README.md) and [with several
  axes](measured/lab-axes/README.md),
  [studies](measured/studies/README.md), two cores, GPUs
"""


def page(folder: Path) -> str:
    """Return the page for a folder of scenarios, in Markdown."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder")
    units = ", ".join(f'`"{example}"`' for example in EXAMPLES.values())
    parts = [INTRODUCTION.format(units=units)]
    for name, title in FOLDERS.items():
        files = sorted((folder / name).glob("*.toml"))
        rows = [[f"[{file.stem}]({file.relative_to(folder)})", first_comment(read_text(file))] for file in files]
        parts += [f"## {title} that ship\n", _table(["file", "question"], rows)]
    for root, title in ROOTS.items():
        # the keys of the root table, then those of every table nested in it, each once
        parts += [f"## {title}\n", _keys(root)]
        for table, paths in tables_of(root).items():
            meaning = " ".join((inspect.getdoc(table) or "").split("\n\n")[0].split())
            parts.append(f"### {_title(table, root)}\n")
            parts.append(f"At {_places(table, root, paths)}. {meaning}\n")
            parts.append(_keys(table))
    return "\n".join([*parts, *_presets(), *_limits()])


def _presets() -> Iterator[str]:
    """Yield the section on the devices and links that cluster files may name."""
    yield "## Presets\n"
    yield (
        "Device types and links that a cluster file may name instead of stating them; `gssim cluster --gpu NAME` makes "
        "a whole file of one. Memory is what torch reports of a device. Rates of devices are without sparsity, those "
        "of links of one direction. What training reaches of them, prices, power and the source of every number: "
        "`gssim/cluster/devices.toml`, `links.toml`.\n"
    )
    devices = [
        [
            f"`{name}`",
            human_bytes(parse_quantity(preset["memory_bytes"], "bytes")),
            ", ".join(f"{precision} {rate}" for precision, rate in preset["peak_flop_per_s"].items()),
        ]
        for name, preset in presets("devices").items()
    ]
    yield _table(["device", "memory", "dense rates"], devices)
    links = [
        [f"`{name}`", preset["bandwidth_bytes_per_s"], preset["latency_s"]] for name, preset in presets("links").items()
    ]
    yield _table(["link", "rate", "latency"], links)


def _limits() -> Iterator[str]:
    """Yield the sections on ranges of numbers and limits on sizes."""
    yield "## Ranges and limits\n"
    yield (
        "Numbers are within these ranges (0 is allowed where it makes sense), so that all that follows from them is "
        "finite.\n"
    )
    yield _table(
        ["number", "from", "to"], [[kind, f"{least:g}", f"{most:g}"] for kind, (least, most) in RANGES.items()]
    )
    yield (
        "Sizes have limits that are checked before anything of that size is built. `--no-limits`, which every command "
        "has, lifts them all.\n"
    )
    yield _table(["limit", "most", "of"], [[f"`{name}`", f"{most:,}", of] for name, (most, of) in LIMITS.items()])


@cache
def tables_of(root: type) -> dict[type, list[str]]:
    """Return the tables nested in a root with their key paths; other roots have sections of their own."""
    paths: dict[type, list[str]] = {}

    def visit(table: type, prefix: str) -> None:
        for name, kind in _types(table).items():
            for inner in tables_in(kind):
                path = f"{prefix}{name}{_step(kind)}"
                if inner in ROOTS or path in paths.get(inner, ()):
                    continue
                paths.setdefault(inner, []).append(path)
                visit(inner, f"{path}.")

    visit(root, "")
    return paths


MOST_PATHS = 10
"""Most places of a table that are listed by their whole paths; more are listed by the tables that have it."""


def _places(table: type, root: type, paths: Sequence[str]) -> str:
    """Return where a table stands: its paths, or, of very many, the keys of it in each kind of table."""
    if len(paths) <= MOST_PATHS:
        return ", ".join(f"`{path}`" for path in paths)
    owners: dict[str, list[str]] = {}
    for owner in (root, *tables_of(root)):
        keys = [f"`{name}{_step(kind)}`" for name, kind in _types(owner).items() if table in tables_in(kind)]
        if keys:
            owners.setdefault(", ".join(keys), []).append(_link(owner))
    return "; ".join(f"{keys} of {', '.join(links)}" for keys, links in owners.items())


@cache
def _types(table: type) -> dict[str, typing.Any]:
    hints = typing.get_type_hints(table, include_extras=True)
    return {name: hints[name] for name in table.__pydantic_fields__}  # type: ignore[attr-defined]


def _step(kind: typing.Any) -> str:
    """Return the part of a key path for a value that holds several tables: `[]` or `.NAME`."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"[]{_step(parts[0])}"
    if origin is dict:
        return f".NAME{_step(parts[1])}"
    holding = [part for part in parts if tables_in(part)]
    return _step(holding[0]) if holding and not is_table(holding[0]) else ""


@cache  # of each link to the table, and it looks at the tables of all kinds of file
def _title(table: type, root: type) -> str:
    """Return the heading of a table's section, with the kind of file where another kind has a table of that name."""
    others = [inner for other in ROOTS if other is not root for inner in tables_of(other) if inner is not table]
    shared = table.__name__ in {inner.__name__ for inner in others}
    return f"{table.__name__} ({ROOTS[root].lower()})" if shared else table.__name__


def _link(table: type) -> str:
    root = table if table in ROOTS else next(root for root in ROOTS if table in tables_of(root))
    title = ROOTS[table] if table in ROOTS else _title(table, root)
    anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")  # as GitHub makes it of a heading
    return f"[{title}](#{anchor})"


def _keys(table: type) -> str:
    fields, types = table.__pydantic_fields__, _types(table)  # type: ignore[attr-defined]
    meanings = meanings_of(table)
    rows = [
        [
            f"`{name}`",
            value_in_words(types[name], _link),
            FILLED_IN.get((table, name)) or default_in_words(name, field),
            " ".join(meanings.get(name, "").split()),
        ]
        for name, field in fields.items()
        if not name.startswith("_")  # no file can set it
    ]
    return _table(["key", "value", "default", "meaning"], rows)


@cache
def meanings_of(table: type) -> dict[str, str]:
    """Return the text below each field of a table's class and of its bases, by name.

    Read from the source here and not by pydantic, which would parse every class's source whenever it is imported.
    """
    meanings: dict[str, str] = {}
    for owner in reversed(table.__mro__[:-1]):
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(declared, ast.ClassDef)
        for field, below in pairwise(declared.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    meanings[name] = inspect.cleandoc(text)
    return meanings


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"
