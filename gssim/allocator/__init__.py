"""PyTorch's caching allocator on a CUDA device, as a pure function of what is asked of it and given back."""

from gssim.allocator.block import Block
from gssim.allocator.caching import CachingAllocator, NoMemoryLeftError
from gssim.allocator.rules import rounded_bytes, segment_bytes

__all__ = ["Block", "CachingAllocator", "NoMemoryLeftError", "rounded_bytes", "segment_bytes"]
