"""The page: files that ship with their questions, then a section for each table of keys."""

import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from analysis.convergence.study import Study
from analysis.keys.wording import default_in_words, is_table, tables_in, value_in_words
from gssim.cluster import Cluster
from gssim.limits import LIMITS
from gssim.scenario import Scenario, first_comment
from gssim.sweep import Sweep
from gssim.units import EXAMPLES, RANGES
from gssim.workload import Model

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
"""What loading fills in."""
FOLDERS = {"": "Scenarios", "sweeps": "Sweeps", "studies": "Studies"}
INTRODUCTION = """# Scenarios: the files, and every key in them

Data only, in TOML; everything here can be read without Python. *(Made from the code by `python -m analysis keys`; a
test holds that it is up to date.)*

A scenario is a question: a cluster, a workload, a plan and the length of a run. Both `gssim run` and `gsreal run` take
it as it is. Its first line says what it answers. Where it needs a cluster, a model or gradient statistics it names a
file, looked up beside it, or has the table inline. Any key can be overridden by its whole path:

```sh
gssim check scenarios/demo.toml --set plan.method=ddp --set 'plan.shares.batch=[0.75, 0.25]'
```

Quantities are numbers in the unit that ends the key's name, or texts with a unit and a decimal or, of bytes, binary
prefix: {units}. An unknown key is refused, with the allowed ones. What is
*needed* has no default; *absent* means that the key may be left out, and what that comes to stands in its meaning.

- `clusters/`, `devices/`: devices, links and measured costs; every number has a `source`
- `models/`: models as traced by `gsreal trace`, from real modules
- `gradients/`: gradient statistics, written by `gsreal gradients`, never by hand
- `sweeps/`, `studies/`: many points of one question; variants that are trained for real
- `measured/`: results of real runs: [the lab's matrix](measured/lab/README.md), [studies](measured/studies/README.md),
  two cores, GPUs
"""


def page(folder: Path) -> str:
    """Return the page for a folder of scenarios, in Markdown."""
    units = ", ".join(f'`"{example}"`' for example in EXAMPLES.values())
    parts = [INTRODUCTION.format(units=units), *_questions(folder)]
    for root, title in ROOTS.items():
        parts += [f"## {title}\n", *_sections(root)]
    return "\n".join([*parts, *_limits()])


def _limits() -> Iterator[str]:
    """Yield what numbers may be, and how large things may be."""
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


def _questions(folder: Path) -> Iterator[str]:
    for name, title in FOLDERS.items():
        files = sorted((folder / name).glob("*.toml"))
        rows = [[f"[{file.stem}]({file.relative_to(folder)})", _question(file)] for file in files]
        yield from (f"## {title} that ship\n", _table(["file", "question"], rows))


def _question(file: Path) -> str:
    return first_comment(file.read_text(encoding="utf-8"))


def _sections(root: type) -> Iterator[str]:
    """Yield a root's keys, then those of every table in it, each once, in the order in which they come up."""
    yield _keys(root)
    for table, places in tables_of(root).items():
        yield f"### {_title(table, root)}\n"
        yield f"At {', '.join(f'`{place}`' for place in places)}. {_first_paragraph(table)}\n"
        yield _keys(table)


def tables_of(root: type) -> dict[type, list[str]]:
    """Return the tables below a root, with the paths at which they stand; other roots have sections of their own."""
    found: dict[type, list[str]] = {}

    def visit(table: type, place: str) -> None:
        for name, kind in _types(table).items():
            for inner in tables_in(kind):
                path = f"{place}{name}{_step(kind)}"
                if inner in ROOTS or path in found.get(inner, ()):
                    continue
                found.setdefault(inner, []).append(path)
                visit(inner, f"{path}.")

    visit(root, "")
    return found


def _types(table: type) -> dict[str, typing.Any]:
    hints = typing.get_type_hints(table, include_extras=True)
    return {name: hints[name] for name in table.__pydantic_fields__}  # type: ignore[attr-defined]


def _step(kind: typing.Any) -> str:
    """Return what a path goes through where a key's value holds several tables."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"[]{_step(parts[0])}"
    if origin is dict:
        return f".NAME{_step(parts[1])}"
    holding = [part for part in parts if tables_in(part)]
    return _step(holding[0]) if holding and not is_table(holding[0]) else ""


def _title(table: type, root: type) -> str:
    """Return the heading of a table's section; names that two files' tables share say whose they are."""
    shared = [other for other in ROOTS if other is not root and any(_same(table, t) for t in tables_of(other))]
    return f"{table.__name__} ({ROOTS[root].lower()})" if shared else table.__name__


def _same(table: type, other: type) -> bool:
    return table is not other and table.__name__ == other.__name__


def _link(table: type) -> str:
    root = table if table in ROOTS else next(root for root in ROOTS if table in tables_of(root))
    title = ROOTS[table] if table in ROOTS else _title(table, root)
    return f"[{title}](#{_anchor(title)})"


def _anchor(title: str) -> str:
    """Return the name under which a heading is linked to.

    >>> _anchor("Group (sweep files)")
    'group-sweep-files'
    """
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _first_paragraph(table: type) -> str:
    return " ".join((inspect.getdoc(table) or "").split("\n\n")[0].split())


def _keys(table: type) -> str:
    fields, types = table.__pydantic_fields__, _types(table)  # type: ignore[attr-defined]
    rows = [
        [
            f"`{name}`",
            value_in_words(types[name], _link),
            FILLED_IN.get((table, name)) or default_in_words(name, field),
            " ".join((field.description or "").split()),
        ]
        for name, field in fields.items()
    ]
    return _table(["key", "value", "default", "meaning"], rows)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"
