"""Checks that refuse scenarios which are valid and can be predicted, but cannot run for real on this machine.

`check_module` does so on each rank, before the module is prepared for its plan, by what no model file tells.
"""

from importlib.util import find_spec

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gsreal.compiled import compiler
from gsreal.data.sources import check_data, check_held_out
from gsreal.machine import check_machine
from gsreal.methods.stage_modules import check_stages
from gsreal.methods.tensor_slices import check_slices
from gsreal.model_files.build import check_factory, example_batch
from gsreal.model_files.fake_module import fake_module, without_values
from gssim.errors import UserError
from gssim.scenario import Loaded, Scenario
from gssim.scenario.support import predicted_only_reason
from gssim.workload import unrolled


def check_real(loaded: Loaded) -> None:
    """Raise UserError if the scenario cannot run on this machine."""
    ours, where = loaded.scenario, loaded.file
    check_factory(ours.workload.model.module, where=where)
    check_predicted_only(ours, where=where)
    check_machine(ours.cluster, ours.ranks, where=where)
    check_data(ours.workload, where=where, seed=ours.run.seed, steps=ours.run.warmup_steps + ours.run.steps)
    check_stages(ours, where=where)
    check_slices(ours, where=where)
    if ours.run.evaluate_every_steps is not None:
        check_held_out(ours.workload, where=where)
    check_norms(ours, where=where)
    check_compiled(ours, where=where)


def check_predicted_only(scenario: Scenario, *, where: str) -> None:
    """Raise UserError for what can only be predicted; `where` names the file."""
    if (reason := predicted_only_reason(scenario)) is not None:
        raise UserError(f"{where}: {reason}")


def check_compiled(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if no compiler for compiled blocks is installed, or they would be compiled in a timed step."""
    if not scenario.workload.model.compiled:
        return
    kinds = {each.kind for each in scenario.cluster.device_types.values()}
    if "cuda" in kinds and find_spec("triton") is None:
        raise UserError(f"{where}: workload.model: compiled blocks need triton on a GPU: pip install triton")
    if "cpu" in kinds and compiler() is None:
        raise UserError(f"{where}: workload.model: compiled blocks need a C++ compiler on a CPU: apt-get install g++")
    if scenario.run.warmup_steps == 0:
        raise UserError(
            f"{where}: run.warmup_steps = 0: blocks are compiled in the first step, which must not count; allowed: at "
            "least 1"
        )


def check_norms(scenario: Scenario, *, where: str) -> None:
    """Raise UserError if a micro-batch of one sample leaves a batch norm one value per channel, without a variance.

    That is found by the module's forward on fake tensors, which computes nothing.
    """
    model, parts = scenario.workload.model, scenario.plan.micro_batches
    alone = [rank for rank, samples in enumerate(scenario.batch_sizes) if samples // parts == 1]
    if not alone or model.input.kind != "image":
        return
    try:
        with without_values(model):
            module = fake_module(model, where)
            if any(isinstance(each, _BatchNorm) for each in module.modules()):
                module(example_batch(model, batch_size=1, sequence_length=None)[0])
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise UserError(
            f"{where}: rank {alone[0]} has micro-batches of one sample: that can be predicted, but a batch norm of "
            f"'{model.name}' then has one value per channel, which torch refuses; allowed: at least two samples "
            "in a micro-batch"
        ) from None


def check_module(scenario: Scenario, module: nn.Module) -> None:
    """Raise UserError if a model file does not describe the module, or ranks would train it otherwise than one device.

    All ranks have the same module, and so raise the same error before they communicate.
    """
    _check_parameters(scenario, module)
    if scenario.workload.model.module.factory is not None:
        _check_shared_parameters(scenario, module)
        _check_replaced_parameters(scenario, module)
    for path, inner in module.named_modules() if scenario.ranks > 1 else ():
        limited = isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.max_norm is not None
        if limited and any(parameter.requires_grad for parameter in inner.parameters()):
            raise UserError(
                f"workload.model: '{path}' has max_norm: its forward changes parameters, on every rank those of its "
                "own samples: it can be predicted, but not run on several ranks; leave it out"
            )


def _check_parameters(scenario: Scenario, module: nn.Module) -> None:
    """Raise UserError if the model file does not describe the module that its factory creates."""
    real = sum(parameter.numel() for parameter in module.parameters())
    model = scenario.workload.model
    listed = model.elements + model.frozen_elements
    if real != listed:
        raise UserError(
            f"workload.model: the file lists {listed} parameters, but the module has {real}; "
            "trace it again with `gsreal trace`"
        )


def _check_shared_parameters(scenario: Scenario, module: nn.Module) -> None:
    """Raise UserError if blocks would be sharded one by one, by FSDP2 or gs_z3, that share parameters."""
    if scenario.policies.gradients != "reduce-scatter" and scenario.policies.parameters != "sharded":
        return
    holders: dict[nn.Parameter, str] = {}
    for layer in (each for each in unrolled(scenario.workload.model) if each.layer.block):
        for name, parameter in module.get_submodule(layer.module).named_parameters():
            if (first := holders.setdefault(parameter, layer.module)) != layer.module:
                raise UserError(
                    f"plan.method = '{scenario.plan.method}': shards '{first}' and '{layer.module}' one by one, but "
                    f"they share '{name}': it can be predicted, but not run; allowed: ddp, zero1 or gs"
                )


def _check_replaced_parameters(scenario: Scenario, module: nn.Module) -> None:
    """Raise UserError if parameters have hooks and are replaced by others, without: by FSDP2, or by parts of them; or
    if FSDP2 cannot shard them.
    """
    policies = scenario.policies
    fully_sharded = policies.gradients == "reduce-scatter" or (policies.sync_every_steps and policies.dp_shard > 1)
    if fully_sharded:
        option = f"plan.method = '{scenario.plan.method}'"
    elif policies.tp > 1 or policies.ep > 1:
        option = f"plan.tp = {policies.tp}" if policies.tp > 1 else f"plan.ep = {policies.ep}"
    else:
        return
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"{option}: replaces parameters by parts of them, which do not have the hook (register_hook) of "
                f"'{name}': it can be predicted, but not run; allowed: ddp, zero1 or gs, without plan.tp and plan.ep"
            )
        if fully_sharded and not parameter.is_contiguous():
            raise UserError(
                f"{option}: '{name}' is not contiguous, and FSDP2 shards no such parameter: it can be predicted, but "
                "not run; allowed: ddp, zero1 or gs"
            )
