"""Interactive charts of the report, by Apache ECharts: a sweep's points, a comparison's scenarios, a step's timeline.

Each is an element with its data as JSON and a script that is embedded once in the page. A text column is a list of
distinct words with an index for each row, so that ten thousand points are about a megabyte. Without scripts only a
sentence is shown in place of a chart, and the report's static charts remain.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any

from markupsafe import Markup

from analysis.charts.drawing import mark
from analysis.charts.step_phases import PHASE_COLOURS
from analysis.compare.timeline import Step
from analysis.html_report.contents import Overlay
from analysis.html_report.markup import ELEMENTS, Part, percent, seconds
from analysis.sweep_tables import SweepTable
from gssim.result import PHASES

Row = Mapping[str, Any]

START = "drawExplorers()"
"""Script after each element: a chart is drawn before the rest of a long page is read."""
MOST_FILTERED = 40
"""Most distinct values of a column that is a filter."""
FEWEST_POINTS = 3
FOLDER = Path("scenarios/sweeps")
"""Folder of the shipped sweeps, for the command that predicts a point again."""
DIGITS = 6
SYMBOLS = 8
"""Symbols of `explorer.js`."""
EXPLORER = '<div class="explorer"'
"""Beginning of the element of an interactive chart."""

FIGURES = {
    "peak_allocated_bytes": ("peak memory, allocated", "bytes"),
    "step_time_s": ("step time", "s"),
    "throughput_samples_per_s": ("throughput", "samples/s"),
    "margin_bytes": ("memory margin of the tightest device", "bytes"),
    "exposed_communication_s": ("exposed communication", "s"),
    "imbalance_s": ("exposed communication, waiting for slower ranks", "s"),
    "bytes_sent_per_step": ("bytes sent in a step, all ranks", "bytes"),
    "push_density_ratio": ("push density", "ratio"),
    "ranks": ("ranks", ""),
    "cost_usd_per_step": ("cost of a step", "USD"),
    "energy_j_per_step": ("energy of a step", "J"),
}
"""Columns of a sweep's table that can be axes: label and unit."""
LARGER_IS_BETTER = ("throughput_samples_per_s", "margin_bytes")
UNITS = {"bandwidth_bytes_per_s": "bytes/s", "_bytes": "bytes", "_s": "s", "_ratio": "ratio"}
"""Units by the suffix of a key."""


def sweep_explorer(sweep: SweepTable, *, name: str = "") -> list[Part]:
    """Return the part with the interactive chart of a sweep; none where fewer than `FEWEST_POINTS` have answers."""
    rows = sweep.answered
    if len(rows) < FEWEST_POINTS:
        return []
    axes = [axis for axis in sweep.axes if axis not in FIGURES]
    numeric = {axis for axis in axes if all(_is_number(row[axis]) or row[axis] is None for row in rows)}
    columns = [_numbers(key, label, unit, [row[key] for row in rows]) for key, (label, unit) in FIGURES.items()]
    columns += [_numbers(axis, axis, _unit(axis), [row[axis] for row in rows]) for axis in axes if axis in numeric]
    columns = [column for column in columns if len(set(column["values"]) - {None}) > 1]
    texts = {"method": "method", "cluster": "cluster", "model": "model", "group": "group", "status": "does it fit?"}
    words = {key: [str(row[key] or "none") for row in rows] for key in texts}
    for axis in axes:
        if axis not in texts and len({row[axis] for row in rows}) <= MOST_FILTERED:
            values = ["none" if row[axis] is None else row[axis] for row in rows]
            words[axis] = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    coloured = [
        _with_marks(_texts(key, texts.get(key, key), values)) | {"unit": _unit(key) if key in numeric else ""}
        for key, values in words.items()
        if len(set(values)) > 1
    ]
    columns += [column for column in coloured if column["key"] not in {each["key"] for each in columns}]
    columns += [column | {"key": f"{column['key']} (filter)"} for column in coloured if column["key"] in numeric]
    keys = [column["key"] for column in columns if column["kind"] == "number"]
    if "step_time_s" not in keys or len(keys) < 2:
        return []
    distinct = {
        column["key"]: len(set(column["values"]) - {None})
        for column in columns
        if column["kind"] == "number" and column["key"] in numeric and 2 * column["values"].count(None) <= len(rows)
    }  # an axis that few plans have, such as thresholds, would leave out all others at first
    x = max(distinct, key=lambda axis: distinct[axis], default=next(key for key in keys if key != "step_time_s"))
    data = {
        "names": [row["point"] for row in rows],
        "columns": columns,
        "x": x,
        "y": "step_time_s",
        "colour": next(
            (key for key in ("method", "cluster") if any(c["key"] == key for c in columns)), _colour(columns)
        ),
        "larger": LARGER_IS_BETTER,
        "why": [
            _texts("why", "longest part of a step", [longest_part(row) for row in rows]),
            _texts("why", "busiest link", [busiest_link(row) for row in rows]),
            _texts("why", "memory margin", [_margin(row) for row in rows]),
        ],
        "command": _command(sweep),
    }
    title = f"Explore the {sweep.kind}{name}"
    return [Part(title, _element("points", title, data))]


def comparison_explorer(rows: Sequence[Row]) -> list[Part]:
    """Return the part with the interactive chart of a comparison; none of fewer than `FEWEST_POINTS` scenarios."""
    if len(rows) < FEWEST_POINTS:
        return []
    figures = {
        "step_time_measured_s": ("step measured", "s"),
        "step_time_predicted_s": ("step predicted", "s"),
        "step_time_error_ratio": ("error of the step time", "ratio"),
        "peak_measured_bytes": ("peak memory measured", "bytes"),
        "peak_predicted_bytes": ("peak memory predicted", "bytes"),
        "exposed_communication_measured_s": ("exposed communication measured", "s"),
        "exposed_communication_predicted_s": ("exposed communication predicted", "s"),
        "noise_ratio": ("noise of the measurement", "ratio"),
    }
    columns = [_numbers(key, label, unit, [row[key] for row in rows]) for key, (label, unit) in figures.items()]
    columns = [column for column in columns if len(set(column["values"]) - {None}) > 1]
    texts = {"method": "method", "group": "group", "device": "device"}
    words = [_texts(key, label, [str(row[key] or "none") for row in rows]) for key, label in texts.items()]
    columns += [_with_marks(column) for column in words if len(column["words"]) > 1]
    keys = [column["key"] for column in columns if column["kind"] == "number"]
    if not {"step_time_measured_s", "step_time_predicted_s"} <= set(keys):
        return []
    data = {
        "names": [row["name"] for row in rows],
        "columns": columns,
        "x": "step_time_measured_s",
        "y": "step_time_predicted_s",
        "colour": _colour(columns),
        "larger": (),
        "diagonal": "predicted as measured",
        "why": [_texts("why", label, [text(row) for row in rows]) for label, text in EXPLANATIONS.items()],
        "command": None,
    }
    title = "Explore the comparison"
    return [Part(title, _element("points", title, data))]


def _difference(row: Row, phase: str) -> str:
    pair = row[f"{phase}_predicted_s"], row[f"{phase}_measured_s"]
    if None in pair:
        return "not known"
    sign = "+" if pair[0] >= pair[1] else "\u2212"
    return f"{sign}{seconds(abs(pair[0] - pair[1]))}"


EXPLANATIONS: dict[str, Callable[[Row], str]] = {
    "what happens": lambda row: (
        "the collectives are equal" if row["collectives_equal"] else f"differ: {row['collectives_difference']}"[:160]
    ),
    "how much": lambda row: (
        "memory is not measured"
        if row["peak_error_ratio"] is None
        else f"peak memory {percent(row['peak_error_ratio'])}"
    ),
    "how long": lambda row: f"step {percent(row['step_time_error_ratio'])}",
    "by phase, predicted less measured": lambda row: ", ".join(
        f"{phase.replace('_', ' ')} {_difference(row, phase)}"
        for phase in PHASES
        if (row[f"{phase}_predicted_s"] or 0) + (row[f"{phase}_measured_s"] or 0) > 0
    ),
}
"""Lines of a comparison's explanation, by heading: functions that return the text for a row."""


def timeline_explorer(overlay: Overlay, predicted: Step, measured: Step) -> Markup:
    """Return the interactive timeline of one step, predicted above measured, rank by rank."""
    lanes: list[dict[str, Any]] = []
    blocks: list[tuple[int, float | None, float | None, int, int]] = []
    phases = list(PHASE_COLOURS)
    labels: dict[str, int] = {}
    for rank in sorted({*predicted.ranks, *measured.ranks}):
        for side, step in (("predicted", predicted), ("measured", measured)):
            for lane in step.lanes_of(rank):
                stream = "" if lane.stream == "compute" else f", {lane.stream}"
                name = f"rank {rank} {side}{stream}"
                for block in lane.blocks:
                    label = labels.setdefault(block.label.replace("_", " "), len(labels))
                    times = (_rounded(block.start_s), _rounded(block.end_s))
                    blocks.append((len(lanes), *times, phases.index(block.phase), label))
                lanes.append({"name": name, "thin": bool(stream), "predicted": side == "predicted"})
    used = {phase for lane, _, _, phase, _ in blocks if not lanes[lane]["thin"]}
    data = {
        "lanes": lanes,
        "blocks": blocks,
        "labels": list(labels),
        "phases": [
            {"name": name.replace("_", " "), "colour": PHASE_COLOURS[name], "used": number in used}
            for number, name in enumerate(phases)
        ],
        "longest_s": max(predicted.time_s, measured.time_s),
    }
    return _element("timeline", f"timeline of one step of {overlay.name}, which zooms", data)


# Columns --------------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _unit(key: str) -> str:
    """Return the unit that the end of a key names."""
    return next((unit for suffix, unit in UNITS.items() if key.endswith(suffix)), "")


def _rounded(value: Any) -> float | None:
    """Return a number with the digits that a screen can show; None for what is no finite number."""
    if not _is_number(value) or not isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def _numbers(key: str, label: str, unit: str, values: Iterable[Any]) -> dict[str, Any]:
    """Return a column of numbers; its axis is logarithmic where they span more than `WIDE_RATIO`, none below zero."""
    rounded = [_rounded(value) for value in values]
    positive = [value for value in rounded if value is not None and value > 0]
    signed = any(value is not None and value < 0 for value in rounded)  # a logarithmic axis would leave these out
    log = not signed and len(positive) > 0 and max(positive) > WIDE_RATIO * min(positive)
    return {
        "key": key,
        "kind": "number",
        "label": label,
        "unit": unit,
        "log": log,
        "values": rounded,
    }


WIDE_RATIO = 30


def _texts(key: str, label: str, values: Sequence[str]) -> dict[str, Any]:
    """Return a column of words, the distinct ones in order, and an index for each row."""
    distinct = {word: number for number, word in enumerate(sorted(set(values), key=_natural))}
    return {
        "key": key,
        "kind": "text",
        "label": label,
        "words": list(distinct),
        "order": list(range(len(distinct))),
        "values": [distinct[word] for word in values],
        "filter": 1 < len(distinct) <= MOST_FILTERED,
    }


def _with_marks(column: dict[str, Any]) -> dict[str, Any]:
    """Return a column of methods with their colours in the other charts, and symbols that differ within a colour."""
    if column["key"] != "method":
        return column
    colours = [str(mark(word)["color"]) for word in column["words"]]
    used: set[tuple[str, int]] = set()
    symbols = []
    for number, colour in enumerate(colours):
        free = [(number + step) % SYMBOLS for step in range(SYMBOLS) if (colour, (number + step) % SYMBOLS) not in used]
        symbols.append(free[0] if free else number % SYMBOLS)
        used.add((colour, symbols[-1]))
    return column | {"colours": colours, "symbols": symbols}


def _natural(word: str) -> tuple[bool, float, str]:
    try:
        return (False, float(word), word)
    except ValueError:
        return (True, 0.0, word)


def _colour(columns: Sequence[Mapping[str, Any]]) -> str | None:
    return next((column["key"] for column in columns if column["kind"] == "text"), None)


def longest_part(row: Row) -> str:
    """Return the longest phase of a step, with the fraction of the step that it takes."""
    phase = max(PHASES, key=lambda phase: row[f"{phase}_s"] or 0.0)
    share = (row[f"{phase}_s"] or 0.0) / row["step_time_s"] if row["step_time_s"] else 0.0
    return f"{phase.replace('_', ' ')}, {100 * share:.0f} %"


def busiest_link(row: Row) -> str:
    """Return the link that is used most, with its utilisation."""
    ratio = row["slowest_link_utilisation_ratio"]
    return (
        "none" if row["slowest_link"] is None or ratio is None else f"{row['slowest_link']}, used {100 * ratio:.0f} %"
    )


def _margin(row: Row) -> str:
    if row["margin_bytes"] is None or not row["capacity_bytes"]:
        return str(row["reason"] or "not known")
    part = 100 * row["margin_bytes"] / row["capacity_bytes"]
    return f"{row['tightest_device']}: {abs(part):.0f} % of its memory {'left' if part >= 0 else 'lacking'}"


def _command(sweep: SweepTable) -> list[str] | None:
    """Return the words before a point's name of the command that predicts it; None where no file states the sweep."""
    if sweep.command:
        return list(sweep.command)
    if not sweep.sweep:
        return None
    shipped = FOLDER / sweep.sweep
    return ["gssim", "sweep", str(shipped if shipped.is_file() else sweep.sweep), "--only"]


# The element and its script -------------------------------------------------------------------------------------------


def _element(kind: str, title: str, data: Mapping[str, Any]) -> Markup:
    # inside a script element, `</` could end it, and `<!--` would change how the rest is read
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return Markup(ELEMENTS.explorer(kind, title, Markup(text), Markup(START)))


@cache
def scripts() -> tuple[str, ...]:
    """Return the scripts of interactive charts: the library, and what draws with it."""
    folder = resources.files("analysis.html_report")
    files = (folder / "vendor" / "echarts.min.js", folder / "templates" / "explorer.js")
    return tuple(file.read_text(encoding="utf-8") for file in files)
