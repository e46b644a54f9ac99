"""The device mesh: coordinates of each rank on the parallel axes, and the groups of ranks along an axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes, outermost first: ranks that differ in `tp` alone are adjacent, as in torchtitan."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks divide the samples of a batch."""
REPLICA_AXES = (*DATA_AXES, "cp")
"""Axes whose ranks hold the same part of the model, each with samples, or parts of sequences, of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes; ranks are numbered in the order of `AXES`, the last axis fastest."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Ranks in a row that divide experts among them: no axis of its own, but a part of all `REPLICA_AXES` together, of
    which `cp` is the innermost."""
    etp: int | None = None
    """Ranks of a tensor group that divide each of these experts; None: all. The others hold other experts: `ep` is then
    of these axes and of tensor together, of which the ranks in a row are `etp` to an expert."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """Number of parts into which a batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that hold the same part of the model: those of all `REPLICA_AXES`."""
        return self.data_ranks * self.cp

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank.

        >>> Mesh(pp=2, dp_shard=3).place(4)
        Place(pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=0)
        """
        coordinates = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return Place(*reversed(coordinates))

    def data_rank(self, rank: int) -> int:
        """Return the index of a rank's part of the batch: its position on the data axes."""
        return rank // (self.tp * self.cp) % self.data_ranks

    def replica_rank(self, rank: int) -> int:
        """Return the position of a rank among those that hold the same part of the model.

        >>> [Mesh(pp=2, dp_shard=2, cp=2).replica_rank(rank) for rank in range(8)]
        [0, 1, 2, 3, 0, 1, 2, 3]
        """
        return rank // self.tp % self.replica_ranks

    def expert_position(self, rank: int) -> int:
        """Return the position of a rank among those that divide experts with it.

        >>> [Mesh(dp_shard=2, cp=2, ep=2).expert_position(rank) for rank in range(4)]
        [0, 1, 0, 1]
        """
        return rank // self._expert_ranks % self.ep

    @property
    def _expert_ranks(self) -> int:
        return self.etp or self.tp

    @property
    def expert_stride(self) -> int:
        """Distance between ranks that hold the same experts, counted among those that hold the same part of all else.

        >>> Mesh(dp_replicate=4, ep=2).expert_stride, Mesh(dp_replicate=4, tp=2, ep=4, etp=1).expert_stride
        (2, 2)
        """
        return self.ep * self._expert_ranks // self.tp

    def expert_group(self, rank: int) -> Sequence[int]:
        """Return the ranks that divide experts with a rank: replica ranks in a row, or tensor ranks too.

        >>> Mesh(dp_replicate=4, ep=2).expert_group(3)
        range(2, 4)
        >>> Mesh(dp_shard=4, cp=2, ep=4).expert_group(5)
        range(4, 8)
        >>> mesh = Mesh(dp_replicate=4, tp=2, ep=4, etp=1)
        >>> mesh.expert_group(3), mesh.expert_replicas(3)
        (range(0, 4), range(3, 8, 4))
        """
        step = self._expert_ranks
        first = rank - step * self.expert_position(rank)
        return range(first, first + step * (self.ep - 1) + 1, step)

    def expert_replicas(self, rank: int) -> Sequence[int]:
        """Return the ranks that hold the same experts as a rank.

        >>> Mesh(dp_replicate=4, ep=2).expert_replicas(3)
        range(1, 4, 2)
        >>> Mesh(dp_shard=4, cp=2, ep=4).expert_replicas(5)
        range(1, 6, 4)
        """
        step = self._expert_ranks * self.ep
        every = self.tp * self.replica_ranks
        first = rank - rank % every // step * step
        return range(first, first + every - step + 1, step)

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
