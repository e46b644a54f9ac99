"""Checks of tensor parallelism: slices of blocks and of the vocabulary, divided sequences, overlapped exchanges."""

from gssim.errors import UserError
from gssim.plan import Policies
from gssim.scenario.checks.experts import check_experts_of_parts, variant_in_trace
from gssim.scenario.expert_load import routes_parts
from gssim.scenario.scenario import Scenario
from gssim.scenario.vocabulary_slices import (
    divided_entries,
    shares_embedding,
    undivided_embedding_reason,
    undivided_loss_reason,
    units_of_ranks,
)
from gssim.units import shown_value
from gssim.workload import TokenInput


def check_slices(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse tensor parallelism of blocks that cannot be cut so."""
    if routes_parts(scenario.workload.model, policies):
        check_experts_of_parts(scenario, policies, file)
    elif policies.tp > 1:
        _check_units(scenario, policies, file)


def _check_units(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse blocks that are not cut in units, and ranks without one of each."""
    model, ranks = scenario.workload.model, policies.tp
    layers = model.sliced_layers
    if not layers and model.uncut_reason is not None:
        raise UserError(
            f"{file}: plan.tp = {ranks}: blocks of '{model.name}' cannot be cut: {model.uncut_reason}; allowed: tp = 1"
        )
    if not any(layer.block for layer in model.layers):
        raise UserError(
            f"{file}: plan.tp = {ranks}: '{model.name}' has no blocks that could be cut: blocks are two or more "
            "modules of one class in a row; allowed: tp = 1"
        )
    if not layers:
        variant, option = variant_in_trace(scenario.workload)
        raise UserError(
            f"{file}: workload.model: has no slices of its blocks{variant} for {ranks} tensor-parallel ranks; "
            f"trace it again with `gsreal trace{option}` (gsreal.methods.cuts tells which blocks can be cut)"
        )
    if any(each.summed for layer in layers for each in layer.parameters):
        _check_equal_owners(scenario, f"{file}: plan.tp = {ranks}")
    for layer in layers:
        if layer.units is None:
            continue
        if layer.units < ranks:
            raise UserError(
                f"{file}: plan.tp = {ranks}: {layer.name} has only {layer.units} units (heads or norm groups) to be "
                f"cut among them; allowed: at most {layer.units} ranks"
            )
        if policies.slices == "even" and layer.units % ranks:
            raise UserError(
                f"{file}: plan.tp = {ranks}: does not divide the {layer.units} units of {layer.name} "
                "(heads or norm groups); allowed: a divisor, or method 'gs_tp'"
            )
        if min(units_of_ranks(layer.units, scenario.slice_shares)) < 1:
            shares = [round(share, 4) for share in scenario.slice_shares]
            raise UserError(
                f"{file}: plan.shares.shards = {shares}: leaves a rank none of the {layer.units} units of {layer.name} "
                "(heads or norm groups); each rank needs one"
            )


def _check_equal_owners(scenario: Scenario, where: str) -> None:
    """Refuse ranks of a tensor group that own other parts of the gradients that they sum after the push."""
    shares, ranks = scenario.shard_shares, scenario.policies.tp
    groups = (shares[first : first + ranks] for first in range(0, len(shares), ranks))
    if scenario.policies.gradients == "push" and any(len(set(group)) > 1 for group in groups):
        raise UserError(
            f"{where}: plan.shares.shards = {shown_value(scenario.plan.shares.shards)}: the ranks of a tensor "
            "group sum gradients of norms or adapters, and would own other parts of them; allowed: even, or one share "
            "per replica"
        )


def check_divided_vocabulary(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse to divide the vocabulary where there is nobody to divide it among, or the model's cannot be divided."""
    plan, model = scenario.plan, scenario.workload.model
    reasons = {"embedding_parallel": undivided_embedding_reason, "loss_parallel": undivided_loss_reason}
    asked = [key for key in reasons if getattr(plan, key)]
    for key in asked:
        where = f"{file}: plan.{key} = true"
        if policies.tp == 1:
            raise UserError(f"{where}: there are no tensor-parallel ranks to divide the vocabulary among; set plan.tp")
        if (reason := reasons[key](model)) is not None:
            raise UserError(f"{where}: the vocabulary of '{model.name}' cannot be divided: {reason}; leave it out")
    if len(asked) == 1 and shares_embedding(model):
        (other,) = set(reasons) - set(asked)
        raise UserError(
            f"{file}: plan.{asked[0]} = true: the head of '{model.name}' has the weight of its token embedding, which "
            f"is divided for both; set plan.{other} = true too"
        )
    if asked:
        _check_equal_rows(scenario, policies, f"{file}: plan.{asked[0]} = true")


def _check_equal_rows(scenario: Scenario, policies: Policies, where: str) -> None:
    """Refuse a vocabulary that tensor ranks do not divide evenly, if they sum some of the gradients that are pushed.

    Their buckets have unequal sizes then, so that their owners' shards hold different parts of what is summed.
    """
    model, ranks = scenario.workload.model, policies.tp
    uneven = next((each for each in divided_entries(scenario.plan, model) if each % ranks), None)
    layers = model.sequence_layers if policies.sequence_parallel else model.sliced_layers
    sums = any(each.summed for layer in layers for each in layer.parameters)
    if policies.gradients == "push" and uneven is not None and sums and len(scenario.shard_shares) > ranks:
        raise UserError(
            f"{where}: {ranks} tensor-parallel ranks do not divide the {uneven} entries of the vocabulary evenly, and "
            "each would own another part of the norms or adapters whose gradients they sum; leave it out"
        )


def check_tensor_overlap(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse to overlap exchanges of tensor-parallel ranks with products where there are none, or in an unknown way."""
    plan, model = scenario.plan, scenario.workload.model
    if not plan.tp_overlap and not plan.async_input_gradients:
        return
    where = f"{file}: plan.{'tp_overlap' if plan.tp_overlap else 'async_input_gradients'} = true"
    layers = model.sequence_layers if policies.sequence_parallel else model.sliced_layers
    gathered = any(each.kind == "all-gather" for layer in layers for each in layer.reductions)
    if plan.tp_overlap and (policies.tp == 1 or not gathered):
        raise UserError(f"{where}: no sequences are gathered beside products; set plan.tp and plan.sequence_parallel")
    if plan.tp_overlap and plan.async_input_gradients:
        raise UserError(f"{where}: reduce-scatters run beside products already; leave out plan.async_input_gradients")
    if policies.tp == 1:
        raise UserError(f"{where}: no tensor-parallel ranks sum gradients of inputs; set plan.tp")
    if not any(each.cut is not None and len(each.shape) == 2 for layer in layers for each in layer.parameters):
        raise UserError(f"{where}: the blocks of '{model.name}' have no linear maps that ranks divide; leave it out")
    if scenario.multiplies_in_ring:
        _check_products_in_ring(scenario, where)


def _check_products_in_ring(scenario: Scenario, where: str) -> None:
    """Refuse what rings of messages beside products cannot do yet; see `Scenario.multiplies_in_ring`."""
    plan, workload = scenario.plan, scenario.workload
    layers = workload.model.sequence_layers
    where = f"{where}: with backend 'gloo'"
    if any(scenario.cluster.type_of(rank).kind != "cpu" for rank in range(scenario.ranks)):
        raise UserError(f"{where}, messages beside products are known of CPUs only; allowed with 'nccl'")
    if plan.gathered_inputs != "kept":
        raise UserError(f"{where}, gathered inputs are kept; allowed: plan.gathered_inputs = 'kept'")
    if plan.recompute not in ("none", "full"):
        raise UserError(
            f"{where}, products of parts are no whole outputs that plan.recompute = '{plan.recompute}' could keep; "
            "allowed: 'none', 'full'"
        )
    if workload.autocast is not None:
        raise UserError(f"{where}, casts beside the exchanges (workload.autocast) are not modelled; leave one out")
    if any(each.of_experts for layer in layers for each in layer.parameters):
        raise UserError(f"{where}, exchanges beside products are not known of blocks with routed experts; leave it out")
    if any(layer.units and layer.selective_positions is None for layer in layers):
        raise UserError(
            f"{where}: the model file of '{workload.model.name}' does not tell which operations are products; trace it "
            "again with `gsreal trace`"
        )


def check_sequence_parts(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse to divide sequences where there is nobody to divide them among, or gradients leave before their sum."""
    if not policies.sequence_parallel:
        if scenario.plan.gathered_inputs != "kept":
            raise UserError(
                f"{file}: plan.gathered_inputs = '{scenario.plan.gathered_inputs}': without plan.sequence_parallel "
                "nothing is gathered; leave it out"
            )
        return
    where, model = f"{file}: plan.sequence_parallel = true", scenario.workload.model
    if policies.tp == 1:
        raise UserError(f"{where}: there are no tensor-parallel ranks to divide sequences among; set plan.tp")
    _check_equal_owners(scenario, where)
    if policies.zero1_implementation == "deepspeed":
        key = scenario.plan.zero_implementation_key
        others = "'torch', 'megatron'" if key.endswith("zero1_implementation") else "'torch'"
        raise UserError(f"{where}: cannot run yet with {key} = 'deepspeed'; allowed: {others}")
    if not isinstance(model.input, TokenInput):
        raise UserError(f"{where}: the input of '{model.name}' is no sequence; leave it out")
    if not model.sequence_layers and not routes_parts(model, policies):
        variant, option = variant_in_trace(scenario.workload)
        raise UserError(
            f"{where}: workload.model: '{model.name}' is not traced with parts of sequences{variant}; trace it again "
            f"with `gsreal trace{option}` (gsreal.methods.cuts tells which blocks can run so)"
        )
    if (scenario.workload.sequence_length or 0) % policies.tp:
        raise UserError(
            f"{where}: workload.sequence_length = {scenario.workload.sequence_length}: cannot be divided evenly among "
            f"plan.tp = {policies.tp} ranks; allowed: a multiple"
        )
