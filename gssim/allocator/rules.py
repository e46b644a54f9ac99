"""The sizes that PyTorch's CUDA caching allocator goes by.

Source: torch 2.13, c10/core/AllocatorConfig.h (the constants) and c10/cuda/CUDACachingAllocator.cpp (round_size,
get_allocation_size, should_split), with the defaults of PYTORCH_ALLOC_CONF. Of its options, `expandable_segments` alone
is modelled: `roundup_power2_divisions`, `max_split_size_mb`, `large_segment_size_mb` and
`garbage_collection_threshold` are left at their defaults, with which they do nothing.
"""

MIN_BLOCK_BYTES = 512
"""Requests are rounded up to a multiple of it."""
SMALL_BYTES = 2**20
"""Up to so much, rounded, a request is small."""
SMALL_SEGMENT_BYTES = 2 * 2**20
"""What is taken of the device for small requests."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""What is taken for large requests that are below MIN_LARGE_BYTES."""
MIN_LARGE_BYTES = 10 * 2**20
"""From here on, a request has a segment as large as it is, rounded up to ROUND_LARGE_BYTES."""
ROUND_LARGE_BYTES = 2 * 2**20


def rounded_bytes(size_bytes: float) -> int:
    """Return the bytes of the block that a request asks for.

    >>> rounded_bytes(1), rounded_bytes(512), rounded_bytes(513)
    (512, 512, 1024)
    """
    return max(1, -(-int(size_bytes) // MIN_BLOCK_BYTES)) * MIN_BLOCK_BYTES


def is_small(size_bytes: int) -> bool:
    """Return whether a rounded request is served from the pool of small blocks."""
    return size_bytes <= SMALL_BYTES


def segment_bytes(size_bytes: int) -> int:
    """Return what is taken of the device where no free block is large enough for a rounded request.

    >>> [segment_bytes(size * 2**20) // 2**20 for size in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if is_small(size_bytes):
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def page_bytes(*, small: bool) -> int:
    """Return the step in which an expandable segment grows."""
    return SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES


def least_remainder_bytes(*, small: bool, expandable: bool) -> int:
    """Return how much must be left of a free block for it to be split: 512 B, but of large ones more than 1 MiB."""
    return MIN_BLOCK_BYTES if small or expandable else SMALL_BYTES + 1
