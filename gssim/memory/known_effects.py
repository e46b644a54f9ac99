"""Effects of repeated requests on the caching allocator, worked out once and applied wherever the same blocks are free.

[Note: known effects] The forward and the backward of a stage make the same requests for every micro-batch, on all ranks
of a pipeline. What they do to a pool follows from three things: the sizes of its free blocks in the order of their
addresses; between these, the blocks that the requests free; and which of all these are adjacent. Addresses themselves,
and all other allocated blocks, do not matter: a request compares sizes, and then the order of addresses. Nor do free
blocks that are smaller than any of the requests, unless a freed block merges with them; nor, of many of one size, those
behind as many as the requests ever use at a time, since the lowest address is used first. So these three are the key of
a known effect, whose addresses are relative to the blocks of the key, and to new segments.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gssim.memory.allocator import Block, CachingAllocator, Pool, PoolKey, Request


class _Place(NamedTuple):
    """An address: that of a block of the key, or of a new segment (these are numbered after the blocks), and bytes
    beyond it.
    """

    pool: int
    base: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class _Effect:
    """What requests do to their pools and lists of blocks."""

    segments: Sequence[Sequence[int]]
    """Bytes of each pool's new segments, in the order in which they are reserved."""
    taken: Sequence[tuple[int, int]]
    """Pool and number of each block of the key that is no longer free."""
    free: Sequence[tuple[_Place, int]]
    """New free blocks, and their bytes."""
    blocks: Sequence[Sequence[tuple[_Place, int, int]]]
    """For each list, the blocks that are added to it: place, bytes and requested bytes."""
    requested_bytes: int
    """Change of the requested bytes, and below of the allocated bytes."""
    allocated_bytes: int
    most_requested_bytes: int
    """Largest change on the way, and below of the allocated bytes."""
    most_allocated_bytes: int


@dataclass(frozen=True, slots=True)
class _Case:
    """What requests do to lists of blocks that are so long."""

    first: Sequence[int]
    """For each list, how many of its first blocks are freed, of those allocated before; and below of the last ones."""
    last: Sequence[int]
    most_live: int
    """Most blocks at a time that were allocated since."""


MOST_MISSES = 24
"""Requests whose effect is not known so often in a row are served one by one from then on."""
ANY_BYTES = 2**62
"""More than any block has."""
Kind = tuple[str, int, float]
"""Category, index in the layer, and bytes of a tensor: the key by which a free finds it."""


class RepeatedRequests:
    """Requests that replays of ranks have in common, and their effects; see [Note: known effects].

    `requests`: these, as a replay has served them. `kind_of`: the kind of the tensors of a list of blocks, by its `id`.
    """

    def __init__(self, requests: Sequence[Request], kind_of: Mapping[int, Kind], pools: Mapping[PoolKey, Pool]) -> None:
        keys = {id(pool): key for key, pool in pools.items()}
        lists, used = dict[int, int](), dict[int, int]()
        for blocks, pool, *_ in requests:
            lists.setdefault(id(blocks), len(lists))
            used.setdefault(id(pool), len(used))
        self.kinds, self.pools = [kind_of[each] for each in lists], [keys[each] for each in used]
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
        """How many times in a row no effect was known."""

    def of(self, lists: Sequence[list[Block]], pools: Sequence[Pool]) -> Iterator[Request]:
        """Yield the requests with a replay's own lists and pools."""
        for number, pool, rounded, size, place, count in self._requests:
            yield lists[number], pools[pool], rounded, size, place, count

    def case(self, lists: Iterable[Sequence[Block]]) -> _Case | None:
        """Return what becomes of lists of these lengths; None if a block is freed that does not exist."""
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
    """Repeated requests of one replay: the lists of blocks and the pools that they concern.

    The allocator must have no limit and no expandable segments.
    """

    def __init__(self, repeated: RepeatedRequests, lists: Sequence[list[Block]], pools: Sequence[Pool]) -> None:
        self._repeated, self.lists, self.pools = repeated, lists, pools

    def serve(self, allocator: CachingAllocator) -> bool:
        """Serve them; return False, with nothing done, if their effect cannot be known."""
        repeated = self._repeated
        case = repeated.case(self.lists) if repeated.misses < MOST_MISSES else None
        if case is None:
            return False
        freed: list[list[Block]] = [[] for _ in self.pools]
        for blocks, first, last in zip(self.lists, case.first, case.last, strict=True):
            for block in (*blocks[:first], *blocks[len(blocks) - last :]) if first or last else ():
                if block[3] not in self.pools:
                    return False
                freed[self.pools.index(block[3])].append(block)
        key: list[Hashable] = [id(case)]
        addresses = []
        for pool, least_bytes, some in zip(self.pools, repeated.least_bytes, freed, strict=True):
            description, places = pool.around(some, least_bytes, case.most_live)
            key.append(description)
            addresses.append(places)
        effect = repeated.effects.get(tuple(key))
        if effect is None:
            repeated.misses += 1
            repeated.effects[tuple(key)] = _served(allocator, self, case, addresses)
        else:
            repeated.misses = 0
            _apply(effect, allocator, self, case, addresses)
        return True

    def served(self, allocator: CachingAllocator) -> None:
        """Serve them one by one."""
        allocator.serve(self._repeated.of(self.lists, self.pools))


def _served(
    allocator: CachingAllocator,
    repeated: KnownRequests,
    case: _Case,
    addresses: Sequence[Sequence[int]],
) -> _Effect:
    """Serve requests, and return their effect."""
    before = allocator.requested_bytes, allocator.allocated_bytes
    most = allocator.peak_requested_bytes, allocator.peak_allocated_bytes
    allocator.peak_requested_bytes, allocator.peak_allocated_bytes = before
    counts = [
        len(blocks) - first - last for blocks, first, last in zip(repeated.lists, case.first, case.last, strict=True)
    ]
    free = [dict(pool.size_at) for pool in repeated.pools]
    segments = [len(pool.segments) for pool in repeated.pools]
    repeated.served(allocator)
    reached = allocator.peak_requested_bytes, allocator.peak_allocated_bytes
    allocator.peak_requested_bytes, allocator.peak_allocated_bytes = map(max, most, reached)
    new = [list(pool.segments.items())[count:] for pool, count in zip(repeated.pools, segments, strict=True)]
    bases = [
        sorted((address, base) for base, address in enumerate([*places, *(start for start, _ in own)]))
        for places, own in zip(addresses, new, strict=True)
    ]

    def place(pool: int, address: int) -> _Place:
        start, base = bases[pool][bisect_right(bases[pool], (address, ANY_BYTES)) - 1]
        return _Place(pool, base, address - start)

    number = {id(pool): each for each, pool in enumerate(repeated.pools)}
    taken, added = [], []
    for each, (pool, earlier) in enumerate(zip(repeated.pools, free, strict=True)):
        gone = [address for address, size in earlier.items() if pool.size_at.get(address) != size]
        taken += [(each, place(each, address).base) for address in gone]
        now = [(address, size) for address, size in pool.size_at.items() if earlier.get(address) != size]
        added += [(place(each, address), size) for address, size in now]
    blocks = [
        [(place(number[id(own)], address), size, requested) for address, size, requested, own in of_list[count:]]
        for of_list, count in zip(repeated.lists, counts, strict=True)
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


def _apply(
    effect: _Effect,
    allocator: CachingAllocator,
    repeated: KnownRequests,
    case: _Case,
    addresses: Sequence[list[int]],
) -> None:
    """Do to the allocator what requests would do."""
    pools = repeated.pools
    for pool, places, sizes in zip(pools, addresses, effect.segments, strict=True):
        for size in sizes:
            allocator.reserve(size)
            places.append(pool.new_segment(size))
    for number, base in effect.taken:
        pools[number].remove(addresses[number][base])
    for (number, base, offset_bytes), size in effect.free:
        pools[number].add(addresses[number][base] + offset_bytes, size)
    for blocks, first, last, added in zip(repeated.lists, case.first, case.last, effect.blocks, strict=True):
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
