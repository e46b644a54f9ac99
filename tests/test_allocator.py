"""The caching allocator: torch 2.13's rules by worked examples, and what must hold of any trace."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gssim.allocator import Block, CachingAllocator, NoMemoryLeftError, rounded_bytes, segment_bytes

MIB = 2**20


def blocks_after(*sizes: float, **options: object) -> tuple[CachingAllocator, list[Block]]:
    allocator = CachingAllocator(**options)  # type: ignore[arg-type]
    found = [allocator.allocate(size) for size in sizes]
    return allocator, [block for block in found if block is not None]


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
    assert kept.size_bytes == 20 * MIB, "1 MiB is too little to be split off"
    assert allocator.allocated_bytes == 20 * MIB
    allocator.free(kept)
    kept = allocator.allocate(19 * MIB - 512)
    assert kept is not None
    assert kept.size_bytes == 19 * MIB - 512
    assert kept.next is not None


def test_a_small_block_is_split_down_to_512_bytes():
    allocator, (first, second) = blocks_after(2 * MIB - 512 - MIB, MIB)
    assert first.size_bytes + second.size_bytes == 2 * MIB - 512
    last = allocator.allocate(512)
    assert last is not None
    assert last.address == 2 * MIB - 512


def test_the_smallest_block_that_is_large_enough_is_taken_the_lowest_of_equal_ones():
    allocator, (large, small, again) = blocks_after(40 * MIB, 30 * MIB, 30 * MIB)
    for block in (large, again, small):
        allocator.free(block)
    taken = allocator.allocate(28 * MIB)
    assert taken is not None
    assert taken.address == small.address


def test_free_neighbours_are_joined():
    allocator, (first, second, third) = blocks_after(5 * MIB, 5 * MIB, 5 * MIB)
    allocator.free(first)
    allocator.free(third)
    allocator.free(second)
    whole = allocator.allocate(19.5 * MIB)
    assert whole is not None
    assert whole.address == first.address
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
    assert second.address == first.address + 30 * MIB
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


@settings(max_examples=60, deadline=None)
@given(trace=TRACES, expandable=st.booleans())
def test_whatever_is_asked_for(trace, expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    alive: list[Block] = []
    before = 0
    for takes, size, stream, chosen in trace:
        if takes or not alive:
            block = allocator.allocate(size, stream)
            assert block is not None
            assert block.size_bytes >= size
            alive.append(block)
        else:
            allocator.free(alive.pop(chosen % len(alive)))
        assert allocator.allocated_bytes == sum(block.size_bytes for block in alive)
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes >= before, "nothing goes back while there is memory"
        before = allocator.reserved_bytes
        ranges = sorted((block.address, block.address + block.size_bytes) for block in alive)
        assert all(left[1] <= right[0] for left, right in pairwise(ranges)), "they overlap"
    free = sum(block.size_bytes for pool in allocator.pools.values() for block in pool.free)
    assert allocator.allocated_bytes + free == allocator.reserved_bytes
    for block in alive:
        allocator.free(block)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0, "all that is joined again can be given back"


@settings(max_examples=30, deadline=None)
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


# torch itself --------------------------------------------------------------------------------------------------------


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
