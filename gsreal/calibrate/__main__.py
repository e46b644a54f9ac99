"""Process of each rank of `gsreal calibrate`: runs all micro-benchmarks; rank 0 writes the measurements."""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gsreal.calibrate.bench import (
    Bench,
    Settings,
    compression_cost,
    device_rates,
    matrix_rate,
    middle_batch_size,
    optimizer_cost,
)
from gsreal.calibrate.communication import (
    all_reduce_table,
    communicating_excess,
    communicating_slowdown,
    communication_cost,
)
from gsreal.calibrate.kernels import kernel_rates
from gsreal.calibrate.profile import layer_operation_s, neighbour_slowdown, profile_model, trained_between
from gsreal.calibrate.wrappers import (
    cut_block_cost,
    flat_unit_cost,
    gradient_hook_cost,
    replica_costs,
    sharded_unit_cost,
    step_cost,
)
from gsreal.machine import CoreWait, device_name, provenance
from gsreal.measure import MemoryCounter
from gsreal.run.rank import run_on_rank
from gssim.execution.files import write_text
from gssim.scenario import load_model
from gssim.workload import Model

BESIDE: dict[str, Callable[[Bench, Model], Any]] = {
    "neighbours": neighbour_slowdown,
    "communication": communicating_excess,
}


def main(settings: str, out: str) -> None:
    """Measure on one rank; `settings` is JSON, and rank 0 writes the measurements to the file `out`."""
    asked: dict[str, Any] = json.loads(settings)
    for key in ("models", "batch_sizes", "optimizers", "summed_precisions"):
        asked[key] = tuple(asked[key])
    measured = run(Settings(**asked))
    if dist.get_rank() == 0:
        write_text(Path(out), json.dumps(measured))


def run(settings: Settings) -> dict[str, Any]:
    """Return all measurements of this machine, as plain data."""
    counter = MemoryCounter(torch.device(settings.kind))
    bench = Bench(settings)
    measurements: dict[str, Any] = {
        "name": device_name(bench.device),
        "ranks": bench.ranks,
        "memory_counter": counter.method,
        "provenance": provenance(bench.device),
    }
    if bench.device.type == "cuda":
        measurements["gpus"] = torch.cuda.device_count()
    if settings.only in BESIDE:
        return measurements | {"beside": _beside(bench, BESIDE[settings.only])}
    core_wait = CoreWait()
    if settings.only in ("", "devices"):
        measurements |= _device_costs(bench)
    elif settings.only == "layers":
        measurements["peak_flop_per_s"] = {settings.precision: bench.alone(lambda: matrix_rate(bench))}
    if settings.only != "links":
        measurements |= _layer_costs(bench, counter)
        measurements["core_wait_ratio"] = bench.core_wait_ratio(core_wait)
        if settings.only in ("", "devices"):  # layers alone: `gsreal validate` averages several measurements
            bench.warn_if_busy(measurements["core_wait_ratio"])
    if bench.ranks > 1 and settings.only in ("", "links"):
        measurements |= _communication_costs(bench)
    return measurements


def _device_costs(bench: Bench) -> dict[str, Any]:
    bench.say("arithmetic and memory")
    device = bench.alone(lambda: device_rates(bench))
    kernels = {}
    if bench.device.type == "cuda":  # on a CPU they take longer than the layers of models that it trains
        bench.say("matrix products and attention by size")
        kernels = {"kernels": bench.alone(lambda: [kernel_rates(bench)])}
    bench.say("optimizers")
    with trained_between(bench):
        optimizers = bench.alone(lambda: {name: optimizer_cost(bench, name) for name in bench.settings.optimizers})
        step_host_s = step_cost(bench)
    bench.say("thresholding")
    compression = bench.alone(lambda: compression_cost(bench))
    device = (device or {}) | {"step_host_s": step_host_s}
    return {"device": device, "optimizers": optimizers, "compression": compression, **kernels}


def _layer_costs(bench: Bench, counter: MemoryCounter) -> dict[str, Any]:
    profiles, jitters, operation_s = [], [], []
    for path in bench.settings.models:
        model = load_model(Path(path))
        bench.say(f"layers of {model.name}")
        profile, jitter = profile_model(bench, model, counter)
        profiles.append(profile)
        jitters.append(jitter)
        if bench.rank == 0 and bench.device.type == "cuda":
            operation_s.append(layer_operation_s(model, profile, middle_batch_size(bench)))
    if not profiles:
        return {"profiles": []}
    of_operations = {"layer_operation_s": statistics.median(operation_s)} if operation_s else {}
    return of_operations | {
        "profiles": profiles,
        "step_jitter_ratio": statistics.median(jitter[0] for jitter in jitters),
        "task_jitter_ratio": statistics.median(jitter[1] for jitter in jitters),
        "neighbour_slowdown_ratio": statistics.median(each.get("neighbour_slowdown_ratio", 1.0) for each in profiles),
    }


def _beside(bench: Bench, measure: Callable[[Bench, Model], Any]) -> dict[str, Any]:
    """Return the measurement of each model, by its name."""
    by_model = {}
    for path in bench.settings.models:
        model = load_model(Path(path))
        bench.say(f"{model.name} beside {bench.settings.only}")
        by_model[model.name] = measure(bench, model)
    return by_model


def _communication_costs(bench: Bench) -> dict[str, Any]:
    bench.say("exchanges and collectives")
    communication = communication_cost(bench)
    by_nccl: dict[str, Any] = {}
    if bench.device.type == "cuda" and torch.cuda.device_count() >= bench.ranks:  # NCCL takes one rank for each GPU
        bench.say("all-reduces by NCCL")
        by_nccl = {"nccl_all_reduces": all_reduce_table(bench, "nccl")}
    bench.say("compute beside communication")
    slowdown = communicating_slowdown(bench)
    bench.say("sharding wrappers")
    sharded_unit, sharded_tensor_s = sharded_unit_cost(bench)
    flat_unit = flat_unit_cost(bench)
    bench.say("DTensor's own time")
    cut_block = cut_block_cost(bench)
    return by_nccl | {
        "cut_block": cut_block,
        "communication": communication,
        "communicating_slowdown_ratio": slowdown,
        "sharded_unit": sharded_unit,
        "flat_unit": flat_unit,
        "sharded_tensor_s": sharded_tensor_s,
        "gradient_hook_s": gradient_hook_cost(bench),
        **replica_costs(bench),
    }


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
