"""A Result for people, on the console."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gssim.result import Result
from gssim.units import human_bytes, human_seconds, one_line

if TYPE_CHECKING:
    import polars

PIPE_WIDTH = 140
"""Columns where the output goes to a file or pipe, which have no width of their own."""
SHOWN_LINKS = 5


class PlainConsole(Console):
    """A console that prints texts as they are: no markup or emoji of theirs, control characters escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is shown."""
        options |= {"markup": False, "emoji": False}
        return super().render_str("\n".join(map(one_line, text.split("\n"))), **options)


def plain_console(width: int, **options: Any) -> Console:
    """Return where texts of users are printed: as wide as the terminal, or so many columns."""
    return PlainConsole(**options) if sys.stdout.isatty() else PlainConsole(width=width, **options)


def print_result(result: Result) -> None:
    """Print a Result for people."""
    console = plain_console(PIPE_WIDTH)
    scenario = result.scenario
    name, question = one_line(str(scenario["name"])), one_line(str(scenario["question"]))
    console.print(Text.assemble((name, "bold"), f": {question}"))
    word = "predicted" if result.source == "simulated" else "measured"
    density = f", push density {result.density.push:.3%}" if result.density.push is not None else ""
    console.print(
        f"{word} step {human_seconds(result.step_time_s)}, {result.throughput_samples_per_s:.4g} samples/s{density}",
        highlight=False,
    )
    for line in _target_density(result):
        console.print(line, highlight=False)
    if result.does_not_fit is not None:
        fit = result.does_not_fit
        console.print(
            f"does not fit: rank {fit.rank} exceeds its memory by {human_bytes(fit.excess_bytes)}; "
            f"largest at the peak: {fit.category}",
            style="bold",
        )
        if result.remedies:
            console.print(_remedy_table(result))
    elif result.margin is not None:
        least = result.margin
        console.print(
            f"fits: rank {least.rank}, which has least to spare, has {human_bytes(least.margin_bytes)} left "
            f"of {human_bytes(least.memory_bytes)}; largest at the peak: {least.category}",
            highlight=False,
        )
    if result.idle_devices:
        console.print(f"idle: {idle_list(result.idle_devices)}", highlight=False, markup=False)
    for each in result.provenance.get("uncounted", ()):
        console.print(f"counted as nothing: {each}", highlight=False)
    if result.divisions:
        console.print(_division_table(result))
    console.print(_rank_table(result))
    console.print(_collective_table(result))
    if any(link.bytes for link in result.links):
        console.print(_link_table(result))


def _target_density(result: Result) -> list[str]:
    """Return which density a push with a target density comes to, and why it is another one."""
    push, density = result.scenario["plan"]["push"], result.density.push
    if push["kind"] != "target-density" or density is None:
        return []
    word = "predicted" if result.source == "simulated" else "realised"
    said = f"target density {push['threshold']:.4g}: {density:.4g} {word}"
    if abs(density - push["threshold"]) <= TOLD_RATIO * push["threshold"]:
        return [said]
    steps = push["reestimate_steps"]
    if steps == 1:
        return [f"{said}; thresholds are estimated in each step from the magnitudes of a sample of each tensor"]
    return [
        f"{said}; thresholds are estimated from one batch every {steps} steps (plan.push.reestimate_steps) and stay "
        "while gradients become smaller or larger"
    ]


TOLD_RATIO = 0.05
"""How far a density must be from its target for the difference to be explained."""


def print_results(results: Sequence[Result], question: str) -> None:
    """Print a sweep's Results for people, a line each."""
    console = plain_console(PIPE_WIDTH)
    if question:
        console.print(one_line(question), style="bold", highlight=False)
    table = Table("point", "ranks", "step", "waits", "samples/s", "peak allocated", "push", "publish", "fits")
    for result in results:
        waits = result.phases_s["exposed_communication"] / result.step_time_s if result.step_time_s else 0.0
        densities = (result.density.push, result.density.publish)
        table.add_row(
            result.scenario["name"],
            _of_all(sum(entry.count for entry in result.ranks), len(result.idle_devices)),
            human_seconds(result.step_time_s),
            f"{waits:.0%}",
            f"{result.throughput_samples_per_s:.4g}",
            human_bytes(max(entry.peak_allocated_bytes for entry in result.ranks)),
            *("" if density is None else f"{density:.2%}" for density in densities),
            "yes" if result.fits else "no",
        )
    console.print(table)


FASTEST = 12
"""Rows of a large table that are shown."""


def print_table(table: "polars.DataFrame", question: str) -> None:
    """Print for people what a sweep's table says: all of a small one, the fastest points that fit of a large one."""
    console = plain_console(PIPE_WIDTH)
    if question:
        console.print(one_line(question), style="bold", highlight=False)
    counts = {status: sum(each == status for each in table["status"]) for status in dict.fromkeys(table["status"])}
    shown = table
    if table.height > 4 * FASTEST:
        shown = table.filter(table["status"] == "fits").sort("step_time_s", maintain_order=True).head(FASTEST)
        told = ", ".join(f"{count:,} {'fit' if status == 'fits' else status}" for status, count in counts.items())
        console.print(f"{table.height:,} points: {told}; the fastest of those that fit:", highlight=False)
    rows = Table("point", "ranks", "step", "waits", "samples/s", "peak allocated", "push", "status")
    for row in shown.iter_rows(named=True):
        rows.add_row(row["point"], *_row_words(row), row["status"])
    console.print(rows)


def _row_words(row: dict[str, Any]) -> list[str]:
    """Return what a row says in the columns of a table for people; nothing where there is no prediction."""
    if row["step_time_s"] is None:
        return [""] * 6
    return [
        _of_all(row["ranks"], row["idle_devices"]),
        human_seconds(row["step_time_s"]),
        f"{row['exposed_communication_s'] / row['step_time_s'] if row['step_time_s'] else 0.0:.0%}",
        f"{row['throughput_samples_per_s']:.4g}",
        human_bytes(row["peak_allocated_bytes"]),
        "" if row["push_density_ratio"] is None else f"{row['push_density_ratio']:.2%}",
    ]


def _of_all(ranks: int, idle: int) -> str:
    """Return the number of ranks, and of how many devices where some are idle."""
    return f"{ranks} of {ranks + idle}" if idle else str(ranks)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show on stderr how far something is; give a function to be told (done, of how many)."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(TextColumn(what), *columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _division_table(result: Result) -> Table:
    """Return how the batch and the shards were divided in the course of the run, and how long steps then took."""
    table = Table("from step", "samples", "shard shares", "median step", title="divided anew")
    counted = [division for division in result.divisions if division.first_step > 0]
    ends = [*(division.first_step for division in counted), len(result.step_times_s)]
    rows = [("0", "as planned", "as planned")] if len(counted) == len(result.divisions) else []
    shown = result.divisions[-1:] if not counted else result.divisions[-len(counted) - (not rows) :]
    for each in shown:
        samples, owned = (", ".join(f"{n:.3g}" for n in parts) for parts in (each.samples, each.shard_shares))
        rows.append((str(max(0, each.first_step)), samples, owned))
    for row, first, end in zip(rows, [0, *ends[:-1]], ends, strict=True):
        table.add_row(*row, human_seconds(median(result.step_times_s[first:end])) if end > first else "")
    return table


def _remedy_table(result: Result) -> Table:
    """Return what would need less, and whether it would fit."""
    table = Table("change", "needs less by", "then", "largest at the peak", title="what to change")
    for each in result.remedies:
        left = each.margin.margin_bytes
        then = f"{human_bytes(left)} to spare" if each.fits else f"{human_bytes(-left)} too much"
        table.add_row(each.change, human_bytes(each.saved_bytes), then, each.margin.category)
    return table


def _rank_table(result: Result) -> Table:
    reserves = any(entry.fragmentation_ratio for entry in result.ranks)
    constants = list(dict.fromkeys(name for entry in result.ranks for name in entry.outside_bytes))
    memory = ["peak allocated", *(["peak reserved", "unused of it"] if reserves else []), *constants]
    table = Table("ranks", "device", *memory, *(name.replace("_", " ") for name in result.phases_s))
    for entry in result.ranks:
        known = entry.peak_reserved_bytes is not None
        reserved = [human_bytes(entry.peak_reserved_bytes or 0.0), f"{entry.fragmentation_ratio or 0.0:.1%}"]
        table.add_row(
            rank_list(entry.ranks),
            entry.device,
            human_bytes(entry.peak_allocated_bytes),
            *((reserved if known else ["", ""]) if reserves else ()),
            *(human_bytes(entry.outside_bytes.get(name, 0.0)) for name in constants),
            *(human_seconds(value) for value in entry.phases_s.values()),
        )
    return table


def _collective_table(result: Result) -> Table:
    table = Table("collective", "ranks", "count", "size", "carried", title="one step")
    for entry in result.collectives:
        carried = "all" if entry.payload_bytes is None else human_bytes(entry.payload_bytes)
        table.add_row(entry.kind, rank_list(entry.group), str(entry.count), human_bytes(entry.bytes), carried)
    return table


def _link_table(result: Result) -> Table:
    """Return the busiest links; the first is the bottleneck of what is communicated."""
    busiest = sorted(result.links, key=lambda link: (-link.utilisation_ratio, link.name))
    shown = [link for link in busiest[:SHOWN_LINKS] if link.bytes]
    table = Table("link", "equal ones", "bytes", "used", title=f"busiest links; bottleneck: {shown[0].name}")
    for link in shown:
        table.add_row(link.name, str(link.count), human_bytes(link.bytes), f"{link.utilisation_ratio:.1%}")
    return table


SHOWN_IDLE = 6
"""Names of idle devices, beside the last one's."""


def idle_list(names: Sequence[str]) -> str:
    """Return the devices that take no part in short, with their number.

    >>> idle_list(["c", "d"]), idle_list([str(i) for i in range(2, 100)])
    ('c, d (2 devices take no part)', '2, 3, 4, 5, 6, 7, ..., 99 (98 devices take no part)')
    """
    shown = [*names[:SHOWN_IDLE], "...", names[-1]] if len(names) > SHOWN_IDLE + 1 else names
    takes = "device takes" if len(names) == 1 else "devices take"
    return f"{', '.join(shown)} ({len(names):,} {takes} no part)"


def rank_list(ranks: Sequence[int]) -> str:
    """Return sorted ranks in short: runs by their ends, and no more than a few of them.

    >>> rank_list((0, 1, 2, 5, 7, 8))
    '0-2, 5, 7-8'
    """
    breaks = [i + 1 for i, (left, right) in enumerate(pairwise(ranks)) if right != left + 1]
    runs = [(ranks[start], ranks[end - 1]) for start, end in pairwise([0, *breaks, len(ranks)])]
    shown = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs[:6])
    return shown + (f", ... ({len(ranks)} in all)" if len(runs) > 6 else "")
