"""Parameters gathered from shards: FSDP2."""

from typing import Any

import torch
from torch import nn

from gsreal.build import DTYPES
from gsreal.master import master_type
from gsreal.measure import Timeline
from gsreal.methods.blocks import blocks_of
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training
from gssim.scenario import Scenario, has_master_copy


def fully_shard_parameters(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """FSDP2 on each block and on the root; parameters kept from forward to backward where they are `gathered`.

    Where they are `sharded`, by torch's default: each block is freed after its forward, the root is not. With a master
    copy, the shards are it: they are cast to the workload's precision when they are gathered, and the gradients are
    reduced in that and then cast back.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class ObservedAllGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with timeline.span("all-gather", "exposed_communication"):
                return super().__call__(*args, **kwargs)

    class ObservedReduceScatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with timeline.span("reduce-scatter", "exposed_communication"):
                return super().__call__(*args, **kwargs)

    precision = MixedPrecisionPolicy()
    if has_master_copy(scenario.workload):
        precision = MixedPrecisionPolicy(param_dtype=DTYPES[scenario.workload.precision])
        for parameter in module.parameters():
            parameter.data = parameter.data.to(master_type(parameter.dtype))
    mesh = init_device_mesh(device.type, (scenario.ranks,))
    reshard_after_forward = False if scenario.policies.parameters == "gathered" else None
    for part in [*blocks_of(scenario.workload.model, module), module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(ObservedAllGather())
            part.set_custom_reduce_scatter(ObservedReduceScatter())
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    return Training(module, optimizer, timeline, scale=float(scenario.ranks), last_gradient=[])
