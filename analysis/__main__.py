"""`python -m analysis`: studies of results. Data goes to stdout, talk to stderr; exit 2 where the input is wrong."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from gssim.ending import run_command_line
from gssim.result import write_text
from gssim.units import UserError, human_bytes, human_seconds

if TYPE_CHECKING:
    import polars as pl

    from analysis.compare import Joined
    from analysis.convergence.rows import Row
    from analysis.seeds import Line

EXTRA = frozenset({"polars", "matplotlib", "networkx"})
"""What `pip install 'gssim[analysis]'` brings; imported inside commands, so that a missing one can be named."""
PIPE_WIDTH = 120
DIFFERENCES_SHOWN = 4

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Explain results: predicted beside measured, and what thresholds do to a training, as tables and charts."""


@app.command("compare")
def compare_command(
    results: Annotated[list[Path], typer.Argument(help="Result files, or folders to search for them.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for comparison.csv and the charts.")],
) -> None:
    """Join predictions with measurements of the same scenario: a table, comparison.csv and two charts."""
    from analysis import charts
    from analysis.compare import compare, join
    from analysis.table import find_results

    found = find_results(results)
    joined = join(found.files)
    _tell(joined, found.skipped)
    if not joined.pairs:
        raise UserError(
            f"{', '.join(map(str, results))}: nothing to compare: {_sides(joined)}; "
            "needed: results of both sides with the same scenario_id"
        )
    comparison = compare(joined.pairs)
    # drawn before anything is written: a fault leaves no half of the answer
    figures = {
        "predicted_vs_measured.png": charts.predicted_vs_measured(comparison),
        "phases.png": charts.phases(comparison),
    }
    try:
        write_text(out / "comparison.csv", comparison.write_csv())
        for name, figure in figures.items():
            charts.save(figure, out / name)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    print_comparison(comparison)
    for name in ("comparison.csv", *figures):
        print(out / name)


@app.command("draw")
def draw_command(
    cluster: Annotated[Path, typer.Argument(help="A cluster file.")],
    out: Annotated[Path, typer.Option("--out", help="Picture to write (PNG).")],
) -> None:
    """Draw a cluster: its servers, devices, switches and links; what repeats itself is counted, not drawn."""
    from analysis import charts
    from analysis.draw import draw
    from gssim.scenario import load_cluster

    figure = draw(load_cluster(cluster), file=cluster.name)
    try:
        charts.save(figure, out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    print(out)


@app.command("convergence")
def convergence_command(
    study: Annotated[Path, typer.Argument(help="A study's file, such as scenarios/studies/gpt-byte.toml.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for trainings, which are kept, table and charts.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of every variant.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Only the first of the study's seeds.")] = None,
) -> None:
    """Train a study's variants for real, seed by seed: quality against threshold, bytes and time."""
    from analysis import charts
    from analysis.convergence.findings import findings_of
    from analysis.convergence.rows import rows_of, write_csv
    from analysis.convergence.runs import train
    from analysis.convergence.study import load_study

    loaded = load_study(study, tuple(overrides or ()), seeds=seeds)
    rows = rows_of(loaded.study, train(loaded, out))
    found = findings_of(loaded.study, rows)
    figures = {
        "loss_against_threshold.png": charts.convergence.against_threshold(loaded.study, rows, found),
        "loss_against_bytes.png": charts.convergence.against_bytes(loaded.study, rows, found),
        "loss_against_time.png": charts.convergence.against_time(loaded.study, rows, found),
        "loss_by_step.png": charts.convergence.by_step(loaded.study, rows, found),
    }
    write_text(out / "convergence.csv", write_csv(rows))
    write_text(out / "findings.txt", "".join(f"{sentence}.\n" for sentence in found.all))
    for name, figure in figures.items():
        charts.save(figure, out / name)
    print_study(rows, found.all)
    for name in ("convergence.csv", "findings.txt", *figures):
        print(out / name)


@app.command("seeds")
def seeds_command(
    scenarios: Annotated[Path, typer.Option("--scenarios", help="Folder of the scenarios.")] = Path("scenarios"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON.")] = False,
) -> None:
    """Put the figures that the project's starting texts state beside ours: which are physically consistent."""
    from analysis.seeds import all_lines

    found = all_lines(scenarios)
    if as_json:
        print(json.dumps([asdict(line) for line in found], indent=2))
    else:
        print_seeds(found)


def print_seeds(lines: "list[Line]") -> None:
    """Print the figures for people: what is stated, ours, the verdict; below it how and why."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=PIPE_WIDTH)
    source = ""
    for line in lines:
        if line.source != source:
            source = line.source
            console.print(f"\n[bold]{escape(source)}[/bold]")
        console.print(f"{escape(line.figure)}: stated {escape(line.stated)}")
        verdict = line.verdict if line.verdict != "only if" else "consistent only if"
        reason = f": {line.because}" if line.because else ""
        for text in (f"ours: {line.ours}", f"how: {line.how}", f"{verdict}{reason}"):
            console.print(Padding(escape(text), (0, 0, 0, 4)))


def print_study(rows: "list[Row]", findings: tuple[str, ...]) -> None:
    """Print a study for people: a line a variant, each speed-up beside density and loss; then what was found."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=PIPE_WIDTH)
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
        table.add_row(*map(escape, study_cells(row)))
    console.print(table)
    for sentence in findings:
        console.print(f"{sentence}.", markup=False)


def study_cells(row: "Row") -> tuple[str, ...]:
    """Return what the table says of a variant; speeds are multiples of dense's."""
    from analysis.convergence.findings import interval, percentage
    from analysis.convergence.runs import HERE

    speed = row.speed_up
    return (
        f"{row.name} (control)" if row.control else row.name,
        "all" if row.density is None else percentage(row.density),
        _shown(human_bytes(row.sent_bytes)),
        f"{row.loss.mean:.3f} \u00b1 {row.loss.sd:.3f}",
        "" if row.loss_change is None else interval(row.loss_change),
        "1" if speed is None else f"{speed.mean:.2f} [{speed.low:.2f}, {speed.high:.2f}]",
        f"{row.predicted_speed_ups[HERE]:.2f}",
        "" if row.accuracy is None else f"{100 * row.accuracy.mean:.1f} \u00b1 {100 * row.accuracy.sd:.1f}",
    )


def _tell(joined: "Joined", skipped: int) -> None:
    """Say on stderr what is not in the comparison, and why."""
    if skipped:
        _say(f"{skipped} other JSON file{'s' if skipped > 1 else ''} skipped")
    for older, newer in joined.superseded:
        _say(f"{older.path}: superseded by the newer {newer.path} (same scenario_id, {newer.result.source})")
    for file in joined.unmatched:
        missing = "measurement" if file.result.source == "simulated" else "prediction"
        _say(f"{file.path}: unmatched: no {missing} of scenario {file.result.scenario_id}")


def _say(text: str) -> None:
    print(f"analysis: {text}", file=sys.stderr)


def _sides(joined: "Joined") -> str:
    sources = [file.result.source for file in joined.unmatched]
    return f"{sources.count('simulated')} simulated and {sources.count('measured')} measured results, none matching"


def print_comparison(comparison: "pl.DataFrame") -> None:
    """Print a comparison for people: a line a scenario, what communicated differently, the medians."""
    from analysis.compare import medians

    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=PIPE_WIDTH)
    rows = list(comparison.iter_rows(named=True))
    console.print(_comparison_table(rows))
    for row in rows:
        _print_difference(console, row)
    thresholded = [row for row in rows if row["speed_up_over"] is not None]
    if thresholded:
        _print_effects(console, thresholded)
    parts = [f"{m.what} {100 * m.error_ratio:.1f} % (n = {m.n})" for m in medians(comparison)]
    console.print(f"median |error|: {', '.join(parts)}; collectives equal in {_equal(rows)} of {len(rows)}")


def _print_effects(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print what thresholds gained beside what they cost, and beside the run that sends nothing."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("thresholds", overflow="fold", min_width=12)
    table.add_column("dense run")
    for header in ("density\npredicted", "\nmeasured", "speed\npredicted", "\nmeasured", "change of\nlast loss"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, _effect_cells(row)))
    console.print(table)
    if not any(row["threshold"] == math.inf for row in rows):
        console.print("no control: what learning without any push gives is unknown (plan.push.threshold = inf)")


def _effect_cells(row: dict[str, Any]) -> tuple[str, ...]:
    change = row["loss_change_measured_ratio"]
    return (
        f"{row['name']} (control)" if row["threshold"] == math.inf else row["name"],
        row["speed_up_over"],
        _densities(row, "predicted"),
        _densities(row, "measured"),
        f"{row['speed_up_predicted_ratio']:.2f}",
        f"{row['speed_up_measured_ratio']:.2f}",
        "" if change is None else f"{100 * change:+.1f} %",
    )


def _densities(row: dict[str, Any], side: str) -> str:
    """Return the density of what is pushed; after a stroke, that of what is published, where a threshold decides it."""
    pushed, published = (row[f"{exchange}_density_{side}"] for exchange in ("push", "publish"))
    shown = ["all" if pushed is None else f"{100 * pushed:.2g} %"]
    return " / ".join(shown if published is None else [*shown, f"{100 * published:.2g} %"])


def _equal(rows: list[dict[str, Any]]) -> int:
    return sum(row["collectives_equal"] for row in rows)


def _comparison_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("name", overflow="fold", min_width=12)
    table.add_column("method", no_wrap=True)
    for header in (
        "thres-\nhold",
        "step\npredicted",
        "\nmeasured",
        "error\n%",
        "peak\npredicted",
        "\nmeasured",
        "error\n%",
        "collec-\ntives",
        "payload\nerror %",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row["name"]),
            escape(row["method"]),
            "" if row["threshold"] is None else f"{row['threshold']:g}",
            _shown(human_seconds(row["step_time_predicted_s"])),
            _shown(human_seconds(row["step_time_measured_s"])),
            _percent(row["step_time_error_ratio"]),
            _bytes(row["peak_predicted_bytes"]),
            _bytes(row["peak_measured_bytes"]),
            _percent(row["peak_error_ratio"]),
            "equal" if row["collectives_equal"] else "[bold]differ[/bold]",
            _percent(row["payload_error_ratio"]),
        )
    return table


def _print_difference(console: Console, row: dict[str, Any]) -> None:
    """Print where the collectives differ: an error needs an address."""
    if row["collectives_equal"]:
        return
    differences = row["collectives_difference"].split("; ")
    for difference in differences[:DIFFERENCES_SHOWN]:
        console.print(f"{row['name']}: collectives: {difference}", markup=False)
    if len(differences) > DIFFERENCES_SHOWN:
        console.print(
            f"{row['name']}: collectives: {len(differences) - DIFFERENCES_SHOWN} more in comparison.csv", markup=False
        )


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:+.1f}"


def _bytes(size_bytes: float | None) -> str:
    return "" if size_bytes is None else _shown(human_bytes(size_bytes))


def _shown(quantity: str) -> str:
    """Return a quantity with four digits, so that eleven columns fit a terminal: `212.05 ms` as `212.1 ms`."""
    number, unit = quantity.split(" ")
    return f"{float(number):#.4g}".rstrip(".") + f" {unit}" if "." in number else quantity


def main() -> None:
    """Run the command line; a fault of the user's is one line and exit 2."""
    try:
        run_command_line(app, "analysis", interrupted="what is finished is kept: the same command goes on from it")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(f"analysis: needs {package}, which is not installed: pip install 'gssim[analysis]'", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
