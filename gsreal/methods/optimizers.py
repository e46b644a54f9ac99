"""The workload's optimizer over a rank's parameters."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gsreal.gradient_sharding.master import MasterCopy, master_type
from gssim.scenario import has_master_copy
from gssim.workload import Workload, unrolled
from gssim.workload.optimizers import is_matrix


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon over the groups of parameters that are marked `by_muon`, then AdamW over the others.

    Momentum is Nesterov's; Muon's learning rate is scaled to updates of AdamW's size (`match_rms_adamw`).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        foreach: bool,
        fused: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "by_muon": False})
        both: list[list[dict[str, Any]]] = [[], []]
        for group in self.param_groups:
            both[not group["by_muon"]].append({"params": group["params"]})
        self.parts: list[torch.optim.Optimizer] = []
        if both[0]:
            own = torch.optim.Muon(both[0], lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
            self.parts.append(own)
        if both[1]:
            rest = torch.optim.AdamW(both[1], lr=lr, weight_decay=weight_decay, foreach=foreach, fused=fused)
            self.parts.append(rest)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both; takes no closure."""
        assert closure is None
        ordered = sorted(self.param_groups, key=lambda group: not group["by_muon"])
        for group, inner in zip(ordered, (own for part in self.parts for own in part.param_groups), strict=True):
            inner.update({key: group[key] for key in ("lr", "weight_decay")})  # takes over a scheduler's changes
        for part in self.parts:
            part.state = self.state
            part.step()


def mark_matrices(workload: Workload, module: nn.Module) -> None:
    """Mark the parameters of a module that Muon updates, if it is the optimizer: the matrices of the model's blocks."""
    if workload.optimizer != "muon":
        return
    own = {
        name
        for instance in unrolled(workload.model)
        for name, parameter in zip(instance.parameter_names, instance.layer.parameters, strict=True)
        if is_matrix(instance.layer, parameter)
    }
    for name, parameter in module.named_parameters():
        parameter.by_muon = name in own  # type: ignore[attr-defined]


def groups_of(workload: Workload, parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Return parameters as their optimizer takes them: for Muon, its matrices and all others are separate groups."""
    if workload.optimizer != "muon":
        return [*parameters]
    assert all(hasattr(each, "by_muon") for each in parameters), "mark_matrices was not called"
    both = [[each for each in parameters if each.by_muon == marked] for marked in (True, False)]  # type: ignore[attr-defined]
    return [{"params": own, "by_muon": marked} for own, marked in zip(both, (True, False), strict=True) if own]


KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "muon": MuonAndAdamW,
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
    if workload.optimizer in ("sgd-momentum", "muon"):
        settings["momentum"] = workload.momentum
    return KINDS[workload.optimizer], settings


def replica_optimizer_of(workload: Workload, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return the same for parameters in the workload's precision, wrapped in `MasterCopy` if it has master copies."""
    kind, settings = optimizer_of(workload, device)
    return (partial(MasterCopy, kind=kind) if has_master_copy(workload) else kind), settings


def make_optimizer(
    workload: Workload, parameters: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """Return the workload's optimizer over the trained parameters, with master copies if their precision requires it.

    DTensors of each mesh, and plain tensors, are separate groups: torch's optimizers that process all tensors together
    refuse a mixture.
    """
    parameter_list = [parameter for parameter in parameters if parameter.requires_grad]
    meshes = dict.fromkeys(p.device_mesh if isinstance(p, DTensor) else None for p in parameter_list)
    low = any(parameter.dtype != master_type(parameter.dtype) for parameter in parameter_list)
    kind, settings = replica_optimizer_of(workload, device) if low else optimizer_of(workload, device)
    if workload.optimizer == "muon":  # never of DTensors
        by_muon: torch.optim.Optimizer = kind(groups_of(workload, parameter_list), **settings)
        return by_muon
    groups = [[p for p in parameter_list if getattr(p, "device_mesh", None) == mesh] for mesh in meshes]
    optimizer: torch.optim.Optimizer = kind([{"params": each} for each in groups], **settings)
    return optimizer
