"""Gradient Sharding methods: pushed gradients (the library), and training of a rank's own layers without any push.

`train_owned_layers` gives every rank the same samples; each computes the weight gradients of its own layers only and
updates these, so that no gradient is ever sent. The other layers' parameters are frozen: autograd skips their weight
gradients, and ends the backward at the first of the owned layers.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding import GradientSharding, shard_gradients
from gsreal.gradient_sharding.point_to_point import all_gather_v
from gsreal.measure import Timeline
from gsreal.methods.blocks import blocks_of
from gsreal.methods.experts import PARAMETERS, experts_of
from gsreal.methods.meshes import REPLICAS, data_mesh, expert_mesh, shard_mesh
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training
from gssim.plan import REPLICA_AXES, Policies
from gssim.scenario import Scenario, held_experts, held_slice
from gssim.workload import LayerInstance, gradient_order, unrolled


def push_gradients(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Train by Gradient Sharding with the plan's shares and threshold; buckets in the traced order of gradients."""
    policies = scenario.policies
    divides = policies.tp > 1 or policies.cp > 1
    # gradients of slices, of parts of sequences, and beside divided experts come in another order
    if policies.ep > 1:
        layers = held_experts(scenario, 0, 0)
    else:
        layers = unrolled(held_slice(scenario, 0) if divides else scenario.workload.model)
    optimizer = pushing_optimizer(scenario, module, layers, timeline, device)

    def syncing(leaves: bool) -> AbstractContextManager[None]:
        return nullcontext() if leaves else optimizer.no_sync()

    sync_each = policies.gradient_sync == "micro-batch"
    return Training(module, optimizer, timeline, scale=0.0, sync_each=sync_each, syncing=syncing)


def pushing_optimizer(
    scenario: Scenario,
    module: nn.Module,
    layers: Sequence[LayerInstance],
    timeline: Timeline,
    device: torch.device,
    aliases: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> GradientSharding:
    """Return the optimizer of `gsreal.gradient_sharding` for this rank's module, which consists of `layers`.

    `aliases`: for a parameter that several layers share, all of its names in the whole model, by each of them. The
    module of a pipeline's stage has one of these names.
    """
    plan, policies = scenario.plan, scenario.policies
    ranks, mesh = policies.mesh.group(dist.get_rank(), *REPLICA_AXES), _mesh(policies, device)
    own = {name for name, _ in module.named_parameters()}
    listed = [layers[i].parameter_names[j] for i, j in gradient_order(layers)]
    order = [name if name in own else next(iter(own & aliases[name])) for name in listed]
    divided = experts_of(module) if policies.ep > 1 else ()
    experts = [f"{path}.{matrix}" for path, _ in divided for matrix in PARAMETERS]
    same_experts = expert_mesh(policies, device)[REPLICAS].get_group() if experts else None

    def observe(label: str, phase: str, *, group: dist.ProcessGroup | None = None) -> AbstractContextManager[None]:
        return timeline.span(label, phase, group)

    return shard_gradients(
        module,
        lambda shards: make_optimizer(scenario.workload, shards, device),
        mesh=mesh,
        parameters=policies.parameters,  # type: ignore[arg-type]  # one of the three that are pushed
        units=blocks_of(scenario.workload.model, module) if policies.parameters != "replicated" else (),
        shard_shares=[scenario.shard_shares[each] for each in ranks],
        push=scenario.push,
        publish=plan.publish,
        publish_overlaps=policies.publish_overlaps,
        overlap=None if plan.overlap else False,
        point_to_point=policies.point_to_point,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
        experts=experts,
        expert_group=same_experts,
        parameter_order=order,
        observe=observe,
    )


def _mesh(policies: Policies, device: torch.device) -> DeviceMesh:
    """Return the mesh of ranks that push gradients to one another, with those of a node if they are reduced there."""
    if policies.push_axis == "dp_replicate":
        return shard_mesh(policies, device)
    return data_mesh(policies, device, "dp_shard")


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

    The parameters remain views of it. They must have one data type and be on one device.
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
