"""Runs one scenario in the lab, or those of a sweep: builds and verifies its cluster, runs its ranks, takes it down."""

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from gsreal.lab.building import built, check_compiler, check_tools, runs
from gsreal.lab.network import ADDRESS_DEVICE, FOLDER, Network, Node, in_namespace, network_of, prepare_process
from gsreal.lab.throttle import Place, as_variable, cores_of, share_of, throttle_library
from gsreal.lab.verify import Verified, verify
from gsreal.machine import device_name, processor_name, usable_cores
from gsreal.run.checks import check_real
from gsreal.run.launch import Guard, Start
from gsreal.run.launch import run_ranks as run_anywhere
from gsreal.run.progress import DEFAULT_TIMEOUT_S
from gssim.cluster import Cluster
from gssim.errors import RunFailedError, UserError, one_line
from gssim.execution import FileStore
from gssim.execution.files import scratch_folder
from gssim.result import Result, file_name, read_result
from gssim.scenario import Loaded
from gssim.scenario.sweep import Point, loaded_point
from gssim.terminal import unwinding
from gssim.units import human_seconds, validated

ANSWER_S = 1.0
"""Timeout of a device's answer to a reachability test."""
CLOSED_PORT = 9


def run_ranks(
    network: Network,
    places: Sequence[Place],
    module: str,
    arguments: Sequence[str],
    *,
    check: Callable[[], None],
    guard: Guard | None = None,
) -> None:
    """Run `python -m module arguments...` on a rank in each place; raise RunFailedError if one of them fails.

    `check` is called periodically, to raise if the ranks' environment has failed. No process outlives the call, however
    it ends.
    """
    starts = [
        Start(
            rank_command(network, number, module, arguments),
            {**rank_environment(places, number), **as_variable(place)},
            prepare_process,
        )
        for number, place in enumerate(places)
    ]
    nodes = network.nodes[: len(places)]
    run_anywhere(starts, guard or Guard(), check=check, explain=lambda: unreachable_rank(nodes))


def rank_command(network: Network, number: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a rank inside its namespace.

    `ip netns exec` would mount /sys anew and hide its contents.
    """
    inside = f"--net={FOLDER / network.nodes[number].namespace}"
    return ["nsenter", inside, sys.executable, "-m", module, *arguments]


def rank_environment(places: Sequence[Place], number: int) -> dict[str, str]:
    """Return the environment with a rank's identity and interface."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": ADDRESS_DEVICE,
    }


def unreachable_rank(nodes: Sequence[Node]) -> str | None:
    """Return a text that names the rank which others cannot reach; None if all are reachable."""
    pairs = list(permutations(range(len(nodes)), 2))
    with ThreadPoolExecutor(max_workers=16) as pool:
        reachable = pool.map(lambda pair: _reaches(nodes[pair[0]], nodes[pair[1]]), pairs)
        cut = [pair for pair, reached in zip(pairs, reachable, strict=True) if not reached]
    if not cut:
        return None
    rank, _ = Counter(end for pair in cut for end in pair).most_common(1)[0]
    others = sorted({end for pair in cut if rank in pair for end in pair} - {rank})
    those = ", ".join(map(str, others))
    return f"rank {rank} ({nodes[rank].name}) cannot be reached from rank {those}: is a link down?"


def _reaches(source: Node, target: Node) -> bool:
    """Return whether a message of one device arrives at another, on a closed port."""

    def connect() -> bool:
        try:
            socket.create_connection((str(target.address), CLOSED_PORT), ANSWER_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    return in_namespace(source.namespace, connect)


@dataclass(frozen=True)
class Lab:
    """A lab to be built: its network, and the places of all devices."""

    network: Network
    places: tuple[Place, ...]


def lab_of(cluster: Cluster, *, where: str, on: Sequence[int] | None = None) -> Lab:
    """Return the lab of a cluster; raise UserError if this machine cannot run it. `on`: cores; default: all usable."""
    check_tools()
    if cluster.backend != "gloo":
        raise UserError(f"{where}: cluster.backend = '{cluster.backend}': the lab's ranks talk by gloo")
    types = [cluster.type_of(rank) for rank in range(len(cluster.devices))]
    others = sorted({kind.kind for kind in types} - {"cpu"})
    if others:
        raise UserError(
            f"{where}: cluster.device_types: kind = '{others[0]}': the lab's devices are parts of cores: cpu"
        )
    network = network_of(cluster, os.urandom(3).hex(), where=f"{where}: cluster")
    shares = tuple(map(share_of, types))
    cores = cores_of(shares, usable_cores() if on is None else on, where=f"{where}: cluster")
    check_compiler(network, shares)
    library = throttle_library() if min(shares) < 1 else None
    if library is None and min(shares) < 1:
        raise RunFailedError("lab: throttle.cpp cannot be compiled")
    names = [emulated_name(cluster, rank) for rank in range(len(types))]
    placed = zip(names, cores, shares, strict=True)
    return Lab(network, tuple(Place(name, core, share, str(library or "")) for name, core, share in placed))


def emulated_name(cluster: Cluster, rank: int) -> str:
    """Return the name of a rank's emulated device type, if this machine has the processor that it was calibrated on.

    Otherwise the processor's own name shows that the costs in the cluster file are another's.
    """
    name, kind = cluster.devices[rank].type, cluster.type_of(rank)
    measured_on = kind.lab.processor if kind.lab else None
    if measured_on in (None, processor_name()):
        return name
    import torch

    return f"{device_name(torch.device('cpu'))}-at-{share_of(kind):g}"


def run_lab(
    loaded: Loaded, overrides: Sequence[str], *, trace: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Result:
    """Run the scenario in its lab, and return the Result of rank 0, with the measured links.

    `overrides`: those with which it was loaded from its file. Raises RunFailedError if a rank fails, or the network
    cannot be built.
    """
    lab = lab_of(loaded.scenario.cluster, where=loaded.file)
    others = runs()
    if others:
        print(
            f"gsreal: lab: {', '.join(others)}: running too, so that times are not comparable, or left by a killed "
            "run, which `gsreal lab --clean` removes",
            file=sys.stderr,
        )
    with scratch_folder("gsreal-run-") as folder:
        file = Path(folder, "measured.json")
        arguments = [loaded.file, json.dumps(overrides), str(file), str(trace.absolute()) if trace else "", "", "0"]
        with unwinding(), built(lab.network) as network:
            links = verify(lab.network)
            report(lab.network.run_id, links)
            places = lab.places[: loaded.scenario.ranks]
            guard = Guard(timeout_s)
            run_ranks(lab.network, places, "gsreal.run.worker", arguments, check=network.check, guard=guard)
        result = read_result(file)
    return replace(result, provenance={**result.provenance, "lab": provenance(lab, links, netem=network.netem)})


def report(run_id: str, links: Sequence[Verified]) -> None:
    """Print the links that deviate from what was asked for."""
    for link in links:
        for fault in link.faults:
            print(f"gsreal: lab: the link {link.name} has {fault}", file=sys.stderr)
    print(f"gsreal: lab {run_id}: {len(links)} directed links verified", file=sys.stderr, flush=True)


def provenance(lab: Lab, links: Sequence[Verified], *, netem: bool) -> dict[str, Any]:
    """Return the actual properties of the lab."""
    return {
        "delay_by": "netem" if netem else "user-space wire",
        "devices": [{"core": place.core, "cpu_share_ratio": place.cpu_share_ratio} for place in lab.places],
        "links": [
            {
                "name": link.name,
                "rate_bytes_per_s": link.rate_bytes_per_s,
                "measured_bytes_per_s": round(link.measured_bytes_per_s),
                "delay_s": link.delay_s,
                "measured_delay_s": round(link.measured_delay_s, 7),
            }
            for link in links
        ],
    }


def warn_of_other_processors(clusters: Iterable[Cluster]) -> None:
    """Warn if the clusters' costs were measured on another processor than this machine's."""
    types = [kind for cluster in clusters for kind in cluster.device_types.values()]
    others = {kind.lab.processor for kind in types if kind.lab and kind.lab.processor} - {processor_name()}
    for other in sorted(others):
        print(
            f"gsreal: lab: the cluster's costs were measured on {json.dumps(other)}, this is "
            f"{json.dumps(processor_name())}: predictions for it are not comparable; calibrate again",
            file=sys.stderr,
        )


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
    checked = []
    for point in points:
        loaded = loaded_point(point, file=sweep, gradients_needed=False)
        try:
            check_real(loaded)
            lab_of(loaded.scenario.cluster, where=loaded.file)
        except UserError as error:
            raise UserError(f"{sweep}: {point.name}: {error}") from None
        checked.append(loaded)
    return checked


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
    """Return the store of a lab's measurements; its key is the scenario and the emulated cluster, whatever code ran."""

    def key_of(result: Result) -> object:
        return result.scenario_id, emulated(validated(Cluster, result.scenario["cluster"], file="a measurement"))

    return FileStore(folder, read_result, Result.to_json, key_of)


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

    Existing ones stay, whatever code measured them (their provenance says which), unless `again`. Raises RunFailedError
    at the end if some failed; they are not stored, so that the next call repeats them.
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
    print(f"gsreal: lab: {one_line(line)}", file=sys.stderr, flush=True)
