"""Writes a cluster file for predictions from the measurements of this machine."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import tomli_w

from gsreal.calibrate.bench import Settings, cores_per_rank
from gsreal.run.launch import Guard, launch
from gssim.cluster import Cluster
from gssim.errors import UserError, one_line
from gssim.execution.files import scratch_folder, write_text
from gssim.scenario import read_toml
from gssim.units import validated

GUARD = Guard(timeout_s=1800)
"""Guard of micro-benchmarks, in which one rank may measure for long while the others wait."""


def measure(settings: Settings, *, ranks: int, forked: bool = False) -> dict[str, Any]:
    """Return the measurements of the micro-benchmarks on `ranks` ranks of this machine; `forked`: see `launch`."""
    with scratch_folder("gsreal-run-") as folder:
        file = Path(folder, "measured.json")
        launch("gsreal.calibrate", [json.dumps(asdict(settings)), str(file)], ranks=ranks, guard=GUARD, forked=forked)
        measured: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return measured


LINK_KEYS = ("bandwidth_bytes_per_s", "latency_s")
COMMUNICATING = (
    "communicating_slowdown_ratio",
    "gradient_hook_s",
    "replica_hook_s",
    "replica_forward_s",
    "sharded_unit",
    "flat_unit",
    "cut_block",
)
"""Costs of a device type that are measured with the links."""
DRIFTING = ("neighbour_slowdown_ratio", "step_jitter_ratio", "task_jitter_ratio", "layer_operation_s")


UNMEASURED = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-4, "source": "not measured yet"}


def cluster_data(measured: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the cluster file's content: this machine's devices, one a rank, connected by its loopback.

    If communication is not measured, links have assumed rates, and there is no `backend_cost`.
    """
    source = source_of(measured)
    names = [f"device{rank}" for rank in range(measured["ranks"])]
    data: dict[str, Any] = {
        "name": f"this machine: {measured['ranks']} x {measured['name']}",
        "backend": "gloo",
        "cores_per_rank": cores_per_rank(settings.kind, measured["ranks"]),
        "source": source,
        "device_types": {measured["name"]: device_type_data(measured, settings, source)},
        "devices": [{"name": name, "type": measured["name"], "host": "this"} for name in names],
    }
    if len(names) > 1:
        data["links"] = [{"between": list(pair), **UNMEASURED} for pair in combinations(names, 2)]
    return with_communication(data, measured) if "communication" in measured else data


def with_communication(data: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return a cluster file's content with measured messages and wrappers: links, backend and the device's costs."""
    source, device = source_of(measured), data["device_types"][measured["name"]]
    communication = measured["communication"]
    link = {key: communication[key] for key in LINK_KEYS} | {"source": source}
    for name, cost in device["optimizers"].items():
        cost["sharded_tensor_s"] = measured["sharded_tensor_s"].get(name, 0.0)
    return data | {
        "device_types": {measured["name"]: device | {key: measured[key] for key in COMMUNICATING if key in measured}},
        "links": [{"between": each["between"], **link} for each in data["links"]],
        "backend_cost": backend_cost_data(communication, source),
    }


def on_nccl(measured: Sequence[dict[str, Any]], settings: Settings, out: Path) -> dict[str, Any]:
    """Return the cluster file's content for ranks that have a GPU each, as `gssim cluster --detect` describes them.

    `measured`: measurements of every node, which must be equal. Device types are as measured; links inside and between
    nodes as this node's GPUs and network cards are wired, with the rates of presets; NCCL's constants are fitted to the
    all-reduces among the first node's GPUs, which are written to a table beside `out`. Raises UserError where nodes
    differ, or their GPUs are of no preset.
    """
    first = measured[0]
    kinds = list(dict.fromkeys((each["name"], each["ranks"]) for each in measured))
    if len(kinds) > 1:
        counts = ", ".join(f"{ranks} x {name}" for name, ranks in kinds)
        raise UserError(f"nodes differ: {counts}; `gssim cluster` describes such clusters")
    words = ["cluster", "--detect", "--devices", str(first["ranks"]), "--hosts", str(len(measured))]
    if "nccl_all_reduces" in first:
        table = out.with_suffix(".all-reduce.csv")
        write_all_reduces(table, first)
        print(f"gsreal: calibrate: NCCL's all-reduces are in {table}", file=sys.stderr)
        words += ["--nccl-tests", str(table)]
    with scratch_folder("gsreal-run-") as folder:
        file = Path(folder, out.name)
        command = [sys.executable, "-m", "gssim", *words, "--out", str(file)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = ended.stderr.strip().splitlines()
        if ended.returncode:
            raise UserError(lines[-1] if lines else f"gssim cluster: exit status {ended.returncode}")
        data = read_toml(file)[1]
    if data["backend"] != "nccl":
        raise UserError("nvidia-smi does not tell this machine's GPUs")
    for line in lines:
        print(line, file=sys.stderr)
    named = {key: first["name"] for key in data["device_types"]}
    for each in data.get("topology", {}).get("servers", ()):
        each["device"] = named[each["device"]]
    for each in data.get("devices", ()):
        each["type"] = named[each["type"]]
    return data | {
        "name": f"{len(measured) * first['ranks']} x {first['name']}",
        "device_types": {first["name"]: device_type_data(first, settings, source_of(first))},
        "source": f"{data['source']}; devices and NCCL's constants: {source_of(first)}",
    }


def source_of(measured: dict[str, Any]) -> str:
    """Return the date, method and hardware of a measurement."""
    provenance = measured["provenance"]
    return (
        f"measured {provenance['date']} by gsreal calibrate on {provenance.get('gpu', provenance['processor'])}, "
        f"{provenance['system']}, "
        f"torch {provenance['torch']}, python {provenance['python']}, memory by {measured['memory_counter']}"
    )


def backend_cost_data(communication: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the backend's costs for a cluster file: the measured communication costs without the link's."""
    return {**{key: value for key, value in communication.items() if key not in LINK_KEYS}, "source": source}


def device_type_data(measured: dict[str, Any], settings: Settings, source: str) -> dict[str, Any]:
    """Return a device type of a cluster file."""
    device = measured["device"]
    optimizers = measured["optimizers"]
    for name, cost in optimizers.items():
        cost["sharded_tensor_s"] = measured.get("sharded_tensor_s", {}).get(name, 0.0)
    ranks = measured["ranks"]
    data = {
        "kind": settings.kind,
        "memory_bytes": device["memory_bytes"] / (ranks if settings.kind == "cpu" else 1),
        "peak_flop_per_s": {settings.precision: device["peak_flop_per_s"]},
        "memory_bandwidth_bytes_per_s": device["memory_bandwidth_bytes_per_s"],
        "operation_overhead_s": device["operation_overhead_s"],
        "workspace_bytes": device["workspace_bytes"],
        "source": source,
        "optimizers": optimizers,
        "compression": measured["compression"],
        "profiles": measured["profiles"],
    }
    data |= {key: device[key] for key in ("step_host_s", "kernel_s") if key in device}
    if "resident_threads" in device:
        data["resident_threads"] = int(device["resident_threads"])
    for key in (*COMMUNICATING, *DRIFTING, "kernels"):
        if key in measured:
            data[key] = measured[key]
    return data


def read_previous(path: Path, name: str) -> dict[str, Any]:
    """Return the content of a cluster file whose device `name` is to be measured again; raise UserError for others."""
    data = read_toml(path)[1]
    validated(Cluster, data, file=str(path))
    _device_in(data, name, str(path))
    return data


def _device_in(data: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    types: dict[str, dict[str, Any]] = data["device_types"]
    if name not in types:
        raise UserError(f"{where}: describes {', '.join(types)}, but this is {name}")
    types[name].setdefault("profiles", [])
    return types[name]


def averaged(data: dict[str, Any], measured: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a cluster file's content with repeated measurements of layers averaged into its profiles.

    A shared machine drifts within minutes: several measurements at different times predict a run better. A model that
    was profiled in another precision gets a second profile for this one, and the device a peak. Raises UserError if the
    file is of another device, or has no profile of such a model and shape.
    """
    device = _device_in(data, measured["name"], where)
    count = max((profile.get("measurements", 1) for profile in device["profiles"]), default=1)
    for key in DRIFTING:
        if key in measured:
            device[key] = (device.get(key, measured[key]) * count + measured[key]) / (count + 1)
    other_keys = [key for key in PROFILE_KEYS if key != "precision"]
    for new in measured["profiles"]:
        same = [old for old in device["profiles"] if all(old.get(key) == new.get(key) for key in PROFILE_KEYS)]
        if same and _has_host_times(same[0]) != _has_host_times(new):
            raise UserError(f"{where}: its profile of {new['model']} has other times of the host; calibrate anew")
        if same:
            _average(same[0], new, where)
        elif any(all(old.get(key) == new.get(key) for key in other_keys) for old in device["profiles"]):
            device["profiles"].append(new)
        else:
            raise UserError(f"{where}: has no profile of {new['model']} at this sequence length")
    rates = device.setdefault("peak_flop_per_s", {})
    for precision, rate in measured.get("peak_flop_per_s", {}).items():
        rates[precision] = (rates.get(precision, rate) * count + rate) / (count + 1)
    return data


HOST = {"forward_host_s", "backward_host_s"}
MEMORY = ("forward_peak_bytes", "backward_peak_bytes", "scratch_bytes")
PROFILE_KEYS = ("model", "precision", "sequence_length")


def _has_host_times(profile: dict[str, Any]) -> bool:
    return any(HOST & layer.keys() for layer in profile["layers"].values())


def _average(old: dict[str, Any], new: dict[str, Any], where: str) -> None:
    count = old.get("measurements", 1)
    for name, layer in new["layers"].items():
        for key in ("forward_s", "backward_s", *(HOST & layer.keys() & old["layers"][name].keys())):
            curve = old["layers"][name][key]
            if curve["sizes"] != layer[key]["sizes"]:
                raise UserError(f"{where}: was measured at batch sizes {curve['sizes']}; give the same again")
            pairs = zip(curve["values"], layer[key]["values"], strict=True)
            curve["values"] = [(before * count + now) / (count + 1) for before, now in pairs]
        if any(key in layer for key in MEMORY):  # does not drift: the latest count is enough
            times = {key: value for key, value in old["layers"][name].items() if key not in MEMORY}
            old["layers"][name] = times | {key: layer[key] for key in MEMORY if key in layer}
    if "pause_excess_s" in new:
        curve = new["pause_excess_s"]
        before = old.setdefault("pause_excess_s", curve)
        if before["sizes"] == curve["sizes"]:
            pairs = zip(before["values"], curve["values"], strict=True)
            before["values"] = [(then * count + now) / (count + 1) for then, now in pairs]
    if "neighbour_slowdown_ratio" in new:
        then = old.get("neighbour_slowdown_ratio", new["neighbour_slowdown_ratio"])
        old["neighbour_slowdown_ratio"] = (then * count + new["neighbour_slowdown_ratio"]) / (count + 1)
    old["measurements"] = count + 1


def write_cluster(path: Path, data: dict[str, Any]) -> None:
    """Write the cluster file atomically, after checking the content."""
    written = rounded(data)
    validated(Cluster, written, file=str(path))
    write_text(
        path,
        "# Written by gsreal calibrate: what this machine does, measured alone and together.\n"
        + tomli_w.dumps(written),
    )


def write_calibrated(path: Path, measured: Sequence[dict[str, Any]], data: dict[str, Any], settings: Settings) -> None:
    """Write a calibration's cluster file: `data`, or for NCCL where several ranks have a GPU each; see `on_nccl`.

    `measured`: measurements of every node. GPUs that cannot be described are named, and communicate over gloo as in
    `data`.
    """
    own_gpus = all(each.get("gpus", 0) >= each["ranks"] for each in measured)
    if own_gpus and sum(each["ranks"] for each in measured) > 1:
        try:
            data = on_nccl(measured, settings, path)
        except UserError as error:
            print(f"gsreal: calibrate: {error}: the file has backend gloo", file=sys.stderr)
    write_cluster(path, data)
    drawn = shlex.join(["python", "-m", "analysis", "draw", str(path), "--out", str(path.with_suffix(".png"))])
    print(one_line(drawn))
    used = shlex.join(["gssim", "run", "SCENARIO", "--set", f"cluster={path}"])
    print(one_line(f"gsreal: calibrate: to predict with it: {used}"), file=sys.stderr)


def write_all_reduces(table: Path, measured: dict[str, Any]) -> None:
    """Write NCCL's measured all-reduces as a CSV file that `gssim cluster --nccl-tests` reads."""
    ranks = "".join(f"# Rank {rank} {measured['name']}\n" for rank in range(measured["ranks"]))
    rows = "".join(f"{size},{seconds * 1e6:.5g}\n" for size, seconds in measured["nccl_all_reduces"])
    write_text(table, f"# {source_of(measured)}\n{ranks}size_bytes,time_us\n{rows}")


def rounded(value: Any) -> Any:
    """Return the data with five significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value
