"""Parallelization plans: the methods and policies, and how batch, parameters, buckets and layers are split by them."""

from gssim.plan.bucket_partition import Division, divide
from gssim.plan.buckets import assign_buckets, bucket_limits
from gssim.plan.encodings import (
    CHUNK_ELEMENTS,
    ENCODINGS,
    INDEX_BYTES,
    MOST_INDEXED,
    SAMPLE_ELEMENTS,
    chosen,
    coo_range_error,
    message_bytes,
    scratch_elements,
)
from gssim.plan.mesh import AXES, DATA_AXES, Mesh
from gssim.plan.methods import METHODS, PREDICTED_ONLY, Method, MethodName
from gssim.plan.pipeline_schedule import SCHEDULES, Action, Message, in_flight, refuse, schedule
from gssim.plan.plan import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    MIB,
    Plan,
    Publish,
    Push,
    Replanning,
    ShareRules,
    absolute_threshold,
    resolved_push,
)
from gssim.plan.policies import Policies, refuse_what_cannot_run, resolve
from gssim.plan.rebalancing import Watch, observe, worth_moving
from gssim.plan.shard_sizing import InfeasibleError, OwnerTimes, cost_shares, memory_shares, owner_time_s
from gssim.plan.splitting import balance_batch, balanced_stages, even, greedy, proportional, ranges, split

__all__ = [
    "AXES",
    "CHUNK_ELEMENTS",
    "DATA_AXES",
    "DDP_BUCKET_BYTES",
    "DDP_FIRST_BUCKET_BYTES",
    "ENCODINGS",
    "INDEX_BYTES",
    "METHODS",
    "MIB",
    "MOST_INDEXED",
    "PREDICTED_ONLY",
    "SAMPLE_ELEMENTS",
    "SCHEDULES",
    "Action",
    "Division",
    "InfeasibleError",
    "Mesh",
    "Message",
    "Method",
    "MethodName",
    "OwnerTimes",
    "Plan",
    "Policies",
    "Publish",
    "Push",
    "Replanning",
    "ShareRules",
    "Watch",
    "absolute_threshold",
    "assign_buckets",
    "balance_batch",
    "balanced_stages",
    "bucket_limits",
    "chosen",
    "coo_range_error",
    "cost_shares",
    "divide",
    "even",
    "greedy",
    "in_flight",
    "memory_shares",
    "message_bytes",
    "observe",
    "owner_time_s",
    "proportional",
    "ranges",
    "refuse",
    "refuse_what_cannot_run",
    "resolve",
    "resolved_push",
    "schedule",
    "scratch_elements",
    "split",
    "worth_moving",
]
