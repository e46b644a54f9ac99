"""The workload's optimizer over a rank's parameters."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gsreal.gradient_sharding.master import MasterCopy, master_type
from gssim.scenario import has_master_copy
from gssim.workload import Workload

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def optimizer_of(workload: Workload, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the workload's optimizer and its settings.

    torch's default implementation for the device: one tensor at a time on a CPU, all together on a GPU.
    """
    wanted = workload.optimizer_implementation
    foreach = device.type == "cuda" if wanted == "default" else wanted == "foreach"
    settings = {
        "lr": workload.learning_rate,
        "weight_decay": workload.weight_decay,
        "foreach": foreach,
        "fused": wanted == "fused",
    }
    if workload.optimizer == "sgd-momentum":
        settings["momentum"] = workload.momentum
    return KINDS[workload.optimizer], settings


def replica_optimizer_of(workload: Workload, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return the same for parameters in the workload's precision: with master copies if it has them."""
    kind, settings = optimizer_of(workload, device)
    return (partial(MasterCopy, kind=kind) if has_master_copy(workload) else kind), settings


def make_optimizer(
    workload: Workload, parameters: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """Return the workload's optimizer over the trained parameters, with master copies if their precision requires it.

    DTensors of each mesh and others are separate groups: torch's optimizers that process all tensors together refuse a
    mixture.
    """
    parameter_list = [parameter for parameter in parameters if parameter.requires_grad]
    meshes = dict.fromkeys(p.device_mesh if isinstance(p, DTensor) else None for p in parameter_list)
    low = any(parameter.dtype != master_type(parameter.dtype) for parameter in parameter_list)
    kind, settings = replica_optimizer_of(workload, device) if low else optimizer_of(workload, device)
    groups = [[p for p in parameter_list if getattr(p, "device_mesh", None) == mesh] for mesh in meshes]
    optimizer: torch.optim.Optimizer = kind([{"params": each} for each in groups], **settings)
    return optimizer
