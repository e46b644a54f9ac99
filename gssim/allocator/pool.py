"""Free memory of one stream: blocks that are cut where more is there than is asked for, and joined again when free.

All is in plain numbers: to replay a large model's step is to take and give back some sixty thousand times.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice

from gssim.allocator.rules import MIN_BLOCK_BYTES, least_remainder_bytes, page_bytes, segment_bytes

Block = tuple[int, int, int, "Pool"]
"""Memory that is taken: its address, its bytes, how many of them were asked for, and the pool that it came from."""
Reserve = Callable[[int], bool]
"""Takes bytes of the device; returns whether it had them."""


class Pool:
    """Free blocks of one stream, small ones or large ones, by size and then address.

    Addresses are the pool's own; they fall, see [Note: addresses] of the allocator. No segment begins where another
    ends, so that their blocks are never joined. To take and to give back are written out, without `add` and `remove`:
    calls would be a sixth of what they take.
    """

    __slots__ = (
        "_addresses",
        "_least_remainder",
        "_next_address",
        "_segments",
        "_sizes",
        "_start_of",
        "size_at",
        "small",
    )

    def __init__(self, *, small: bool, expandable: bool = False) -> None:
        self.small = small
        self.size_at: dict[int, int] = {}
        """Bytes of each free block, by its address."""
        self._start_of: dict[int, int] = {}
        """Its address, by that of its end."""
        self._sizes: list[int] = []
        """The sizes that free blocks have, each once."""
        self._addresses: dict[int, list[int]] = defaultdict(list)
        """Where those of a size are."""
        self._least_remainder = least_remainder_bytes(small=small, expandable=expandable)
        self._segments: dict[int, int] = {}
        """Bytes of what was taken of the device, by address."""
        self._next_address = 0

    def take(self, size_bytes: int, requested_bytes: int) -> Block | None:
        """Take the smallest free block that is large enough, of equal ones that with the lowest address; else None."""
        sizes, alike = self._sizes, self._addresses[size_bytes]
        if alike:  # nothing is left over
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
        rest = address + size_bytes  # what is left over stays
        alike = self._addresses[left_bytes]
        if not alike:
            insort(sizes, left_bytes)
        insort(alike, rest)
        self.size_at[rest], self._start_of[address + found_bytes] = left_bytes, rest
        return address, size_bytes, requested_bytes, self

    def give_back(self, address: int, size_bytes: int) -> None:
        """Let a block wait for the next request, joined with the free ones beside it."""
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

    def add(self, address: int, size_bytes: int) -> None:
        """Note that a block is free."""
        alike = self._addresses[size_bytes]
        if not alike:
            insort(self._sizes, size_bytes)
        insort(alike, address)
        self.size_at[address] = size_bytes
        self._start_of[address + size_bytes] = address

    def remove(self, address: int) -> None:
        """Note that a block is no more free."""
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
        """Take memory of the device for a request that no free block is large enough for; return whether it had it."""
        taken = segment_bytes(size_bytes)
        if not reserve(taken):
            return False
        self._next_address -= taken + MIN_BLOCK_BYTES
        self._segments[self._next_address] = taken
        self.add(self._next_address, taken)
        return True

    def release(self) -> int:
        """Give free blocks that are whole segments back to the device; return their bytes."""
        whole = [address for address, size in self.size_at.items() if self._segments.get(address) == size]
        for address in whole:
            self.remove(address)
        return sum(self._segments.pop(address) for address in whole)


ADDRESS_SPACE_BYTES = 2**60
"""Of an expandable segment: more than it ever needs. (torch takes 1 1/8 of the device's memory.)"""


class ExpandablePool(Pool):
    """The same in one expandable segment: behind some of its addresses there is no memory, yet or any more."""

    __slots__ = ("_page_bytes", "_unmapped")

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small, expandable=True)
        self._page_bytes = page_bytes(small=small)
        self._unmapped = {0: ADDRESS_SPACE_BYTES}
        """Bytes of each range without memory, by address."""

    def take(self, size_bytes: int, requested_bytes: int) -> Block | None:
        """Take the smallest free block that is large enough, counted with what has no memory behind it; else None.

        So that at the end, which can grow by all the addresses behind it, is taken last.
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

    def _cut(self, address: int, found_bytes: int, size_bytes: int, requested_bytes: int) -> Block:
        """Return a block that is no more free, without what is left over of it, where that is enough."""
        left_bytes = found_bytes - size_bytes
        if left_bytes < self._least_remainder:
            return address, found_bytes, requested_bytes, self
        self.add(address + size_bytes, left_bytes)
        return address, size_bytes, requested_bytes, self

    def _fitting(self, size_bytes: int) -> Iterator[int]:
        """Give the addresses of the free blocks that are large enough, the smallest first."""
        for size in islice(self._sizes, bisect_left(self._sizes, size_bytes), None):
            yield from self._addresses[size]

    def _room_bytes(self, address: int) -> int:
        """Return how large a free block can grow without moving."""
        size = self.size_at[address]
        return size + self._unmapped.get(address + size, 0)

    def grow(self, size_bytes: int, reserve: Reserve) -> bool:
        """Put memory behind the lowest addresses at which a request has room, page by page."""
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
        """Return the first of free and unmapped ranges, one behind another, that are large enough together."""
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
        """Give all whole pages of free blocks back to the device; return their bytes."""
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
        """Note that a range has no memory any more, joined with such ones beside it."""
        before = next((each for each, length in self._unmapped.items() if each + length == start), start)
        behind_bytes = self._unmapped.pop(end, 0)
        self._unmapped[before] = end + behind_bytes - before
