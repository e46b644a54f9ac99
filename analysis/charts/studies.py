"""All charts of a study, and what they show in words."""

from collections.abc import Sequence

from analysis.charts import convergence
from analysis.charts.drawing import Chart
from analysis.convergence.findings import Findings, interval, percentage
from analysis.convergence.rows import Row
from analysis.convergence.study import Study


def study_charts(study: Study, rows: Sequence[Row], found: Findings) -> list[Chart]:
    """Return quality against threshold, bytes and time, and by step."""
    losses = "; ".join(map(_loss, rows))
    sent = "; ".join(f"{row.name} {row.sent_bytes / 1e6:.3g} MB" for row in rows)
    times = "; ".join(f"{row.name} {row.step_time_s.mean:.3g} s measured" for row in rows)
    return [
        Chart(
            "loss_against_threshold",
            convergence.QUALITY_TITLE,
            convergence.against_threshold(study, rows, found),
            f"Scatter charts of held-out quality against threshold and density. {found.quality}. Losses: {losses}.",
        ),
        Chart(
            "loss_against_bytes",
            convergence.BYTES_TITLE,
            convergence.against_bytes(study, rows, found),
            f"Scatter charts of held-out quality against bytes sent. {found.bytes}. Sent by a rank in a step: {sent}.",
        ),
        Chart(
            "loss_against_time",
            convergence.TIME_TITLE,
            convergence.against_time(study, rows, found),
            f"Scatter charts of held-out quality against step time. {found.time}. Times of a step: {times}.",
        ),
        Chart(
            "loss_by_step",
            convergence.STEP_TITLE,
            convergence.by_step(study, rows, found),
            f"Line charts of held-out loss and of density by step. {found.density or found.quality}.",
        ),
    ]


def _loss(row: Row) -> str:
    change = "" if row.loss_change is None else f", change from dense {interval(row.loss_change)}"
    density = "all pushed" if row.density is None else f"{percentage(row.density)} pushed"
    return f"{row.name} ({density}) {row.loss.mean:.3f}{change}"
