"""Division of sequences among context-parallel ranks, and the blocks of ring attention that each rank computes.

A block is the attention of a rank's queries to the keys of one rank. Under a causal mask a position attends to itself
and earlier ones alone. If sequences are cut in one part per rank, rank i (from 0) computes i whole blocks and half of
the block of its own keys, so the last rank works (2 * ranks - 1) / ranks times as long as the mean. In the balanced
division (`zigzag`) sequences are cut in 2 * ranks parts, and rank i has part i and part i from the end. Then every rank
computes half of every block. Source: Brandon et al. 2023, Striped Attention (arXiv:2311.09431);
the zigzag order is that of Megatron-LM and of torch's context parallelism.
"""

from typing import NamedTuple


def position_ranges(length: int, *, ranks: int, rank: int, zigzag: bool) -> tuple[tuple[int, int], ...]:
    """Return the half-open ranges of positions of a sequence that a rank has.

    >>> position_ranges(12, ranks=2, rank=1, zigzag=False), position_ranges(12, ranks=2, rank=1, zigzag=True)
    (((6, 12),), ((3, 6), (6, 9)))
    """
    if not zigzag:
        part = length // ranks
        return ((rank * part, (rank + 1) * part),)
    part = length // (2 * ranks)
    return tuple((index * part, (index + 1) * part) for index in (rank, 2 * ranks - 1 - rank))


class Block(NamedTuple):
    """A block of attention: of queries from `first_half` on, to keys of the first `key_halves` halves of a rank's."""

    first_half: int
    """0: all queries; 1: those of the second half alone."""
    key_halves: int
    causal: bool
    """Whether queries and keys have the same positions, each query sees the earlier keys alone."""

    @property
    def work(self) -> float:
        """Work over that of a block of all queries and keys."""
        return (2 - self.first_half) / 2 * self.key_halves / 2 * (0.5 if self.causal else 1.0)


def block_of(rank: int, source: int, *, causal: bool, zigzag: bool) -> Block | None:
    """Return the block of a rank's queries and the keys of a source rank; None: no query sees any of them."""
    if not causal:
        return Block(0, 2, causal=False)
    if rank == source:
        return Block(0, 2, causal=True)
    if not zigzag:
        return Block(0, 2, causal=False) if source < rank else None
    return Block(0, 1, causal=False) if source < rank else Block(1, 2, causal=False)


def ring_blocks(rank: int, *, ranks: int, causal: bool, zigzag: bool) -> tuple[Block | None, ...]:
    """Return a rank's blocks of attention in the order in which keys and values reach it; None: nothing to attend to.

    Its own keys and values come first, then those of the rank before it in the ring, and so on.

    >>> [each and each.work for each in ring_blocks(1, ranks=3, causal=True, zigzag=False)]
    [0.5, 1.0, None]
    >>> [each and each.work for each in ring_blocks(1, ranks=3, causal=True, zigzag=True)]
    [0.5, 0.5, 0.5]
    """
    return tuple(block_of(rank, (rank - step) % ranks, causal=causal, zigzag=zigzag) for step in range(ranks))
