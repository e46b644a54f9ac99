"""Tables and findings of a study of thresholds, printed on a terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from analysis.compare.report import console, shown
from analysis.study.findings import interval, percentage
from analysis.study.rows import Row
from analysis.study.runs import HERE
from gssim.units import human_bytes


def print_study(rows: Sequence[Row], findings: tuple[str, ...]) -> None:
    """Print one line per variant, each speed-up with its density and loss, then the findings."""
    out = console()
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("variant", overflow="fold", min_width=16)
    for header in (
        "density",
        "sent a\nstep",
        "held-out\nloss",
        "change from dense\n[95 % interval]",
        "speed\nmeasured",
        "\npredicted",
        "accuracy\n%",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*study_cells(row))
    out.print(table)
    for sentence in findings:
        out.print(f"{sentence}.")


def study_cells(row: Row) -> tuple[str, ...]:
    """Return the table cells of a variant; speeds are multiples of the dense variant's."""
    speed = row.speed_up
    return (
        f"{row.name} (control)" if row.control else row.name,
        "all" if row.density is None else percentage(row.density),
        shown(human_bytes(row.sent_bytes)),
        f"{row.loss.mean:.3f} \u00b1 {row.loss.sd:.3f}",
        "" if row.loss_change is None else interval(row.loss_change),
        "1" if speed is None else f"{speed.mean:.2f} [{speed.low:.2f}, {speed.high:.2f}]",
        f"{row.predicted_speed_ups[HERE]:.2f}",
        "" if row.accuracy is None else f"{100 * row.accuracy.mean:.1f} \u00b1 {100 * row.accuracy.sd:.1f}",
    )
