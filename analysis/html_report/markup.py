"""HTML elements of the report, and the formatting of numbers.

The templates and the style sheet are in `templates`; text is escaped there and nowhere else. The style sheet supports
narrow screens, dark mode, print and the keyboard.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.charts.drawing import DPI, Chart, svg
from analysis.charts.drawing import percent as signed_percent
from gssim.units import human_bytes, human_seconds


def percent(ratio: float | None, *, signed: bool = True) -> str:
    """Return a ratio in percent; empty for None. What rounds to zero has no sign.

    >>> percent(0.042), percent(0.042, signed=False), percent(-1e-6), percent(None)
    ('+4.2 %', '4.2 %', '0.0 %', '')
    """
    if ratio is None:
        return ""
    if signed:
        return signed_percent(ratio)
    return f"{round(100 * ratio, 1) or 0.0:.1f} %".replace("-", "\u2212")


def seconds(time_s: float | None) -> str:
    """Return a time with its unit; empty for None."""
    return "" if time_s is None else human_seconds(time_s)


def size(size_bytes: float | None) -> str:
    """Return a size with its unit; empty for None."""
    return "" if size_bytes is None else human_bytes(size_bytes)


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

ENVIRONMENT = Environment(
    loader=PackageLoader("analysis.html_report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
"""Whatever is put into a template is escaped, unless it is Markup: what another template made."""
ELEMENTS: Any = ENVIRONMENT.get_template("elements.html").module


@dataclass(frozen=True)
class Part:
    """A section of the page with a heading, and its subsections."""

    title: str
    body: Markup = field(default_factory=Markup)
    parts: tuple["Part", ...] = ()


def paragraph(words: str, kind: str = "") -> Markup:
    """Return a paragraph; `kind`: its class in the style sheet."""
    return Markup(ELEMENTS.paragraph(words, kind))


def bullets(lines: Iterable[str]) -> Markup:
    """Return an unordered list; empty without lines."""
    return Markup(ELEMENTS.bullets(list(lines)))


def terms(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Return a description list of (term, description) pairs; empty without pairs."""
    return Markup(ELEMENTS.terms(list(pairs)))


def folded(summary: str, body: Markup) -> Markup:
    """Return a folded element that is opened by a click or the Enter key."""
    return Markup(ELEMENTS.folded(summary, body))


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    head: str
    number: bool = True
    """Whether its cells are numbers, which are aligned right."""


Cell = str | tuple[str, bool]
"""Text of a cell, or the text and whether it is marked as bad."""


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Markup:
    """Return a table that scrolls within its frame in a narrow window; the first cell of a row is its heading."""
    return Markup(ELEMENTS.table(caption, columns, rows))


def figure(chart: Chart) -> Markup:
    """Return a chart as an embedded SVG picture with its description."""
    wide_in, high_in = chart.figure.get_size_inches()
    size = (round(float(wide_in) * PIXELS_PER_IN), round(float(high_in) * PIXELS_PER_IN))
    return picture(svg(chart.figure), "svg+xml", chart.words, title=chart.title, size=size)


def picture(content: bytes, kind: str, words: str, *, title: str, size: tuple[int, int]) -> Markup:
    """Return a picture with a short alternative text, and its full description folded below."""
    first = re.split(r"(?<=\.)\s", words, maxsplit=1)[0]
    alt = first if len(first) <= ALT_LENGTH else f"{first[: ALT_LENGTH - 1]}\u2026"
    data = base64.b64encode(content).decode("ascii")
    return Markup(ELEMENTS.picture(data, kind, words, title, alt, size, LEAST_WIDTH))


def png_size(content: bytes) -> tuple[int, int]:
    """Return the size in CSS pixels of a PNG that was drawn at `DPI`."""
    wide, high = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    return round(wide * PIXELS_PER_IN / DPI), round(high * PIXELS_PER_IN / DPI)


def document(
    title: str, lead: Markup, parts: Sequence[Part], scripts: Sequence[str] = (), inner: Sequence[str] = ()
) -> str:
    """Return the whole page: heading, contents, parts.

    `scripts` run before the parts are read; `inner` are the scripts inside the parts. The browser may run no others.
    """
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in (*scripts, *inner)
    ]
    allowed = "; script-src " + " ".join(f"'sha256-{each}'" for each in hashes) if hashes else ""
    template, embedded = ENVIRONMENT.get_template("page.html"), [Markup(script) for script in scripts]
    return template.render(title=title, lead=lead, parts=parts, policy=POLICY + allowed, scripts=embedded)
