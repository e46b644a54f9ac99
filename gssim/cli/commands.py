"""The commands of `gssim`: check, run, program, support, sweep, search. Data goes to stdout, messages to stderr; exit 2
for wrong input.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gssim import terminal
from gssim.cli.reports import nothing_fits, print_found, print_methods, print_support
from gssim.errors import RunFailedError, UserError, one_line
from gssim.execution import Workers, checked_jobs, dask_workers, processes, processes_with, start_fork_server
from gssim.execution.cache import Shared
from gssim.execution.files import check_place, write_text
from gssim.execution.garbage import no_collection
from gssim.plan import METHODS
from gssim.planner import Search, with_suggested_changes
from gssim.program import program_table, program_text
from gssim.result import chrome_trace, file_name
from gssim.scenario import load_scenario
from gssim.scenario.support import supported
from gssim.scenario.sweep import Point, Sweep, chosen, load_sweep, points_of
from gssim.simulation import program_of, record_steady_step, simulate
from gssim.sweeps import TABLES, check_table_place, parts_folder, points_in, predict, tabulate
from gssim.terminal import (
    AsJson,
    Only,
    Overrides,
    ScenarioFile,
    Version,
    activity,
    idle_list,
    progress_bar,
    run_command_line,
)
from gssim.units import whole_number

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about(version: Version = False) -> None:
    """Predict memory and step time of sharding plans on unequal clusters.

    Exit codes: 0 answered, 1 failed, 2 wrong input, and of `fits` 3 if the training does not fit.
    """


@app.command("check")
def check_command(
    scenarios: Annotated[list[Path], typer.Argument(help="Scenarios' files, such as scenarios/*.toml.")],
    overrides: Overrides = None,
) -> None:
    """Validate scenario files: prints a line for each, with its scenario_id, up to the first invalid one."""
    with activity("gssim: check"):
        for path in scenarios:
            loaded = load_scenario(path, overrides or [])
            scenario = loaded.scenario
            idle = f" (idle: {idle_list(scenario.idle_devices)})" if scenario.idle_devices else ""
            print(
                f"{one_line(str(path))}: {scenario.plan.method} on {scenario.ranks} ranks{idle}, {scenario.scenario_id}"
            )


@app.command("run")
@no_collection()  # until the objects of the simulation are gone again: a collection takes long to look at all of them
def run_command(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    unfold: Annotated[
        bool, typer.Option("--unfold", help="Simulate all ranks and links; else equal ones only once.")
    ] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Print load and simulation times on stderr.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the Result's JSON file.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the step's timeline (Chrome trace).")] = None,
) -> None:
    """Predict one scenario.

    Example: gssim run scenarios/demo.toml --set plan.method=zero2 --trace out/step.json
    """
    with activity("gssim: run") as doing:
        began_s = time.perf_counter()
        loaded = load_scenario(scenario, overrides or [])
        name = file_name(loaded.scenario.name, loaded.scenario.scenario_id, "simulated")
        for place in (trace, out and out / name):
            if place is not None:
                check_place(place)
        loaded_s = time.perf_counter()
        doing(f"simulating {loaded.scenario.ranks:,} ranks")
        shared = Shared()
        simulated = simulate(loaded, unfolded=unfold, shared=shared)
        ended_s = time.perf_counter()
        doing("looking for what would fit")
        result = with_suggested_changes(loaded, simulated.result, shared=shared)
        advised_s = time.perf_counter()
        if trace is not None:
            doing(f"writing {trace}")
            write_text(trace, chrome_trace(record_steady_step(simulated, unfolded=unfold), result))
    if out is not None:
        write_text(out / name, result.to_json())
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        used = loaded.scenario.model_flop_utilisation(result.step_time_s)
        terminal.print_result(result, changed=overrides or (), utilisation_ratio=used)
    if timing:
        times = {"load_s": loaded_s - began_s, "simulate_s": ended_s - loaded_s, "remedies_s": advised_s - ended_s}
        shown = {name: value for name, value in times.items() if name != "remedies_s" or result.remedies}
        print(" ".join(f"{name}={value:.3f}" for name, value in shown.items()), file=sys.stderr)


@app.command("program")
def program_command(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option("--rank", help="The rank whose tasks are printed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of tasks as JSON.")] = False,
) -> None:
    """Print what a rank does in a step, one task a line: operation, fields, stream, time, memory, dependencies.

    Example: gssim program scenarios/demo.toml --rank 1
    """
    with activity("gssim: program"):
        loaded = load_scenario(scenario, overrides or [])
        ranks = loaded.scenario.ranks
        if not 0 <= rank < ranks:
            raise UserError(f"--rank {rank}: must be from 0 to {ranks - 1}")
        program = program_of(loaded, Shared())
    if as_json:
        print(json.dumps(program_table(program, rank), indent=2, allow_nan=False))
    else:
        print(f"# rank {rank} of {ranks}, {one_line(loaded.scenario.name)}, {loaded.scenario.scenario_id}")
        sys.stdout.write(program_text(program, rank))


@app.command("support")
def support_command(
    scenario: Annotated[
        Path | None, typer.Argument(help="Check every combination on this scenario's cluster and model.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the reason of every refusal.")] = False,
) -> None:
    """List the methods; with a scenario, which of them combine with which features, predicted and for real."""
    if scenario is None:
        if as_json:
            print(json.dumps([asdict(method) for method in METHODS.values()], indent=2))
        else:
            print_methods(METHODS.values())
        return
    with activity("gssim: support"):
        combinations = list(supported(scenario, tuple(overrides or ())))
    if as_json:
        print(json.dumps([asdict(combination) for combination in combinations], indent=2))
    else:
        print_support(combinations)


@app.command("sweep")
def sweep_command(
    sweep: Annotated[Path, typer.Argument(help="A sweep's file, such as scenarios/sweeps/lab.toml.")],
    overrides: Overrides = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Points predicted in parallel; by default one for each core.")
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(
            "--dask",
            metavar="ADDRESS",
            help="Predict on the workers of this Dask scheduler (tcp://HOST:8786). They need the same gssim and "
            "dask[distributed]; input files are sent to them. Start them with --nthreads 1.",
        ),
    ] = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE|FOLDER",
            help="FILE.parquet or FILE.csv: write a table in both formats, with a row for each point, also for "
            "invalid ones. Otherwise a folder for the Results; then all points must be valid. Finished points are "
            "kept, and skipped by the next call.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also predict points again that --out already has.")] = False,
    only: Only = None,
) -> None:
    """Predict every point of a sweep.

    Example: gssim sweep scenarios/sweeps/demo.toml --out out/demo.parquet
    """
    count = checked_jobs(jobs)
    _check_options(out, jobs, dask, as_json=as_json)
    asked = load_sweep(sweep)
    if dask is None and count > 1:
        start_fork_server()  # beside this process, which lists the points meanwhile
    points = chosen(points_of(asked, file=sweep, overrides=overrides or []), only or [], file=sweep)
    if out is not None and out.suffix in TABLES:
        workers = dask_workers(dask) if dask is not None else processes(min(count, len(points)))
        _make_table(asked, points, only or [], sweep, out, workers, again=again)
        return
    with no_collection():  # the Results live until they are shown, and collections would look through all of them
        with _report_interrupt(out), progress_bar("predicting") as on_progress:
            results = predict(points, sweep=sweep, out=out, jobs=count, again=again, on_progress=on_progress)
        if as_json:
            terminal.print_as_json(results)
        else:
            terminal.print_results(results, asked.question)


def _check_options(out: Path | None, jobs: int | None, dask: str | None, *, as_json: bool) -> None:
    """Raise UserError if options of a sweep exclude each other."""
    as_table = out is not None and out.suffix in TABLES
    if dask is not None and jobs is not None:
        raise UserError(f"--dask {dask}: its workers say how many points at a time; leave out --jobs")
    if as_table and as_json:
        raise UserError(f"--json prints Results, which a table does not keep; leave it out, or --out {out}")
    if dask is not None and not as_table:
        raise UserError(f"--dask {dask}: makes a table: name it with --out FILE.parquet")


def _make_table(
    asked: Sweep,
    points: Sequence[Point],
    only: Sequence[str],
    file: Path,
    out: Path,
    workers: AbstractContextManager[Workers],
    *,
    again: bool,
) -> None:
    """Make a sweep's table, and print it."""
    check_table_place(out)
    _check_only(out, points, only, file=file)
    with _report_interrupt(parts_folder(out)), progress_bar("predicting") as on_progress:
        table = tabulate(points, sweep=asked, file=file, out=out, workers=workers, again=again, on_progress=on_progress)
    terminal.print_table(table, asked.question)
    drawn = shlex.join(["python", "-m", "analysis", "sweep", str(out), "--out", str(out.with_suffix(""))])
    print(one_line(f"charts: {drawn}"), file=sys.stderr)
    reasons = [why for status, why in zip(table["status"], table["reason"], strict=True) if status == "failed"]
    if reasons:
        raise RunFailedError(f"sweep: {len(reasons)} of {table.height} points failed (see {out}): {reasons[0]}")


def _check_only(out: Path, points: Sequence[Point], only: Sequence[str], *, file: Path) -> None:
    """Raise UserError if a table of the chosen points would replace one with more points."""
    if not only:
        return
    names = {point.name for point in points}
    lost = [name for name in points_in(out) if name not in names]
    if lost:
        raise UserError(
            f"{file}: --only chooses {len(points)} points, and the table {out} has {len(lost)} others, such as "
            f"{lost[0]}, that would be lost: name another --out, or remove it"
        )


@contextmanager
def _report_interrupt(place: Path | None) -> Iterator[None]:
    """Report after an interrupt where finished results are kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"what is finished is in {place}; the same command does the rest"
        print(f"gssim: sweep: interrupted; {kept if place else 'nothing is kept without --out'}", file=sys.stderr)
        raise


@app.command("search")
def search_command(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    top: Annotated[int, typer.Option("--top", help="Number of plans to show.")] = 5,
    objective: Annotated[
        str | None, typer.Option("--objective", help="Minimise step-time (default), cost or energy.")
    ] = None,
    least_density: Annotated[
        float | None, typer.Option("--least-density", help="Also search thresholds; smallest density allowed.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option("--study", help="Also search a study's thresholds (convergence.csv).")
    ] = None,
    most_loss_change: Annotated[
        float | None,
        typer.Option("--most-loss-change", help="With --study: largest increase of the loss allowed, in nats."),
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Start no further plans after this time.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Plans simulated in parallel; by default one for each core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plans for a scenario's cluster and model under the devices' memory.

    The scenario's table `search` defines the search space (keys: scenarios/README.md, SearchSpace);
    --set search.KEY=VALUE overrides it.
    --json prints the Results of the best plans in order, then of the other plans on the Pareto front of time and
    memory; provenance.search distinguishes them.

    Example: gssim search scenarios/search-unequal-gpus.toml --top 3 --seconds 60
    """
    asked = {
        "objective": objective and json.dumps(objective),
        "least_density": least_density,
        "study": study and json.dumps(str(study)),
        "most_loss_change": most_loss_change,
        "seconds": seconds,
    }
    given = [*(overrides or []), *(f"search.{key}={value}" for key, value in asked.items() if value is not None)]
    count, top = checked_jobs(jobs), whole_number(top, "--top")
    shared = Shared()
    loaded = load_scenario(scenario, given, searched=True, shared=shared)
    search = Search(loaded, loaded.scenario.search, top)
    run = ["gssim", "run", str(scenario), *(word for each in overrides or [] for word in ("--set", each))]
    try:
        with processes_with(shared, count) as workers:
            search.prepare(workers)
            with progress_bar("searching") as on_progress:
                search.run(workers, on_progress)
    except KeyboardInterrupt:
        _print_found(search, loaded.scenario.question, run, as_json=as_json)
        best = "; these are the best so far" if search.found().best else ""
        print(f"gssim: search: interrupted{best}", file=sys.stderr)
        raise
    _print_found(search, loaded.scenario.question, run, as_json=as_json)


def _print_found(search: Search, question: str, run: Sequence[str], *, as_json: bool) -> None:
    plans = search.found()
    if as_json:
        if not plans.best:
            print("\n".join(["gssim: search: " + line for line in nothing_fits(plans)]), file=sys.stderr)
        terminal.print_as_json(plans.results())
    else:
        print_found(plans, question, run)


def main() -> None:
    """Run the command line; a user's error is one line and exit code 2, a failed run one line and exit code 1."""
    run_command_line(app, "gssim")
