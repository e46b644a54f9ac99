"""Parallelization plans: the methods and policies, and how batch, parameters, buckets and layers are split by them."""

from gssim.plan.buckets import Division, assign_buckets, bucket_limits, divide
from gssim.plan.context_blocks import Block, position_ranges, ring_blocks
from gssim.plan.encodings import INDEX_BYTES, SAMPLE_ELEMENTS, chosen, message_bytes, scratch_elements
from gssim.plan.mesh import DATA_AXES, REPLICA_AXES, Mesh
from gssim.plan.methods import METHODS, PREDICTED_ONLY, RUNS_WITH, MethodName
from gssim.plan.pipeline_schedule import Action
from gssim.plan.plan import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    MIB,
    Plan,
    Publish,
    Push,
    absolute_threshold,
    default_plan,
    largest_count,
    resolved_push,
)
from gssim.plan.policies import Policies, resolve
from gssim.plan.splitting import ranges
