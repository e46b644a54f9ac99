"""Runs on every rank of a test: trainings with compressed all-reduces, beside the same written out on one rank.

Arguments: a JSON file of cases {name: {"scenario": FILE, "overrides": [...]}} and the file to write.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from rank_training import CPU, full_parameters, largest_difference, scenarios_in, trained, write_found
from torch import Tensor

from gsreal.measure import Timeline
from gsreal.model_files.build import logits_of, loss_of
from gsreal.run.feed import Feed
from gsreal.run.rank import run_on_rank
from gsreal.run.worker import build
from gssim.scenario import Scenario, single_device

STEPS = 4


def main(cases_file: str, out: str) -> None:
    found = {}
    for name, scenario in scenarios_in(cases_file):
        together = trained(scenario, dist.get_rank(), steps=STEPS)
        if dist.get_rank() == 0:
            alone = trained(single_device(scenario), 0, steps=STEPS)
            difference = largest_difference(together, written_out(scenario))
            found[name] = {"difference": difference, "rounding": largest_difference(together, alone)}
    write_found(found, out)


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
