"""Collectives: algorithms as stages of hops, backends, and closed forms of their time."""

from gssim.collectives.algorithms.registry import algorithms_for, carried_by_rank
from gssim.collectives.algorithms.trees import tree_depth
from gssim.collectives.backend import (
    BACKEND_ALGORITHMS,
    algorithm_of,
    at_once,
    has_notices,
    measured_s,
    message_s,
    overhead_s,
    posting_s,
    processor_byte_s,
    processor_s,
    reduction_s,
    staging_bytes,
)
from gssim.collectives.closed_forms import CLOSED_FORMS, hierarchical_time_s, ring_all_reduce_time_s, torus_time_s
from gssim.collectives.communication import (
    COPIES,
    FROM_HOST,
    KINDS,
    TO_HOST,
    Communication,
    Exchange,
    Pairs,
    summed_without,
)
from gssim.collectives.stage import Hops, HostCopies, Stage, summed

__all__ = [
    "BACKEND_ALGORITHMS",
    "CLOSED_FORMS",
    "COPIES",
    "FROM_HOST",
    "KINDS",
    "TO_HOST",
    "Communication",
    "Exchange",
    "Hops",
    "HostCopies",
    "Pairs",
    "Stage",
    "algorithm_of",
    "algorithms_for",
    "at_once",
    "carried_by_rank",
    "has_notices",
    "hierarchical_time_s",
    "measured_s",
    "message_s",
    "overhead_s",
    "posting_s",
    "processor_byte_s",
    "processor_s",
    "reduction_s",
    "ring_all_reduce_time_s",
    "staging_bytes",
    "summed",
    "summed_without",
    "torus_time_s",
    "tree_depth",
]
