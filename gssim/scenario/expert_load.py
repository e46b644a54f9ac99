"""Load of routed experts, and the layers of a model whose experts ranks divide; see [Note: routed rows] in
`gssim.workload.layer`.

[Note: loads] A load gives each expert its fraction of a layer's rows; each token makes `experts_per_token` rows. A
sample's rows are split into whole numbers by largest remainders, so all samples load the experts equally. A real run
can route in the same way (`workload.expert_routing`): the rows of a sample are assigned in a fixed order, those of one
expert after those of another, to the sample's tokens in turn (McNaughton's wrap-around rule, 1959). So a token never
has the same expert twice if no expert has more rows than there are tokens. If ranks also divide sequences (`plan.cp`,
or `plan.tp` with `plan.sequence_parallel`), each part of a sequence loads the experts in this way, like a sample of its
own, and all ranks send equal amounts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from gssim.errors import UserError
from gssim.plan import Policies, splitting
from gssim.scenario.context_slices import instances_in_context, ring_layer
from gssim.workload import Layer, LayerInstance, Model, Workload, sliced_layer, unrolled


def expert_rows(
    workload: Workload,
    module: str,
    *,
    tokens: int,
    experts: int,
    chosen: int,
    capacity_ratio: float | None = None,
) -> tuple[int, ...]:
    """Return the number of rows of each expert of a layer, for a sample of `tokens` tokens; see [Note: loads].

    `module`: path of the layer. `chosen`: number of experts per token. `capacity_ratio`: see
    `Layer.expert_capacity_ratio`. Raises UserError for a load that does not fit the layer: a wrong number of experts,
    an expert with more rows than tokens, or an unbalanced load if experts have a capacity.
    """
    load = workload.expert_load
    if capacity_ratio is not None:
        if load != "balanced":
            raise UserError("workload.expert_load: experts with a capacity have as many rows each; leave it out")
        return (math.ceil(capacity_ratio * tokens * chosen / experts),) * experts
    if isinstance(load, str):
        return splitting.split(tokens * chosen, splitting.even(experts))
    where, shares = "workload.expert_load", load.shares
    if load.layers is not None:
        where = f"{where}.layers"
        if module not in load.layers:
            raise UserError(f"{where}: has no load of the layer '{module}'; give one for each layer with experts")
        shares, where = load.layers[module], f"{where}['{module}']"
    if load.skew is not None:
        weights = [(expert + 1) ** -load.skew for expert in range(experts)]
        shares, where = tuple(splitting.proportional(weights)), f"{where}.skew = {load.skew:g}"
    assert shares is not None  # one of the three is given
    if len(shares) != experts:
        raise UserError(f"{where}: {len(shares)} shares for the {experts} experts of '{module}'; give one per expert")
    if not sum(shares) > 0:
        raise UserError(f"{where}: all shares are 0; give at least one expert some load")
    rows = splitting.split(tokens * chosen, splitting.proportional(shares))
    if max(rows) > tokens:
        raise UserError(
            f"{where}: expert {rows.index(max(rows))} of '{module}' would get {max(rows)} rows of the {tokens} tokens "
            f"of a sample, which take {chosen} different experts each; allowed: at most 1/{chosen} of the load"
        )
    return rows


def layer_rows(workload: Workload, layer: Layer, module: str, *, parts: int) -> tuple[int, ...]:
    """Return the rows of each expert of a layer with divided experts, for one part of a sample; see `expert_rows`.

    `parts`: number of parts into which ranks divide each sample.
    """
    assert layer.routed_experts is not None
    assert layer.experts_per_token is not None
    return expert_rows(
        workload,
        module,
        tokens=(workload.sequence_length or 1) // parts,
        experts=layer.routed_experts,
        chosen=layer.experts_per_token,
        capacity_ratio=layer.expert_capacity_ratio,
    )


def routed_experts(rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Return the experts of each token of a sample, so that each expert gets its rows; see [Note: loads].

    >>> routed_experts([2, 1, 1], tokens=2)
    [[0, 1], [0, 2]]
    """
    slots = [expert for expert, count in enumerate(rows) for _ in range(count)]
    return [slots[token::tokens] for token in range(tokens)]


def routes_parts(model: Model, policies: Policies) -> bool:
    """Return whether tensor ranks route the tokens of their own parts of sequences, to experts that all ranks divide.

    Otherwise layers with experts are whole, or cut for this number of tensor ranks (`Model.expert_tensor_ranks`).
    """
    return policies.ep > 1 and policies.tp > 1 and model.expert_tensor_ranks != policies.tp


def parts_routed_apart(model: Model, policies: Policies) -> int:
    """Return the number of parts of each sequence whose tokens are routed separately, by different ranks."""
    if policies.ep == 1:
        return 1
    return policies.cp * (policies.tp if routes_parts(model, policies) else 1)


def divided_expert_layers(model: Model, policies: Policies) -> tuple[Layer, ...]:
    """Return the layers of a model as functions of a rank's part of the experts."""
    return model.expert_sequence_layers if routes_parts(model, policies) else model.expert_layers


def layers_of_own_experts(workload: Workload, policies: Policies, position: int) -> tuple[LayerInstance, ...]:
    """Return the layers of the rank at expert-parallel `position`, with only its own experts, as functions of the
    sequence length; see `on_context_parts`.

    If tensor ranks route the tokens of their own parts of sequences, the layers have the rank's part of the cut blocks.

    Assumes that all ranks that divide the experts have equally many samples (or parts of samples). A rank's experts
    then process, for each of its own samples, the rows that one sample of each of the ranks sends to them.
    """
    model, ranks = workload.model, policies.ep
    in_parts = routes_parts(model, policies)
    positions = (workload.sequence_length or 1) // (policies.tp * policies.cp) if in_parts else 0
    once: dict[tuple[int, int], Layer] = {}
    held = []
    for instance in unrolled(replace(model, layers=divided_expert_layers(model, policies))):
        layer = instance.layer
        experts = layer.routed_experts
        if experts is None and not in_parts:
            held.append(instance)
            continue
        rows = 0 if experts is None else ranks * rows_by_rank(workload, policies, instance)[position]
        own = (experts or 0) // ranks
        if (id(layer), rows) not in once:
            units = (layer.units or 0) // policies.tp
            in_units = sliced_layer(layer, units, positions, rows, own) if in_parts else None
            once[id(layer), rows] = in_units or _with_own_experts(layer, own, rows)
        held.append(replace(instance, layer=once[id(layer), rows]))
    return tuple(held)


def on_context_parts(
    workload: Workload, policies: Policies, instances: Sequence[LayerInstance]
) -> tuple[LayerInstance, ...]:
    """Return layers with own experts on a rank's part of the sequences, with the exchanges around attention."""
    if policies.cp == 1:
        return tuple(instances)
    model, positions = workload.model, (workload.sequence_length or 1) // policies.cp
    parts = [(1, 1)] * len(instances)
    if routes_parts(model, policies):
        parts = [(1, policies.tp) if each.layer.units else (1, 1) for each in instances]
    in_context = instances_in_context(model, instances, parts, positions)
    return tuple(replace(each, layer=ring_layer(each.layer)) for each in in_context) if policies.ring else in_context


@lru_cache(maxsize=256)
def _with_own_experts(layer: Layer, experts: int, rows: int) -> Layer:
    """Return a layer with `experts` of its experts, and `rows` rows per sample; the layer's units are experts."""
    part = sliced_layer(layer, experts, 0, rows)
    trained, frozen = (
        tuple(replace(each, of_experts=each.sliced) for each in parameters)
        for parameters in (part.parameters, part.frozen_parameters)
    )
    return replace(part, parameters=trained, frozen_parameters=frozen)


def rows_of_ranks(workload: Workload, policies: Policies) -> tuple[tuple[int, ...], ...]:
    """Return, for each expert-parallel position, the rows of its experts in each layer that has experts."""
    layers = unrolled(replace(workload.model, layers=divided_expert_layers(workload.model, policies)))
    rows = [rows_by_rank(workload, policies, each) for each in layers if each.layer.routed_experts is not None]
    return tuple(zip(*rows, strict=True))


def rows_by_rank(workload: Workload, policies: Policies, instance: LayerInstance) -> tuple[int, ...]:
    """Return how many rows one sample (or a rank's part of it) sends to each rank that divides a layer's experts."""
    rows = layer_rows(workload, instance.layer, instance.module, parts=parts_routed_apart(workload.model, policies))
    experts = len(rows)
    units = experts // policies.ep
    return tuple(sum(rows[first : first + units]) for first in range(0, experts, units))
