"""Charts of step time against memory and against cost, with the Pareto fronts of dense and of all plans."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.charts.drawing import (
    BYTE_UNITS,
    STYLE,
    TIME_UNITS,
    Chart,
    add_axes,
    in_order,
    label_width_in,
    mark,
    place_labels,
    unit_for,
)
from analysis.charts.sweeps.panels import (
    CONTROL,
    NO_CONTROL,
    Look,
    Size,
    density_words,
    looks_of,
    points_only,
    sheet,
    subset_note,
    threshold_words,
    value_axis,
)
from analysis.sweep_tables import (
    THRESHOLD,
    Layout,
    Place,
    Row,
    SweepTable,
    by_plan,
    by_setting,
    front,
    is_compressed,
    is_control,
    is_dense,
    is_thresholded,
    layout_of,
    peak_bytes,
    representative,
)

SIZE = Size(wide=3.9, high=3.1, left=0.9, right=0.5, below=0.75)
RESERVED = " Peak memory is what PyTorch's caching allocator reserves; the CUDA context is not counted."
MOST_PANELS = 9
MOST_LABELS = 7
MOST_LOOKS = 12
"""Most plans that have a mark and a line of the legend each. More, as a search has, are marked by their method, and the
legend names those on the front, by number."""
DENSE_LINE: dict[str, Any] = {"color": "0.35", "linewidth": 1.3, "linestyle": "-"}
SPARSE_LINE: dict[str, Any] = {"color": "0.35", "linewidth": 1.1, "linestyle": ":"}

Of = Callable[[Row], float]


@dataclass(frozen=True)
class Price:
    """The second axis of a front: memory or cost."""

    name: str
    title: str
    label: str
    of: Callable[[Row], float | None]
    units: tuple[tuple[str, float], ...]


PRICES = (
    Price(
        "time_and_memory", "Which plans are fastest for the memory they take?", "peak memory", peak_bytes, BYTE_UNITS
    ),
    Price(
        "time_and_cost",
        "Which plans are fastest for what a step costs?",
        "cost of a step",
        lambda row: row.get("cost_usd_per_step"),
        (("USD", 1.0), ("thousandths of a USD", 1e-3), ("millionths of a USD", 1e-6)),
    ),
)


def fronts(table: SweepTable) -> list[Chart]:
    """Return a chart for each price that the table has."""
    return [chart for price in PRICES if (chart := _chart(table, price)) is not None]


def _chart(table: SweepTable, price: Price) -> Chart | None:
    layout = layout_of(table)
    known = [row for row in table.fitting if price.of(row) is not None]
    settings = {
        place: rows
        for place, rows in by_setting(known, layout).items()
        if len(rows) > 1 and not _follows_from_time(rows, price)
    }
    chosen = {place: settings[place] for place in representative(list(settings), MOST_PANELS)}
    if not chosen:
        return None
    looks, numbers = looks_of(table, layout), {}
    if len(looks) > MOST_LOOKS:
        looks = {layout.plan_of(row): {**mark(str(row["method"])), "linestyle": ""} for row in table.answered}
        numbers = _numbers(chosen.values(), layout, price)
    drawn = [row for rows in chosen.values() for row in rows]
    not_dense = {"thresholded": is_thresholded, "compressed or periodic": is_compressed}
    kinds = ", ".join(kind for kind, holds in not_dense.items() if any(map(holds, drawn)))
    controlled, dense = any(map(is_control, drawn)), any(map(is_dense, drawn))
    note = (
        "Predicted; plans that fit. Left and below is better. "
        + (
            f"Line: the best of the dense plans: no other is faster at a lower {price.label}."
            if dense
            else "No dense plan is among them."
        )
        + (RESERVED if price.of is peak_bytes and any(row.get("peak_reserved_bytes") for row in drawn) else "")
        + (
            f" Dotted: {kinds} plans (hollow) too, which do not exchange all gradients in every step; change of loss: "
            "not measured." + (" Asterisk: nothing is pushed." if controlled else f" {NO_CONTROL}")
            if kinds
            else ""
        )
        + (
            f" Numbers: the plans on {'a line' if kinds else 'it'}; the others are marked by their method."
            if numbers
            else ""
        )
        + subset_note(len(chosen), len(settings))
    )
    with mpl.rc_context(STYLE):
        titles = [layout.setting_label(place) for place in chosen]
        legend = _legend([row for rows in chosen.values() for row in rows], layout, looks, kinds, controlled, numbers)
        figure, boxes = sheet(titles, SIZE, across=3, heading=price.title, note=note, legend=legend)
        for box, rows in zip(boxes, chosen.values(), strict=True):
            _panel(add_axes(figure, box), rows, layout, looks, price, numbers)
    return Chart(price.name, price.title, figure, _words(chosen, layout, price))


def _follows_from_time(rows: Sequence[Row], price: Price) -> bool:
    """Return whether a cost is that of equally many equal devices, so that the fastest plan is the cheapest one too."""
    if price.of is peak_bytes:
        return False
    per_s = [price_of(row, price) / row["step_time_s"] for row in rows if row["step_time_s"]]
    return bool(per_s) and max(per_s) <= min(per_s) * (1 + 1e-6)


def price_of(row: Row, price: Price) -> float:
    """Return the price of a row that has one."""
    value = price.of(row)
    assert value is not None
    return value


def _fronts(rows: Sequence[Row], x: Of, y: Of) -> tuple[list[Row], list[Row]]:
    """Return the plans on the front of dense plans, and on that of all but controls."""
    useful = [row for row in rows if not (is_control(row) and is_thresholded(row))]
    return front([row for row in rows if is_dense(row)], x, y), front(useful, x, y)


def _numbers(panels: Iterable[Sequence[Row]], layout: Layout, price: Price) -> dict[Place, int]:
    """Return a number for each plan that is on a front, the fastest first."""
    numbers: dict[Place, int] = {}
    for rows in panels:
        fronts = _fronts(rows, lambda row: float(row["step_time_s"]), lambda row: price_of(row, price))
        for row in sorted(chain(*fronts), key=lambda row: row["step_time_s"]):
            numbers.setdefault(layout.plan_of(row), len(numbers) + 1)
    return numbers


def _panel(
    axes: Axes,
    rows: Sequence[Row],
    layout: Layout,
    looks: dict[Place, Look],
    price: Price,
    numbers: Mapping[Place, int],
) -> None:
    time_unit, second = unit_for(max(row["step_time_s"] for row in rows), TIME_UNITS)
    unit, factor = unit_for(max(price_of(row, price) for row in rows), price.units)

    def x(row: Row) -> float:
        return float(row["step_time_s"]) / second

    def y(row: Row) -> float:
        return price_of(row, price) / factor

    value_axis(axes, [x(row) for row in rows], y=False, zero=False)
    value_axis(axes, [y(row) for row in rows], zero=False)
    dense_front, whole_front = _fronts(rows, x, y)
    for line, members in ((DENSE_LINE, dense_front), (SPARSE_LINE, whole_front)):
        if members:
            axes.plot(*_steps([(x(row), y(row)) for row in members], axes), zorder=1.5, **line)
    on_top = {id(row) for row in (*dense_front, *whole_front)}
    for row in sorted(rows, key=lambda row: (is_dense(row), id(row) in on_top)):
        look = looks[layout.plan_of(row)]
        if is_control(row) and is_thresholded(row):
            axes.plot(x(row), y(row), zorder=3, **CONTROL)
        elif is_dense(row):
            axes.plot(x(row), y(row), zorder=4, **points_only(look, markeredgecolor="white"))
        else:
            axes.plot(x(row), y(row), zorder=3, **points_only(look, markerfacecolor="white", markersize=6))
    named = [*dense_front, *(row for row in whole_front if not is_dense(row))]
    if numbers:
        points = [(x(row), y(row)) for row in named]
        texts = [str(numbers[layout.plan_of(row)]) for row in named]
        place_labels(axes, points, texts, [(x(row), y(row)) for row in rows], fontsize=9, fontweight="bold")
    else:
        _labels(axes, rows, named, layout, x, y)
    axes.set_xlabel(f"step time ({time_unit})")
    axes.set_ylabel(f"{price.label} ({unit})")
    axes.grid(color="0.9", linewidth=0.6)


def _steps(points: Sequence[tuple[float, float]], axes: Axes) -> tuple[list[float], list[float]]:
    """Return the corners of a front's step line, from edge to edge of the panel."""
    xs, ys = [points[0][0]], [axes.get_ylim()[1]]
    for x, y in points:
        xs += [x, x]
        ys += [ys[-1], y]
    return [*xs, axes.get_xlim()[1]], [*ys, ys[-1]]


def _labels(axes: Axes, rows: Sequence[Row], named: Sequence[Row], layout: Layout, x: Of, y: Of) -> None:
    """Label the plans on the fronts; of a plan's thresholds only the fastest, with its density.

    Long names, such as those of a search's plans, have no room in a panel: the legend has them.
    """
    fastest: dict[tuple[Place, bool], Row] = {}
    for row in named:
        fastest.setdefault((layout.plan_of(row), is_dense(row)), row)
    shown = list(fastest.values())[:MOST_LABELS]
    texts = [_label(row, layout.plan_label(layout.plan_of(row))) for row in shown]
    short = [(row, text) for row, text in zip(shown, texts, strict=True) if label_width_in(text) < SIZE.wide / 2]
    points = [(x(row), y(row)) for row, _ in short]
    place_labels(axes, points, [text for _, text in short], [(x(row), y(row)) for row in rows])


def _label(row: Row, name: str) -> str:
    if not is_thresholded(row):
        return name
    threshold = row.get(THRESHOLD)
    at = "" if threshold is None else f" {threshold_words(threshold)}"
    return f"{name}{at}: {density_words(row)}"


def _legend(
    rows: Sequence[Row],
    layout: Layout,
    looks: dict[Place, Look],
    kinds: str,
    controlled: bool,
    numbers: Mapping[Place, int],
) -> list[tuple[Artist, str]]:
    """Return the legend: plans, or, where they are numbered, methods and, in the end, the numbered plans."""
    plans = by_plan(rows, layout)
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], **points_only(looks[place])), layout.plan_label(place)) for place in plans if not numbers
    ]
    if numbers:
        methods = in_order([str(row["method"]) for row in rows])
        entries = [(Line2D([], [], **points_only({**mark(method), "linestyle": ""})), method) for method in methods]
    if any(map(is_dense, rows)):
        entries.append((Line2D([], [], **DENSE_LINE), "best of the dense plans"))
    if kinds:
        hollow: dict[str, Any] = {"marker": "o", "linestyle": "", "color": "0.3", "markerfacecolor": "white"}
        entries.append((Line2D([], [], **SPARSE_LINE), "best of all"))
        entries.append((Line2D([], [], **hollow), kinds))
    if controlled:
        entries.append((Line2D([], [], **CONTROL), "nothing pushed (control)"))
    for place, number in numbers.items():
        look: Look = {"marker": f"$\\mathbf{{{number}}}$", "markersize": 6 if number < 10 else 9, "markeredgewidth": 0}
        handle = Line2D([], [], linestyle="", color="0.1", **look)
        entries.append((handle, layout.plan_label(place)))
    return entries


def _words(settings: dict[Place, list[Row]], layout: Layout, price: Price) -> str:
    fronts = []
    for place, rows in settings.items():  # no more than `MOST_PANELS`
        dense = front(
            [row for row in rows if is_dense(row)], lambda row: row["step_time_s"], lambda r: price_of(r, price)
        )
        names = list(dict.fromkeys(layout.plan_label(layout.plan_of(row)) for row in dense))
        label = layout.setting_label(place)
        fronts.append(f"{f'{label}: ' if label else ''}{', '.join(names) or 'no dense plan'}")
    return (
        f"Scatter chart, {len(settings)} panel{'s' if len(settings) > 1 else ''}: predicted step time against "
        f"{price.label}. "
        f"Dense plans on the front, fastest first: {'; '.join(fronts)}."
    )
