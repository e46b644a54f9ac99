"""`gssim`: check and simulate scenarios. Data goes to stdout, talk to stderr; exit 2 where the input is wrong."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gssim.console import print_result
from gssim.ending import run_command_line
from gssim.remedies import with_remedies
from gssim.result import chrome_trace, write_text
from gssim.scenario import load_scenario
from gssim.simulate import simulate

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")]


@app.callback()
def about() -> None:
    """Predict memory and step time of sharding plans on unequal clusters."""


@app.command("check")
def check_command(scenarios: list[Path], overrides: Overrides = None) -> None:
    """Validate scenario files and say nothing else than what is wrong."""
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
        write_text(trace, chrome_trace(simulated.spans))
    if out is not None:
        write_text(out / f"{loaded.scenario.name}.{result.scenario_id}.simulated.json", result.to_json())
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        print_result(result)
    if timing:
        times = {"load_s": loaded_s - began_s, "simulate_s": ended_s - loaded_s, "remedies_s": advised_s - ended_s}
        shown = {name: value for name, value in times.items() if name != "remedies_s" or result.remedies}
        print(" ".join(f"{name}={value:.3f}" for name, value in shown.items()), file=sys.stderr)


def main() -> None:
    """Run the command line; a fault of the user's is one line and exit 2, a failed run one line and exit 1."""
    run_command_line(app, "gssim")
