"""The allocator itself: what is asked of it, and what it takes of the device.

[Note: replay] It does what torch's does with the same requests in the same order (c10/cuda/CUDACachingAllocator.cpp,
DeviceCachingAllocator: malloc, free_block, try_merge_blocks, release_cached_blocks, try_allocate_expandable_block).
A request gets the smallest free block of its stream and pool that is large enough, which is split where enough is left
over; where there is none, a new segment of the device. What is given back is joined with its free neighbours and kept.
Nothing goes back to the device until it has no memory left: then all free blocks that are whole segments do (of
expandable segments, all whole pages of free blocks), and the request is tried once more.

Assumed: the device has as much memory for segments as it has bytes. Blocks that several streams use (`record_stream`)
are not modelled: of what is simulated, none is given back before all streams are done with it, but what gloo's own
collectives exchange on a GPU (initializeStreamsEvents).

[Note: addresses] Between free blocks of equal size, the one with the lowest address is taken. Where the device puts
segments is told nowhere; they are taken to be at falling addresses, as Linux hands them out. It seldom matters. Of
eleven runs measured on an H200, one reserved 1612 MiB: so say falling addresses and 16 of 20 random orders; rising
ones, the order in which the fewest blocks that stay lie among those that go, say 1516 MiB. The other ten are the same
in every order tried.
"""

from collections.abc import Iterator

from gssim.allocator.pool import Block, ExpandablePool, Pool
from gssim.allocator.rules import is_small, rounded_bytes, segment_bytes

Request = tuple[list[Block], Pool, int, int, int]
"""Where blocks like it are kept, its pool, its rounded bytes (0: it is given back), what is asked for, and which of
those that are kept is given back: 0 the oldest, -1 the latest."""


class NoMemoryLeftError(Exception):
    """The device has no memory left for a request, with all that can be given back to it."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"{missing_bytes} bytes are missing")
        self.missing_bytes = missing_bytes


class CachingAllocator:
    """Replays requests; see [Note: replay]. `limit_bytes`: what the device has for it; absent: no end.

    >>> allocator = CachingAllocator()
    >>> kept, gone = allocator.allocate(3 * 2**20), allocator.allocate(100)
    >>> allocator.allocated_bytes - 3 * 2**20, allocator.reserved_bytes // 2**20
    (512, 22)
    >>> allocator.free(gone)
    >>> allocator.allocated_bytes == 3 * 2**20, allocator.reserved_bytes // 2**20
    (True, 22)
    """

    def __init__(self, *, limit_bytes: float | None = None, expandable_segments: bool = False) -> None:
        self.limit_bytes, self.expandable_segments = limit_bytes, expandable_segments
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.peak_requested_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.pools: dict[tuple[str, bool], Pool] = {}

    def allocate(self, size_bytes: float, stream: str = "") -> Block | None:
        """Return a block for a request on a stream; None for nothing, which takes none.

        Raises NoMemoryLeftError where the device has none, and the allocator nothing that it can give back.
        """
        requested = int(size_bytes)
        if not requested:
            return None
        size, kept = rounded_bytes(requested), list[Block]()
        self.serve(iter([(kept, self.pool_of(size, stream), size, requested, 0)]))
        return kept.pop()

    def free(self, block: Block | None) -> None:
        """Take a block back: joined with its free neighbours, it waits for the next request."""
        if block is None:
            return
        address, _, requested, pool = block
        if pool.is_free(address):
            raise ValueError(f"the block at {address} is free already")
        self.serve(iter([([block], pool, 0, requested, 0)]))

    def serve(self, requests: Iterator[Request]) -> Request | None:
        """Serve requests, up to one that gives back what is not there, which is returned; None: all are served."""
        requested, allocated = self.requested_bytes, self.allocated_bytes
        most_requested, most_allocated = self.peak_requested_bytes, self.peak_allocated_bytes
        try:
            for request in requests:
                kept, pool, rounded, size, place = request
                if rounded:
                    block = pool.take(rounded, size) or self._new(pool, rounded, size)
                    kept.append(block)
                    requested += size
                    allocated += block[1]
                    if requested > most_requested:
                        most_requested = requested
                    if allocated > most_allocated:
                        most_allocated = allocated
                elif kept:
                    address, whole, size, pool = kept.pop(place)
                    requested -= size
                    allocated -= whole
                    pool.give_back(address, whole)
                else:
                    return request
        finally:
            self.requested_bytes, self.allocated_bytes = requested, allocated
            self.peak_requested_bytes, self.peak_allocated_bytes = most_requested, most_allocated
        return None

    def pool_of(self, size_bytes: int, stream: str) -> Pool:
        """Return the pool that serves a rounded request on a stream."""
        small = is_small(size_bytes)
        found = self.pools.get((stream, small))
        if found is None:
            found = ExpandablePool(small=small) if self.expandable_segments else Pool(small=small)
            self.pools[stream, small] = found
        return found

    # Taking memory of the device, and giving it back ------------------------------------------------------------------

    def _new(self, pool: Pool, size: int, requested: int) -> Block:
        """Return a block of memory that is taken of the device."""
        if not pool.grow(size, self._reserve):
            self.release_cached()
            if not pool.grow(size, self._reserve):
                assert self.limit_bytes is not None
                raise NoMemoryLeftError(int(self.reserved_bytes + segment_bytes(size) - self.limit_bytes))
        block = pool.take(size, requested)
        assert block is not None
        return block

    def _reserve(self, size_bytes: int) -> bool:
        """Take bytes of the device; return whether it has them."""
        if self.limit_bytes is not None and self.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def release_cached(self) -> None:
        """Give all free memory back to the device that it takes: whole segments, or whole pages of expandable ones."""
        self.reserved_bytes -= sum(pool.release() for pool in self.pools.values())
