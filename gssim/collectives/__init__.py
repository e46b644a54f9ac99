"""Collectives: what is handed over, the algorithms that carry them out, and what a backend adds."""

from gssim.collectives.algorithms import ALGORITHMS, SINGLE_FLOWS, Members, algorithms_for, carried_by_rank, tree_depth
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
from gssim.collectives.closed_forms import CLOSED_FORMS, ring_all_reduce_time_s
from gssim.collectives.communication import KINDS, Communication
from gssim.collectives.pairs import Exchange, Pairs, summed_without
from gssim.collectives.stage import Hops, Stage, summed

__all__ = [
    "ALGORITHMS",
    "BACKEND_ALGORITHMS",
    "CLOSED_FORMS",
    "KINDS",
    "SINGLE_FLOWS",
    "Communication",
    "Exchange",
    "Hops",
    "Members",
    "Pairs",
    "Stage",
    "algorithm_of",
    "algorithms_for",
    "at_once",
    "carried_by_rank",
    "has_notices",
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
    "tree_depth",
]
