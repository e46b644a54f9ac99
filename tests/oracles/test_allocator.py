"""The caching allocator: torch 2.13's rules by worked examples, and what must hold of any trace."""

import random
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gssim.memory import Block, CachingAllocator, NoMemoryLeftError, rounded_bytes, segment_bytes

MIB = 2**20


def blocks_after(*sizes: float, **options: object) -> tuple[CachingAllocator, list[Block]]:
    allocator = CachingAllocator(**options)  # type: ignore[arg-type]
    found = [allocator.allocate(size) for size in sizes]
    return allocator, [block for block in found if block is not None]


def address_of(block: Block) -> int:
    return block[0]


def size_of(block: Block) -> int:
    return block[1]


# Worked examples (c10/cuda/CUDACachingAllocator.cpp) -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (33 * MIB, 33 * MIB, 34 * MIB),
    ],
)
def test_requests_are_rounded_and_take_segments_by_size(asked, block, segment):
    assert rounded_bytes(asked) == block
    assert segment_bytes(block) == segment
    allocator, _ = blocks_after(asked)
    assert allocator.reserved_bytes == segment


def test_small_requests_share_a_segment_and_large_ones_another():
    allocator, _ = blocks_after(*[MIB // 2] * 4)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved_bytes == 4 * MIB
    allocator, _ = blocks_after(*[6 * MIB] * 3, 2 * MIB)
    assert allocator.reserved_bytes == 20 * MIB, "what is left of the first segment serves them all"


def test_a_large_block_is_split_where_more_than_a_mebibyte_is_left():
    allocator, (block,) = blocks_after(20 * MIB)
    allocator.free(block)
    kept = allocator.allocate(19 * MIB)
    assert kept is not None
    assert size_of(kept) == 20 * MIB, "1 MiB is too little to be split off"
    assert allocator.allocated_bytes == 20 * MIB
    allocator.free(kept)
    kept = allocator.allocate(19 * MIB - 512)
    assert kept is not None
    assert size_of(kept) == 19 * MIB - 512


def test_a_small_block_is_split_down_to_512_bytes():
    allocator, (first, second) = blocks_after(2 * MIB - 512 - MIB, MIB)
    assert size_of(first) + size_of(second) == 2 * MIB - 512
    last = allocator.allocate(512)
    assert last is not None
    assert address_of(last) == address_of(first) + 2 * MIB - 512


def test_the_smallest_block_that_is_large_enough_is_taken_the_lowest_of_equal_ones():
    allocator, (large, small, again) = blocks_after(40 * MIB, 30 * MIB, 30 * MIB)
    for block in (large, again, small):
        allocator.free(block)
    taken = allocator.allocate(28 * MIB)
    assert taken is not None
    assert address_of(taken) == address_of(again) < address_of(small)


def test_free_neighbours_are_joined():
    allocator, (first, second, third) = blocks_after(5 * MIB, 5 * MIB, 5 * MIB)
    allocator.free(first)
    allocator.free(third)
    allocator.free(second)
    whole = allocator.allocate(19.5 * MIB)
    assert whole is not None
    assert address_of(whole) == address_of(first)
    assert allocator.reserved_bytes == 20 * MIB


def test_streams_do_not_share_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(50 * MIB, "beside")
    assert allocator.reserved_bytes == 100 * MIB


def test_without_memory_left_whole_free_segments_go_back_and_split_ones_stay():
    allocator, (_, gone) = blocks_after(12 * MIB, 50 * MIB, limit_bytes=100 * MIB)
    allocator.free(gone)
    assert allocator.reserved_bytes == 62 * MIB
    assert allocator.allocate(60 * MIB) is not None
    assert allocator.reserved_bytes == 72 * MIB
    with pytest.raises(NoMemoryLeftError) as error:
        allocator.allocate(40 * MIB)
    assert error.value.missing_bytes == 12 * MIB

    allocator, (half, _) = blocks_after(9 * MIB, 9 * MIB, limit_bytes=30 * MIB)
    allocator.free(half)
    with pytest.raises(NoMemoryLeftError):
        allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_an_expandable_segment_grows_by_pages_at_its_end():
    allocator, (first, second) = blocks_after(30 * MIB, 30 * MIB, expandable_segments=True)
    assert allocator.reserved_bytes == 60 * MIB  # 40, and 20 more behind the 10 that are free
    assert address_of(second) == address_of(first) + 30 * MIB
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_an_expandable_segment_gives_whole_free_pages_back_from_its_middle():
    allocator, (_, gone, _) = blocks_after(
        30 * MIB, 60 * MIB, 10 * MIB, expandable_segments=True, limit_bytes=110 * MIB
    )
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(gone)  # of 30 to 90 MiB, the pages from 40 to 80 are whole
    allocator.release_cached()
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.allocate(60 * MIB) is not None, "the hole is mapped again"
    assert allocator.reserved_bytes == 100 * MIB


def test_a_block_is_given_back_once():
    allocator, (block,) = blocks_after(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="is free already"):
        allocator.free(block)


# Laws ----------------------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(1, 4096), st.integers(4096, 3 * MIB), st.integers(MIB, 64 * MIB))
TRACES = st.lists(st.tuples(st.booleans(), SIZES, st.sampled_from(["", "beside"]), st.integers(0, 2**16)), max_size=60)


@settings(max_examples=examples(60), deadline=None)
@given(trace=TRACES, expandable=st.booleans())
def test_whatever_is_asked_for(trace, expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    alive: list[Block] = []
    before = 0
    for takes, size, stream, chosen in trace:
        if takes or not alive:
            block = allocator.allocate(size, stream)
            assert block is not None
            assert size_of(block) >= size
            alive.append(block)
        else:
            allocator.free(alive.pop(chosen % len(alive)))
        assert allocator.allocated_bytes == sum(map(size_of, alive))
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes >= before, "nothing goes back while there is memory"
        before = allocator.reserved_bytes
        for pool in allocator.pools.values():
            ranges = sorted((address, address + size) for address, size, _, own in alive if own is pool)
            ranges = sorted([*ranges, *((address, address + size) for address, size in pool.size_at.items())])
            assert all(left[1] <= right[0] for left, right in pairwise(ranges)), "they overlap"
    free = sum(size for pool in allocator.pools.values() for size in pool.size_at.values())
    assert allocator.allocated_bytes + free == allocator.reserved_bytes
    for block in alive:
        allocator.free(block)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0, "all that is joined again can be given back"


@settings(max_examples=examples(30), deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=20), expandable=st.booleans())
def test_what_is_given_back_is_used_again(sizes, expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    first = [allocator.allocate(size) for size in sizes]
    reserved = allocator.reserved_bytes
    for block in first:
        allocator.free(block)
    for size in sorted(sizes):
        allocator.free(allocator.allocate(size))
    assert allocator.reserved_bytes == reserved


class PlainAllocator:
    """The same rules with nothing but a list of segments, each a list of [bytes, taken], all looked through."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.segments: list[tuple[object, list[list[int]]]] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    @property
    def allocated_bytes(self) -> int:
        return sum(size for _, blocks in self.segments for size, taken in blocks if taken)

    def allocate(self, size_bytes: int, stream: str) -> list[int] | None:
        size = rounded_bytes(size_bytes)
        pool = (stream, size <= MIB)
        found = self._found(pool, size)
        if not found:
            self._extend(pool, segment_bytes(size))
            found = self._found(pool, size)
        if not found:
            return None
        whole, _, blocks, place = min(found, key=lambda each: each[:2])
        block = [size if whole - size >= (512 if size <= MIB else MIB + 1) else whole, True]
        blocks[place : place + 1] = [block, *([[whole - block[0], False]] if whole > block[0] else [])]
        return block

    def _found(self, pool: object, size: int) -> list[tuple[int, int, list[list[int]], int]]:
        places = [
            (s, blocks, i) for s, (own, blocks) in enumerate(self.segments) for i in range(len(blocks)) if own == pool
        ]
        return [(b[i][0], 1000 * s + i, b, i) for s, b, i in places if not b[i][1] and b[i][0] >= size]

    def _extend(self, pool: object, size: int) -> None:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self.segments = [each for each in self.segments if len(each[1]) > 1 or each[1][0][1]]
        if self.limit_bytes is None or self.reserved_bytes + size <= self.limit_bytes:
            self.segments.append((pool, [[size, False]]))

    def free(self, block: list[int]) -> None:
        (blocks,) = [blocks for _, blocks in self.segments if any(each is block for each in blocks)]
        block[1] = False
        for left, right in reversed(list(pairwise(list(blocks)))):
            if not left[1] and not right[1]:
                left[0] += right[0]
                del blocks[next(i for i, each in enumerate(blocks) if each is right)]


FEW_SIZES = st.lists(SIZES, min_size=1, max_size=4).flatmap(
    lambda sizes: st.lists(
        st.tuples(st.booleans(), st.sampled_from(sizes), st.sampled_from(["", "beside"]), st.integers(0, 99))
    )
)


@settings(max_examples=examples(80), deadline=None)
@given(trace=FEW_SIZES, limit=st.sampled_from([None, 30 * MIB, 150 * MIB]))
def test_it_reserves_what_an_allocator_does_that_looks_through_everything(trace, limit):
    allocator, plain = CachingAllocator(limit_bytes=limit), PlainAllocator(limit)
    alive: list[tuple[Block, list[int]]] = []
    for takes, size, stream, chosen in trace:
        if takes or not alive:
            expected = plain.allocate(size, stream)
            if expected is None:
                with pytest.raises(NoMemoryLeftError):
                    allocator.allocate(size, stream)
            else:
                found = allocator.allocate(size, stream)
                assert found is not None
                assert size_of(found) == expected[0]
                alive.append((found, expected))
        else:
            block, expected = alive.pop(chosen % len(alive))
            allocator.free(block)
            plain.free(expected)
        assert allocator.reserved_bytes == plain.reserved_bytes
        assert allocator.allocated_bytes == plain.allocated_bytes


# torch itself --------------------------------------------------------------------------------------------------------


SEVERAL_SIZES = st.sampled_from([1, 512, 700, 4096, MIB // 3, MIB, MIB + 1, 3 * MIB, 11 * MIB])
EQUAL = st.tuples(SEVERAL_SIZES, st.integers(1, 30), st.integers(0, 40), st.sampled_from([0, -1]))
"""Bytes, how many such blocks are allocated, and how many of them are then freed, the oldest or the latest first."""


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(EQUAL, min_size=1, max_size=25), st.sampled_from([None, 150 * MIB]), st.booleans())
def test_equal_requests_together_leave_what_they_leave_one_by_one(several, limit, expandable):
    def served(*, together: bool) -> object:
        allocator, kept = CachingAllocator(limit_bytes=limit, expandable_segments=expandable), {}
        try:
            for size, taken, freed, place in several:
                rounded, alike = rounded_bytes(size), kept.setdefault(size, [])
                pool = allocator.pool_of(rounded, "")
                for bytes_of, count in ((rounded, taken), (0, min(freed, len(alike) + taken))):
                    request = (alike, pool, bytes_of, size, place)
                    requests = [(*request, count)] if together else [(*request, 1)] * count
                    assert allocator.serve(iter(requests if count else [])) is None
        except NoMemoryLeftError as error:
            return error.missing_bytes, allocator.peak_reserved_bytes
        peaks = (allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
        now = (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes)
        free = [sorted(pool.size_at.items()) for pool in allocator.pools.values()]
        held = {size: sorted(block[:3] for block in blocks) for size, blocks in kept.items()}
        return peaks, now, free, held

    assert served(together=True) == served(together=False)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_torch_reserves_as_much_on_random_traces(seed):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.empty_cache()
    base = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    torch.cuda.reset_peak_memory_stats()
    chance, allocator, alive = random.Random(seed), CachingAllocator(), []
    for _ in range(400):
        if alive and chance.random() < 0.45:
            tensor, block = alive.pop(chance.randrange(len(alive)))
            del tensor
            allocator.free(block)
        else:
            size = int(2 ** chance.uniform(4, 26))
            alive.append((torch.empty(size, dtype=torch.uint8, device="cuda"), allocator.allocate(size)))
        assert torch.cuda.memory_allocated() - base[0] == allocator.allocated_bytes
        assert torch.cuda.memory_reserved() - base[1] == allocator.reserved_bytes
    assert torch.cuda.max_memory_reserved() - base[1] == allocator.peak_reserved_bytes
