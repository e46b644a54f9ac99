"""The device mesh: coordinates of each rank on the parallel axes, and the groups of ranks along an axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""From the outermost to the innermost: ranks that differ in `tp` alone are adjacent, as in torchtitan."""
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes; ranks are numbered in the order of `AXES`, the last axis fastest."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.tp)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """Number of parts into which a batch is divided."""
        return self.dp_replicate * self.dp_shard

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank.

        >>> Mesh(pp=2, dp_shard=3).place(4)
        Place(pp=1, dp_replicate=0, dp_shard=1, tp=0)
        """
        coordinates = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return Place(*reversed(coordinates))

    def data_rank(self, rank: int) -> int:
        """Return the index of a rank's part of the batch: its position on the data axes."""
        return rank // self.tp % self.data_ranks

    def group(self, rank: int, *axes: str) -> Sequence[int]:
        """Return the sorted ranks that differ from `rank` on no axis but the given ones.

        >>> Mesh(dp_shard=2, tp=2).group(1, "dp_shard")
        range(1, 4, 2)
        >>> tuple(Mesh(pp=2, dp_shard=2, tp=2).group(0, "pp", "tp"))
        (0, 1, 4, 5)
        """
        place = self.place(rank)
        strides = [prod(self.sizes[i + 1 :]) for i in range(len(AXES))]
        free = [(size, stride) for name, size, stride in zip(AXES, self.sizes, strides, strict=True) if name in axes]
        free = [(size, stride) for size, stride in free if size > 1]
        first = sum(
            getattr(place, name) * stride for name, stride in zip(AXES, strides, strict=True) if name not in axes
        )
        if not free:
            return range(first, first + 1)
        step, count = free[-1][1], prod(size for size, _ in free)
        if all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(free)):
            return range(first, first + step * (count - 1) + 1, step)
        offsets = product(*([stride * i for i in range(size)] for size, stride in free))
        return tuple(sorted(first + sum(offset) for offset in offsets))
