"""Chart of step times by phase: for each setting, a bar for each plan.

Settings whose fastest plans are about as fast share an axis. It ends where the fastest plans can still be read: a bar
that is many times as long is cut, and its time is written at its end.
"""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Polygon

from analysis.charts.drawing import (
    LABEL_POINTS,
    STYLE,
    TIME_UNITS,
    Chart,
    draw_bar,
    unit_for,
)
from analysis.charts.step_phases import DARK_PHASES, PHASE_COLOURS, magnitudes
from analysis.charts.sweeps.panels import bar_sheet, frame_bars, subset_note, swatch, threshold_words
from analysis.sweep_tables import (
    THRESHOLD,
    Layout,
    Place,
    Row,
    SweepTable,
    by_plan,
    by_setting,
    fastest,
    is_control,
    is_thresholded,
    layout_of,
    representative,
)
from gssim.result import PHASES
from gssim.units import human_seconds

TITLE = "How long is a step, and what is it made of?"
PANEL_IN, MOST_PANELS, MOST_BARS = 3.6, 8, 8
SHARED_RATIO = 3
"""Settings share an axis where the fastest plan of one takes at most this multiple of another's time."""
CUT_RATIO = 3
"""An axis ends at this multiple of the fastest plan of its setting; of settings that share one, of the slowest's."""
LEAST_IN = 0.01
"""Parts of a bar that are narrower, which nobody sees, are neither drawn nor explained."""
IMBALANCE, COMMUNICATION = "waiting for slower ranks", "exposed communication"
"""Exposed communication in two: what is due to unequal compute, and the rest; in one where a table lacks the first."""
LOOKS = {
    **{phase: (PHASE_COLOURS[phase], hatch) for phase, hatch in (("forward", ""), ("backward", "////"))},
    "compression": (PHASE_COLOURS["compression"], ".."),
    "optimizer": (PHASE_COLOURS["optimizer"], "||||"),
    COMMUNICATION: (PHASE_COLOURS["exposed_communication"], "xx"),
    IMBALANCE: ("#CC79A7", ""),
    "idle": (PHASE_COLOURS["idle"], ""),
}
"""Colour and hatching of each part of a bar, in order."""
DARK = DARK_PHASES | {COMMUNICATION}

Bars = list[tuple[str, Row]]
"""Labels and rows, the fastest first."""


def steps(table: SweepTable) -> Chart | None:
    """Return a panel for each setting, a bar for each plan that fits: of several thresholds the fastest.

    None where no plan fits, or the table lacks phases.
    """
    rows = [row for row in table.fitting if any(row.get(f"{phase}_s") for phase in PHASES) and not is_control(row)]
    if not rows:
        return None
    layout = layout_of(table)
    settings = by_setting(rows, layout)
    chosen = {place: settings[place] for place in representative(list(settings), MOST_PANELS)}
    panels = {place: _bars(members, layout) for place, members in chosen.items()}
    groups = magnitudes([bars[0][1]["step_time_s"] for bars in panels.values()], SHARED_RATIO)
    limits_s = _limits_s(list(panels.values()), groups)
    longest_s = [max(row["step_time_s"] for _, row in bars) for bars in panels.values()]
    cut = any(longest > limit for longest, limit in zip(longest_s, limits_s, strict=True))
    texts = [[(label, human_seconds(row["step_time_s"])) for label, row in bars] for bars in panels.values()]
    fewer = any(len(by_plan(members, layout)) > MOST_BARS for members in chosen.values())
    shown = [
        part
        for part in LOOKS
        if any(
            parts_of(row)[part] > LEAST_IN / PANEL_IN * limit
            for bars, limit in zip(panels.values(), limits_s, strict=True)
            for _, row in bars
        )
    ]
    axes_note = " Mind the different time axes." if len(groups) > 1 else " All panels have the same axis."
    note = (
        "Predicted; plans that fit, the fastest first. Parts are means over ranks. "
        + (
            "Ranks that compute less wait for slower ones, however fast the network; exposed communication is the rest "
            "of what compute waits for, a pipeline's bubble too."
            if IMBALANCE in shown
            else "Exposed communication is what compute waits for, a pipeline's bubble too."
        )
        + (axes_note if len(chosen) > 1 else "")
        + (f" Bars with a gap are cut: they take more than {CUT_RATIO} times as long as the fastest." if cut else "")
        + (" What thresholds change of the loss: not measured." if any(map(is_thresholded, rows)) else "")
        + (f" The {MOST_BARS} fastest plans of a setting." if fewer else "")
        + subset_note(len(chosen), len(settings))
    )
    with mpl.rc_context(STYLE):
        titles = [layout.setting_label(place) for place in chosen]
        legend = [(swatch(*LOOKS[part], dark=part in DARK), part.replace("_", " ")) for part in shown]
        figure, every = bar_sheet(titles, texts, PANEL_IN, heading=TITLE, note=note, legend=legend)
        for axes, bars, limit_s in zip(every, panels.values(), limits_s, strict=True):
            _panel(axes, bars, limit_s)
    return Chart("step_time_by_plan", TITLE, figure, _words(panels, layout))


def _limits_s(panels: Sequence[Bars], groups: Sequence[Sequence[int]]) -> list[float]:
    """Return where each panel's axis ends; `groups`: the panels that share one."""
    limits_s = [0.0] * len(panels)
    for group in groups:
        longest_s = max(row["step_time_s"] for i in group for _, row in panels[i])
        limit_s = min(longest_s, CUT_RATIO * max(panels[i][0][1]["step_time_s"] for i in group))
        for i in group:
            limits_s[i] = limit_s
    return limits_s


def parts_of(row: Row) -> dict[str, float]:
    """Return the seconds of each part of a step's bar, by `LOOKS`."""
    parts_s = {part: row.get(f"{part}_s") or 0.0 for part in PHASES}
    exposed_s = parts_s.pop("exposed_communication")
    imbalance_s = min(exposed_s, row.get("imbalance_s") or 0.0)
    return parts_s | {COMMUNICATION: exposed_s - imbalance_s, IMBALANCE: imbalance_s}


def _bars(rows: Sequence[Row], layout: Layout) -> Bars:
    """Return the fastest plans of a setting, each with its fastest threshold."""
    bars: Bars = []
    for place, members in by_plan(rows, layout).items():
        row = fastest(members)
        if row is not None:
            threshold = row.get(THRESHOLD)
            at = f" at {threshold_words(threshold)}" if threshold is not None and len(members) > 1 else ""
            bars.append((layout.plan_label(place) + at, row))
    return sorted(bars, key=lambda bar: bar[1]["step_time_s"])[:MOST_BARS]


def _panel(axes: Axes, bars: Bars, limit_s: float) -> None:
    unit, factor = unit_for(limit_s, TIME_UNITS)
    limit = limit_s / factor
    for y, (_, row) in enumerate(bars):
        left = 0.0
        parts = parts_of(row)
        for part, (colour, hatch) in LOOKS.items():
            width = min(parts[part] / factor, limit - left)
            if width > LEAST_IN / PANEL_IN * limit:
                hatch_colour = "white" if part in DARK else "0.25"
                place = {"y": y, "height": BAR_HIGH, "left": left, "width": width}
                draw_bar(axes, colour, hatch=hatch, hatch_colour=hatch_colour, **place)
            left += max(width, 0.0)
        if row["step_time_s"] > limit_s:
            _cut(axes, y, 0.955 * limit, limit)
        axes.annotate(
            human_seconds(row["step_time_s"]),
            (min(row["step_time_s"] / factor, limit), y),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_POINTS - 0.5,
            annotation_clip=False,
        )
    frame_bars(axes, [label for label, _ in bars], 1.005 * limit, f"time of one step ({unit})")


BAR_HIGH = 0.72


def _cut(axes: Axes, y: float, x: float, limit: float) -> None:
    """Draw a slanted gap across a bar that is longer than its axis."""
    low, high, lean, gap = y - 0.42, y + 0.42, 0.012 * limit, 0.014 * limit
    corners = [(x - lean, high), (x + lean, low), (x + lean + gap, low), (x - lean + gap, high)]
    axes.add_patch(Polygon(corners, closed=True, facecolor="white", linewidth=0, zorder=3))
    for start in (0.0, gap):
        line = ((x - lean + start, x + lean + start), (high, low))
        axes.plot(*line, color="0.2", linewidth=0.9, zorder=4, scalex=False, scaley=False)


def _words(panels: Mapping[Place, Bars], layout: Layout) -> str:
    fastest = []
    for place, bars in panels.items():
        setting, (label, row) = layout.setting_label(place), bars[0]
        parts, step_s = parts_of(row), row["step_time_s"] or 1.0
        waits = f", and {parts[IMBALANCE] / step_s:.0%} is {IMBALANCE}" if parts[IMBALANCE] > 0.005 * step_s else ""
        fastest.append(
            f"{f'{setting}: ' if setting else ''}{label}, {human_seconds(row['step_time_s'])}, of which "
            f"{parts[COMMUNICATION] / step_s:.0%} is exposed communication{waits}"
        )
    return f"Stacked bars of the predicted step time by phase, a bar for each plan. Fastest: {'; '.join(fastest)}."
