"""The context that all passes share: the unrolled model, gradient buckets, groups of ranks, and each rank's part."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from operator import attrgetter
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from gssim import collectives
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.execution.cache import NOT_KEPT, Same, Shared
from gssim.memory import Event
from gssim.plan import Action, Division, Policies, Push, assign_buckets, bucket_limits, divide, splitting
from gssim.plan.pipeline_schedule import SPLITTING, schedule
from gssim.program.stage_boundary import Stage
from gssim.program.task import Bucket, MicroBatch, Task
from gssim.scenario import (
    Scenario,
    divided_expert_layers,
    has_master_copy,
    held_experts,
    held_layers,
    held_slice,
    master_bytes,
    reduce_precision,
    routes_parts,
    rows_of_ranks,
    schedule_of,
    value_bytes,
)
from gssim.units import PRECISION_BYTES, Ints, Precision
from gssim.workload import Layer, LayerInstance, Parameter, gradient_order, unrolled
from gssim.workload.gradient_statistics import GradientStatistics
from gssim.workload.optimizers import Matrix, elements_of, matrices_of
from gssim.workload.owned import OwnedLayers, frozen_roles, owned_layers

P = ParamSpec("P")
T = TypeVar("T")


def _once(
    function: Callable[Concatenate["Lowering", P], T], cache_of: Callable[["Lowering"], dict[Hashable, Any]]
) -> Callable[Concatenate["Lowering", P], T]:
    """Return a function of the lowering whose results, by its other arguments, are in one of the lowering's caches."""

    @wraps(function)
    def cached(low: "Lowering", /, *arguments: P.args, **named: P.kwargs) -> T:
        cache, key = cache_of(low), (cached, arguments, *named.items())
        value = cache.get(key, NOT_KEPT)
        if value is NOT_KEPT:
            value = cache[key] = function(low, *arguments, **named)
        found: T = value
        return found

    return cached


def once_a_step(function: Callable[Concatenate["Lowering", P], T]) -> Callable[Concatenate["Lowering", P], T]:
    """Cache a function of the lowering for one step: ranks that call it with equal arguments share the result."""
    return _once(function, attrgetter("step_cache"))


def once_a_run(function: Callable[Concatenate["Lowering", P], T]) -> Callable[Concatenate["Lowering", P], T]:
    """Cache a function of the lowering over all steps: its result depends neither on the step nor on statistics, nor on
    how large thresholds are.
    """
    return _once(function, attrgetter("run_cache"))


def once_for_statistics(function: Callable[Concatenate["Lowering", P], T]) -> Callable[Concatenate["Lowering", P], T]:
    """Cache a function of the lowering over all steps, and all thresholds, under the same gradient statistics."""
    return _once(function, attrgetter("statistics_cache"))


def once_for_densities(function: Callable[Concatenate["Lowering", P], T]) -> Callable[Concatenate["Lowering", P], T]:
    """Cache a function of the lowering over all steps under the same gradient statistics and thresholds."""
    return _once(function, attrgetter("densities_cache"))


class ComputeKind(NamedTuple):
    """Everything that a micro-batch's forward and backward depend on. Equal kinds lower to equal tasks."""

    device_type: str
    batch_size: int
    own_layers: tuple[int, int] | None
    """The layers that the rank owns (half-open range), where layers are assigned to ranks."""
    samples: int
    accumulates: bool
    adds_to_pushed: bool
    sends_gradients: bool
    expert_position: int
    """First expert-parallel position that does the same as the rank's; see `expert_position`."""
    ring_position: int
    """Position of the rank in its attention ring, as blocks of attention differ by position; 0 without a ring."""


@dataclass(frozen=True)
class Lowering:
    """A scenario with the derived values that passes read.

    One lowering serves all ranks that share a part of the model (equal coordinates on the axes pp and tp).
    """

    scenario: Scenario
    statistics: GradientStatistics | None
    step: int
    group: Sequence[int]
    """Ranks that hold this part of the model, each for its own samples or its own part of their sequences."""
    stages: tuple[Stage, ...] = ()
    """Pipeline stages that these ranks hold; empty: the whole model."""
    all_stages: tuple[Stage, ...] = ()
    """All stages of the pipeline."""
    tensor_part: int = 0
    """Index of the tensor slice that these ranks hold: their coordinate on the axis tp."""
    of_experts: bool = False
    """Whether the owners of this lowering are those of divided experts; see `owning`."""
    shared: Shared = field(default_factory=Shared)
    """Cache shared with other steps and other scenarios."""
    slowed: Mapping[int, float] = field(default_factory=dict)
    """Compute and update time of a rank relative to its device type's, by rank; only for ranks slower than that."""
    slowed_steps: Sequence[Mapping[int, float]] = ()
    """`slowed` of each step of a period, where a program covers a whole period; empty: `slowed` holds in all steps."""
    for_memory: bool = False
    """Whether only the memory of tasks counts: pipeline stages then exchange no messages."""

    step_cache: dict[Hashable, Any] = field(default_factory=dict)
    """Values of functions that differ from step to step, by function and arguments."""
    densities_cache: dict[Hashable, Any] = field(default_factory=dict)
    """Values of functions that differ with the statistics or thresholds, by function and arguments."""
    run_cache: dict[Hashable, Any] = field(default_factory=dict)
    """Values of functions that are equal in all steps, by function and arguments; and by statistics, such caches."""

    computed: dict[ComputeKind, Sequence[Task]] = field(default_factory=dict)
    """Forward and backward of micro-batches, equal in all steps."""

    def at_step(self, step: int) -> "Lowering":
        """Return the lowering of another step; only values that are equal in all steps stay cached."""
        other = copy(self)
        slowed = self.slowed_steps[step % len(self.slowed_steps)] if self.slowed_steps else self.slowed
        for name, value in (("step", step), ("step_cache", {}), ("slowed", slowed)):
            object.__setattr__(other, name, value)
        return other

    def under(self, scenario: Scenario, statistics: GradientStatistics | None) -> "Lowering":
        """Return the lowering of a scenario that differs, in what lowering reads, only in thresholds or statistics.

        Cached values that depend on neither are kept.
        """
        other = copy(self)
        for name in ("push", "statistics_cache"):
            other.__dict__.pop(name, None)
        settings: dict[str, Any] = {
            "scenario": scenario,
            "statistics": statistics,
            "step_cache": {},
            "densities_cache": {},
        }
        for name, value in settings.items():
            object.__setattr__(other, name, value)
        return other

    @cached_property
    def statistics_cache(self) -> dict[Hashable, Any]:
        """Values of functions that differ with the statistics, but not with thresholds, by function and arguments."""
        cache: dict[Hashable, Any] = self.run_cache.setdefault(Same(self.statistics), {})
        return cache

    @once_a_step
    def of_stage(self, stage: Stage) -> "Lowering":
        """Return the lowering of one of the stages that are held."""
        return replace(self, stages=(stage,), step_cache={}, densities_cache={}, run_cache={}, computed={})

    @cached_property
    def layers(self) -> tuple[LayerInstance, ...]:
        """Unrolled layers of the model or of the held stages, numbered from 0; of sliced blocks, the held slice."""
        if self.stages:
            return tuple(replace(instance, index=i) for i, instance in enumerate(self._stage_layers))
        if self.scenario.policies.ep > 1:
            return held_experts(self.scenario, 0, self.tensor_part)
        if self.divides_layers:
            return unrolled(held_slice(self.scenario, self.tensor_part))
        return self.whole_layers

    @cached_property
    def part_layers(self) -> tuple[LayerInstance, ...]:
        """Unrolled layers of the model, with only this rank's part of the embedding where tensor ranks divide it."""
        if not self.scenario.plan.embedding_parallel:
            return self.whole_layers
        if routes_parts(self.scenario.workload.model, self.policies):
            return held_experts(self.scenario, 0, self.tensor_part)
        return unrolled(held_slice(self.scenario, self.tensor_part))

    @cached_property
    def whole_expert_layers(self) -> tuple[LayerInstance, ...]:
        """Layers whose experts are divided among ranks, with costs as functions of a rank's experts and rows."""
        model = self.scenario.workload.model
        layers = unrolled(replace(model, layers=divided_expert_layers(model, self.policies)))
        return tuple(each for each in layers if each.layer.experts_per_token)

    @cached_property
    def expert_groups(self) -> tuple[Sequence[int], ...]:
        """Groups of ranks that divide the experts; where tensor ranks hold different experts, all of the stage's."""
        ranks: Sequence[int] = self.group
        if self.policies.etp is not None:
            tensor_ranks = self.policies.tp
            ranks = [rank - self.tensor_part + place for rank in self.group for place in range(tensor_ranks)]
        return tuple(dict.fromkeys(self.policies.mesh.expert_group(rank) for rank in ranks))

    @cached_property
    def expert_replicas(self) -> tuple[Sequence[int], ...]:
        """Groups of ranks that hold the same experts; under HSDP, each group stays within one replica."""
        mesh = self.policies.mesh
        groups = {rank: mesh.expert_replicas(rank) for rank in self.group}
        if self.replicates:
            groups = {
                rank: tuple(each for each in same if mesh.place(each).dp_replicate == mesh.place(rank).dp_replicate)
                for rank, same in groups.items()
            }
        return tuple(dict.fromkeys(groups.values()))

    @cached_property
    def _expert_positions(self) -> tuple[int, ...]:
        """For each expert-parallel position, the first position that does the same at the same times.

        If all receive as many rows, that is the first of all. Otherwise two with as many rows differ all the same: each
        exchange goes by the distance between ranks, so that they meet those with more or fewer rows at other times.
        """
        if self.policies.ep == 1:
            return (0,)
        rows = rows_of_ranks(self.scenario.workload, self.policies)
        return tuple(range(len(rows))) if len(set(rows)) > 1 else (0,) * len(rows)

    def expert_position(self, rank: int) -> int:
        """Return the first expert-parallel position of those that do the same as `rank`'s at the same times."""
        return self._expert_positions[self.policies.mesh.expert_position(rank)]

    @once_a_run
    def _routed_layers(self, position: int) -> OwnedLayers:
        if position == 0:
            return OwnedLayers(self.layers)
        layers = held_experts(self.scenario, position, self.tensor_part)
        if self.stages:
            every = held_layers(layers, self.scenario.stage_ranges)
            held = [instance for stage in self.stages for instance in every[stage.number]]
            layers = tuple(replace(instance, index=i) for i, instance in enumerate(held))
        return OwnedLayers(layers)

    @cached_property
    def expert_buckets(self) -> tuple[Bucket, ...]:
        """Buckets of the gradients of divided experts: one for each tensor, in the order in which they are ready.

        With Megatron-LM's single gradient buffer, all expert gradients are in one second buffer instead. Pushed
        gradients of experts are among `buckets`.
        """
        if self.policies.ep == 1 or self.policies.gradients == "push":
            return ()
        order = [(self.layers[i], self.layers[i].layer.parameters[j]) for i, j in gradient_order(self.layers)]
        members = [member for member in order if member[1].of_experts]
        if self.has_one_gradient_buffer:
            return (Bucket(len(self.buckets), tuple(members)),) if members else ()
        return tuple(Bucket(len(self.buckets) + i, (member,)) for i, member in enumerate(members))

    @cached_property
    def _stage_layers(self) -> tuple[LayerInstance, ...]:
        """Layers of the stages that are held, with the model's own numbers."""
        return tuple(instance for stage in self.stages for instance in stage.layers)

    @property
    def divides_layers(self) -> bool:
        """Whether ranks run layers together: slices of their blocks, or parts of the sequences."""
        return self.scenario.policies.tp > 1 or self.scenario.policies.cp > 1

    def whole_layer(self, instance: LayerInstance) -> Layer | None:
        """Return the layer of the whole model that corresponds to a layer of this lowering, or None if it is the same
        one.

        They differ where a rank runs only a part of the layer, only a part of its backward, or leaves out the sum of a
        tied parameter's gradients; and where the layer has adapters or is frozen.
        """
        divided = self.assigns_layers or self.stages or self.divides_layers or self.policies.ep > 1
        if not (divided or self._layers_without_adapters):
            return None
        return (self._layers_without_adapters or self.whole_layers)[self._index_in_model(instance)].layer

    def role(self, rank: int, instance: LayerInstance) -> str:
        """Return the role in which a rank runs a layer; see [Note: roles] in `gssim.workload.owned`."""
        roles = self.layers_of(rank).roles
        if roles:
            return roles[instance.index]
        return self._frozen_roles[self._index_in_model(instance)] if self._frozen_roles else "whole"

    def _index_in_model(self, instance: LayerInstance) -> int:
        return self._stage_layers[instance.index].index if self.stages else instance.index

    @cached_property
    def _frozen_roles(self) -> tuple[str, ...]:
        return frozen_roles(self.scenario.workload.model)

    @cached_property
    def _layers_without_adapters(self) -> tuple[LayerInstance, ...]:
        """Unrolled layers of the model without adapters and with none frozen, if it has any."""
        model = self.scenario.workload.model
        return unrolled(replace(model, layers=model.whole_layers))

    @cached_property
    def whole_layers(self) -> tuple[LayerInstance, ...]:
        """Unrolled layers of the model on one device."""
        return unrolled(self.scenario.workload.model)

    @cached_property
    def recomputes(self) -> bool:
        """Whether blocks recompute their forward, or its cheap operations, in the backward."""
        return self.scenario.plan.recompute != "none"

    @cached_property
    def schedule(self) -> tuple[tuple[Action, ...], ...]:
        """Schedule of each rank of a pipeline, by its coordinate on the axis pp."""
        plan, ranks = self.scenario.plan, self.scenario.policies.pp
        stages = len(self.all_stages)
        return schedule(
            schedule_of(plan, ranks),
            ranks=ranks,
            stages=stages,
            micro_batches=plan.micro_batches,
            sharded=self.reduces_after_schedule,
            frees_sent=plan.receive_buffers == "in-flight",
            messages=not self.for_memory,
        )

    def position(self, rank: int) -> int:
        """Return the position of a rank in the group."""
        return self._positions[rank]

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.group)}

    @cached_property
    def policies(self) -> Policies:
        """The plan with every policy resolved."""
        return self.scenario.policies

    @cached_property
    def push(self) -> Push:
        """Push settings, with defaults derived from the optimizer filled in."""
        return self.scenario.push

    def shard_position(self, rank: int) -> int:
        """Return the position of a rank among those that share the parameters, on the axes `dp_shard` and `cp`."""
        return self.position(rank) % self.shards

    @cached_property
    def shards(self) -> int:
        """Number of ranks among which parameters are sharded, where they are."""
        return self.policies.shards

    @property
    def replicates(self) -> bool:
        """Whether several replicas hold the sharded parameters, and reduced gradients are all-reduced too (HSDP)."""
        policies = self.policies
        return policies.gradients == "reduce-scatter" and policies.dp_replicate > 1 and not policies.sync_every_steps

    @property
    def synchronizes(self) -> bool:
        """Whether this step ends with a synchronization of the parameters; see `gssim.program.periodic`.

        Where fragments are synchronized, a program covers a whole period, and all periods are equal.
        """
        every = self.policies.sync_every_steps
        return every is not None and (self.policies.in_fragments or (self.step + 1) % every == 0)

    @cached_property
    def overlaps(self) -> bool:
        """Whether collectives run on streams beside the compute; see [Note: streams] in `sharded`."""
        return self.copies_beside and len(self.group) > 1

    @cached_property
    def offload(self) -> str | None:
        """State in the hosts' memory, `plan.offload`, where devices have memory of their own; see `program.offload`."""
        return None if self.device(self.group[0]).kind == "cpu" else self.scenario.plan.offload

    @cached_property
    def copies_beside(self) -> bool:
        """Whether copies between devices and hosts run on streams beside the compute."""
        return self.scenario.plan.overlap and self.scenario.cluster.backend == "nccl"

    def ranks_on_host(self, rank: int) -> int:
        """Return the number of ranks on the host of a rank."""
        return self._ranks_by_host()[self.scenario.cluster.devices[rank].host]

    @once_a_run
    def _ranks_by_host(self) -> Mapping[str, int]:
        return Counter(device.host for device in self.scenario.cluster.devices[: self.scenario.ranks])

    @cached_property
    def thresholds_publish(self) -> bool:
        """Whether owners publish only changes above a threshold; see [Note: thresholded publish] in `publish`."""
        return self.scenario.plan.publish.threshold is not None

    @cached_property
    def sends_by_data(self) -> bool:
        """Whether message sizes depend on the data: on the step, and on the tensors in each owner's range."""
        return self.policies.gradients == "push" and self.scenario.plan.sends_by_data

    @cached_property
    def compares_by_tensor(self) -> bool:
        """Whether each tensor has a threshold of its own, so that time depends on the tensors in each owner's range."""
        return self.policies.gradients == "push" and self.push.threshold is not None and self.push.kind != "absolute"

    def owning(self, bucket: Bucket) -> "Lowering":
        """Return the lowering of the owners of a bucket: this one, or of experts that ranks divide.

        Gradients of these are pushed to the ranks that hold the same ones. A row of ranks that divide experts is then
        like a node, and a rank's position in it its place, but that each place has a bucket of its own, of experts that
        the others do not hold, so that nothing is reduced or gathered inside. A bucket of other owners has no elements.
        """
        return self.expert_owners if bucket.of_experts and not self.of_experts else self

    @property
    def all_owners(self) -> tuple["Lowering", ...]:
        """This lowering, and that of the owners of divided experts, where gradients are pushed and there are any."""
        pushes = self.policies.gradients == "push" and self.policies.ep > 1
        divides = pushes and any(bucket.of_experts for bucket in self.buckets)  # adapters leave experts frozen
        return (self, self.expert_owners) if divides else (self,)

    @property
    @once_a_step
    def expert_owners(self) -> "Lowering":
        """The lowering of the owners of divided experts; see `owning`."""
        return self._expert_owners().at_step(self.step)

    @once_for_densities
    def _expert_owners(self) -> "Lowering":
        return self._any_expert_owners().under(self.scenario, self.statistics)

    @once_a_run
    def _any_expert_owners(self) -> "Lowering":
        return replace(self, of_experts=True, step_cache={}, densities_cache={}, run_cache={}, computed={})

    @cached_property
    def nodes(self) -> int:
        """Number of nodes among which gradients are pushed; see [Note: hierarchy] in `gssim.plan.buckets`."""
        return len(self.group) // self.places

    @cached_property
    def places(self) -> int:
        """Number of devices per node that reduce-scatter gradients before they are pushed; 1 without a hierarchy. For
        divided experts: the number of ranks that divide them.
        """
        if self.of_experts:
            return self.policies.mesh.expert_stride
        return self.shards if self.policies.push_axis == "dp_replicate" else 1

    def publishes(self, bucket: Bucket) -> bool:
        """Return whether owners publish updates of a bucket: not of experts that one rank alone holds."""
        return not bucket.of_experts or self.owning(bucket).nodes > 1

    @property
    def reduces_in_nodes(self) -> bool:
        """Whether gradients are reduce-scattered inside nodes before they are pushed across them; those of divided
        experts never are.
        """
        return self.places > 1 and not self.of_experts

    @cached_property
    def push_groups(self) -> tuple[Sequence[int], ...]:
        """Groups of ranks that push to one another, by place: the ranks at one place of all nodes form a group."""
        return self.expert_replicas if self.of_experts else self.groups_along(self.policies.push_axis)

    @property
    def first_of_places(self) -> Sequence[int]:
        """The first ranks, which together take part in every collective."""
        return self.group[: math.lcm(*(owners.places for owners in self.all_owners))]

    def place(self, rank: int) -> int:
        """Return a rank's place in its node."""
        return self.position(rank) % self.places

    def node(self, rank: int) -> int:
        """Return the index of the node of a rank, among those between which gradients are pushed."""
        return self.position(rank) // self.places

    def division(self, bucket: Bucket) -> Division:
        """Return how a bucket's elements are divided among the ranks; of another's owners, it has none."""
        own = self.policies.ep == 1 or bucket.of_experts == self.of_experts
        return self.division_of(bucket.elements if own else 0)

    @once_a_run
    def division_of(self, elements: int) -> Division:
        """Return how a bucket of `elements` elements is divided among the ranks; experts by place."""
        rows = [self.shard_shares[first : first + self.places] for first in range(0, len(self.group), self.places)]
        if not self.of_experts:
            return divide(elements, by_node=rows)
        columns = [
            splitting.proportional(shares) if any(shares) else splitting.even(len(shares))
            for shares in zip(*rows, strict=True)
        ]
        return Division(tuple(splitting.split(elements, shares) for shares in columns))

    def pushed_elements(self, bucket: Bucket, rank: int) -> int:
        """Return the number of elements of a bucket that a rank owns, where gradients are pushed to their owners."""
        return self.division(bucket).owned[self.place(rank)][self.node(rank)]

    @cached_property
    def summed_elements(self) -> tuple[int, ...]:
        """Number of gradient elements to be summed over a tensor group because each of its ranks has only a partial
        sum.

        By position in the group. Where gradients are sharded, only the elements of a rank's own shard count: rows
        padded as by torch.chunk, or its ranges of the buckets.
        """
        if self.policies.gradients != "push":
            shards = self.shards if self.policies.gradients == "reduce-scatter" else 1
            rows = [(p.shape[0] if p.shape else 1, p.elements) for _, p in self.parameters if p.summed]
            return (sum(math.ceil(n / shards) * (elements // n) for n, elements in rows),) * len(self.group)
        found = [0] * len(self.group)
        for bucket in self.buckets if any(p.summed for _, p in self.parameters) else ():
            ends = np.cumsum([0, *(p.elements for _, p in bucket.members)])
            summed = [(a, b) for (_, p), a, b in zip(bucket.members, ends, ends[1:], strict=False) if p.summed]
            for place in range(self.places):
                for node, (first, last) in enumerate(self.division(bucket).ranges(place)):
                    own = sum(max(0, min(b, last) - max(a, first)) for a, b in summed)
                    found[node * self.places + place] += int(own)
        return tuple(found)

    @once_a_run
    def groups_along(self, axis: str) -> tuple[Sequence[int], ...]:
        """Return the groups of this lowering's ranks along a data axis; shards (`dp_shard`) span `cp` too."""
        mesh, axes = self.policies.mesh, (axis, "cp") if axis == "dp_shard" else (axis,)
        alone = math.prod(getattr(mesh, name) for name in axes) == len(self.group)
        groups = [self.group] if alone else [mesh.group(rank, *axes) for rank in self.group]
        return tuple(dict.fromkeys(groups))

    def communication(self, kind: str, axis: str, size_bytes: float, **settings: Any) -> Communication:
        """Return a collective that every group along a data axis carries out, each group independently."""
        return Communication.among(self.groups_along(axis), kind, size_bytes, **settings)

    def communication_stream(self, number: int) -> str:
        """Return the stream of a group's `number`-th asynchronous collective, in the order in which they are posted.

        A backend that runs several collectives concurrently assigns them to its streams in turn.
        """
        at_once = collectives.at_once(self.scenario.cluster.backend)
        return f"communication {number % at_once}" if at_once > 1 else "communication"

    def staging(
        self, device: DeviceType, exchange: Communication, position: float = 0, **event: Any
    ) -> tuple[Event, ...]:
        """Return the events of the memory that a collective takes beside its tensors, from `position` to the next one.

        `event`: further fields of the returned events.
        """
        size = collectives.staging_bytes(exchange, self.scenario.cluster.backend, kind=device.kind)
        changes = ((position, size), (position + 1, -size)) if size else ()
        return tuple(Event(place, change, "communication", **event) for place, change in changes)

    def sends_from_host(self, device: DeviceType) -> bool:
        """Return whether the backend sends a device's messages from copies in host memory, as gloo those of GPUs."""
        return self.scenario.cluster.backend == "gloo" and device.kind == "cuda"

    @cached_property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Micro-batches of each rank's samples, in order."""
        sends_every = (
            self.policies.gradients not in ("local", "periodic") and self.policies.gradient_sync == "micro-batch"
        )
        count = self.scenario.plan.micro_batches
        last = None if self.reduces_after_schedule else count - 1
        return tuple(
            MicroBatch(i, count, sends_gradients=sends_every or i == last, sent_before=sends_every)
            for i in range(count)
        )

    @property
    def splits_schedule(self) -> bool:
        """Whether the pipeline's schedule splits backwards; see [Note: zero bubble] in `gssim.plan.pipeline_schedule`.

        The first stage's are not: it has no gradient to send.
        """
        return bool(self.stages) and self.scenario.plan.schedule in SPLITTING

    @property
    def splits_backward(self) -> bool:
        """Whether the backward of the stage that is held, if it is one, has two parts."""
        return self.splits_schedule and len(self.stages) == 1 and self.stages[0].number > 0

    @property
    def reduces_after_schedule(self) -> bool:
        """Whether stages reduce-scatter gradients after the pipeline's schedule; see [Note: stages] in `sharded`."""
        return bool(self.stages) and self.policies.gradients == "reduce-scatter"

    @property
    def gathers_in_stages(self) -> bool:
        """Whether stages gather parameters, so that a micro-batch's gathers depend on its place in the schedule."""
        return bool(self.stages) and self.policies.parameters != "replicated"

    @cached_property
    def shares_stages(self) -> bool:
        """Whether a stage's micro-batches have the same tasks in programs of other numbers of micro-batches: a
        prediction that extrapolates lowers four.

        Pushed gradients, copies to the host and rows of experts may depend on the number; of sharded parameters, which
        are gathered, on the place in the schedule.
        """
        depends = self.policies.gradients == "push" or self.offload is not None or self.policies.ep > 1
        equal = not depends and not self.reduces_after_schedule and len(set(self.batch_sizes)) == 1
        return bool(self.stages) and equal

    def samples(self, rank: int, micro_batch: MicroBatch) -> int:
        """Return the number of samples of a rank in a micro-batch."""
        return self._split(self.batch_sizes[rank], micro_batch.count)[micro_batch.index]

    @once_a_run
    def _split(self, samples: int, micro_batches: int) -> Sequence[int]:
        return splitting.split(samples, splitting.even(micro_batches))

    def adds_to_pushed(self, micro_batch: MicroBatch) -> bool:
        """Return whether an earlier micro-batch pushed its gradients, and left an empty sparse tensor for each."""
        return self.policies.gradients == "push" and micro_batch.sent_before and not micro_batch.first

    def compute_kind(self, rank: int, micro_batch: MicroBatch) -> ComputeKind:
        """Return a key that is equal where ranks and micro-batches have the same tasks of forward and backward."""
        return ComputeKind(
            self.scenario.cluster.devices[rank].type,
            self.batch_sizes[rank],
            self.owned_ranges[rank] if self.assigns_layers else None,
            self.samples(rank, micro_batch),
            micro_batch.accumulates,
            self.adds_to_pushed(micro_batch),
            micro_batch.sends_gradients,
            self.expert_position(rank),
            self.ring_position(rank),
        )

    def ring_position(self, rank: int) -> int:
        """Return the position of a rank in the ring of its attention; 0 without one."""
        return self.policies.mesh.place(rank).cp if self.policies.ring else 0

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Number of samples of each rank."""
        return self.scenario.batch_sizes

    @cached_property
    def shard_shares(self) -> tuple[float, ...]:
        """Fraction of the sharded state of each rank of the group, by position."""
        by_rank = self.scenario.shard_shares
        return tuple(by_rank[rank] for rank in self.group)

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of an element in the training precision: parameters, activations, gradients, messages."""
        return value_bytes(self.scenario.workload)

    @cached_property
    def traced_scale(self) -> float:
        """Bytes of an element in the training precision relative to those in the precision of the trace."""
        return self.value_bytes / PRECISION_BYTES[self.scenario.workload.model.traced_precision]

    @cached_property
    def master_bytes(self) -> int:
        """Bytes of an element in the optimizer's precision: master copy and optimizer state."""
        return master_bytes(self.scenario.workload)

    @cached_property
    def reduce_precision(self) -> Precision:
        """Precision in which gradients are reduced over replicas or shards; pushed ones keep the training precision."""
        workload = self.scenario.workload
        return workload.precision if self.policies.gradients == "push" else reduce_precision(workload)

    @cached_property
    def reduces_cast_gradients(self) -> bool:
        """Whether gradients are cast before they are reduced over replicas or shards."""
        return self.reduce_precision != self.scenario.workload.precision

    @cached_property
    def casts_units(self) -> bool:
        """Whether FSDP2 casts gradients before it reduces them. If so, it keeps them cast between micro-batches."""
        return self.policies.gradients == "reduce-scatter" and self.reduces_cast_gradients

    @cached_property
    def has_master_copy(self) -> bool:
        """Whether the optimizer's precision differs from the training precision."""
        return has_master_copy(self.scenario.workload)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradient buckets by PyTorch's or DeepSpeed's rule, in the order in which they are reduced: as they are
        complete, or, after the backward, in the model's order.

        Where parameters are sharded, buckets are FSDP2's units: each block from the last to the first, then everything
        outside blocks.
        """
        order = gradient_order(self.layers)[:: -1 if self.reduces_after_backward else 1]
        members = [(self.layers[i], self.layers[i].layer.parameters[j]) for i, j in order]
        if self.policies.ep > 1 and self.policies.gradients != "push":  # those of experts are reduced over fewer ranks
            members = [member for member in members if not member[1].of_experts]
        if self.policies.parameters != "replicated":
            # of a block, its divided experts first, whose gradients are complete first
            numbers = [(each.index if each.layer.block else -1, parameter.of_experts) for each, parameter in members]
            units = [[m for m, n in zip(members, numbers, strict=True) if n == i] for i in sorted({*numbers})[::-1]]
            return tuple(Bucket(i, tuple(unit)) for i, unit in enumerate(units))
        first, cap = bucket_limits(self.scenario.plan, self.policies)
        within = self.policies.gradients == "all-reduce" and self.policies.zero1_implementation == "deepspeed"
        # pushed gradients of divided experts have other owners, and fill buckets of their own beside the others
        kinds = [[i for i, (_, each) in enumerate(members) if each.of_experts == apart] for apart in (False, True)]
        assignment: list[list[int]] = []
        for kind in kinds:
            sizes = [members[i][1].elements * self.value_bytes for i in kind]
            buckets = assign_buckets(sizes, first_bytes=first, cap_bytes=cap, within=within)
            assignment += [[kind[position] for position in positions] for positions in buckets]
        assignment.sort(key=max)
        return tuple(Bucket(i, tuple(members[p] for p in positions)) for i, positions in enumerate(assignment))

    @cached_property
    def parameters(self) -> tuple[tuple[LayerInstance, Parameter], ...]:
        """Every parameter with its layer, in the model's order."""
        return tuple((instance, parameter) for instance in self.layers for parameter in instance.layer.parameters)

    @cached_property
    def owned_parameters(self) -> tuple[tuple[int, ...], ...]:
        """Positions in `parameters` of the tensors that each rank updates (ZeRO-1, whole tensors assigned to ranks).

        Divided experts are not among them; see `owned_experts`.
        """
        return self._assigned([i for i, (_, each) in enumerate(self.parameters) if not each.of_experts], 1)

    @cached_property
    def owned_experts(self) -> tuple[tuple[int, ...], ...]:
        """`owned_parameters` for divided experts, by position among the ranks that hold the same ones.

        Experts have an optimizer of their own.
        """
        places = [i for i, (_, each) in enumerate(self.parameters) if each.of_experts]
        return self._assigned(places, self.policies.mesh.expert_stride)

    def expert_replica(self, rank: int) -> int:
        """Return the position of a rank among those that hold the same experts."""
        return self.position(rank) // self.policies.mesh.expert_stride

    def _assigned(self, places: Sequence[int], divided: int) -> tuple[tuple[int, ...], ...]:
        """Return, for each owner, the places in `parameters` of the tensors that it updates, out of `places`.

        `divided`: number of ranks among which these tensors are cut; there are that many times fewer owners.
        """
        sizes = [self.parameters[place][1].elements for place in places]
        groups = [0 if self.matrices_at(place) else 1 for place in places]  # updated by Muon, or by AdamW
        owned = splitting.greedy(sizes, len(self.group) // divided, groups)
        return tuple(tuple(places[each] for each in own) for own in owned)

    def matrices_at(self, place: int) -> tuple[Matrix, ...]:
        """Return the matrices of the parameter at a place in `parameters` that Muon updates, if it is the optimizer."""
        if self.scenario.workload.optimizer != "muon":
            return ()
        instance, parameter = self.parameters[place]
        return matrices_of(instance.layer, parameter, stacks=self.has_one_gradient_buffer)

    def matrices(self, rank: int, *, of_experts: bool | None = None) -> tuple[Matrix, ...]:
        """Return the matrices that a rank updates with Muon: all of them, only those of experts, or only the others."""
        if self.scenario.workload.optimizer != "muon":
            return ()
        if self.flat_part:
            dense, experts = self._assigned_matrices
            found = {False: dense[self.position(rank)], True: experts[self.expert_replica(rank)]}
            return found[of_experts] if of_experts is not None else (*found[False], *found[True])
        places: Sequence[int] = range(len(self.parameters))
        if self.assigns_tensors:
            places = (*self.owned_places(rank), *self.owned_places(rank, of_experts=True))
        return tuple(
            matrix
            for place in places
            if of_experts in (None, self.parameters[place][1].of_experts)
            for matrix in self.matrices_at(place)
        )

    @cached_property
    def _assigned_matrices(self) -> tuple[tuple[tuple[Matrix, ...], ...], tuple[tuple[Matrix, ...], ...]]:
        """Matrices that each rank updates whole, without and with those of experts, in Megatron-LM's layer-wise
        optimizer.

        They are assigned in order of decreasing work, each to the rank with the least work so far.

        Source: Megatron-LM, core/optimizer/layer_wise_optimizer.py, which does so bucket by bucket.
        """
        found = []
        for of_experts, ranks in ((False, len(self.group)), (True, len(self.expert_replicas[0]))):
            places = [i for i, (_, each) in enumerate(self.parameters) if each.of_experts == of_experts]
            matrices = [matrix for place in places for matrix in self.matrices_at(place)]
            assigned = splitting.greedy([max(each) * min(each) ** 2 for each in matrices], ranks)
            found.append(tuple(tuple(matrices[place] for place in own) for own in assigned))
        return found[0], found[1]

    @cached_property
    def assigns_layers(self) -> bool:
        """Whether each rank computes and updates the weight gradients of its own layers only."""
        return self.scenario.policies.partition == "weight-gradient"

    @cached_property
    def owned_ranges(self) -> tuple[tuple[int, int], ...]:
        """Half-open range of the layers that each rank updates, where layers are assigned to ranks."""
        return self.scenario.owned_layers

    def layers_of(self, rank: int) -> OwnedLayers:
        """Return the layers as a rank runs them: whole, unless other ranks compute some of the weight gradients.

        With divided experts, layers have the number of rows that this rank's experts receive.
        """
        if self.policies.ep > 1:
            return self._routed_layers(self.expert_position(rank))
        if not self.assigns_layers:
            return OwnedLayers(self.layers)
        return self._layers_as_owned(*self.owned_ranges[rank])

    @once_a_run
    def _layers_as_owned(self, first: int, last: int) -> OwnedLayers:
        return owned_layers(self.layers, frozenset(range(first, last)))

    @property
    def assigns_tensors(self) -> bool:
        """Whether gradients are all-reduced, and each tensor is updated by one rank alone (ZeRO-1)."""
        return self._shards_optimizer_state and self.policies.zero1_implementation == "torch"

    @property
    def _shards_optimizer_state(self) -> bool:
        policies = self.scenario.policies
        return policies.gradients == "all-reduce" and policies.optimizer_state == "sharded"

    @cached_property
    def flat_part(self) -> int:
        """Elements of each rank's equal part of all parameters, flattened and padded (DeepSpeed's or Megatron-LM's
        ZeRO-1).

        0 for other policies. Source: DeepSpeed, runtime/zero/stage_1_and_2.py: the flat buffer is aligned to twice the
        number of ranks.
        """
        if not self._shards_optimizer_state or self.assigns_tensors:
            return 0
        return self._even_part(len(self.group), of_experts=False)

    @cached_property
    def flat_expert_part(self) -> int:
        """`flat_part` for divided experts, which are flattened apart over the ranks that hold the same ones."""
        return self._even_part(len(self.expert_replicas[0]), of_experts=True) if self.flat_part else 0

    def _even_part(self, ranks: int, *, of_experts: bool) -> int:
        own = [each.elements for _, each in self.parameters if each.of_experts == of_experts]
        if self.scenario.workload.optimizer != "muon":
            return 2 * math.ceil(sum(own) / (2 * ranks))
        # matrices stay whole: each part has room for the largest sum of matrices; other parameters are divided evenly
        assigned = [elements_of(matrices) for matrices in self._assigned_matrices[of_experts]]
        return max(assigned) + self.even_rest(ranks, of_experts=of_experts)

    def even_rest(self, ranks: int, *, of_experts: bool) -> int:
        """Return the elements of each rank's equal part of the parameters that Muon does not update, flattened and
        padded.
        """
        own = [each.elements for _, each in self.parameters if each.of_experts == of_experts]
        matrices = sum(map(elements_of, self._assigned_matrices[of_experts]))
        return 2 * math.ceil((sum(own) - matrices) / (2 * ranks))

    @property
    def has_one_gradient_buffer(self) -> bool:
        """Whether gradients exist only in one buffer (Megatron-LM's main_grad), which is reduce-scattered.

        Each weight-gradient product accumulates into it.

        Source: Megatron-LM, core/distributed/param_and_grad_buffer.py, core/tensor_parallel/layers.py
        (gradient_accumulation_fusion).
        """
        return self._shards_optimizer_state and self.policies.zero1_implementation == "megatron"

    @property
    def kept_value_bytes(self) -> int:
        """Bytes of an element of the gradients that a replica keeps until the update."""
        precision = self.scenario.workload.gradient_precision
        return PRECISION_BYTES[precision] if precision else self.value_bytes

    @property
    def casts_gradients(self) -> bool:
        """Whether the optimizer copies gradients into its own precision; shards' gradients are in it already."""
        if self.scenario.workload.gradient_precision is not None and self.kept_value_bytes == self.master_bytes:
            return False
        if self.has_one_gradient_buffer and self.buffer_value_bytes == self.master_bytes:
            return False
        return bool(self.flat_part) or (
            self.has_master_copy and self.policies.gradients in ("local", "periodic", "all-reduce")
        )

    @property
    def copies_part(self) -> bool:
        """Whether a rank updates a copy of its part of all parameters, whatever their precision.

        Megatron-LM's part of fp32 parameters is a view of them. Sources: DeepSpeed, runtime/zero/stage_1_and_2.py,
        single_partition_of_fp32_groups; Megatron-LM, core/optimizer/distrib_optimizer.py, shard_fp32_groups.
        """
        return bool(self.flat_part) and (self.has_master_copy or not self.has_one_gradient_buffer)

    @property
    def reduces_after_backward(self) -> bool:
        """Whether gradients are all complete before the first of them is reduced and freed.

        Sources: DeepSpeed, runtime/zero/stage_1_and_2.py, process_gradients: stage 1 without overlap_comm, which
        runtime/engine.py, _configure_zero_optimizer, turns off in pipelines.
        """
        frees = self.frees_gradients and self.policies.gradient_sync == "step"
        return frees and not self.overlaps_freed_gradients

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are freed once reduced, but for a rank's part; see [Note: freed gradients] in
        `replicated`.

        DeepSpeed's stages of a pipeline keep gradients in another precision whole (runtime/bf16_optimizer.py).
        """
        keeps = bool(self.stages) and self.scenario.workload.gradient_precision is not None
        return self.policies.frees_gradients and not keeps

    @property
    def overlaps_freed_gradients(self) -> bool:
        """Whether gradients that are then freed are reduced beside the backward, from two buffers in turn."""
        return self.scenario.plan.overlap and not self.stages

    @property
    def part_gradient_bytes(self) -> float:
        """Bytes of the gradients that a rank keeps where the others are freed; 0 if they are copied to its host at
        once.
        """
        return 0.0 if self.offload else float(self.flat_part * self.value_bytes)

    @cached_property
    def freed_buffers_bytes(self) -> float:
        """Bytes of the buffers into which gradients are copied that are freed once they are reduced.

        They have the size of the largest bucket, however small the model; a second one exists for the overlap. A tensor
        that is larger is not copied.

        Source: DeepSpeed, runtime/zero/stage_1_and_2.py, backward (ipg_buffer).
        """
        return float(self.scenario.plan.bucket_bytes * (2 if self.overlaps_freed_gradients else 1))

    @property
    def buffer_value_bytes(self) -> int:
        """Bytes of an element of a gradient bucket. A single gradient buffer may have a precision of its own."""
        return self.kept_value_bytes if self.has_one_gradient_buffer else self.value_bytes

    def owned_places(self, rank: int, *, of_experts: bool = False) -> tuple[int, ...]:
        """Return the positions in `parameters` of the tensors that a rank updates, where whole tensors are assigned to
        ranks: of divided experts, or of all others.
        """
        if of_experts:
            return self.owned_experts[self.expert_replica(rank)]
        return self.owned_parameters[self.position(rank)]

    def owned_elements(self, rank: int, *, of_experts: bool = False) -> tuple[int, ...]:
        """Return the elements of each of these tensors."""
        return tuple(self.parameters[place][1].elements for place in self.owned_places(rank, of_experts=of_experts))

    def roles(self, *, unfolded: bool = False, by_data: Ints | None = None) -> tuple[Ints, list[int]]:
        """Return the role of each rank of the group, and the first rank of each role; equal roles lower to equal tasks.

        `by_data`: a class for each rank, equal for ranks with equal data-dependent messages. If it is None and messages
        depend on data, every rank has its own role.
        """
        if unfolded or (self.sends_by_data and by_data is None):
            return np.arange(len(self.group)), list(self.group)
        code = self._roles_of_all_steps()
        if by_data is not None:
            code = np.unique(code * (int(by_data.max()) + 1) + by_data, return_inverse=True)[1]
        _, first, role = np.unique(code, return_index=True, return_inverse=True)
        by_rank = np.argsort(first, kind="stable")
        return np.argsort(by_rank, kind="stable")[role], [self.group[i] for i in first[by_rank].tolist()]

    @once_a_run
    def _roles_of_all_steps(self) -> Ints:
        """Return a class for each rank, equal for ranks with equal tasks but for data-dependent messages."""
        positions, policies = np.arange(len(self.group)), self.scenario.policies
        devices = [self.scenario.cluster.devices[rank].type for rank in self.group]
        names = {name: i for i, name in enumerate(dict.fromkeys(devices))}
        sizes = self.batch_sizes
        columns = [np.array([names[device] for device in devices]), np.array([sizes[rank] for rank in self.group])]
        if self.offload:
            columns.append(np.array([self.ranks_on_host(rank) for rank in self.group]))
        for slowed in filter(None, self.slowed_steps or [self.slowed]):
            ratios = [slowed.get(rank, 1.0) for rank in self.group]
            columns.append(np.array([sorted(set(ratios)).index(ratio) for ratio in ratios]))
        columns += [
            np.array([place(rank) for rank in self.group]) for place in (self.expert_position, self.ring_position)
        ]
        if policies.gradients == "push":
            of_size = {(bucket.elements, bucket.of_experts): bucket for bucket in self.buckets}
            owned = [self.owning(bucket)._ownership_columns(bucket) for bucket in of_size.values()]
            columns += [column for by_bucket in owned for column in by_bucket]
            columns.append(np.array(self.summed_elements if policies.tp > 1 else [0] * len(self.group)))
        if self.assigns_tensors or self.flat_part:
            kinds_of_tensors = (False, True) if self.assigns_tensors else ()
            updated = [
                (self.matrices(rank), *(self.owned_elements(rank, of_experts=each) for each in kinds_of_tensors))
                for rank in self.group
            ]
            kinds = {each: i for i, each in enumerate(dict.fromkeys(updated))}
            columns.append(np.array([kinds[each] for each in updated]))
        if self.assigns_layers:
            columns.append(np.array([first for first, _ in self.owned_ranges]))
        if policies.gradients == "reduce-scatter":
            columns += [self._own_rows(rows, positions % self.shards, self.shards) for rows in self._distinct_rows]
            experts = {parameter.shape[0] for bucket in self.expert_buckets for _, parameter in bucket.members}
            apart = policies.mesh.expert_stride
            columns += [self._own_rows(n, positions // apart, self.shards // apart) for n in sorted(experts)]
        code = np.zeros(len(positions), np.int64)
        for column in columns:
            code = np.unique(code * (int(column.max()) + 1) + column, return_inverse=True)[1]
        return code

    def _ownership_columns(self, bucket: Bucket) -> list[Ints]:
        """Return columns that distinguish ranks by what they own of a bucket, and how the place's part is divided."""
        owned_by_place = self.division(bucket).owned
        owned = np.array(owned_by_place).T.ravel()  # node by node
        if self.places == 1:
            return [owned]
        kinds = [(sizes, self.forwarded_elements(bucket, place)) for place, sizes in enumerate(owned_by_place)]
        place_class = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        return [owned, np.tile([place_class[kind] for kind in kinds], self.nodes)]

    def forwarded_elements(self, bucket: Bucket, place: int) -> int:
        """Return the largest part of a bucket that a place forwards in the reduce-scatter within a node, in elements.

        The reduce-scatter is a ring of messages. Of all parts, a place forwards all but the first it sends and its own.
        """
        parts = self.division(bucket).places
        return max((parts[(place + step) % self.places] for step in range(2, self.places)), default=0)

    @cached_property
    def _distinct_rows(self) -> list[int]:
        """Distinct first dimensions of all parameters, along which FSDP2 chunks them (torch.chunk)."""
        layers = {id(instance.layer): instance.layer for instance in self.layers}
        return sorted({p.shape[0] if p.shape else 1 for layer in layers.values() for p in layer.parameters})

    def _own_rows(self, rows: int, positions: Ints, shards: int) -> Ints:
        """Return how many of a tensor's `rows` (its first dimension) each rank holds."""
        chunk = math.ceil(rows / shards)
        return np.clip(rows - positions * chunk, 0, chunk)

    def device_type(self, rank: int) -> str:
        """Return the name of the device type of a rank."""
        return self.scenario.cluster.devices[rank].type

    def device(self, rank: int) -> DeviceType:
        """Return the device type of a rank."""
        return self.scenario.cluster.type_of(rank)


@once_a_run
def layer_groups(low: Lowering, samples: int, axis: str) -> list[Sequence[int]]:
    """Return the groups of ranks that run layers together, along one axis; only groups with `samples` samples per rank.

    Along tp the ranks of a group hold slices of blocks, along cp parts of the sequences.
    """
    mesh = low.policies.mesh
    return list(dict.fromkeys(mesh.group(rank, axis) for rank in low.group if low.batch_sizes[rank] == samples))
