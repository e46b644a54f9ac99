"""Tensor parallelism: collectives over the ranks of a tensor group, placed where sliced blocks sum, and their host
time.

Sliced blocks all-reduce their outputs. With sequence parallelism (`plan.sequence_parallel`) they all-gather and
reduce-scatter instead; gradients of layers that run on parts of sequences are then summed after the backward, all in
one tensor, as in Megatron-LM. Where inputs are gathered again (`plan.gathered_inputs`), the second gather runs beside
the backward of the linear map. The host's time for each gather and reduce-scatter is assumed to be that of an
all-reduce.

[Note: overlap] Under `plan.tp_overlap` a gather overlaps with the matrix products that read it, and a reduce-scatter
with the products whose result it sums, in as many parts as there are ranks (n). A product's first part needs no rows of
other ranks; the sum of its last part is sent after the product. Of a product of g seconds, (n - 1) / n * g run beside
the exchange, and the rest before (or after) it. In the backward these are the products that give the input's gradient.
Sources: Transformer Engine's userbuffers (ring exchange); torch's `_symmetric_memory`, fused_all_gather_matmul. On gloo
the exchange is a ring of messages, step by step beside the products of the parts: the same time where all steps and
all parts take equally long. What differs there is listed at `Scenario.multiplies_in_ring`. Under
`plan.async_input_gradients` the sum of a map's input gradient begins as soon as that is computed, and the products for
the weight gradients overlap with it; see `gssim.scenario.overlapped_maps`. Source: Megatron-LM,
LinearWithGradAccumulationAndAsyncCommunication.

torch's functional all-reduce copies its input and sums the copies (the copy is traced as the layer's own buffer). The
rank waits for the sum at once, because the next operation needs it; on nccl, too, the compute stream waits. Before each
sum, the host's overhead over a plain call of the collective is counted, and in each layer DTensor's own.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gssim import cost
from gssim.cluster.kernel_rates import ProductKind
from gssim.collectives import Communication
from gssim.memory import Event, footprint, rerun_positions
from gssim.program.experts import OPERATIONS as EXPERT_OPERATIONS
from gssim.program.experts import expert_exchange
from gssim.program.lowering import Lowering, layer_groups
from gssim.program.ring import BLOCK_OPERATIONS, attention_ratio, ring_attention
from gssim.program.task import PASSES, Operation, Task, TaskId, collective_task
from gssim.scenario import Scenario, routes_parts
from gssim.scenario.overlapped_maps import end_of, input_gradient_sums, maps_of_sums
from gssim.units import Recompute
from gssim.workload import Layer, LayerInstance, Parameter, Reduction
from gssim.workload.layer import EXPERT_EXCHANGES, GATHER_AGAIN


def reductions_in(layer: Layer, phase: str, recompute: Recompute) -> list[Reduction]:
    """Return a layer's collectives in a phase; `recompute`: which part of the forward runs again in the phase `r`."""
    if phase != "r":
        return [reduction for reduction in layer.reductions if reduction.moment.phase == phase]
    first, last = rerun_positions(layer, recompute)
    kept = layer.kept_positions(recompute) or ()  # an attention in a ring whose output is kept sends nothing again
    again = (each for each in layer.reductions if each.kind != "ring" or each.moment.position not in kept)
    return [each for each in again if each.moment.phase == "f" and first <= each.moment.position <= last]


def sum_positions(layer: Layer, phase: str, recompute: Recompute) -> tuple[int, ...]:
    """Return the positions of a layer's collectives, where its phase is split; arguments as for `reductions_in`."""
    return tuple(reduction.moment.position for reduction in reductions_in(layer, phase, recompute))


def await_positions(layer: Layer, phase: str) -> tuple[int, ...]:
    """Return the positions at which a layer's phase waits for the collectives that overlap with its compute."""
    beside = (each for each in layer.reductions if each.moment.phase == phase)
    return tuple(each.awaited for each in beside if each.awaited is not None)


def copied_positions(layer: Layer, phase: str, recompute: Recompute) -> tuple[int, ...]:
    """Return the positions of the collectives whose tensors a backend may copy: those of parts of sequences.

    For a collective that overlaps with compute, that is the position at which the layer waits for it.
    """
    parts = (each for each in reductions_in(layer, phase, recompute) if each.kind in ("all-gather", "reduce-scatter"))
    return tuple(map(end_of, parts))


def with_all_reduces(
    low: Lowering,
    rank: int,
    instance: LayerInstance,
    phase: str,
    parts: Sequence[Task],
    ends: Sequence[float],
    samples: int,
) -> list[Task]:
    """Return a layer's phase with its collectives inserted after `parts`; `ends`: the place at which each part ends."""
    pending = list(enumerate(reductions_in(instance.layer, phase, low.scenario.plan.recompute)))
    if not pending:
        return list(parts)
    parts, in_ring_s = _without_ring(low, instance, phase, parts, samples)
    overlap = low.scenario.plan.tp_overlap
    products = _products_beside(low, rank, instance, phase, samples) if overlap else {}
    tasks: list[Task] = []
    awaited: list[tuple[float, Task]] = []
    for part, end in zip(parts, ends, strict=True):
        tasks.append(part)
        tasks += [wait for place, wait in awaited if place <= end]
        awaited = [each for each in awaited if each[0] > end]
        while pending and pending[0][1].moment.position <= end:
            number, reduction = pending.pop(0)
            if reduction.kind in EXPERT_EXCHANGES:
                tasks.append(expert_exchange(low, rank, instance, reduction, phase, samples))
                continue
            axis = "cp" if reduction.kind in CONTEXT_EXCHANGES else "tp"
            groups = layer_groups(low, low.batch_sizes[rank], axis)
            every = len(low.group) // (low.policies.cp if axis == "cp" else 1)
            samples_of_group = low.batch_sizes[rank] if len(groups) < every else None
            if reduction.kind == "ring":
                tasks += ring_attention(
                    low,
                    rank,
                    instance,
                    phase,
                    samples,
                    reduction=reduction,
                    alone_s=in_ring_s,
                    before=tasks[-1].id,
                    samples_of_group=samples_of_group,
                )
                continue
            # not the part's number: ranks with other slices may cut elsewhere too, where buckets are complete
            own = TaskId(
                OPERATIONS[reduction.kind],
                layer=instance.module,
                part=number or None,
                during=PASSES[phase],
                samples=samples_of_group,
            )
            size = _sum_bytes(low, reduction, samples)
            kind = CARRIED_AS.get(reduction.kind, reduction.kind)
            in_ring = number in products and low.scenario.multiplies_in_ring
            # by this project's own ring of messages, as collectives of uneven parts are
            exchange = Communication.among(groups, kind, size, carried_as=f"{kind}-v" if in_ring else "")
            if in_ring:
                tasks.append(collective_task(own, exchange))
                continue
            added, wait = _exchange(low, rank, own, reduction, exchange, after=tasks[-1].id)
            tasks += added
            if wait is not None:  # a second gather is awaited after the next part
                awaited.append((end + 0.25 if reduction.awaited is None else reduction.awaited, wait))
    tasks += [wait for _, wait in awaited]
    if overlap:
        return _with_overlapped_products(tasks, products)
    if await_positions(instance.layer, phase):
        return _with_overlapped_sums(tasks, _weight_products_s(low, rank, instance, samples))
    return tasks


def _exchange(
    low: Lowering, rank: int, own: TaskId, reduction: Reduction, exchange: Communication, *, after: TaskId
) -> tuple[list[Task], Task | None]:
    """Return the tasks that take part in an exchange, and the later wait for it if it overlaps with compute.

    Buffers that a backend allocates for an exchange with such a wait live until it.
    """
    if reduction.kind == GATHER_AGAIN:
        return [collective_task(own, exchange, "gather", after=(after,))], _wait_for(own)
    device, tasks = low.device(rank), list[Task]()
    staging = low.staging(device, exchange)
    is_beside = reduction.awaited is not None
    if device.kind == "cpu" and reduction.kind not in CONTEXT_EXCHANGES:
        host_s = cost.cut_sum_time_s(device, sum_bytes=exchange.size_bytes)
    else:
        host_s = 0.0
    if host_s or (is_beside and staging):
        need = footprint(staging[:1] if is_beside else ())
        tasks.append(Task(own.serving("issue"), "exposed_communication", duration_s=host_s, need=need))
    if not is_beside:
        return [*tasks, collective_task(own, exchange, need=footprint(staging))], None
    wait = replace(_wait_for(own), need=footprint(staging[1:]))
    return [*tasks, collective_task(own, exchange, "slices", after=(tasks[-1].id if tasks else after,))], wait


def _with_overlapped_sums(tasks: Sequence[Task], products_s: Mapping[int, float]) -> list[Task]:
    """Return a backward in which the parts that overlap with a sum of input gradients take as long as its products.

    `products_s`: seconds of the products that overlap with a sum, by number of the sum. In `tasks`, a layer's time is
    divided among its parts by their numbers of operations; what the overlapping parts gain here, the part before it
    loses, and the reverse.
    """
    found = list(tasks)
    for start, task in enumerate(tasks):
        if task.stream != "slices":
            continue
        end = next(i for i in range(start, len(found)) if found[i].after == (task.id,) and found[i].id.action)
        before = next(i for i in reversed(range(start)) if _is_part(found[i]))
        beside = [i for i in range(start, end) if _is_part(found[i])]
        there_s = sum(found[i].duration_s for i in beside)
        both_s = found[before].duration_s + there_s
        product_s = min(products_s[task.id.part or 0], both_s)
        for i in beside:
            share = found[i].duration_s / there_s if there_s else 1 / len(beside)
            found[i] = replace(found[i], duration_s=product_s * share)
        found[before] = replace(found[before], duration_s=both_s - product_s)
    return found


def _is_part(task: Task) -> bool:
    return task.exchange is None and not task.id.action and task.id.op in ("forward", "recompute", "backward")


def _wait_for(collective: TaskId) -> Task:
    return Task(collective.serving("await"), "exposed_communication", after=(collective,))


def _with_overlapped_products(tasks: Sequence[Task], products: Mapping[int, "_Product"]) -> list[Task]:
    """Return a pass whose exchanges run beside matrix products; see [Note: overlap].

    `products`: the product that each exchange runs beside, by the number of the exchange.
    """
    found: list[Task] = []
    gather: Task | None = None
    for task in tasks:
        if gather is not None and _is_part(task):
            overlap, rest = _split_at_overlap(task, products[gather.id.part or 0])
            found += [replace(overlap, issue=task.issue), _wait_for(gather.id), replace(rest, issue=None)]
            gather = None
            continue
        of_slices = task.stream == "compute" and task.id.op in OPERATIONS.values()
        product = products.get(task.id.part or 0) if of_slices else None
        if product is None:
            found.append(task)
        elif product.follows:
            gather = replace(task, stream="slices", after=(found[-1].id,))
            found.append(gather)
        else:
            place = next(i for i in reversed(range(len(found))) if found[i].exchange is None and not found[i].id.action)
            overlap, found[place] = _split_at_overlap(found[place], product)
            found += [replace(task, stream="slices", after=(found[-1].id,)), overlap, _wait_for(task.id)]
    assert gather is None, "products follow the gather of their input"
    return found


def _split_at_overlap(part: Task, product: "_Product") -> tuple[Task, Task]:
    """Split a part of a pass in two: the time that runs beside an exchange, at most all of it, and the rest."""
    whole_s = part.duration_s + product.copies_s
    overlap_s = min(product.beside_s, whole_s)
    overlap = Task(part.id.serving("overlap"), part.phase, duration_s=overlap_s)
    return overlap, replace(part, duration_s=whole_s - overlap_s)


class _Product(NamedTuple):
    """Matrix products that overlap with an exchange."""

    beside_s: float
    """Seconds of the products that can run beside the exchange, as neither needs a result of the other."""
    follows: bool
    """Whether the products read what the exchange brings; otherwise they come before it."""
    copies_s: float = 0.0
    """Seconds by which the pass is longer for copies of parts."""


def _weight_products_s(low: Lowering, rank: int, instance: LayerInstance, samples: int) -> dict[int, float]:
    """Return the seconds of the weight-gradient products that overlap with each sum, by number of the sum."""
    layer = instance.layer
    maps = dict(zip(map(id, input_gradient_sums(layer)), maps_of_sums(layer), strict=True))
    return {
        number: _products_s(low, rank, instance, maps[id(exchange)], "b", samples, "weight_gradient")
        for number, exchange in enumerate(reductions_in(layer, "b", "none"))
        if exchange.awaited is not None
    }


def _products_s(
    low: Lowering,
    rank: int,
    instance: LayerInstance,
    maps: Sequence[Parameter],
    phase: str,
    samples: int,
    kind: ProductKind,
) -> float:
    workload = low.scenario.workload
    return cost.maps_time_s(
        low.device(rank),
        workload,
        instance.layer,
        [each.shape for each in maps],
        phase=phase,
        batch_size=samples,
        tokens=samples * (workload.sequence_length or 1) // low.policies.cp,
        kind=kind,
        recompute=low.scenario.plan.recompute,
        whole=low.whole_layer(instance),
        positions=low.scenario.sequence_positions if low.policies.cp > 1 else None,
    )


def _products_beside(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int
) -> Mapping[int, _Product]:
    """Return the products that overlap with the exchanges of a phase, by exchange number; see [Note: overlap].

    The maps between a gather and the next reduce-scatter of the forward are those whose weight gradients are complete
    between the same two exchanges of the backward. A second gather between these in the backward brings the input
    again, for the weight gradients.
    """
    layer, plan = instance.layer, low.scenario.plan
    ends = [end_of(each) for each in input_gradient_sums(layer)]
    of_sums, of_input = (maps_of_sums(layer, rows=rows) for rows in (True, False))
    hidden_ratio = (low.policies.tp - 1) / low.policies.tp
    backward, found, seen = phase == "b", {}, Counter[tuple[int, str]]()
    for number, exchange in enumerate(reductions_in(layer, phase, plan.recompute)):
        gathers = exchange.kind == "all-gather"
        if not gathers and exchange.kind != "reduce-scatter":
            continue
        if backward:
            place = bisect_left(ends, exchange.moment.position)
        else:
            place = len(ends) - 1 - sum(count for (_, kind), count in seen.items() if kind == exchange.kind)
        again = backward and seen[place, exchange.kind] > 0
        seen[place, exchange.kind] += 1
        if not 0 <= place < len(ends):
            continue
        maps = (of_sums if gathers == (backward and not again) else of_input)[place]
        kind: ProductKind = "input_gradient" if backward else "forward"
        if products_s := _products_s(low, rank, instance, maps, phase, samples, kind):
            beside_s, copies_s = _copies_of_parts_s(low, rank, exchange, maps, samples)
            found[number] = _Product(hidden_ratio * (products_s + beside_s), gathers and not again, copies_s)
    return found


def _copies_of_parts_s(
    low: Lowering, rank: int, exchange: Reduction, maps: Sequence[Parameter], samples: int
) -> tuple[float, float]:
    """Return the seconds of a ring's copies beside an exchange, and of all its copies beyond those that it saves.

    Each part is copied on the cut side of the products: to its places in their results, or from its places in what they
    read. A sum of input gradients is followed by another copy of what it read, for the gradients of the weights. A
    gathered input, and what is summed, need no copy in another order of positions, which is a part of the traced time;
    where that is longer, a pass still takes its traced time, on which a search's bounds rely. Both are 0 unless
    products are computed part by part; see `Scenario.multiplies_in_ring`.
    """
    if not low.scenario.multiplies_in_ring:
        return 0.0, 0.0
    whole_bytes, device = _sum_bytes(low, exchange, samples), low.device(rank)
    # what is exchanged has the width of the maps' whole side
    cut_bytes = sum(whole_bytes * each.sliced_size / (each.elements // each.sliced_size) for each in maps)
    place = exchange.moment.phase, exchange.kind
    later_bytes = cut_bytes if place == ("b", "reduce-scatter") else 0.0
    saved_bytes = 0.0 if place == ("b", "all-gather") else whole_bytes
    more_bytes = max(0.0, cut_bytes + later_bytes - saved_bytes)
    return cost.copy_time_s(device, cut_bytes), cost.copy_time_s(device, more_bytes)


def _without_ring(
    low: Lowering, instance: LayerInstance, phase: str, parts: Sequence[Task], samples: int
) -> tuple[Sequence[Task], float]:
    """Return the parts of a layer's pass without the time of its ring attention, and that time in seconds."""
    exchanges = reductions_in(instance.layer, phase, low.scenario.plan.recompute)
    ring = next((each for each in exchanges if each.kind == "ring"), None)
    if ring is None:
        return parts, 0.0
    ratio = attention_ratio(low, instance, phase, ring, samples)
    whole_s = sum(part.duration_s for part in parts)
    return [replace(part, duration_s=(1 - ratio) * part.duration_s) for part in parts], ratio * whole_s


OPERATIONS: Mapping[str, Operation] = {
    "all-reduce": "all-reduce",
    "all-gather": "gather-sequence",
    "reduce-scatter": "scatter-sequence",
    "all-to-all": "exchange-heads",
    GATHER_AGAIN: "gather-sequence",
}
"""Operation of each kind of collective."""
CARRIED_AS = {GATHER_AGAIN: "all-gather"}
"""The collective that carries out an exchange whose kind has another name."""
CONTEXT_EXCHANGES = ("all-to-all", "ring")
"""Kinds of collectives of context parallelism; a layer's other collectives are over tensor-parallel ranks."""
CONTEXT_OPERATIONS = frozenset(["exchange-heads", *BLOCK_OPERATIONS])
"""Operations of context parallelism's collectives."""
SLICE_COLLECTIVES = frozenset([*OPERATIONS.values(), *EXPERT_OPERATIONS.values(), *BLOCK_OPERATIONS])


def sum_partial_gradients(low: Lowering, rank: int) -> list[Task]:
    """Return the all-reduce, over a tensor group, of gradients of which each rank has only a partial sum.

    These are gradients of parameters that each rank applies to its part of the sequence or to its own heads, such as
    norms. They are copied into one tensor, and back. Where parameters are sharded or gradients are pushed, a rank sums
    only its own shards, because sums may be taken in any order. Megatron-LM's distributed optimizer instead sums whole
    gradients in its buffer after they are reduce-scattered, of which a rank uses only its part
    (core/distributed/finalize_model_grads.py).
    """
    elements = low.summed_elements[low.position(rank)] if low.policies.tp > 1 else 0
    if not elements:
        return []
    of_shards = low.policies.gradients in ("reduce-scatter", "push")
    size = float(elements * (low.master_bytes if of_shards else low.buffer_value_bytes))
    samples = low.batch_sizes[rank]
    own = TaskId("sum-gradients", samples=samples if len(layer_groups(low, samples, "tp")) < len(low.group) else None)
    alike = [
        other
        for other in low.group
        if low.batch_sizes[other] == samples and low.summed_elements[low.position(other)] == elements
    ]
    if len(set(low.summed_elements)) > 1:  # owners of shards sum only what they own
        own = own._replace(place=low.position(alike[0]))
    groups = dict.fromkeys(low.policies.mesh.group(other, "tp") for other in alike)
    copy_s = cost.copy_time_s(low.device(rank), size)
    need = [footprint([Event(0, change, "temporaries")]) for change in (size, -size)]
    phase = "exposed_communication"
    return [
        Task(own.serving("copy-in"), phase, duration_s=copy_s, need=need[0]),
        collective_task(own, Communication.among(groups, "all-reduce", size)),
        Task(own.serving("copy-out"), phase, duration_s=copy_s, need=need[1]),
    ]


def sum_over_slices(low: Lowering, rank: int, own: TaskId, size_bytes: float) -> Task:
    """Return an all-reduce over the ranks that hold slices of the same blocks."""
    groups = layer_groups(low, low.batch_sizes[rank], "tp")
    if len(groups) < len(low.group):
        own = own._replace(samples=low.batch_sizes[rank])
    return collective_task(own, Communication.among(groups, "all-reduce", size_bytes))


def _sum_bytes(low: Lowering, reduction: Reduction, samples: int) -> float:
    return reduction.bytes_at(b=samples, s=low.scenario.workload.sequence_length or 1, scale=low.traced_scale)


def with_host_time(
    low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int, *, alone_s: float
) -> float:
    """Return the seconds of a layer's phase that takes `alone_s`, plus the host's overhead if the layer is sliced."""
    layer, device = instance.layer, low.device(rank)
    host_s = slicing_host_s(low, rank, instance, phase, samples)
    operations = layer.backward_operations if phase == "b" else layer.forward_operations
    return cost.with_host_time_s(device, alone_s, host_s=host_s, operations=operations)


def slicing_host_s(low: Lowering, rank: int, instance: LayerInstance, phase: str, samples: int) -> float:
    """Return the host's overhead in a layer's phase, in seconds, if the layer is sliced; else 0.

    This is DTensor's own time, per pair of sliced maps (each pair has one sum in the forward). A GPU waits for sums
    while the host issues the next operations, so the host's time for the sums is included here. On a CPU that time is a
    task of its own before each sum.
    """
    layer, device = instance.layer, low.device(rank)
    if not layer.reductions or low.policies.tp == 1:
        return 0.0
    host_s = 0.0
    if layer.linear and low.scenario.cuts_natively:  # DTensor
        # a pair of maps ends in one all-reduce or one reduce-scatter in the forward
        pairs = sum(each.moment.phase == "f" and each.kind != "all-gather" for each in layer.reductions)
        size = _sum_bytes(low, layer.reductions[0], samples)
        host_s += cost.cut_pairs_time_s(device, phase=phase, pairs=pairs, sum_bytes=size)
    if device.kind != "cpu":
        exchanges = reductions_in(layer, phase, low.scenario.plan.recompute)
        # the collectives of context parallelism and of experts are plain calls of the backend, without overhead
        plain = (*CONTEXT_EXCHANGES, *EXPERT_EXCHANGES)
        sizes = [_sum_bytes(low, each, samples) for each in exchanges if each.kind not in plain]
        host_s += sum(cost.cut_sum_time_s(device, sum_bytes=size) for size in sizes)
    return host_s


def unmeasured_host_time(scenario: Scenario) -> tuple[str, ...]:
    """Return the parts of a plan's host time that are not measured, and so count as 0, each with its reason."""
    if scenario.policies.tp == 1:
        return ()
    kinds = dict.fromkeys(scenario.cluster.devices[rank].type for rank in range(scenario.ranks))
    missing = [name for name in kinds if scenario.cluster.device_types[name].cut_block is None]
    messages = [f"host time in cut blocks: device_types.{name}.cut_block is not measured" for name in missing]
    model = scenario.workload.model
    layers = model.sequence_layers if scenario.policies.sequence_parallel else model.sliced_layers
    if routes_parts(model, scenario.policies):
        layers = model.expert_sequence_layers
    blocks = [layer for layer in layers if layer.units]
    if scenario.cuts_natively and any(layer.linear is None for layer in blocks):
        messages.append("DTensor's host time: the model file does not tell whether it cuts the blocks (`gsreal trace`)")
    return tuple(messages)
