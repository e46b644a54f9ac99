"""Checks of context parallelism: parts of sequences, all-to-alls of heads, rings."""

from gssim.errors import UserError
from gssim.plan import Plan, Policies, default_plan
from gssim.scenario.checks.experts import variant_in_trace
from gssim.scenario.context_slices import fused_attention, rings_of, uncombined_reason
from gssim.scenario.scenario import Scenario
from gssim.workload import Model, TokenInput


def check_context(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse context parallelism of what is no sequence, cannot be divided, or has no way to meet in the attention."""
    if policies.cp == 1:
        return
    plan, workload, model = scenario.plan, scenario.workload, scenario.workload.model
    where, length = f"{file}: plan.cp = {policies.cp}", workload.sequence_length or 0
    if policies.gradients not in ("all-reduce", "reduce-scatter", "push") or policies.compress:
        raise UserError(
            f"{where}: cannot run yet with method '{plan.method}'; allowed today: methods that all-reduce, "
            "reduce-scatter or push gradients in workload.precision (ddp, zero1, zero2, zero3, hsdp, gs, gs_z3, "
            "gs_hier)"
        )
    if plan.shares.replan:
        raise UserError(f"{where}: cannot run yet beside plan.shares.replan = True; allowed today: False")
    if not isinstance(model.input, TokenInput) or model.input.classes is not None:
        raise UserError(f"{where}: '{model.name}' has no loss at each position of a sequence; leave it out")
    if not model.context_layers:
        variant, option = variant_in_trace(scenario.workload)
        raise UserError(
            f"{where}: workload.model: '{model.name}' is not traced on parts of sequences{variant}; trace it again "
            f"with `gsreal trace{option}` (gsreal.methods.context_parallel tells which models can run so)"
        )
    _check_ring(plan, policies, length, file)
    if policies.ring and any(fused_attention(layer) is None for layer in model.context_layers if layer.units):
        raise UserError(
            f"{where}: plan.context_exchange = '{plan.context_exchange}': the attention of '{model.name}' is traced as "
            "several operations, not as one kernel whose blocks can be merged; allowed: 'all-to-all'"
        )
    if length % policies.cp or length < 2 * policies.cp:
        raise UserError(
            f"{where}: workload.sequence_length = {length}: cannot be divided evenly among these ranks; allowed: a "
            "multiple, of at least 2 positions for each"
        )
    if policies.tp > 1 or policies.ep > 1:
        _check_parts_in_context(scenario, policies, where)
    if not policies.ring:
        _check_exchanged_heads(model, policies, where)


def _check_exchanged_heads(model: Model, policies: Policies, where: str) -> None:
    """Refuse to exchange heads that cannot be divided equally, or of layers that state rings; tensor-parallel ranks
    have divided them before.
    """
    if any(map(rings_of, model.context_layers)):
        raise UserError(
            f"{where}: plan.context_exchange = 'all-to-all': the layers of '{model.name}' on parts of sequences have "
            "rings, not exchanges of heads; allowed: 'ring' or 'gather'"
        )
    before = f", and {policies.tp} tensor-parallel ranks before" if policies.tp > 1 else ""
    for layer in (layer for layer in model.context_layers if layer.units):
        heads, rest = divmod(layer.units or 0, policies.tp)
        if heads % policies.cp or rest:
            allowed = f"a divisor of {heads}" if not rest else f"plan.tp a divisor of {layer.units}"
            raise UserError(
                f"{where}: {layer.name} has {layer.units} heads with keys of their own, which the ranks divide among "
                f"them for the attention{before}; allowed: {allowed}, or plan.context_exchange = 'ring' or 'gather'"
            )


def _check_parts_in_context(scenario: Scenario, policies: Policies, where: str) -> None:
    """Refuse parts of sequences beside cut blocks, or divided experts, where the model's layers with both do not follow
    from its trace.
    """
    model, length = scenario.workload.model, scenario.sequence_positions or 0
    beside, cut = f"{where} beside plan.ep = {policies.ep}", model.expert_layers
    if policies.tp > 1:
        beside, cut = f"{where} beside plan.tp = {policies.tp}", model.sliced_layers
        if policies.sequence_parallel:
            cut = model.expert_sequence_layers if policies.ep > 1 else model.sequence_layers
    if (why := uncombined_reason(model, cut)) is not None:
        raise UserError(f"{beside}: workload.model: '{model.name}' {why}")
    if policies.sequence_parallel and length % policies.tp:
        raise UserError(
            f"{beside}: workload.sequence_length = {scenario.workload.sequence_length}: parts of {length} positions "
            "cannot be divided evenly among tensor-parallel ranks (plan.sequence_parallel); allowed: a multiple of "
            "plan.cp * plan.tp"
        )


def _check_ring(plan: Plan, policies: Policies, length: int, file: str) -> None:
    """Refuse options of rings without a ring, lengths that a ring cannot divide, and what cannot run with one yet."""
    if not policies.ring:
        if not plan.context_overlap:
            raise UserError(
                f"{file}: plan.context_overlap = false: all-to-alls overlap with nothing; allowed with "
                "plan.context_exchange = 'ring' or 'gather'"
            )
        if plan.context_split == default_plan(plan.method).context_split:
            return
        raise UserError(
            f"{file}: plan.context_split = '{plan.context_split}': all-to-alls exchange sequences in their order; "
            "allowed with plan.context_exchange = 'ring' or 'gather'"
        )
    where = f"{file}: plan.cp = {policies.cp}"
    if policies.zigzag and length % (2 * policies.cp):
        raise UserError(
            f"{where}: workload.sequence_length = {length}: cannot be divided into {2 * policies.cp} equal parts, two "
            "for each rank (plan.context_split = 'zigzag'); allowed: a multiple, or 'plain'"
        )
