"""Training with fully sharded parameters: FSDP2, with observed all-gathers and reduce-scatters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding.master import master_type
from gsreal.gradient_sharding.point_to_point import all_gather_into_tensor, reduce_scatter_tensor
from gsreal.measure import Timeline
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.training import Training, blocks_of, data_mesh, device_mesh
from gsreal.model_files.build import DTYPES
from gssim.plan import Policies
from gssim.scenario import Scenario, has_master_copy


def fully_shard_parameters(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Apply FSDP2 to each block and to the root; with `gathered`, parameters stay gathered from forward to backward.

    With `sharded`, torch's default: each block is freed after its forward, the root is not. On a mesh of two axes
    (HSDP), shards of gradients are all-reduced over `dp_replicate` after their reduce-scatter. FSDP2's hooks implement
    the plan's exchange; on a CPU it calls them on the computing thread, so that both ways block. With a master copy,
    the shards are the master: they are cast to the workload's precision when gathered, and gradients are reduced in
    that precision and cast back.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy()
    if has_master_copy(scenario.workload):
        precision = MixedPrecisionPolicy(param_dtype=DTYPES[scenario.workload.precision])
        for parameter in module.parameters():
            parameter.data = parameter.data.to(master_type(parameter.dtype))
    mesh = _mesh(scenario.policies, device)
    reshard_after_forward = False if scenario.policies.parameters == "gathered" else None
    for part in [*blocks_of(scenario.workload.model, module), module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    replicas = mesh.get_group(0) if mesh.ndim > 1 else None
    _observe(module, timeline, point_to_point=scenario.policies.point_to_point, replicas=replicas)
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)

    @contextmanager
    def syncing(leaves: bool) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(leaves)
        yield

    sync_each = scenario.policies.gradient_sync == "micro-batch"
    scale = float(scenario.policies.data_ranks)
    return Training(module, optimizer, timeline, scale=scale, sync_each=sync_each, syncing=syncing)


def _observe(
    module: nn.Module, timeline: Timeline, *, point_to_point: bool, replicas: dist.ProcessGroup | None
) -> None:
    """Make FSDP2's units use the plan's exchange, and record its duration."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    scattered: list[Any] = []

    class ObservedAllGather(DefaultAllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            with timeline.span("all-gather", "exposed_communication", group):
                if point_to_point:
                    all_gather_into_tensor(output_tensor, input_tensor, group=group)
                    return None
                return super().__call__(output_tensor, input_tensor, group, async_op)

    class ObservedReduceScatter(DefaultReduceScatter):
        def __call__(  # type: ignore[override]  # FSDP2 takes None as well: the base's base says so
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
        ) -> dist.Work | None:
            work = None
            with timeline.span("reduce-scatter", "exposed_communication", group):
                if point_to_point:
                    reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)
                else:
                    work = super().__call__(output_tensor, input_tensor, group, op, async_op)
            scattered[:] = [timeline.mark()]
            return work

    def all_reduced(_gradients: Tensor) -> None:
        if scattered:  # without shards there is no reduce-scatter to begin from
            timeline.between("all-reduce", "exposed_communication", scattered[0], group=replicas)

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(ObservedAllGather())
            unit.set_custom_reduce_scatter(ObservedReduceScatter())
            if replicas is not None:
                unit.set_all_reduce_hook(all_reduced)


def _mesh(policies: Policies, device: torch.device) -> DeviceMesh:
    """Return the ranks with the same part of the model, on one axis, or on two if shards are replicated."""
    if policies.dp_replicate == 1:
        return data_mesh(policies, device, "dp_shard")
    return device_mesh(policies.mesh, device)["dp_replicate", "dp_shard"]
