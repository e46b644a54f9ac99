"""Meshes and process groups of a plan's axes."""

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gsreal.machine import group_threads
from gssim.plan import Mesh, Policies
from gssim.plan.mesh import AXES


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks with every axis (of size one if the plan does not use it); cached."""
    return _mesh(device.type, mesh.sizes, AXES)


@cache
def _mesh(kind: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    with group_threads():
        return init_device_mesh(kind, sizes, mesh_dim_names=names)


def data_mesh(policies: Policies, device: torch.device, axis: str) -> DeviceMesh:
    """Return the ranks along a data axis that share this rank's part of the model, as a mesh of one axis.

    With context parallelism these are all ranks that hold the same part of the model.
    """
    if policies.replica_ranks == policies.ranks:
        with group_threads():
            return init_device_mesh(device.type, (policies.ranks,))
    if policies.cp > 1:
        return _mesh(device.type, (policies.pp, policies.replica_ranks, policies.tp), ("pp", axis, "tp"))[axis]
    return device_mesh(policies.mesh, device)[axis]


def data_group(policies: Policies, device: torch.device, axis: str) -> dist.ProcessGroup | None:
    """Return the same ranks as a process group; None: all ranks."""
    if policies.replica_ranks == policies.ranks:
        return None
    group: dist.ProcessGroup = data_mesh(policies, device, axis).get_group()
    return group


def process_group(mesh: Mesh, rank: int, *axes: str, places: Sequence[int] | None = None) -> dist.ProcessGroup | None:
    """Return the group of ranks that differ from `rank` on these axes only (a collective over all ranks).

    `places`: only the ranks at these positions of such a group are its members. Returns None if `rank` is not one.
    """
    mine = None
    for whole in dict.fromkeys(tuple(mesh.group(each, *axes)) for each in range(mesh.ranks)):
        group = whole if places is None else tuple(whole[place] for place in places)
        with group_threads():
            created = dist.new_group(list(group))
        mine = created if rank in group else mine
    return mine


def context_group(policies: Policies, device: torch.device) -> dist.ProcessGroup:
    """Return the ranks that divide this rank's sequences among them."""
    group: dist.ProcessGroup | None = dist.group.WORLD
    if policies.cp < policies.ranks:
        group = device_mesh(policies.mesh, device)["cp"].get_group()
    assert group is not None
    return group


def shard_mesh(policies: Policies, device: torch.device) -> DeviceMesh:
    """Return replicas and shards as a mesh of two axes; context-parallel ranks are on the second, as in torchtitan."""
    if policies.cp == 1:
        return device_mesh(policies.mesh, device)["dp_replicate", "dp_shard"]
    sizes = policies.pp, policies.dp_replicate, policies.shards, policies.tp
    return _mesh(device.type, sizes, ("pp", "dp_replicate", "dp_shard", "tp"))["dp_replicate", "dp_shard"]


def shard_group(policies: Policies, device: torch.device) -> dist.ProcessGroup:
    """Return the ranks among which this rank's replica of the state is sharded."""
    group: dist.ProcessGroup = shard_mesh(policies, device)["dp_shard"].get_group()
    return group


REPLICAS, DIVIDED = "expert_replicas", "experts"


def expert_mesh(policies: Policies, device: torch.device) -> DeviceMesh:
    """Return the ranks that hold the same experts, and those that divide them, as two axes of a mesh; cached.

    Context-parallel ranks are among them, side by side, as in torchtitan. So are the ranks of a tensor group, each of
    which holds different experts. Replicas that are each sharded by themselves are an axis before these two.
    """
    copies = policies.dp_replicate if policies.gradients == "reduce-scatter" else 1
    sizes = policies.pp, copies, policies.replica_ranks * policies.tp // copies // policies.ep, policies.ep
    names = ("pp", "dp_replicate", REPLICAS, DIVIDED)
    return _mesh(device.type, sizes, names)["dp_replicate", REPLICAS, DIVIDED]
