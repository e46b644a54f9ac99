"""The HTML report of a folder: summary, tables and charts of its contents, and the provenance of its figures."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from analysis.charts import timeline
from analysis.charts.drawing import Chart
from analysis.compare.table import method_of, name_of, peaks_by_rank
from analysis.compare.timeline import with_common_labels
from analysis.html_report.comparison import comparison_parts
from analysis.html_report.comparison import summary as comparison_summary
from analysis.html_report.contents import Contents, Overlay, Training, contents_of
from analysis.html_report.explorer import EXPLORER, START, scripts, timeline_explorer
from analysis.html_report.markup import (
    Cell,
    Column,
    Part,
    bullets,
    density,
    document,
    figure,
    folded,
    paragraph,
    percent,
    picture,
    png_size,
    seconds,
    size,
    table,
    terms,
)
from analysis.html_report.sweep import summary as sweep_summary
from analysis.html_report.sweep import sweep_parts
from analysis.sweep_tables import SweepTable
from gssim.result import Result
from gssim.units import counted

MOST_VALUES = 6
MOST_ROWS = 200
MOST_CALIBRATIONS = 20


def evidence_part(contents: Contents) -> Part:
    """Return the part that lists what was measured and what is only predicted."""
    lines = []
    for comparison in contents.comparisons:
        repeated = int((comparison.table["repeats"] > 1).sum())
        lines.append(
            f"Measured and predicted: {counted(len(comparison.table), 'scenario')}, {repeated} of them more than "
            "once. Measured: step "
            "time, phases, peak memory, collectives, densities, training loss. Only predicted: use of links, "
            "categories of "
            "memory, cost."
        )
    if contents.only_predicted:
        lines.append(f"Only predicted: {counted(len(contents.only_predicted), 'scenario')}.")
    if contents.only_measured:
        lines.append(f"Only measured: {counted(len(contents.only_measured), 'scenario')}.")
    lines += [
        f"Only predicted: all {_points(sweep)} of the {sweep.kind} {sweep.sweep or sweep.name}; nothing of it was "
        "measured."
        for sweep in contents.sweeps
        if not contents.only_predicted
    ]
    lines += [
        f"Measured: all trainings of the study {study.place}: loss and density. Predicted: step times by network."
        if study.budgets
        else f"Measured: all trainings of the study {study.place}: loss, density, step time. Predicted: step times, "
        "also for other networks."
        for study in contents.studies
    ]
    lines += [f"One step of {overlay.name}: traced on both sides." for overlay in contents.overlays]
    body = bullets(lines)
    for title, files in (("only predicted", contents.only_predicted), ("only measured", contents.only_measured)):
        if files:
            body += folded(f"Scenarios that are {title}", _result_table(title, [file.result for file in files]))
    return Part("What was measured, and what is only predicted", body)


def _result_table(title: str, results: Sequence[Result]) -> Markup:
    """Return a table of Results that are only predicted, or only measured."""
    rows: list[list[Cell]] = [
        [
            name_of(result),
            method_of(result),
            seconds(result.step_time_s),
            f"{result.throughput_samples_per_s:.4g}",
            size(max(peaks_by_rank(result).values(), default=None)),
            density(result.density.push),
        ]
        for result in sorted(results, key=name_of)
    ]
    left_out = len(rows) - MOST_ROWS
    heads = ("step", "samples/s", "peak memory", "pushed")
    columns = [Column("scenario", False), Column("method", False), *(Column(head) for head in heads)]
    more = paragraph(f"{counted(left_out, 'more scenario')}.", "soft") if left_out > 0 else Markup()
    return table(f"Scenarios that are {title}", columns, rows[:MOST_ROWS]) + more


def provenance_part(contents: Contents) -> Part:
    """Return the part with versions, hardware and calibrations of all figures in the report."""
    predicted = [result for each in contents.comparisons for result in each.predicted]
    predicted += [file.result for file in contents.only_predicted]
    measured = [result for each in contents.comparisons for result in each.measured]
    measured += [file.result for file in contents.only_measured]
    body = Markup()
    for title, results in (("Predicted by", predicted), ("Measured on", measured)):
        if results:
            body += Markup("<h3>{}</h3>\n{}").format(title, terms(_facts(results)))
    body += _calibrations(contents)
    files = [
        f"{_points(sweep)} of the {sweep.kind}{f' {sweep.sweep}' if sweep.sweep else ''}, in the file '{sweep.name}'"
        for sweep in contents.sweeps
    ]
    files += [f"Comparison {each.place}, without its Results" for each in contents.comparisons if not each.predicted]
    files += [f"Study {each.place}" for each in contents.studies]
    if files:
        body += bullets(files)
    return Part("Provenance", body or paragraph("Nothing is known of where these figures are from."))


def _points(sweep: SweepTable) -> str:
    """Return the number of points of a sweep, or of plans of a search, with their noun."""
    return counted(len(sweep.rows), "plan" if sweep.kind == "search" else "point")


def _facts(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return each provenance entry with its distinct values in the Results."""
    facts: dict[str, dict[str, None]] = {}
    for result in results:
        for key, value in _flat(result.provenance):
            facts.setdefault(key, {}).setdefault(value, None)
        facts.setdefault("devices", {}).setdefault("; ".join(dict.fromkeys(rank.device for rank in result.ranks)), None)
    lines = []
    for key, values in facts.items():
        if key != "repeat":
            more = [f"and {len(values) - MOST_VALUES} others"] if len(values) > MOST_VALUES else []
            lines.append((key.replace("_", " "), ", ".join([*list(values)[:MOST_VALUES], *more])))
    return lines


def _flat(table: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield nested provenance entries as (name, value); of lists only a summary."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key} ")
        elif isinstance(value, list):
            yield from _listed(f"{prefix}{key}", value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _listed(key: str, values: list[Any]) -> Iterable[tuple[str, str]]:
    """Yield the summary of a list: the worst deviation of verified links, else the number of entries."""
    rates = ("measured_bytes_per_s", "rate_bytes_per_s")
    known = [value for value in values if isinstance(value, dict) and all(value.get(rate) for rate in rates)]
    if known:
        worst = max(abs(value[rates[0]] / value[rates[1]] - 1) for value in known)
        yield f"{key} verified before use", f"within {math.ceil(100 * worst)} % of the rates asked for"
    else:
        yield key, str(len(values))


def _calibrations(contents: Contents) -> Markup:
    """Return a table of the calibrations; of more than `MOST_CALIBRATIONS`, the most used ones."""
    counts = _uses(contents)
    if not counts:
        return Markup()
    often = sorted(counts, key=lambda identity: (-sum(counts[identity]), identity))[:MOST_CALIBRATIONS]
    rows: list[list[Cell]] = [[each, *(f"{n:,}" if n else "" for n in counts[each])] for each in sorted(often)]
    heads = ("predicted", "measured", "points of sweeps")
    columns = [Column("calibration", False), *(Column(head) for head in heads)]
    left_out = len(counts) - len(rows)
    return table("Calibrations: rates, profiles and statistics, by the id that is in every Result", columns, rows) + (
        paragraph(f"{left_out:,} more, of no more points each, are left out here.", "soft") if left_out else Markup()
    )


def _uses(contents: Contents) -> dict[str, list[int]]:
    """Return the numbers of predictions, measurements and sweep points of each calibration."""
    counts: dict[str, list[int]] = {}
    for comparison in contents.comparisons:
        for column, side in enumerate(("predicted", "measured")):
            for identity in comparison.table[f"calibration_id_{side}"].to_list():
                counts.setdefault(str(identity), [0, 0, 0])[column] += 1
    for sweep in contents.sweeps:
        for row in sweep.answered:
            counts.setdefault(str(row.get("calibration_id")), [0, 0, 0])[2] += 1
    return counts


MOST_QUESTIONS = 8
TIMELINE = "Who does what in one step, when, and waits for what?"


def report(folder: Path) -> str:
    """Return the report as HTML, deterministic for a folder; raise UserError where there is nothing to report."""
    contents = contents_of(folder)
    questions = questions_of(contents)
    title = questions[0] if len(questions) == 1 else f"What was asked of {folder.resolve().name}, and what came out"
    parts = [Part("In short", bullets(_short(contents)))]
    for comparison in contents.comparisons:
        parts += comparison_parts(comparison)
    for sweep in contents.sweeps:
        parts += sweep_parts(sweep, several=len(contents.sweeps) > 1)
    for study in contents.studies:
        parts += study_parts(study)
    if contents.overlays:
        parts.append(Part("One step, predicted above measured", parts=tuple(map(_overlay, contents.overlays))))
    parts += [evidence_part(contents), provenance_part(contents)]
    several = len(questions) > 1
    lead = paragraph("The questions:", "lead") + bullets(questions[:MOST_QUESTIONS]) if several else Markup()
    interactive = any(EXPLORER in each.body for part in parts for each in (part, *part.parts))
    parts = _with_unique_titles(parts)
    return document(title, lead, parts, scripts(), (START,)) if interactive else document(title, lead, parts)


def questions_of(contents: Contents) -> list[str]:
    """Return the distinct questions of sweeps, scenarios and studies."""
    asked = [sweep.question for sweep in contents.sweeps]
    results = [result for comparison in contents.comparisons for result in comparison.measured]
    results += [file.result for file in (*contents.only_measured, *contents.only_predicted)]
    asked += [str(result.scenario.get("question") or "") for result in results]
    asked += [
        "Which method has the least loss at equal samples, bytes and time?"
        if each.budgets
        else f"What do thresholds cost in quality, and gain in bytes and time? Study {each.place}"
        for each in contents.studies
    ]
    return [question for question in dict.fromkeys(asked) if question]


def _short(contents: Contents) -> list[str]:
    lines = [line for comparison in contents.comparisons for line in comparison_summary(comparison)]
    which = {sweep.name: f"{sweep.name}: " if len(contents.sweeps) > 1 else "" for sweep in contents.sweeps}
    lines += [f"{which[sweep.name]}{line}" for sweep in contents.sweeps for line in sweep_summary(sweep)]
    several = len(contents.studies) > 1
    lines += [
        f"{each.place}: {each.findings[0]}" if several else each.findings[0]
        for each in contents.studies
        if each.findings
    ]
    return lines or ["Results without their other side: nothing is compared."]


def _overlay(overlay: Overlay) -> Part:
    pair = (with_common_labels(overlay.predicted, overlay.measured), overlay.measured)
    sides = ("predicted", "measured")
    drawn = timeline(dict(zip(sides, pair, strict=True)), names=dict(zip(sides, overlay.files, strict=True)))
    ours, theirs = overlay.predicted.time_s, overlay.measured.time_s
    words = (
        f"Timeline of one step of {overlay.name}, rank by rank, predicted above measured. Predicted {seconds(ours)}, "
        "measured "
        f"{seconds(theirs)}{f', {percent(ours / theirs - 1)}' if theirs else ''}."
    )
    drawn_part = figure(Chart("timeline", TIMELINE, drawn, words))
    return Part(f"{overlay.name}: {TIMELINE}", timeline_explorer(overlay, *pair) + drawn_part)


def _with_unique_titles(parts: list[Part]) -> list[Part]:
    """Return the parts with repeated titles numbered, as two comparisons or studies have parts of the same title."""
    seen: dict[str, int] = {}
    numbered = []
    for part in parts:
        seen[part.title] = seen.get(part.title, 0) + 1
        number = f" ({seen[part.title]})" if seen[part.title] > 1 else ""
        numbered.append(Part(f"{part.title}{number}", part.body, part.parts))
    return numbered


# Studies --------------------------------------------------------------------------------------------------------------

TITLES = {
    "loss_against_threshold": "What does a threshold cost in quality?",
    "loss_against_bytes": "How much quality do fewer bytes cost?",
    "loss_against_time": "Does a threshold gain time, and at which quality?",
    "loss_by_step": "How do loss and density move during a run?",
    "fastest_to_equal_loss": "Which method reaches the same loss first, on which network?",
}


def study_parts(found: Training) -> list[Part]:
    """Return the parts of the report for a study: findings, a table of its variants, and its pictures."""
    charts = []
    for path in found.pictures:
        content = path.read_bytes()
        title = TITLES.get(path.stem, path.stem)
        words = f"{title} The figures are in the table above. {' '.join(found.findings)}"
        charts.append(Part(title, picture(content, "png", words, title=title, size=png_size(content))))
    return [
        Part(
            f"What the study found: {found.place}",
            bullets(found.findings) + (_budget_table(found) if found.budgets else _table(found)),
        ),
        *([Part(f"Charts of the study: {found.place}", parts=tuple(charts))] if charts else []),
    ]


def _table(study: Training) -> Markup:
    lines: list[list[Cell]] = []
    for row in study.rows:
        control = row.get("control") == "True"
        lines.append(
            [
                f"{row['variant']} (control)" if control else row["variant"],
                density(_number(row, "push_density")),
                _interval(row, "loss_change", "{:+.3f}") or ("dense's own" if control else "not measured"),
                f"{_number(row, 'loss_mean') or 0.0:.3f}",
                seconds(_number(row, "step_time_mean_s")),
                _interval(row, "speed_up", "{:.2f}") or "1",
            ]
        )
    seeds = study.rows[0].get("seeds", "")
    heads = (
        "pushed",
        "change of held-out loss from dense (nats)",
        "held-out loss",
        "step measured",
        "speed beside dense",
    )
    columns = [Column("variant", False), *(Column(head) for head in heads)]
    return table(f"Every variant, mean of {seeds} seeds; in brackets the 95 % interval", columns, lines)


def _budget_table(study: Training) -> Markup:
    """Return the table of a study whose methods are compared at equal samples, bytes and time."""
    lines: list[list[Cell]] = []
    for row in study.rows:
        losses = []
        for budget in study.budgets:
            bounds = [_number(row, f"loss_change_{end} ({budget})") for end in ("low", "high")]
            changes = [f"{bound:+.3f}".replace("-", "\u2212") for bound in bounds if bound is not None]
            loss = _number(row, f"loss ({budget})")
            interval = f" [{', '.join(changes)}]" if changes else ""
            losses.append("not measured" if loss is None else f"{loss:.3f}{interval}")
        name = f"{row['variant']} (control)" if row.get("control") == "True" else row["variant"]
        lines.append([name, density(_number(row, "push_density")), size(_number(row, "sent_bytes")), *losses])
    columns = [Column("variant", False), Column("pushed"), Column("sent by a rank in a step")]
    columns += [Column(f"loss at {budget}") for budget in study.budgets]
    caption = (
        f"Held-out loss in nats, mean of {study.rows[0].get('seeds', '')} seeds; in brackets the 95 % interval of its "
        "change from dense"
    )
    return table(caption, columns, lines)


def _number(row: dict[str, str], column: str) -> float | None:
    return float(row[column]) if row.get(column) else None


def _interval(row: dict[str, str], name: str, form: str) -> str:
    values = [_number(row, column) for column in (name, f"{name}_low", f"{name}_high")]
    known = [form.format(value).replace("-", "\u2212") for value in values if value is not None]
    return f"{known[0]} [{known[1]}, {known[2]}]" if len(known) == 3 else ""
