"""The ranks on the plan's axes, as torch.distributed knows them."""

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gsreal.machine import starting_threads
from gssim.mesh import AXES, Mesh
from gssim.policies import Policies


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks with every axis, of one rank where the plan does not use it; made once."""
    return _device_mesh(mesh, device.type)


@cache
def _device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    with starting_threads():
        return init_device_mesh(kind, mesh.sizes, mesh_dim_names=AXES)


def data_mesh(policies: Policies, device: torch.device, axis: str) -> DeviceMesh:
    """Return the ranks along a data axis with which this one shares its part of the model, as a mesh of one axis."""
    if policies.data_ranks == policies.ranks:
        with starting_threads():
            return init_device_mesh(device.type, (policies.ranks,))
    return device_mesh(policies.mesh, device)[axis]


def data_group(policies: Policies, device: torch.device, axis: str) -> dist.ProcessGroup | None:
    """Return the same ranks as a group; None: all ranks."""
    if policies.data_ranks == policies.ranks:
        return None
    group: dist.ProcessGroup = data_mesh(policies, device, axis).get_group()
    return group
