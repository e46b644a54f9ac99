"""A plan applied to a real module with what PyTorch has for it: one function per combination of policies."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gsreal.measure import Timeline
from gsreal.methods.blocks import checkpoint_blocks
from gsreal.methods.fully_sharded import fully_shard_parameters
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.pushed import push_gradients
from gsreal.methods.replicated import all_reduce_gradients, train_alone
from gsreal.methods.training import Training
from gsreal.methods.weight_gradient import train_owned_layers
from gssim.scenario import Scenario

__all__ = ["Training", "checkpoint_blocks", "full_parameters", "make_optimizer", "prepare"]

Apply = Callable[[Scenario, nn.Module, Timeline, torch.device], Training]
APPLY: dict[tuple[str, str], Apply] = {
    ("replicated", "local"): train_alone,
    ("replicated", "all-reduce"): all_reduce_gradients,
    ("gathered", "reduce-scatter"): fully_shard_parameters,
    ("sharded", "reduce-scatter"): fully_shard_parameters,
    ("replicated", "push"): push_gradients,
}
"""By parameters and gradients, where each rank has samples of its own."""


def prepare(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Return the module made ready for the scenario's plan on this rank."""
    policies = scenario.policies
    if scenario.plan.recompute == "full":
        checkpoint_blocks(scenario.workload.model, module)
    apply = APPLY[policies.parameters, policies.gradients]
    if policies.partition == "weight-gradient":
        apply = train_owned_layers
    return apply(scenario, module, timeline, device)


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter whole, by name; sharded ones are gathered (a collective)."""
    found = {}
    for name, parameter in module.named_parameters():
        tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("module.")] = tensor.detach().clone()
    return found
