"""Heat map over bandwidth and threshold: speed-up of the fastest thresholded plan over the fastest dense plan."""

from collections.abc import Mapping, Sequence
from math import inf, log
from types import MappingProxyType
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from analysis.charts.drawing import LABEL_POINTS, STYLE, Chart, add_axes, label_width_in, plain, wrapped
from analysis.charts.sweeps.panels import Size, sheet, subset_note, threshold_words
from analysis.study.findings import percentage
from analysis.sweep_tables import (
    BANDWIDTH,
    Layout,
    Place,
    Row,
    SweepTable,
    Winner,
    by_setting,
    evenly_spaced,
    is_compressed,
    is_control,
    is_dense,
    layout_of,
    representative,
    shown,
    thresholds,
    winner,
)

TITLE = "Who wins by bandwidth and density: a threshold or dense training?"
ROWS = "threshold:\ngradients pushed"
HEAD_POINTS = LABEL_POINTS - 1
CELL_IN, ROW_IN, MOST_COLUMNS, MOST_PANELS, MOST_ROWS, MOST_PAGES = 0.92, 0.46, 12, 6, 14, 4
MOST_SAID = 16
"""Most columns that are described in the text alternative."""
ALL = ", all"
"""Suffix of a method that is faster without a threshold than with one."""
EVEN_COLOUR = (0.93, 0.93, 0.93)
DEEPEST_RATIO = 3.0
"""Speed-up with the darkest colour."""
EVEN_RATIO = 1.02
"""Speed-ups below this count as equal."""
SPARSE_COLOUR, DENSE_COLOUR = (0.902, 0.624, 0.0), (0.337, 0.706, 0.914)
"""Okabe & Ito 2008: orange and sky blue; hatching distinguishes them in grey."""


def who_wins(table: SweepTable) -> list[Chart]:
    """Return maps of the winners: columns are bandwidths, and settings where none varies; rows are thresholds.

    Clusters of different topologies have differently named links, each an axis with maps of its own.
    """
    axes = [key for key in table.axes if key.endswith(BANDWIDTH)]
    charts: list[Chart] = []
    for axis in axes:
        charts += _by_rate(table, axis, first=len(charts))
    others = [row for row in table.fitting if all(row[axis] is None for axis in axes)]
    return charts + _by_setting(table, others, first=len(charts))


def _by_rate(table: SweepTable, axis: str, *, first: int) -> list[Chart]:
    """Return the maps of the rows with a value on a bandwidth axis, numbered from `first`."""
    layout, columns = layout_of(table, without=[axis]), Layout((axis,), ())
    cells_of: dict[Place, Cells] = {}
    rates: dict[Place, int] = {}
    for place, rows in by_setting([row for row in table.fitting if row[axis] is not None], layout).items():
        cells = sorted(_with_both(rows, columns).items(), key=lambda cell: float(str(cell[0][0])))
        if cells:
            cells_of[place] = dict(evenly_spaced(cells, MOST_COLUMNS))
            rates[place] = len(cells)
    chosen = representative(list(cells_of), MOST_PANELS * MOST_PAGES)
    maps = [(place, cells_of[place]) for place in chosen]
    return _pages(maps, layout, columns, subset_note(len(chosen), len(cells_of)), first=first, rates=rates)


def _by_setting(table: SweepTable, rows: Sequence[Row], *, first: int) -> list[Chart]:
    """Return the maps of rows without a varying bandwidth, numbered from `first`."""
    layout = layout_of(table)
    cells = _with_both(rows, layout)
    chosen = representative(list(cells), MOST_COLUMNS * MOST_PANELS * MOST_PAGES)
    maps = [
        ((), {place: cells[place] for place in chosen[i : i + MOST_COLUMNS]})
        for i in range(0, len(chosen), MOST_COLUMNS)
    ]
    return _pages(maps, layout, layout, subset_note(len(chosen), len(cells)), first=first)


Cells = dict[Place, list[Row]]
"""Rows by column of a map."""
Map = tuple[Place, Cells]


def _with_both(rows: Sequence[Row], columns: Layout) -> Cells:
    """Return the columns that have both thresholded and dense plans."""
    return {
        place: members
        for place, members in by_setting(rows, columns).items()
        if thresholds(members) and any(is_dense(row) for row in members)
    }


def _pages(
    maps: Sequence[Map],
    layout: Layout,
    columns: Layout,
    note: str,
    *,
    first: int,
    rates: Mapping[Place, int] = MappingProxyType({}),
) -> list[Chart]:
    """Return a chart for every `MOST_PANELS` maps; none for fewer than two columns in all.

    `rates`: number of bandwidths of each map, of which the map may show fewer.
    """
    if sum(len(cells) for _, cells in maps) < 2:
        return []
    pages = [list(maps[i : i + MOST_PANELS]) for i in range(0, len(maps), MOST_PANELS)]
    charts = []
    for number, page in enumerate(pages):
        name = "who_wins" + (f"-{first + number + 1}" if first + number else "")
        most = max(rates.get(place, 0) for place, _ in page)
        where = f" At most {MOST_COLUMNS} of {most} bandwidths, evenly spaced." if most > MOST_COLUMNS else ""
        where += note + (f" Page {number + 1} of {len(pages)}." if len(pages) > 1 else "")
        charts.append(_chart(name, page, layout, columns, where))
    return charts


def _chart(name: str, maps: list[Map], layout: Layout, columns: Layout, where: str) -> Chart:
    rows = [row for _, cells in maps for members in cells.values() for row in members]
    levels = evenly_spaced(thresholds(rows), MOST_ROWS)
    widest = max(len(cells) for _, cells in maps)
    labels_in = max(label_width_in(_level(rows, level)) for level in levels)
    names = {place: _head(columns, place) for _, cells in maps for place in cells}
    words = {word for name in names.values() for word in name.split()}
    longest_in = max((label_width_in(word) for word in words), default=0.0) * HEAD_POINTS / LABEL_POINTS
    cell_in = max(CELL_IN, longest_in + 0.1)
    heads = {place: wrapped(name, cell_in - 0.06, HEAD_POINTS) for place, name in names.items()}
    size = Size(
        cell_in * widest,
        ROW_IN * len(levels),
        left=max(labels_in, label_width_in(ROWS.splitlines()[-1])) + 0.25,
        right=0.3,
        above=0.55,
        below=0.65 + 0.14 * max(map(len, heads.values())),
    )
    note = _note(maps, levels) + where
    with mpl.rc_context(STYLE | {"hatch.linewidth": 0.6}):
        titles = [layout.setting_label(place) if columns is not layout else "" for place, _ in maps]
        across = 2 if 2 * (size.left + size.wide + size.right) < 15 else 1
        figure, boxes = sheet(titles, size, across=across, heading=TITLE, note=note, legend=_legend(maps, levels))
        for (left, bottom, _, high), (_, cells) in zip(boxes, maps, strict=True):
            axes = add_axes(figure, (left, bottom, cell_in * len(cells), high))
            label = "bandwidth of the links" if columns is not layout else "setting"
            _panel(axes, cells, levels, [heads[place] for place in cells], label)
    return Chart(name, TITLE, figure, _words(maps, layout, columns))


def _note(maps: Sequence[Map], levels: Sequence[float]) -> str:
    """Return the explanation below the title of these maps."""
    controlled = any(is_control(row) for _, cells in maps for members in cells.values() for row in members)
    compressed = any(is_compressed(row) for _, cells in maps for members in cells.values() for row in members)
    dense = [_dense_name(each) for each in _won(maps, levels) if _kind(each) == "dense"]
    named = next((name for name in dense if name.endswith(ALL)), None)
    return (
        "Predicted. Each cell: the fastest plan, and its speed as a multiple of that of the other kind's fastest. "
        "Row: threshold, and off-shard gradients it lets through. Change of loss: not measured; a prediction has none. "
        + (
            "Control: nothing is pushed; where it is as fast, the push costs nothing."
            if controlled
            else "No control here."
        )
        + ("" if named is None else f" {named}: without a threshold.")
        + (" Left out: compressed and periodic plans, which are not dense either." if compressed else "")
    )


def _level(rows: Sequence[Row], level: float) -> str:
    """Return the label of a map's row: the threshold and the range of its densities."""
    ratios = [row["push_density_ratio"] for row in rows if row.get("plan.push.threshold") == level]
    densities = sorted(
        {percentage(density) for density in ratios if density is not None}, key=lambda text: float(text[:-2])
    )
    span = densities[0] if len(densities) == 1 else f"{densities[0][:-2]} to {densities[-1]}"
    return f"{threshold_words(level)}{' (control)' if level == inf else ''}: {span}"


def _head(columns: Layout, place: Place) -> str:
    if len(columns.settings) == 1 and columns.settings[0].endswith(BANDWIDTH):
        return shown(columns.settings[0], place[0])
    return columns.setting_label(place).replace("-", " ")


def _panel(
    axes: Axes, cells: dict[Place, list[Row]], levels: Sequence[float], heads: Sequence[Sequence[str]], label: str
) -> None:
    rows = [row for members in cells.values() for row in members]
    axes.set_xlim(0, len(cells))
    axes.set_ylim(len(levels), 0)
    for x, members in enumerate(cells.values()):
        for y, level in enumerate(levels):
            _cell(axes, x, y, winner(members, level))
    axes.set_xticks(
        [x + 0.5 for x in range(len(cells))], [plain("\n".join(head)) for head in heads], fontsize=HEAD_POINTS
    )
    own = {level for level in levels if any(row.get("plan.push.threshold") == level for row in rows)}
    axes.set_yticks(
        [y + 0.5 for y in range(len(levels))],
        [_level(rows, level) if level in own else threshold_words(level) for level in levels],
        fontsize=LABEL_POINTS,
    )
    axes.tick_params(length=0)
    axes.set_xlabel(label)
    # beside a single row, a rotated label would run into the note above
    beside: dict[str, Any] = {"xytext": (-4, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes.annotate(ROWS, (0, 1), xycoords="axes fraction", **beside, fontsize=LABEL_POINTS)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _cell(axes: Axes, x: int, y: int, cell: Winner | None) -> None:
    place: dict[str, Any] = {"xy": (x, y), "width": 1, "height": 1, "edgecolor": "white"}
    if cell is None:
        axes.add_patch(Rectangle(**place, facecolor="white"))
        axes.text(x + 0.5, y + 0.5, "none", ha="center", va="center", fontsize=LABEL_POINTS - 1.5, color="0.4")
        return
    kind, ratio = _kind(cell), max(cell.speed_up_ratio, 1 / cell.speed_up_ratio)
    colours = {"sparse": _shade(SPARSE_COLOUR, ratio), "dense": _shade(DENSE_COLOUR, ratio), "even": EVEN_COLOUR}
    colour = colours[kind]
    axes.add_patch(Rectangle(**place, facecolor=colour, linewidth=1.5))
    if kind == "dense":
        hatched: dict[str, Any] = {"facecolor": "none", "linewidth": 0, "hatch": "////"}
        axes.add_patch(Rectangle((x, y), 1, 1, edgecolor=(0, 0, 0, 0.22), **hatched))
    method = cell.thresholded["method"] if kind == "sparse" else _dense_name(cell)
    text = "even" if kind == "even" else f"{method}\n{_times(ratio)}"
    axes.text(
        x + 0.5,
        y + 0.5,
        text,
        ha="center",
        va="center",
        fontsize=LABEL_POINTS - 1,
        linespacing=1.05,
        bbox={"facecolor": colour, "linewidth": 0, "pad": 1.2},
    )


Kind = Literal["sparse", "dense", "even"]


def _kind(cell: Winner) -> Kind:
    """Return whether the thresholded plan is faster, the dense one, or neither."""
    ratio = cell.speed_up_ratio
    if max(ratio, 1 / ratio) < EVEN_RATIO:
        return "even"
    return "sparse" if ratio > 1 else "dense"


def _times(ratio: float) -> str:
    """Return a ratio as text, with three digits.

    >>> _times(1.0449), _times(21.0), _times(123.4)
    ('1.04 \u00d7', '21.0 \u00d7', '123 \u00d7')
    """
    return f"{ratio:.{2 if ratio < 9.995 else 1 if ratio < 99.95 else 0}f} \u00d7"


def _dense_name(cell: Winner) -> str:
    """Return the method of the fastest dense plan, marked where the thresholded one has the same method."""
    method = cell.dense["method"]
    return f"{method}{ALL}" if method == cell.thresholded["method"] else str(method)


def _shade(colour: tuple[float, float, float], ratio: float) -> tuple[float, float, float]:
    """Return a colour whose saturation rises with the ratio."""
    depth = 0.25 + 0.75 * min(1.0, log(ratio) / log(DEEPEST_RATIO))
    red, green, blue = (1 - depth * (1 - part) for part in colour)
    return red, green, blue


def _won(maps: Sequence[Map], levels: Sequence[float]) -> list[Winner]:
    """Return the winners of all cells of these maps."""
    winners = [winner(members, level) for _, cells in maps for members in cells.values() for level in levels]
    return [cell for cell in winners if cell is not None]


def _legend(maps: Sequence[Map], levels: Sequence[float]) -> list[tuple[Artist, str]]:
    """Return the legend entries of the colours that occur in these maps."""
    kinds = {_kind(each) for each in _won(maps, levels)}
    entries: dict[Kind, tuple[Artist, str]] = {
        "sparse": (Patch(facecolor=SPARSE_COLOUR), "a thresholded plan is faster"),
        "dense": (
            Patch(facecolor=DENSE_COLOUR, hatch="////", edgecolor=(0, 0, 0, 0.3), linewidth=0),
            "a dense plan is faster",
        ),
        "even": (Patch(facecolor=EVEN_COLOUR), f"even: within {100 * (EVEN_RATIO - 1):.0f} %"),
    }
    return [entry for kind, entry in entries.items() if kind in kinds]


def _words(maps: list[Map], layout: Layout, columns: Layout) -> str:
    sentences = []
    for place, cells in maps:
        for cell, members in cells.items():
            known = [won for level in thresholds(members) if (won := winner(members, level)) is not None]
            best = max(known, key=lambda won: won.speed_up_ratio, default=None)
            useful = [won for won in known if not is_control(won.thresholded)]
            best = max(useful, key=lambda won: won.speed_up_ratio, default=best)
            if best is not None:
                density = percentage(best.thresholded["push_density_ratio"] or 0.0)
                label = layout.setting_label(place) if columns is not layout else ""
                where = f"{label} {_head(columns, cell)}".strip()
                sentences.append(f"{where}: at best {best.speed_up_ratio:.2f} with {density} pushed")
    return (
        "Heat map of predicted speeds, thresholded over dense plans (above 1 a threshold wins), by network and "
        "threshold. "
        f"{'; '.join(evenly_spaced(sentences, MOST_SAID))}."
    )
