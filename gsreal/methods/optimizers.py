"""The workload's optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gssim.workload import Workload


def optimizer_of(workload: Workload, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the workload's kind of optimizer and its settings: torch's default form for the device.

    One tensor at a time on a CPU, all together on a GPU.
    """
    settings = {"lr": workload.learning_rate, "weight_decay": workload.weight_decay, "foreach": device.type == "cuda"}
    if workload.optimizer == "adamw":
        return torch.optim.AdamW, settings
    momentum = workload.momentum if workload.optimizer == "sgd-momentum" else 0.0
    return torch.optim.SGD, settings | {"momentum": momentum}


def make_optimizer(
    workload: Workload, parameters: Sequence[nn.Parameter] | Any, device: torch.device
) -> torch.optim.Optimizer:
    """Return the workload's optimizer over the parameters.

    DTensors and others are groups of their own: torch's optimizers that take all tensors together refuse a mixture.
    """
    kind, settings = optimizer_of(workload, device)
    parameters = list(parameters)
    kinds = [[p for p in parameters if isinstance(p, DTensor) is native] for native in (True, False)]
    return kind([{"params": each} for each in kinds if each], **settings)
