"""PyTorch's caching allocator on a CUDA device, as a pure function of what is asked of it and given back."""

from gssim.allocator.caching import CachingAllocator, NoMemoryLeftError, Request
from gssim.allocator.pool import Block
from gssim.allocator.rules import rounded_bytes, segment_bytes

__all__ = ["Block", "CachingAllocator", "NoMemoryLeftError", "Request", "rounded_bytes", "segment_bytes"]
