"""Sharded checkpoints of a rank's parameters and optimizer state, by the model's own names and elements.

A pipeline rank has some of the model's parameters, a tensor-parallel rank slices of them, and a rank of a sharded
optimizer the state of some. All are saved under the parameter's name in the model, at the indices that their elements
have there: after a resume, however the training is partitioned then, each rank reads the elements it needs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gsreal.gradient_sharding.master import MasterCopy
from gsreal.gradient_sharding.state import MASTER, PartialTensor, initialise
from gsreal.methods.pipeline_stages import StageModules
from gsreal.methods.tensor_slices import Slice


class Elements:
    """A module and its optimizer's state, without options: dcp.save({"training": Elements(module, optimizer)}).

    dcp.load alike: into the tensors themselves.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return views of this rank's tensors: `model` by name, `optimizer` by name and key of state."""
        states = dict(_states(self.optimizer))
        model: dict[str, Tensor] = {}
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, value, part in _named(self.module):
            model[name] = _placed(value, part)
            state = states.get(value, {})
            if state:
                optimizer[name] = {
                    key: _placed(each, part if each.shape == value.shape else None) for key, each in state.items()
                }
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: values are loaded in place."""


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor, Slice | None]]:
    """Give (name in the model, tensor, slice or None) of all tensors of a module."""
    if isinstance(module, StageModules):
        for stage in module.stages:
            yield from _named(stage)
        return
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield from _named(module.module)
        return
    tensors = module.state_dict(keep_vars=True)  # first: FSDP2 puts its shards in place for it
    parts = {
        getattr(each, leaf): part
        for each in module.modules()
        for leaf, (part, _) in each.__dict__.get("_gsreal_slices", {}).items()
    }
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            yield name, value, parts.get(value)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Give every parameter updated on this rank with the tensors of its state, including its master copy."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    if isinstance(inner, MasterCopy):
        initialise(inner.inner)
        for parameter, master in inner.pairs():
            yield parameter, {MASTER: master.detach(), **_tensors(inner.inner.state[master])}
        return
    initialise(inner)
    for group in inner.param_groups:
        for parameter in group["params"]:
            yield parameter, _tensors(inner.state[parameter])


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _placed(value: Tensor, part: Slice | None) -> Tensor:
    """Return a view of a tensor, or of a slice with its position in the whole."""
    value = value.detach()
    if part is None:
        return value
    whole = [part.size if i == part.dimension else size for i, size in enumerate(value.shape)]
    local = value.to_local() if isinstance(value, DTensor) else value
    return PartialTensor(_pieces(local, part, _first_row(value, local, part)), whole)


def _pieces(local: Tensor, part: Slice, first_row: int) -> dict[tuple[int, ...], Tensor]:
    """Return the pieces of a slice, of which rows from `first_row` on are local, by their index in the whole."""
    pieces: dict[tuple[int, ...], Tensor] = {}
    along_rows = part.dimension == 0
    extent = range(first_row, first_row + local.shape[0]) if along_rows else range(local.shape[part.dimension])
    start = 0
    for first, last in part.ranges:
        stop = start + last - first
        low, high = max(start, extent.start), max(start, extent.start, min(stop, extent.stop))
        where = [0 if along_rows else first_row, *[0] * (local.dim() - 1)]
        where[part.dimension] = first + low - start
        if high > low or not pieces:
            pieces[tuple(where)] = local.narrow(part.dimension, min(low, extent.stop) - extent.start, high - low)
        start = stop
    return pieces


def _first_row(value: Tensor, local: Tensor, part: Slice) -> int:
    """Return the first row of the local tensor in its slice: FSDP2 shards rows in chunks, as `torch.chunk`."""
    names = value.device_mesh.mesh_dim_names or () if isinstance(value, DTensor) else ()
    if "dp_shard" not in names:
        return 0
    assert isinstance(value, DTensor)
    rows = sum(last - first for first, last in part.ranges) if part.dimension == 0 else value.shape[0]
    chunk = -(-rows // value.device_mesh["dp_shard"].size())
    return min(rows, value.device_mesh.get_local_rank("dp_shard") * chunk)
