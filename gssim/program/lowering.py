"""What every pass needs: the scenario unrolled, its gradient buckets, and the collectives found so far."""

from dataclasses import dataclass, field
from functools import cached_property

from gssim.cluster import DeviceType
from gssim.collectives import Communication
from gssim.gradients import GradientStatistics
from gssim.plan import assign_buckets, bucket_limits
from gssim.scenario import Scenario, value_bytes
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

    @cached_property
    def layers(self) -> tuple[LayerInstance, ...]:
        """The unrolled model."""
        return unrolled(self.scenario.workload.model)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.scenario.ranks))

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
        """Bytes of one element."""
        return value_bytes(self.scenario.workload)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradient buckets by PyTorch's rule, in the order in which they are complete."""
        order = gradient_order(self.layers)
        members = [(self.layers[i], self.layers[i].layer.parameters[j]) for i, j in order]
        first, cap = bucket_limits(self.scenario.plan, self.scenario.policies)
        sizes = [parameter.elements * self.value_bytes for _, parameter in members]
        found = assign_buckets(sizes, first_bytes=first, cap_bytes=cap)
        return tuple(Bucket(i, tuple(members[p] for p in positions)) for i, positions in enumerate(found))

    def device(self, rank: int) -> DeviceType:
        """Return the device type of a rank."""
        return self.scenario.cluster.type_of(rank)
