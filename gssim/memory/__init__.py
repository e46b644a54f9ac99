"""Memory: lifetimes of buffers, activation recomputation, and PyTorch's caching allocator."""

from gssim.memory.allocator import Block, CachingAllocator, NoMemoryLeftError, Request, rounded_bytes, segment_bytes
from gssim.memory.known_effects import Kind, KnownRequests, RepeatedRequests
from gssim.memory.lifetimes import (
    FORWARD_END,
    NOTHING,
    Event,
    Footprint,
    Lives,
    Timeline,
    activation_timeline,
    following,
    footprint,
    gradient_events,
    in_sequence,
    input_bytes,
    reduction_buffer_bytes,
    release_of,
    replaced_bytes,
    scratch_bytes,
    split_backward_buffers,
    traced_buffers,
    with_scratch,
)
from gssim.memory.recompute import CPU_RANDOM_STATE_BYTES, recomputation_begin, recomputed_buffers, rerun_positions
from gssim.workload.owned import LAST
