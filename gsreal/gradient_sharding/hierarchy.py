"""Who pushes to whom: among all ranks, or on two levels, across nodes what was reduced inside them.

What is divided how, and who sends how much: [Note: hierarchy] in `gssim.plan.bucket_partition`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding.bucket import Bucket, Partition
from gsreal.gradient_sharding.point_to_point import reduce_scatter_v
from gsreal.gradient_sharding.protocol import Kind, Protocol, check_alike
from gsreal.gradient_sharding.side_stream import Lane, Observer


@dataclass(frozen=True)
class Levels:
    """The ranks that train one model: nodes, and in each as many places; a node of one place is a rank."""

    ranks: tuple[int, ...]
    """All of them, node by node, and in each by place."""
    across: dist.ProcessGroup
    """The ranks of this one's place, one of each node: they push to one another."""
    inside: dist.ProcessGroup | None = None
    """The ranks of this one's node; None: it is alone in it."""
    protocol: Protocol = field(default_factory=lambda: Protocol(dist.get_rank()))
    """Where this rank is in the order of their exchanges."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return dist.get_world_size(self.across)

    @property
    def node(self) -> int:
        """Which of them this rank is in."""
        return dist.get_rank(self.across)

    @property
    def places(self) -> int:
        """Number of ranks in a node."""
        return 1 if self.inside is None else dist.get_world_size(self.inside)

    @property
    def place(self) -> int:
        """Which of them this one is."""
        return 0 if self.inside is None else dist.get_rank(self.inside)

    def partition(self, shard_shares: Sequence[float], *, whole_tensors: bool = False) -> Partition:
        """Return what divides buckets, given every rank's share, in the order of `ranks`."""
        return Partition(self._by_node(shard_shares), whole_tensors=whole_tensors)

    def weigh(self, weights: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """Return every node's part of the step's loss terms, and this rank's part of its node's, given every rank's."""
        if self.inside is None:
            return tuple(weights), 1.0
        nodes = [sum(of_node) for of_node in self._by_node(weights)]
        own = weights[self.node * self.places + self.place]
        return tuple(nodes), own / nodes[self.node] if own else 0.0

    def _by_node(self, values: Sequence[float]) -> list[Sequence[float]]:
        return [values[first : first + self.places] for first in range(0, len(self.ranks), self.places)]

    def make_equal(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the values of the first one."""
        for tensor in tensors:
            values = tensor.contiguous()
            for group in (self.across, self.inside):
                if group is not None:
                    dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            if values is not tensor:
                tensor.copy_(values)

    def check_alike(self, described: Mapping[str, str], device: torch.device) -> None:
        """Raise ValueError on all ranks where what must be equal on all of them is not, with names (a collective)."""
        check_alike(described, self.ranks, dist.get_rank(), self.all_reduce, device)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Put all ranks' values of a tensor together."""
        for group in (self.across, self.inside):
            if group is not None:
                dist.all_reduce(tensor, op, group=group)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found = [value]
        for group in (self.across, self.inside):
            if group is not None:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, found, group=group)
                found = [each for part in parts for each in part]
        return found


def levels_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Levels:
    """Return the ranks of a mesh, or of a group: all ranks where neither is given.

    A mesh of two axes has nodes on the first and the places in them on the second, as `fully_shard` has replicas and
    shards. Raises ValueError where there are more axes, both a mesh and a group, or this rank is in neither.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group before")
    if mesh is None:
        group = group or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may train the model")
        return Levels(tuple(dist.get_process_group_ranks(group)), group)
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh: only the mesh's ranks may train the model")
    if group is not None or mesh.ndim > 2:
        raise ValueError(f"takes a group, or a mesh of one or two axes; the mesh has {mesh.ndim}")
    ranks = tuple(mesh.mesh.flatten().tolist())
    inside = mesh.get_group(1) if mesh.ndim == 2 and mesh.size(1) > 1 else None
    return Levels(ranks, mesh.get_group(0), inside)


class InNode:
    """Reduces buckets inside the node before they are pushed: one is under way at most.

    Beside the compute where `overlap` says so: then a bucket is taken once the next one is complete.
    """

    def __init__(self, levels: Levels, device: torch.device, *, overlap: bool, observe: Observer):
        self.group, self.protocol, self.observe = levels.inside, levels.protocol, observe
        self.overlaps = overlap and self.group is not None
        self._lane = Lane(device)
        self._under_way: tuple[Bucket, Tensor, Callable[[], None] | None] | None = None

    def begin(self, bucket: Bucket) -> None:
        """Begin to add up this place's part over the node, which takes the place of the bucket's gradient."""
        gradient, group = bucket.gradient, self.group
        assert gradient is not None
        if group is None:
            self._under_way = bucket, gradient, None
            return
        label = f"reduce-scatter bucket {bucket.index}"
        labels = (f"issue {label}", "backward") if self.overlaps else (label, "exposed_communication")
        with self.observe(*labels), self.protocol.exchange(label):
            part, tag = gradient.new_empty(bucket.elements), self.protocol.tag(Kind.REDUCE_IN_NODE, bucket.index)
            wait = self._lane.begin(lambda: reduce_scatter_v(part, gradient, bucket.node_ranges, group=group, tag=tag))
            self._under_way = bucket, part, wait

    def take(self) -> Bucket | None:
        """Return the bucket that was begun, reduced; None: there is none."""
        if self._under_way is None:
            return None
        bucket, part, wait = self._under_way
        self._under_way = None
        if wait is not None:
            wait()
        bucket.gradient = part
        return bucket
