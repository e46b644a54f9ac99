"""Elements of the page as strings of HTML; what is given as text is escaped here and nowhere else."""

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count

from analysis.charts.drawing import DPI, Chart, svg
from analysis.page.style import STYLE

PIXELS_PER_IN = 96
"""Of CSS."""
LEAST_WIDTH = "44rem"
"""A narrower picture could not be read: it scrolls within its frame."""
ALT_LENGTH = 180
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The browser itself refuses to load anything else."""


@dataclass(frozen=True)
class Part:
    """A part of the page under a heading, with parts of its own below."""

    title: str
    body: str = ""
    """HTML."""
    parts: tuple["Part", ...] = field(default=())


def text(words: object) -> str:
    """Return words as HTML."""
    return escape(str(words), quote=True)


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph."""
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{text(words)}</p>\n"


def bullets(lines: Iterable[str]) -> str:
    """Return an unordered list."""
    items = "".join(f"<li>{text(line)}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>\n" if items else ""


def terms(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms with what each is."""
    items = "".join(f"<dt>{text(term)}</dt><dd>{text(what)}</dd>\n" for term, what in pairs)
    return f"<dl>\n{items}</dl>\n" if items else ""


def folded(summary: str, body: str) -> str:
    """Return what is opened by a click or the Enter key."""
    return f"<details><summary>{text(summary)}</summary>\n{body}</details>\n"


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    head: str
    number: bool = True
    """Whether its cells are numbers, which stand right."""


Cell = str | tuple[str, bool]
"""What a cell says, and whether it is bad news."""


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table that scrolls within its frame in a narrow window; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col"{_kind(column)}>{text(column.head)}</th>' for column in columns)
    body = "\n".join(f"<tr>{''.join(_cell(i, cell, columns[i]) for i, cell in enumerate(row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{text(f"Table: {caption}")}" tabindex="0">\n<table>\n'
        f"<caption>{text(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
    )


def _cell(i: int, cell: Cell, column: Column) -> str:
    words, bad = cell if isinstance(cell, tuple) else (cell, False)
    inside = f'<span class="bad">{text(words)}</span>' if bad else text(words)
    return f'<th scope="row">{inside}</th>' if i == 0 else f"<td{_kind(column)}>{inside}</td>"


def _kind(column: Column) -> str:
    return ' class="number"' if column.number else ""


def figure(chart: Chart) -> str:
    """Return a chart as a picture in the page, which stays sharp when it is enlarged, with its words."""
    wide_in, high_in = chart.figure.get_size_inches()
    size = (round(float(wide_in) * PIXELS_PER_IN), round(float(high_in) * PIXELS_PER_IN))
    return picture(svg(chart.figure), "svg+xml", chart.words, title=chart.title, size=size)


def picture(content: bytes, kind: str, words: str, *, title: str, size: tuple[int, int]) -> str:
    """Return a picture with a short description, and all that it shows in words below."""
    wide, high = size
    first = re.split(r"(?<=\.)\s", words, maxsplit=1)[0]
    alt = first if len(first) <= ALT_LENGTH else f"{first[: ALT_LENGTH - 1]}\u2026"
    data = base64.b64encode(content).decode("ascii")
    return (
        f'<figure>\n<div class="scroll" role="region" aria-label="{text(f"Chart: {title}")}" tabindex="0">'
        f'<img src="data:image/{kind};base64,{data}" width="{wide}" height="{high}" alt="{text(alt)}" '
        f'style="min-width:min({wide}px,{LEAST_WIDTH})"></div>\n'
        f"<figcaption>{folded('What this chart shows, in words', paragraph(words))}</figcaption>\n</figure>\n"
    )


def png_size(content: bytes) -> tuple[int, int]:
    """Return the size of a PNG in CSS pixels, as it was drawn at `DPI`."""
    wide, high = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    return round(wide * PIXELS_PER_IN / DPI), round(high * PIXELS_PER_IN / DPI)


def document(title: str, lead: str, parts: Sequence[Part]) -> str:
    """Return the whole page: heading, contents, parts."""
    numbers = count(1)
    names = {part.title: f"part-{next(numbers)}" for part in parts}
    contents = "".join(f'<li><a href="#{names[part.title]}">{text(part.title)}</a></li>\n' for part in parts)
    body = "".join(_part(part, names[part.title]) for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the report</a>\n'
        f"<header>\n<h1>{text(title)}</h1>\n{lead}</header>\n"
        f'<nav aria-label="Contents">\n<ul>\n{contents}</ul>\n</nav>\n'
        f'<main id="main" tabindex="-1">\n{body}</main>\n</body>\n</html>\n'
    )


def _part(part: Part, name: str) -> str:
    below = "".join(f"<h3>{text(each.title)}</h3>\n{each.body}" for each in part.parts)
    return (
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{text(part.title)}</h2>\n{part.body}{below}</section>\n'
    )
