"""Gradient buckets: assignment of tensors by PyTorch's rule, and their partition among the ranks of Gradient Sharding.

[Note: hierarchy] On a mesh of two axes (`gs_hier`), `dp_shard` is inside a node and the push goes along `dp_replicate`,
across nodes. Every complete bucket is first reduce-scattered inside the node, densely: its
elements are cut by local rank, and each device gets its part, the mean over the node's samples (ranks weight their
gradients by their part of these as they collect them). The devices of equal local rank, one of each node, form a push
group: each of the node's parts is cut again by owner, thresholded, and pushed to the owners in the other nodes, which
weight the contributions by the sending node's part of the batch. Publishing goes the other way: an all-gather in the
push group, after which every device holds its local rank's part whole, then an all-gather in the node. Bytes that a
device sends for N elements, g devices in a node, all shards even:

    inside:  (g-1)/g * N to reduce, and as many to publish
    across:  w(d) * N/g * (1 - 1/nodes) to push, N/g * (1 - 1/nodes) to publish

Rank r owns its shard's share of the elements: a local rank's range ends at the sum of its owners' shares, an owner's at
its own. The mean over a node's g ranks is thresholded, which is like the gradient of one rank with the samples of all:
its density is predicted so. A mesh of one axis has one local rank, and all of this reduces to the plain push.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from gssim.plan import splitting
from gssim.plan.plan import DDP_BUCKET_BYTES, Plan
from gssim.plan.policies import Policies


def bucket_limits(plan: Plan, policies: Policies) -> tuple[float, float]:
    """Return (first, further) bucket limits in bytes.

    DistributedDataParallel closes its first bucket early only where its cap is the default one; DeepSpeed never does.
    """
    own_cap = plan.bucket_bytes != DDP_BUCKET_BYTES or policies.zero1_implementation == "deepspeed"
    if policies.gradients == "all-reduce" and own_cap:
        return plan.bucket_bytes, plan.bucket_bytes
    return plan.first_bucket_bytes, plan.bucket_bytes


def assign_buckets(
    sizes_bytes: Sequence[float], *, first_bytes: float, cap_bytes: float, within: bool = False
) -> list[list[int]]:
    """Return the buckets as lists of tensors (positions in `sizes_bytes`, the order in which gradients become ready).

    PyTorch's rule: a bucket closes once it holds at least its limit, `first_bytes` for the first, then `cap_bytes`.
    Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size, as rebuilt after step one.
    `within`: DeepSpeed's rule: a bucket closes before a tensor that would exceed its limit; a larger tensor is alone.
    Source: DeepSpeed, runtime/zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads.

    >>> assign_buckets([3, 3, 3, 3], first_bytes=4, cap_bytes=100)
    [[0, 1], [2, 3]]
    >>> assign_buckets([3, 3, 9, 3], first_bytes=7, cap_bytes=7, within=True)
    [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    bucket_bytes = 0.0
    limit = first_bytes
    for position, size in enumerate(sizes_bytes):
        if within and current and bucket_bytes + size > limit:
            buckets.append(current)
            current, bucket_bytes, limit = [], 0.0, cap_bytes
        current.append(position)
        bucket_bytes += size
        if bucket_bytes >= limit and not within:
            buckets.append(current)
            current, bucket_bytes, limit = [], 0.0, cap_bytes
    if current:
        buckets.append(current)
    return buckets


@dataclass(frozen=True)
class Fragment:
    """Parameters that are synchronized together, once in a period, and when; see `Streaming`."""

    begin_step: int
    """Step of a period, from 1, after which their changes are sent."""
    end_step: int
    """Step after which they are updated. If it is `begin_step`, ranks wait for the exchange."""
    buckets: tuple[tuple[int, ...], ...]
    """Positions of the tensors in the model's order, by bucket."""


def fragment_steps(plan: Plan, policies: Policies) -> tuple[tuple[int, int], ...]:
    """Return (step that begins its exchange, step that ends it) of every fragment, from 1 in a period."""
    every, streaming = policies.sync_every_steps or 1, plan.streaming
    if not policies.in_fragments:
        return ((every, every),)
    ends = [(number + 1) * every // streaming.fragments for number in range(streaming.fragments)]
    return tuple((end - streaming.delay_steps, end) for end in ends)


def fragments_of(
    plan: Plan, policies: Policies, *, layers: Sequence[int], sizes_bytes: Sequence[float]
) -> tuple[Fragment, ...]:
    """Return the fragments of a model whose parameters are synchronized periodically: a single one, unless the plan
    cuts it.

    Args:
        plan: how many fragments there are, and the size of their buckets.
        policies: of that plan.
        layers: the layer of every tensor, in the model's order.
        sizes_bytes: the size of every tensor, as it is synchronized.
    """
    steps, cap = fragment_steps(plan, policies), plan.bucket_bytes
    places = {layer: place for place, layer in enumerate(dict.fromkeys(layers))}
    fragments = []
    for number, (begin, end) in enumerate(steps):
        own = [i for i, layer in enumerate(layers) if places[layer] % len(steps) == number]
        buckets = assign_buckets([sizes_bytes[i] for i in own], first_bytes=cap, cap_bytes=cap)
        fragments.append(Fragment(begin, end, tuple(tuple(own[i] for i in bucket) for bucket in buckets)))
    return tuple(fragments)


@dataclass(frozen=True)
class Division:
    """The ranges of a bucket: by local rank, and inside each by node."""

    owned: tuple[tuple[int, ...], ...]
    """By local rank: elements of every owner, node by node; ranges follow one another in this order."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Elements of every local rank."""
        return tuple(map(sum, self.owned))

    @cached_property
    def place_ranges(self) -> tuple[tuple[int, int], ...]:
        """Half-open range of the bucket's elements of every local rank.

        >>> Division(((2, 2), (3, 1))).place_ranges
        ((0, 4), (4, 8))
        """
        return tuple(pairwise(accumulate(self.places, initial=0)))

    def ranges(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return the half-open range of the bucket's elements of every owner at a local rank.

        >>> Division(((2, 2), (3, 1))).ranges(1)
        ((4, 7), (7, 8))
        """
        ends = tuple(accumulate(self.owned[place], initial=sum(self.places[:place])))
        return tuple(pairwise(ends))


def divide(elements: int, *, by_node: Sequence[Sequence[float]]) -> Division:
    """Return the partition of `elements`, given the share of every rank: node by node, and in each by local rank.

    >>> divide(9, by_node=[[0.25, 0.25], [0.25, 0.25]]).owned
    ((3, 2), (2, 2))
    """
    shares_by_place = list(zip(*by_node, strict=True))
    if len(shares_by_place) == 1:
        return Division((splitting.split(elements, shares_by_place[0]),))
    places = splitting.split(elements, [sum(shares) for shares in shares_by_place])
    fractions = [
        splitting.proportional(shares) if any(shares) else splitting.even(len(shares)) for shares in shares_by_place
    ]
    return Division(tuple(splitting.split(n, shares) for n, shares in zip(places, fractions, strict=True)))
