"""Effects of repeated requests on the caching allocator, computed once and applied wherever the same blocks are free.

[Note: known effects] The forward and the backward of a pipeline's stage make the same requests for every micro-batch,
and equal stages on all ranks do. The allocator serves a request from the smallest free block that is large enough, and
of equal ones from that at the lowest address; a block that is freed merges with adjacent free blocks. So what a series
of requests does to a pool depends on three things alone, which are the key of a known effect:

1. the sizes of the pool's free blocks, in the order of their addresses;
2. where among them the blocks are that the requests free;
3. which of all these blocks are adjacent.

Other allocated blocks, and the addresses themselves, do not matter. The key leaves out what the requests never touch:
free blocks that are smaller than the smallest request, unless they are adjacent to a block that is freed; and of many
free blocks of one size all but the first, as many as the requests can use at a time. An effect has its addresses
relative to the blocks of its key, and to new segments.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gssim.memory.allocator import Block, CachingAllocator, Pool, PoolKey, Request


class _Place(NamedTuple):
    """An address relative to a block of the key, or to a new segment."""

    pool: int
    base: int
    """Number of the block of the key, in the order of addresses; new segments are numbered after the blocks."""
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class _Effect:
    """Changes that requests make to their pools, lists of blocks and the allocator's counters."""

    segments: Sequence[Sequence[int]]
    """Bytes of each pool's new segments, in the order in which they are reserved."""
    taken: Sequence[tuple[int, int]]
    """Pool and number of each block of the key that is no longer free."""
    free: Sequence[tuple[_Place, int]]
    """New free blocks, and their bytes."""
    blocks: Sequence[Sequence[tuple[_Place, int, int]]]
    """For each list, the blocks that are added to it: place, bytes and requested bytes."""
    requested_bytes: int
    """Change of the allocator's requested bytes once all requests are served."""
    allocated_bytes: int
    most_requested_bytes: int
    """Largest change of the requested bytes after any of the requests."""
    most_allocated_bytes: int


@dataclass(frozen=True, slots=True)
class _Case:
    """The earlier blocks that requests free, for given lengths of the lists of blocks."""

    first: Sequence[int]
    """For each list, how many of its first blocks are freed."""
    last: Sequence[int]
    """For each list, how many of its last blocks are freed."""
    most_live: int
    """Largest number of blocks that are allocated by the requests and not yet freed."""


MOST_MISSES = 24
"""Number of unknown effects in a row after which the requests are always served one by one: the states of the allocator
do not repeat, and describing them takes time."""
ANY_BYTES = 2**62
"""More than any block has."""
Kind = tuple[str, int, float]
"""Category, index in the layer, and bytes of a tensor: the key by which a free finds it."""


class RepeatedRequests:
    """Requests that replays of several ranks have in common, and their effects; see [Note: known effects].

    `requests`: as one replay has served them. `kind_of`: the kind of tensor of each list of blocks, by the list's `id`.
    `pools`: the replay's pools.
    """

    def __init__(self, requests: Sequence[Request], kind_of: Mapping[int, Kind], pools: Mapping[PoolKey, Pool]) -> None:
        keys = {id(pool): key for key, pool in pools.items()}
        lists, used = dict[int, int](), dict[int, int]()
        for blocks, pool, *_ in requests:
            lists.setdefault(id(blocks), len(lists))
            used.setdefault(id(pool), len(used))
        self.kinds, self.pool_keys = [kind_of[each] for each in lists], [keys[each] for each in used]
        self._requests = [(lists[id(blocks)], used[id(pool)], *rest) for blocks, pool, *rest in requests]
        self._frees = [0] * len(lists)
        self.least_bytes = [ANY_BYTES] * len(used)
        """Smallest request of each pool."""
        for number, pool_number, rounded, _, _, count in self._requests:
            if rounded:
                self.least_bytes[pool_number] = min(rounded, self.least_bytes[pool_number])
            else:
                self._frees[number] += count
        self._cases: dict[tuple[int, ...], _Case | None] = {}
        self.effects: dict[Hashable, _Effect] = {}
        self.misses = 0
        """Number of times in a row that the effect was unknown."""

    def of(self, lists: Sequence[list[Block]], pools: Sequence[Pool]) -> Iterator[Request]:
        """Yield the requests for the lists and pools of a replay, in the order of `kinds` and `pool_keys`."""
        for number, pool, rounded, size, place, count in self._requests:
            yield lists[number], pools[pool], rounded, size, place, count

    def case(self, lists: Iterable[Sequence[Block]]) -> _Case | None:
        """Return which blocks of these lists are freed; None if a request frees a block of an empty list."""
        lengths = tuple([min(len(blocks), frees) for blocks, frees in zip(lists, self._frees, strict=True)])
        if lengths not in self._cases:
            self._cases[lengths] = self._case(lengths)
        return self._cases[lengths]

    def _case(self, lengths: Sequence[int]) -> _Case | None:
        before, added = list(lengths), [0] * len(lengths)
        first, last = [0] * len(lengths), [0] * len(lengths)
        most_live = 0
        for number, _, rounded, _, place, count in self._requests:
            if rounded:
                added[number] += count
                most_live = max(most_live, sum(added))
                continue
            for _ in range(count):
                if added[number] and (place == -1 or not before[number]):
                    added[number] -= 1
                elif before[number]:
                    before[number] -= 1
                    (first if place == 0 else last)[number] += 1
                else:
                    return None
        return _Case(first, last, most_live)


class KnownRequests:
    """Repeated requests, bound to the allocator and the lists of blocks of one replay.

    The allocator must have no limit and no expandable segments.
    """

    def __init__(self, repeated: RepeatedRequests, lists: Sequence[list[Block]], allocator: CachingAllocator) -> None:
        self._repeated, self._lists, self._allocator = repeated, lists, allocator
        self._pools = [allocator.pool(key) for key in repeated.pool_keys]

    def serve(self) -> bool:
        """Serve the requests; return False, and change nothing, if they must be served one by one."""
        repeated = self._repeated
        case = repeated.case(self._lists) if repeated.misses < MOST_MISSES else None
        if case is None:
            return False
        freed: list[list[Block]] = [[] for _ in self._pools]
        for blocks, first, last in zip(self._lists, case.first, case.last, strict=True):
            for block in (*blocks[:first], *blocks[len(blocks) - last :]) if first or last else ():
                if block[3] not in self._pools:
                    return False
                freed[self._pools.index(block[3])].append(block)
        key: list[Hashable] = [id(case)]
        addresses = []
        for pool, least_bytes, some in zip(self._pools, repeated.least_bytes, freed, strict=True):
            description, places = pool.around(some, least_bytes, case.most_live)
            key.append(description)
            addresses.append(places)
        effect = repeated.effects.get(tuple(key))
        if effect is None:
            repeated.misses += 1
            repeated.effects[tuple(key)] = self._serve_one_by_one(case, addresses)
        else:
            repeated.misses = 0
            self._apply(effect, case, addresses)
        return True

    def _serve_one_by_one(self, case: _Case, addresses: Sequence[Sequence[int]]) -> _Effect:
        """Serve the requests one by one, and return their effect; `addresses`: those of the key's blocks, by pool."""
        allocator, pools = self._allocator, self._pools
        before = allocator.requested_bytes, allocator.allocated_bytes
        most = allocator.peak_requested_bytes, allocator.peak_allocated_bytes
        allocator.peak_requested_bytes, allocator.peak_allocated_bytes = before
        counts = [
            len(each) - first - last for each, first, last in zip(self._lists, case.first, case.last, strict=True)
        ]
        free = [dict(pool.size_at) for pool in pools]
        segments = [len(pool.segments) for pool in pools]
        allocator.serve(self._repeated.of(self._lists, pools))
        reached = allocator.peak_requested_bytes, allocator.peak_allocated_bytes
        allocator.peak_requested_bytes, allocator.peak_allocated_bytes = map(max, most, reached)
        new = [list(pool.segments.items())[count:] for pool, count in zip(pools, segments, strict=True)]
        bases = [
            sorted((address, base) for base, address in enumerate([*places, *(start for start, _ in own)]))
            for places, own in zip(addresses, new, strict=True)
        ]

        def place(pool: int, address: int) -> _Place:
            start, base = bases[pool][bisect_right(bases[pool], (address, ANY_BYTES)) - 1]
            return _Place(pool, base, address - start)

        taken, added = [], []
        for number, (pool, earlier) in enumerate(zip(pools, free, strict=True)):
            gone = [address for address, size in earlier.items() if pool.size_at.get(address) != size]
            taken += [(number, place(number, address).base) for address in gone]
            now = [(address, size) for address, size in pool.size_at.items() if earlier.get(address) != size]
            added += [(place(number, address), size) for address, size in now]
        blocks = [
            [(place(pools.index(own), address), size, requested) for address, size, requested, own in of_list[count:]]
            for of_list, count in zip(self._lists, counts, strict=True)
        ]
        return _Effect(
            [[size for _, size in own] for own in new],
            taken,
            added,
            blocks,
            allocator.requested_bytes - before[0],
            allocator.allocated_bytes - before[1],
            reached[0] - before[0],
            reached[1] - before[1],
        )

    def _apply(self, effect: _Effect, case: _Case, addresses: Sequence[list[int]]) -> None:
        """Make the changes that serving the requests one by one would make."""
        allocator, pools = self._allocator, self._pools
        for pool, places, sizes in zip(pools, addresses, effect.segments, strict=True):
            for size in sizes:
                allocator.reserve(size)
                places.append(pool.new_segment(size))
        for number, base in effect.taken:
            pools[number].remove(addresses[number][base])
        for (number, base, offset_bytes), size in effect.free:
            pools[number].add(addresses[number][base] + offset_bytes, size)
        for blocks, first, last, added in zip(self._lists, case.first, case.last, effect.blocks, strict=True):
            if first or last:
                blocks[:] = blocks[first : len(blocks) - last]
            blocks += [
                (addresses[number][base] + offset_bytes, size, requested, pools[number])
                for (number, base, offset_bytes), size, requested in added
            ]
        most = allocator.requested_bytes + effect.most_requested_bytes
        allocator.peak_requested_bytes = max(allocator.peak_requested_bytes, most)
        most = allocator.allocated_bytes + effect.most_allocated_bytes
        allocator.peak_allocated_bytes = max(allocator.peak_allocated_bytes, most)
        allocator.requested_bytes += effect.requested_bytes
        allocator.allocated_bytes += effect.allocated_bytes
