"""Runs a scenario in the lab: checks it, builds and verifies its cluster, runs its ranks, and takes everything down."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gsreal.lab.building import built
from gsreal.lab.cleaning import check_compiler, check_tools, runs
from gsreal.lab.network import Network, network_of
from gsreal.lab.ranks import run_ranks
from gsreal.lab.throttle import Place, cores_of, share_of, throttle_library
from gsreal.lab.verify import Verified, verify
from gsreal.machine import device_name, processor_name, usable_cores
from gsreal.run.launch import Guard
from gsreal.run.progress import DEFAULT_TIMEOUT_S
from gssim.cluster import Cluster
from gssim.errors import RunFailedError, UserError
from gssim.execution.files import scratch_folder
from gssim.result import Result, read_result
from gssim.scenario import Loaded
from gssim.terminal import unwinding


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
    _warn_of_other_labs()
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


def _warn_of_other_labs() -> None:
    others = runs()
    if others:
        print(
            f"gsreal: lab: {', '.join(others)}: running too, so that times are not comparable, or left by a killed "
            "run, which `gsreal lab --clean` removes",
            file=sys.stderr,
        )


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
