"""`gssim`: check and simulate scenarios. Data goes to stdout, talk to stderr; exit 2 where the input is wrong."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gssim.console import print_result, print_results, progress_bar
from gssim.ending import run_command_line
from gssim.predictions import predict, usable_cores
from gssim.remedies import with_remedies
from gssim.result import chrome_trace, file_name, write_text
from gssim.scenario import load_scenario
from gssim.search import Search, processes
from gssim.search.shown import print_found
from gssim.simulate import simulate
from gssim.sweep import chosen, load_sweep, points_of
from gssim.units import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")]


@app.callback()
def about() -> None:
    """Predict memory and step time of sharding plans on unequal clusters."""


@app.command("check")
def check_command(scenarios: list[Path], overrides: Overrides = None) -> None:
    """Validate scenario files: a line for each, with its scenario_id, up to the first that is wrong."""
    for path in scenarios:
        loaded = load_scenario(path, overrides or [])
        print(f"{path}: {loaded.scenario.plan.method} on {loaded.scenario.ranks} ranks, {loaded.scenario.scenario_id}")


@app.command("run")
def run_command(
    scenario: Path,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Result as JSON.")] = False,
    unfold: Annotated[bool, typer.Option("--unfold", help="Simulate every rank and link by itself.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Print load and simulation times on stderr.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the Result's JSON file.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the step's timeline (Chrome trace).")] = None,
) -> None:
    """Predict one scenario."""
    began_s = time.perf_counter()
    loaded = load_scenario(scenario, overrides or [])
    loaded_s = time.perf_counter()
    simulated = simulate(loaded, unfolded=unfold)
    ended_s = time.perf_counter()
    result = with_remedies(loaded, simulated.result)
    advised_s = time.perf_counter()
    if trace is not None:
        write_text(trace, chrome_trace(simulated.spans, result))
    if out is not None:
        write_text(out / file_name(loaded.scenario.name, result.scenario_id, "simulated"), result.to_json())
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        print_result(result)
    if timing:
        times = {"load_s": loaded_s - began_s, "simulate_s": ended_s - loaded_s, "remedies_s": advised_s - ended_s}
        shown = {name: value for name, value in times.items() if name != "remedies_s" or result.remedies}
        print(" ".join(f"{name}={value:.3f}" for name, value in shown.items()), file=sys.stderr)


@app.command("sweep")
def sweep_command(
    sweep: Annotated[Path, typer.Argument(help="A sweep's file, such as scenarios/sweeps/lab.toml.")],
    overrides: Overrides = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Points at a time; as many as cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of Results as JSON.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the Results, kept as they end.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Predict also what is in --out already.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Points so named; * and ? match; repeatable.")
    ] = None,
) -> None:
    """Predict every point of a sweep."""
    count = usable_cores() if jobs is None else jobs
    if count < 1:
        raise UserError(f"--jobs {jobs}: must be at least 1")
    asked = load_sweep(sweep)
    points = chosen(points_of(asked, file=sweep, overrides=overrides or []), only or [], file=sweep)
    try:
        with progress_bar("predicting") as told:
            results = predict(points, sweep=sweep, out=out, jobs=count, again=again, told=told)
    except KeyboardInterrupt:
        kept = (
            f"what is finished is in {out}; the same command does the rest" if out else "nothing is kept without --out"
        )
        print(f"gssim: sweep: interrupted; {kept}", file=sys.stderr)
        raise
    if as_json:
        print(json.dumps([json.loads(result.to_json()) for result in results], indent=2, allow_nan=False))
    else:
        print_results(results, asked.question)


@app.command("search")
def search_command(
    scenario: Path,
    overrides: Overrides = None,
    top: Annotated[int, typer.Option("--top", help="How many plans to show.")] = 5,
    objective: Annotated[
        str | None, typer.Option("--objective", help="What is to be least: step-time (usual), cost or energy.")
    ] = None,
    least_density: Annotated[
        float | None, typer.Option("--least-density", help="Search thresholds too that push no smaller part.")
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Begin no more plans after so long.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Plans at a time; as many as cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of Results as JSON.")] = False,
) -> None:
    """Find the best plans for a scenario's cluster and model under the devices' memory.

    The table [search] of the scenario says what is searched (see gssim.space); --set search.KEY=VALUE overrides it.
    --json prints the best plans' Results in order, then those of the others on the front of time and memory;
    provenance.search tells them apart.
    """
    asked = {"objective": objective and f'"{objective}"', "least_density": least_density, "seconds": seconds}
    given = [*(overrides or []), *(f"search.{key}={value}" for key, value in asked.items() if value is not None)]
    count = usable_cores() if jobs is None else jobs
    for name, value in (("--top", top), ("--jobs", count)):
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")
    loaded = load_scenario(scenario, given)
    search = Search(loaded, loaded.scenario.search, top)
    try:
        with processes(count, scenario, given) as workers, progress_bar("searching") as told:
            search.run(workers, told)
    except KeyboardInterrupt:
        _print_found(search, loaded.scenario.question, as_json=as_json)
        print("gssim: search: interrupted; these are the best so far", file=sys.stderr)
        raise
    _print_found(search, loaded.scenario.question, as_json=as_json)


def _print_found(search: Search, question: str, *, as_json: bool) -> None:
    found = search.found()
    if as_json:
        print(json.dumps([json.loads(result.to_json()) for result in found.results()], indent=2, allow_nan=False))
    else:
        print_found(found, question)


def main() -> None:
    """Run the command line; a fault of the user's is one line and exit 2, a failed run one line and exit 1."""
    run_command_line(app, "gssim")
