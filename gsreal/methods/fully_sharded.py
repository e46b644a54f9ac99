"""Parameters gathered from shards: FSDP2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gsreal.measure import Timeline
from gsreal.methods.axes import data_mesh
from gsreal.methods.blocks import blocks_of
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training
from gssim.scenario import Scenario


def fully_shard_parameters(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """FSDP2 on each block and on the root; parameters kept from forward to backward where they are `gathered`.

    Where they are `sharded`, by torch's default: each block is freed after its forward, the root is not.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class ObservedAllGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with timeline.span("all-gather", "exposed_communication"):
                return super().__call__(*args, **kwargs)

    class ObservedReduceScatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with timeline.span("reduce-scatter", "exposed_communication"):
                return super().__call__(*args, **kwargs)

    mesh = data_mesh(scenario.policies, device, "dp_shard")
    reshard_after_forward = False if scenario.policies.parameters == "gathered" else None
    for part in [*blocks_of(scenario.workload.model, module), module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(ObservedAllGather())
            part.set_custom_reduce_scatter(ObservedReduceScatter())
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)

    @contextmanager
    def syncing(leaves: bool) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(leaves)
        yield

    sync_each = scenario.policies.gradient_sync == "micro-batch"
    return Training(
        module, optimizer, timeline, scale=float(scenario.policies.data_ranks), sync_each=sync_each, syncing=syncing
    )
