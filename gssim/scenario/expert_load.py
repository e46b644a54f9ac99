"""Load of routed experts, and the layers of a model whose experts ranks divide; see [Note: routed rows].

[Note: loads] A load gives each expert its fraction of a layer's rows, of which each token makes `experts_per_token`. A
sample's rows are split in whole numbers by largest remainders, so that all samples load the experts alike. A real run
can route so too (`workload.expert_routing`): the rows of a sample are dealt out in a fixed order, each expert's one
after another, to the sample's tokens in turn (McNaughton's wrap-around rule, 1959), so that a token has no expert twice
as long as no expert has more rows than there are tokens. Where ranks divide sequences too (`plan.cp`), each part of a
sequence loads the experts so, as if it were a sample of its own: all ranks send alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from gssim.errors import UserError
from gssim.plan import Policies, splitting
from gssim.scenario.context_slices import instances_in_context, ring_layer
from gssim.workload import Layer, LayerInstance, Workload, sliced_layer, unrolled


def expert_rows(
    workload: Workload,
    module: str,
    *,
    tokens: int,
    experts: int,
    chosen: int,
    capacity_ratio: float | None = None,
) -> tuple[int, ...]:
    """Return the rows of each expert of a layer for a sample of so many tokens; see [Note: loads].

    `module`: path of the layer. `chosen`: experts that each token takes. `capacity_ratio`: see
    `Layer.expert_capacity_ratio`. Raises UserError for a load that does not fit the layer: its number of experts, an
    expert with more rows than tokens, or any but a balanced one where experts have a capacity.
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
    """Return the rows of each expert of a layer with divided experts for one sample; see `expert_rows`.

    `parts`: into which ranks divide each sample; the rows are those of one.
    """
    assert layer.units is not None
    assert layer.experts_per_token is not None
    return expert_rows(
        workload,
        module,
        tokens=(workload.sequence_length or 1) // parts,
        experts=layer.units,
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


def layers_with_experts(workload: Workload, policies: Policies, position: int) -> tuple[LayerInstance, ...]:
    """Return the layers of a rank at `position` among the ranks that divide the experts: with its own experts alone.

    Assumes that all these ranks have as many samples, or parts of samples: then its experts process, for each of its
    own, as many rows as one of each of the ranks sends them.
    """
    model, ranks = workload.model, policies.ep
    once: dict[tuple[int, int], Layer] = {}
    held = []
    for instance in unrolled(replace(model, layers=model.expert_layers, expert_layers=())):
        layer = instance.layer
        if layer.experts_per_token is None or layer.units is None:
            held.append(instance)
            continue
        experts = layer.units
        rows = ranks * rows_by_rank(workload, policies, instance)[position]
        if (id(layer), rows) not in once:
            once[id(layer), rows] = sliced_layer(layer, experts // ranks, 0, rows)
        held.append(replace(instance, layer=once[id(layer), rows]))
    if policies.cp == 1:
        return tuple(held)
    positions = (workload.sequence_length or 1) // policies.cp
    in_parts = instances_in_context(model, held, [(1, 1)] * len(held), positions)
    return tuple(replace(each, layer=ring_layer(each.layer)) for each in in_parts) if policies.ring else in_parts


def rows_by_rank(workload: Workload, policies: Policies, instance: LayerInstance) -> tuple[int, ...]:
    """Return the rows that one sample, or a rank's part of it, sends to each of the ranks that divide the experts of a
    layer.
    """
    rows = layer_rows(workload, instance.layer, instance.module, parts=policies.cp)
    experts = len(rows)
    units = experts // policies.ep
    return tuple(sum(rows[first : first + units]) for first in range(0, experts, units))
