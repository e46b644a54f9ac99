"""Common parts of all charts: style, marks of methods, units, placement of labels, and picture files."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Curves
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.compare.table import short_ids, threshold_words, told_apart
from gssim.execution.files import write_bytes
from gssim.plan import METHODS
from gssim.units import signed_percent

MARK_IN = 0.1
"""Half the width of a mark, with a margin."""
LINE_IN = 0.125
"""Height of a label's text at `LABEL_POINTS`."""
SIDES = tuple(
    (x, y * step)
    for step in (1.0, 2.0, 3.2)
    for x, y in ((1, 0.35), (1, -0.35), (-1, 0.35), (-1, -0.35), (0, 1), (0, -1))
)
"""Positions tried in turn: right, left, above or below of the point, then further off."""


@dataclass(frozen=True)
class Box:
    """A rectangle in inches from the panel's lower left corner."""

    x: float
    y: float
    wide: float
    high: float

    def hides(self, other: "Box") -> bool:
        """Return whether the two rectangles overlap."""
        return (
            self.x < other.x + other.wide
            and other.x < self.x + self.wide
            and self.y < other.y + other.high
            and other.y < self.y + self.high
        )

    def distance_in(self, x: float, y: float) -> float:
        """Return the distance of a point from the rectangle, in inches.

        >>> Box(0, 0, 2, 1).distance_in(5, 5), Box(0, 0, 2, 1).distance_in(1, 0.5)
        (5.0, 0.0)
        """
        across, up = max(self.x - x, 0.0, x - self.x - self.wide), max(self.y - y, 0.0, y - self.y - self.high)
        return math.hypot(across, up)


def place_labels(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    marks: Sequence[tuple[float, float]],
    **look: Any,
) -> None:
    """Write each text beside its point, where it overlaps the fewest marks and other labels.

    A label that is far from its point is joined to it by a line.
    """
    wide_in, high_in = _size_in(axes)
    look = {"fontsize": LABEL_POINTS - 1} | look
    taken = [_around(*_inches(axes, mark)) for mark in marks]
    for point, text in zip(points, texts, strict=True):
        x, y = _inches(axes, point)
        size = (label_width_in(text) * look["fontsize"] / LABEL_POINTS, LINE_IN * look["fontsize"] / LABEL_POINTS)
        boxes = [_beside(x, y, size, side) for side in SIDES]
        inside = [
            box
            for box in boxes
            if box.x > 0 and box.y > 0 and box.x + box.wide < wide_in and box.y + box.high < high_in
        ]
        best = min(inside or boxes, key=lambda box: sum(box.hides(other) for other in taken))
        taken.append(best)
        is_far = best.distance_in(x, y) > 1.5 * MARK_IN
        axes.annotate(
            plain(text),
            point,
            ((best.x + best.wide / 2) / wide_in, (best.y + best.high / 2) / high_in),
            textcoords="axes fraction",
            ha="center",
            va="center",
            annotation_clip=False,
            zorder=6,
            arrowprops={"arrowstyle": "-", "color": "0.45", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 2}
            if is_far
            else None,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4},
            **look,
        )


def _around(x: float, y: float) -> Box:
    return Box(x - MARK_IN, y - MARK_IN, 2 * MARK_IN, 2 * MARK_IN)


def _beside(x: float, y: float, size: tuple[float, float], side: tuple[float, float]) -> Box:
    wide, high = size
    across, up = side
    left = x + MARK_IN if across > 0 else x - MARK_IN - wide if across < 0 else x - wide / 2
    return Box(left, y + up * (MARK_IN + high / 2) - high / 2, wide, high)


def _size_in(axes: Axes) -> tuple[float, float]:
    figure: Any = axes.figure
    box, (wide_in, high_in) = axes.get_position(), figure.get_size_inches()
    return box.width * wide_in, box.height * high_in


def _inches(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    """Return a point in inches from the panel's lower left corner."""
    across, up = axes.transAxes.inverted().transform(axes.transData.transform(point))
    wide_in, high_in = _size_in(axes)
    return across * wide_in, up * high_in


STYLE = {
    **{
        key: value
        for key, value in mpl.rcParamsDefault.items()
        if key.startswith(("font.", "axes.", "hatch.", "text."))
    },
    "font.size": 9.5,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.8,
}
DPI = 150
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
BYTE_UNITS = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
# Shape and colour of each method, the same in every chart; colours: Okabe & Ito 2008, "Color Universal Design".
MARKS = dict(
    zip(
        METHODS,
        (
            ("o", "#000000"),
            ("s", "#0072B2"),
            ("v", "#56B4E9"),
            ("D", "#0072B2"),
            ("P", "#56B4E9"),
            ("X", "#56B4E9"),
            ("o", "#E69F00"),
            ("s", "#E69F00"),
            ("v", "#E69F00"),
            ("^", "#E69F00"),
            ("^", "#009E73"),
            ("<", "#CC79A7"),
            (">", "#CC79A7"),
            ("P", "#CC79A7"),
            ("p", "#7A7A00"),
            ("h", "#7A7A00"),
            ("D", "#D55E00"),
            ("X", "#D55E00"),
            ("d", "#E69F00"),
            ("8", "#E69F00"),
            ("*", "#D55E00"),
        ),
        strict=True,
    )
)
OTHER_MARK = ("H", "#777777")
LOG_FROM_RATIO = 6
"""Values that span more than this factor are drawn on logarithmic axes (bars: in separate panels)."""
LONGEST_NAME = 32
LABEL_POINTS = 9.0
LABEL_GAP_IN = 0.19
"""Distance between the lines of two labels; a label's text is 0.13 in high."""


def point_labels(comparison: pl.DataFrame) -> list[str]:
    """Return a short, unique label for each row: its name, and for equal names method, threshold or id."""
    names = [" ".join(name.split()) for name in comparison["name"].to_list()]
    labels = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "\u2026" for name in names]
    ids = short_ids(comparison["scenario_id"].to_list())
    return told_apart(labels, comparison["method"].to_list(), threshold_words(comparison["threshold"]), ids)


def unit_for(value: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the largest (unit, factor) in which `value` is at least 1, else the smallest.

    >>> unit_for(0.12, TIME_UNITS)
    ('ms', 0.001)
    """
    return next(((unit, factor) for unit, factor in units if value >= factor), units[-1])


def percent(ratio: float) -> str:
    """Return a ratio as a signed percentage. What rounds to zero has no sign.

    >>> percent(0.042), percent(-0.5), percent(-1e-6)
    ('+4.2 %', '\u221250.0 %', '0.0 %')
    """
    return f"{signed_percent(ratio)} %".replace("-", "\u2212")


def in_order(methods: Sequence[str]) -> list[str]:
    """Return methods in the order of `MARKS`, unknown ones last."""
    return [method for method in MARKS if method in methods] + sorted(set(methods) - MARKS.keys())


def mark(method: str, points: float = 8) -> dict[str, Any]:
    """Return the matplotlib style of a method's marks, `points` wide."""
    marker, colour = MARKS.get(method, OTHER_MARK)
    size = 1.5 * points if marker == "*" else points  # a star of equal width looks smaller
    return {"marker": marker, "color": colour, "markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.7}


def draw_bar(
    axes: Axes, colour: str, *, hatch: str = "", hatch_colour: str = "0.2", edge_points: float = 0.6, **place: Any
) -> None:
    """Draw a horizontal bar with an edge; `place`: y, height, left and width, as matplotlib takes them.

    A patch has one colour for edge and hatching: so hatching is a patch of its own.
    """
    axes.barh(**place, color=colour, linewidth=0)
    if hatch:
        axes.barh(**place, fill=False, linewidth=0, hatch=hatch, edgecolor=hatch_colour)
    axes.barh(**place, fill=False, linewidth=edge_points, edgecolor="0.2")


def plain(text: str) -> str:
    """Return text with dollar signs escaped, which would start a formula."""
    return text.replace("$", r"\$")


@lru_cache(maxsize=10_000)
def label_width_in(text: str) -> float:
    """Return the width of a label in bold, its widest form."""
    path = TextPath((0, 0), plain(text), LABEL_POINTS, prop=FontProperties(weight="bold"))
    x, kinds = np.asarray(path.vertices)[:, 0], np.asarray(path.codes)
    if Curves.CURVE4 in kinds:
        return float(path.get_extents().width) / 72
    # `get_extents` finds the same curve by curve, which takes a tenth of a report's time: x is farthest at an end of a
    # quadratic curve, or where its derivative is 0
    controls = np.flatnonzero(kinds == Curves.CURVE3)[::2]
    first, control, last = x[controls - 1], x[controls], x[controls + 1]
    bend = first - 2 * control + last
    at = np.clip(np.divide(first - control, bend, out=np.zeros_like(bend), where=bend != 0), 0.0, 1.0)
    turns = (1 - at) ** 2 * first + 2 * at * (1 - at) * control + at**2 * last
    ends = np.delete(x, np.concatenate([controls, np.flatnonzero(kinds == Curves.CLOSEPOLY)]))
    return float(np.ptp(np.concatenate([ends, turns]))) / 72


def wrapped(text: str, width_in: float, points: float = 9.5) -> list[str]:
    """Return text in lines that are no wider than `width_in`, even in bold."""
    lines: list[list[str]] = [[]]
    scale, space_in, used_in = points / LABEL_POINTS, label_width_in("n n") - 2 * label_width_in("n"), 0.0
    for word in text.split():
        wide_in = scale * label_width_in(word)
        if lines[-1] and used_in + scale * space_in + wide_in > width_in:
            lines.append([])
        used_in = used_in + scale * space_in + wide_in if lines[-1] else wide_in
        lines[-1].append(word)
    return [" ".join(line) for line in lines if line]


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Return axes in a box (left, bottom, width, height) given in inches."""
    width_in, height_in = figure.get_size_inches()
    left, bottom, wide, high = box
    return figure.add_axes((left / width_in, bottom / height_in, wide / width_in, high / height_in))


def on_axis(value: float, ends: tuple[float, float]) -> float:
    """Return the place of a value on a logarithmic axis with 0 and infinity at its ends."""
    return min(max(value, ends[0]), ends[1])


def log_axis_with_ends(axes: Axes, ticks: Mapping[float, str], ends: tuple[float, float]) -> None:
    """Set up a logarithmic x axis with 0 and infinity at its ends; `ticks`: labels by value."""
    axes.set_xscale("log")
    axes.set_xlim(ends[0] / 1.5, ends[1] * 1.5)
    axes.xaxis.set_major_locator(FixedLocator([on_axis(value, ends) for value in ticks]))
    labels = list(ticks.values())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda _, place: labels[place] if place is not None else ""))
    axes.xaxis.set_minor_locator(NullLocator())


def legend_at_right(figure: Figure, entries: Sequence[tuple[Artist, str]], *, title: str, below_in: float) -> None:
    """Draw a legend of (handle, label) at the right edge, `below_in` inches below the upper one."""
    width_in, height_in = figure.get_size_inches()
    figure.legend(
        handles=[handle for handle, _ in entries],
        labels=[plain(label) for _, label in entries],
        loc="upper right",
        bbox_to_anchor=(1 - 0.1 / width_in, 1 - below_in / height_in),
        frameon=False,
        borderaxespad=0,
        title=title,
        alignment="left",
    )


def write_heading(
    figure: Figure,
    title: str,
    notes: Sequence[str],
    notes_in: float,
    *,
    step_in: float = 0.2,
    x_in: float = 0.15,
    **look: Any,
) -> None:
    """Write a chart's question, and lines of notes from `notes_in` below the upper edge on."""
    width_in, height_in = figure.get_size_inches()
    x = x_in / width_in
    figure.text(x, 1 - 0.32 / height_in, plain(title), fontsize=14, fontweight="bold", va="center")
    for i, note in enumerate(notes):
        y = 1 - (notes_in + step_in * i) / height_in
        figure.text(x, y, plain(note), color="0.25", va="center", **look)


def write_findings(figure: Figure, title: str, finding: Sequence[str], notes: Sequence[str]) -> float:
    """Write a study's question, the lines of its finding and of notes; return the height below them, in inches."""
    width_in, height_in = map(float, figure.get_size_inches())
    y_in = height_in - 0.25
    figure.text(0.15 / width_in, y_in / height_in, title, fontsize=14, fontweight="bold", va="center")
    y_in -= 0.26
    for lines, look, step_in in ((finding, {"fontsize": 10.5}, 0.21), (notes, {"color": "0.3"}, 0.19)):
        for line in lines:
            figure.text(0.15 / width_in, y_in / height_in, plain(line), va="center", **look)
            y_in -= step_in
    return y_in


@dataclass(frozen=True)
class Chart:
    """A figure, the question that it answers, and a description in words."""

    name: str
    """Name of its files, without suffix."""
    title: str
    figure: Figure
    words: str
    """Text alternative for readers who cannot see the chart: what is drawn, and what stands out."""


def png(figure: Figure) -> bytes:
    """Return the figure as PNG, the same bytes for the same figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG, the same bytes for the same figure; text is drawn as paths, independent of fonts."""
    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "gssim", "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


WRITERS = {".png": png, ".svg": svg}
"""Function that encodes a figure, by the suffix of the file."""


def save(figure: Figure, path: Path) -> None:
    """Write the figure atomically, in the format of the file's suffix."""
    write_bytes(path, WRITERS[path.suffix.lower()](figure))


def save_all(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write every chart as PNG and SVG; return the files, in order."""
    paths = []
    for chart in charts:
        for suffix in WRITERS:
            path = folder / f"{chart.name}{suffix}"
            save(chart.figure, path)
            paths.append(path)
    return paths
