"""Finds the best plans for a cluster and a model by branch and bound, and advises where a plan does not fit."""

from gssim.planner.advice import MAX_LAYER_PASSES, suggested_changes, with_suggested_changes
from gssim.planner.batches import PLAN, Batches
from gssim.planner.candidates import candidates
from gssim.planner.explore import Outcome, predict_or_bound
from gssim.planner.objectives import FRONT_RATIO
from gssim.planner.reasons import full_ratio, memory_lack, reason
from gssim.planner.search import Found, Search
