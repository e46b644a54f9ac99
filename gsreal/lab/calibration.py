"""Measures the costs of a cluster's device types, by micro-benchmarks on cores that emulate them."""

import json
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import tomli_w

from gsreal.calibrate.bench import Settings
from gsreal.calibrate.cluster_file import GUARD, backend_cost_data, device_type_data, rounded, source_of
from gsreal.lab.building import built
from gsreal.lab.lab import Lab, lab_of, run_ranks
from gsreal.lab.network import FASTEST_BYTES_PER_S
from gsreal.lab.throttle import MOST_OF_THE_CORES, share_of
from gsreal.machine import processor_name, usable_cores
from gssim.cluster import Cluster, Device, DeviceType, Link
from gssim.cluster.cluster import BackendCost
from gssim.execution.files import scratch_folder, write_files
from gssim.terminal import unwinding
from gssim.units import validated

RATES_BYTES_PER_S = (12.5e6, 125e6)
"""Link rates at which the slow-down of compute by communication is measured: 100 and 1000 Mbit/s."""


def calibrate_types(
    cluster: Cluster, settings: Settings, *, where: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the cluster's device types as measured so far, as plain data, and the costs of the backend.

    Each type is measured on two of its devices, each on a core of its own, over an unshaped link; the backend is
    measured with the fastest type. Types of which two fit on one core are also measured side by side there.
    """
    types: dict[str, Any] = {}
    backend: dict[str, Any] = {}
    names = sorted(cluster.device_types, key=lambda name: -share_of(cluster.device_types[name]))
    labs = {name: lab_of(linked_devices(cluster, name, 2), where=where) for name in names}  # all refusals come first
    for name, lab in labs.items():
        print(f"gsreal: calibrating {name}", file=sys.stderr, flush=True)
        kind = cluster.device_types[name]
        measured = _measured(lab, settings)
        data = device_type_data(measured, settings, source_of(measured) + ", in the lab")
        posted = measured["communication"]
        data["posting"] = {"exchange_s": posted["posting_s"], "message_s": posted["posting_message_s"]}
        set_core_slowdown(data, _measure_neighbour_slowdown(cluster, name, settings, where=where))
        set_communication_slowdown(data, _measure_communication_slowdown(cluster, name, settings, where=where))
        cores = len(usable_cores())
        emulation = {"cpu_share_ratio": share_of(kind), "processor": processor_name(), "cores": cores}
        types[name] = {**data, "memory_bytes": kind.memory_bytes, "lab": emulation}
        backend = backend or backend_data(measured)
        yield types, backend


def set_core_slowdown(data: dict[str, Any], ratios: Mapping[str, float]) -> None:
    """Set in a device type's data the slow-down by neighbours on its core, by model; none without measurements."""
    data.pop("neighbour_slowdown_ratio", None)  # measured on two cores, where any slow-down was chance
    if ratios:
        data["neighbour_slowdown_ratio"] = statistics.median(ratios.values())
    for profile in data["profiles"]:
        profile.pop("neighbour_slowdown_ratio", None)
        if ratios:
            profile["neighbour_slowdown_ratio"] = ratios[profile["model"]]


def crowd_size(cpu_share_ratio: float) -> int:
    """Return the number of devices of a share that crowd two cores: two on each, or on one of them.

    0 if none share one.

    >>> crowd_size(0.4), crowd_size(0.5), crowd_size(0.8)
    (4, 3, 0)
    """
    if cpu_share_ratio > 0.5:
        return 0
    return min(4, math.floor(2 * MOST_OF_THE_CORES / cpu_share_ratio + 1e-9))


def _measure_neighbour_slowdown(cluster: Cluster, name: str, settings: Settings, *, where: str) -> dict[str, float]:
    """Return each model's slow-down while two devices of a type compute on a core; empty if two do not fit."""
    size = crowd_size(share_of(cluster.device_types[name]))
    if not size or not settings.models:
        return {}
    crowd = lab_of(linked_devices(cluster, name, size), where=where, on=usable_cores()[:2])
    ratios: dict[str, float] = _measured(crowd, replace(settings, only="neighbours"))["beside"]
    return ratios


def set_communication_slowdown(data: dict[str, Any], measured: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Set in a device type's data the slow-down of its models by communication, from (bytes/s, excess) of each."""
    for profile in data["profiles"]:
        points = sorted(measured[profile["model"]])
        excess = monotone([value for _, value in points])
        profile["communicating_excess_ratio"] = {"sizes": [rate for rate, _ in points], "values": excess}


def monotone(values: Sequence[float]) -> list[float]:
    """Return the values made monotone, with means in place of falling neighbours, which are noise.

    More bytes take longer.

    >>> monotone([1.0, 4.0, 2.0, 5.0])
    [1.0, 3.0, 3.0, 5.0]
    """
    runs: list[list[float]] = []
    for value in values:
        runs.append([value])
        while len(runs) > 1 and statistics.fmean(runs[-1]) < statistics.fmean(runs[-2]):
            last = runs.pop()
            runs[-1] += last
    return [statistics.fmean(run) for run in runs for _ in run]


def _measure_communication_slowdown(
    cluster: Cluster, name: str, settings: Settings, *, where: str
) -> dict[str, list[tuple[float, float]]]:
    """Return, by model, (bytes/s sent and received, excess of compute meanwhile) for links of several rates.

    If two devices of the type fit on a core, both are there: the traffic of one slows the other down too.
    """
    by_model = defaultdict[str, list[tuple[float, float]]](list)
    size = crowd_size(share_of(cluster.device_types[name])) or 2
    for rate in RATES_BYTES_PER_S if settings.models else ():
        crowd = lab_of(
            linked_devices(cluster, name, size, bandwidth_bytes_per_s=rate), where=where, on=usable_cores()[:2]
        )
        measured = _measured(crowd, replace(settings, only="communication"), shaped=True)["beside"]
        for model, point in measured.items():
            by_model[model].append(tuple(point))
    return by_model


def linked_devices(
    cluster: Cluster, name: str, count: int, *, bandwidth_bytes_per_s: float = FASTEST_BYTES_PER_S
) -> Cluster:
    """Return this number of devices of a type of the cluster, fully linked."""
    kind = cluster.device_types[name]
    emulated = replace(kind.lab, processor=None) if kind.lab else None  # costs are about to be measured on this one
    names = [f"{name}-{i}" for i in range(count)]
    links = [
        Link(between=pair, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=0.0, source="for calibration")
        for pair in combinations(names, 2)
    ]
    return Cluster(
        name=f"{count} of {name}",
        backend="gloo",
        device_types={name: replace(kind, lab=emulated)},
        devices=tuple(Device(name=each, type=name, host=each) for each in names),
        links=tuple(links),
        source="for calibration",
    )


def backend_data(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the costs of the backend.

    A message costs as much as on the bare wire, in addition to any link's latency.
    """
    data = backend_cost_data(measured["communication"], f"{source_of(measured)}, in the lab")
    return {"message_s": measured["communication"]["latency_s"], **data}


def _measured(lab: Lab, settings: Settings, *, shaped: bool = False) -> dict[str, Any]:
    with scratch_folder("gsreal-run-") as folder:
        file = Path(folder, "measured.json")
        arguments = [json.dumps(asdict(settings)), str(file)]
        with unwinding(), built(lab.network, shaped=shaped) as network:
            run_ranks(lab.network, lab.places, "gsreal.calibrate", arguments, check=network.check, guard=GUARD)
        measured: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return measured


def write_types(path: Path, types: dict[str, Any], backend: dict[str, Any]) -> None:
    """Write the device types to `path`, and next to it the backend's costs, after checking the content."""
    for name, data in types.items():
        validated(DeviceType, rounded(data), file=str(path), under=name)
    validated(BackendCost, rounded(backend), file=str(path), under="backend_cost")
    words = "by gsreal calibrate --lab: "
    text = f"# Written {words}what emulated devices do.\n" + tomli_w.dumps(rounded(types))
    costs = f"# Written {words}what gloo costs there.\n" + tomli_w.dumps(rounded(backend))
    write_files({path: text.encode(), backend_path(path): costs.encode()})


def backend_path(path: Path) -> Path:
    """Return the file of the backend's costs that belongs to a file of device types.

    >>> backend_path(Path("devices/lab.toml")).name
    'lab-backend.toml'
    """
    return path.with_name(f"{path.stem}-backend{os.path.splitext(path.name)[1]}")
