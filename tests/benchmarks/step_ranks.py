"""Runs on every rank of a benchmark: plans of one scenario take turns, step by step; rank 0 writes ratios of medians.

Arguments: the scenario and the file to write.
"""

import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from gsreal.machine import settle
from gsreal.measure import Timeline
from gsreal.run.feed import Feed
from gsreal.run.rank import join, run_on_rank
from gsreal.run.worker import build
from gssim.scenario import load_scenario

PLANS = {
    "zero2": ["plan.method=zero2"],
    "gs dense": ["plan.method=gs"],
    "gs at 1 %": ["plan.method=gs", "plan.push.kind=target-density", "plan.push.threshold=0.01"],
}
WARMUPS, STEPS = 3, 21


def main(scenario_file: str, out: str) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    join("gloo")
    rank = dist.get_rank()
    loaded = [load_scenario(Path(scenario_file), plan, gradients_needed=False).scenario for plan in PLANS.values()]
    device = settle(loaded[0].cluster, rank)
    trainings = [build(scenario, Timeline(rank, device), device) for scenario in loaded]
    feed = Feed(loaded[0], rank, device)
    times: list[list[float]] = [[] for _ in PLANS]
    for step in range(WARMUPS + STEPS):
        inputs, targets, weights = feed.at(step)
        for found, training in zip(times, trainings, strict=True):
            dist.barrier()
            began = time.perf_counter()
            training.step(inputs, targets, weights, rank)
            found.append(time.perf_counter() - began)
    medians = [statistics.median(found[WARMUPS:]) for found in times]
    if rank == 0:
        ratios = {name: median / medians[0] for name, median in zip(PLANS, medians, strict=True)}
        Path(out).write_text(json.dumps(ratios), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
