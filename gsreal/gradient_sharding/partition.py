"""Divides buckets among owners: by elements, or at the edges of parameters."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from gssim.division import Division, divide


class Partition:
    """Divides the buckets of a model one after another, by the shares of the ranks: node by node, in each by place.

    With `whole_tensors` every parameter has one owner: a bucket is cut at the edges nearest to what each owner lacks of
    its share of all buckets so far, so that what one bucket cannot give is made up for in the next.
    """

    def __init__(self, by_node: Sequence[Sequence[float]], *, whole_tensors: bool) -> None:
        self.by_node, self.whole_tensors = by_node, whole_tensors
        self._shares = [share for of_place in zip(*by_node, strict=True) for share in of_place]
        self._owned = [0] * len(self._shares)

    def divide(self, sizes: Sequence[int]) -> Division:
        """Return how the next bucket is divided, of parameters with as many elements.

        >>> partition = Partition([[0.5], [0.5]], whole_tensors=True)
        >>> partition.divide([6, 3]).owned, partition.divide([1, 5]).owned
        (((6, 3),), ((1, 5),))
        """
        elements = sum(sizes)
        if not self.whole_tensors:
            return divide(elements, by_node=self.by_node)
        total = sum(self._owned) + elements
        lacking = [max(0.0, share * total - owned) for share, owned in zip(self._shares, self._owned, strict=True)]
        scale = elements / (sum(lacking) or 1.0)
        edges = list(accumulate(sizes, initial=0))
        cuts = [min(edges, key=lambda edge: abs(edge - wanted * scale)) for wanted in accumulate(lacking, initial=0.0)]
        parts = [last - first for first, last in pairwise([*cuts[:-1], elements])]
        self._owned = [owned + part for owned, part in zip(self._owned, parts, strict=True)]
        nodes = len(self.by_node)
        return Division(tuple(tuple(parts[i : i + nodes]) for i in range(0, len(parts), nodes)))

    @property
    def idle_owners(self) -> bool:
        """Whether an owner got nothing of any bucket so far that is cut at the edges of parameters."""
        return self.whole_tensors and not all(self._owned)
