"""Applies a scenario's plan to a real module with PyTorch's own implementations.

One function per combination of policies.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from gsreal.measure import Timeline
from gsreal.methods.blocks import blocks_of, checkpoint_blocks
from gsreal.methods.context_parallel import context_exchange, divide_context
from gsreal.methods.data_parallel import (
    all_reduce_gradients,
    fully_shard_parameters,
    synchronize_periodically,
    train_single_device,
)
from gsreal.methods.expert_parallel import divided_experts, load_experts
from gsreal.methods.gradient_sharding import push_gradients, train_owned_layers
from gsreal.methods.meshes import DIVIDED, data_group, device_mesh, expert_mesh, shard_group
from gsreal.methods.optimizers import mark_matrices
from gsreal.methods.pipelined import StageModules, pipeline_stages
from gsreal.methods.tensor_slices import PartialGradients, partial_gradients, slice_blocks
from gsreal.methods.training import LossScaler, Training
from gsreal.methods.vocabulary_parallel import Loss, divide_vocabulary
from gsreal.model_files.build import loss_of
from gsreal.run.rank_speed import Rebalancer, SlowDevice
from gssim.scenario import Scenario

Apply = Callable[[Scenario, nn.Module, Timeline, torch.device], Training]
APPLY: dict[tuple[str, str], Apply] = {
    ("replicated", "local"): train_single_device,
    ("replicated", "all-reduce"): all_reduce_gradients,
    ("replicated", "periodic"): synchronize_periodically,
    ("gathered", "reduce-scatter"): fully_shard_parameters,
    ("sharded", "reduce-scatter"): fully_shard_parameters,
    ("replicated", "push"): push_gradients,
    ("gathered", "push"): push_gradients,
    ("sharded", "push"): push_gradients,
}
"""Function that applies a plan without a pipeline, by the placement of parameters and of gradients."""


def prepare(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Return the module prepared for the scenario's plan on this rank, as a `Training`."""
    policies = scenario.policies
    if policies.pp > 1:
        training = pipeline_stages(scenario, module, timeline, device)
        _clip_and_scale(scenario, training, device)
        return training
    if policies.cp > 1:  # inside of checkpoints: a recomputation exchanges again
        divide_context(module, blocks_of(scenario.workload.model, module), context_exchange(policies, timeline, device))
    if scenario.plan.recompute != "none":
        checkpoint_blocks(scenario.workload.model, module, scenario.plan.recompute)
    divided: PartialGradients | None = None
    loss: Loss = loss_of
    if policies.tp > 1:
        mesh = device_mesh(policies.mesh, device)["tp"]
        places = slice_blocks(scenario, module, timeline, mesh)
        divided = partial_gradients(scenario, places, timeline, mesh)
        loss = divide_vocabulary(scenario, module, timeline, mesh)
    load_experts(scenario, module)
    experts = divided_experts(scenario, module, timeline, device) if policies.ep > 1 else None
    mark_matrices(scenario.workload, module)  # dividing a parameter creates a new one
    apply = APPLY[policies.parameters, policies.gradients]
    if policies.partition == "weight-gradient":
        apply = train_owned_layers
    training = apply(scenario, module, timeline, device)
    training.partial_gradients, training.loss = divided, loss
    training.experts = experts
    training.autocast = scenario.workload.autocast
    _clip_and_scale(scenario, training, device)
    if scenario.plan.shares.replan:
        training.rebalancer = Rebalancer(scenario, device)
    if scenario.run.slowdowns:
        training.slow = SlowDevice(timeline, device)
    return training


def _clip_and_scale(scenario: Scenario, training: Training, device: torch.device) -> None:
    """Set how a training clips gradients and scales its loss, and the groups of ranks over which norms are summed."""
    policies = scenario.policies
    training.clip_norm = scenario.workload.clip_norm
    training.scaler = loss_scaler(scenario, training, device)
    shards = [shard_group(policies, device)] if policies.gradients == "reduce-scatter" and policies.shards > 1 else []
    if policies.ep > 1 and not shards:
        training.whole_in = expert_mesh(policies, device)[DIVIDED].get_group()
        training.norm_groups = [training.whole_in]
        training.slice_ranks = policies.tp
    elif policies.tp > 1:
        training.whole_in = device_mesh(policies.mesh, device)["tp"].get_group()
        training.norm_groups = [training.whole_in, *shards]
    elif policies.ep > 1:  # each rank holds other shards of all parameters
        training.norm_groups = shards


def loss_scaler(scenario: Scenario, training: Training, device: torch.device) -> LossScaler | None:
    """Return the scaler of the loss, with the groups of ranks that hold different gradients; None: no scale is set."""
    policies, scale = scenario.policies, scenario.workload.loss_scale
    if scale is None:
        return None
    groups: list[dist.ProcessGroup | None] = []
    if policies.gradients == "reduce-scatter" and policies.shards > 1:
        one_axis = policies.dp_replicate == 1
        groups.append(data_group(policies, device, "dp_shard") if one_axis else shard_group(policies, device))
    elif policies.ep > 1 and policies.gradients != "push":  # owners of pushed gradients agree among all replicas
        groups.append(expert_mesh(policies, device)[DIVIDED].get_group())
    if policies.tp > 1:
        groups.append(device_mesh(policies.mesh, device)["tp"].get_group())
    if isinstance(training.module, StageModules):
        groups.append(training.module.group)
    return LossScaler(scale, groups)
