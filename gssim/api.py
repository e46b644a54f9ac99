"""The public Python API: load, simulate, sweep and search scenarios.

    import gssim

    scenario = gssim.load("scenarios/demo.toml", {"plan.push.threshold": 3e-3})
    result = gssim.simulate(scenario)                        # result.step_time_s, result.ranks, result.to_frame()
    other = scenario.with_({"plan.method": "gs_z3"})         # validated like a file
    table = gssim.sweep("scenarios/sweeps/lab-small.toml")   # a polars DataFrame
    best = gssim.search(scenario, top=5)                     # Results, the best plan first

Whatever is wrong with the input raises `gssim.UserError` with the line that the command prints: file, key path, value,
and what is allowed.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gssim.errors import UserError
from gssim.execution import checked_jobs, processes, processes_with
from gssim.execution.cache import Shared
from gssim.execution.files import scratch_folder
from gssim.planner import Search, with_suggested_changes
from gssim.result import Result
from gssim.scenario import Loaded, Scenario, check, load_scenario
from gssim.scenario.overrides import overrides_of, plain
from gssim.scenario.sweep import load_sweep, points_of
from gssim.simulation import simulate as simulated
from gssim.sweeps import TABLES, check_table_place, tabulate
from gssim.units import shown_value, whole_number

if TYPE_CHECKING:
    import polars

Changes = Mapping[str, Any] | Sequence[str]
"""Keys of a scenario and their values, as in `{"plan.method": "zero2"}`; or texts, as `--set` takes them."""


def load(scenario: str | os.PathLike[str] | Mapping[str, Any], changes: Changes = ()) -> Scenario:
    """Return the scenario in a TOML file, or of a mapping of the same keys, with changes to its keys.

    Files that the scenario names are looked up beside it; those that a mapping names, in the working directory.
    Gradient statistics are read when they are first needed.

    Raises:
        UserError: the file is missing or no valid scenario, or a change names an unknown key or a bad value.
    """
    if isinstance(scenario, Mapping):
        tables = plain(scenario, "scenario", with_none=True)
        path = Path(str(tables.get("name") or "scenario").replace(os.sep, "-"))  # in the working directory
    else:
        tables, path = None, _path(scenario, "scenario", "a path, or a mapping of keys to values")
    return load_scenario(path, overrides_of(changes), tables=tables, gradients_needed=False).scenario


def simulate(scenario: Scenario, *, unfold: bool = False, remedies: bool = True) -> Result:
    """Return the predicted Result of a scenario: step time, memory, collectives, links.

    Args:
        scenario: from `load` or `Scenario.with_`.
        unfold: simulate every rank and link by itself, instead of equal ones once. Slower, the same result.
        remedies: if the plan does not fit, also find `Result.remedies`. This simulates the memory of about ten changed
            plans, which takes several times as long as the plan itself. False: leave it out, where many are compared.

    Raises:
        UserError: gradient statistics are needed and missing, or the plan cannot run on this cluster.
    """
    loaded = _with_statistics(_checked(scenario))
    shared = Shared()
    result = simulated(loaded, unfolded=unfold, shared=shared).result
    return with_suggested_changes(loaded, result, shared=shared) if remedies else result


def sweep(
    path: str | os.PathLike[str],
    changes: Changes = (),
    *,
    jobs: int | None = 1,
    out: str | os.PathLike[str] | None = None,
) -> "polars.DataFrame":
    """Return the table of a sweep: one row a point, columns with their units in their names.

    Points that do not fit, or are no valid scenarios, are rows too: `status` and `reason` say so.

    Args:
        path: the sweep's TOML file.
        changes: keys that all points change.
        jobs: processes; None: as many as this process may use cores.
        out: a .parquet or .csv file to write as well, as `gssim sweep --out` does; what it has already is kept.

    Raises:
        UserError: the sweep's file is wrong, or all of its points are invalid.
    """
    count = checked_jobs(jobs, "jobs =")
    file = _path(path, "path", "the path of a sweep file")
    table_file = None if out is None else _path(out, "out", "a path that ends in .parquet or .csv")
    if table_file is not None:
        if table_file.suffix not in TABLES:
            raise UserError(f"out = {shown_value(str(table_file))}: must end in {' or '.join(TABLES)}")
        check_table_place(table_file)
    asked = load_sweep(file)
    points = points_of(asked, file=file, overrides=overrides_of(changes))
    with scratch_folder("gssim-run-") as folder:
        table_file = table_file or Path(folder, "table.parquet")
        return tabulate(points, sweep=asked, file=file, out=table_file, workers=processes(min(count, len(points))))


def search(scenario: Scenario, *, top: int = 5, jobs: int | None = None) -> list[Result]:
    """Return the Results of the best plans for a scenario's cluster and model, the best first.

    The `top` best ones are followed by the others on the Pareto front of step time and memory. The scenario's table
    `[search]` says what is searched, and what is to be least. `Result.provenance["search"]` holds each plan's rank
    (None: only on the front of time and memory), the plan as overrides, and its bottleneck.

    Args:
        scenario: from `load` or `Scenario.with_`.
        top: number of best plans.
        jobs: processes; by default as many as this process may use cores.

    Raises:
        UserError: the objective or the thresholds that are searched need figures that the scenario lacks.
    """
    top, count = whole_number(top, "top ="), checked_jobs(jobs, "jobs =")
    source, shared = _checked(scenario).source, Shared()
    if source is None or source.tables is not None:
        raise UserError(f"{scenario.name}: was not loaded from a file; search what gssim.load returns of one")
    loaded = load_scenario(source.path, source.overrides, searched=True, shared=shared)
    searcher = Search(loaded, loaded.scenario.search, top)
    with processes_with(shared, count) as workers:
        searcher.prepare(workers)
        searcher.run(workers)
    return searcher.found().results()


def _path(value: Any, name: str, allowed: str) -> Path:
    """Return an argument as a path; raise UserError where it is none."""
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise UserError(f"{name} = {shown_value(value)}: must be {allowed}")
    return Path(path)


def _checked(scenario: Any) -> Scenario:
    if not isinstance(scenario, Scenario):
        raise UserError(f"scenario = {shown_value(scenario)}: must be a Scenario, as gssim.load returns it")
    return scenario


def _with_statistics(scenario: Scenario) -> Loaded:
    """Return a scenario with the gradient statistics that its messages need."""
    source = scenario.source
    loaded = Loaded(file=scenario.name if source is None else str(source.path), scenario=scenario)
    if source is None:  # made in code, by `dataclasses.replace` say: nobody has looked at its parts together yet
        check(scenario, file=loaded.file)
    if not loaded.statistics_needed:
        return loaded
    if source is None:
        raise UserError(f"{scenario.name}: needs gradient statistics: make it with gssim.load or Scenario.with_")
    return load_scenario(source.path, source.overrides, tables=source.tables)
