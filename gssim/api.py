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
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gssim.cache import Shared
from gssim.errors import UserError
from gssim.execution import processes, processes_with, usable_cores
from gssim.execution.files import scratch_folder
from gssim.planner import Search, with_suggested_changes
from gssim.result import Result
from gssim.scenario import Loaded, Scenario, load_scenario, overrides_of
from gssim.scenario.sweep import load_sweep, points_of
from gssim.simulation import simulate as simulated
from gssim.sweeps import tabulate

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
    tables = deepcopy(dict(scenario)) if isinstance(scenario, Mapping) else None
    path = Path(scenario if not isinstance(scenario, Mapping) else str(scenario.get("name") or "scenario"))
    return load_scenario(path, overrides_of(changes), tables=tables, gradients_needed=False).scenario


def simulate(scenario: Scenario, *, unfold: bool = False) -> Result:
    """Return the predicted Result of a scenario: step time, memory, collectives, links.

    Args:
        scenario: from `load` or `Scenario.with_`.
        unfold: simulate every rank and link by itself, instead of equal ones once. Slower, the same result.

    Raises:
        UserError: gradient statistics are needed and missing, or the plan cannot run on this cluster.
    """
    loaded = _with_statistics(scenario)
    return with_suggested_changes(loaded, simulated(loaded, unfolded=unfold).result)


def sweep(
    path: str | os.PathLike[str],
    changes: Changes = (),
    *,
    jobs: int = 1,
    out: str | os.PathLike[str] | None = None,
) -> "polars.DataFrame":
    """Return the table of a sweep: one row a point, columns with their units in their names.

    Points that do not fit, or are no valid scenarios, are rows too: `status` and `reason` say so.

    Args:
        path: the sweep's TOML file.
        changes: keys that all points change.
        jobs: processes. They are spawned: call with more than one under `if __name__ == "__main__":`.
        out: a .parquet or .csv file to write as well, as `gssim sweep --out` does; what it has already is kept.

    Raises:
        UserError: the sweep's file is wrong, or all of its points are invalid.
    """
    if jobs < 1:
        raise UserError(f"jobs = {jobs}: must be at least 1")
    file = Path(path)
    asked = load_sweep(file)
    points = points_of(asked, file=file, overrides=overrides_of(changes))
    with scratch_folder("gssim-sweep-") as folder:
        table_file = Path(folder, "table.parquet") if out is None else Path(out)
        return tabulate(points, sweep=asked, file=file, out=table_file, workers=processes(min(jobs, len(points))))


def search(scenario: Scenario, *, top: int = 5, jobs: int | None = None) -> list[Result]:
    """Return the Results of the best plans for a scenario's cluster and model, the best first.

    The scenario's table `[search]` says what is searched, and what is to be least. `Result.provenance["search"]` holds
    each plan's rank (None: only on the front of time and memory), the plan as overrides, and its bottleneck.

    Args:
        scenario: from `load` or `Scenario.with_`.
        top: number of plans.
        jobs: processes; by default as many as this process may use cores.

    Raises:
        UserError: the objective or the thresholds that are searched need figures that the scenario lacks.
    """
    for name, value in (("top", top), ("jobs", 1 if jobs is None else jobs)):
        if value < 1:
            raise UserError(f"{name} = {value}: must be at least 1")
    source, shared = scenario.source, Shared()
    if source is None or source.tables is not None:
        raise UserError(f"{scenario.name}: was not loaded from a file; search what gssim.load returns of one")
    loaded = load_scenario(source.path, source.overrides, searched=True, shared=shared)
    found = Search(loaded, loaded.scenario.search, top)
    found.prepare()
    with processes_with(shared, usable_cores() if jobs is None else jobs) as workers:
        found.run(workers)
    return found.found().results()


def _with_statistics(scenario: Scenario) -> Loaded:
    """Return a scenario with the gradient statistics that its messages need."""
    source = scenario.source
    loaded = Loaded(file=scenario.name if source is None else str(source.path), scenario=scenario)
    if not loaded.statistics_needed:
        return loaded
    if source is None:
        raise UserError(f"{scenario.name}: needs gradient statistics: make it with gssim.load or Scenario.with_")
    return load_scenario(source.path, source.overrides, tables=source.tables)
