"""Runs on every rank of a test: batches that follow the ranks' paces, and shards that change owners.

Arguments: a JSON file of what to do, and the file for what it showed.
"""

import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from rank_training import cases_in, from_all_ranks, full_parameters, meet, scenario_of_case, write_found

from gsreal.gradient_sharding import GradientSharding
from gsreal.measure import Timeline
from gsreal.measure.collectives import CollectiveRecorder, collectives_of
from gsreal.methods.training import Training
from gsreal.run.checkpoint import Progress
from gsreal.run.feed import Feed
from gsreal.run.rank import run_on_rank
from gsreal.run.report import RunRecorder
from gsreal.run.worker import _timed_steps, build
from gssim.scenario import Scenario

CPU = torch.device("cpu")


def main(cases_file: str, out: str) -> None:
    meet()
    what = {"paces": paces, "migration": migration}
    write_found({name: what[case["what"]](case) for name, case in cases_in(cases_file).items()}, out)


def made(case: dict[str, Any]) -> tuple[Scenario, Training, Feed]:
    scenario = scenario_of_case(case)
    training = build(scenario, Timeline(dist.get_rank(), CPU), CPU)
    return scenario, training, Feed(scenario, dist.get_rank(), CPU)


def paces(case: dict[str, Any]) -> dict[str, Any]:
    """Train a whole run; return its losses, step times and divisions of the batch."""
    scenario, training, feed = made(case)
    course = RunRecorder(scenario, training, dist.get_rank(), CPU)
    losses = _timed_steps(training, feed, course, Progress(), None)
    spans, ends_s = training.timeline.read()
    divisions = training.rebalancer.state.divisions if training.rebalancer else ()
    inputs, targets, weights = feed.at(scenario.run.steps)
    with CollectiveRecorder() as recorder:
        training.step(inputs, targets, weights, dist.get_rank())
    emulated = [span.label for span in spans if "emulated" in span.label]
    return {
        "losses": [sum(each) for each in zip(*from_all_ranks(losses), strict=True)],
        "ends_s": ends_s,
        "collectives": [list(entry.key) for entry in collectives_of(from_all_ranks(recorder.seen))],
        "load": os.getloadavg()[0],
        "divisions": from_all_ranks([[each.first_step, each.samples, each.shard_shares] for each in divisions]),
        "emulated": [len(each) for each in from_all_ranks(emulated)],
    }


def migration(case: dict[str, Any]) -> dict[str, Any]:
    """Train, change the shards to each of `shares` in turn after two steps, and return what is left in the end."""
    _, training, feed = made(case)
    sharding = training.optimizer
    assert isinstance(sharding, GradientSharding)
    sent, same = [], True
    for step in range(2 * (len(case["shares"]) + 1)):
        inputs, targets, weights = feed.at(step)
        training.step(inputs, targets, weights, dist.get_rank())
        if step % 2 and step // 2 < len(case["shares"]):
            before = held(sharding)
            sent.append(sum(from_all_ranks(sharding.reshard(case["shares"][step // 2]))))
            same &= all(torch.equal(before[name], now) for name, now in held(sharding).items())
    whole = held(sharding)
    elements = [sum(bucket.shard.numel() for bucket in sharding.buckets)]
    return {
        "sent": sent,
        "same": same,
        "elements": [each[0] for each in from_all_ranks(elements)],
        "parameters": {name: float(p.double().abs().sum()) for name, p in full_parameters(training.module).items()},
        "state": {name: float(value.double().abs().sum()) for name, value in whole.items()},
        "exact": digest(full_parameters(training.module)),
        "replicas_equal": len(set(from_all_ranks(digest(full_parameters(training.module))))) == 1,
    }


def held(sharding: GradientSharding) -> dict[str, torch.Tensor]:
    """Return the master copy and the optimizer's state of all owners, put together bucket by bucket."""
    own = {}
    for bucket in sharding.buckets:
        own[f"{bucket.index} master"] = bucket.shard.detach().clone()
        for name, value in sharding.optimizer.state[bucket.shard].items():
            if torch.is_tensor(value) and value.dim():
                own[f"{bucket.index} {name}"] = value.clone()
    every = from_all_ranks(own)
    return {name: torch.cat([each[name] for each in every]) for name in own}


def digest(parameters: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, value in sorted(parameters.items()):
        total.update(name.encode())
        total.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
