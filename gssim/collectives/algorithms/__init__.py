"""Algorithms of collectives: each maps the members of a group to stages of hops between them."""

from gssim.collectives.algorithms.exchanges import SINGLE_FLOWS
from gssim.collectives.algorithms.registry import ALGORITHMS, algorithms_for
from gssim.collectives.algorithms.rings import SEGMENT_BYTES, ring_hops
from gssim.collectives.algorithms.trees import CHUNK_BYTES, tree_depth
from gssim.collectives.stage import Members
