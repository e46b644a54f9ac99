"""`python -m analysis`: studies of results. Data goes to stdout, talk to stderr; exit 2 where the input is wrong."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gssim.errors import UserError
from gssim.files import check_place, locked, write_text
from gssim.terminal import INTERRUPTED, run_command_line
from gssim.units import human_bytes

if TYPE_CHECKING:
    from analysis.compare.comparison import Joined
    from analysis.study.rows import Row

EXTRA = frozenset({"polars", "matplotlib", "networkx"})
"""What `pip install 'gssim[analysis]'` brings; imported inside commands, so that a missing one can be named."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Explain results: predicted beside measured, and what thresholds do to a training, as tables and charts."""


@app.command("compare")
def compare_command(
    results: Annotated[list[Path], typer.Argument(help="Result files; folders, archives (.tar.xz) to search.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for comparison.csv and the charts.")],
) -> None:
    """Join predictions with measurements of the same scenario: tables, comparison.csv, groups.csv and charts."""
    from analysis import charts
    from analysis.compare.comparison import compare, join
    from analysis.compare.groups import group_table
    from analysis.compare.report import print_comparison
    from analysis.compare.rivals import rival_table
    from analysis.compare.table import find_results
    from analysis.compare.versions import differences
    from gssim.sweeps import csv_of

    found = find_results(results)
    joined = join(found.files)
    _tell(joined, found.skipped)
    for difference in differences(joined.pairs):
        _say(difference)
    if not joined.pairs:
        raise UserError(
            f"{', '.join(map(str, results))}: nothing to compare: {_sides(joined)}; "
            "needed: results of both sides with the same scenario_id (predict with `gssim run` or `gssim sweep --out`)"
        )
    comparison = compare(joined.pairs)
    groups = group_table(comparison)
    # drawn before anything is written: a fault leaves no half of the answer
    rivals = rival_table(joined.pairs)
    drawn = charts.comparison_charts(comparison, rivals)
    tables = {"comparison.csv": comparison, "groups.csv": groups}
    if not rivals.is_empty():
        tables["gs_against_dense.csv"] = rivals
    for name, table in tables.items():
        write_text(out / name, csv_of(table))
    pictures = charts.save_all(drawn, out)
    print_comparison(comparison, groups)
    for path in (*(out / name for name in tables), *pictures):
        print(path)


@app.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(help="Of the scenarios; the page is its README.md.")] = Path("scenarios"),
) -> None:
    """Print every key of scenario, cluster, model, sweep and study files, in Markdown."""
    from analysis.reference_page.page import page

    sys.stdout.write(page(folder))


@app.command("timeline")
def timeline_command(
    predicted: Annotated[Path, typer.Argument(help="Trace of `gssim run --trace`.")],
    measured: Annotated[Path, typer.Argument(help="Trace of `gsreal run --trace` or `gsreal lab --trace`.")],
    out: Annotated[Path, typer.Option("--out", help="Picture to write (PNG or SVG).")],
) -> None:
    """Draw one step of the same scenario, predicted above measured: rank by rank on one time axis."""
    from analysis import charts
    from analysis.compare.timeline import named_alike, read_step

    _check_picture(out)
    sides = read_step(predicted), read_step(measured)
    for side, source, path in zip(sides, ("simulated", "measured"), (predicted, measured), strict=True):
        if side.source not in (None, source):
            raise UserError(f"{path}: a {side.source} step where the {source} one belongs")
    if None not in (ids := {side.scenario_id for side in sides}) and len(ids) > 1:
        both = " and ".join(str(side.scenario_id) for side in sides)
        raise UserError(f"{predicted}, {measured}: traces of different scenarios ({both})")
    figure = charts.timeline(named_alike(*sides), sides[1], names=(predicted.name, measured.name))
    charts.save(figure, out)
    print(out)


@app.command("sweep")
def sweep_command(
    table: Annotated[Path, typer.Argument(help="Table of `gssim sweep --out FILE` (Parquet or CSV).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the charts, each as PNG and SVG.")],
) -> None:
    """Draw what a sweep's points allow: step time by threshold, who wins, fronts, memory, scaling."""
    from analysis import charts
    from analysis.page.sweep import summary
    from analysis.sweeps.table import read_table

    check_place(out / "memory_by_category.png")
    read = read_table(table)
    drawn = charts.sweep_charts(read)
    if not drawn:
        raise UserError(f"{table}: nothing to draw: none of its {len(read.rows)} points has an answer")
    for sentence in (read.question, *summary(read)):
        if sentence:
            print(sentence)
    for path in charts.save_all(drawn, out):
        print(path)


@app.command("report")
def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with Results, a sweep's table, a comparison or a study.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Page to write; absent: report.html in the folder.")] = None,
) -> None:
    """Write one HTML page of all that a folder holds: questions, tables, charts, bottlenecks, provenance."""
    from analysis.page.report import report

    page = out or folder / "report.html"
    if folder.is_dir():
        check_place(page)
    write_text(page, report(folder))
    print(page)


@app.command("draw")
def draw_command(
    cluster: Annotated[Path, typer.Argument(help="A cluster file.")],
    out: Annotated[Path, typer.Option("--out", help="Picture to write (PNG or SVG).")],
) -> None:
    """Draw a cluster: its servers, devices, switches and links; what repeats itself is counted, not drawn."""
    from analysis import charts
    from analysis.draw.draw import draw
    from gssim.scenario import load_cluster

    _check_picture(out)
    charts.save(draw(load_cluster(cluster), file=cluster.name), out)
    print(out)


def _check_picture(out: Path) -> None:
    """Raise UserError where a picture cannot be written, before anything is read or drawn."""
    if out.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--out {out}: is a PNG or SVG file, whose name must end in .png or .svg")
    check_place(out)


@app.command("convergence")
def convergence_command(
    study: Annotated[Path, typer.Argument(help="A study's file, such as scenarios/studies/gpt-byte.toml.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for trainings, which are kept, table and charts.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of every variant.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Only the first of the study's seeds.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Train also what is in --out already.")] = False,
) -> None:
    """Train a study's variants for real, seed by seed: quality against threshold, bytes and time."""
    from analysis import charts
    from analysis.study.findings import findings_of
    from analysis.study.rows import rows_of, write_csv
    from analysis.study.runs import train
    from analysis.study.study import load_study

    check_place(out / "convergence.csv")
    loaded = load_study(study, tuple(overrides or ()), seeds=seeds)
    with locked(out / ".analysis-study.lock", place=str(out)):
        rows = rows_of(loaded.study, train(loaded, out, again=again))
        found = findings_of(loaded.study, rows)
        drawn = charts.study_charts(loaded.study, rows, found)
        write_text(out / "convergence.csv", write_csv(rows))
        write_text(out / "findings.txt", "".join(f"{sentence}.\n" for sentence in found.all))
        pictures = charts.save_all(drawn, out)
    print_study(rows, found.all)
    for path in (out / "convergence.csv", out / "findings.txt", *pictures):
        print(path)


@app.command("seeds")
def seeds_command(
    scenarios: Annotated[Path, typer.Option("--scenarios", help="Folder of the scenarios.")] = Path("scenarios"),
    slow: Annotated[bool, typer.Option("--slow", help="Simulate MT-NLG's pipelines too: two minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON.")] = False,
) -> None:
    """Put the figures that the project's starting texts state beside ours: which are physically consistent."""
    from analysis.literature.headlines import all_lines
    from analysis.literature.headlines.line import print_lines

    found = all_lines(scenarios, slow=slow)
    if as_json:
        print(json.dumps([asdict(line) for line in found], indent=2))
    else:
        print_lines(found)


@app.command("published")
def published_command(
    files: Annotated[list[Path], typer.Argument(help="Tables of measured figures (CSV).")],
    jobs: Annotated[int | None, typer.Option("--jobs", help="Rows at a time; as many as cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Scores and every row's figures as JSON.")] = False,
) -> None:
    """Predict what others measured, row by row: errors by source, beside a naive baseline."""
    from analysis.literature import score as report
    from analysis.literature.score import score
    from gssim.execution import usable_cores

    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: must be at least 1")
    with report.progress() as told:
        scores = score(files, jobs=jobs or usable_cores(), told=told)
    for line in (*scores.refused, *scores.faults):
        _say(line)
    if as_json:
        print(json.dumps(report.as_json(scores), indent=1))
    else:
        report.print_scores(scores)
    if scores.interrupted or scores.faults:
        raise typer.Exit(INTERRUPTED if scores.interrupted else 1)


def print_study(rows: "list[Row]", findings: tuple[str, ...]) -> None:
    """Print a study for people: a line a variant, each speed-up beside density and loss; then what was found."""
    from analysis.compare.report import console

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


def study_cells(row: "Row") -> tuple[str, ...]:
    """Return what the table says of a variant; speeds are multiples of dense's."""
    from analysis.compare.report import shown
    from analysis.study.findings import interval, percentage
    from analysis.study.runs import HERE

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


MOST_NAMED = 5
"""Results that are named one by one."""


def _tell(joined: "Joined", skipped: int) -> None:
    """Say on stderr what is not in the comparison, and why."""
    if skipped:
        _say(f"{skipped} other JSON file{'s' if skipped > 1 else ''} skipped")
    for older, newer in joined.superseded:
        _say(f"{older.path}: superseded by the newer {newer.path} (same scenario_id, {newer.result.source})")
    for source, missing in (("simulated", "measurement"), ("measured", "prediction")):
        alone = [file for file in joined.unmatched if file.result.source == source]
        for file in alone[:MOST_NAMED]:
            _say(f"{file.path}: unmatched: no {missing} of scenario {file.result.scenario_id}")
        if len(alone) > MOST_NAMED:
            _say(f"{len(alone) - MOST_NAMED} more {source} Results are unmatched: no {missing} of their scenarios")


def _say(text: str) -> None:
    print(f"analysis: {text}", file=sys.stderr)


def _sides(joined: "Joined") -> str:
    sources = [file.result.source for file in joined.unmatched]
    return f"{sources.count('simulated')} simulated and {sources.count('measured')} measured results, none matching"


def main() -> None:
    """Run the command line; a fault of the user's is one line and exit 2."""
    try:
        run_command_line(app, "analysis", interrupted="what is finished is kept")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(f"analysis: needs {package}, which is not installed: pip install 'gssim[analysis]'", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
