"""Splits a real module into pipeline stages: each keeps its own layers and runs from its input to its output.

A module that supports this has a method `keep_layers(names)`, which removes all layers but those of the given paths,
and a forward that runs the remaining layers; an `nn.Sequential` needs none. Parameters keep their names.
"""

import copy
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.machine import group_threads
from gsreal.model_files.build import build_module
from gsreal.run.rank import gather_json, wire_device
from gssim.errors import UserError
from gssim.plan import Mesh
from gssim.scenario import Scenario
from gssim.workload import LayerInstance


def check_stages(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if the plan is a pipeline, but the real module cannot be split into stages."""
    pp, source = scenario.policies.pp, scenario.workload.model.module
    if pp == 1:
        return
    if scenario.policies.tp > 1:
        raise UserError(
            f"{where}: plan.pp = {pp}: stages whose blocks are cut too (plan.tp = {scenario.policies.tp}) can be "
            "predicted, but not run yet; allowed: plan.tp = 1"
        )
    if source.hugging_face is not None:
        raise UserError(
            f"{where}: plan.pp = {pp}: Hugging Face modules cannot be cut into stages; "
            "allowed: modules with a method keep_layers, such as those of gsreal.models, and nn.Sequential"
        )
    with torch.device("meta"):
        module = build_module(source, where=where)
    if not (callable(getattr(module, "keep_layers", None)) or isinstance(module, nn.Sequential)):
        raise UserError(
            f"{where}: plan.pp = {pp}: {type(module).__name__} cannot be cut into stages; "
            "allowed: modules with a method keep_layers, such as those of gsreal.models, and nn.Sequential"
        )


def stage_module(module: nn.Module, layers: Sequence[LayerInstance], *, shared: bool) -> nn.Module:
    """Return the module with these layers only; `shared`: copy it first, as other stages need `module` unchanged."""
    part = copy.deepcopy(module) if shared else module
    names = {instance.module for instance in layers if instance.layer.modules}
    if isinstance(part, nn.Sequential) and not hasattr(part, "keep_layers"):
        _keep_named_children(part, names)
    else:
        part.keep_layers(names)  # type: ignore[operator]
    return part


def _keep_named_children(module: nn.Sequential, names: Collection[str]) -> None:
    """Replace all layers of a chain but those named; a child between two layers belongs to the one before it."""
    is_kept = False
    for name, child in list(module.named_children()):
        has_layers = any(True for _ in child.parameters())
        is_kept = name in names if has_layers or name in names else is_kept
        if not is_kept:
            setattr(module, name, nn.Identity())


class StageModules(nn.Module):
    """The pipeline stages on this rank."""

    def __init__(self, stages: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.group = group

    def gather_parameters(self) -> dict[str, Tensor]:
        """Return every parameter of the model by its name in the model (a collective over the pipeline's ranks)."""
        own = {
            name.removeprefix("module."): parameter.detach().contiguous()
            for stage in self.stages
            for name, parameter in stage.named_parameters()
        }
        described = [[name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in own.items()]
        parameters: dict[str, Tensor] = {}
        for rank, entries in zip(
            dist.get_process_group_ranks(self.group), gather_json(described, self.group), strict=True
        ):
            for name, shape, dtype in entries:
                sent = torch.empty(shape, dtype=getattr(torch, dtype), device=wire_device(self.group))
                if rank == dist.get_rank():
                    sent.copy_(own[name])
                dist.broadcast(sent, rank, group=self.group)
                parameters[name] = sent.cpu()
        return parameters


def process_group(mesh: Mesh, rank: int, *axes: str) -> dist.ProcessGroup:
    """Return the group of ranks that differ from `rank` on these axes only (a collective over all ranks)."""
    mine = None
    for group in dict.fromkeys(tuple(mesh.group(each, *axes)) for each in range(mesh.ranks)):
        with group_threads():
            created = dist.new_group(list(group))
        mine = created if rank in group else mine
    assert mine is not None
    return mine
