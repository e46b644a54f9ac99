"""Runs on every rank of a test: each case is evaluated before and after a step; rank 0 writes what was found.

Arguments: a JSON file of cases {name: {"overrides": [...], "scenario": FILE}} and the file to write.
"""

import sys

import torch
import torch.distributed as dist
from rank_training import cases_in, meet, scenario_of_case, write_found

from gsreal.measure import Timeline
from gsreal.measure.collectives import CollectiveRecorder
from gsreal.run.feed import Feed, HeldOut
from gsreal.run.rank import run_on_rank
from gsreal.run.worker import build


def main(cases_file: str, out: str) -> None:
    meet()
    write_found({name: run_case(case) for name, case in cases_in(cases_file).items()}, out)


def run_case(case):
    scenario = scenario_of_case(case)
    device, rank = torch.device("cpu"), dist.get_rank()
    training = build(scenario, Timeline(rank, device), device)
    feed, held_out = Feed(scenario, rank, device), HeldOut(scenario, rank, device)

    def step(number):
        inputs, targets, weights = feed.at(number)
        with CollectiveRecorder() as recorder:
            training.step(inputs, targets, weights, rank)
        return [[entry.kind, entry.size_bytes] for entry in recorder.seen if not entry.data_dependent]

    before = held_out.evaluate(training.module, step=1)
    step(0)
    step(1)  # here DDP makes its buckets again
    second = step(2)
    held_out.evaluate(training.module, step=3)
    third = step(3)
    after = held_out.evaluate(training.module, step=3)
    return {
        "before": [before.loss, before.accuracy_ratio],
        "after": [after.loss, after.accuracy_ratio],
        "collectives": [second, third],
        "trains": training.module.training,
    }


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
