"""The report's parts on a comparison: errors, effects of thresholds, charts, bottlenecks."""

from collections.abc import Sequence
from math import inf
from typing import Any

from markupsafe import Markup

from analysis.charts import comparison_charts
from analysis.charts.step_phases import longest_phase
from analysis.compare.comparison import medians
from analysis.compare.groups import ALL, Target, best_in_words, error_column, targets, worst_of
from analysis.html_report.contents import Comparison
from analysis.html_report.explorer import comparison_explorer
from analysis.html_report.markup import (
    Cell,
    Column,
    Part,
    density,
    figure,
    folded,
    paragraph,
    percent,
    seconds,
    size,
    table,
)
from gssim.result import Result
from gssim.units import counted

Row = dict[str, Any]

MOST_ROWS = 25
"""Most scenarios that are all shown; of more, the worst are shown and the rest is folded."""
FAR_RATIO = 0.20
"""Step time errors above this are marked."""


def comparison_parts(comparison: Comparison) -> list[Part]:
    """Return the parts of the report for a comparison: errors, effects of thresholds, charts, bottlenecks."""
    rows = list(comparison.table.iter_rows(named=True))
    groups = list(comparison.groups.iter_rows(named=True))
    charts = tuple(
        Part(chart.title, figure(chart))
        for chart in comparison_charts(comparison.table, comparison.rivals)
        if not chart.name.startswith("phases-")  # of a large matrix, each group's phases: they are in the table
    )
    return [
        Part("How far off are the predictions?", _tables(rows, groups, comparison)),
        *([Part("What did thresholds gain, and what did they cost?", _effects(rows))] if _thresholded(rows) else []),
        *comparison_explorer(rows),
        Part("Charts of predicted beside measured", parts=charts),
        Part("Bottlenecks", _bottlenecks(rows, comparison.predicted)),
    ]


def summary(comparison: Comparison) -> list[str]:
    """Return the summary of a comparison in sentences."""
    rows = list(comparison.table.iter_rows(named=True))
    equal = sum(row["collectives_equal"] for row in rows)
    errors = "; ".join(
        f"{each.what} {percent(each.error_ratio, signed=False)} (n = {each.n})" for each in medians(comparison.table)
    )
    sentences = [
        f"{counted(len(rows), 'scenario')} predicted and measured. Median size of errors: {errors}.",
        f"Collectives are equal, as predicted and as seen, in {equal} of {len(rows)}.",
    ]
    worst = worst_of(rows, 1)
    if worst:
        sentences.append(f"Furthest off in time: {worst[0]['name']}, {percent(worst[0]['step_time_error_ratio'])}.")
    *_, whole = comparison.groups.iter_rows(named=True)
    assert whole["group"] == ALL
    if whole["choices"]:
        sentences.append(
            f"The plan predicted to be fastest is the fastest measured, but for noise, in {whole['best_right']} of "
            f"{counted(whole['choices'], 'group')}; of {counted(whole['pairs'], 'pair')} of plans that differ by more "
            "than noise, "
            f"{whole['pairs_right']} are predicted in the measured order."
        )
    return [*sentences, *(f"Doubtful: {doubt}." for doubt in comparison.doubts)]


def _tables(rows: Sequence[Row], groups: Sequence[Row], comparison: Comparison) -> Markup:
    large = len(rows) > MOST_ROWS
    parts = []
    if large or len(groups) > 2:
        parts.append(_target_table(targets(comparison.groups)))
        parts.append(_group_table(groups))
    if large:
        parts.append(_row_table("The scenarios whose step times are predicted worst", worst_of(rows)))
        parts.append(
            folded(f"All {len(rows)} scenarios", _row_table("Every scenario, predicted beside measured", rows))
        )
    else:
        parts.append(_row_table("Every scenario, predicted beside measured", rows))
    parts.append(paragraph(NOTE, "soft"))
    return Markup().join(parts)


NOTE = (
    "Errors are predicted / measured \u2212 1. Noise: half the range of repeated measurements, or of one run's "
    "halves, which is a "
    "lower bound; smaller errors cannot be shown. Peak memory is of the rank whose prediction is furthest off."
)


def _target_table(targets: Sequence[Target]) -> Markup:
    rows: list[list[Cell]] = []
    for target in targets:
        sign = "\u2265" if target.at_least else "\u2264"
        met = {True: "met", False: "not met", None: "unknown"}[target.met]
        rows.append(
            [
                target.what,
                f"{sign} {_figure(target, target.asked)}",
                "" if target.found is None else _figure(target, target.found),
                f"{target.n} {target.of}",
                (met, target.met is False),
            ]
        )
    columns = [
        Column("asked of the whole", number=False),
        Column("asked"),
        Column("found"),
        Column("of"),
        Column("", False),
    ]
    columns[-1] = Column("verdict", number=False)
    return table("What is asked of the predictions, and what is reached", columns, rows)


def _figure(target: Target, value: float) -> str:
    return percent(value, signed=False) if target.ratio else f"{value:.2f}"


def _group_table(groups: Sequence[Row]) -> Markup:
    def error(group: Row, column: str, statistic: str) -> str:
        return percent(group[error_column(column, statistic)], signed=False)

    rows: list[list[Cell]] = [
        [
            group["group"],
            str(group["n"]),
            f"{group['collectives_equal']} of {group['n']}",
            error(group, "peak_error_ratio", "max"),
            *(error(group, "step_time_error_ratio", statistic) for statistic in ("median", "p90", "max")),
            percent(group["noise_median_ratio"], signed=False),
            error(group, "naive_compute_error_ratio", "median"),
            error(group, "naive_link_error_ratio", "median"),
            "" if group["spearman"] is None else f"{group['spearman']:.2f}",
            best_in_words(group, of=" of "),
        ]
        for group in groups
    ]
    heads = (
        "scenarios", "collectives equal", "peak memory error, largest", "step time error, median", "90th percentile",
        "largest", "noise, median", "naive: compute only, median", "naive: slowest link, median", "Spearman",
    )  # fmt: skip
    columns = [Column("group", False), *(Column(head) for head in heads), Column("fastest plan predicted", False)]
    return table("Errors by group, beside the noise of measurements and naive predictions", columns, rows)


def _row_table(caption: str, rows: Sequence[Row]) -> Markup:
    heads = (
        "step predicted", "measured", "error", "noise", "peak memory predicted", "measured", "error", "collectives",
    )  # fmt: skip
    lines: list[list[Cell]] = []
    for row in rows:
        error = row["step_time_error_ratio"]
        lines.append(
            [
                row["name"],
                row["method"],
                "" if row["threshold"] is None else f"{row['threshold']:g}",
                seconds(row["step_time_predicted_s"]),
                seconds(row["step_time_measured_s"]),
                (percent(error), error is not None and abs(error) > FAR_RATIO),
                percent(row["noise_ratio"], signed=False),
                size(row["peak_predicted_bytes"]),
                size(row["peak_measured_bytes"]),
                percent(row["peak_error_ratio"]),
                "equal" if row["collectives_equal"] else ("differ", True),
            ]
        )
    columns = [
        Column("scenario", False),
        Column("method", False),
        Column("threshold"),
        *(Column(head) for head in heads),
    ]
    return table(caption, columns, lines)


def _thresholded(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["speed_up_over"] is not None]


def _effects(rows: Sequence[Row]) -> Markup:
    """Return the table of speed-ups with density, change of loss, and the control of the group."""
    thresholded = _thresholded(rows)
    controls = {row["group"]: row for row in thresholded if row["threshold"] == inf}
    lines: list[list[Cell]] = []
    for row in thresholded:
        control = controls.get(row["group"])
        lines.append(
            [
                f"{row['name']} (control)" if row["threshold"] == inf else row["name"],
                row["speed_up_over"],
                f"{row['speed_up_measured_ratio']:.2f}",
                f"{row['speed_up_predicted_ratio']:.2f}",
                density(row["push_density_measured"]),
                density(row["push_density_predicted"]),
                density(row["publish_density_measured"]),
                _change(row),
                "no control" if control is None else f"{control['speed_up_measured_ratio']:.2f}, {_change(control)}",
            ]
        )
    heads = (
        "speed measured", "predicted", "pushed, measured", "predicted", "published", "change of loss",
        "control of its group: speed, loss",
    )  # fmt: skip
    columns = [Column("scenario", False), Column("beside dense run", False), *(Column(head) for head in heads)]
    return table("Speed beside dense training, with the density that it was had for", columns, lines) + paragraph(
        "Speeds are multiples of the dense run's. Change of loss: of the last steps' training loss from the dense "
        "run's, a few "
        "steps after the start; a study says more. Control: nothing is pushed (threshold = inf).",
        "soft",
    )


def _change(row: Row) -> str:
    change = row["loss_change_measured_ratio"]
    return "not measured" if change is None else percent(change)


def _bottlenecks(rows: Sequence[Row], predicted: Sequence[Result]) -> Markup:
    """Return the table of each plan's longest phase, busiest link and fullest device; of many, each group's fastest."""
    if len(rows) > MOST_ROWS:
        best: dict[str, Row] = {}
        for row in rows:
            if row["group"] not in best or row["step_time_measured_s"] < best[row["group"]]["step_time_measured_s"]:
                best[row["group"]] = row
        caption, shown = "Of each group's fastest plan as measured: what it waits for", list(best.values())
    else:
        caption, shown = "What each plan waits for", list(rows)
    results = {result.scenario["name"]: result for result in predicted}
    lines: list[list[Cell]] = []
    for row in shown:
        result = results.get(row["name"])
        lines.append([row["name"], longest_phase(row), _link(result), _margin(result)])
    heads = ["longest part of a step", "busiest link (predicted)", "tightest device (predicted)"]
    if not predicted:  # of a comparison's table alone, neither is known of any row
        heads, lines = heads[:1], [line[:2] for line in lines]
    columns = [Column("scenario", False), *(Column(head, False) for head in heads)]
    return table(caption, columns, lines)


def _link(result: Result | None) -> str:
    if result is None or not result.links:
        return "not known"
    busiest = max(result.links, key=lambda link: link.utilisation_ratio)
    return f"{busiest.name}, used {100 * busiest.utilisation_ratio:.0f} %"


def _margin(result: Result | None) -> str:
    if result is None or result.margin is None:
        return "not known"
    margin = result.margin
    left = "lacks " + size(-margin.margin_bytes) if margin.margin_bytes < 0 else size(margin.margin_bytes) + " left"
    return f"rank {margin.rank}: {left} of {size(margin.memory_bytes)}, most is {margin.category.replace('_', ' ')}"
