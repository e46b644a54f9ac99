"""Chart of step times by phase: for each setting, a bar for each plan, on one axis."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.charts.drawing import (
    LABEL_POINTS,
    STYLE,
    TIME_UNITS,
    Chart,
    draw_bar,
    unit_for,
)
from analysis.charts.step_phases import DARK_PHASES, PHASE_COLOURS
from analysis.charts.sweeps.panels import bar_sheet, frame_bars, subset_note, threshold_words
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
HATCHES = {
    "forward": "",
    "backward": "////",
    "compression": "..",
    "optimizer": "||||",
    "exposed_communication": "xx",
    "idle": "",
}

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
    longest_s = max(row["step_time_s"] for bars in panels.values() for _, row in bars)
    texts = [[(label, human_seconds(row["step_time_s"])) for label, row in bars] for bars in panels.values()]
    fewer = any(len(by_plan(members, layout)) > MOST_BARS for members in chosen.values())
    note = (
        "Predicted; plans that fit, the fastest first. Phases are means over ranks; exposed communication is what "
        "compute waits for: messages, and slower ranks."
        + (" All panels have the same axis." if len(chosen) > 1 else "")
        + (" What thresholds change of the loss: not measured." if any(map(is_thresholded, rows)) else "")
        + (f" The {MOST_BARS} fastest plans of a setting." if fewer else "")
        + subset_note(len(chosen), len(settings))
    )
    shown = [phase for phase in PHASES if any(row.get(f"{phase}_s") for bars in panels.values() for _, row in bars)]
    with mpl.rc_context(STYLE):
        titles = [layout.setting_label(place) for place in chosen]
        figure, every = bar_sheet(titles, texts, PANEL_IN, heading=TITLE, note=note, legend=_legend(shown))
        for axes, bars in zip(every, panels.values(), strict=True):
            _panel(axes, bars, longest_s)
    return Chart("step_time_by_plan", TITLE, figure, _words(panels, layout))


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


def _panel(axes: Axes, bars: Bars, longest_s: float) -> None:
    unit, factor = unit_for(longest_s, TIME_UNITS)
    for y, (_, row) in enumerate(bars):
        left = 0.0
        for phase in PHASES:
            width = (row.get(f"{phase}_s") or 0.0) / factor
            if width > 0:
                hatch_colour = "white" if phase in DARK_PHASES else "0.25"
                place = {"y": y, "height": 0.72, "left": left, "width": width}
                draw_bar(axes, PHASE_COLOURS[phase], hatch=HATCHES[phase], hatch_colour=hatch_colour, **place)
            left += width
        axes.annotate(
            human_seconds(row["step_time_s"]),
            (row["step_time_s"] / factor, y),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_POINTS - 0.5,
            annotation_clip=False,
        )
    frame_bars(axes, [label for label, _ in bars], 1.005 * longest_s / factor, f"time of one step ({unit})")


def _legend(shown: Sequence[str]) -> list[tuple[Artist, str]]:
    return [
        (
            Patch(
                facecolor=PHASE_COLOURS[phase],
                edgecolor="white" if phase in DARK_PHASES and HATCHES[phase] else "0.25",
                hatch=HATCHES[phase],
                linewidth=0.6,
            ),
            phase.replace("_", " "),
        )
        for phase in shown
    ]


def _words(panels: Mapping[Place, Bars], layout: Layout) -> str:
    firsts = [(layout.setting_label(place), *bars[0]) for place, bars in panels.items()]
    said = "; ".join(
        f"{f'{setting}: ' if setting else ''}{label}, {human_seconds(row['step_time_s'])}, of which "
        f"{(row.get('exposed_communication_s') or 0.0) / (row['step_time_s'] or 1.0):.0%} is exposed communication"
        for setting, label, row in firsts
    )
    return f"Stacked bars of the predicted step time by phase, a bar for each plan. Fastest: {said}."
