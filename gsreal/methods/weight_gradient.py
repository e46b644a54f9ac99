"""The same samples on every rank, each of which makes the weight gradients of its own layers alone and updates these.

Gradient Sharding taken by its word: no gradient is ever sent. The other layers' parameters are frozen, so that autograd
leaves out their weight gradients, and ends the backward at the first of the owned layers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.exchanges import all_gather_v
from gsreal.measure import Timeline
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training
from gssim.scenario import Scenario
from gssim.workload import unrolled


def train_owned_layers(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Train the rank's own layers, then publish them: all parameters are views of one flat replica."""
    group = dist.group.WORLD
    assert group is not None
    names = [
        [name for instance in unrolled(scenario.workload.model)[slice(*layers)] for name in instance.parameter_names]
        for layers in scenario.owned_layers
    ]
    flat, ranges = flat_replica(module, names)
    for tensor in [flat, *module.buffers()]:
        dist.broadcast(tensor, 0, group=group)
    own = set(names[dist.get_rank(group)])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in own)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(scenario.workload, trained, device)

    def publish(*_optimizer_and_arguments: Any) -> None:
        with timeline.span("publish", "exposed_communication", group):
            all_gather_v(flat, ranges, group=group)

    optimizer.register_step_post_hook(publish)
    return Training(module, optimizer, timeline, scale=0.0, last_gradient=[])


def flat_replica(module: nn.Module, names: list[list[str]]) -> tuple[Tensor, list[tuple[int, int]]]:
    """Move all parameters into one tensor, part by part in the order of `names`; return it and each part's range.

    The parameters stay views of it. They must have one data type and be on one device.
    """
    named = dict(module.named_parameters())
    moved = [named[name] for part in names for name in part]
    flat = torch.empty(sum(p.numel() for p in moved), dtype=moved[0].dtype, device=moved[0].device)
    ranges, start = [], 0
    for part in names:
        first = start
        for name in part:
            place = flat[start : start + named[name].numel()]
            place.copy_(named[name].detach().reshape(-1))
            named[name].data = place.view(named[name].shape)
            start += place.numel()
        ranges.append((first, start))
    return flat, ranges
