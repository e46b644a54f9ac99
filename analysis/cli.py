"""Commands of `python -m analysis`: comparisons, charts, reports, studies and published runs.

Data goes to stdout, messages to stderr. Exit status 2: wrong input.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gssim.errors import UserError, one_line
from gssim.execution.files import check_place, locked, write_bytes, write_text
from gssim.terminal import INTERRUPTED, Overrides, Version, run_command_line

if TYPE_CHECKING:
    from analysis.compare.comparison import Joined
    from analysis.study.study import LoadedStudy

EXTRA = frozenset({"polars", "matplotlib", "networkx", "jinja2", "markupsafe", "tomli_w"})
"""Packages of the extra `gssim[analysis]`; imported inside commands, so that a missing one can be named."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about(version: Version = False) -> None:
    """Compare predictions with measurements and study thresholds, as tables, charts and HTML reports."""


@app.command("compare")
def compare_command(
    results: Annotated[list[Path], typer.Argument(help="Result files; folders, archives (.tar.xz) to search.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for comparison.csv and the charts.")],
) -> None:
    """Join predictions with measurements of the same scenario: tables, comparison.csv, groups.csv and charts.

    Example: python -m analysis compare out/results --out out/comparison
    """
    from analysis import charts
    from analysis.compare.comparison import compare, differences, join
    from analysis.compare.groups import group_table
    from analysis.compare.report import print_comparison
    from analysis.compare.rivals import rival_table
    from analysis.compare.table import find_results
    from gssim.sweeps import csv_of

    check_place(out / "comparison.csv")
    searched = find_results(results)
    joined = join(searched.files)
    _report_unused(joined, searched.skipped)
    for difference in differences(joined.pairs):
        _say(difference)
    if not joined.pairs:
        sources = [file.result.source for file in joined.unmatched]
        simulated, measured = sources.count("simulated"), sources.count("measured")
        raise UserError(
            f"{', '.join(map(str, results))}: nothing to compare: {simulated} simulated and {measured} measured "
            "results, none matching; "
            "needed: results of both sides with the same scenario_id (predict with `gssim run` or `gssim sweep --out`)"
        )
    comparison = compare(joined.pairs)
    groups = group_table(comparison)
    # all charts are drawn before any file is written, so that an error leaves no partial output
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
        print(one_line(str(path)))


@app.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(help="Folder of the scenarios; the page is its README.md.")] = Path(
        "scenarios"
    ),
) -> None:
    """Print the reference of all keys of scenario, cluster, model, sweep and study files, in Markdown."""
    from analysis.reference_page import page

    sys.stdout.write(page(folder))


@app.command("timeline")
def timeline_command(
    predicted: Annotated[Path, typer.Argument(help="Trace of `gssim run --trace`; or a measured one, alone.")],
    measured: Annotated[
        Path | None, typer.Argument(help="Trace of `gsreal run --trace`, `gsreal lab --trace` or `ingest --trace`.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Picture to write (PNG or SVG).")],
) -> None:
    """Draw one step, predicted above measured, or predicted alone: rank by rank on one time axis."""
    from analysis import charts
    from analysis.compare.timeline import read_step, with_common_labels

    _check_picture(out)
    if measured is None:
        step = read_step(predicted)
        alone = "measured" if step.source == "measured" else "predicted"
        charts.save(charts.timeline({alone: step}, names={alone: predicted.name}), out)
        print(one_line(str(out)))
        return
    sides = read_step(predicted), read_step(measured)
    for side, source, path in zip(sides, ("simulated", "measured"), (predicted, measured), strict=True):
        if side.source not in (None, source):
            raise UserError(f"{path}: a {side.source} step where the {source} one belongs")
    if None not in (ids := {side.scenario_id for side in sides}) and len(ids) > 1:
        both = " and ".join(str(side.scenario_id) for side in sides)
        raise UserError(f"{predicted}, {measured}: traces of different scenarios ({both})")
    steps = {"predicted": with_common_labels(*sides), "measured": sides[1]}
    charts.save(charts.timeline(steps, names={"predicted": predicted.name, "measured": measured.name}), out)
    print(one_line(str(out)))


@app.command("ingest")
def ingest_command(
    traces: Annotated[list[Path], typer.Argument(help="Traces of torch.profiler (.json, .json.gz), one of each rank.")],
    scenario: Annotated[Path, typer.Option("--scenario", help="The scenario that the job ran.")],
    out: Annotated[Path, typer.Option("--out", help="Result to write (.json).")],
    overrides: Overrides = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Also write a step of median length, for `timeline`.")
    ] = None,
) -> None:
    """Turn profiler traces of your own job into a measured Result: step, phases, collectives, memory.

    Example: python -m analysis ingest rank*.json.gz --scenario mine.toml --out out/job/measured.json
    """
    from analysis.ingest.job import ingest, print_ingested
    from gssim.execution.files import write_files
    from gssim.scenario import load_scenario

    for path in (out, trace):
        if path is not None:
            if path.suffix != ".json":
                raise UserError(f"{path}: must end in .json")
            check_place(path)
    ingested = ingest(traces, load_scenario(scenario, overrides or []))
    files = {out: ingested.result.to_json().encode()}
    if trace is not None:
        if ingested.trace is None:
            raise UserError(f"--trace {trace}: {traces[0]} is such a trace already")
        files[trace] = ingested.trace.encode()
    write_files(files)
    for note in ingested.notes:
        _say(f"the traces lack: {note}")
    print_ingested(ingested.result)
    for path in files:
        print(one_line(str(path)))


@app.command("sweep")
def sweep_command(
    table: Annotated[
        Path,
        typer.Argument(help="Table of `gssim sweep --out FILE` (Parquet or CSV), or of `gssim search --json` (JSON)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the charts, each as PNG and SVG.")],
) -> None:
    """Draw the charts of a sweep or a search: steps by phase and threshold, fastest plans, fronts, memory, scaling.

    Example: python -m analysis sweep out/table.parquet --out out/charts
    """
    from analysis import charts
    from analysis.html_report.contents import read_points
    from analysis.html_report.sweep import summary

    check_place(out / "memory_by_category.png")
    sweep = read_points(table)
    drawn = charts.sweep_charts(sweep)
    if not drawn:
        raise UserError(f"{table}: nothing to draw: none of its {len(sweep.rows)} points has a prediction")
    for sentence in (sweep.question, *summary(sweep)):
        if sentence:
            print(one_line(sentence))
    for path in charts.save_all(drawn, out):
        print(one_line(str(path)))


@app.command("report")
def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with Results, a sweep's table, a comparison or a study.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Page to write; default: report.html in the folder.")
    ] = None,
) -> None:
    """Write one HTML report of a folder: questions, tables, charts, bottlenecks, provenance."""
    from analysis.html_report.report import report

    page = out or folder / "report.html"
    if folder.is_dir():
        check_place(page)
    write_bytes(page, report(folder).encode(errors="backslashreplace"))  # a path in it may be no text in UTF-8
    print(one_line(str(page)))


@app.command("draw")
def draw_command(
    cluster: Annotated[Path, typer.Argument(help="A cluster file.")],
    out: Annotated[Path, typer.Option("--out", help="Picture to write (PNG or SVG).")],
) -> None:
    """Draw a cluster: servers, devices, switches and links; of repeated servers a few are drawn, the rest counted."""
    from analysis import charts
    from analysis.draw.draw import draw
    from gssim.scenario import load_cluster

    _check_picture(out)
    charts.save(draw(load_cluster(cluster), file=cluster.name), out)
    print(one_line(str(out)))


def _check_picture(out: Path) -> None:
    """Raise UserError where a picture cannot be written, before anything is read or drawn."""
    if out.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--out {out}: must end in .png or .svg: the picture is a PNG or SVG file")
    check_place(out)


@app.command("convergence")
def convergence_command(
    study: Annotated[Path, typer.Argument(help="A study's file, such as scenarios/studies/gpt-byte.toml.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for results (reused by later runs), table and charts.")],
    overrides: Overrides = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Number of the study's seeds to use, the first ones.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Train again even if --out has a result.")] = False,
) -> None:
    """Run the trainings of a study: quality against threshold, bytes and time, over several seeds."""
    from analysis import charts
    from analysis.study.findings import findings_of, print_study
    from analysis.study.rows import rows_of, write_csv
    from analysis.study.study import load_study, train

    check_place(out / "convergence.csv")
    loaded = load_study(study, tuple(overrides or ()), seeds=seeds)
    if loaded.study.together:
        _study_of_rivals(loaded, out, again=again)
        return
    with locked(out / ".analysis-study.lock", place=str(out)):
        rows = rows_of(loaded.study, train(loaded, out, again=again))
        findings = findings_of(loaded.study, rows)
        drawn = charts.study_charts(loaded.study, rows, findings)
        write_text(out / "convergence.csv", write_csv(rows))
        write_text(out / "findings.txt", "".join(f"{sentence}.\n" for sentence in findings.all))
        pictures = charts.save_all(drawn, out)
    print_study(rows, findings.all)
    for path in (out / "convergence.csv", out / "findings.txt", *pictures):
        print(one_line(str(path)))


def _study_of_rivals(loaded: "LoadedStudy", out: Path, *, again: bool) -> None:
    """Train all ranks of every variant in one process; write the table, that of winners, findings and charts."""
    from analysis import charts
    from analysis.study.equal_loss import map_findings, map_points, pushed_variants, write_map
    from analysis.study.rivals import findings, inputs_of, train_together, winners_table, write_table

    study = loaded.study
    with locked(out / ".analysis-study.lock", place=str(out)):
        courses = train_together(loaded, out, again=again)
        sentences, winners = findings(courses, study.dense, study.silent), winners_table(courses, study.dense)
        drawn = charts.rivals_charts(courses, study.dense, sentences)
        write_text(out / "convergence.csv", write_table(courses, study.dense))
        write_text(out / "winners.md", winners)
        if study.map:
            points = map_points(loaded, courses, inputs_of(loaded, out), study.map)
            ours = pushed_variants(courses, study.silent)
            mapped = map_findings(points, ours)
            sentences += mapped
            write_text(out / "fastest_to_equal_loss.csv", write_map(points))
            drawn.append(charts.equal_loss_map(points, ours, mapped))
        write_text(out / "findings.txt", "".join(f"{sentence}.\n" for sentence in sentences))
        pictures = charts.save_all(drawn, out)
    print("\n".join(map(one_line, winners.splitlines())))
    for sentence in sentences:
        print(f"{one_line(sentence)}.")
    for path in (out / "convergence.csv", out / "winners.md", out / "findings.txt", *pictures):
        print(one_line(str(path)))


@app.command("literature")
def literature_command(
    files: Annotated[list[Path] | None, typer.Argument(help="Tables of published measurements (CSV).")] = None,
    headlines: Annotated[
        bool, typer.Option("--headlines", help="Check the headline figures of two texts instead.")
    ] = False,
    scenarios: Annotated[
        Path, typer.Option("--scenarios", help="Folder of the scenarios that --headlines simulates.")
    ] = Path("scenarios"),
    slow: Annotated[
        bool, typer.Option("--slow", help="With --headlines: simulate MT-NLG's pipelines too (two minutes).")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Rows predicted in parallel; default: one for each core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print scores and rows, or headlines, as JSON.")] = False,
    emit: Annotated[
        Path | None,
        typer.Option("--emit", metavar="FOLDER", help="Write the rows' scenarios, for `gssim run`, instead."),
    ] = None,
    by_device: Annotated[
        Path | None,
        typer.Option("--by-device", help="File to write the errors by device preset to, which `gssim run` quotes."),
    ] = None,
) -> None:
    """Predict published training runs row by row, with errors by source; or check published headline figures."""
    if headlines and (files or jobs is not None or emit is not None or by_device is not None):
        raise UserError("--headlines: takes neither tables nor --jobs, --emit or --by-device")
    if headlines:
        _check_headlines(scenarios, slow=slow, as_json=as_json)
        return
    if not files:
        raise UserError("literature: no table; name tables of measurements (CSV), or give --headlines")
    if slow:
        raise UserError("--slow: has no effect without --headlines")
    if emit is not None:
        if as_json or jobs is not None or by_device is not None:
            raise UserError("--emit: predicts nothing; leave out --jobs, --json and --by-device")
        _emit_scenarios(files, emit)
        return
    _score_tables(files, jobs=jobs, as_json=as_json, by_device=by_device)


def _emit_scenarios(files: list[Path], folder: Path) -> None:
    """Write the scenarios of all rows that can be predicted, print their paths, and count the others by reason."""
    from analysis.literature.scenarios import emit
    from analysis.literature.tables.reading import read_table

    paths, skipped = emit([run for file in files for _, _, run in read_table(file)], folder)
    for path in paths:
        print(one_line(str(path)))
    for reason, count in skipped.most_common():
        _say(f"skipped {count}: {reason}")


def _check_headlines(scenarios: Path, *, slow: bool, as_json: bool) -> None:
    from analysis.literature.headlines import all_headlines
    from analysis.literature.headlines.headline import print_headlines

    headlines = all_headlines(scenarios, slow=slow)
    if as_json:
        print(json.dumps([asdict(headline) for headline in headlines], indent=2))
    else:
        print_headlines(headlines)


def _score_tables(files: list[Path], *, jobs: int | None, as_json: bool, by_device: Path | None) -> None:
    from analysis.literature import score as scoring
    from gssim.execution import checked_jobs

    count = checked_jobs(jobs)
    with scoring.progress_bar() as on_progress:
        scores = scoring.score(files, jobs=count, on_progress=on_progress)
    for line in (*scores.unreadable, *scores.faults):
        _say(line)
    if as_json:
        print(json.dumps(scoring.as_json(scores), indent=1))
    else:
        scoring.print_scores(scores)
    if by_device is not None and not scores.interrupted:
        write_text(by_device, scoring.preset_errors_toml(scoring.errors_by_preset(scores)))
    if scores.interrupted or scores.faults:
        raise typer.Exit(INTERRUPTED if scores.interrupted else 1)


MOST_NAMED = 5
"""Unmatched Results that are named one by one; more are counted."""


def _report_unused(joined: "Joined", skipped: int) -> None:
    """Print on stderr the Results that are left out of the comparison, with the reason."""
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
    print(one_line(f"analysis: {text}"), file=sys.stderr)


def main() -> None:
    """Run the command line; a user error is one line on stderr and exit status 2."""
    try:
        run_command_line(app, "analysis", interrupted="what is finished is kept")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(f"analysis: needs {package}, which is not installed: pip install 'gssim[analysis]'", file=sys.stderr)
        raise SystemExit(2) from None
