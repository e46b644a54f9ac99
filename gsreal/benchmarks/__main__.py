"""Every rank of `gsreal calibrate` runs this; rank 0 writes what was measured."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gsreal.benchmarks.bench import Bench, Settings
from gsreal.benchmarks.communication import communicating_slowdown, communication_cost
from gsreal.benchmarks.compression import compression_cost
from gsreal.benchmarks.cut_blocks import cut_block_cost
from gsreal.benchmarks.device import OPTIMIZERS, device_rates, matrix_rate, optimizer_cost
from gsreal.benchmarks.profile import profile_model, trained_between
from gsreal.benchmarks.wrappers import gradient_hook_cost, sharded_unit_cost
from gsreal.machine import device_name, provenance
from gsreal.measure import MemoryCounter
from gsreal.rank import run_on_rank
from gssim.result import write_text
from gssim.scenario import load_model


def main(settings: str, out: str) -> None:
    """Measure on one rank; `settings` is JSON, and rank 0 writes what was found to the file `out`."""
    asked: dict[str, Any] = json.loads(settings)
    for key in ("models", "batch_sizes"):
        asked[key] = tuple(asked[key])
    measured = run(Settings(**asked))
    if dist.get_rank() == 0:
        write_text(Path(out), json.dumps(measured))


def run(settings: Settings) -> dict[str, Any]:
    """Return all measurements of this machine, as plain data."""
    counter = MemoryCounter(torch.device(settings.kind))
    bench = Bench(settings)
    found: dict[str, Any] = {
        "name": device_name(bench.device),
        "ranks": bench.ranks,
        "memory_counter": counter.method,
        "provenance": provenance(bench.device),
    }
    if settings.layers_only:
        found["peak_flop_per_s"] = {settings.precision: bench.alone(lambda: matrix_rate(bench))}
    else:
        found |= _device_costs(bench)
    found |= _layer_costs(bench, counter)
    if bench.ranks > 1 and not settings.layers_only:
        found |= _communication_costs(bench)
    return found


def _device_costs(bench: Bench) -> dict[str, Any]:
    bench.say("arithmetic and memory")
    device = bench.alone(lambda: device_rates(bench))
    bench.say("optimizers")
    with trained_between(bench):
        optimizers = bench.alone(lambda: {name: optimizer_cost(bench, name) for name in OPTIMIZERS})
    bench.say("thresholding")
    compression = bench.alone(lambda: compression_cost(bench))
    return {"device": device, "optimizers": optimizers, "compression": compression}


def _layer_costs(bench: Bench, counter: MemoryCounter) -> dict[str, Any]:
    profiles, jitters, ratios = [], [], []
    for path in bench.settings.models:
        model = load_model(Path(path))
        bench.say(f"layers of {model.name}")
        profile, jitter, ratio = profile_model(bench, model, counter)
        profiles.append(profile)
        jitters.append(jitter)
        ratios.append(ratio)
    if not profiles:
        return {"profiles": []}
    return {
        "profiles": profiles,
        "step_jitter_ratio": statistics.median(jitter[0] for jitter in jitters),
        "task_jitter_ratio": statistics.median(jitter[1] for jitter in jitters),
        "neighbour_slowdown_ratio": max(1.0, statistics.median(ratios)),
    }


def _communication_costs(bench: Bench) -> dict[str, Any]:
    bench.say("exchanges and collectives")
    communication = communication_cost(bench)
    bench.say("compute beside communication")
    slowdown = communicating_slowdown(bench)
    bench.say("sharding wrappers")
    sharded_unit, sharded_tensor_s = sharded_unit_cost(bench)
    bench.say("DTensor's own time")
    cut_block = cut_block_cost(bench)
    return {
        "cut_block": cut_block,
        "communication": communication,
        "communicating_slowdown_ratio": slowdown,
        "sharded_unit": sharded_unit,
        "sharded_tensor_s": sharded_tensor_s,
        "gradient_hook_s": gradient_hook_cost(bench),
    }


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
