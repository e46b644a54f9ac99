"""How Gradient Sharding divides a bucket of gradients among its ranks.

[Note: hierarchy] On a mesh of two axes (`gs_hier`), `dp_shard` is inside a node and the push goes along `dp_replicate`,
across nodes (gradient-sharding A.3 E). Every complete bucket is reduce-scattered inside the node first, densely: its
elements are cut by place in the node, and each device gets its part, a mean over the node's samples (ranks weigh their
gradients by their part of these as they collect them). The devices of equal place, one of each node, form a push group:
each of the node's parts is cut again by owner, thresholded, and pushed to the owners across, who weigh what comes by
the sending node's part of the batch. Publishing goes the other way: round the push group, so that each has its place's
part whole, then round the node. Bytes that a device sends for N elements, g devices in a node, all shares even:

    inside:  (g-1)/g * N to reduce, and as many to publish
    across:  w(d) * N/g * (1 - 1/nodes) to push, N/g * (1 - 1/nodes) to publish

Of the elements, rank r owns its share: a place is cut off at the sum of its owners' shares, an owner at his own. The
mean over a node's g ranks is thresholded, which is as the gradient of one rank with the samples of all: that is how
its density is predicted. Where a mesh has one axis, there is one place, and all of this is the plain push.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from gssim.plan import splitting


@dataclass(frozen=True)
class Division:
    """The parts of a bucket: by place in the node, and of each place by node."""

    owned: tuple[tuple[int, ...], ...]
    """By place: elements of every owner, node by node; places, and their owners, follow one another."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Elements of every place."""
        return tuple(map(sum, self.owned))

    @cached_property
    def place_ranges(self) -> tuple[tuple[int, int], ...]:
        """Every place's half-open range of the bucket's elements.

        >>> Division(((2, 2), (3, 1))).place_ranges
        ((0, 4), (4, 8))
        """
        return tuple(pairwise(accumulate(self.places, initial=0)))

    def ranges(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return every owner's half-open range of the bucket's elements.

        >>> Division(((2, 2), (3, 1))).ranges(1)
        ((4, 7), (7, 8))
        """
        ends = tuple(accumulate(self.owned[place], initial=sum(self.places[:place])))
        return tuple(pairwise(ends))


def divide(elements: int, *, by_node: Sequence[Sequence[float]]) -> Division:
    """Return how `elements` are divided, given the share of every rank: node by node, and in each by place.

    >>> divide(9, by_node=[[0.25, 0.25], [0.25, 0.25]]).owned
    ((3, 2), (2, 2))
    """
    of_place = list(zip(*by_node, strict=True))
    if len(of_place) == 1:
        return Division((splitting.split(elements, of_place[0]),))
    places = splitting.split(elements, [sum(each) for each in of_place])
    parts = [splitting.proportional(each) if any(each) else splitting.even(len(each)) for each in of_place]
    return Division(tuple(splitting.split(n, part) for n, part in zip(places, parts, strict=True)))
