"""Terminal output and exit of commands: tables of results, progress, error lines on stderr and exit codes."""

import contextlib
import errno
import functools
import inspect
import io
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from gssim.cluster.presets import expected_errors
from gssim.errors import RunFailedError, UserError, one_line
from gssim.execution.files import write_text
from gssim.result import LinkUse, Result, busiest_link, pace
from gssim.units import human_bytes, human_seconds, lift, restored

if TYPE_CHECKING:
    import polars

PIPE_WIDTH = 140
"""Width of the output to a file or pipe."""
SHOWN_LINKS = 5
SET_HELP = "Override a key, such as plan.tp=2 (all keys: scenarios/README.md); repeatable."
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Only points of this name; * and ? are wildcards; repeatable."),
]
ScenarioFile = Annotated[Path, typer.Argument(help="A scenario's file, such as scenarios/demo.toml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the Result as JSON, or a list of them.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"gssim {metadata.version('gssim')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and end.")
]
"""Option of each program; they are parts of one package."""


class PlainConsole(Console):
    """A console that prints texts literally: without markup or emoji, control characters escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the literal text."""
        options |= {"markup": False, "emoji": False}
        return super().render_str("\n".join(map(one_line, text.split("\n"))), **options)


def plain_console(width: int) -> Console:
    """Return a console that prints text as it is, as wide as the terminal, or `width` columns if there is none."""
    return PlainConsole(highlight=False) if sys.stdout.isatty() else PlainConsole(highlight=False, width=width)


def _uncertain(result: Result) -> Iterator[str]:
    """Yield a line for each cost that a prediction does not have, or has from another device or precision."""
    yield from (f"counted as nothing: {cost}" for cost in result.provenance.get("uncounted", ()))
    for key in ("scaled_bytes", "attention_of_cpu"):
        if key in result.provenance:
            yield one_line(result.provenance[key], MAX_SOURCE_CHARACTERS * 4)


def print_result(result: Result, *, changed: Sequence[str] = (), utilisation_ratio: float | None = None) -> None:
    """Print a Result for people.

    `changed`: overrides, `KEY=VALUE`; they are printed below the file's question, which they may contradict.
    `utilisation_ratio`: the MFU, see `Scenario.model_flop_utilisation`; None if it is not known.
    """
    console = plain_console(PIPE_WIDTH)
    scenario = result.scenario
    name, question = one_line(str(scenario["name"])), one_line(str(scenario["question"]))
    console.print(Text.assemble((name, "bold"), f": {question}"))
    if changed:
        console.print(f"with {one_line(', '.join(changed))}")
    word = "predicted" if result.source == "simulated" else "measured"
    used = f", MFU {utilisation_ratio:.1%}" if utilisation_ratio is not None else ""
    density = f", push density {result.density.push:.3%}" if result.density.push is not None else ""
    rates = f"{result.throughput_samples_per_s:.4g} samples/s{_tokens(result)}{used}{density}"
    console.print(f"{word} step {human_seconds(result.step_time_s)}, {rates}")
    for line in (*_periods(result), *_band(result), *_target_density(result)):
        console.print(line)
    for line in expected_errors_of(result):
        console.print(line)
    _print_fit(console, result)
    if busiest_link(result) is not None:
        console.print(f"bottleneck: {pace(result)}")
    if result.idle_devices:
        console.print(f"idle: {idle_list(result.idle_devices)}")
    for line in (*_expense(result), *_uncertain(result)):
        console.print(line)
    if result.divisions:
        console.print(_division_table(result))
    _print_ranks(console, result)
    several = "one outer step" if result.periods is None or not result.periods.begin_steps else "one period"
    if result.collectives:
        console.print(_collective_table(result, "one step" if result.periods is None else several))
    if any(link.bytes for link in result.links):
        console.print(_link_table(result))


def _tokens(result: Result) -> str:
    """Return a text with the tokens per second, in all and per device; empty if the model has no tokens."""
    workload = result.scenario["workload"]
    if workload["model"]["input"]["kind"] != "tokens":
        return ""
    per_s = result.throughput_samples_per_s * workload["sequence_length"]
    return f", {per_s:,.0f} tokens/s ({per_s / sum(entry.count for entry in result.ranks):,.0f} a device)"


def _expense(result: Result) -> list[str]:
    """Return a line on what a step costs, where prices or powers of all devices are known."""
    cost_usd, energy_j = result.cost_usd_per_step, result.energy_j_per_step
    parts = [] if cost_usd is None else [f"{cost_usd:.3g} USD"]
    parts += [] if energy_j is None else [f"{energy_j / 1e3:.4g} kJ"]
    return [f"a step costs {' and '.join(parts)} (devices only)"] if parts else []


def expected_errors_of(result: Result) -> list[str]:
    """Return lines on how reliable the devices' rates are: assumed ones, and errors of predictions of published runs.

    Empty if the devices were calibrated, and for a measured Result.
    """
    if result.source != "simulated":  # measured: no preset's error counts
        return []
    types = result.scenario["cluster"]["device_types"]
    sources = {entry.device: str(types[entry.device]["source"]) for entry in result.ranks}
    lines = [
        f"rates of {one_line(device)}: {one_line(source, MAX_SOURCE_CHARACTERS)}"
        for device, source in sources.items()
        if source.startswith("assumed")
    ]
    expected = expected_errors(sources.values())
    return lines if expected is None else [*lines, expected]


MAX_SOURCE_CHARACTERS = 200
"""Number of characters of a source that are shown."""


def _print_fit(console: Console, result: Result) -> None:
    """Print whether the plan fits, with the margin, or what to change."""
    if result.does_not_fit is not None:
        fit = result.does_not_fit
        whose = "host's memory" if fit.memory == "host" else "memory"
        console.print(
            f"does not fit: rank {fit.rank} exceeds its {whose} by {human_bytes(fit.excess_bytes)}; "
            f"largest at the peak: {fit.category}",
            style="bold",
        )
        if result.remedies:
            heads = ("change", "needs less by", "then", "largest at the peak")
            table = folding(heads, title="what to change")
            for remedy in result.remedies:
                left = remedy.margin.margin_bytes
                then = f"{human_bytes(left)} to spare" if remedy.fits else f"{human_bytes(-left)} too much"
                table.add_row(remedy.change, human_bytes(remedy.saved_bytes), then, remedy.margin.category)
            console.print(table)
    elif result.margin is not None:
        least = result.margin
        console.print(
            f"fits: rank {least.rank}, which has least to spare, has {human_bytes(least.margin_bytes)} left "
            f"of {human_bytes(least.memory_bytes)}; largest at the peak: {least.category}"
        )


def _collective_table(result: Result, title: str) -> Table:
    """Return a table of a step's collectives; those that many groups carry out alike have one row.

    `size` is that of one call, and `carried` what it sends of that on average, where data decide it.
    """
    alike: dict[tuple[str, ...], list[Sequence[int]]] = {}
    for entry in result.collectives:
        carried = "all" if entry.payload_bytes is None else human_bytes(entry.payload_bytes / entry.count)
        key = (entry.kind, str(entry.count), human_bytes(entry.bytes), carried, str(len(entry.group)))
        alike.setdefault(key, []).append(entry.group)
    table = folding(("collective", "ranks", "count", "size", "carried"), title=title)
    for (kind, count, size, carried, _), (group, *others) in alike.items():
        as_well = f"as {'does' if len(others) == 1 else 'do'} {len(others):,} other group{'s'[: len(others) > 1]}"
        ranks = f"{rank_list(group)}; {as_well} of {len(group)}" if others else rank_list(group)
        table.add_row(kind, ranks, count, size, carried)
    return table


def _target_density(result: Result) -> list[str]:
    """Return the density of a push with a target density, and the reason where it differs."""
    push, density = result.scenario["plan"]["push"], result.density.push
    if push["kind"] != "target-density" or density is None:
        return []
    word = "predicted" if result.source == "simulated" else "realised"
    line = f"target density {push['threshold']:.4g}: {density:.4g} {word}"
    if abs(density - push["threshold"]) <= TOLD_RATIO * push["threshold"]:
        return [line]
    return [
        f"{line}; thresholds follow a sample of each step's gradients (plan.push.reestimate_steps); zeros are never "
        "sent, and of a small tensor at least one element is"
    ]


def _band(result: Result) -> list[str]:
    """Return a line on the range of a prediction, where gradient statistics were transferred from other models."""
    band, density = result.band, result.density
    if band is None:
        return []
    ranges = [
        f"{name} {low:.3%} to {high:.3%}"
        for name, low, high in (
            ("push density", density.push_low, density.push_high),
            ("publish density", density.publish_low, density.publish_high),
        )
        if low is not None and high is not None
    ]
    times = f"step {human_seconds(band.step_time_low_s)} to {human_seconds(band.step_time_high_s)}"
    return [
        f"statistics transferred from the family {band.family} (small models), density within a factor of "
        f"{band.density_error_ratio:.3g}: {', '.join([*ranges, times])}; to measure them: gsreal gradients"
    ]


def _periods(result: Result) -> list[str]:
    """Return a line on inner and outer steps, where ranks synchronize periodically."""
    periods = result.periods
    if periods is None:
        return []
    inner = "" if periods.inner_step_time_s is None else f"inner step {human_seconds(periods.inner_step_time_s)}, "
    mean_bytes = periods.outer_bytes / periods.every_steps
    if periods.begin_steps:
        begin = "" if periods.begin_step_time_s is None else f"begin step {human_seconds(periods.begin_step_time_s)}, "
        fragments = ", ".join(
            f"{first}" if first == last else f"{first} to {last}"
            for first, last in zip(periods.begin_steps, periods.outer_steps, strict=True)
        )
        return [
            f"{inner}{begin}outer step {human_seconds(periods.outer_step_time_s)}; of every {periods.every_steps} "
            f"steps, fragments are exchanged from the end of step {fragments}; {human_bytes(periods.outer_bytes)} "
            f"synchronized in a period, {human_bytes(mean_bytes)} in the mean step"
        ]
    return [
        f"{inner}outer step {human_seconds(periods.outer_step_time_s)}, every {periods.every_steps} steps; "
        f"{human_bytes(periods.outer_bytes)} synchronized in an outer step, {human_bytes(mean_bytes)} in the mean step"
    ]


TOLD_RATIO = 0.05
"""Relative difference of a density from its target from which on it is explained."""


def _print_points(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a row for each point, or a column where figures have no room; names, which begin alike, are whole."""
    names, *columns = zip(heads, *rows, strict=True)
    longest_name = max(map(len, names))
    whole = [max(map(len, column)) for column in columns]
    in_lines = [max(map(len, [*head.split(), *cells])) for head, *cells in columns]  # headings broken into words
    broken = [max(len(word) for cell in column for word in cell.split()) for column in columns]  # and cells
    for widths in (whole, in_lines, broken):
        name_width = min(longest_name, console.width - sum(widths) - 3 * len(heads) - 1)
        if name_width >= min(longest_name, LEAST_NAME):
            figures = (Column(head, width=width) for head, width in zip(heads[1:], widths, strict=True))
            table = Table(Column(heads[0], overflow="fold", width=name_width), *figures)
            for row in rows:
                table.add_row(*row)
            console.print(table)
            return
    _print_by_columns(console, heads, rows, names=1)


LEAST_NAME = 8
"""Least width of a column of names, which are folded."""


def write_or_print(text: str, file: Path | None) -> None:
    """Write text to a file, or print it if there is none."""
    if file is not None:
        write_text(file, text)
    else:
        sys.stdout.write(text)


def print_as_json(results: Sequence[Result]) -> None:
    """Print Results as a JSON list."""
    print(json.dumps([result.to_dict() for result in results], indent=2, allow_nan=False))


def print_results(results: Sequence[Result], question: str) -> None:
    """Print a sweep's Results for people, a line each."""
    console = plain_console(PIPE_WIDTH)
    if question:
        console.print(one_line(question), style="bold")
    heads = ("point", "ranks", "step", "waits", "samples/s", "peak allocated", "push", "publish", "fits")
    rows = []
    for result in results:
        waits = result.phases_s["exposed_communication"] / result.step_time_s if result.step_time_s else 0.0
        densities = (result.density.push, result.density.publish)
        row = [
            result.scenario["name"],
            _of_all(sum(entry.count for entry in result.ranks), len(result.idle_devices)),
            human_seconds(result.step_time_s),
            f"{waits:.0%}",
            f"{result.throughput_samples_per_s:.4g}",
            human_bytes(max(entry.peak_allocated_bytes for entry in result.ranks)),
            *("" if density is None else f"{density:.2%}" for density in densities),
            "yes" if result.fits else "no",
        ]
        rows.append(row)
    _print_points(console, heads, rows)


FASTEST = 12
"""Number of rows shown of a large table."""


def print_table(table: "polars.DataFrame", question: str) -> None:
    """Print a sweep's table for people: all of a small one, the fastest points that fit of a large one."""
    console = plain_console(PIPE_WIDTH)
    if question:
        console.print(one_line(question), style="bold")
    counts = Counter(table["status"])
    shown = table
    if table.height > 4 * FASTEST:
        fitting = table.filter(table["status"] == "fits")  # steps of few samples are short
        shown = fitting.sort("throughput_samples_per_s", descending=True, maintain_order=True).head(FASTEST)
        by_status = ", ".join(f"{count:,} {'fit' if status == 'fits' else status}" for status, count in counts.items())
        console.print(f"{table.height:,} points: {by_status}; the fastest of those that fit:")
    pushes = ["push"] if any(density is not None for density in shown["push_density_ratio"]) else []
    rows = []
    for row in shown.iter_rows(named=True):
        cells = [""] * 6
        if row["step_time_s"] is not None:
            cells = [
                _of_all(row["ranks"], row["idle_devices"]),
                human_seconds(row["step_time_s"]),
                f"{row['exposed_communication_s'] / row['step_time_s'] if row['step_time_s'] else 0.0:.0%}",
                f"{row['throughput_samples_per_s']:.4g}",
                human_bytes(row["peak_allocated_bytes"]),
                "" if row["push_density_ratio"] is None else f"{row['push_density_ratio']:.2%}",
            ]
        rows.append([row["point"], *(cells if pushes else cells[:-1]), row["status"]])
    _print_points(console, ("point", "ranks", "step", "waits", "samples/s", "peak allocated", *pushes, "status"), rows)
    unanswered = table.filter(table["step_time_s"].is_null()).rows(named=True)
    reasons = Counter((str(row["status"]), str(row["reason"] or "")) for row in unanswered)
    for (status, reason), count in reasons.most_common(SHOWN_REASONS):
        console.print(f"{status}: {count:,} {'point' if count == 1 else 'points'}: {reason}")
    if len(reasons) > SHOWN_REASONS:
        console.print(f"{len(reasons) - SHOWN_REASONS} more reasons are in the table's column reason")


SHOWN_REASONS = 6
"""Most reasons of points without a prediction that are shown."""


def _of_all(ranks: int, idle: int) -> str:
    """Return the number of ranks, and that of devices if some are idle."""
    return f"{ranks} of {ranks + idle}" if idle else str(ranks)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr from the first call of its callback of (done, total), which it provides."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    progress = Progress(TextColumn(what), *columns, console=Console(stderr=True))
    task = progress.add_task(what, total=None)

    def on_progress(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield on_progress
    finally:
        if progress.live.is_started:  # an error before anything was done is one line
            progress.stop()


def _division_table(result: Result) -> Table:
    """Return a table of the batch splits and shard shares in the course of the run, with their step times."""
    table = folding(("from step", "samples", "shard shares", "median step"), title="divided anew")
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


def fits_width(console: Console, table: Table) -> bool:
    """Return whether a table can be printed without breaking a word."""
    unbounded = console.options.update(max_width=sys.maxsize)
    return console.measure(table, options=unbounded).maximum <= console.width


def _print_ranks(console: Console, result: Result) -> None:
    """Print memory and phases by rank: a row for ranks with equal figures or, where that is too wide, a column."""
    heads, rows = _rank_cells(result)
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    if fits_width(console, table):
        console.print(table)
    else:
        _print_by_columns(console, heads, rows, names=2)


def _print_by_columns(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], *, names: int) -> None:
    """Print tables that have a column for each of `rows`, as many side by side as there is room for."""
    while rows:
        count = min(len(rows), max(1, console.width // LEAST_COLUMN))
        while not fits_width(console, table := _by_columns(heads, rows[:count], names)) and count > 1:
            count -= 1
        console.print(table)
        rows = rows[count:]


LEAST_COLUMN = 6
"""Least width of a column of figures with its borders."""


def _by_columns(heads: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> Table:
    """Return a table that has a column for each of `rows`, whose first `names` cells name it."""
    first, *others = zip(heads, *rows, strict=True)
    table = folding(first)
    for place, cells in enumerate(others, start=1):
        table.add_row(*cells, end_section=place == names - 1)
    return table


def folding(heads: Sequence[str], **settings: Any) -> Table:
    """Return a table whose words are broken where there is no room; a word that is cut off could be any of two."""
    return Table(*(Column(head, overflow="fold") for head in heads), **settings)


def _rank_cells(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return the column headings and the rows of a table of ranks."""
    reserves = any(entry.fragmentation_ratio for entry in result.ranks)
    constants = list(dict.fromkeys(name for entry in result.ranks for name in entry.outside_bytes))
    memory = ["peak allocated", *(["peak reserved", "unused of it"] if reserves else [])]
    memory += [name.replace("_", " ") for name in constants]
    phases = [name for name in result.phases_s if any(entry.phases_s[name] for entry in result.ranks)]
    imbalances_s = [result.imbalance_s(entry) for entry in result.ranks]
    least_s = SHOWN_IMBALANCE_RATIO * result.step_time_s
    shown = list(phases)
    if max(imbalances_s) > least_s:
        shown.insert(phases.index("exposed_communication") + 1, IMBALANCE)
    total = result.scenario["workload"]["global_batch_size"]
    shares = {
        "samples": [f"{round(entry.batch_share * total):,}" for entry in result.ranks],
        "shard": [f"{entry.shard_share:.2%}" for entry in result.ranks],
    }
    shares = {head: column for head, column in shares.items() if len(set(column)) > 1}  # only what differs
    alike: dict[tuple[str, ...], list[int]] = {}
    for place, (entry, imbalance_s) in enumerate(zip(result.ranks, imbalances_s, strict=True)):
        times = {phase: human_seconds(entry.phases_s[phase]) for phase in phases}
        times[IMBALANCE] = human_seconds(imbalance_s) if imbalance_s > least_s else f"< {SHOWN_IMBALANCE_RATIO:.0%}"
        known = entry.peak_reserved_bytes is not None
        reserved = [human_bytes(entry.peak_reserved_bytes or 0.0), f"{entry.fragmentation_ratio or 0.0:.1%}"]
        cells = (
            entry.device,
            *(cells[place] for cells in shares.values()),
            human_bytes(entry.peak_allocated_bytes),
            *((reserved if known else ["", ""]) if reserves else ()),
            *(human_bytes(entry.outside_bytes.get(name, 0.0)) for name in constants),
            *(times[name] for name in shown),
        )
        alike.setdefault(cells, []).extend(entry.ranks)
    heads = ["ranks", "device", *shares, *memory, *(name.replace("_", " ") for name in shown)]
    return heads, [[rank_list(sorted(ranks)), *cells] for cells, ranks in alike.items()]


SHOWN_IMBALANCE_RATIO = 0.01
"""Least part of a step for which a rank waits for slower ones that is shown."""
IMBALANCE = "of which for slower ranks"
"""Name of the row with `Result.imbalance_s`, below exposed communication."""


def _link_table(result: Result) -> Table:
    """Return a table of the busiest links; those with equal figures have one row."""
    table = folding(("link", "equal ones", "bytes", "used"), title="busiest links")
    alike: dict[tuple[str, str], list[LinkUse]] = {}
    for link in sorted(result.links, key=lambda link: (-link.utilisation_ratio, link.name)):
        if link.bytes:
            alike.setdefault((human_bytes(link.bytes), f"{link.utilisation_ratio:.1%}"), []).append(link)
    for (size, used), links in list(alike.items())[:SHOWN_LINKS]:
        table.add_row(links[0].name, str(sum(link.count for link in links)), size, used)
    return table


SHOWN_IDLE = 6
"""Number of names of idle devices that are shown, besides the last one."""


def idle_list(names: Sequence[str]) -> str:
    """Return a short list of the idle devices, with their number.

    >>> idle_list(["c", "d"]), idle_list([str(i) for i in range(2, 100)])
    ('c, d (2 devices take no part)', '2, 3, 4, 5, 6, 7, ..., 99 (98 devices take no part)')
    """
    shown = [*names[:SHOWN_IDLE], "...", names[-1]] if len(names) > SHOWN_IDLE + 1 else names
    takes = "device takes" if len(names) == 1 else "devices take"
    return f"{', '.join(shown)} ({len(names):,} {takes} no part)"


def rank_list(ranks: Sequence[int]) -> str:
    """Return a short list of sorted ranks: runs by their ends, and only the first few of them.

    >>> rank_list((0, 1, 2, 5, 7, 8))
    '0-2, 5, 7-8'
    """
    breaks = [i + 1 for i, (left, right) in enumerate(pairwise(ranks)) if right != left + 1]
    runs = [(ranks[start], ranks[end - 1]) for start, end in pairwise([0, *breaks, len(ranks)])]
    shown = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs[:6])
    return shown + (f", ... ({len(ranks)} in all)" if len(runs) > 6 else "")


INTERRUPTED = 130
"""Exit code of typer for the user's interrupt."""
USAGE_ERROR: Any = typer.BadParameter.__base__
"""Base of typer's errors for unknown, missing or invalid options and arguments."""
HELP_ERROR = "NoArgsIsHelpError"
"""Name of its error where there is no command: the message is the help itself."""
STREAM_ERRORS = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF, errno.EDQUOT)
LONGEST_LINE = 300
SILENT_S = 2.0
"""Time after which a command reports its activity."""


ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that, like the user's interrupt, unwind the stack."""


class EndedError(SystemExit):
    """A signal asked this process to end; its exit code is the shell's for that signal."""


_ended: list[EndedError] = []
"""The signal that ended this process, if one did."""


def _unwind(number: int, frame: FrameType | None) -> None:
    for each in ENDING:  # a second signal must not interrupt the cleanup
        signal.signal(each, signal.SIG_IGN)
    _ended.append(EndedError(128 + number))
    raise _ended[-1]


@contextmanager
def unwinding() -> Iterator[None]:
    """Let signals that end the process raise EndedError, so that temporary folders and locks are removed.

    Signals that are ignored at the start, as under `nohup`, stay ignored. Libraries raise exceptions of their own for a
    signal that arrives in a callback or in the middle of an import; the signal's is raised in their place. So is the
    user's interrupt, unless it was reported as the error of a run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if usual:  # else this context is inside another one
        _ended.clear()
    for number in usual:
        signal.signal(number, _unwind)
    try:
        yield
    except Exception as error:
        if _ended:
            raise _ended[-1] from None
        if not isinstance(error, UserError | RunFailedError) and _follows_interrupt(error):
            raise KeyboardInterrupt from None
        raise
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def _follows_interrupt(error: Exception) -> bool:
    """Return whether an exception was raised for the user's interrupt, or while that was handled."""
    before: BaseException | None = error
    while before is not None:
        # pydantic names a callback's exception, at times, in its text alone
        if isinstance(before, KeyboardInterrupt) or "KeyboardInterrupt" in str(before):
            return True
        before = before.__cause__ or before.__context__
    return False


class _ClosedOutput(io.TextIOWrapper):
    """A standard output that is closed: writing to it raises OSError (EBADF)."""

    def write(self, text: str) -> int:
        """Raise OSError for any text but the empty one."""
        if text:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return 0


def run_command_line(app: typer.Typer, program: str, *, interrupted: str = "") -> None:
    """Run a typer application: exit code 2 for errors of the user, 1 for failed runs, each with one line.

    `interrupted`: message after the user's interrupt, if any. Every command has the option `--no-limits`.
    """
    for command in app.registered_commands:
        if command.callback is not None and not hasattr(command.callback, "lifts_limits"):
            command.callback = _lifting(command.callback)
    with contextlib.ExitStack() as closed:
        # a stream that the caller has closed (`>&-`): messages are dropped, but data that cannot be written is an error
        for name, kind in (("stdout", _ClosedOutput), ("stderr", io.TextIOWrapper)):
            if getattr(sys, name) is None:
                nowhere = closed.enter_context(open(os.devnull, "wb"))  # takes the number of the closed descriptor
                setattr(sys, name, kind(nowhere, encoding="utf-8"))
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # paths are printed as they are, text in UTF-8 or not
        _run_command_line(app, program, interrupted)


def _run_command_line(app: typer.Typer, program: str, interrupted: str) -> None:
    try:
        if "--out=" in sys.argv or ("--out", "") in pairwise(sys.argv):  # as a path, the empty text is this folder
            raise UserError("--out '': is empty; allowed: a path, such as . for the working folder")
        with unwinding(), restored():
            code = app(standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        _end(program, str(error), 2)
    except USAGE_ERROR as error:
        if type(error).__name__ == HELP_ERROR:
            print(error.format_message(), file=sys.stderr)
            raise SystemExit(2) from None
        path = error.ctx.command_path if error.ctx is not None else program
        _end(program, f"{error.format_message().rstrip('.')} (see `{path} --help`)", 2)
    except RunFailedError as error:
        _end(program, str(error), 1)
    except KeyboardInterrupt:  # before typer listens, or after
        code = INTERRUPTED
    except MemoryError:
        _end(program, "out of memory: needs more than there is", 1)
    except OSError as error:
        _end_with_file(program, error)
    if interrupted and code == INTERRUPTED:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
    raise SystemExit(code or 0)


def _end_with_file(program: str, error: OSError) -> None:
    """Exit with the error of a file or of the output; raise others."""
    if error.filename is not None:  # a name that is too long, or a folder on the way that may not be read
        _end(program, f"{error.filename}: {error.strerror}", 2)
    if error.errno not in STREAM_ERRORS:
        raise error
    with contextlib.suppress(OSError, ValueError):  # discard buffered output: the interpreter would try again at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    if error.errno == errno.EPIPE:  # the reader has closed the pipe
        raise SystemExit(1) from None
    _end(program, f"output cannot be written: {error.strerror}", 1)


def _end(program: str, message: str, code: int) -> None:
    with contextlib.suppress(OSError):
        # a line may be longer by existing paths from the command line
        words = {part for word in sys.argv[1:] for part in (word, word.partition("=")[2])}
        paths = [word for word in words if os.sep in word and word in message and os.path.exists(word)]
        longest = LONGEST_LINE + sum(len(path) * message.count(path) for path in paths)
        print(one_line(f"{program}: {message}", longest), file=sys.stderr)
    raise SystemExit(code) from None


def _lifting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the option `--no-limits` added, and its help in whole paragraphs."""

    @functools.wraps(command)
    def run(*arguments: Any, no_limits: bool = False, **options: Any) -> Any:
        if no_limits:
            lift()
        return command(*arguments, **options)

    kind = Annotated[bool, typer.Option("--no-limits", help="Lift all limits on sizes.")]
    option = inspect.Parameter("no_limits", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
    written = inspect.signature(command)
    vars(run)["__signature__"] = written.replace(parameters=[*written.parameters.values(), option])
    run.__annotations__ = {**command.__annotations__, "no_limits": kind}
    vars(run)["lifts_limits"] = True
    # typer keeps the line breaks of a docstring's later paragraphs, which are those of the code and not of the terminal
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return run


@contextmanager
def activity(command: str) -> Iterator[Callable[[str], None]]:
    """Provide a callback for a command's activity, reported on stderr after two seconds, or at an interrupt."""
    now = ""
    timer: threading.Timer | None = None

    def end_report() -> None:
        if timer is not None:
            timer.cancel()
            timer.join()  # if it has begun to print: later, stderr may be another stream, or closed

    def report(what: str) -> None:
        nonlocal now, timer
        end_report()
        now = what
        timer = threading.Timer(SILENT_S, print, (f"{command}: {what} ...",), {"file": sys.stderr, "flush": True})
        timer.daemon = True
        timer.start()

    try:
        yield report
    except KeyboardInterrupt:
        print(f"{command}: interrupted{f' while {now}' if now else ''}", file=sys.stderr)
        raise
    finally:
        end_report()
