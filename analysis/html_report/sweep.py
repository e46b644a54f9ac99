"""The report's parts on a sweep: points that fit, fastest plans by setting, bottlenecks, charts."""

from collections import Counter
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from analysis.charts.drawing import Chart
from analysis.charts.sweeps import sweep_charts
from analysis.charts.sweeps.panels import density_words, threshold_words
from analysis.html_report.explorer import busiest_link, longest_part, sweep_explorer
from analysis.html_report.markup import Cell, Column, Part, figure, folded, paragraph, seconds, size, table
from analysis.sweep_tables import (
    THRESHOLD,
    Layout,
    Place,
    Row,
    SweepTable,
    best_gain,
    by_setting,
    evenly_spaced,
    fastest,
    is_compressed,
    is_control,
    is_dense,
    is_thresholded,
    layout_of,
    peak_bytes,
    representative,
)
from gssim.units import counted

MOST_SETTINGS = 40
NAMED_SETTINGS = 6
"""Largest number of settings whose fastest plans the summary names."""
NAMED_PLANS = 4
"""Largest number of plans for which the summary counts the settings where they are the fastest."""
MOST_ROWS = 200
MOST_REASONS = 10


def sweep_parts(found: SweepTable, *, several: bool) -> list[Part]:
    """Return the parts of the report for a sweep; `several`: titles name the sweep, as the report has more than one."""
    layout = layout_of(found)
    name = f": {found.name}" if several else ""
    drawn = sweep_charts(found)
    charts = tuple(Part(title, figure(chart)) for title, chart in zip(_titles(drawn), drawn, strict=True))
    parts = [Part(f"What the {found.kind} found{name}", _tables(found, layout))]
    parts += sweep_explorer(found, name=name)
    if charts:
        parts.append(Part(f"Charts of the {found.kind}{name}", parts=charts))
    if found.fitting:
        parts.append(Part(f"Bottlenecks of the {found.kind}{name}", _bottlenecks(found, layout)))
    return parts


def _titles(charts: Sequence[Chart]) -> list[str]:
    """Return the headings of charts; those of several pages of one kind are numbered."""
    pages, before = Counter(chart.title for chart in charts), Counter[str]()
    titles = []
    for title in (chart.title for chart in charts):
        before[title] += 1
        titles.append(f"{title} ({before[title]} of {pages[title]})" if pages[title] > 1 else title)
    return titles


def summary(sweep: SweepTable) -> list[str]:
    """Return the summary of a sweep in sentences."""
    counts = Counter(row["status"] for row in sweep.rows)
    rest = "; ".join(f"{n:,} {status}" for status, n in counts.items() if status != "fits")
    varied = [axis for axis in sweep.axes if len({row[axis] for row in sweep.rows}) > 1]
    differ = f" They differ in {', '.join(varied)}." if varied else ""
    sentences = [f"{counted(len(sweep.rows), 'point')}: {counts['fits']:,} fit{f'; {rest}' if rest else ''}.{differ}"]
    layout = layout_of(sweep)
    settings = by_setting(sweep.fitting, layout)
    if len(settings) <= NAMED_SETTINGS:
        fastest = (_fastest_of(place, rows, layout) for place, rows in settings.items())
        sentences += [sentence for sentence in fastest if sentence]
    else:
        sentences += _wins(settings, layout)
    gains = [gain for rows in settings.values() if (gain := best_gain(rows))]
    if gains:
        faster = [gain for gain in gains if gain.speed_up_ratio > 1]
        best = max(gains, key=lambda gain: gain.speed_up_ratio)
        label = layout.setting_label(layout.setting_of(best.thresholded))
        where = f" in '{label}'" if label else ""
        silent = sum(is_control(row) and is_thresholded(row) for row in sweep.fitting)
        controls = f"{counted(silent, 'control')} (nothing pushed)" if silent else "No control"
        sentences.append(
            f"A threshold is predicted to be faster than the fastest dense plan in {len(faster)} of "
            f"{counted(len(gains), 'setting')}; most{where}: "
            f"{_threshold(best.thresholded, layout)} has {best.speed_up_ratio:.2f} times the speed of dense "
            f"{layout.plan_label(layout.plan_of(best.dense))}, with {density_words(best.thresholded)}. "
            f"Change of loss: not measured. {controls} among the points."
        )
    return sentences


def _wins(settings: Mapping[Place, Sequence[Row]], layout: Layout) -> list[str]:
    """Return a sentence that counts the settings by their fastest dense plan; none where no setting has two plans."""
    dense = [[row for row in rows if is_dense(row)] for rows in settings.values()]
    fastest = [min(rows, key=lambda row: row["step_time_s"]) for rows in dense if len(rows) > 1]
    wins = Counter(layout.plan_label(layout.plan_of(row)) for row in fastest).most_common()
    if not wins:
        return []
    named = ", ".join(f"{plan} in {count}" for plan, count in wins[:NAMED_PLANS])
    rest = sum(count for _, count in wins[NAMED_PLANS:])
    others = f", others in {rest}" if rest else ""
    return [f"The fastest dense plan that fits, in {counted(len(fastest), 'setting')}: {named}{others}."]


def _fastest_of(place: Place, rows: Sequence[Row], layout: Layout) -> str:
    """Return which dense plan of a setting is the fastest, in a sentence; empty where there are not two."""
    timed = sorted((row for row in rows if is_dense(row)), key=lambda row: row["step_time_s"])
    setting = layout.setting_label(place)
    where = f"{setting}: the" if setting else "The"
    if len(timed) < 2:
        return ""
    fast, slow = (layout.plan_label(layout.plan_of(row)) for row in (timed[0], timed[-1]))
    times = timed[-1]["step_time_s"] / timed[0]["step_time_s"]
    return (
        f"{where} fastest dense plan that fits is {fast}, {seconds(timed[0]['step_time_s'])} a step; the slowest, "
        f"{slow}, takes {times:.2f} times as long."
    )


FASTEST = {
    "dense": (Column("setting", False), Column("fastest dense plan", False), Column("step")),
    "thresholded": (
        Column("fastest thresholded plan", False),
        Column("step"),
        Column("density"),
        Column("speed beside dense"),
        Column("of the control"),
        Column("change of loss"),
    ),
    "compressed": (Column("fastest compressed or periodic plan", False), Column("step")),
}
"""Columns of the table of fastest plans, by kind of plan."""


def _tables(sweep: SweepTable, layout: Layout) -> Markup:
    settings = by_setting(sweep.fitting, layout)
    shown = representative(list(settings), MOST_SETTINGS)
    cells = [_fastest(layout.setting_label(place) or "all points", settings[place], layout) for place in shown]
    kinds = ["dense", *(kind for kind in ("thresholded", "compressed") if any(row[kind][0] for row in cells))]
    columns = [column for kind in kinds for column in FASTEST[kind]]
    rows = [[cell for kind in kinds for cell in row[kind]] for row in cells]
    left_out = len(settings) > len(shown)
    return Markup().join(
        [
            table("The fastest plans that fit, setting by setting", columns, rows)
            if rows
            else paragraph("No plan fits."),
            paragraph(f"{_part(shown, settings)}; all are in the table's file.", "soft") if left_out else Markup(),
            _reasons(sweep),
            folded(
                f"{MOST_ROWS} of {counted(len(sweep.rows), 'point')}, evenly spaced"
                if len(sweep.rows) > MOST_ROWS
                else f"All {counted(len(sweep.rows), 'point')}",
                _points(evenly_spaced(sweep.rows, MOST_ROWS)),
            ),
        ]
    )


def _fastest(setting: str, members: Sequence[Row], layout: Layout) -> dict[str, list[Cell]]:
    """Return the cells of a setting's row, by kind of plan; the first of a kind is empty where it has no plan."""
    dense = fastest(row for row in members if is_dense(row))
    sparse = fastest(row for row in members if is_thresholded(row) and not is_control(row))
    control = fastest(row for row in members if is_control(row) and is_thresholded(row))
    compressed = fastest(row for row in members if is_compressed(row))
    return {
        "dense": [
            setting,
            layout.plan_label(layout.plan_of(dense)) if dense else "none",
            seconds(dense["step_time_s"]) if dense else "",
        ],
        "thresholded": [
            _threshold(sparse, layout),
            seconds(sparse["step_time_s"]) if sparse else "",
            density_words(sparse) if sparse else "",
            f"{dense['step_time_s'] / sparse['step_time_s']:.2f}" if sparse and dense else "",
            f"{dense['step_time_s'] / control['step_time_s']:.2f}" if control and dense else "no control",
            "not measured" if sparse else "",
        ],
        "compressed": [
            layout.plan_label(layout.plan_of(compressed)) if compressed else "",
            seconds(compressed["step_time_s"]) if compressed else "",
        ],
    }


def _part(shown: Sequence[Place], settings: Mapping[Place, object]) -> str:
    return f"{len(shown)} of {len(settings):,} settings, spread over the sweep"


def _threshold(row: Row | None, layout: Layout) -> str:
    if row is None:
        return ""
    threshold = row.get(THRESHOLD)
    name = layout.plan_label(layout.plan_of(row))
    return name if threshold is None else f"{name} at {threshold_words(threshold)}"


def _reasons(sweep: SweepTable) -> Markup:
    """Return a table of the reasons for points without a prediction, or that do not fit."""
    reasons = Counter((row["status"], str(row["reason"] or "")) for row in sweep.rows if row["status"] != "fits")
    rows: list[list[Cell]] = [[status, reason, f"{n:,}"] for (status, reason), n in reasons.most_common(MOST_REASONS)]
    columns = [Column("status", False), Column("reason", False), Column("points")]
    return (
        table("Why points do not fit, or have no answer: the most frequent reasons", columns, rows)
        if rows
        else Markup()
    )


def _points(rows: Sequence[Row]) -> Markup:
    lines: list[list[Cell]] = [
        [
            row["point"],
            (row["status"], row["status"] != "fits"),
            row["method"] or "",
            "" if row["ranks"] is None else f"{row['ranks']:,}",
            seconds(row["step_time_s"]),
            "" if row["throughput_samples_per_s"] is None else f"{row['throughput_samples_per_s']:.4g}",
            "" if row["step_time_s"] is None else "dense" if is_dense(row) else density_words(row),
            "" if row["peak_allocated_bytes"] is None else size(peak_bytes(row)),
            "" if row["cost_usd_per_step"] is None else f"{row['cost_usd_per_step']:.3g}",
        ]
        for row in rows
    ]
    heads = ("ranks", "step", "samples/s", "density", "peak memory", "USD a step")
    columns = [
        Column("point", False),
        Column("status", False),
        Column("method", False),
        *(Column(head) for head in heads),
    ]
    return table("Points, in the order of the table", columns, lines)


def _bottlenecks(sweep: SweepTable, layout: Layout) -> Markup:
    """Return the bottlenecks of each setting's fastest plan of each kind."""
    lines: list[list[Cell]] = []
    settings = by_setting(sweep.fitting, layout)
    shown = representative(list(settings), MOST_SETTINGS)
    for place in shown:
        members = settings[place]
        for kind, row in (
            ("dense", fastest(row for row in members if is_dense(row))),
            ("thresholded", fastest(row for row in members if is_thresholded(row) and not is_control(row))),
            ("compressed or periodic", fastest(row for row in members if is_compressed(row))),
        ):
            if row is not None:
                margin = "not known"
                if row["margin_bytes"] is not None:
                    left = f"{size(row['margin_bytes'])} of {size(row['capacity_bytes'])} left"
                    margin = f"{row['tightest_device']}: {left}"
                lines.append(
                    [
                        layout.setting_label(place) or "all points",
                        f"{_threshold(row, layout)} ({kind})",
                        longest_part(row),
                        busiest_link(row),
                        margin,
                    ]
                )
    heads = ("fastest plan", "longest part of a step", "busiest link", "tightest device")
    columns = [Column("setting", False), *(Column(head, False) for head in heads)]
    found_in = paragraph(f"{_part(shown, settings)}.", "soft") if len(shown) < len(settings) else Markup()
    return table("What the fastest plans wait for, as predicted", columns, lines) + found_in
