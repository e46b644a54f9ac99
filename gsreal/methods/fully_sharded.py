"""Parameters gathered from shards: FSDP2."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.exchanges import all_gather_into_tensor, reduce_scatter_tensor
from gsreal.measure import Timeline
from gsreal.methods.blocks import blocks_of
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training
from gssim.scenario import Scenario


def fully_shard_parameters(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """FSDP2 on each block and on the root; parameters kept from forward to backward where they are `gathered`.

    Where they are `sharded`, by torch's default: each block is freed after its forward, the root is not. FSDP2's hooks
    carry out the plan's exchange; on a CPU it calls them on the thread that computes, so that both ways block.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    point_to_point = scenario.policies.point_to_point

    class ObservedAllGather(DefaultAllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            with timeline.span("all-gather", "exposed_communication"):
                if point_to_point:
                    all_gather_into_tensor(output_tensor, input_tensor, group=group)
                    return None
                return super().__call__(output_tensor, input_tensor, group, async_op)

    class ObservedReduceScatter(DefaultReduceScatter):
        def __call__(  # type: ignore[override]  # FSDP2 takes None as well: the base's base says so
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
        ) -> dist.Work | None:
            with timeline.span("reduce-scatter", "exposed_communication"):
                if point_to_point:
                    reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)
                    return None
                return super().__call__(output_tensor, input_tensor, group, op, async_op)

    mesh = init_device_mesh(device.type, (scenario.ranks,))
    reshard_after_forward = False if scenario.policies.parameters == "gathered" else None
    for part in [*blocks_of(scenario.workload.model, module), module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(ObservedAllGather())
            part.set_custom_reduce_scatter(ObservedReduceScatter())
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    return Training(module, optimizer, timeline, scale=float(scenario.ranks), last_gradient=[])
