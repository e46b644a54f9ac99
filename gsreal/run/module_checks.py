"""Checks of a module on its rank, before it is prepared for its plan: of what no model file tells."""

from torch import nn

from gssim.errors import UserError
from gssim.scenario import Scenario
from gssim.workload import unrolled


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
        said = f"plan.method = '{scenario.plan.method}'"
    elif policies.tp > 1 or policies.ep > 1:
        said = f"plan.tp = {policies.tp}" if policies.tp > 1 else f"plan.ep = {policies.ep}"
    else:
        return
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"{said}: replaces parameters by parts of them, which do not have the hook (register_hook) of "
                f"'{name}': it can be predicted, but not run; allowed: ddp, zero1 or gs, without plan.tp and plan.ep"
            )
        if fully_sharded and not parameter.is_contiguous():
            raise UserError(
                f"{said}: '{name}' is not contiguous, and FSDP2 shards no such parameter: it can be predicted, but not "
                "run; allowed: ddp, zero1 or gs"
            )
