"""What ranks of several tests do alike: they take cases from a file, train a few steps, and write what they found."""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.sharded_parameters import gathered
from gsreal.measure import Timeline
from gsreal.methods.pipelined import StageModules
from gsreal.methods.tensor_slices import whole_parameter
from gsreal.run.feed import Feed
from gsreal.run.rank import join
from gsreal.run.worker import build
from gssim.scenario import Scenario, load_scenario

CPU = torch.device("cpu")


def meet() -> None:
    """Meet the other ranks, each of which computes on one thread."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    join("gloo")


def cases_in(cases_file: str) -> dict[str, dict[str, Any]]:
    """Return the cases in a file, by name."""
    cases: dict[str, dict[str, Any]] = json.loads(Path(cases_file).read_text(encoding="utf-8"))
    return cases


def scenario_of_case(case: dict[str, Any]) -> Scenario:
    """Return the scenario of a case."""
    return load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False).scenario


def scenarios_in(cases_file: str) -> Iterator[tuple[str, Scenario]]:
    """Meet the other ranks; yield the name and the scenario of each case."""
    meet()
    for name, case in cases_in(cases_file).items():
        yield name, scenario_of_case(case)


def from_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of an element between parameters of the same names."""
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


def write_found(found: Any, out: str) -> None:
    """Write what the first rank found, and wait for all ranks."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter whole, by name; sharded ones are gathered (a collective)."""
    if isinstance(module, StageModules):
        return module.gather_parameters()
    names = [name for name, _ in module.named_parameters()]
    with gathered(module):
        return {name.removeprefix("module."): whole_parameter(module, name) for name in names}


def trained(scenario: Scenario, rank: int, *, steps: int) -> dict[str, Tensor]:
    """Return all parameters after a rank's first steps."""
    training, feed = build(scenario, Timeline(rank, CPU), CPU), Feed(scenario, rank, CPU)
    for step in range(steps):
        training.step(*feed.at(step), rank)
    return full_parameters(training.module)
