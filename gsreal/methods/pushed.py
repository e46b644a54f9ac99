"""Gradients pushed to the owners of their shards: Gradient Sharding."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding import shard_gradients
from gsreal.gradient_sharding.observer import Observer
from gsreal.measure import Timeline
from gsreal.methods.axes import data_mesh, device_mesh
from gsreal.methods.blocks import blocks_of
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training
from gssim.mesh import DATA_AXES
from gssim.policies import Policies
from gssim.scenario import Scenario
from gssim.workload import gradient_order, unrolled


def push_gradients(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Gradient Sharding with the plan's shares and threshold; buckets in the traced order of gradients."""
    plan, policies = scenario.plan, scenario.policies
    ranks = policies.mesh.group(dist.get_rank(), *DATA_AXES)
    layers, mesh = unrolled(scenario.workload.model), _mesh(policies, device)
    order = [layers[i].parameter_names[j] for i, j in gradient_order(layers)]
    optimizer = shard_gradients(
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
        parameter_order=order,
        observe=_observer(timeline, mesh),
    )

    def syncing(leaves: bool) -> AbstractContextManager[None]:
        return nullcontext() if leaves else optimizer.no_sync()

    sync_each = policies.gradient_sync == "micro-batch"
    return Training(module, optimizer, timeline, scale=0.0, sync_each=sync_each, syncing=syncing)


def _observer(timeline: Timeline, mesh: DeviceMesh) -> Observer:
    """Return what records spans; of those that communicate, with whom: in the node, or across nodes."""
    across, inside = mesh.get_group(0), mesh.get_group(1) if mesh.ndim > 1 else None

    def observe(label: str, phase: str) -> AbstractContextManager[None]:
        if phase != "exposed_communication":
            return timeline.span(label, phase)
        in_node = label.startswith("reduce-scatter") or label.endswith("in the node")
        return timeline.span(label, phase, inside if in_node else across)

    return observe


def _mesh(policies: Policies, device: torch.device) -> DeviceMesh:
    """Return the ranks among which gradients are pushed, with those of their nodes where they are reduced there."""
    if policies.push_axis == "dp_replicate":
        return device_mesh(policies.mesh, device)["dp_replicate", "dp_shard"]
    return data_mesh(policies, device, "dp_shard")
