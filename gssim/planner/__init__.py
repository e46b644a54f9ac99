"""The planner: the best plans for a cluster and a model, and advice where a plan does not fit."""

from gssim.planner.advice import MOST_PASSES, remedies, with_remedies
from gssim.planner.batches import PLAN, Batches
from gssim.planner.candidates import candidates
from gssim.planner.explore import Outcome
from gssim.planner.objectives import FRONT_RATIO
from gssim.planner.reasons import bound_by, full_ratio, memory_lack, reason
from gssim.planner.search import Found, Search
from gssim.planner.workers import judged, searchers

__all__ = [
    "FRONT_RATIO",
    "MOST_PASSES",
    "PLAN",
    "Batches",
    "Found",
    "Outcome",
    "Search",
    "bound_by",
    "candidates",
    "full_ratio",
    "judged",
    "memory_lack",
    "reason",
    "remedies",
    "searchers",
    "with_remedies",
]
