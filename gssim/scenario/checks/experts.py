"""Checks of expert parallelism: number and load of the experts, and whether the model is traced with divided ones."""

from gssim.errors import UserError
from gssim.plan import Policies
from gssim.scenario.expert_load import divided_expert_layers, layer_rows, parts_routed_apart, routes_parts
from gssim.scenario.scenario import Scenario
from gssim.units import shown_value
from gssim.workload import Workload


def check_experts(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse expert parallelism of models and workloads for which it cannot run."""
    workload, ranks = scenario.workload, policies.ep
    if ranks == 1:
        if workload.expert_routing == "load":  # a real run routes so even where no rank divides experts
            _check_rows(workload, file, parts=1)
        return
    where = f"{file}: plan.ep = {ranks}"
    _check_expert_load(scenario, ranks, where, file)
    model, in_parts = workload.model, routes_parts(workload.model, policies)
    if model.expert_tensor_ranks != policies.tp and not in_parts:
        cut_for = model.expert_tensor_ranks
        raise UserError(
            f"{where}: cannot run yet with plan.tp = {policies.tp}: the layers with divided experts of '{model.name}' "
            f"are cut for {cut_for} tensor ranks (workload.model.expert_tensor_ranks); allowed: {cut_for}"
        )
    if len(set(scenario.batch_sizes)) > 1:
        raise UserError(
            f"{where}: ranks that divide experts need as many samples each, and have "
            f"{', '.join(map(str, sorted(set(scenario.batch_sizes))))}; allowed: an even split of the batch"
        )
    flat = scenario.plan.zero1_implementation == "megatron"
    whole = policies.gradients in ("all-reduce", "local")
    for name, value, is_known in (
        ("clip_norm", workload.clip_norm, flat or policies.tp == 1 or in_parts),
        ("loss_scale", workload.loss_scale, flat or policies.tp == 1 or in_parts),
        ("gradient_precision", workload.gradient_precision, whole),
    ):
        if value is not None and not is_known:
            raise UserError(
                f"{where}: workload.{name} = {value!r} cannot run yet with experts divided under method "
                f"'{scenario.plan.method}' and plan.tp = {policies.tp}; leave it out"
            )
    if scenario.run.slowdowns:
        raise UserError(f"{where}: run.slowdowns cannot run yet with divided experts; leave them out")


def _check_layers_of_parts(scenario: Scenario, policies: Policies, where: str, file: str) -> None:
    """Refuse models without layers of cut blocks beside divided experts."""
    model = scenario.workload.model
    if model.expert_sequence_layers:
        return
    cut_for = model.expert_tensor_ranks
    if cut_for > 1:
        raise UserError(
            f"{where}: the layers with divided experts of '{model.name}' are cut for {cut_for} tensor ranks "
            f"(workload.model.expert_tensor_ranks); allowed: {cut_for}"
        )
    if not any(layer.routed_experts for layer in model.expert_layers):
        raise UserError(f"{file}: plan.ep = {policies.ep}: '{model.name}' has no routed experts to divide; allowed: 1")
    uncut = "its blocks cannot be cut so" if any(layer.block for layer in model.layers) else "its layers are no blocks"
    variant, option = variant_in_trace(scenario.workload)
    raise UserError(
        f"{where}: '{model.name}' has no layers with cut blocks and divided experts{variant} "
        f"(workload.model.expert_sequence_layers): {uncut}, or its trace is old; allowed: 1, or another "
        f"`gsreal trace{option}`"
    )


def check_experts_of_parts(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse tensor parallelism beside expert parallelism, unless each tensor rank routes its own part of sequences.

    That is torchtitan's `expert_tensor_parallel_degree = 1`, and Megatron-LM's `--expert-tensor-parallel-size 1` with
    `--sequence-parallel`.
    """
    plan, model = scenario.plan, scenario.workload.model
    where = f"{file}: plan.tp = {policies.tp}: beside plan.ep = {policies.ep}"
    _check_layers_of_parts(scenario, policies, where, file)
    if policies.etp != 1:
        raise UserError(
            f"{where}: plan.etp = {plan.etp or policies.tp}: experts that tensor ranks cut besides are not known for "
            f"'{model.name}'; allowed: 1, with which each of these ranks holds experts of its own"
        )
    if not policies.sequence_parallel:
        raise UserError(
            f"{where}: plan.sequence_parallel = false: all tensor ranks would send the same tokens to experts; "
            "allowed: true"
        )
    for key in ("tp_overlap", "async_input_gradients"):
        if getattr(plan, key):
            raise UserError(
                f"{where}: plan.{key} = true: exchanges beside products are not known yet where experts are divided; "
                "leave it out"
            )
    if len(set(scenario.slice_shares)) > 1:
        raise UserError(
            f"{file}: plan.shares.shards = {shown_value(plan.shares.shards)}: tensor ranks beside "
            f"plan.ep = {policies.ep} have slices of the same size; allowed: 'even'"
        )
    for layer in model.expert_sequence_layers:
        if layer.units and layer.units % policies.tp:
            raise UserError(
                f"{where}: does not divide the {layer.units} units of {layer.name} (heads with keys of their own, and "
                "what else is cut with them); allowed: a divisor"
            )


def _check_expert_load(scenario: Scenario, ranks: int, where: str, file: str) -> None:
    """Refuse models whose experts cannot be divided among so many ranks, and loads that do not fit them."""
    workload = scenario.workload
    every = divided_expert_layers(workload.model, scenario.policies)
    layers = [layer for layer in every if layer.routed_experts]
    if not layers:
        variant, option = variant_in_trace(workload)
        raise UserError(
            f"{where}: the model file of '{workload.model.name}' has no layers with divided experts{variant}: it has "
            "no routed experts, or fewer than 4, or they cannot be divided; allowed: 1, or trace it again with "
            f"`gsreal trace{option}`"
        )
    for layer in layers:
        if (experts := layer.routed_experts or 0) % ranks:
            raise UserError(f"{where}: does not divide the {experts} experts of '{layer.name}'; allowed: a divisor")
    _check_rows(workload, file, parts=parts_routed_apart(workload.model, scenario.policies))


def _check_rows(workload: Workload, file: str, *, parts: int) -> None:
    """Refuse a load that does not fit the layers with routed experts; `parts`: of samples that are routed apart."""
    routed = [layer for layer in workload.model.expert_layers if layer.experts_per_token and layer.units]
    for layer in routed:
        for module in layer.modules:
            try:
                layer_rows(workload, layer, module, parts=parts)
            except UserError as error:
                raise UserError(f"{file}: {error}") from None
    load, modules = workload.expert_load, [module for layer in routed for module in layer.modules]
    unknown = [] if isinstance(load, str) else [name for name in load.layers or () if name not in modules]
    if unknown:
        known = f"{len(modules)}, from {modules[0]} to {modules[-1]}" if modules else "none"
        raise UserError(
            f"{file}: workload.expert_load.layers['{unknown[0]}']: no such layer with experts; there are {known}"
        )


def variant_in_trace(workload: Workload) -> tuple[str, str]:
    """Return what a model file that lacks layers lacks beside adapters, frozen layers or under autocast, and the option
    that traces it; else nothing.
    """
    if workload.adapters is not None:
        return " with these adapters", " --adapters"
    if workload.frozen is not None:
        return " beside frozen layers", " FILE --frozen --out NEW"
    return ("", "") if workload.autocast is None else (" under autocast", f" --autocast {workload.autocast}")
