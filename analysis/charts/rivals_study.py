"""Charts of methods trained beside one another: loss against bytes sent, and against predicted time on each network."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.charts.convergence import CAVEAT, GREY, HOLLOW, LOOKS
from analysis.charts.drawing import (
    STYLE,
    Chart,
    add_axes,
    legend_at_right,
    new_figure,
    plain,
    wrapped,
    write_findings,
)
from analysis.study.findings import percentage
from analysis.study.rivals import BYTES, BYTES_RATIO, SAMPLES, Course, readings_of
from analysis.study.rows import spread

PANEL_IN, HIGH_IN, LEFT_IN, GAP_IN, BOTTOM_IN = 3.6, 3.4, 0.8, 0.65, 0.65
MARKS = (*((shape, colour, colour) for shape, colour in LOOKS), *((shape, "white", "black") for shape in HOLLOW))
"""Shape, fill and edge of each variant that is no control."""
CONTROLS = (("s", "black", "black"), ("X", GREY, "black"))


def rivals_charts(courses: Sequence[Course], dense: str, said: Sequence[str]) -> list[Chart]:
    """Return both charts of a study of rivals; `said`: its findings."""
    networks = list(courses[0].step_time_s)
    readings = {each.name: each for each in readings_of(courses, dense)}
    words = "; ".join(said)
    title = "What loss does each method reach for the bytes that it sends?"
    best = [f"at {name} '{readings[name].best}'" for name in (BYTES, SAMPLES)]
    sizes = _figure(
        courses,
        title,
        f"Least mean loss: {'; '.join(best)}.",
        [("sent by a rank (MB)", "", lambda each: each.step_bytes / 1e6)],
        note=f"Equal bytes: {percentage(BYTES_RATIO)} of what dense sends.",
    )
    question = "What loss does each method reach in the same time?"
    best = [f"{network}: '{readings[f'equal time, {network}'].best}'" for network in networks]
    panels: list[tuple[str, str, Callable[[Course], float]]] = [
        ("predicted time (s)", network, lambda each, network=network: each.step_time_s[network])  # type: ignore[misc]
        for network in networks
    ]
    times = _figure(
        courses, question, f"Least mean loss in equal time: {'; '.join(best)}.", panels, note="Times are predicted."
    )
    return [
        Chart("loss_against_bytes", title, sizes, f"Line charts of held-out loss against bytes sent. {words}."),
        Chart("loss_against_time", question, times, f"Line charts of held-out loss against predicted time. {words}."),
    ]


def _figure(
    courses: Sequence[Course],
    title: str,
    finding: str,
    panels: Sequence[tuple[str, str, Callable[[Course], float]]],
    *,
    note: str,
) -> Figure:
    """Return a figure with a panel for each (axis label, title, cost of a step)."""
    labels = [_label(each) for each in courses]
    legend_in = 0.5 + 0.074 * max(map(len, labels))
    width_in = LEFT_IN + len(panels) * (PANEL_IN + GAP_IN) - GAP_IN + 0.3 + legend_in
    seeds, steps = len(courses[0].losses), courses[0].last
    caption = f"Mean of {seeds} seeds over {steps} steps; bars at the end: standard deviation over seeds."
    findings = wrapped(finding, width_in - 0.4, 10.5)
    means = [[spread(values).mean for values in zip(*each.losses, strict=True)][1:] for each in courses]
    # a course that begins far above the others would press them together
    usual, least, most = sorted(each[0] for each in means)[len(means) // 2], min(map(min, means)), max(map(max, means))
    highest = min(most + 0.05 * (usual - least), usual + (usual - least))
    beyond = highest < most
    above = " Of lines that come from above, the first readings are not shown." if beyond else ""
    notes = wrapped(f"{caption} {note}{above} {CAVEAT}", width_in - 0.4)
    top_in = 0.25 + 0.26 + 0.21 * len(findings) + 0.19 * len(notes) + 0.4
    height_in = top_in + max(HIGH_IN + BOTTOM_IN, 0.225 * len(courses) + 0.5)
    with mpl.rc_context(STYLE):
        figure = new_figure(width_in, height_in)
        write_findings(figure, title, findings, notes)
        for number, (label, name, cost) in enumerate(panels):
            left_in, bottom_in = LEFT_IN + number * (PANEL_IN + GAP_IN), height_in - top_in - HIGH_IN
            axes = add_axes(figure, (left_in, bottom_in, PANEL_IN, HIGH_IN))
            handles = _draw(axes, courses, cost)
            axes.set_ylim(top=highest)
            axes.set_xlabel(label)
            axes.set_ylabel("held-out loss (nats)" if not number else "")
            axes.set_title(plain(name), loc="left", fontsize=10)
        entries = list(zip(handles, labels, strict=True))
        legend_at_right(figure, entries, title="method: density pushed", below_in=top_in - 0.2)
    return figure


def _draw(axes: Axes, courses: Sequence[Course], cost: Callable[[Course], float]) -> list[Line2D]:
    """Draw every course's loss against steps times their cost; return the handles of a legend."""
    rivals, controls = iter(MARKS), iter(CONTROLS)
    handles = []
    for course in courses:
        shape, fill, edge = next(controls) if course.variant.control else next(rivals)
        spreads = [spread(values) for values in zip(*course.losses, strict=True)][1:]
        places = [step * cost(course) for step in course.steps[1:]]
        line_style = "--" if course.variant.control else "-"
        style: dict[str, Any] = {"marker": shape, "markerfacecolor": fill, "markeredgecolor": edge, "markersize": 5}
        color = edge if edge != "black" or course.variant.control else "0.4"
        (line,) = axes.plot(places, [s.mean for s in spreads], line_style, color=color, linewidth=1.1, **style)
        axes.errorbar(places[-1:], [spreads[-1].mean], [spreads[-1].sd], color=color, capsize=3, linewidth=1.1)
        handles.append(line)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="0.9", linewidth=0.6)
    return handles


def _label(course: Course) -> str:
    control = " (control)" if course.variant.control else ""
    return f"{course.variant.name}{control}" + ("" if course.density is None else f": {percentage(course.density)}")
