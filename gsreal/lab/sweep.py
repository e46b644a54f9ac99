"""Sweeps in the lab: every point measured one after another, in rounds, with finished measurements kept."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gsreal.lab.lab import lab_of
from gsreal.lab.network import Network, network_of
from gsreal.lab.throttle import share_of
from gsreal.run.checks import check_real
from gssim.cluster import Cluster
from gssim.errors import RunFailedError, UserError
from gssim.execution import FileStore
from gssim.result import Result, file_name, read_result
from gssim.scenario import Loaded
from gssim.scenario.sweep import Point, loaded_point
from gssim.units import human_seconds, validated

LOCK = ".gsreal-lab.lock"
"""Lock file of a folder of measurements, held by the process that measures there."""


@dataclass(frozen=True)
class Cell:
    """One measurement of a point."""

    point: Point
    loaded: Loaded
    repeat: int
    file: Path
    """File of its Result."""

    @property
    def name(self) -> str:
        """Name of the point, and number of the measurement."""
        return f"{self.point.name}{f', again ({self.repeat})' if self.repeat else ''}"


def check_points(points: Sequence[Point], *, sweep: Path) -> list[Loaded]:
    """Return the points' scenarios; raise UserError for the first that cannot run in a lab on this machine."""
    found = []
    for point in points:
        loaded = loaded_point(point, file=sweep, gradients_needed=False)
        try:
            check_real(loaded)
            lab_of(loaded.scenario.cluster, where=loaded.file)
        except UserError as error:
            raise UserError(f"{sweep}: {point.name}: {error}") from None
        found.append(loaded)
    return found


def cells_of(points: Sequence[Point], loaded: Sequence[Loaded], *, repeats: int, out: Path) -> tuple[Cell, ...]:
    """Return all measurements in order: every point once, then every point again.

    Interference on a machine changes slowly: repeats that are far apart reveal more of it.
    """
    return tuple(
        Cell(point, each, repeat, out / file_name(point.name, each.scenario.scenario_id, "measured", repeat))
        for repeat in range(repeats)
        for point, each in zip(points, loaded, strict=True)
    )


def measurements_in(folder: Path) -> FileStore[Result]:
    """Return the store of a lab's measurements: of equal scenarios on equal emulated clusters, whatever code ran."""
    return FileStore(folder, read_result, Result.to_json, _key_of)


def _key_of(result: Result) -> object:
    return result.scenario_id, emulated(validated(Cluster, result.scenario["cluster"], file="a measurement"))


def kept(cell: Cell) -> Result | None:
    """Return the existing measurement of a cell, if any."""
    scenario = cell.loaded.scenario
    return measurements_in(cell.file.parent).kept(cell.file.name, (scenario.scenario_id, emulated(scenario.cluster)))


def emulated(cluster: Cluster) -> tuple[Network, tuple[tuple[str, float], ...], dict[str, str]]:
    """Return the parts of a cluster that a lab emulates: its network, devices with their shares of cores, algorithms.

    The predicted costs of devices, which a calibration changes, are not part of a measurement.
    """
    devices = ((device.type, share_of(cluster.device_types[device.type])) for device in cluster.devices)
    return network_of(cluster, "", where="cluster"), tuple(devices), cluster.algorithms


def measure_cells(cells: Sequence[Cell], run: Callable[[Cell], Result], *, again: bool = False) -> list[Result]:
    """Return the Results of all cells; `run` measures missing ones, and each is written as soon as it ends.

    Existing ones stay, whatever code measured them (their provenance says which), unless `again`.

    Raises RunFailedError at the end if some failed; they are not stored, so that the next call repeats them.
    """
    results = {} if again else {cell.file: result for cell in cells if (result := kept(cell)) is not None}
    missing = [cell for cell in cells if cell.file not in results]
    if results:
        _say(f"{len(results)} of {len(cells)} are there already")
    failed: list[str] = []
    begun_s = time.monotonic()
    for done, cell in enumerate(missing):
        cell_s = time.monotonic()
        try:
            result = run(cell)
        except (RunFailedError, UserError) as error:
            failed.append(cell.name)
            _say(f"{cell.name}: failed: {error}")
            continue
        finally:
            ended_s = time.monotonic()
        result = replace(result, provenance={**result.provenance, "repeat": cell.repeat})
        measurements_in(cell.file.parent).keep(cell.file.name, result)
        results[cell.file] = result
        took = f"{cell.name}: a step {human_seconds(result.step_time_s)}, in all {ended_s - cell_s:.0f} s"
        _say(f"{took}; {progress(done + 1, len(missing), ended_s - begun_s)}")
    if failed:
        raise RunFailedError(
            f"lab: {len(failed)} of {len(cells)} failed ({', '.join(failed)}); the same command tries them again"
        )
    return [results[cell.file] for cell in cells]


def progress(done: int, cells: int, elapsed_s: float) -> str:
    """Return the progress, and the estimated remaining time.

    >>> progress(3, 12, 90)
    '3 of 12 done, 1.5 min elapsed, about 4.5 min left'
    """
    left_s = elapsed_s / done * (cells - done)
    return f"{done} of {cells} done, {elapsed_s / 60:.1f} min elapsed, about {left_s / 60:.1f} min left"


def median_results(cells: Sequence[Cell], results: Sequence[Result]) -> list[Result]:
    """Return one Result of each point: the repeat of median step time, of two the faster one."""
    by_point: dict[str, list[Result]] = {}
    for cell, result in zip(cells, results, strict=True):
        by_point.setdefault(cell.point.name, []).append(result)
    return [sorted(each, key=lambda r: r.step_time_s)[(len(each) - 1) // 2] for each in by_point.values()]


def _say(line: str) -> None:
    print(f"gsreal: lab: {line}", file=sys.stderr, flush=True)
