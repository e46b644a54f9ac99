"""Runs on every rank of a test: trainings with compressed all-reduces, beside the same written out on one rank.

Arguments: a JSON file of cases {name: {"scenario": FILE, "overrides": [...]}} and the file to write.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.measure import Timeline
from gsreal.methods.apply import full_parameters
from gsreal.model_files.build import logits_of, loss_of
from gsreal.run.feed import Feed
from gsreal.run.rank import run_on_rank
from gsreal.run.worker import build
from gssim.scenario import Scenario, load_scenario, single_device

STEPS = 4
CPU = torch.device("cpu")


def main(cases_file: str, out: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, case in json.loads(Path(cases_file).read_text(encoding="utf-8")).items():
        scenario = load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False).scenario
        trained = _trained(scenario)
        if dist.get_rank() == 0:
            expected = written_out(scenario)
            rounding = [float((p - trained[name]).abs().max()) for name, p in _trained_alone(scenario).items()]
            differences = [float((p - trained[name]).abs().max()) for name, p in expected.items()]
            found[name] = {"difference": max(differences), "rounding": max(rounding)}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def _trained(scenario: Scenario) -> dict[str, Tensor]:
    training, feed = build(scenario, Timeline(dist.get_rank(), CPU), CPU), Feed(scenario, dist.get_rank(), CPU)
    for step in range(STEPS):
        training.step(*feed.at(step), dist.get_rank())
    return full_parameters(training.module)


def _trained_alone(scenario: Scenario) -> dict[str, Tensor]:
    alone = single_device(scenario)
    training, feed = build(alone, Timeline(0, CPU), CPU), Feed(alone, 0, CPU)
    for step in range(STEPS):
        training.step(*feed.at(step), 0)
    return full_parameters(training.module)


def written_out(scenario: Scenario) -> dict[str, Tensor]:
    """Return all parameters after the same steps of both ranks, one after the other, summed in the 16-bit format."""
    alone, ranks = build(single_device(scenario), Timeline(0, CPU), CPU), scenario.ranks
    parameters: list[Any] = list(alone.module.parameters())
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}[scenario.policies.compress or ""]
    for step in range(STEPS):
        sums = [torch.zeros(parameter.shape, dtype=precision) for parameter in parameters]
        for rank in range(ranks):
            inputs, targets, weights = Feed(scenario, rank, CPU).at(step)
            loss = loss_of(logits_of(alone.module(inputs)), targets) * (ranks * weights.ranks[rank])
            for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                total += gradient.to(precision) / ranks
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total.to(parameter.dtype)
        alone.optimizer.step()
    return full_parameters(alone.module)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
