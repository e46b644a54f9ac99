"""What every pass needs: the scenario unrolled, its gradient buckets, and the collectives found so far."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gssim import shares
from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.gradients import GradientStatistics
from gssim.plan import assign_buckets, bucket_limits
from gssim.scenario import Scenario, has_master_copy, master_bytes, value_bytes
from gssim.units import Ints
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
class Lowering:
    """A scenario with what every pass needs of it, and the collectives found so far."""

    scenario: Scenario
    statistics: GradientStatistics | None
    step: int
    communications: dict[str, Communication] = field(default_factory=dict)
    found: dict[object, Any] = field(default_factory=dict)
    """What passes work out once for all ranks."""

    @cached_property
    def layers(self) -> tuple[LayerInstance, ...]:
        """The unrolled model."""
        return unrolled(self.scenario.workload.model)

    @cached_property
    def recomputes(self) -> bool:
        """Whether each block keeps only its input, and runs its forward again for its backward."""
        return self.scenario.plan.recompute == "full"

    @cached_property
    def group(self) -> range:
        """All ranks."""
        return range(self.scenario.ranks)

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return self.scenario.batch_sizes

    @cached_property
    def shard_shares(self) -> tuple[float, ...]:
        """Share of each rank in the sharded state."""
        return self.scenario.shard_shares

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of one element of what is trained with: parameters, activations, gradients, messages."""
        return value_bytes(self.scenario.workload)

    @cached_property
    def master_bytes(self) -> int:
        """Bytes of one element of what the optimizer updates, and of its state."""
        return master_bytes(self.scenario.workload)

    @cached_property
    def has_master_copy(self) -> bool:
        """Whether these differ."""
        return has_master_copy(self.scenario.workload)

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
        return tuple(self.parameters[position][1].elements for position in self.owned_parameters[rank])

    def roles(self, *, unfolded: bool = False) -> tuple[Ints, list[int]]:
        """Return the role of each rank, and the first rank of each role: all that lowering reads of a rank is in it."""
        ranks = np.arange(len(self.group))
        policies, push = self.scenario.policies, self.scenario.plan.push
        if unfolded or (policies.gradients == "push" and push.threshold):
            return ranks, ranks.tolist()  # what a rank sends depends on whose range holds which tensors
        devices = self.scenario.cluster.devices[: len(ranks)]
        names = {name: i for i, name in enumerate(dict.fromkeys(device.type for device in devices))}
        columns = [np.array([names[device.type] for device in devices]), np.array(self.batch_sizes)]
        if policies.gradients == "push":
            columns += [np.array(shares.split(bucket.elements, self.shard_shares)) for bucket in self.buckets]
        if self.deals_out_tensors:
            owned = [self.owned_elements(rank) for rank in self.group]
            kinds = {sizes: i for i, sizes in enumerate(dict.fromkeys(owned))}
            columns.append(np.array([kinds[sizes] for sizes in owned]))
        if policies.parameters != "replicated":
            columns += [self._held_rows(rows, ranks) for rows in self._distinct_rows]
        code = np.zeros(len(ranks), np.int64)
        for column in columns:
            code = np.unique(code * (int(column.max()) + 1) + column, return_inverse=True)[1]
        _, first, role = np.unique(code, return_index=True, return_inverse=True)
        by_rank = np.argsort(first, kind="stable")
        return np.argsort(by_rank, kind="stable")[role], first[by_rank].tolist()

    @cached_property
    def _distinct_rows(self) -> list[int]:
        """First dimensions of all parameters: FSDP2 cuts them (torch.chunk)."""
        layers = self.scenario.workload.model.layers
        return sorted({p.shape[0] if p.shape else 1 for layer in layers for p in layer.parameters})

    def _held_rows(self, rows: int, ranks: Ints) -> Ints:
        """Return how many of `rows` each rank holds."""
        chunk = math.ceil(rows / len(ranks))
        return np.clip(rows - ranks * chunk, 0, chunk)

    def device(self, rank: int) -> DeviceType:
        """Return the device type of a rank."""
        return self.scenario.cluster.type_of(rank)
