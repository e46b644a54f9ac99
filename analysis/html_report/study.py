"""The report's parts on a study of thresholds: findings, table of variants, pictures."""

from markupsafe import Markup

from analysis.html_report.contents import Training
from analysis.html_report.markup import Cell, Column, Part, bullets, density, picture, png_size, seconds, table

TITLES = {
    "loss_against_threshold": "What does a threshold cost in quality?",
    "loss_against_bytes": "How much quality do fewer bytes cost?",
    "loss_against_time": "Does a threshold gain time, and at which quality?",
    "loss_by_step": "How do loss and density move during a run?",
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
        Part(f"What the study found: {found.place}", bullets(found.findings) + _table(found)),
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


def _number(row: dict[str, str], column: str) -> float | None:
    return float(row[column]) if row.get(column) else None


def _interval(row: dict[str, str], name: str, form: str) -> str:
    values = [_number(row, column) for column in (name, f"{name}_low", f"{name}_high")]
    known = [form.format(value).replace("-", "\u2212") for value in values if value is not None]
    return f"{known[0]} [{known[1]}, {known[2]}]" if len(known) == 3 else ""
