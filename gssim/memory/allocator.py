"""Replay of PyTorch's CUDA caching allocator: its blocks, segments and pools, and so the memory that it reserves.

[Note: replay] The replay does what torch's allocator does with the same requests in the same order
(c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator: malloc, free_block, try_merge_blocks, release_cached_blocks,
try_allocate_expandable_block). A request gets the smallest free block of its stream and pool that is large enough. The
block is split if the remainder is large enough. If there is no such block, a new segment is reserved on the device. A
freed block is merged with adjacent free blocks and cached. Nothing is returned to the device until it is out of memory.
Then all free blocks that are whole segments are returned (of expandable segments, all whole pages of free blocks), and
the request is tried once more.

Assumed: the device can use all of its bytes for segments. Blocks that several streams use (`record_stream`) are not
modelled. Only gloo's own collectives on a GPU have them (initializeStreamsEvents); all other simulated blocks are freed
after all streams are done with them.

[Note: addresses] Of free blocks of equal size, the one with the lowest address is used. Addresses of segments are not
documented; they are assumed to fall, as Linux assigns them. The order seldom matters. Of eleven runs measured on an
H200, ten reserve the same in every order tried. One reserved 1612 MiB, as predicted with falling addresses and with 16
of 20 random orders. Rising addresses, which place the fewest long-lived blocks among short-lived ones, predict 1516
MiB.

Source of the sizes: torch 2.13, c10/core/AllocatorConfig.h (the constants) and c10/cuda/CUDACachingAllocator.cpp
(round_size, get_allocation_size, should_split), with the defaults of PYTORCH_ALLOC_CONF. Of its options, only
`expandable_segments` is modelled. `roundup_power2_divisions`, `max_split_size_mb`, `large_segment_size_mb` and
`garbage_collection_threshold` have no effect at their defaults.

Blocks are tuples of plain numbers for speed: the replay of a large model's step has some sixty thousand requests.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from operator import itemgetter

MIN_BLOCK_BYTES = 512
"""Requests are rounded up to a multiple of this."""
SMALL_BYTES = 2**20
"""Largest rounded size of a small request."""
SMALL_SEGMENT_BYTES = 2 * 2**20
"""Size of a segment for small requests."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""Size of a segment for large requests below MIN_LARGE_BYTES."""
MIN_LARGE_BYTES = 10 * 2**20
"""Smallest request that gets a segment of its own, of the request's size rounded up to ROUND_LARGE_BYTES."""
ROUND_LARGE_BYTES = 2 * 2**20


def rounded_bytes(size_bytes: float) -> int:
    """Return the size of the block for a request.

    >>> rounded_bytes(1), rounded_bytes(512), rounded_bytes(513)
    (512, 512, 1024)
    """
    return max(1, -(-int(size_bytes) // MIN_BLOCK_BYTES)) * MIN_BLOCK_BYTES


def is_small(size_bytes: int) -> bool:
    """Return whether a rounded request is served from the pool of small blocks."""
    return size_bytes <= SMALL_BYTES


def segment_bytes(size_bytes: int) -> int:
    """Return the size of the segment that is reserved for a rounded request if no free block is large enough.

    >>> [segment_bytes(size * 2**20) // 2**20 for size in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if is_small(size_bytes):
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def page_bytes(*, small: bool) -> int:
    """Return the size by which an expandable segment grows."""
    return SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES


def least_remainder_bytes(*, small: bool, expandable: bool) -> int:
    """Return the smallest remainder for which a free block is split: 512 B, but more than 1 MiB in the pool of large
    ones.
    """
    return MIN_BLOCK_BYTES if small or expandable else SMALL_BYTES + 1


Block = tuple[int, int, int, "Pool"]
"""An allocated block: its address, its size, the requested bytes, and its pool."""
Reserve = Callable[[int], bool]
"""Function that reserves bytes of the device; returns whether it has them."""


class Pool:
    """Free blocks (either small or large ones) of one stream, ordered by size and then address.

    Addresses are the pool's own, and fall; see [Note: addresses]. A gap is left between segments, so that blocks of
    different segments are never merged. `take` and `give_back` do not call `add` and `remove`, since these calls would
    be a sixth of their time.
    """

    __slots__ = (
        "_addresses",
        "_least_remainder",
        "_next_address",
        "_sizes",
        "_start_of",
        "segments",
        "size_at",
        "small",
    )

    def __init__(self, *, small: bool, expandable: bool = False) -> None:
        self.small = small
        self.size_at: dict[int, int] = {}
        """Bytes of each free block, by its address."""
        self._start_of: dict[int, int] = {}
        """Address of each free block, by the address of its end."""
        self._sizes: list[int] = []
        """Sorted distinct sizes of free blocks."""
        self._addresses: dict[int, list[int]] = defaultdict(list)
        """Addresses of the free blocks of each size."""
        self._least_remainder = least_remainder_bytes(small=small, expandable=expandable)
        self.segments: dict[int, int] = {}
        """Bytes of each segment, by its address."""
        self._next_address = 0

    def take(self, size_bytes: int, requested_bytes: int) -> Block | None:
        """Allocate from the smallest free block that is large enough (the lowest of equal ones); None if there
        is none.
        """
        sizes, alike = self._sizes, self._addresses[size_bytes]
        if alike:  # a free block of exactly this size: there is no remainder
            address = alike.pop(0)
            if not alike:
                del sizes[bisect_left(sizes, size_bytes)]
            del self.size_at[address], self._start_of[address + size_bytes]
            return address, size_bytes, requested_bytes, self
        place = bisect_left(sizes, size_bytes)
        if place == len(sizes):
            return None
        found_bytes = sizes[place]
        alike = self._addresses[found_bytes]
        address = alike.pop(0)
        if not alike:
            del sizes[place]
        del self.size_at[address]
        left_bytes = found_bytes - size_bytes
        if left_bytes < self._least_remainder:
            del self._start_of[address + found_bytes]
            return address, found_bytes, requested_bytes, self
        rest = address + size_bytes  # the remainder stays free
        alike = self._addresses[left_bytes]
        if not alike:
            insort(sizes, left_bytes)
        insort(alike, rest)
        self.size_at[rest], self._start_of[address + found_bytes] = left_bytes, rest
        return address, size_bytes, requested_bytes, self

    def take_some(self, size_bytes: int, requested_bytes: int, count: int) -> list[Block]:
        """Allocate up to `count` equal blocks, with the same result as repeated calls of `take`, but from one free
        block only.

        The remainder of the smallest free block that is large enough is again the smallest one, as long as it is large
        enough.
        """
        first = self.take(size_bytes, requested_bytes)
        blocks = [] if first is None else [first]
        if first is None or first[1] != size_bytes or count == 1:
            return blocks
        rest = first[0] + size_bytes
        left_bytes = self.size_at.get(rest, 0)
        more = min(count - 1, (left_bytes - self._least_remainder) // size_bytes)
        if more <= 0 or self._addresses[size_bytes] or self._smaller_suffices(size_bytes, left_bytes):
            return blocks
        self.remove(rest)
        end = rest + more * size_bytes
        self.add(end, left_bytes - more * size_bytes)
        blocks += [(address, size_bytes, requested_bytes, self) for address in range(rest, end, size_bytes)]
        return blocks

    def _smaller_suffices(self, size_bytes: int, found_bytes: int) -> bool:
        """Return whether another free block, at most as large as one of `found_bytes`, is large enough."""
        return self._sizes[bisect_left(self._sizes, size_bytes)] < found_bytes or len(self._addresses[found_bytes]) > 1

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a block, merged with adjacent free ones."""
        sizes, end = self._sizes, address + size_bytes
        if address in self._start_of:
            address = self._start_of.pop(address)
            joined_bytes = self.size_at[address]
            alike = self._addresses[joined_bytes]
            alike.remove(address)
            if not alike:
                del sizes[bisect_left(sizes, joined_bytes)]
        if end in self.size_at:
            joined_bytes = self.size_at.pop(end)
            alike = self._addresses[joined_bytes]
            alike.remove(end)
            if not alike:
                del sizes[bisect_left(sizes, joined_bytes)]
            end += joined_bytes
        size_bytes = end - address
        alike = self._addresses[size_bytes]
        if not alike:
            insort(sizes, size_bytes)
        insort(alike, address)
        self.size_at[address], self._start_of[end] = size_bytes, address

    def state(self) -> tuple[Hashable, ...]:
        """Return free blocks and segments: equal requests have equal effects in equal states."""
        return frozenset(self.size_at.items()), frozenset(self.segments.items()), self._next_address

    def around(self, blocks: Sequence[Block], least_bytes: int, most: int) -> tuple[tuple[int, ...], list[int]]:
        """Return a description of free blocks and of `blocks`, which are allocated and will be freed; and their
        addresses. See [Note: known effects] in `gssim.memory.known_effects`.

        The free blocks are those of at least `least_bytes` (of each size only the first ones, `most` plus two for each
        of `blocks`) and all that are adjacent to `blocks`. The description has, in the order of addresses, the size of
        each block; before it a 0 if it is adjacent to the one before; and before that of `blocks[n]` also -(n + 1).
        """
        most += 2 * len(blocks)
        found: dict[int, int] = {}
        for size in self._sizes[bisect_left(self._sizes, least_bytes) :]:
            alike = self._addresses[size]
            if len(alike) == 1:
                found[alike[0]] = size
            else:
                found.update(dict.fromkeys(alike[:most], size))
        if not blocks:
            addresses = sorted(found)
            return tuple([found[address] for address in addresses]), addresses
        numbers = {block[0]: number for number, block in enumerate(blocks, 1)}
        for address, size, _, _ in blocks:
            found[address] = size
            for free in (self._start_of.get(address), address + size):
                if free in self.size_at:
                    found[free] = self.size_at[free]
        description, end, addresses = list[int](), None, sorted(found)
        for address in addresses:
            if address == end:
                description.append(0)
            if address in numbers:
                description.append(-numbers[address])
            description.append(found[address])
            end = address + found[address]
        return tuple(description), addresses

    def add(self, address: int, size_bytes: int) -> None:
        """Add a free block."""
        alike = self._addresses[size_bytes]
        if not alike:
            insort(self._sizes, size_bytes)
        insort(alike, address)
        self.size_at[address] = size_bytes
        self._start_of[address + size_bytes] = address

    def remove(self, address: int) -> None:
        """Remove a free block."""
        size_bytes = self.size_at.pop(address)
        del self._start_of[address + size_bytes]
        alike = self._addresses[size_bytes]
        alike.remove(address)
        if not alike:
            del self._sizes[bisect_left(self._sizes, size_bytes)]

    def is_free(self, address: int) -> bool:
        """Return whether an address is in a free block."""
        return any(start <= address < start + size for start, size in self.size_at.items())

    def grow(self, size_bytes: int, reserve: Reserve) -> bool:
        """Reserve memory for a request without a large enough free block; return whether the device had it."""
        taken = segment_bytes(size_bytes)
        if not reserve(taken):
            return False
        self.add(self.new_segment(taken), taken)
        return True

    def new_segment(self, size_bytes: int) -> int:
        """Add a segment and return its address; its memory is not yet a free block."""
        self._next_address -= size_bytes + MIN_BLOCK_BYTES
        self.segments[self._next_address] = size_bytes
        return self._next_address

    def release(self) -> int:
        """Release free blocks that are whole segments; return their bytes."""
        whole = [address for address, size in self.size_at.items() if self.segments.get(address) == size]
        for address in whole:
            self.remove(address)
        return sum(self.segments.pop(address) for address in whole)


ADDRESS_SPACE_BYTES = 2**60
"""Address space of an expandable segment: more than it ever needs. (torch takes 1 1/8 of the device's memory.)"""


def give_back_all(blocks: list[Block]) -> int:
    """Free blocks, merging adjacent ones first; return their bytes. Pools end up as if they were freed one by one.

    `blocks` is sorted in place.
    """
    blocks.sort(key=itemgetter(0))
    first, size, _, pool = blocks[0]
    whole = 0
    for address, size_bytes, _, own in blocks[1:]:
        if address == first + size and own is pool:
            size += size_bytes
            continue
        pool.give_back(first, size)
        whole += size
        first, size, pool = address, size_bytes, own
    pool.give_back(first, size)
    return whole + size


class ExpandablePool(Pool):
    """A pool in one expandable segment, in which some address ranges have no memory mapped (yet, or any more)."""

    __slots__ = ("_page_bytes", "_unmapped")

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small, expandable=True)
        self._page_bytes = page_bytes(small=small)
        self._unmapped = {0: ADDRESS_SPACE_BYTES}
        """Bytes of each unmapped range, by its address."""

    def state(self) -> tuple[Hashable, ...]:
        """Return free blocks and unmapped ranges."""
        return *super().state(), frozenset(self._unmapped.items())

    def take(self, size_bytes: int, requested_bytes: int) -> Block | None:
        """Allocate from the smallest free block that is large enough, unmapped space included; None if there is none.

        The block at the end is taken last, since it can grow into all the addresses behind it.
        """
        fitting = self._fitting(size_bytes)
        found = next(fitting, None)
        if found is None:
            return None
        for other in fitting:
            if self._room_bytes(other) >= self._room_bytes(found):
                break
            found = other
        found_bytes = self.size_at[found]
        self.remove(found)
        return self._cut(found, found_bytes, size_bytes, requested_bytes)

    def take_some(self, size_bytes: int, requested_bytes: int, count: int) -> list[Block]:
        """Allocate one of `count` equal blocks: the next may go elsewhere."""
        block = self.take(size_bytes, requested_bytes)
        return [] if block is None else [block]

    def _cut(self, address: int, found_bytes: int, size_bytes: int, requested_bytes: int) -> Block:
        """Return an allocated block, and put its remainder back into the pool if it is large enough."""
        left_bytes = found_bytes - size_bytes
        if left_bytes < self._least_remainder:
            return address, found_bytes, requested_bytes, self
        self.add(address + size_bytes, left_bytes)
        return address, size_bytes, requested_bytes, self

    def _fitting(self, size_bytes: int) -> Iterator[int]:
        """Yield the addresses of the free blocks that are large enough, the smallest first."""
        for size in islice(self._sizes, bisect_left(self._sizes, size_bytes), None):
            yield from self._addresses[size]

    def _room_bytes(self, address: int) -> int:
        """Return the size to which a free block can grow in place."""
        size = self.size_at[address]
        return size + self._unmapped.get(address + size, 0)

    def grow(self, size_bytes: int, reserve: Reserve) -> bool:
        """Map pages at the lowest addresses with room for a request."""
        address = self._place(size_bytes)
        while (free_bytes := self.size_at.get(address, 0)) < size_bytes:
            unmapped = address + free_bytes
            missing = min(self._unmapped[unmapped], size_bytes - free_bytes)
            taken = -(-missing // self._page_bytes) * self._page_bytes
            if not reserve(taken):
                return False
            length = self._unmapped.pop(unmapped)
            if taken < length:
                self._unmapped[unmapped + taken] = length - taken
            self.give_back(unmapped, taken)
        return True

    def _place(self, size_bytes: int) -> int:
        """Return the address of the first run of consecutive free and unmapped ranges with room for the request."""
        for unmapped in sorted(self._unmapped):
            first = end = self._start_of.get(unmapped, unmapped)
            while end - first < size_bytes:
                length = self.size_at.get(end) or self._unmapped.get(end)
                if length is None:
                    break
                end += length
            else:
                return first
        raise AssertionError("there are addresses for everything")

    def release(self) -> int:
        """Release all whole pages of free blocks; return their bytes."""
        page, released = self._page_bytes, 0
        for address, size in list(self.size_at.items()):
            start, end = -(-address // page) * page, (address + size) // page * page
            if start >= end:
                continue
            self.remove(address)
            if address < start:
                self.add(address, start - address)
            if end < address + size:
                self.add(end, address + size - end)
            self._unmap(start, end)
            released += end - start
        return released

    def _unmap(self, start: int, end: int) -> None:
        """Add an unmapped range, merged with adjacent ones."""
        before = next((each for each, length in self._unmapped.items() if each + length == start), start)
        behind_bytes = self._unmapped.pop(end, 0)
        self._unmapped[before] = end + behind_bytes - before


PoolKey = tuple[str, bool]
"""Stream of a pool, and whether it serves small requests."""
Request = tuple[list[Block], Pool, int, int, int, int]
"""A number of equal requests: the list of allocated blocks of their kind, their pool, their rounded bytes (0 if they
free blocks of the list), their requested bytes, which block to free (0: the oldest, -1: the latest), and the number."""


class NoMemoryLeftError(Exception):
    """Out of memory: the device has too little left for a request, even after releasing all cached segments."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"{missing_bytes} bytes are missing")
        self.missing_bytes = missing_bytes


class CachingAllocator:
    """Replay of requests; see [Note: replay]. `limit_bytes`: memory of the device; None: unlimited.

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
        self.pools: dict[PoolKey, Pool] = {}

    def allocate(self, size_bytes: float, stream: str = "") -> Block | None:
        """Return a block for a request on a stream; None for a request of 0 bytes.

        Raises NoMemoryLeftError if the device is out of memory even after all cached segments are released.
        """
        requested = int(size_bytes)
        if not requested:
            return None
        size, kept = rounded_bytes(requested), list[Block]()
        self.serve(iter([(kept, self.pool_of(size, stream), size, requested, 0, 1)]))
        return kept.pop()

    def free(self, block: Block | None) -> None:
        """Free a block: it is merged with adjacent free ones, and cached for later requests."""
        if block is None:
            return
        address, _, requested, pool = block
        if pool.is_free(address):
            raise ValueError(f"the block at {address} is free already")
        self.serve(iter([([block], pool, 0, requested, 0, 1)]))

    def serve(self, requests: Iterator[Request]) -> Request | None:
        """Serve requests; return the first one that frees a block that does not exist, or None once all are served.

        A request that frees several blocks frees at most as many as there are.
        """
        requested, allocated = self.requested_bytes, self.allocated_bytes
        most_requested, most_allocated = self.peak_requested_bytes, self.peak_allocated_bytes
        try:
            for request in requests:
                kept, pool, rounded, size, place, count = request
                if count > 1:
                    change = self._serve_equal(request)
                    requested += change[0]
                    allocated += change[1]
                    most_requested, most_allocated = max(most_requested, requested), max(most_allocated, allocated)
                elif rounded:
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

    def _serve_equal(self, request: Request) -> tuple[int, int]:
        """Serve several equal requests; return by how much the requested and the allocated bytes change."""
        kept, pool, rounded, size, place, count = request
        allocated = 0
        if not rounded:
            blocks = kept[:count] if place == 0 else kept[-count:]
            if place == 0:
                del kept[:count]
            else:
                del kept[-count:]
            return -len(blocks) * size, -give_back_all(blocks)
        left = count
        while left:
            blocks = pool.take_some(rounded, size, left) or [self._new(pool, rounded, size)]
            kept += blocks
            allocated += blocks[0][1] + (len(blocks) - 1) * rounded  # if there are several, none is larger than asked
            left -= len(blocks)
        return count * size, allocated

    def state(self) -> Hashable:
        """Return the free blocks and what is reserved: equal requests have equal effects in equal states."""
        return self.requested_bytes, self.allocated_bytes, tuple([pool.state() for pool in self.pools.values()])

    def pool_of(self, size_bytes: int, stream: str) -> Pool:
        """Return the pool that serves a rounded request on a stream."""
        return self.pool((stream, is_small(size_bytes)))

    def pool(self, key: PoolKey) -> Pool:
        """Return the pool of a stream for small or large requests, which is made if there is none."""
        found = self.pools.get(key)
        if found is None:
            small = key[1]
            found = self.pools[key] = ExpandablePool(small=small) if self.expandable_segments else Pool(small=small)
        return found

    # Reserving and releasing memory of the device ---------------------------------------------------------------------

    def _new(self, pool: Pool, size: int, requested: int) -> Block:
        """Return a block of a new segment."""
        if not pool.grow(size, self.reserve):
            self.release_cached()
            if not pool.grow(size, self.reserve):
                assert self.limit_bytes is not None
                raise NoMemoryLeftError(int(self.reserved_bytes + segment_bytes(size) - self.limit_bytes))
        block = pool.take(size, requested)
        assert block is not None
        return block

    def reserve(self, size_bytes: int) -> bool:
        """Reserve bytes of the device; return whether it has them."""
        if self.limit_bytes is not None and self.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def release_cached(self) -> None:
        """Release cached memory to the device: whole segments, or whole pages of expandable ones."""
        self.reserved_bytes -= sum(pool.release() for pool in self.pools.values())
