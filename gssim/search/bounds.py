"""What no plan can be better than: lower bounds of a step's time, of what it costs, and of the memory that it needs.

[Note: bounds] A rank computes each of its micro-batches through each of its layers, alone at the device's own pace: all
else (communication, waiting for others, the update, slow-downs by neighbours) only comes on top. As its largest
micro-batch goes forward and backward it holds what that keeps, and what it always holds. What is not known to be a
bound is left out.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, prod
from typing import TypeVar, cast

from gssim import shares
from gssim.cluster import DeviceType
from gssim.costs import layer_time_s
from gssim.machine.machine import SMALLEST_JITTER
from gssim.memory import Timeline, activation_timeline, as_traced, input_bytes
from gssim.optimizers import optimizer_state_bytes
from gssim.plan import Plan
from gssim.policies import Policies, resolve
from gssim.recompute import recomputed_buffers
from gssim.scenario import Scenario, master_bytes, value_bytes
from gssim.scenario.stages import why_no_chain
from gssim.search.borders import entry_rates
from gssim.slices import held_model
from gssim.space import Objective
from gssim.units import PRECISION_BYTES, UserError
from gssim.workload import Layer, LayerInstance, unrolled

T = TypeVar("T")
LARGEST_REPLAYED = 8
"""Samples up to which activations are followed buffer by buffer, at powers of two."""


@dataclass(frozen=True)
class Bound:
    """What a plan has at least."""

    time_s: float
    objective: float
    """In the unit of what is searched for: seconds, USD or J a step."""
    full_ratio: float
    """What is taken of the memory of the device that is fullest."""


@dataclass(frozen=True, eq=False)
class Part:
    """What a rank runs of the model."""

    key: Hashable
    layers: tuple[LayerInstance, ...]
    wholes: tuple[Layer | None, ...]
    """Of each layer that is a slice: what it is a slice of."""
    ratio: float = 1.0
    """Of these layers, no less than this is run and held."""

    @cached_property
    def elements(self) -> float:
        """Parameters."""
        return self.ratio * sum(instance.layer.elements for instance in self.layers)


class Bounds:
    """Lower bounds for plans of one workload on one cluster; what many of them have in common is found once."""

    def __init__(self, scenario: Scenario, objective: Objective = "step-time") -> None:
        self.scenario, self.objective = scenario, objective
        self.model, self.workload = scenario.workload.model, scenario.workload
        self.names = [device.type for device in scenario.cluster.devices]
        self.hosts = [device.host for device in scenario.cluster.devices]
        self.types = [scenario.cluster.device_types[name] for name in self.names]
        self.value, self.master = value_bytes(scenario.workload), master_bytes(scenario.workload)
        self.layers = unrolled(scenario.workload.model)
        self.whole = Part("whole", self.layers, (None,) * len(self.layers))
        self._found: dict[Hashable, object] = {}

    def of(self, plan: Plan) -> Bound:
        """Return the bounds of a plan; raise UserError where it can be seen that it cannot run."""
        policies = self.policies(plan)
        sizes = self.batch_sizes(plan, policies)
        by_rank = tuple(sizes[policies.data_rank(rank)] for rank in range(policies.ranks))
        busy_s = self._busy_s(plan, policies, by_rank)
        time_s = max(*busy_s, self._bubble_s(plan, policies, busy_s), self._gathering_s(plan, policies))
        return Bound(time_s, self._objective(time_s, busy_s), self._full_ratio(plan, policies, by_rank))

    def policies(self, plan: Plan) -> Policies:
        """Return the plan with every policy resolved; raise UserError where it needs more devices than there are."""
        found = resolve(plan, devices=len(self.names), hosts=self.hosts, backend=self.scenario.cluster.backend)
        if found.ranks > len(self.names):
            raise UserError(f"needs {found.ranks} ranks, but the cluster has {len(self.names)} devices")
        return found

    def batch_sizes(self, plan: Plan, policies: Policies) -> tuple[int, ...]:
        """Return the samples of each part of the batch."""
        rule, total = plan.shares.batch, self.workload.global_batch_size
        if not isinstance(rule, str):
            return tuple(round(share * total) for share in rule)
        key = ("sizes", rule, policies.mesh, policies.partition)
        return self._once(key, lambda: self._with(plan).data_batch_sizes)

    def _with(self, plan: Plan) -> Scenario:
        return replace(self.scenario, plan=plan)

    def _part(self, plan: Plan, policies: Policies, rank: int) -> Part:
        """Return what a rank runs; raise UserError where the model cannot be cut so."""
        whole = self.whole.wholes
        if policies.pp > 1:
            place = policies.mesh.place(rank).pp
            stages = self._stages(plan, policies)[place :: policies.pp]
            held = ("stages", tuple((stage[0].index, len(stage)) for stage in stages), policies.tp)
            layers = tuple(instance for stage in stages for instance in stage)
            return self._once(held, lambda: Part(held, layers, whole[: len(layers)], 1 / policies.tp))
        if policies.tp == 1:
            return self.whole
        parts = self._slice_shares(plan, policies)
        position = rank % policies.tp if policies.slices == "shares" else 0
        key = ("slice", parts, position)
        return self._once(key, lambda: self._sliced(key, parts, position))

    def _slice_shares(self, plan: Plan, policies: Policies) -> tuple[float, ...]:
        if policies.slices != "shares":
            return shares.even(policies.tp)
        key = ("slice shares", plan.shares.shards, policies.tp)
        return self._once(key, lambda: self._with(plan).slice_shares)

    def _sliced(self, key: Hashable, parts: Sequence[float], position: int) -> Part:
        if not self.model.sliced_layers:
            raise UserError("the model does not say how its blocks are cut")
        if any(layer.units and layer.units < len(parts) for layer in self.model.sliced_layers):
            raise UserError("there are fewer units than ranks")
        layers = unrolled(held_model(self.model, parts, position))
        return Part(key, layers, tuple(instance.layer for instance in self.layers))

    def _stages(self, plan: Plan, policies: Policies) -> tuple[tuple[LayerInstance, ...], ...]:
        sizes = self.batch_sizes(plan, policies)
        key = ("stages", plan.stages, plan.schedule, plan.micro_batches, policies.mesh, sizes)

        def cut() -> tuple[tuple[tuple[LayerInstance, ...], ...], str | None]:
            stages = self._with(plan).stages
            return stages, why_no_chain(stages, value_bytes=PRECISION_BYTES[self.model.traced_precision])

        stages, reason = self._once(key, cut)
        if reason:
            raise UserError(f"the model is no chain that can be cut: {reason}")
        return stages

    # Time ------------------------------------------------------------------------------------------------------------

    def _busy_s(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> list[float]:
        """Return how long each rank computes at least; see [Note: bounds]."""
        if policies.partition == "weight-gradient" or plan.shares.replan:
            return [0.0] * policies.ranks
        found: dict[Hashable, float] = {}
        busy_s = []
        for rank, samples in enumerate(sizes):
            part = self._part(plan, policies, rank)
            key = (part.key, self.names[rank], samples)
            if key not in found:
                parts = shares.split(samples, shares.even(plan.micro_batches))
                found[key] = sum(
                    parts.count(size) * self.micro_batch_s(rank, size, plan.recompute, part)
                    for size in set(parts)
                    if size
                )
            busy_s.append(found[key])
        return busy_s

    def micro_batch_s(self, rank: int, samples: int, recompute: str, part: Part | None = None) -> float:
        """Return the time of one micro-batch, forward and backward, through (a part of) the model on a rank's device.

        By chance, devices that vary may be faster than they are, but no more than the machine lets them.
        """
        run = part or self.whole
        device = self.types[rank]
        chance = SMALLEST_JITTER if device.step_jitter_ratio or device.task_jitter_ratio else 1.0
        return (
            chance
            * run.ratio
            * self._once(
                ("time", run.key, self.names[rank], samples, recompute),
                lambda: sum(
                    self._layer_s(device, instance.layer, whole, samples, recompute)
                    for instance, whole in zip(run.layers, run.wholes, strict=True)
                ),
            )
        )

    def _layer_s(self, device: DeviceType, layer: Layer, whole: Layer | None, samples: int, recompute: str) -> float:
        """Return the time of a layer's forward and backward, and of its forward again where it is checkpointed."""

        def found() -> float:
            phases = ["f", "b", *(["r"] if recompute != "none" and layer.block else [])]
            selective = recompute == "selective"
            cost = partial(layer_time_s, device, self.workload, layer, batch_size=samples, whole=whole)
            return sum(cost(phase=phase, selective=selective) for phase in phases)

        return self._once(("layer", id(layer), id(device), samples, recompute), found)

    def _bubble_s(self, plan: Plan, policies: Policies, busy_s: Sequence[float]) -> float:
        """Return how long a pipeline of one stage a rank takes: what comes before a stage can begin, and after it ends.

        A stage begins when its first micro-batch has been forward through those before it, and these end when its last
        has been backward through them: all it does itself, and one micro-batch of all before it.
        """
        mesh = policies.mesh
        if mesh.pp == 1 or len(self._stages(plan, policies)) > mesh.pp:
            return 0.0
        found = 0.0
        stride = mesh.ranks // mesh.pp
        for first in range(stride):
            column = busy_s[first::stride]
            found = max([found, *(own + sum(column[:i]) / plan.micro_batches for i, own in enumerate(column))])
        return found

    def _gathering_s(self, plan: Plan, policies: Policies) -> float:
        """Return how long parameters take at least to get into the hosts that do not own them.

        Of X bytes a step a host that owns a part o must receive (1 - o) X. Whatever parts hosts own, with at most R
        bytes/s into each, the slowest of H hosts takes no less than (H - 1) X / sum of R.
        """
        cost = self.scenario.cluster.backend_cost
        by_curve = cost is not None and cost.measured_s
        if policies.tp > 1 or policies.pp > 1 or policies.data_ranks == 1 or by_curve or self.scenario.network:
            return 0.0
        if policies.push_axis != "dp_shard" or (policies.parameters != "replicated" and policies.dp_replicate > 1):
            return 0.0
        rates = self._once(("entries", policies.ranks), lambda: self._entry_rates(policies.ranks))
        if not rates or plan.publish.threshold is not None:
            return 0.0
        gathered = self.whole.elements * self.value
        if policies.parameters != "replicated" and policies.gradient_sync == "micro-batch":
            again = self._blocks_elements() * self.value if policies.parameters == "sharded" else 0.0
            gathered = plan.micro_batches * (gathered + again)
        return (len(rates) - 1) * gathered / sum(rates)

    def _entry_rates(self, ranks: int) -> list[float]:
        return list(entry_rates(self.scenario.cluster.wiring, self.hosts[:ranks]).values())

    def _blocks_elements(self) -> float:
        """Return the parameters that are gathered for the backward too: those of all blocks but the last."""
        blocks = [instance.layer.elements for instance in self.layers if instance.layer.block]
        return float(sum(blocks[:-1]))

    def _objective(self, time_s: float, busy_s: Sequence[float]) -> float:
        """Return the least of what is searched for, where a step takes so long and ranks compute so long."""
        used = self.types[: len(busy_s)]
        if self.objective == "cost":
            return sum(device.price_usd_per_h or 0.0 for device in used) * time_s / 3600
        if self.objective == "energy":
            idle_w = [min(device.idle_power_w or 0.0, device.busy_power_w or 0.0) for device in used]
            more_w = [max(0.0, (device.busy_power_w or 0.0) - idle) for device, idle in zip(used, idle_w, strict=True)]
            return sum(idle_w) * time_s + sum(w * s for w, s in zip(more_w, busy_s, strict=True))
        return time_s

    # Memory ----------------------------------------------------------------------------------------------------------

    def _full_ratio(self, plan: Plan, policies: Policies, sizes: Sequence[int]) -> float:
        """Return how full the fullest device is at least."""
        kinds = {(self.names[rank], n, self._owned(plan, policies, rank)): rank for rank, n in enumerate(sizes)}
        if policies.pp > 1 or policies.slices == "shares":
            kinds = {(self.names[rank], n, float(rank)): rank for rank, n in enumerate(sizes)}
        return max(
            self.held_bytes(plan, policies, rank, samples=n) / self.types[rank].memory_bytes
            for (_, n, _), rank in kinds.items()
        )

    def room(self, plan: Plan, policies: Policies, rank: int, ratio: float) -> int:
        """Return for how many samples a part of a rank's memory has room at most."""
        part, owned = self._part(plan, policies, rank), self._owned(plan, policies, rank)
        memory = (policies.parameters, policies.gradients, policies.gradient_sync, part.key, owned)
        key = ("room", self.names[rank], memory, plan.micro_batches, plan.recompute, ratio)
        room = ratio * self.types[rank].memory_bytes

        def too_many(samples: int) -> bool:
            return self.held_bytes(plan, policies, rank, samples=samples) > room

        total = self.workload.global_batch_size
        return self._once(key, lambda: bisect_left(range(total + 1), True, lo=1, key=too_many) - 1)

    def held_bytes(self, plan: Plan, policies: Policies, rank: int, *, samples: int) -> float:
        """Return what a rank holds at least, of its whole device, with so many samples."""
        device = self.types[rank]
        always = device.context_bytes + device.workspace_bytes
        if policies.partition == "weight-gradient" or not samples:
            return always
        part, owned = self._part(plan, policies, rank), self._owned(plan, policies, rank)
        largest, smallest = -(-samples // plan.micro_batches), samples // plan.micro_batches
        peak = self._activations(plan, policies, part, largest)
        if plan.micro_batches > 1:  # a later one finds gradients of those before it
            gradients = self._gradients(policies, part, owned)
            peak = max(peak, gradients + self._activations(plan, policies, part, smallest))
        return always + self._kept(policies, part, owned, samples) + peak

    def _kept(self, policies: Policies, part: Part, owned: float, samples: int) -> float:
        """Return what a rank holds all the time: parameters, optimizer states, buckets and its batch."""
        elements, replicated = part.elements, policies.parameters == "replicated"
        kept = elements * self.value if replicated else owned * self.value
        if policies.gradients == "all-reduce":
            kept += elements * self.value
        if replicated and self.master > self.value:
            kept += owned * self.master
        kept += optimizer_state_bytes(self.workload.optimizer, elements=int(owned), tensors=0, value_bytes=self.master)
        if policies.pp > 1:
            return kept
        size, length = samples, self.workload.sequence_length
        return kept + input_bytes(self.model, batch_size=size, sequence_length=length, value_bytes=self.value)

    def _gradients(self, policies: Policies, part: Part, owned: float) -> float:
        """Return what a later micro-batch finds of gradients; all-reduced ones are in buckets, always kept."""
        if policies.gradients == "all-reduce" or policies.pp > 1:
            return 0.0
        if policies.gradient_sync == "step" or policies.gradients == "local":
            return part.elements * self.value
        return owned * self.value

    def _activations(self, plan: Plan, policies: Policies, part: Part, samples: int) -> float:
        """Return the most that a micro-batch's activations and temporaries take, or 0 where that is not known."""
        if not samples or policies.pp > 1:
            return 0.0
        if samples <= 2:
            return self._peak_bytes(part, plan.recompute, samples)
        # what is held at each moment grows linearly with the samples: the most of it lies above its chords, prolonged
        second = min(1 << (samples.bit_length() - 1), LARGEST_REPLAYED)
        first = second // 2
        low, high = (self._peak_bytes(part, plan.recompute, each) for each in (first, second))
        return high + (high - low) / (second - first) * (samples - second)

    def _peak_bytes(self, part: Part, recompute: str, samples: int) -> float:
        return self._once(
            ("activations", part.key, recompute, samples),
            lambda: _peak_bytes(part.layers, self._timeline(part, recompute, samples)),
        )

    def _timeline(self, part: Part, recompute: str, samples: int) -> Timeline:
        lives = as_traced if recompute == "none" else partial(recomputed_buffers, selective=recompute == "selective")
        return activation_timeline(
            part.layers,
            batch_size=samples,
            sequence_length=self.workload.sequence_length or 1,
            scale=self.value / PRECISION_BYTES[self.model.traced_precision],
            lives=lives,
        )

    def _owned(self, plan: Plan, policies: Policies, rank: int) -> float:
        """Return how many elements a rank updates at least."""
        if policies.optimizer_state == "replicated":
            return self._part(plan, policies, rank).elements
        if policies.tp > 1 or policies.pp > 1 or policies.partition == "weight-gradient":
            return 0.0
        if policies.gradients == "all-reduce":
            return self._once(("dealt", policies.ranks), lambda: self._dealt(policies.ranks))[rank]
        if policies.gradients == "reduce-scatter":
            chunks = self._once(("chunks", policies.dp_shard), lambda: self._chunks(policies.dp_shard))
            return chunks[rank % policies.dp_shard]
        rule = plan.shares.shards
        if policies.push_axis != "dp_shard" or rule in ("memory", "cost"):  # as much as suits it
            return 0.0
        return self._once(("shards", rule, policies.mesh), lambda: self._pushed_to(plan))[rank]

    def _pushed_to(self, plan: Plan) -> list[float]:
        """Return the elements of each owner's share, less what is lost as shares are rounded.

        They are in every bucket, of which there is one for each tensor at most.
        """
        tensors = sum(len(instance.layer.parameters) for instance in self.layers)
        return [max(0.0, share * self.whole.elements - tensors) for share in self._with(plan).shard_shares]

    def _dealt(self, ranks: int) -> list[float]:
        """Return the elements of the tensors that each rank updates, where whole tensors are dealt out (ZeRO-1)."""
        sizes = [parameter.elements for instance in self.layers for parameter in instance.layer.parameters]
        return [float(sum(sizes[i] for i in own)) for own in shares.greedy(sizes, ranks)]

    def _chunks(self, ranks: int) -> list[float]:
        """Return the elements of each rank's shard, of parameters cut by their first dimension (FSDP2)."""
        found = [0.0] * ranks
        for instance in self.layers:
            for parameter in instance.layer.parameters:
                rows, row = (parameter.shape[0], prod(parameter.shape[1:])) if parameter.shape else (1, 1)
                chunk = ceil(rows / ranks)
                for rank in range(ranks):
                    found[rank] += min(max(rows - rank * chunk, 0), chunk) * row
        return found

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._found:
            self._found[key] = make()
        return cast(T, self._found[key])


def _peak_bytes(layers: Sequence[LayerInstance], timeline: Timeline) -> float:
    """Return the most that is held as layers go forward, then backward in reverse, checkpointed ones forward again."""
    held = peak = 0.0
    places = [(instance.index, "f") for instance in layers]
    places += [(instance.index, phase) for instance in reversed(layers) for phase in ("r", "b")]
    for index, phase in places:
        for event in sorted(timeline.at(index, phase), key=lambda each: (each.position, each.size_bytes < 0)):
            held += event.size_bytes
            peak = max(peak, held)
    return peak
