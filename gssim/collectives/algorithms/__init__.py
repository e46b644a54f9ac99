"""Algorithms of collectives, each from the members of a group to stages of hops."""

from gssim.collectives.algorithms.exchanges import SINGLE_FLOWS
from gssim.collectives.algorithms.registry import ALGORITHMS, algorithms_for, carried_by_rank
from gssim.collectives.algorithms.rings import SEGMENT_BYTES, ring_hops
from gssim.collectives.algorithms.trees import CHUNK_BYTES, tree_depth
from gssim.collectives.stage import Members

__all__ = [
    "ALGORITHMS",
    "CHUNK_BYTES",
    "SEGMENT_BYTES",
    "SINGLE_FLOWS",
    "Members",
    "algorithms_for",
    "carried_by_rank",
    "ring_hops",
    "tree_depth",
]
