"""What ranks of several tests do alike: they take cases from a file, train a few steps, and write what they found."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsreal.measure import Timeline
from gsreal.methods.apply import full_parameters
from gsreal.run.feed import Feed
from gsreal.run.worker import build
from gssim.scenario import Scenario, load_scenario

CPU = torch.device("cpu")


def scenarios_in(cases_file: str) -> Iterator[tuple[str, Scenario]]:
    """Meet the other ranks; yield the name and the scenario of each case."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, case in json.loads(Path(cases_file).read_text(encoding="utf-8")).items():
        yield name, load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False).scenario


def write_found(found: dict[str, Any], out: str) -> None:
    """Write what the first rank found, and wait for all ranks."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def trained(scenario: Scenario, rank: int, *, steps: int) -> dict[str, Tensor]:
    """Return all parameters after a rank's first steps."""
    training, feed = build(scenario, Timeline(rank, CPU), CPU), Feed(scenario, rank, CPU)
    for step in range(steps):
        training.step(*feed.at(step), rank)
    return full_parameters(training.module)
