"""HTML elements of the report, its style sheet, and the formatting of numbers.

Text is escaped here and nowhere else. The style sheet supports narrow screens, dark mode, print and the keyboard.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count

from analysis.charts.drawing import DPI, Chart, svg
from gssim.units import human_bytes, human_seconds

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --soft: #454545; --line: #767676; --faint: #e3e3e3; --back: #ffffff;
  --link: #0b57a4; --mark: #8a3300; --head: #f1f1f1; }
@media (prefers-color-scheme: dark) { :root { --text: #ededed; --soft: #c4c4c4; --line: #9a9a9a; --faint: #3a3a3a;
  --back: #161616; --link: #8ab8f0; --mark: #ffb38a; --head: #262626; } }
* { box-sizing: border-box; }
html { font: 100%/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
body { margin: 0 auto; max-width: 78rem; padding: 0 1rem 3rem; overflow-wrap: break-word; }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .6rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.35rem; border-bottom: 1px solid var(--line); } h3 { font-size: 1.1rem; }
p, li, dd { max-width: 48rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -200rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--back); padding: .3rem; }
.lead { font-size: 1.1rem; } .soft, figcaption, caption { color: var(--soft); }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .5rem 0; }
nav a, summary { display: inline-block; padding: .2rem 0; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; padding: .2rem 0; }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--faint); }
thead th { border-bottom: 2px solid var(--line); background: var(--head); vertical-align: bottom; }
tbody th { font-weight: 600; } th:first-child, td:first-child { padding-left: .3rem; }
th[scope="row"] { min-width: 8rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
.bad { color: var(--mark); font-weight: 700; }
figure { margin: 1rem 0 2rem; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--faint); }
figcaption { font-size: .92rem; max-width: 48rem; }
summary { cursor: pointer; color: var(--link); }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .2rem 1.2rem; }
dt { font-weight: 600; } dd { margin: 0; min-width: 0; }
@media (max-width: 30rem) { dl { display: block; } dd { margin-bottom: .6rem; } h1 { font-size: 1.35rem; } }
@media print { :root { --text: #000; --soft: #333; --back: #fff; --head: #eee; --faint: #ccc; }
  nav, .skip { display: none; } .scroll { overflow: visible; } figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } figure img { min-width: 0 !important; } table { font-size: .72rem; } }
"""


def percent(ratio: float | None, *, signed: bool = True) -> str:
    """Return a ratio in percent; empty for None.

    >>> percent(0.042), percent(0.042, signed=False), percent(None)
    ('+4.2 %', '4.2 %', '')
    """
    if ratio is None:
        return ""
    return (f"{100 * ratio:+.1f} %" if signed else f"{100 * ratio:.1f} %").replace("-", "\u2212")


def seconds(time_s: float | None) -> str:
    """Return a time with its unit; empty for None."""
    return "" if time_s is None else human_seconds(time_s)


def size(size_bytes: float | None) -> str:
    """Return a size with its unit; empty for None."""
    return "" if size_bytes is None else human_bytes(size_bytes)


def counted(n: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> counted(1, "point"), counted(1200, "point")
    ('1 point', '1,200 points')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def density(ratio: float | None) -> str:
    """Return a density in percent; `all` without a threshold (None).

    >>> density(None), density(0.0123)
    ('all', '1.2 %')
    """
    return "all" if ratio is None else f"{100 * ratio:.2g} %" if ratio < 0.995 else "100 %"


PIXELS_PER_IN = 96
"""CSS pixels per inch."""
LEAST_WIDTH = "44rem"
"""Least width of a picture, below which it scrolls within its frame instead of shrinking."""
ALT_LENGTH = 180
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content-Security-Policy that makes the browser refuse to load anything else."""


@dataclass(frozen=True)
class Part:
    """A section of the page with a heading, and its subsections."""

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
    """Return a description list of (term, description) pairs."""
    items = "".join(f"<dt>{text(term)}</dt><dd>{text(what)}</dd>\n" for term, what in pairs)
    return f"<dl>\n{items}</dl>\n" if items else ""


def folded(summary: str, body: str) -> str:
    """Return a folded element that is opened by a click or the Enter key."""
    return f"<details><summary>{text(summary)}</summary>\n{body}</details>\n"


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    head: str
    number: bool = True
    """Whether its cells are numbers, which are aligned right."""


Cell = str | tuple[str, bool]
"""Text of a cell, or the text and whether it is marked as bad."""


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
    """Return a chart as an embedded SVG picture with its description."""
    wide_in, high_in = chart.figure.get_size_inches()
    size = (round(float(wide_in) * PIXELS_PER_IN), round(float(high_in) * PIXELS_PER_IN))
    return picture(svg(chart.figure), "svg+xml", chart.words, title=chart.title, size=size)


def picture(content: bytes, kind: str, words: str, *, title: str, size: tuple[int, int]) -> str:
    """Return a picture with a short alternative text, and its full description folded below."""
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
    """Return the size in CSS pixels of a PNG that was drawn at `DPI`."""
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
