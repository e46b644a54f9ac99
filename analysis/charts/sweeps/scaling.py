"""Chart of throughput against the number of ranks, with ideal scaling from the smallest number."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.charts.drawing import LABEL_POINTS, STYLE, Chart, add_axes
from analysis.charts.sweeps.panels import Look, Size, density_words, log_axis, looks_of, sheet, subset_note
from analysis.sweep_tables import (
    THRESHOLD,
    Layout,
    Place,
    Row,
    SweepTable,
    by_plan,
    family,
    follows,
    is_control,
    is_thresholded,
    layout_of,
    representative,
    shown,
)

TITLE = "How far does each plan scale?"
SIZE = Size(wide=3.7, high=2.4, left=0.85, right=0.35, above=0.45, below=1.95)
RATIO_IN, BETWEEN_IN = 1.1, 0.16
MOST_PANELS = 6
FEWEST_SIZES = 3
SPARSE_LINE = (0, (1, 1.2))

Line = tuple[Place, bool]
"""A plan, and whether it is thresholded."""


def scaling(table: SweepTable) -> Chart | None:
    """Return throughput by ranks, a panel for each kind of setting; None for fewer than `FEWEST_SIZES` sizes."""
    layout = layout_of(table)
    panels = _panels(table, layout)
    panels = {place: rows for place, rows in panels.items() if len({row["ranks"] for row in rows}) >= FEWEST_SIZES}
    if not panels:
        return None
    chosen = {place: panels[place] for place in representative(list(panels), MOST_PANELS)}
    titles = [_title(place, layout) for place in chosen]
    looks = looks_of(table, layout)
    sparse = any(is_thresholded(row) and not is_control(row) for rows in chosen.values() for row in rows)
    note = (
        "Predicted; plans that fit. Grey line: throughput in proportion to ranks, from the best plan at the smallest "
        "number. Below: "
        "throughput per rank, as a part of each plan's own at its smallest number."
        + (
            " Dotted, hollow: the fastest finite threshold of a plan, with the density in the legend; change of loss: "
            "not measured."
            if sparse
            else ""
        )
        + subset_note(len(chosen), len(panels), "networks")
    )
    with mpl.rc_context(STYLE):
        legend = _legend([lines_of(rows, layout) for rows in chosen.values()], layout, looks)
        figure, boxes = sheet(titles, SIZE, across=3, heading=TITLE, note=note, legend=legend)
        for (left, bottom, wide, high), rows in zip(boxes, chosen.values(), strict=True):
            lines = lines_of(rows, layout)
            _throughputs(add_axes(figure, (left, bottom, wide, high)), lines, looks)
            below = add_axes(figure, (left, bottom - BETWEEN_IN - RATIO_IN, wide, RATIO_IN))
            _efficiencies(below, lines, looks)
    return Chart("scaling", TITLE, figure, _words(dict(zip(titles, chosen.values(), strict=True)), layout))


def _panels(table: SweepTable, layout: Layout) -> dict[Place, list[Row]]:
    """Return rows by setting; of columns that determine the number of ranks, only names without numbers count."""
    panels: dict[Place, list[Row]] = {}
    sized = {
        column
        for column in layout.settings
        if follows((row for row in table.fitting if row[column] is not None), [column], "ranks")
    }
    for row in table.fitting:
        place = []
        for column in layout.settings:
            value = row[column]
            place.append(value if column not in sized else family(value) if isinstance(value, str) else None)
        panels.setdefault(tuple(place), []).append(row)
    return panels


def _title(place: Place, layout: Layout) -> str:
    words = [shown(column, value) for column, value in zip(layout.settings, place, strict=True) if value is not None]
    return ", ".join(word for word in dict.fromkeys(words) if word)


def lines_of(rows: Sequence[Row], layout: Layout) -> dict[Line, list[Row]]:
    """Return the fastest point of each plan by number of ranks, with and without a threshold; no controls."""
    lines: dict[Line, list[Row]] = {}
    for place, members in by_plan(rows, layout).items():
        for sparse in (False, True):
            same = [row for row in members if is_thresholded(row) == sparse and not (sparse and is_control(row))]
            best: dict[int, Row] = {}
            for row in same:
                before = best.get(row["ranks"])
                if before is None or row["throughput_samples_per_s"] > before["throughput_samples_per_s"]:
                    best[row["ranks"]] = row
            if best:
                lines[place, sparse] = [best[ranks] for ranks in sorted(best)]
    return lines


def _look(line: Line, looks: dict[Place, Look]) -> Look:
    place, sparse = line
    look = {**looks[place], "markersize": 6, "linewidth": 1.3}
    if sparse:
        return look | {"linestyle": SPARSE_LINE, "markerfacecolor": "white"}
    return look | {"markeredgecolor": "white", "markeredgewidth": 0.5}


def _throughputs(axes: Axes, lines: dict[Line, list[Row]], looks: dict[Place, Look]) -> None:
    every = [row for members in lines.values() for row in members]
    sizes = sorted({row["ranks"] for row in every})
    start = max(row["throughput_samples_per_s"] for row in every if row["ranks"] == sizes[0])
    axes.plot(sizes, [start * size / sizes[0] for size in sizes], color="0.75", linewidth=3, zorder=1)
    for line, members in lines.items():
        axes.plot(
            [row["ranks"] for row in members],
            [row["throughput_samples_per_s"] for row in members],
            zorder=2 + line[1],
            **_look(line, looks),
        )
    values = [*(row["throughput_samples_per_s"] for row in every), start * sizes[-1] / sizes[0]]
    limits = (min(values) / 1.3, max(values) * 1.3)
    axes.set_yscale("log")
    axes.set_ylim(limits)
    log_axis(axes.yaxis, limits)
    axes.set_ylabel("throughput (samples/s)")
    _ranks_axis(axes, sizes, labelled=False)


def _efficiencies(axes: Axes, lines: dict[Line, list[Row]], looks: dict[Place, Look]) -> None:
    sizes = sorted({row["ranks"] for members in lines.values() for row in members})
    for line, members in lines.items():
        each = [row["throughput_samples_per_s"] / row["ranks"] for row in members]
        axes.plot(
            [row["ranks"] for row in members], [100 * value / each[0] for value in each], zorder=2, **_look(line, looks)
        )
    axes.set_ylim(0, max(105.0, axes.get_ylim()[1]))
    axes.set_ylabel("per rank (%)")
    axes.set_xlabel("ranks")
    _ranks_axis(axes, sizes, labelled=True)


def _ranks_axis(axes: Axes, sizes: Sequence[int], *, labelled: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    shown_sizes = sizes if len(sizes) <= 8 else sizes[:: -(-len(sizes) // 8)]
    axes.xaxis.set_major_locator(FixedLocator(shown_sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if labelled else ""))
    axes.tick_params(axis="x", labelsize=LABEL_POINTS - 0.5)
    axes.grid(color="0.9", linewidth=0.6)


def _legend(
    panels: Sequence[dict[Line, list[Row]]], layout: Layout, looks: dict[Place, Look]
) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = []
    for line in dict.fromkeys(line for lines in panels for line in lines):
        members = [row for lines in panels for row in lines.get(line, ())]
        label = layout.plan_label(line[0])
        if line[1]:
            label += f", fastest threshold: {_densities(members)}"
        entries.append((Line2D([], [], **_look(line, looks)), label))
    return [*entries, (Line2D([], [], color="0.75", linewidth=3), "in proportion to ranks")]


def _densities(rows: Sequence[Row]) -> str:
    """Return the densities of the sparsest and the densest point, as text."""
    known = sorted((row for row in rows), key=lambda row: row["push_density_ratio"] or 0.0)
    words = list(dict.fromkeys(density_words(row) for row in (known[0], known[-1])))
    return " to ".join(words)


def _words(panels: dict[str, list[Row]], layout: Layout) -> str:
    sentences = []
    for label, rows in panels.items():
        for line, members in lines_of(rows, layout).items():
            first, last = members[0], members[-1]
            ratio = (
                last["throughput_samples_per_s"] / last["ranks"] / (first["throughput_samples_per_s"] / first["ranks"])
            )
            threshold = (
                f" at threshold {last.get(THRESHOLD):g} ({density_words(last)})"
                if line[1] and last.get(THRESHOLD)
                else ""
            )
            sentences.append(
                f"{label + ': ' if label else ''}{layout.plan_label(line[0])}{threshold} keeps {100 * ratio:.0f} % of "
                "its throughput per rank from "
                f"{first['ranks']} to {last['ranks']} ranks"
            )
    return f"Line chart of predicted throughput against ranks. {'; '.join(sentences)}."
