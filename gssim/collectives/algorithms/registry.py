"""Registry of the algorithms of collectives, which map the members of a group to stages of hops.

The hops of an algorithm and a group are created once (sizes only scale them), so a model of a hundred layers costs no
more than one of a single layer.
"""

from collections.abc import Callable, Sequence

from gssim.collectives.algorithms.exchanges import (
    direct,
    direct_uneven,
    halving_doubling,
    hierarchical,
    one_way_torus,
    send,
    torus,
)
from gssim.collectives.algorithms.rings import (
    in_switch,
    pipelined_ring,
    ring_all_gather,
    ring_all_reduce,
    ring_all_to_all,
    ring_reduce_scatter,
    segmented_all_gather,
    segmented_all_reduce,
    store_and_forward,
)
from gssim.collectives.algorithms.trees import binomial, binomial_at_once, chain, double_tree
from gssim.collectives.communication import Communication
from gssim.collectives.stage import Hops, Members, Stage
from gssim.units import Floats

Algorithm = Callable[[Members, Communication], tuple[Stage, ...]]
ALGORITHMS: dict[tuple[str, str], Algorithm] = {
    ("ring", "all-reduce"): ring_all_reduce,
    ("ring", "reduce-scatter"): ring_reduce_scatter,
    ("ring", "all-gather"): ring_all_gather,
    ("ring", "all-to-all"): ring_all_to_all,
    ("ring", "all-gather-v"): store_and_forward,
    ("ring", "reduce-scatter-v"): store_and_forward,
    ("pipelined-ring", "all-gather-v"): pipelined_ring,
    ("pipelined-ring", "reduce-scatter-v"): pipelined_ring,
    ("ring-all-reduce", "reduce-scatter"): ring_all_reduce,
    ("direct", "all-reduce"): direct,
    ("direct", "reduce-scatter"): direct,
    ("direct", "all-gather"): direct,
    ("direct", "all-to-all"): direct,
    ("direct", "all-to-all-v"): direct_uneven,
    ("direct", "send"): send,
    ("binomial", "broadcast"): binomial,
    ("binomial-at-once", "broadcast"): binomial_at_once,
    ("binomial", "reduce"): binomial,
    ("chain", "broadcast"): chain,
    ("chain", "reduce"): chain,
    ("halving-doubling", "all-reduce"): halving_doubling,
    ("halving-doubling", "reduce-scatter"): halving_doubling,
    ("halving-doubling", "all-gather"): halving_doubling,
    ("double-tree", "all-reduce"): double_tree,
    ("in-switch", "all-reduce"): in_switch,
    ("hierarchical", "all-reduce"): hierarchical,
    ("hierarchical", "reduce-scatter"): hierarchical,
    ("hierarchical", "all-gather"): hierarchical,
    ("torus", "all-reduce"): torus,
    ("torus", "reduce-scatter"): torus,
    ("torus", "all-gather"): torus,
    ("one-way-torus", "all-reduce"): one_way_torus,
    ("one-way-torus", "reduce-scatter"): one_way_torus,
    ("one-way-torus", "all-gather"): one_way_torus,
    ("segmented-ring", "all-reduce"): segmented_all_reduce,
    ("segmented-ring", "all-gather"): segmented_all_gather,
    ("segmented-ring-all-reduce", "reduce-scatter"): segmented_all_reduce,
}
"""Function that returns the stages of an algorithm, by (algorithm, kind of collective)."""


def algorithms_for(kind: str) -> Sequence[str]:
    """Return the names of the algorithms for a kind of collective."""
    return [name for name, implemented in ALGORITHMS if implemented == kind]


def carried_by_rank(hops: Hops, ranks: int) -> tuple[Floats, Floats]:
    """Return the bytes that each rank sends and receives, per byte of the stage's size."""
    return hops.carried_by_rank(ranks)
