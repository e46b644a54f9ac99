"""Common program of ranks of several tests: reads cases from a file, trains a few steps, and writes the results."""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.gradient_sharding.sharded_parameters import units_of
from gsreal.measure import Timeline
from gsreal.methods.pipelined import StageModules
from gsreal.methods.tensor_slices import Slice
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


def from_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks (of a group), in their order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
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
    """Return every parameter whole, by each of its names in the model; sharded ones are gathered (a collective)."""
    if isinstance(module, StageModules):
        own: dict[str, Tensor] = {}
        for stage in module.stages:
            own |= full_parameters(stage)
        # copies, as the memory of what pickle makes is not torch's, so that nobody counts it
        return {name: value.clone() for each in from_all_ranks(own, module.group) for name, value in each.items()}
    resting = [unit for unit in units_of(module) if not unit.is_whole]
    for unit in resting:
        unit.gather()
    by_name = dict(module.named_parameters(remove_duplicate=False))
    cut_as = {id(parameter): name for name, parameter in by_name.items() if _slice_of(module, name)[0] is not None}
    """By identity: the name under which a parameter is cut, as a tied one is under one of its names alone."""
    whole = {
        name.removeprefix("module."): whole_parameter(module, cut_as.get(id(parameter), name))
        for name, parameter in by_name.items()
    }
    for unit in resting:
        unit.free()
    return whole


def _slice_of(module: nn.Module, name: str) -> tuple[Slice | None, dist.ProcessGroup | None]:
    """Return the slice of a whole tensor that a parameter is, if any, and the group of ranks that has it whole."""
    path, _, leaf = name.rpartition(".")
    found: tuple[Slice | None, dist.ProcessGroup | None] = (
        module.get_submodule(path).__dict__.get("_gsreal_slices", {}).get(leaf, (None, None))
    )
    return found


def whole_parameter(module: nn.Module, name: str) -> Tensor:
    """Return a parameter whole, combined from all ranks with parts of it (a collective if there are any)."""
    parameter: Any = module.get_parameter(name)
    local: Tensor = (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
    part, group = _slice_of(module, name)
    if part is None:
        return local.clone()
    along = part.dimension
    if local.shape[along] == part.size and dist.get_world_size(group) > 1:  # a DTensor's, in the ranks' order
        local = local.chunk(dist.get_world_size(group), along)[dist.get_rank(group)]
    whole = local.new_zeros([part.size if dimension == along else size for dimension, size in enumerate(local.shape)])
    for (first, last), piece in zip(part.ranges, local.split([b - a for a, b in part.ranges], along), strict=True):
        whole.narrow(along, first, last - first).copy_(piece)
    dist.all_reduce(whole, group=group)
    return whole


def trained(scenario: Scenario, rank: int, *, steps: int) -> dict[str, Tensor]:
    """Return all parameters after a rank's first steps."""
    training, feed = build(scenario, Timeline(rank, CPU), CPU), Feed(scenario, rank, CPU)
    for step in range(steps):
        training.step(*feed.at(step), rank)
    return full_parameters(training.module)
