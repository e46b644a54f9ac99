"""Shard shares by the policies `memory` and `cost`: from each owner's memory budget, update rate and link rates.

Like `sample_cost_s`, this only splits the work, from information that both executors have when they load a scenario. It
does not predict a step or its memory. The density of thresholded pushes is not known then, so messages count as dense.

In a pipeline, the ranks of each stage share the state of its layers, and each keeps the activations of as many
micro-batches as its schedule has in flight; the messages between stages are not counted.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from gssim.cluster import Cluster, DeviceType
from gssim.cluster.topology import Wiring
from gssim.errors import UserError
from gssim.plan import Plan, Policies, rebalancing, resolved_push, shard_sizing
from gssim.plan.pipeline_schedule import schedule
from gssim.scenario.device_rates import has_master_copy, master_bytes, measured_optimizer, value_bytes
from gssim.scenario.stages import schedule_of
from gssim.units import PRECISION_BYTES, Floats, Ints, human_bytes
from gssim.workload import (
    Buffer,
    ImageInput,
    Layer,
    LayerInstance,
    Workload,
    implementation_on,
    layer_input_gradient,
    layer_output,
    optimizer_moved_bytes,
    optimizer_state_bytes,
    passed_bytes,
    state_element_bytes,
)
from gssim.workload.optimizers import all_matrices
from gssim.workload.quantized import frozen_bytes

USABLE_RATIO = 0.92
"""Usable fraction of a device's memory; the rest is reserved for temporaries and fragmentation (assumed)."""


@dataclass(frozen=True)
class Owners:
    """Ranks that share the sharded state of a part of the model: all ranks, or those at one place of a pipeline."""

    ranks: tuple[int, ...]
    workload: Workload
    """The workload, with only the layers of that part."""
    in_flight: float = 1.0
    """Number of micro-batches whose activations of these layers are kept at once."""


def all_owners(workload: Workload, policies: Policies) -> Owners:
    """Return the owners of a plan without pipeline stages: all ranks."""
    return Owners(tuple(range(policies.ranks)), workload)


def owners_of_stages(
    workload: Workload, plan: Plan, policies: Policies, stages: Sequence[Sequence[LayerInstance]]
) -> list[Owners]:
    """Return the owners at each place of a pipeline; `stages`: the layers of each stage.

    Raises UserError if the plan's schedule does not exist for its numbers of stages and micro-batches.
    """
    ranks, owners = policies.pp, []
    try:
        actions = schedule(schedule_of(plan, ranks), ranks=ranks, stages=len(stages), micro_batches=plan.micro_batches)
    except ValueError as error:
        raise UserError(f"plan.schedule: {error}") from None
    for place, own in enumerate(actions):
        held = range(place, len(stages), ranks)
        layers = tuple(
            replace(each.layer, name=name, modules=(name,) if each.layer.modules else ())
            for stage in held
            for each in stages[stage]
            for name in (f"{stage}.{each.module}",)  # several stages may run the same layer
        )
        ends = "weight" if any(action.kind == "weight" for action in own) else "backward"
        under_way = accumulate({"forward": 1, ends: -1}.get(action.kind, 0) for action in own)
        owners.append(
            Owners(
                tuple(rank for rank in range(policies.ranks) if policies.mesh.place(rank).pp == place),
                replace(workload, model=replace(workload.model, layers=layers)),
                max(under_way) / len(held),
            )
        )
    return owners


def owned_shares(
    cluster: Cluster, owners: Owners, plan: Plan, policies: Policies, batch_sizes: Sequence[int]
) -> tuple[float, ...]:
    """Return each owner's share of the sharded state by the plan's policy, `memory` or `cost`.

    Raises UserError, naming the device and the excess in one line, if the state does not fit.
    """
    budget = _memory_budget(cluster, owners, plan, policies, batch_sizes)
    try:
        if plan.shares.shards == "memory":
            return shard_sizing.memory_shares(
                capacity_bytes=budget.capacity_bytes, held_bytes=budget.held_bytes, whole_bytes=budget.whole_bytes
            )
        excess, rank = max((-room, rank) for rank, room in enumerate(budget.room_bytes))
        if excess > 0:
            raise shard_sizing.InfeasibleError(rank, excess)
        return shard_sizing.cost_shares(owner_times(cluster, owners, plan, policies), most=budget.most_shares)
    except shard_sizing.InfeasibleError as error:
        rank = error.rank if error.rank is not None else budget.room_bytes.index(min(budget.room_bytes))
        gathered = "" if policies.parameters == "sharded" else ", or method 'gs_z3'"
        raise UserError(
            f"plan.shares.shards = '{plan.shares.shards}': device '{cluster.devices[owners.ranks[rank]].name}' "
            f"({USABLE_RATIO:.0%} of its memory) {budget.lack(error.rank)}; fewer of the samples (plan.shares.batch), "
            f"more plan.micro_batches, plan.recompute{gathered} need less"
        ) from None


@dataclass(frozen=True)
class _MemoryBudget:
    """Memory of each owner, and the sharded state that all of them are to hold."""

    capacity_bytes: list[float]
    """Each owner's usable memory."""
    held_bytes: list[float]
    """Each owner's memory without any shard."""
    whole_bytes: float

    @cached_property
    def room_bytes(self) -> list[float]:
        """Each owner's room for a shard; negative where it holds too much without any."""
        return [has - held for has, held in zip(self.capacity_bytes, self.held_bytes, strict=True)]

    @property
    def most_shares(self) -> tuple[float, ...]:
        """The largest share for which each owner has room."""
        return tuple(room / self.whole_bytes for room in self.room_bytes)

    def lack(self, rank: int | None) -> str:
        """Return a text on the memory that the owner `rank` lacks; None: that all owners together lack."""
        if rank is not None:
            return f"must hold {human_bytes(-self.room_bytes[rank])} more than it may, without any shard"
        return (
            f"has the least room, {human_bytes(min(self.room_bytes))}, and all together lack "
            f"{human_bytes(self.whole_bytes - sum(self.room_bytes))} of the {human_bytes(self.whole_bytes)} of sharded "
            "state"
        )


def _memory_budget(
    cluster: Cluster, owners: Owners, plan: Plan, policies: Policies, batch_sizes: Sequence[int]
) -> _MemoryBudget:
    """Return the memory of the owners; `batch_sizes`: of all ranks."""
    workload, in_flight = owners.workload, owners.in_flight
    kinds = [(cluster.devices[rank].type, batch_sizes[rank]) for rank in owners.ranks]
    fixed = {
        (name, n): held_bytes(cluster.device_types[name], workload, plan, policies, samples=n, in_flight=in_flight)
        for name, n in set(kinds)
    }
    capacity = [USABLE_RATIO * cluster.device_types[name].memory_bytes for name, _ in kinds]
    return _MemoryBudget(capacity, [fixed[kind] for kind in kinds], owned_bytes(workload, plan, policies))


def sample_room(
    cluster: Cluster, workload: Workload, plan: Plan, policies: Policies, shard_shares: Sequence[float]
) -> tuple[int, ...]:
    """Return for how many samples each rank has memory beside its shard, at most the global batch."""
    total, whole = workload.global_batch_size, owned_bytes(workload, plan, policies)
    most_samples: dict[tuple[str, float], int] = {}
    kinds = [(cluster.devices[rank].type, share) for rank, share in enumerate(shard_shares)]
    for name, share in set(kinds):
        device = cluster.device_types[name]
        owned = whole * (1.0 if policies.optimizer_state == "replicated" else share)
        room = USABLE_RATIO * device.memory_bytes - owned

        def too_many(samples: int, device: DeviceType = device, room: float = room) -> bool:
            return held_bytes(device, workload, plan, policies, samples=samples) > room

        most_samples[name, share] = bisect_left(range(total + 1), True, lo=1, key=too_many) - 1
    return tuple(most_samples[kind] for kind in kinds)


def better_shard_shares(
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
    """Return better shard shares for the rest of a run, or None: `rebalancing.worth_moving` with this cluster's rates.

    `owned`: the present shares. `update_s`: each rank's measured time to update all parameters; None if it owns
    nothing. `steps`: number of remaining steps.
    """
    owners = all_owners(workload, policies)
    times = owner_times(cluster, owners, plan, policies)
    measured = tuple(known if seen is None else seen for seen, known in zip(update_s, times.update_s, strict=True))
    most = _memory_budget(cluster, owners, plan, policies, batch_sizes).most_shares
    outgoing, incoming = _rates_of(cluster, owners)
    master = master_bytes(workload)
    state_bytes = _state_element_bytes(workload) + has_master_copy(workload) * master
    moving = [[state_bytes * workload.model.elements / rate for rate in rates] for rates in (outgoing, incoming)]
    return rebalancing.worth_moving(
        replace(times, update_s=measured),
        owned,
        most=tuple(map(max, owned, most)),
        moving=(moving[0], moving[1]),
        steps=steps,
        settings=plan.shares.replanning,
    )


# Memory --------------------------------------------------------------------------------------------------------------


def held_bytes(
    device: DeviceType, workload: Workload, plan: Plan, policies: Policies, *, samples: int, in_flight: float = 1.0
) -> float:
    """Return a rank's memory in its backward without its shard, with two gradient buckets in flight, in bytes.

    It consists of replicated parameters, the input of `samples`, activations of `in_flight` micro-batches, residuals of
    all gradients, and whole gradients if micro-batches accumulate on the rank.
    """
    model, value = workload.model, value_bytes(workload)
    whole = model.elements * value
    micro_batch = -(-samples // plan.micro_batches)
    gradients = min(2 * plan.bucket_bytes, whole)
    if plan.micro_batches > 1 and policies.gradient_sync == "step":
        gradients = whole
    residuals = model.elements * _residual_bytes(workload, plan)
    replica = whole if policies.parameters == "replicated" else 0
    if policies.parameters == "replicated" or policies.gradients == "push":  # every rank holds what is frozen
        replica += sum(
            layer.repeats * sum(frozen_bytes(layer, workload.frozen_precision, value_bytes=value))
            for layer in model.layers
        )
    kept = activation_bytes(workload, plan, samples=micro_batch, in_flight=in_flight)
    activations = kept / policies.cp  # a rank has only a part of each sequence
    source = model.input
    if isinstance(source, ImageInput):
        input_bytes = float(samples * (value * int(np.prod(source.shape)) + 8))
    else:
        input_bytes = float(samples * 16 * (workload.sequence_length or 1) / policies.cp)
    fixed = device.workspace_bytes + device.context_bytes + replica + sum(model.buffer_sizes(value))
    return fixed + gradients + residuals + (activations + input_bytes)


def owned_bytes(workload: Workload, plan: Plan, policies: Policies) -> float:
    """Return the bytes of the whole sharded state: optimizer state, gradients, and a master copy or the parameters."""
    master, model = master_bytes(workload), workload.model
    matrices = all_matrices(model.layers) if workload.optimizer == "muon" else []
    state_bytes = optimizer_state_bytes(
        workload.optimizer, elements=model.elements, tensors=len(matrices), value_bytes=master, matrices=matrices
    )
    each = state_bytes / max(1, model.elements) if workload.optimizer == "muon" else _state_element_bytes(workload)
    each += master
    each -= _residual_bytes(workload, plan)  # an owner keeps no residual for its own shard
    each += master if has_master_copy(workload) else 0
    each += value_bytes(workload) if policies.parameters != "replicated" else 0
    return max(1.0, float(each * workload.model.elements))


def _state_element_bytes(workload: Workload) -> float:
    """Return the bytes of optimizer state per element; for Muon, of an element of a matrix."""
    master, precision = master_bytes(workload), workload.optimizer_state_precision
    return state_element_bytes(workload.optimizer, value_bytes=master, precision=precision)


def _residual_bytes(workload: Workload, plan: Plan) -> int:
    push = resolved_push(plan.push, sgd=workload.optimizer.startswith("sgd"))
    return PRECISION_BYTES[push.error_feedback_precision] if push.error_feedback else 0


def activation_bytes(workload: Workload, plan: Plan, *, samples: int, in_flight: float = 1.0) -> float:
    """Return the activation memory of `samples` at the worst layer of the backward: of earlier layers and its own.

    `in_flight`: number of micro-batches in flight; all layers keep the activations of the others meanwhile. A layer
    keeps its traced buffers that outlive the forward until its backward is done. A checkpointed block (`full`) keeps
    only its output, and during its backward all of its own buffers.
    """
    scale = value_bytes(workload) / PRECISION_BYTES[workload.model.traced_precision]
    shape: dict[str, Any] = {"b": samples, "s": workload.sequence_length or 1, "scale": scale}
    before = worst = 0.0
    for layer, after in zip(workload.model.layers, [*workload.model.layers[1:], None], strict=True):
        kept = sum(each.bytes_at(**shape) for each in layer.buffers if _is_kept(each))
        stays = kept
        if layer.block and plan.recompute == "full":
            output = layer_output(layer.buffers, passed_bytes(layer, layer if layer.repeats > 1 else after))
            stays = output.bytes_at(**shape) if output is not None and _is_kept(output) else 0
        following = layer if layer.repeats > 1 else after  # all repetitions but the last precede another
        made = max(_made_bytes(layer, each, shape) for each in (following, after))
        worst = max(worst, before + (layer.repeats - 1) * stays + kept + made)
        before += layer.repeats * stays
    return worst + (in_flight - 1) * before


def _is_kept(buffer: Buffer) -> bool:
    return buffer.born.phase == "f" and buffer.freed.phase == "b"


def _made_bytes(layer: Layer, following: Layer | None, shape: dict[str, Any]) -> float:
    """Return the peak of the buffers that a layer's backward allocates, including the gradient of its output."""
    given = layer_input_gradient(following.buffers) if following is not None else None
    own = [each for each in layer.buffers if each.born.phase == "b"]
    sizes = {id(each): each.bytes_at(**shape) for each in own}
    events = [(float(each.born.position), sizes[id(each)]) for each in own]
    events += [(each.released_at, -sizes[id(each)]) for each in own if each.freed.layer_offset == 0]
    allocated = accumulate(size for _, size in sorted(events, key=lambda event: (event[0], event[1] < 0)))
    return max(allocated, default=0) + (given.bytes_at(**shape) if given is not None else 0)


# Time ----------------------------------------------------------------------------------------------------------------


def owner_times(cluster: Cluster, owners: Owners, plan: Plan, policies: Policies) -> shard_sizing.OwnerTimes:
    """Return every owner's times to push, update and publish all parameters of its part in a whole step, in seconds."""
    workload = owners.workload
    elements, rounds = workload.model.elements, 1
    if policies.gradient_sync == "micro-batch":
        rounds = plan.micro_batches
    size = float(elements * value_bytes(workload))
    gathers = {"replicated": 1, "gathered": rounds, "sharded": 2 * rounds}[policies.parameters]
    outgoing, incoming = _rates_of(cluster, owners)
    types = [cluster.type_of(rank) for rank in owners.ranks]
    update_s = {id(device): elements * _update_element_s(device, workload, len(types)) for device in types}
    return shard_sizing.OwnerTimes(
        push_out_s=tuple(rounds * size / rate for rate in outgoing),
        push_in_s=tuple(rounds * size / rate for rate in incoming),
        update_s=tuple(update_s[id(device)] for device in types),
        publish_out_s=tuple(gathers * size / rate for rate in outgoing),
        publish_in_s=tuple(gathers * size / rate for rate in incoming),
    )


def _update_element_s(device: DeviceType, workload: Workload, ranks: int) -> float:
    """Return the optimizer's time per element for nearly even shards: measured, else from memory bandwidth."""
    # with Muon shards are refused, but the search computes their sizes before it asks
    optimizer = "adamw" if workload.optimizer == "muon" else workload.optimizer
    implementation = implementation_on(device.kind, workload.optimizer_implementation)
    cost = measured_optimizer(device, optimizer, implementation)
    precision = workload.optimizer_state_precision
    if cost is not None and precision is None:
        elements = max(1.0, workload.model.elements / ranks)
        return cost.elements_s.at(elements) / elements
    of_element = optimizer_moved_bytes(
        optimizer,
        implementation=implementation,
        value_bytes=master_bytes(workload),
        weight_decay=workload.weight_decay,
        precision=precision,
    )
    return of_element / device.memory_bandwidth_bytes_per_s


def _rates_of(cluster: Cluster, owners: Owners) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return rank_rates(cluster.wiring, owners.ranks, tuple(cluster.devices[rank].host for rank in owners.ranks))


@lru_cache(maxsize=16)
def rank_rates(
    wiring: Wiring, ranks: tuple[int, ...], hosts: tuple[str, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the rates (bytes/s) at which each of `ranks` sends evenly to all others, and receives; `hosts`: their
    hosts.

    A rank's rate is limited by its own links. Towards other hosts it is also limited by its part of each link on the
    path to the next host, which it shares with the ranks of its host. Assumes that links farther on, which hosts share,
    are as wide as the links of these hosts together.
    """
    outgoing = _rates(wiring.source, wiring.target, wiring, ranks, hosts)
    incoming = _rates(wiring.target, wiring.source, wiring, ranks, hosts)
    return tuple(outgoing.tolist()), tuple(incoming.tolist())


def _rates(source: Ints, target: Ints, wiring: Wiring, ranks: Sequence[int], hosts: Sequence[str]) -> Floats:
    every = np.bincount(source, wiring.bandwidth_bytes_per_s, minlength=wiring.nodes)
    own: Floats = every[np.array(ranks)].astype(np.float64)
    places = {host: [place for place, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)}
    if len(places) == 1:
        return own if len(ranks) > 1 else np.ones(1)
    from scipy.sparse import csr_array  # lazy: keeps `import gssim` fast

    back = csr_array((np.ones(wiring.links), (target, source)), shape=(wiring.nodes, wiring.nodes))
    ends = zip(source.tolist(), target.tolist(), strict=True)
    links = dict(zip(ends, wiring.bandwidth_bytes_per_s.tolist(), strict=True))
    rates = own.copy()
    names = list(places)
    for host, following in zip(names, [*names[1:], names[0]], strict=True):
        members = places[host]
        away = (len(ranks) - len(members)) / (len(ranks) - 1)  # fraction of each rank's traffic
        paths = _paths(back, [ranks[place] for place in members], ranks[places[following][0]])
        users = Counter(link for path in paths for link in path)
        for place, path in zip(members, paths, strict=True):
            rates[place] = min([own[place], *(links[link] / users[link] / away for link in path)])
    return rates


def _paths(back: Any, members: Sequence[int], end: int) -> list[list[tuple[int, int]]]:
    """Return the links of each member's shortest path to `end`; `back`: adjacency matrix of the reversed links."""
    from scipy.sparse.csgraph import breadth_first_order

    following = breadth_first_order(back, end, return_predecessors=True)[1].tolist()
    paths = []
    for member in members:
        path, node = [], member
        while node != end and following[node] >= 0:
            path.append((node, following[node]))
            node = following[node]
        paths.append(path)
    return paths
