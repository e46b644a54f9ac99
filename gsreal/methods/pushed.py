"""Gradients pushed to the owners of their shards: Gradient Sharding."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from gsreal.gradient_sharding import shard_gradients
from gsreal.measure import Timeline
from gsreal.methods.axes import data_group
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training
from gssim.scenario import Scenario
from gssim.workload import gradient_order, unrolled


def push_gradients(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Gradient Sharding with the plan's shares and threshold; buckets in the traced order of gradients."""
    plan, mesh, rank = scenario.plan, scenario.policies.mesh, dist.get_rank()
    layers = unrolled(scenario.workload.model)
    order = [layers[i].parameter_names[j] for i, j in gradient_order(layers)]
    optimizer = shard_gradients(
        module,
        lambda shards: make_optimizer(scenario.workload, shards, device),
        group=data_group(scenario.policies, device, "dp_shard"),
        shard_shares=[scenario.shard_shares[each] for each in mesh.group(rank, "dp_shard")],
        push=scenario.push,
        point_to_point=scenario.policies.point_to_point,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
        parameter_order=order,
        observe=timeline.span,
    )

    def syncing(leaves: bool) -> AbstractContextManager[None]:
        return nullcontext() if leaves else optimizer.no_sync()

    sync_each = scenario.policies.gradient_sync == "micro-batch"
    return Training(module, optimizer, timeline, scale=0.0, sync_each=sync_each, syncing=syncing)
