"""Charts of a study of thresholds: quality against threshold, density, bytes and time, and by step.

The title of a chart is its question, followed by the finding. Every variant has the same mark in all charts; controls
are black or hollow. Error bars of absolute figures are standard deviations over seeds; those of changes from dense,
which are paired by seed, are 95 % intervals.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.charts.drawing import (
    STYLE,
    TIME_UNITS,
    Chart,
    add_axes,
    legend_at_right,
    log_axis_with_ends,
    new_figure,
    on_axis,
    plain,
    unit_for,
    wrapped,
    write_findings,
)
from analysis.study.findings import Findings, interval, percentage
from analysis.study.rows import Effect, Row, Spread
from analysis.study.study import Study

# Colours: Okabe & Ito 2008, "Color Universal Design".
LOOKS = (
    ("o", "#D55E00"),
    ("^", "#0072B2"),
    ("D", "#009E73"),
    ("v", "#CC79A7"),
    ("P", "#E69F00"),
    ("<", "#56B4E9"),
    (">", "#7A7A00"),
    ("h", "#882255"),
)
HOLLOW = ("p", "d", "8", "*")
GREY = "#BBBBBB"
PANEL_IN, HIGH_IN, LEFT_IN, GAP_IN, BOTTOM_IN = 3.9, 3.1, 0.95, 1.0, 0.95
MARKS_ALONG = 8
"""Marks along a line by step, which identify it without its colour."""
MOST_ACROSS = 3
"""Most panels in a row; more are put into rows of two."""
NEAR = 0.2
"""Marks nearer than this, in the natural logarithm of a logarithmic axis, would hide each other."""
CONTROL_LINES: tuple[dict[str, Any], ...] = (
    {"color": "0.45", "linewidth": 0.9, "linestyle": "-"},
    {"color": "0.45", "linewidth": 1.1, "linestyle": ":"},
)
"""Styles of the horizontal lines of both controls: all pushed, nothing pushed."""
LINE_IN = 0.225
"""Height of a legend's line."""
CAVEAT = "A small model on a CPU: what holds here need not hold at another width, batch size, or noise of gradients."


@dataclass(frozen=True)
class Quality:
    """A measure of quality on the axis of a panel."""

    label: str
    of: Callable[[Row], tuple[float, float, float] | None]
    """Mean and ends of the error bar of a row."""
    better: int = -1
    """1 where higher is better, -1 where lower is."""


def _spread(value: Spread | None, factor: float = 1.0) -> tuple[float, float, float] | None:
    if value is None:
        return None
    return factor * value.mean, factor * (value.mean - value.sd), factor * (value.mean + value.sd)


def _change(effect: Effect | None, factor: float = 1.0) -> tuple[float, float, float]:
    """Return mean and interval of a change from dense; (0, 0, 0) for dense itself."""
    return (factor * effect.mean, factor * effect.low, factor * effect.high) if effect else (0.0, 0.0, 0.0)


LOSS = Quality("held-out loss (nats)", lambda row: _spread(row.loss))
LOSS_CHANGE = Quality("held-out loss, change from dense (nats)", lambda row: _change(row.loss_change))
ACCURACY = Quality("held-out accuracy (%)", lambda row: _spread(row.accuracy, 100.0), 1)
ACCURACY_CHANGE = Quality(
    "held-out accuracy, change from dense (points)",
    lambda row: None if row.accuracy is None else _change(row.accuracy_change, 100.0),
    1,
)
QUALITY_TITLE = "What does a threshold cost in quality?"
BYTES_TITLE = "How much quality do fewer bytes cost?"
TIME_TITLE = "Does a threshold gain time, and at which quality?"
STEP_TITLE = "How do loss and density move during a run?"
BOTH, CHANGES = (LOSS, LOSS_CHANGE, ACCURACY, ACCURACY_CHANGE), (LOSS_CHANGE, ACCURACY_CHANGE)


def study_charts(study: Study, rows: Sequence[Row], findings: Findings) -> list[Chart]:
    """Return the charts of a study: quality against threshold, bytes and time, and by step."""
    losses = "; ".join(map(_loss, rows))
    sent = "; ".join(f"{row.name} {row.sent_bytes / 1e6:.3g} MB" for row in rows)
    times = "; ".join(f"{row.name} {row.step_time_s.mean:.3g} s measured" for row in rows)
    return [
        Chart(
            "loss_against_threshold",
            QUALITY_TITLE,
            against_threshold(study, rows, findings),
            f"Scatter charts of held-out quality against threshold and density. {findings.quality}. Losses: {losses}.",
        ),
        Chart(
            "loss_against_bytes",
            BYTES_TITLE,
            against_bytes(study, rows, findings),
            f"Scatter charts of held-out quality against bytes sent. {findings.bytes}. "
            f"Sent by a rank in a step: {sent}.",
        ),
        Chart(
            "loss_against_time",
            TIME_TITLE,
            against_time(study, rows, findings),
            f"Scatter charts of held-out quality against step time. {findings.time}. Times of a step: {times}.",
        ),
        Chart(
            "loss_by_step",
            STEP_TITLE,
            by_step(study, rows, findings),
            f"Line charts of held-out loss and of density by step. {findings.density or findings.quality}.",
        ),
    ]


def _loss(row: Row) -> str:
    change = "" if row.loss_change is None else f", change from dense {interval(row.loss_change)}"
    density = "all pushed" if row.density is None else f"{percentage(row.density)} pushed"
    return f"{row.name} ({density}) {row.loss.mean:.3f}{change}"


def against_threshold(study: Study, rows: Sequence[Row], findings: Findings) -> Figure:
    """Return quality against the absolute threshold, and against the density that was realised."""
    absolute = [row for row in rows if row.kind == "absolute" or row.threshold is None]
    absolute = [row for row in absolute if not row.control or row.name in (study.dense, study.silent)]
    finite = sorted({row.threshold for row in absolute if row.threshold and math.isfinite(row.threshold)})
    densities = sorted({row.density for row in rows if row.density})

    def draw(axes: Axes, column: int, quality: Quality) -> None:
        _bands(axes, study, rows, quality)
        if column == 0:
            ends = (finite[0] / 6, finite[-1] * 6) if finite else (0.1, 1.0)
            places = {row.name: on_axis(row.threshold or 0.0, ends) for row in absolute}
            _lines(axes, absolute, places, quality)
            places = _apart(places)
            _marks(axes, study, rows, places, quality)
            log_axis_with_ends(axes, {0.0: "all\npushed", **{t: f"{t:g}" for t in finite}, math.inf: "\u221e"}, ends)
            axes.set_xlabel("absolute threshold on |gradient|")
        else:
            ends = (densities[0] / 6, 1.0) if densities else (0.1, 1.0)
            places = {row.name: max(ends[0], 1.0 if row.density is None else row.density) for row in rows}
            _marks(axes, study, rows, _apart(places), quality)
            ticks = {10.0**k: percentage(10.0**k) for k in range(math.ceil(math.log10(ends[0] * 3)), 1)}
            log_axis_with_ends(axes, {0.0: "0 %", **ticks}, (ends[0], 2.0))
            axes.set_xlabel("density: off-shard gradients pushed, mean over the run")

    return _figure(
        study, rows, (QUALITY_TITLE, findings.quality), ("by threshold", "by what it let through"), draw, BOTH
    )


def against_bytes(study: Study, rows: Sequence[Row], findings: Findings) -> Figure:
    """Return quality against the bytes that a rank sends."""
    unit, factor = unit_for(max(row.sent_bytes for row in rows), (("MB", 1e6), ("kB", 1e3), ("bytes", 1.0)))
    places = {row.name: row.sent_bytes / factor for row in rows}

    def draw(axes: Axes, column: int, quality: Quality) -> None:
        _bands(axes, study, rows, quality)
        _marks(axes, study, rows, places, quality, grey=dominated(rows, places, quality, study))
        axes.set_xlim(left=0)
        axes.set_xlabel(f"sent by a rank in a step ({unit})")

    note = "Grey: another is as good or better, with fewer bytes."
    return _figure(study, rows, (BYTES_TITLE, findings.bytes), ("gradients and parameters",), draw, BOTH, note=note)


def against_time(study: Study, rows: Sequence[Row], findings: Findings) -> Figure:
    """Return quality against a step's time: measured here, predicted here, and predicted for other networks."""
    networks = list(rows[0].predicted_s)
    titles = ["measured, this machine", *(f"predicted, {name}" for name in networks)]

    def draw(axes: Axes, column: int, quality: Quality) -> None:
        times = {r.name: r.step_time_s.mean if column == 0 else r.predicted_s[networks[column - 1]] for r in rows}
        unit, factor = unit_for(max(times.values()), TIME_UNITS)
        places = {name: time_s / factor for name, time_s in times.items()}
        across = {row.name: row.step_time_s.sd / factor for row in rows} if column == 0 else {}
        _bands(axes, study, rows, quality)
        _marks(axes, study, rows, places, quality, grey=dominated(rows, places, quality, study), across=across)
        axes.set_xlabel(f"time of one step ({unit})")
        axes.xaxis.set_major_locator(MaxNLocator(5))

    note = f"Grey: another is as good or better, in less time. {' '.join(f'{each}.' for each in findings.elsewhere)}"
    return _figure(study, rows, (TIME_TITLE, findings.time), titles, draw, CHANGES, note=note)


def by_step(study: Study, rows: Sequence[Row], findings: Findings) -> Figure:
    """Return held-out loss by step (as a change from dense's) and by time, and density by step: means over seeds."""
    looks = _looks(study, rows)
    dense = dict(next(row.curve for row in rows if row.name == study.dense))
    titles = ("held-out loss by step", "held-out loss by measured time", "density by step")

    def draw(axes: Axes, column: int, quality: Quality) -> None:
        for row in rows:
            marker, colour, _ = looks[row.name]
            style: dict[str, Any] = {"color": colour, "linestyle": "--" if row.control else "-", "linewidth": 1.3}
            if column < 2:
                x = [step * (row.step_time_s.mean if column else 1.0) for step, _ in row.curve]
                y = [loss - (0.0 if column else dense[step]) for step, loss in row.curve]
                axes.plot(x, y, marker=marker, markersize=4, **style)
            elif any(row.densities):
                every = max(1, len(row.densities) // MARKS_ALONG)
                densities = [d or math.nan for d in row.densities]
                axes.plot(
                    range(1, len(densities) + 1), densities, marker=marker, markersize=4.5, markevery=every, **style
                )
        axes.set_xlabel("time in steps, evaluation left out (s)" if column == 1 else "step")
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=column != 1))
        axes.set_ylabel((LOSS_CHANGE.label, quality.label, "off-shard gradients pushed")[column])
        if column == 2:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percentage(value)))
            axes.yaxis.set_minor_locator(NullLocator())

    return _figure(study, rows, (STEP_TITLE, findings.density or findings.quality), titles, draw, (LOSS,), bars=False)


def dominated(rows: Sequence[Row], places: dict[str, float], quality: Quality, study: Study) -> set[str]:
    """Return the rows that another one dominates (as good on both axes, better on one), at dense's samples."""
    samples = next(row.samples for row in rows if row.name == study.dense)
    points = {
        row.name: (places[row.name], -quality.better * value[0])
        for row in rows
        if row.samples == samples and (value := quality.of(row)) is not None
    }
    return {
        name
        for name, (x, y) in points.items()
        if any(a <= x and b <= y and (a, b) != (x, y) for other, (a, b) in points.items() if other != name)
    }


# Parts of a panel ----------------------------------------------------------------------------------------------------


def _looks(study: Study, rows: Sequence[Row]) -> dict[str, tuple[str, str, bool]]:
    """Return (marker, colour, filled) of each row."""
    controls = [row.name for row in rows if row.control and row.name not in (study.dense, study.silent)]
    tried = [row.name for row in rows if row.name not in (study.dense, study.silent, *controls)]
    looks = {study.dense: ("s", "#000000", True), study.silent: ("X", "#000000", True)}
    looks |= {name: (*LOOKS[i % len(LOOKS)], True) for i, name in enumerate(tried)}
    return looks | {name: (HOLLOW[i % len(HOLLOW)], "#555555", False) for i, name in enumerate(controls)}


def _style(look: tuple[str, str, bool], *, grey: bool = False) -> dict[str, Any]:
    marker, colour, filled = look
    colour = GREY if grey else colour
    face = colour if filled else "white"
    return {"marker": marker, "color": colour, "markersize": 8, "markerfacecolor": face, "markeredgewidth": 1.2}


def _marks(
    axes: Axes,
    study: Study,
    rows: Sequence[Row],
    places: dict[str, float],
    quality: Quality,
    *,
    grey: Collection[str] = (),
    across: dict[str, float] | None = None,
) -> None:
    looks = _looks(study, rows)
    for row in rows:
        value = quality.of(row)
        if value is None or row.name not in places:
            continue
        style = _style(looks[row.name], grey=row.name in grey)
        mean, low, high = value
        axes.errorbar(
            places[row.name],
            mean,
            yerr=[[mean - low], [high - mean]],
            xerr=(across or {}).get(row.name),
            linestyle="",
            capsize=3,
            elinewidth=1.0,
            zorder=2 if row.name in grey else 4,
            **style,
        )
    axes.set_ylabel(quality.label)


def _bands(axes: Axes, study: Study, rows: Sequence[Row], quality: Quality) -> None:
    """Draw both controls across the panel: the mean as a line, the error bar as a band."""
    for name, line in ((study.dense, CONTROL_LINES[0]), (study.silent, CONTROL_LINES[1])):
        value = quality.of(next(row for row in rows if row.name == name))
        if value is not None:
            axes.axhspan(value[1], value[2], color="0.95", linewidth=0, zorder=0)
            axes.axhline(value[0], zorder=1, **line)


def _lines(axes: Axes, rows: Sequence[Row], places: dict[str, float], quality: Quality) -> None:
    """Draw lines through the rows that differ only in their threshold."""
    for rules in dict.fromkeys(row.rules for row in rows if not row.control):
        points = [(places[row.name], quality.of(row)) for row in rows if row.rules == rules and not row.control]
        drawn = sorted((x, value[0]) for x, value in points if value is not None)
        if len(drawn) > 1:
            axes.plot(*zip(*drawn, strict=True), color="0.6", linewidth=1.0, zorder=1)


def _apart(places: dict[str, float]) -> dict[str, float]:
    """Return positions on a logarithmic axis in which almost equal ones are shifted apart."""
    shifted: dict[str, float] = {}
    for name, place in places.items():
        near = sum(abs(math.log(place / other)) < NEAR for other in list(places.values())[: len(shifted)])
        shifted[name] = place * math.exp(0.75 * NEAR * near)
    return shifted


# The whole figure ----------------------------------------------------------------------------------------------------


def _figure(
    study: Study,
    rows: Sequence[Row],
    titles: tuple[str, str],
    panels: Sequence[str],
    draw: Callable[[Axes, int, Quality], None],
    qualities: Sequence[Quality],
    *,
    note: str = "",
    bars: bool = True,
) -> Figure:
    """Return a figure with a panel for each title and quality; `titles`: the question and the finding."""
    chosen = [quality for quality in qualities if all(quality.of(row) for row in rows)]
    entries = _legend_entries(study, rows)
    places, (columns, lines) = _grid(len(panels), len(chosen))
    legend_in = 0.45 + 0.074 * max(len(label) for _, label in entries)
    width_in = LEFT_IN + columns * (PANEL_IN + GAP_IN) - GAP_IN + 0.3 + legend_in
    finding = wrapped(f"{titles[1]}." if titles[1] else "", width_in - 0.4, 10.5)
    n, steps = rows[0].loss.n, rows[0].curve[-1][0]
    caption = f"Mean of {n} seeds, {steps} steps."
    if bars:
        caption = (
            f"Mean of {n} seeds after {steps} steps. Bars: standard deviation over seeds; of a change from dense, "
            "paired by seed: 95 % interval."
        )
    notes = wrapped(f"{caption} {note} {CAVEAT}", width_in - 0.4)
    top_in = 0.25 + 0.26 + 0.21 * len(finding) + 0.19 * len(notes) + 0.45
    height_in = top_in + max(lines * (HIGH_IN + BOTTOM_IN), LINE_IN * len(entries) + 0.5)
    with mpl.rc_context(STYLE):
        figure = new_figure(width_in, height_in)
        write_findings(figure, titles[0], finding, notes)
        for (panel, quality), (across, down) in places.items():
            bottom_in = height_in - top_in - HIGH_IN - down * (HIGH_IN + BOTTOM_IN)
            left_in = LEFT_IN + across * (PANEL_IN + GAP_IN)
            axes = add_axes(figure, (left_in, bottom_in, PANEL_IN, HIGH_IN))
            draw(axes, panel, chosen[quality])
            axes.grid(axis="y", color="0.9", linewidth=0.6)
            axes.set_title(plain(panels[panel]), loc="left", fontsize=10)
        legend_at_right(figure, entries, title="variant: density pushed", below_in=top_in - 0.3)
    return figure


def _grid(panels: int, qualities: int) -> tuple[dict[tuple[int, int], tuple[int, int]], tuple[int, int]]:
    """Return the cell (across, down) of each (panel, quality), and the numbers of columns and rows.

    One panel: its qualities side by side. Several: a row for each quality, or rows of two.
    """
    if panels == 1:
        columns = min(qualities, 2)
        places = {(0, quality): (quality % columns, quality // columns) for quality in range(qualities)}
        return places, (columns, -(-qualities // columns))
    columns = panels if panels <= MOST_ACROSS else 2
    each = -(-panels // columns)
    cells = ((panel, quality) for quality in range(qualities) for panel in range(panels))
    places = {cell: (cell[0] % columns, cell[1] * each + cell[0] // columns) for cell in cells}
    return places, (columns, qualities * each)


def _legend_entries(study: Study, rows: Sequence[Row]) -> list[tuple[Line2D, str]]:
    looks = _looks(study, rows)
    entries = [
        (Line2D([], [], **CONTROL_LINES[0]), "all pushed (dense)"),
        (Line2D([], [], **CONTROL_LINES[1]), "nothing pushed"),
    ]
    for row in rows:
        density = "all" if row.density is None else percentage(row.density)
        words = f"{row.name} (control): {density}" if row.control else f"{row.name}: {density}"
        entries.append((Line2D([], [], linestyle="", **_style(looks[row.name])), words))
    return entries
