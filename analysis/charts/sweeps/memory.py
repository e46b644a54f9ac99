"""Chart of peak memory by category of the device with the least headroom, for each plan, against its capacity."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.charts.drawing import (
    BYTE_UNITS,
    LABEL_POINTS,
    STYLE,
    Chart,
    draw_bar,
    plain,
    unit_for,
)
from analysis.charts.sweeps.panels import bar_sheet, frame_bars, listed, subset_note, swatch
from analysis.sweep_tables import (
    FITS,
    THRESHOLD,
    Layout,
    Place,
    Row,
    SweepTable,
    by_plan,
    by_setting,
    layout_of,
    representative,
)
from gssim.result import CATEGORIES
from gssim.units import human_bytes

TITLE = "What fills the tightest device's memory, and how much is left?"
PANEL_IN, MOST_PANELS, MOST_BARS = 4.2, 8, 16
BEYOND_RATIO = 3.0
"""Capacities above this multiple of the needed memory are written, not drawn, to keep the bars long enough."""
SAME_RATIO = 0.01
"""Relative difference up to which memory counts as equal."""
SMALL_RATIO = 0.03
"""Categories below this fraction of every bar are summed up as `other`."""
OTHER = "other"
OUTSIDE = "outside"
UNUSED = "unused"
WORDS = {
    OUTSIDE: "outside the allocator",
    UNUSED: "reserved, not allocated",
    OTHER: "smaller ones together",
}
# Neighbours differ in lightness and in hatching. Colours: Okabe & Ito 2008, "Color Universal Design", and lighter ones.
LOOKS = {
    "parameters": ("#0072B2", ""),
    "master_copy": ("#9CCBEB", "\\\\\\\\"),
    "gathered_parameters": ("#56B4E9", "...."),
    "gradients": ("#D55E00", "////"),
    "buckets": ("#F5C9A0", "xxxx"),
    "optimizer": ("#009E73", "----"),
    "outer_parameters": ("#7FCDB5", "\\\\\\\\"),
    "outer_momentum": ("#BFE6DA", "...."),
    "activations": ("#F0E442", ""),
    "temporaries": ("#E69F00", "||||"),
    "communication": ("#CC79A7", "oo"),
    "residuals": ("#882255", "++++"),
    "low_rank_factors": ("#C48BA9", "\\\\"),
    "scratch": ("#C9A6BC", "//"),
    "input": ("#DDDDDD", "\\\\"),
    "buffers": ("#999999", ".."),
    "workspace": ("#777777", "xx"),
    "rounding": ("#BBBBBB", "--"),
    OUTSIDE: ("#222222", ""),
    UNUSED: ("#EEEEEE", "||"),
    OTHER: ("#FFFFFF", ""),
}
DARK = {"parameters", "gradients", "optimizer", "residuals", OUTSIDE, "workspace"}


def memory_by_category(table: SweepTable) -> Chart | None:
    """Return a panel for each setting, a bar for each plan: of several thresholds the one that needs most memory.

    Settings with equal memory are merged: they mostly differ in the rate of a network.
    """
    known = [row for row in table.answered if row.get("capacity_bytes") is not None]
    if not known:
        return None
    layout = layout_by_memory(known, layout_of(table))
    settings = by_setting(known, layout)
    chosen = {place: settings[place] for place in representative(list(settings), MOST_PANELS)}
    bars = {place: _bars(rows, layout) for place, rows in chosen.items()}
    shown = _shown([row for rows in bars.values() for _, row in rows])
    texts = [[(label, _needed(row)) for label, row in rows] for rows in bars.values()]
    note = (
        "Predicted: each plan's rank that has least to spare, at its peak; of several thresholds (and networks, "
        "where they are not shown apart) the one that needs most. "
        f"Thick line: what the device has, where that is not more than {BEYOND_RATIO:g} times what is needed. In "
        "bold: what does not fit." + subset_note(len(chosen), len(settings))
    )
    with mpl.rc_context(STYLE):
        titles = [layout.setting_label(place) for place in chosen]
        figure, every = bar_sheet(titles, texts, PANEL_IN, heading=TITLE, note=note, legend=_legend(bars, shown))
        for axes, rows in zip(every, bars.values(), strict=True):
            _panel(axes, rows, shown)
    return Chart("memory_by_category", TITLE, figure, _words(bars, layout))


def layout_by_memory(rows: Sequence[Row], layout: Layout) -> Layout:
    """Return the layout without those columns of settings that change no plan's memory by more than `SAME_RATIO`."""
    kept = list(layout.settings)
    for column in layout.settings:
        rest = [other for other in kept if other != column]
        needs: dict[Place, list[float]] = {}
        for row in rows:
            place = (*(row.get(each) for each in (*rest, "variant", THRESHOLD)), *layout.plan_of(row))
            needs.setdefault(place, []).append(row["capacity_bytes"] - row["margin_bytes"])
        if column != "group" and all(max(each) <= (1 + SAME_RATIO) * min(each) for each in needs.values()):
            kept = rest
    return Layout(tuple(kept), layout.plans)


def _bars(rows: Sequence[Row], layout: Layout) -> list[tuple[str, Row]]:
    """Return (label, row) of each plan, in order of decreasing headroom."""
    bars = [
        (layout.plan_label(place), min(members, key=lambda row: row["margin_bytes"]))
        for place, members in by_plan(rows, layout).items()
    ]
    bars.sort(key=lambda bar: -bar[1]["margin_bytes"])
    return bars[-MOST_BARS:]


def parts_of(row: Row) -> dict[str, float]:
    """Return the bytes of the tightest device by category; their sum is its capacity less the headroom."""
    parts = {category: float(row.get(f"tightest_{category}_bytes") or 0.0) for category in CATEGORIES}
    outside = float(row.get("tightest_outside_bytes") or 0.0)
    needed = row["capacity_bytes"] - row["margin_bytes"]
    return parts | {OUTSIDE: outside, UNUSED: max(0.0, needed - sum(parts.values()) - outside)}


def _shown(rows: Sequence[Row]) -> list[str]:
    """Return the categories that are drawn separately, in the order of `LOOKS`."""
    largest = dict.fromkeys(LOOKS, 0.0)
    for row in rows:
        parts = parts_of(row)
        whole = sum(parts.values()) or 1.0
        for category, size in parts.items():
            largest[category] = max(largest[category], size / whole)
    return [category for category in LOOKS if largest[category] > SMALL_RATIO]


def _panel(axes: Axes, bars: Sequence[tuple[str, Row]], shown: Sequence[str]) -> None:
    needed, near = [sum(parts_of(row).values()) for _, row in bars], _near(bars)
    longest = max([*needed, *near])
    unit, factor = unit_for(longest, BYTE_UNITS)
    for y, (_, row) in enumerate(bars):
        left = 0.0
        for category, size in _drawn(row, shown).items():
            colour, hatch = LOOKS[category]
            hatch_colour = "white" if category in DARK else "0.25"
            place = {"y": y, "height": 0.72, "left": left, "width": size / factor}
            draw_bar(axes, colour, hatch=hatch, hatch_colour=hatch_colour, **place)
            left += size / factor
        capacity = row["capacity_bytes"]
        if capacity in near:
            axes.plot([capacity / factor] * 2, [y - 0.48, y + 0.48], color="black", linewidth=3, zorder=5)
        fits = row["status"] == FITS
        axes.annotate(
            plain(_needed(row)),
            (1.0, y),
            (6, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_POINTS - 0.5,
            fontweight="normal" if fits else "bold",
            annotation_clip=False,
        )
    frame_bars(axes, [label for label, _ in bars], 1.03 * longest / factor, f"memory ({unit})")


def _near(bars: Sequence[tuple[str, Row]]) -> list[float]:
    """Return the capacities that are drawn."""
    most = BEYOND_RATIO * max(sum(parts_of(row).values()) for _, row in bars)
    return [row["capacity_bytes"] for _, row in bars if row["capacity_bytes"] <= most]


def _needed(row: Row) -> str:
    """Return needed memory and capacity of the tightest device, as text."""
    needed = row["capacity_bytes"] - row["margin_bytes"]
    return f"{human_bytes(needed)} of {human_bytes(row['capacity_bytes'])}, {row['tightest_device']}"


def _drawn(row: Row, shown: Sequence[str]) -> dict[str, float]:
    """Return the segments of a bar, from left to right."""
    parts = parts_of(row)
    sizes = {category: parts[category] for category in shown}
    sizes[OTHER] = sum(parts.values()) - sum(sizes.values())
    least = 1e-9 * sum(parts.values())  # less is a rounding error
    return {category: size for category, size in sizes.items() if size > least}


def _legend(panels: Mapping[Place, Sequence[tuple[str, Row]]], shown: Sequence[str]) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = []
    occurring = {category for bars in panels.values() for _, row in bars for category in _drawn(row, shown)}
    for category in [each for each in LOOKS if each in occurring]:
        patch = swatch(*LOOKS[category], dark=category in DARK)
        entries.append((patch, WORDS.get(category, category.replace("_", " "))))
    if any(_near(bars) for bars in panels.values()):
        entries.append((Line2D([], [], color="black", linewidth=3), "memory of the device"))
    return entries


def _words(bars: dict[Place, list[tuple[str, Row]]], layout: Layout) -> str:
    rows = [(place, label, row) for place, members in bars.items() for label, row in members]
    lacking = [
        f"{layout.setting_label(place)} {label}".strip() for place, label, row in rows if row["margin_bytes"] < 0
    ]
    place, label, row = min(rows, key=lambda each: each[2]["margin_bytes"])
    parts = parts_of(row)
    largest = max(parts, key=lambda category: parts[category])
    return (
        f"Stacked bars of the predicted peak memory by category, {len(rows)} plans, beside what the device has. "
        f"Least to spare: {f'{layout.setting_label(place)}, {label}'.strip(', ')}, {human_bytes(row['margin_bytes'])} "
        "of "
        f"{human_bytes(row['capacity_bytes'])} on {row['tightest_device']}; most of it is "
        f"{WORDS.get(largest, largest.replace('_', ' '))}. "
        + (
            f"{len(lacking)} plan{'s do' if len(lacking) > 1 else ' does'} not fit: {listed(lacking)}."
            if lacking
            else "All fit."
        )
    )
