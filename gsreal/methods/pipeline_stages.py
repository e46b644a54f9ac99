"""Splits a real module into pipeline stages: each keeps its own layers and runs from its input to its output.

A module that supports this has a method `keep_layers(names)`, which removes all layers but those of the given paths,
and a forward that runs the remaining layers; an `nn.Sequential` needs none. Parameters keep their names.
"""

import copy
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.machine import starting_threads
from gsreal.model_files.build import build_module
from gsreal.run.rank import everybodys, wire_device
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
    if not _can_be_cut(module):
        raise UserError(
            f"{where}: plan.pp = {pp}: {type(module).__name__} cannot be cut into stages; "
            "allowed: modules with a method keep_layers, such as those of gsreal.models, and nn.Sequential"
        )


def _can_be_cut(module: nn.Module) -> bool:
    return callable(getattr(module, "keep_layers", None)) or isinstance(module, nn.Sequential)


def stage_module(module: nn.Module, layers: Sequence[LayerInstance], *, shared: bool) -> nn.Module:
    """Return the module with these layers only; `shared`: copy it first, as other stages need `module` unchanged."""
    found = copy.deepcopy(module) if shared else module
    names = {instance.module for instance in layers if instance.layer.modules}
    if isinstance(found, nn.Sequential) and not hasattr(found, "keep_layers"):
        _keep_children(found, names)
    else:
        found.keep_layers(names)  # type: ignore[operator]
    return found


def _keep_children(module: nn.Sequential, names: Collection[str]) -> None:
    """Replace all layers of a chain but those named; a child between two layers belongs to the one before it."""
    kept = False
    for name, child in list(module.named_children()):
        has_layers = any(True for _ in child.parameters())
        kept = name in names if has_layers or name in names else kept
        if not kept:
            setattr(module, name, nn.Identity())


class StageModules(nn.Module):
    """The pipeline stages on this rank."""

    def __init__(self, stages: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.group = group

    def of_all_stages(self) -> dict[str, Tensor]:
        """Return every parameter of the model by its name in the model (a collective over the pipeline's ranks)."""
        own = {
            name.removeprefix("module."): parameter.detach().contiguous()
            for stage in self.stages
            for name, parameter in stage.named_parameters()
        }
        described = [[name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in own.items()]
        found: dict[str, Tensor] = {}
        for rank, entries in zip(
            dist.get_process_group_ranks(self.group), everybodys(described, self.group), strict=True
        ):
            for name, shape, dtype in entries:
                sent = torch.empty(shape, dtype=getattr(torch, dtype), device=wire_device(self.group))
                if rank == dist.get_rank():
                    sent.copy_(own[name])
                dist.broadcast(sent, rank, group=self.group)
                found[name] = sent.cpu()
        return found


def process_group(mesh: Mesh, rank: int, *axes: str) -> dist.ProcessGroup:
    """Return the group of ranks that differ from `rank` on these axes only (a collective over all ranks)."""
    mine = None
    for group in dict.fromkeys(tuple(mesh.group(each, *axes)) for each in range(mesh.ranks)):
        with starting_threads():
            made = dist.new_group(list(group))
        mine = made if rank in group else mine
    assert mine is not None
    return mine
