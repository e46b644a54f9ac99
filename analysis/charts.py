"""Charts of a comparison (see `analysis.compare`): data frame in, figure out.

Figures are laid out in inches, so that text never shrinks: more scenarios make a larger picture. Marks differ in shape
or hatching and in lightness, so that they can be told apart in grey and by colour-blind readers.
"""

import io
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log, log10
from pathlib import Path
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gssim.result import PHASES

STYLE = {
    **{
        key: value
        for key, value in mpl.rcParamsDefault.items()
        if key.startswith(("font.", "axes.", "hatch.", "text."))
    },
    "font.size": 9.5,
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
MARKS = {
    "single": ("o", "#000000"),
    "ddp": ("s", "#0072B2"),
    "zero1": ("v", "#56B4E9"),
    "zero2": ("^", "#009E73"),
    "zero3": ("<", "#CC79A7"),
    "fsdp": (">", "#CC79A7"),
    "hsdp": ("P", "#CC79A7"),
    "pipeline": ("p", "#7A7A00"),
    "tensor": ("h", "#7A7A00"),
    "gs": ("D", "#D55E00"),
    "gs_z3": ("X", "#D55E00"),
    "gs_wgrad": ("d", "#E69F00"),
    "gs_tp": ("8", "#E69F00"),
    "gs_hier": ("*", "#D55E00"),
}
OTHER_MARK = ("H", "#777777")

# Neighbours in a stack differ in lightness (L* 70, 46, 89, 71, 32, 91), not in hue alone.
PHASE_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "compression": "#F0E442",
    "optimizer": "#E69F00",
    "exposed_communication": "#882255",
    "idle": "#E4E4E4",
}
DARK_PHASES = frozenset({"backward", "exposed_communication"})
"""Hatched in white, the others in dark grey."""

LOG_FROM_RATIO = 6
"""Values that span more than this factor are drawn on logarithmic axes (a chart's bars: in separate panels)."""
LONGEST_NAME = 32
LABEL_POINTS = 9.0
LABEL_GAP_IN = 0.19
"""Distance of two labels' lines; a label's text is 0.13 in high."""


@dataclass(frozen=True)
class Quantity:
    """What one panel of the predicted-versus-measured chart shows."""

    title: str
    axis: str
    predicted: str
    measured: str
    error: str
    tolerance: float
    units: tuple[tuple[str, float], ...]


STEP_TIME = Quantity(
    "Time of one step: within \u00b110 %?",
    "step time",
    "step_time_predicted_s",
    "step_time_measured_s",
    "step_time_error_ratio",
    0.10,
    TIME_UNITS,
)
PEAK_MEMORY = Quantity(
    "Peak memory (worst-predicted rank): within \u00b12 %?",
    "peak memory",
    "peak_predicted_bytes",
    "peak_measured_bytes",
    "peak_error_ratio",
    0.02,
    BYTE_UNITS,
)


def predicted_vs_measured(comparison: pl.DataFrame) -> Figure:
    """Return two panels, step time and peak memory; a point on the diagonal is a prediction that is right."""
    labels = point_labels(comparison)
    with mpl.rc_context(STYLE):
        side_in = max(4.4, LABEL_GAP_IN * (len(labels) + 1))
        label_in = 0.04 * side_in + 0.15 + max((_width_in(f"{label}  (+100.0 %)") for label in labels), default=0)
        left_in, bottom_in, top_in = 0.85, 1.5, 1.2
        panel_in = left_in + side_in + label_in
        width_in, height_in = 2 * panel_in, bottom_in + side_in + top_in
        figure = _figure(width_in, height_in)
        for i, quantity in enumerate((STEP_TIME, PEAK_MEMORY)):
            box = ((left_in + i * panel_in) / width_in, bottom_in / height_in, side_in / width_in, side_in / height_in)
            _diagonal_panel(figure.add_axes(box), comparison, labels, quantity, side_in)
        title = "How close does the simulator come to what was measured?"
        note = (
            "Above the line the prediction is too high, below it too low. "
            "In brackets: predicted / measured \u2212 1, bold where it leaves the grey band."
        )
        figure.text(left_in / width_in, 1 - 0.32 / height_in, title, fontsize=14, fontweight="bold", va="center")
        figure.text(left_in / width_in, 1 - 0.62 / height_in, note, color="0.25", va="center")
        methods = _in_order(comparison["method"].to_list())
        figure.legend(
            handles=[Line2D([], [], linestyle="", label=_plain(method), **_mark(method)) for method in methods],
            title="method of the plan",
            loc="lower left",
            bbox_to_anchor=(left_in / width_in, 0.08 / height_in),
            ncols=max(1, min(len(methods), 8)),
            frameon=False,
            borderaxespad=0,
            alignment="left",
        )
    return figure


def _diagonal_panel(
    axes: Axes, comparison: pl.DataFrame, labels: Sequence[str], quantity: Quantity, side_in: float
) -> None:
    columns = [quantity.measured, quantity.predicted, quantity.error, "method"]
    rows = [
        (label, *row)
        for label, row in zip(labels, comparison.select(columns).iter_rows(), strict=True)
        if None not in row
    ]
    axes.set_title(quantity.title, loc="left")
    if not rows:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    unit, factor = unit_for(max(value for row in rows for value in row[1:3]), quantity.units)
    points = [(measured / factor, predicted / factor) for _, measured, predicted, _, _ in rows]
    limits, logarithmic = _square(axes, points, quantity.tolerance)
    _band(axes, limits, quantity.tolerance)
    for (x, y), row in zip(points, rows, strict=True):
        axes.plot(x, y, linestyle="", zorder=4, **_mark(row[4]))
    texts = [
        (f"{_plain(label)}  ({percent(error)})", abs(error) > quantity.tolerance) for label, _, _, error, _ in rows
    ]
    _label_points(axes, points, texts, limits, logarithmic, LABEL_GAP_IN / side_in)
    axes.set_xlabel(f"measured {quantity.axis} ({unit})")
    axes.set_ylabel(f"predicted {quantity.axis} ({unit})")
    below = (0, -0.62 / side_in)
    axes.legend(loc="upper left", bbox_to_anchor=below, ncols=2, frameon=False, borderaxespad=0, fontsize=LABEL_POINTS)


def _square(axes: Axes, points: Sequence[tuple[float, float]], tolerance: float) -> tuple[tuple[float, float], bool]:
    """Give both axes the same limits, ticks and scale; return (limits, whether they are logarithmic).

    Limits are so wide that the band of the tolerance stays a band, however close the points are together.
    """
    values = [value for point in points for value in point]
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > LOG_FROM_RATIO
    if logarithmic:
        margin = (high / low) ** 0.08
        limits = (low / margin, high * margin)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks: Any = FixedLocator(log_ticks(*limits))
    else:
        margin = max(0.08 * (high - low), (4 * tolerance * (high + low) - (high - low)) / 2) or 1.0
        limits = (max(0.0, low - margin), high + margin)
        ticks = MaxNLocator(6).tick_values(*limits)
        ticks = FixedLocator([tick for tick in ticks if limits[0] <= tick <= limits[1]])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(limits)
    axes.set_ylim(limits)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    return limits, logarithmic


def log_ticks(low: float, high: float) -> list[float]:
    """Return the round numbers (1, 2, 5 times powers of ten) between two limits.

    >>> log_ticks(0.09, 3)
    [0.1, 0.2, 0.5, 1.0, 2.0]
    """
    powers = range(floor(log10(low)), floor(log10(high)) + 1)
    # dividing by a power of ten keeps 0.1, 0.2, ... the nearest floats
    ticks = [digit * 10.0**power if power >= 0 else digit / 10.0**-power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _band(axes: Axes, limits: tuple[float, float], tolerance: float) -> None:
    line = list(limits)
    axes.fill_between(
        line,
        [value * (1 - tolerance) for value in line],
        [value * (1 + tolerance) for value in line],
        color="0.87",
        linewidth=0,
        zorder=1,
        label=f"within \u00b1{tolerance:.0%}".replace("%", " %"),
    )
    axes.plot(line, line, color="0.25", linewidth=1, zorder=2, label="prediction = measurement")


def _label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[tuple[str, bool]],
    limits: tuple[float, float],
    logarithmic: bool,
    gap: float,
) -> None:
    """Write the labels (text, bold) in a column right of the panel, by height of their points and tied to them."""
    scale = log if logarithmic else float
    low, high = map(scale, limits)
    order = sorted(range(len(points)), key=lambda i: (points[i][1], points[i][0]))
    heights = spread([(scale(points[i][1]) - low) / (high - low) for i in order], gap)
    for i, height in zip(order, heights, strict=True):
        axes.annotate(
            texts[i][0],
            fontweight="bold" if texts[i][1] else "normal",
            xy=points[i],
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_POINTS,
            annotation_clip=False,
            zorder=3,
            arrowprops={
                "arrowstyle": "-",
                "color": "0.55",
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Return ascending `positions` moved as little as it takes to be `gap` apart and, where there is room, in 0..1.

    Points that are too close become one block around their mean (pool adjacent violators on position - i * gap).

    >>> [round(x, 3) for x in spread([0.5, 0.5, 0.9], 0.1)]
    [0.45, 0.55, 0.9]
    """
    blocks: list[tuple[float, int]] = []  # (mean of position - i * gap, number of labels)
    for i, position in enumerate(positions):
        mean, size = position - i * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    top = 1 - (len(positions) - 1) * gap
    starts = [max(0.0, min(mean, top)) for mean, size in blocks for _ in range(size)]
    return [start + i * gap for i, start in enumerate(starts)]


def phases(comparison: pl.DataFrame) -> Figure:
    """Return stacked bars of a step's phases, for each scenario the predicted bar (hatched) above the measured one.

    Steps of very different length go to panels of their own, each with its own axis: on one axis the short ones
    would vanish.
    """
    labels = point_labels(comparison)
    rows = list(comparison.iter_rows(named=True))
    groups = magnitudes([max(_total_s(row, "predicted"), _total_s(row, "measured")) for row in rows])
    with mpl.rc_context(STYLE):
        left_in = 0.3 + max(map(_width_in, labels), default=0)
        bar_in, right_in = 6.6, 1.45
        top_in, between_in, bottom_in = 1.25, 0.85, 0.65
        heights_in = [0.68 * len(group) + 0.12 for group in groups]
        width_in = left_in + bar_in + right_in
        height_in = top_in + sum(heights_in) + between_in * (len(groups) - 1) + bottom_in
        figure = _figure(width_in, height_in)
        bottom = height_in - top_in
        for group, panel_in in zip(groups, heights_in, strict=True):
            bottom -= panel_in
            axes = figure.add_axes((left_in / width_in, bottom / height_in, bar_in / width_in, panel_in / height_in))
            _phase_panel(axes, [rows[i] for i in group], [labels[i] for i in group])
            bottom -= between_in
        _phase_heading(figure, several=len(groups) > 1)
    return figure


def magnitudes(values: Sequence[float]) -> list[list[int]]:
    """Return the indices of `values` in groups of like magnitude, largest first; order inside a group is kept.

    >>> magnitudes([0.1, 2.0, 0.3])
    [[1], [0, 2]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(values)), key=lambda i: -values[i]):
        if not groups or values[groups[-1][0]] > LOG_FROM_RATIO * values[i]:
            groups.append([])
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def _phase_heading(figure: Figure, *, several: bool) -> None:
    width_in, height_in = figure.get_size_inches()
    x = 0.15 / width_in
    title = "Where does a step's time go, and does the simulator see it?"
    figure.text(x, 1 - 0.32 / height_in, title, fontsize=14, fontweight="bold", va="center")
    note = "Top bar of a pair (hatched): predicted; bottom bar (plain): measured. Means over ranks."
    if several:
        note += " Mind the different time axes."
    figure.text(x, 1 - 0.62 / height_in, note, va="center", color="0.25")
    swatches = [
        Patch(facecolor=PHASE_COLOURS[p], edgecolor="0.2", linewidth=0.6, label=p.replace("_", " ")) for p in PHASES
    ]
    figure.legend(
        handles=swatches,
        loc="upper left",
        bbox_to_anchor=(x, 1 - 0.8 / height_in),
        ncols=len(PHASES),
        frameon=False,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _phase_panel(axes: Axes, rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> None:
    longest_s = max(_total_s(row, side) for row in rows for side in ("predicted", "measured"))
    unit, factor = unit_for(longest_s, TIME_UNITS)
    for i, row in enumerate(rows):
        for side, y in (("predicted", i - 0.19), ("measured", i + 0.19)):
            _phase_bar(axes, row, side, y, factor)
            total = _total_s(row, side) / factor
            text = f"{side} {total:.3g} {unit}"
            axes.annotate(text, (total, y), (5, 0), textcoords="offset points", va="center", annotation_clip=False)
    axes.set_yticks(range(len(rows)), [_plain(label) for label in labels], fontweight="bold", fontsize=LABEL_POINTS)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 1.005 * longest_s / factor or 1.0)
    axes.set_xlabel(f"time of one step ({unit})")
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _phase_bar(axes: Axes, row: dict[str, Any], side: str, y: float, factor: float) -> None:
    left = 0.0
    for phase in PHASES:
        time = (row[f"{phase}_{side}_s"] or 0.0) / factor
        if time > 0:
            place: dict[str, Any] = {"y": y, "width": time, "left": left, "height": 0.36}
            axes.barh(**place, color=PHASE_COLOURS[phase], linewidth=0)
            if side == "predicted":  # a patch has one colour for edge and hatching: so hatching is a patch of its own
                hatching = "white" if phase in DARK_PHASES else "0.2"
                axes.barh(**place, fill=False, linewidth=0, hatch="////", edgecolor=hatching)
            axes.barh(**place, fill=False, linewidth=0.6, edgecolor="0.2")
        left += time


def _total_s(row: dict[str, Any], side: str) -> float:
    return sum(row[f"{phase}_{side}_s"] or 0.0 for phase in PHASES)


def point_labels(comparison: pl.DataFrame) -> list[str]:
    """Return a short label for each row, none twice: its name, then what tells equal names apart."""
    names = [" ".join(name.split()) for name in comparison["name"].to_list()]
    thresholds = [
        f"threshold {value:g}" if value is not None else "dense" for value in comparison["threshold"].to_list()
    ]
    labels = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "\u2026" for name in names]
    for words in (comparison["method"].to_list(), thresholds, _short_ids(comparison["scenario_id"].to_list())):
        labels = _told_apart(labels, words)
    return labels


def _short_ids(ids: Sequence[str]) -> list[str]:
    """Return the first six characters of each, or as many more as tell them apart."""
    length = next((n for n in range(6, 64) if len({identity[:n] for identity in ids}) == len(set(ids))), 64)
    return [identity[:length] for identity in ids]


def _told_apart(labels: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return labels with their word added where equal labels have different words."""
    meanings = defaultdict(set)
    for label, word in zip(labels, words, strict=True):
        meanings[label].add(word)
    return [
        f"{label}, {word}" if len(meanings[label]) > 1 else label for label, word in zip(labels, words, strict=True)
    ]


def unit_for(value: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the largest (unit, factor) in which `value` is at least 1, else the smallest.

    >>> unit_for(0.12, TIME_UNITS)
    ('ms', 0.001)
    """
    return next(((unit, factor) for unit, factor in units if value >= factor), units[-1])


def percent(ratio: float) -> str:
    """Return a signed ratio for people.

    >>> percent(0.042), percent(-0.5)
    ('+4.2 %', '\u221250.0 %')
    """
    return f"{100 * ratio:+.1f} %".replace("-", "\u2212")


def _in_order(methods: Sequence[str]) -> list[str]:
    return [method for method in MARKS if method in methods] + sorted(set(methods) - MARKS.keys())


def _mark(method: str) -> dict[str, Any]:
    """Return how a method's points are drawn."""
    marker, colour = MARKS.get(method, OTHER_MARK)
    size = 12 if marker == "*" else 8  # a star of equal width looks smaller
    return {"marker": marker, "color": colour, "markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.7}


def _plain(text: str) -> str:
    """Return text in which a dollar sign starts no formula."""
    return text.replace("$", r"\$")


def _width_in(text: str) -> float:
    """Return the width of a label in bold, the widest that it may become."""
    return (
        float(TextPath((0, 0), _plain(text), LABEL_POINTS, prop=FontProperties(weight="bold")).get_extents().width) / 72
    )


def _figure(width_in: float, height_in: float) -> Figure:
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """Return the figure as PNG, the same bytes for the same figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, whole or not at all: to a temporary file beside it, then renamed."""
    content = png(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
