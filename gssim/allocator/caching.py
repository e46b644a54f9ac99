"""The allocator itself: what is asked of it, and what it takes of the device.

[Note: replay] It does what torch's does with the same requests in the same order (c10/cuda/CUDACachingAllocator.cpp,
DeviceCachingAllocator: malloc, free_block, try_merge_blocks, release_cached_blocks, try_allocate_expandable_block).
A request gets the smallest free block of its stream and pool that is large enough, which is split where enough is left
over; where there is none, a new segment of the device. What is given back is joined with its free neighbours and kept.
Nothing goes back to the device until it has no memory left: then all free blocks that are whole segments do (of
expandable segments, all whole pages of free blocks), and the request is tried once more.

Assumed: the device hands out segments at rising addresses, which decide between free blocks of equal size alone, and
has as much memory for them as it has bytes. Blocks that several streams use (`record_stream`) are not modelled: of what
is simulated, none is given back before all streams are done with it.
"""

from gssim.allocator.block import Block, Pool
from gssim.allocator.rules import is_small, least_remainder_bytes, page_bytes, rounded_bytes, segment_bytes

ADDRESS_SPACE_BYTES = 2**50
"""Of an expandable segment: more than it ever needs. (torch takes 1 1/8 of the device's memory.)"""


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
        self._least_remainder = [
            least_remainder_bytes(small=small, expandable=expandable_segments) for small in (False, True)
        ]
        self._next_address = 0

    def allocate(self, size_bytes: float, stream: str = "") -> Block | None:
        """Return a block for a request on a stream; None for nothing, which takes none.

        Raises NoMemoryLeftError where the device has none, and the allocator nothing that it can give back.
        """
        requested = int(size_bytes)
        if not requested:
            return None
        size = rounded_bytes(requested)
        return self.take(self.pool_of(size, stream), size, requested)

    def take(self, pool: Pool, size: int, requested: int) -> Block:
        """Return a block of a pool for a request of which the rounded size is known."""
        block = pool.taken(size) or self._new(pool, size)
        if block.size_bytes - size >= self._least_remainder[pool.small]:
            pool.add(block.cut(size))
        block.free, block.requested_bytes = False, requested
        self.requested_bytes += requested
        self.allocated_bytes += block.size_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block | None) -> None:
        """Take a block back: joined with its free neighbours, it waits for the next request."""
        if block is None:
            return
        if block.free:
            raise ValueError(f"the block at {block.address} is free already")
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.size_bytes
        block.free = True
        _join(block)
        block.pool.add(block)

    def pool_of(self, size_bytes: int, stream: str) -> Pool:
        """Return the pool that serves a rounded request on a stream."""
        key = (stream, is_small(size_bytes))
        found = self.pools.get(key)
        if found is None:
            found = self.pools[key] = Pool(small=key[1])
        return found

    # Taking memory of the device, and giving it back ------------------------------------------------------------------

    def _new(self, pool: Pool, size: int) -> Block:
        """Return a block, no longer waiting, of memory that is taken of the device."""
        take = self._grown if self.expandable_segments else self._segment
        found = take(pool, size)
        if found is None:
            self.release_cached()
            found = take(pool, size)
        if found is None:
            assert self.limit_bytes is not None
            raise NoMemoryLeftError(int(self.reserved_bytes + segment_bytes(size) - self.limit_bytes))
        return found

    def _reserve(self, size_bytes: int) -> bool:
        """Take bytes of the device; return whether it has them."""
        if self.limit_bytes is not None and self.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _segment(self, pool: Pool, size: int) -> Block | None:
        taken = segment_bytes(size)
        return self._addresses(pool, taken) if self._reserve(taken) else None

    def _addresses(self, pool: Pool, size_bytes: int) -> Block:
        block = Block(pool, self._next_address, size_bytes)
        self._next_address += size_bytes
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """Return a block at the lowest addresses of the expandable segment that can be mapped for a request."""
        block = self._place(pool, size)
        if not block.mapped:
            if not self._map(block, min(block.size_bytes, size)):
                return None
            pool.add(block)
        while block.size_bytes < size:
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(behind.size_bytes, size - block.size_bytes)):
                return None
            pool.add(behind)  # joined with the block before it
            block = behind
        pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int) -> Block:
        """Return the first of free and unmapped blocks, one behind another, that are large enough together."""
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            first = before if before is not None and before.free else unmapped
            room, block = 0, first
            while block is not None and block.free and room < size:
                room += block.size_bytes
                block = block.next  # type: ignore[assignment]
            if room >= size:
                return first
        found = self._addresses(pool, ADDRESS_SPACE_BYTES)
        found.mapped = False
        pool.add(found)
        return found

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first bytes of an unmapped block, page by page; it is joined with its neighbours."""
        page = page_bytes(small=block.pool.small)
        taken = -(-size // page) * page
        if not self._reserve(taken):
            return False
        block.pool.remove(block)
        if taken < block.size_bytes:
            block.pool.add(block.cut(taken))
        block.mapped = True
        _join(block)
        return True

    def release_cached(self) -> None:
        """Give all free memory back to the device that it takes: whole segments, or whole pages of expandable ones."""
        for pool in self.pools.values():
            for block in pool.free:
                if self.expandable_segments:
                    self._unmap(block)
                elif not block.is_split:
                    pool.remove(block)
                    self.reserved_bytes -= block.size_bytes

    def _unmap(self, block: Block) -> None:
        """Give a free block's whole pages back; segments begin at multiples of pages of both kinds."""
        pool, page = block.pool, page_bytes(small=block.pool.small)
        base = block
        while base.previous is not None:
            base = base.previous
        start = -(-(block.address - base.address) // page) * page + base.address
        end = (block.address + block.size_bytes - base.address) // page * page + base.address
        if end <= start:
            return
        pool.remove(block)
        if start > block.address:
            rest = block.cut(start - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size_bytes:
            pool.add(block.cut(end - start))
        block.mapped = False
        self.reserved_bytes -= block.size_bytes
        _join(block)
        pool.add(block)


def _join(block: Block) -> None:
    """Take a block's free neighbours into it, those with memory or those without, as it has."""
    for other in (block.previous, block.next):
        if other is not None and other.free and other.mapped == block.mapped:
            block.pool.remove(other)
            block.swallow(other)
