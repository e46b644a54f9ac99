"""What owners of shards meet, for the share policies `memory` and `cost`: room, rates, and the links on their way.

Like `sample_costs`, all this serves to divide the work, from what both executors know when they load a scenario; it is
no prediction of a step or of its memory. What a threshold will leave of a push is not known then: messages count as
dense.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from gssim.cluster import Cluster, DeviceType
from gssim.cluster.topology import Wiring
from gssim.errors import UserError
from gssim.plan import Plan, Policies, rebalancing, resolved_push, shard_sizing
from gssim.scenario.device_rates import has_master_copy, master_bytes, value_bytes
from gssim.units import PRECISION_BYTES, Floats, Ints
from gssim.workload import (
    VALUES_KEPT,
    Buffer,
    ImageInput,
    Layer,
    Workload,
    handed_back,
    handed_on,
    implementation_on,
    optimizer_moved_values,
)

USABLE_RATIO = 0.92
"""Of a device's memory: the rest is left to temporaries, and to what allocators lose (assumed)."""


def owned_shares(
    cluster: Cluster, workload: Workload, plan: Plan, policies: Policies, batch_sizes: Sequence[int]
) -> tuple[float, ...]:
    """Return every rank's share of what is owned by the plan's policy, `memory` or `cost`, over all ranks.

    Raises UserError where it does not fit: one line that names the device and the excess.
    """
    capacity, held, whole = _rooms(cluster, workload, plan, policies, batch_sizes)
    try:
        if plan.shares.shards == "memory":
            return shard_sizing.memory_shares(capacity_bytes=capacity, held_bytes=held, whole_bytes=whole)
        _refuse_overfull(capacity, held)
        most = tuple((room - used) / whole for room, used in zip(capacity, held, strict=True))
        return shard_sizing.cost_shares(owner_times(cluster, workload, plan, policies), most=most)
    except shard_sizing.InfeasibleError as error:
        raise _misfit(error, cluster, plan, capacity, held, whole) from None


def _rooms(
    cluster: Cluster, workload: Workload, plan: Plan, policies: Policies, batch_sizes: Sequence[int]
) -> tuple[list[float], list[float], float]:
    """Return what each rank may use of its memory, what it holds whatever it owns, and what owning everything takes."""
    kinds = list(zip([device.type for device in cluster.devices[: policies.ranks]], batch_sizes, strict=True))
    found = {
        (name, n): held_bytes(cluster.device_types[name], workload, plan, policies, samples=n) for name, n in set(kinds)
    }
    capacity = [USABLE_RATIO * cluster.device_types[name].memory_bytes for name, _ in kinds]
    return capacity, [found[kind] for kind in kinds], owned_bytes(workload, plan, policies)


def _refuse_overfull(capacity: Sequence[float], held: Sequence[float]) -> None:
    excess, rank = max((used - room, rank) for rank, (room, used) in enumerate(zip(capacity, held, strict=True)))
    if excess > 0:
        raise shard_sizing.InfeasibleError(rank, excess)


def _misfit(
    error: shard_sizing.InfeasibleError,
    cluster: Cluster,
    plan: Plan,
    capacity: Sequence[float],
    held: Sequence[float],
    whole: float,
) -> UserError:
    """Return what to tell the user: of a lack on all devices together, the one with the least room bears the name."""
    room = [has - used for has, used in zip(capacity, held, strict=True)]
    rank = error.rank if error.rank is not None else room.index(min(room))
    name, policy = cluster.devices[rank].name, plan.shares.shards
    hint = "more plan.micro_batches, plan.recompute, or method 'gs_z3' need less"
    if error.rank is not None:
        what = f"must hold {-room[rank]:.4g} bytes more than it may, without any shard"
    else:
        what = (
            f"has the least room, {room[rank]:.4g} bytes, and all devices together lack {whole - sum(room):.4g} "
            f"of the {whole:.4g} bytes of the sharded state"
        )
    limit = f"({USABLE_RATIO:.0%} of its memory)"
    return UserError(f"plan.shares.shards = '{policy}': device '{name}' {limit} {what}; {hint}")


def sample_room(
    cluster: Cluster, workload: Workload, plan: Plan, policies: Policies, shard_shares: Sequence[float]
) -> tuple[int, ...]:
    """Return how many samples each rank has memory for beside its shard, of the global batch at most."""
    total, whole = workload.global_batch_size, owned_bytes(workload, plan, policies)
    found: dict[tuple[str, float], int] = {}
    kinds = [(cluster.devices[rank].type, share) for rank, share in enumerate(shard_shares)]
    for name, share in set(kinds):
        device = cluster.device_types[name]
        owned = whole * (1.0 if policies.optimizer_state == "replicated" else share)
        room = USABLE_RATIO * device.memory_bytes - owned

        def too_many(samples: int, device: DeviceType = device, room: float = room) -> bool:
            return held_bytes(device, workload, plan, policies, samples=samples) > room

        found[name, share] = bisect_left(range(total + 1), True, lo=1, key=too_many) - 1
    return tuple(found[kind] for kind in kinds)


def shares_worth_moving_to(
    cluster: Cluster,
    workload: Workload,
    plan: Plan,
    policies: Policies,
    *,
    batch_sizes: Sequence[int],
    owned: Sequence[float],
    update_s: Sequence[float | None],
    steps: int,
) -> tuple[float, ...] | None:
    """Return the shard shares to change to in the middle of a run, or None: `shares.worth_moving` with this cluster.

    `owned`: the shares until now; `update_s`: what updating all parameters takes each rank, as measured, None where it
    owns nothing; `steps`: that are left.
    """
    times = owner_times(cluster, workload, plan, policies)
    measured = tuple(known if seen is None else seen for seen, known in zip(update_s, times.update_s, strict=True))
    capacity, held, whole = _rooms(cluster, workload, plan, policies, batch_sizes)
    most = tuple(max(share, (c - h) / whole) for share, c, h in zip(owned, capacity, held, strict=True))
    out, come = rank_rates(cluster.wiring, tuple(device.host for device in cluster.devices[: policies.ranks]))
    state_bytes = (VALUES_KEPT[workload.optimizer] + has_master_copy(workload)) * master_bytes(workload)
    moving = [[state_bytes * workload.model.elements / rate for rate in rates] for rates in (out, come)]
    return rebalancing.worth_moving(
        replace(times, update_s=measured),
        owned,
        most=most,
        moving=(moving[0], moving[1]),
        steps=steps,
        settings=plan.shares.replanning,
    )


# Memory --------------------------------------------------------------------------------------------------------------


def held_bytes(device: DeviceType, workload: Workload, plan: Plan, policies: Policies, *, samples: int) -> float:
    """Return what a rank holds in its backward whatever it owns, with two gradient buckets under way.

    Replicated parameters, the input of `samples`, activations of a micro-batch, residuals of all gradients, and whole
    gradients where micro-batches add up on the rank.
    """
    model, value = workload.model, value_bytes(workload)
    whole = model.elements * value
    micro_batch = -(-samples // plan.micro_batches)
    gradients = min(2 * plan.bucket_bytes, whole)
    if plan.micro_batches > 1 and policies.gradient_sync == "step":
        gradients = whole
    residuals = model.elements * _residual_bytes(workload, plan)
    replica = whole if policies.parameters == "replicated" else 0
    kept = activation_bytes(workload, plan, samples=micro_batch) + _input_bytes(workload, samples)
    return (
        device.workspace_bytes + device.context_bytes + replica + sum(model.buffer_bytes) + gradients + residuals + kept
    )


def owned_bytes(workload: Workload, plan: Plan, policies: Policies) -> float:
    """Return what owning all parameters takes: optimizer state, gradients, and a master copy or the parameters."""
    master = master_bytes(workload)
    each = VALUES_KEPT[workload.optimizer] * master + master
    each -= _residual_bytes(workload, plan)  # what is owned leaves no residual
    each += master if has_master_copy(workload) else 0
    each += value_bytes(workload) if policies.parameters != "replicated" else 0
    return max(1.0, float(each * workload.model.elements))


def _residual_bytes(workload: Workload, plan: Plan) -> int:
    push = resolved_push(plan.push, sgd=workload.optimizer.startswith("sgd"))
    return PRECISION_BYTES[push.error_feedback_precision] if push.error_feedback else 0


def activation_bytes(workload: Workload, plan: Plan, *, samples: int) -> float:
    """Return what `samples` need at the worst layer of the backward: what the layers up to it keep, and make there.

    What a layer keeps are its traced buffers that outlive the forward, let go of once its backward is done. Of
    checkpointed blocks (`full`) only what they hand on is kept, and in their backward all of their own.
    """
    scale = value_bytes(workload) / PRECISION_BYTES[workload.model.traced_precision]
    shape = {"b": samples, "s": workload.sequence_length or 1}
    before = worst = 0.0
    for layer, after in zip(workload.model.layers, [*workload.model.layers[1:], None], strict=True):
        kept = sum(each.size_bytes.at(**shape) for each in layer.buffers if _is_kept(each))
        stays = kept
        if layer.block and plan.recompute == "full":
            output = handed_on(layer.buffers)
            stays = output.size_bytes.at(**shape) if output is not None and _is_kept(output) else 0
        following = layer if layer.repeats > 1 else after  # before the last repetition comes another
        made = max(_made_bytes(layer, each, shape) for each in (following, after))
        worst = max(worst, before + (layer.repeats - 1) * stays + kept + made)
        before += layer.repeats * stays
    return scale * worst


def _is_kept(buffer: Buffer) -> bool:
    return buffer.born.phase == "f" and buffer.freed.phase == "b"


def _made_bytes(layer: Layer, following: Layer | None, shape: dict[str, int]) -> float:
    """Return the most that a layer's backward makes for itself, beside the gradient of its output, at one time."""
    given = handed_back(following.buffers) if following is not None else None
    own = [each for each in layer.buffers if each.born.phase == "b"]
    sizes = {id(each): each.size_bytes.at(**shape) for each in own}
    events = [(each.born.position, sizes[id(each)]) for each in own]
    events += [(each.freed.position, -sizes[id(each)]) for each in own if each.freed.layer_offset == 0]
    held = accumulate(size for _, size in sorted(events, key=lambda event: (event[0], event[1] < 0)))
    return max(held, default=0) + (given.size_bytes.at(**shape) if given is not None else 0)


def _input_bytes(workload: Workload, samples: int) -> float:
    source = workload.model.input
    if isinstance(source, ImageInput):
        return float(samples * (value_bytes(workload) * int(np.prod(source.shape)) + 8))
    return float(samples * 16 * (workload.sequence_length or 1))


# Time ----------------------------------------------------------------------------------------------------------------


def owner_times(cluster: Cluster, workload: Workload, plan: Plan, policies: Policies) -> shard_sizing.OwnerTimes:
    """Return what pushing, updating and publishing all parameters takes on every rank, in a whole step."""
    elements, rounds = workload.model.elements, 1
    if policies.gradient_sync == "micro-batch":
        rounds = plan.micro_batches
    size = float(elements * value_bytes(workload))
    gathers = {"replicated": 1, "gathered": rounds, "sharded": 2 * rounds}[policies.parameters]
    out, come = rank_rates(cluster.wiring, tuple(device.host for device in cluster.devices[: policies.ranks]))
    types = [cluster.type_of(rank) for rank in range(policies.ranks)]
    update_s = {id(device): elements * _update_element_s(device, workload, policies.ranks) for device in types}
    return shard_sizing.OwnerTimes(
        push_out_s=tuple(rounds * size / rate for rate in out),
        push_in_s=tuple(rounds * size / rate for rate in come),
        update_s=tuple(update_s[id(device)] for device in types),
        publish_out_s=tuple(gathers * size / rate for rate in out),
        publish_in_s=tuple(gathers * size / rate for rate in come),
    )


def _update_element_s(device: DeviceType, workload: Workload, ranks: int) -> float:
    """Return the optimizer's time for an element where shards are about even: measured, else by memory bandwidth."""
    optimizer = workload.optimizer
    implementation = implementation_on(device.kind, workload.optimizer_implementation)
    default = implementation == implementation_on(device.kind, "default")
    cost = device.optimizers.get(optimizer if default else f"{optimizer} {implementation}")
    if cost is not None:
        elements = max(1.0, workload.model.elements / ranks)
        return cost.elements_s.at(elements) / elements
    values = optimizer_moved_values(optimizer, implementation=implementation, weight_decay=workload.weight_decay)
    return values * master_bytes(workload) / device.memory_bandwidth_bytes_per_s


@lru_cache(maxsize=16)
def rank_rates(wiring: Wiring, hosts: tuple[str, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the rates (bytes/s) at which each rank sends to all others alike, and receives; `hosts`: of every rank.

    No more than its own links carry, and to other hosts no more than its part of each link on the way to the next one,
    which the ranks of its host share. Assumes that links further on, which hosts share, are as wide as theirs together.
    """
    forth = _rates(wiring.source, wiring.target, wiring, hosts)
    back = _rates(wiring.target, wiring.source, wiring, hosts)
    return tuple(forth.tolist()), tuple(back.tolist())


def _rates(source: Ints, target: Ints, wiring: Wiring, hosts: Sequence[str]) -> Floats:
    ranks = len(hosts)
    own: Floats = np.bincount(source, wiring.bandwidth_bytes_per_s, minlength=wiring.nodes)[:ranks].astype(np.float64)
    places = {host: [rank for rank in range(ranks) if hosts[rank] == host] for host in dict.fromkeys(hosts)}
    if len(places) == 1:
        return own if ranks > 1 else np.ones(1)
    from scipy.sparse import csr_array  # here: `import gssim` must stay quick

    back = csr_array((np.ones(wiring.links), (target, source)), shape=(wiring.nodes, wiring.nodes))
    ends = zip(source.tolist(), target.tolist(), strict=True)
    links = dict(zip(ends, wiring.bandwidth_bytes_per_s.tolist(), strict=True))
    rates = own.copy()
    names = list(places)
    for host, following in zip(names, [*names[1:], names[0]], strict=True):
        members = places[host]
        away = (ranks - len(members)) / (ranks - 1)  # of what each sends
        ways = _ways(back, members, places[following][0])
        users = Counter(link for way in ways for link in way)
        for rank, way in zip(members, ways, strict=True):
            rates[rank] = min([own[rank], *(links[link] / users[link] / away for link in way)])
    return rates


def _ways(back: Any, members: Sequence[int], end: int) -> list[list[tuple[int, int]]]:
    """Return the links of each member's shortest way to `end`; `back`: which nodes have a link from which."""
    from scipy.sparse.csgraph import breadth_first_order

    following = breadth_first_order(back, end, return_predecessors=True)[1].tolist()
    ways = []
    for member in members:
        way, node = [], member
        while node != end and following[node] >= 0:
            way.append((node, following[node]))
            node = following[node]
        ways.append(way)
    return ways
