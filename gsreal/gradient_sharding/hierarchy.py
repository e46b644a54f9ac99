"""Process groups of the ranks that push to one another: all ranks, or two levels with a dense reduction inside nodes.

Division of buckets and bytes sent per rank: [Note: hierarchy] in `gssim.plan.buckets`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding.bucket import Bucket, Owners, Partition
from gsreal.gradient_sharding.point_to_point import reduce_scatter_v
from gsreal.gradient_sharding.protocol import ExchangeProtocol, MessageKind, check_equal_on_all_ranks
from gsreal.gradient_sharding.side_stream import Observer, SideStream
from gssim.plan import splitting


@dataclass(frozen=True)
class Hierarchy:
    """The ranks that train one model: nodes with equally many ranks each; a node may be a single rank."""

    ranks: tuple[int, ...]
    """All ranks, node by node, and within a node by local rank."""
    inter_node: dist.ProcessGroup
    """The ranks with this one's local rank, one of each node: they push to one another."""
    intra_node: dist.ProcessGroup | None = None
    """The ranks of this one's node; None: it has no others."""
    same_experts: dist.ProcessGroup | None = None
    """The ranks that hold the same experts as this one, where ranks in a row divide these; None: all hold all."""
    protocol: ExchangeProtocol = field(init=False)
    """Sequence number of this rank's exchanges."""
    owners: Owners = field(init=False)
    """The ranks that push to one another what all hold."""
    expert_owners: Owners | None = field(init=False)
    """The ranks that hold the same experts, and push gradients of these to one another on one level."""

    def __post_init__(self) -> None:
        groups = [each for each in (self.inter_node, self.intra_node, self.same_experts) if each is not None]
        object.__setattr__(self, "protocol", ExchangeProtocol(dist.get_rank(), self.ranks, groups))
        object.__setattr__(self, "owners", Owners(self.inter_node))
        object.__setattr__(self, "expert_owners", None if self.same_experts is None else Owners(self.same_experts))
        if self.expert_owners is not None:
            held = tuple(dist.get_process_group_ranks(self.expert_owners.group))
            if held != self.ranks[self._expert_place :: self.expert_ranks]:
                raise ValueError(
                    "expert_group: ranks in a row of all that train the model divide the experts; ranks "
                    f"{held} are not those at one place of every row of {self.expert_ranks}"
                )

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that divide experts among them."""
        return 1 if self.expert_owners is None else len(self.ranks) // self.expert_owners.ranks

    @property
    def _expert_place(self) -> int:
        """Position of this rank among those that divide experts."""
        return self.ranks.index(dist.get_rank()) % self.expert_ranks

    @property
    def places(self) -> int:
        """Number of ranks in a node."""
        return 1 if self.intra_node is None else dist.get_world_size(self.intra_node)

    @property
    def place(self) -> int:
        """Local rank in the node."""
        return 0 if self.intra_node is None else dist.get_rank(self.intra_node)

    def partition(self, shard_shares: Sequence[float], *, whole_tensors: bool = False) -> Partition:
        """Return the partition of buckets for every rank's share, in the order of `ranks`."""
        return Partition(self._by_node(shard_shares), whole_tensors=whole_tensors)

    def expert_partition(self, shard_shares: Sequence[float]) -> Partition:
        """Return the partition of buckets of experts among the ranks that hold the same ones, in proportion."""
        shares = shard_shares[self._expert_place :: self.expert_ranks]
        fractions = splitting.proportional(shares) if any(shares) else splitting.even(len(shares))
        return Partition([[share] for share in fractions], whole_tensors=False)

    def set_weights(self, weights: Sequence[float], buckets: Iterable[Bucket]) -> None:
        """Let owners weight gradients, given every rank's fraction of the step's loss terms.

        A node's gradient is the mean over its ranks, each by its fraction of the node's loss terms. Likewise gradients
        of experts are sums over the ranks whose tokens these got, in a row, of which each must have as many loss terms:
        raises ValueError if some have more.
        """
        for first in range(0, len(weights), self.expert_ranks):
            row = weights[first : first + self.expert_ranks]
            if not math.isclose(min(row), max(row), abs_tol=1e-9):
                raise ValueError(
                    f"weights: ranks {self.ranks[first : first + self.expert_ranks]} divide experts, whose gradients "
                    f"sum over the tokens of all of them, and must have equal weights, not {tuple(row)}"
                )
        nodes, own = self._split_weights(weights, self.places)
        self.owners.weights = nodes
        own_of_experts = own
        if self.expert_owners is not None:
            rows, own_of_experts = self._split_weights(weights, self.expert_ranks)
            self.expert_owners.weights = rows
        for bucket in buckets:
            bucket.weight = own_of_experts if bucket.owners is self.expert_owners else own

    def _split_weights(self, weights: Sequence[float], ranks: int) -> tuple[tuple[float, ...], float]:
        """Return each row's fraction of all loss terms, and this rank's fraction of its row's.

        A row is `ranks` consecutive ranks.
        """
        if ranks == 1:
            return tuple(weights), 1.0
        rows = [sum(weights[first : first + ranks]) for first in range(0, len(weights), ranks)]
        place = self.ranks.index(dist.get_rank())
        own = weights[place]
        return tuple(rows), own / rows[place // ranks] if own else 0.0

    def _by_node(self, values: Sequence[float]) -> list[Sequence[float]]:
        return [values[first : first + self.places] for first in range(0, len(self.ranks), self.places)]

    def broadcast_from_first(self, tensors: Iterable[Tensor], *, of_experts: bool = False) -> None:
        """Set tensors on all ranks to the values of the first rank; of experts, of the first that holds the same."""
        for tensor in tensors:
            values = tensor.contiguous()
            for group in (self.same_experts,) if of_experts else (self.inter_node, self.intra_node):
                if group is not None:
                    dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            if values is not tensor:
                tensor.copy_(values)

    def check_equal_on_all_ranks(self, described: Mapping[str, str], device: torch.device) -> None:
        """Raise ValueError on all ranks if descriptions differ between them, naming the differences (a collective)."""
        check_equal_on_all_ranks(described, self.ranks, dist.get_rank(), self.all_reduce, device)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce a tensor over all ranks: over nodes where there are several, and inside nodes of several ranks."""
        for group in (self.inter_node, self.intra_node):
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(tensor, op, group=group)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value]
        for group in (self.inter_node, self.intra_node):
            if group is not None:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, values, group=group)
                values = [each for part in parts for each in part]
        return values


def hierarchy_of(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, expert_group: dist.ProcessGroup | None = None
) -> Hierarchy:
    """Return the ranks of a mesh or of a group; all ranks if neither is given.

    A mesh of two axes has nodes on the first and the ranks of a node on the second, as `fully_shard` has replicas and
    shards. Raises ValueError if there are more axes, both a mesh and a group, or this rank is in neither.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group before")
    if mesh is None:
        group = group or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may train the model")
        return Hierarchy(tuple(dist.get_process_group_ranks(group)), group, same_experts=expert_group)
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh: only the mesh's ranks may train the model")
    if group is not None or mesh.ndim > 2:
        raise ValueError(f"takes a group, or a mesh of one or two axes; the mesh has {mesh.ndim}")
    ranks = tuple(mesh.mesh.flatten().tolist())
    inside = mesh.get_group(1) if mesh.ndim == 2 and mesh.size(1) > 1 else None
    return Hierarchy(ranks, mesh.get_group(0), inside, expert_group)


class IntraNodeReducer:
    """Reduce-scatters buckets inside the node before they are pushed; at most one is in flight.

    With `overlap` this runs concurrently with compute: a bucket is then taken once the next one is complete.
    """

    def __init__(self, hierarchy: Hierarchy, device: torch.device, *, overlap: bool, observe: Observer):
        self.group, self.protocol, self.observe = hierarchy.intra_node, hierarchy.protocol, observe
        self.overlaps = overlap and self.group is not None
        self._side_stream = SideStream(device)
        self._in_flight: tuple[Bucket, Tensor, Callable[[], None] | None] | None = None

    def begin(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket's gradient over the node.

        This rank's part then replaces the gradient.
        """
        gradient, group = bucket.collected_gradient, self.group
        if group is None or not bucket.is_divided_in_node:
            self._in_flight = bucket, gradient, None
            return
        label = f"reduce-scatter bucket {bucket.index}"
        labels = (f"issue {label}", "backward") if self.overlaps else (label, "exposed_communication")
        with self.observe(*labels, group=None if self.overlaps else group), self.protocol.exchange(label):
            part = gradient.new_empty(bucket.elements)
            tag = self.protocol.tag(MessageKind.REDUCE_INTRA_NODE, bucket.index)
            wait = self._side_stream.begin(
                lambda: reduce_scatter_v(part, gradient, bucket.node_ranges, group=group, tag=tag)
            )
            self._in_flight = bucket, part, wait

    @property
    def runs_beside(self) -> bool:
        """Whether a bucket is being reduced beside the compute, and is to be taken later."""
        return self.overlaps and self._in_flight is not None and self._in_flight[2] is not None

    def take(self) -> Bucket | None:
        """Wait for the bucket in flight and return it, reduced; None if there is none."""
        if self._in_flight is None:
            return None
        bucket, part, wait = self._in_flight
        self._in_flight = None
        if wait is not None:
            wait()
        bucket.gradient = part
        return bucket
