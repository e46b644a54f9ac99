"""Micro-benchmarks of emulated devices: what each of a cluster's device types costs as the lab makes it."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w

from gsreal.benchmarks.bench import Settings
from gsreal.calibrate import backend_cost_data, device_type_data, rounded, source_of
from gsreal.lab.building import built
from gsreal.lab.interrupts import unwinding
from gsreal.lab.lab import Lab, lab_of
from gsreal.lab.network import FASTEST_BYTES_PER_S
from gsreal.lab.ranks import run_ranks
from gsreal.lab.throttle import share_of
from gsreal.machine import processor_name
from gssim.cluster import BackendCost, Cluster, Device, DeviceType, Link
from gssim.result import write_text
from gssim.units import validated


def calibrate_types(
    cluster: Cluster, settings: Settings, *, where: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the cluster's device types as measured so far, as plain data, and the costs of the backend.

    Each type is measured on two devices of it, wired by a link that is not shaped; the backend by the fastest type.
    """
    types: dict[str, Any] = {}
    backend: dict[str, Any] = {}
    names = sorted(cluster.device_types, key=lambda name: -share_of(cluster.device_types[name]))
    labs = {name: lab_of(pair_of(cluster, name), where=where) for name in names}  # all refusals come first
    for name, lab in labs.items():
        print(f"gsreal: calibrating {name}", file=sys.stderr, flush=True)
        kind = cluster.device_types[name]
        measured = _measured(lab, settings)
        data = device_type_data(measured, settings, source_of(measured) + ", in the lab")
        emulation = {"cpu_share_ratio": share_of(kind), "processor": processor_name()}
        types[name] = {**data, "memory_bytes": kind.memory_bytes, "lab": emulation}
        backend = backend or backend_data(measured)
        yield types, backend


def pair_of(cluster: Cluster, name: str) -> Cluster:
    """Return two devices of a type of the cluster's, side by side."""
    kind = cluster.device_types[name]
    said = replace(kind.lab, processor=None) if kind.lab else None  # it is about to be measured on this one
    link = Link(between=("a", "b"), bandwidth_bytes_per_s=FASTEST_BYTES_PER_S, latency_s=0.0, source="not shaped")
    return Cluster(
        name=f"two of {name}",
        backend="gloo",
        device_types={name: replace(kind, lab=said)},
        devices=tuple(Device(name=each, type=name, host=each) for each in link.between),
        links=(link,),
        source="for calibration",
    )


def backend_data(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the costs of the backend: a message takes what it did over the bare wire, beside any link's latency."""
    found = backend_cost_data(measured["communication"], f"{source_of(measured)}, in the lab")
    return {"message_s": measured["communication"]["latency_s"], **found}


def _measured(lab: Lab, settings: Settings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gsreal-") as folder:
        made = Path(folder, "measured.json")
        arguments = [json.dumps(asdict(settings)), str(made)]
        with unwinding(), built(lab.network, shaped=False) as network:
            run_ranks(lab.network, lab.places, "gsreal.benchmarks", arguments, check=network.check)
        measured: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
        return measured


def write_types(path: Path, types: dict[str, Any], backend: dict[str, Any]) -> None:
    """Write the device types to `path`, and beside it the backend's costs; what is written is checked first."""
    for name, data in types.items():
        validated(DeviceType, rounded(data), file=str(path), under=name)
    validated(BackendCost, rounded(backend), file=str(path), under="backend_cost")
    words = "by gsreal calibrate --lab: "
    write_text(path, f"# Written {words}what emulated devices do.\n" + tomli_w.dumps(rounded(types)))
    write_text(backend_path(path), f"# Written {words}what gloo costs there.\n" + tomli_w.dumps(rounded(backend)))


def backend_path(path: Path) -> Path:
    """Return the file of the backend's costs that stands beside a file of device types.

    >>> backend_path(Path("devices/lab.toml")).name
    'lab-backend.toml'
    """
    return path.with_name(f"{path.stem}-backend{os.path.splitext(path.name)[1]}")
