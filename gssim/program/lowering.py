"""What every pass needs: the scenario unrolled, its gradient buckets, and the collectives found so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gssim import shares
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.gradients import GradientStatistics
from gssim.plan import assign_buckets, bucket_limits
from gssim.scenario import Scenario, value_bytes
from gssim.slices import held_model
from gssim.units import PRECISION_BYTES, Ints
from gssim.workload import LayerInstance, Parameter, gradient_order, unrolled


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together, in the order in which they become ready."""

    index: int
    members: tuple[tuple[LayerInstance, Parameter], ...]

    @property
    def elements(self) -> int:
        """Number of gradient elements."""
        return sum(parameter.elements for _, parameter in self.members)

    def place(self, member: int) -> tuple[int, int]:
        """Return (layer, position) of the backward at which the given member is ready."""
        instance, parameter = self.members[member]
        return instance.index + parameter.ready.layer_offset, parameter.ready.position

    @property
    def complete(self) -> tuple[int, int]:
        """Where in the backward the last member is ready: (layer, position)."""
        return self.place(-1)

    @property
    def started(self) -> tuple[int, int]:
        """Where in the backward the first member is ready."""
        return self.place(0)


@dataclass(frozen=True)
class MicroBatch:
    """One of the parts in which a rank's samples are taken."""

    index: int = 0
    count: int = 1
    leaves: bool = True
    """Whether gradients leave the device in it, where the plan lets them leave at all."""
    left: bool = False
    """Whether those of the micro-batches before have left in theirs."""

    @property
    def first(self) -> bool:
        """Whether no other comes before it in the step."""
        return self.index == 0

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients of the micro-batches before are there, to which its own are added."""
        return self.index > 0 and not self.left

    @property
    def suffix(self) -> str:
        """What its labels end in."""
        return f" micro-batch {self.index}" if self.count > 1 else ""


@dataclass(frozen=True)
class Lowering:
    """A scenario with what every pass needs of it, and the collectives found so far.

    All ranks that share a part of the model (equal coordinates on the axes pp and tp) are lowered by one.
    """

    scenario: Scenario
    statistics: GradientStatistics | None
    step: int
    group: Sequence[int]
    """The ranks that hold this part of the model, each for its own samples."""
    communications: dict[str, Communication] = field(default_factory=dict)
    found: dict[object, Any] = field(default_factory=dict)
    """What passes work out once for all ranks."""
    tensor_part: int = 0
    """Which part of each block they hold: their coordinate on the axis tp."""

    @cached_property
    def layers(self) -> tuple[LayerInstance, ...]:
        """The unrolled model, of which each rank holds its units where blocks are cut."""
        if self.scenario.policies.tp == 1:
            return self.whole_layers
        return unrolled(held_model(self.scenario.workload.model, self.scenario.slice_shares, self.tensor_part))

    @cached_property
    def whole_layers(self) -> tuple[LayerInstance, ...]:
        """The unrolled model as it is on one device."""
        return unrolled(self.scenario.workload.model)

    @cached_property
    def recomputes(self) -> bool:
        """Whether each block keeps only its input, and runs its forward again for its backward."""
        return self.scenario.plan.recompute == "full"

    def position(self, rank: int) -> int:
        """Return the position of a rank in the group."""
        return self.group.index(rank)

    @cached_property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """The parts in which each rank's samples are taken, one after another."""
        each = self.scenario.policies.gradient_sync == "micro-batch"
        count = self.scenario.plan.micro_batches
        return tuple(MicroBatch(i, count, leaves=each or i == count - 1, left=each) for i in range(count))

    def samples(self, rank: int, micro_batch: MicroBatch) -> int:
        """Return the samples of a rank in a micro-batch."""
        return shares.split(self.batch_sizes[rank], shares.even(micro_batch.count))[micro_batch.index]

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return self.scenario.batch_sizes

    @cached_property
    def shard_shares(self) -> tuple[float, ...]:
        """Share in the sharded state of each rank of the group, by position."""
        by_rank = self.scenario.shard_shares
        return tuple(by_rank[rank] for rank in self.group)

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of one element."""
        return value_bytes(self.scenario.workload)

    @cached_property
    def traced_scale(self) -> float:
        """Bytes of an element over those of the traced precision."""
        return self.value_bytes / PRECISION_BYTES[self.scenario.workload.model.traced_precision]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradient buckets by PyTorch's rule, in the order in which they are complete."""
        order = gradient_order(self.layers)
        members = [(self.layers[i], self.layers[i].layer.parameters[j]) for i, j in order]
        first, cap = bucket_limits(self.scenario.plan, self.scenario.policies)
        sizes = [parameter.elements * self.value_bytes for _, parameter in members]
        found = assign_buckets(sizes, first_bytes=first, cap_bytes=cap)
        return tuple(Bucket(i, tuple(members[p] for p in positions)) for i, positions in enumerate(found))

    @cached_property
    def parameters(self) -> tuple[tuple[LayerInstance, Parameter], ...]:
        """Every parameter with its layer, in the model's order."""
        return tuple((instance, parameter) for instance in self.layers for parameter in instance.layer.parameters)

    @cached_property
    def owned_parameters(self) -> tuple[tuple[int, ...], ...]:
        """Which of `parameters`, by position, each rank updates where whole tensors are dealt out (ZeRO-1)."""
        return shares.greedy([parameter.elements for _, parameter in self.parameters], len(self.group))

    @property
    def deals_out_tensors(self) -> bool:
        """Whether gradients are all-reduced, but each tensor is updated by one rank alone (ZeRO-1)."""
        policies = self.scenario.policies
        return policies.gradients == "all-reduce" and policies.optimizer_state == "sharded"

    def owned_elements(self, rank: int) -> tuple[int, ...]:
        """Return the elements of every tensor that a rank updates where whole tensors are dealt out."""
        owned = self.owned_parameters[self.position(rank)]
        return tuple(self.parameters[position][1].elements for position in owned)

    def roles(self, *, unfolded: bool = False) -> tuple[Ints, list[int]]:
        """Return the role of each rank of the group, and the first rank of each: all that lowering reads is in it."""
        positions = np.arange(len(self.group))
        policies, push = self.scenario.policies, self.scenario.plan.push
        if unfolded or (policies.gradients == "push" and push.threshold):
            return positions, list(self.group)  # what a rank sends depends on whose range holds which tensors
        devices = [self.scenario.cluster.devices[rank].type for rank in self.group]
        names = {name: i for i, name in enumerate(dict.fromkeys(devices))}
        sizes = self.batch_sizes
        columns = [np.array([names[device] for device in devices]), np.array([sizes[rank] for rank in self.group])]
        if policies.gradients == "push":
            columns += [np.array(shares.split(bucket.elements, self.shard_shares)) for bucket in self.buckets]
        if self.deals_out_tensors:
            owned = [self.owned_elements(rank) for rank in self.group]
            kinds = {sizes: i for i, sizes in enumerate(dict.fromkeys(owned))}
            columns.append(np.array([kinds[sizes] for sizes in owned]))
        if policies.parameters != "replicated":
            columns += [self._held_rows(rows, positions) for rows in self._distinct_rows]
        code = np.zeros(len(positions), np.int64)
        for column in columns:
            code = np.unique(code * (int(column.max()) + 1) + column, return_inverse=True)[1]
        _, first, role = np.unique(code, return_index=True, return_inverse=True)
        by_rank = np.argsort(first, kind="stable")
        return np.argsort(by_rank, kind="stable")[role], [self.group[i] for i in first[by_rank].tolist()]

    @cached_property
    def _distinct_rows(self) -> list[int]:
        """First dimensions of all parameters: FSDP2 cuts them (torch.chunk)."""
        layers = {id(instance.layer): instance.layer for instance in self.layers}
        return sorted({p.shape[0] if p.shape else 1 for layer in layers.values() for p in layer.parameters})

    def _held_rows(self, rows: int, positions: Ints) -> Ints:
        """Return how many of `rows` each rank holds."""
        chunk = math.ceil(rows / len(positions))
        return np.clip(rows - positions * chunk, 0, chunk)

    def device(self, rank: int) -> DeviceType:
        """Return the device type of a rank."""
        return self.scenario.cluster.type_of(rank)
