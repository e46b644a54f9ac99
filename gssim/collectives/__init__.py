"""Collectives: algorithms as stages of hops, and backends."""

from gssim.collectives.algorithms.registry import algorithms_for, carried_by_rank
from gssim.collectives.algorithms.trees import tree_depth
from gssim.collectives.backend import (
    BACKEND_ALGORITHMS,
    algorithm_of,
    at_once,
    following_s,
    has_notices,
    measured_s,
    message_s,
    overhead_s,
    posting_s,
    processor_byte_s,
    reduction_s,
    staging_bytes,
)
from gssim.collectives.communication import COPIES, TO_HOST, Communication, Exchange, Pairs, sums_of_others
from gssim.collectives.stage import Hops, Members, Stage, summed
