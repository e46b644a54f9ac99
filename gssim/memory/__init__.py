"""Memory: lifetimes of buffers, activation recomputation, and PyTorch's caching allocator."""

from gssim.memory.allocator import Block, CachingAllocator, NoMemoryLeftError, Request, rounded_bytes, segment_bytes
from gssim.memory.lifetimes import (
    NOTHING,
    Event,
    Footprint,
    Lives,
    Timeline,
    activation_timeline,
    as_traced,
    footprint,
    gradient_events,
    in_sequence,
    input_bytes,
    reduction_buffer_bytes,
    release_of,
    scratch_bytes,
    with_scratch,
)
from gssim.memory.recompute import CPU_RANDOM_STATE_BYTES, LAST, last_saved, recomputed_buffers

__all__ = [
    "CPU_RANDOM_STATE_BYTES",
    "LAST",
    "NOTHING",
    "Block",
    "CachingAllocator",
    "Event",
    "Footprint",
    "Lives",
    "NoMemoryLeftError",
    "Request",
    "Timeline",
    "activation_timeline",
    "as_traced",
    "footprint",
    "gradient_events",
    "in_sequence",
    "input_bytes",
    "last_saved",
    "recomputed_buffers",
    "reduction_buffer_bytes",
    "release_of",
    "rounded_bytes",
    "scratch_bytes",
    "segment_bytes",
    "with_scratch",
]
