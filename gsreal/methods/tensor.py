"""Blocks cut among the ranks of a tensor group: DTensor where slices are even and it can, else slices of our own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.measure import Timeline
from gsreal.methods.tensor_slices import AllReduce, Cut, cut_of, is_linear, mark, slice_block, slices_of
from gsreal.methods.training import blocks_of
from gssim.errors import UserError
from gssim.scenario import Scenario, units_held


def slice_blocks(scenario: Scenario, module: nn.Module, timeline: Timeline, mesh: DeviceMesh) -> None:
    """Leave of each block what this rank holds of it; `mesh`: the ranks that share the blocks, one axis.

    Raises UserError where a block cannot be cut, or where dropout would drop differently on the ranks.
    """
    _check(scenario, module)
    all_reduce = _observed_all_reduce(mesh, timeline)
    for block in blocks_of(scenario.workload.model, module):
        cut = cut_of(block)
        assert cut is not None  # checked
        sizes = units_held(cut.units(block), scenario.slice_shares)
        position = mesh.get_local_rank()
        held = range(sum(sizes[:position]), sum(sizes[: position + 1]))
        if scenario.policies.cuts_natively and is_linear(block, cut):
            distribute(block, cut, held, mesh, timeline)
        else:
            slice_block(block, held, all_reduce, ranks=len(sizes), group=mesh.get_group())


def _check(scenario: Scenario, module: nn.Module) -> None:
    for block in blocks_of(scenario.workload.model, module):
        if cut_of(block) is None:
            raise UserError(f"workload.model: {type(block).__name__}: it is not known how to cut such a block")
    if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        raise UserError(
            f"plan.method = '{scenario.plan.method}': the ranks draw their random numbers apart, so that dropout would "
            "make the parameters that all hold differ; allowed: dropout of 0"
        )


def _observed_all_reduce(mesh: DeviceMesh, timeline: Timeline) -> AllReduce:
    """Return torch's functional all-reduce over the ranks of a mesh, waited for at once."""
    from torch.distributed import _functional_collectives as functional

    def all_reduce(tensor: Tensor) -> Tensor:
        with timeline.span("all-reduce", "exposed_communication", mesh.get_group()):
            return functional.wait_tensor(functional.all_reduce(tensor, "sum", (mesh, 0)))

    return all_reduce


def distribute(block: nn.Module, cut: Cut, held: range, mesh: DeviceMesh, timeline: Timeline) -> None:
    """Cut a block natively, by torch.distributed.tensor.parallel.

    DTensor cuts into runs of rows: those of query, key and value are first put in the order of the ranks that get them.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    slices = slices_of(block, held)
    for path in cut.parts:
        _sort_by_ranks(block.get_submodule(path), mesh.size(), cut.parts[path])
    columns, rows = _observed_styles(timeline, mesh.get_group())
    plan = {path: columns() for path in cut.columns} | {path: rows() for path in cut.rows}
    parallelize_module(block, mesh, plan)
    cut.resize(block, len(held))
    for (path, name), part in slices.items():
        mark(block.get_submodule(path), name, part, mesh.get_group())


def _sort_by_ranks(module: nn.Module, ranks: int, parts: int) -> None:
    """Reorder a linear map's rows from (part, rank, its rows) to (rank, part, its rows)."""
    with torch.no_grad():
        for parameter in module.parameters():
            rows = parameter.unflatten(0, (parts, ranks, -1))
            parameter.copy_(rows.transpose(0, 1).flatten(0, 2))


def _observed_styles(timeline: Timeline, group: dist.ProcessGroup) -> tuple[type, type]:
    """Return torch's column and row styles, whose all-reduces are spans where they block."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    class ObservedColumns(ColwiseParallel):
        """The input's gradient is summed between the gradient of its DTensor and its own."""

        @staticmethod
        def _prepare_input_fn(
            input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
        ) -> Any:
            marks: list[Any] = []
            own = inputs[0].view_as(inputs[0])
            shared = ColwiseParallel._prepare_input_fn(
                input_layouts, desired_input_layouts, mod, (own, *inputs[1:]), device_mesh
            )
            if own.requires_grad:
                shared.register_hook(lambda _: marks.append(timeline.mark()))
                own.register_hook(
                    lambda _: timeline.between("all-reduce", "exposed_communication", marks.pop(), group=group)
                )
            return shared

    class ObservedRows(RowwiseParallel):
        """The outputs are waited for where they are made; the next operation needs them anyhow."""

        @staticmethod
        def _prepare_output_fn(
            output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
        ) -> Any:
            with timeline.span("all-reduce", "exposed_communication", group):
                summed = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
                if isinstance(summed, AsyncCollectiveTensor):
                    summed.trigger_wait()
            return summed

    return ObservedColumns, ObservedRows
