"""The model of PyTorch's caching allocator: its rules one by one, and what holds for any sequence of requests.

Each names the constant or function of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` that states it.
"""

import pytest
from hypothesis import given, strategies as st

from planner.graphs.allocators.caching import EXPANDABLE, Block, CachingAllocator, DeviceFullError, Rules

MIB = 2**20


# kMinBlockSize, round_size
@pytest.mark.parametrize(("asked", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (10**9, 10**9)])
def test_requests_are_rounded_to_512_bytes(asked: int, rounded: int) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(asked).size_bytes >= rounded == Rules().round_bytes(asked)
    assert allocator.requested.bytes == asked


# kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge, get_allocation_size
@pytest.mark.parametrize(
    ("asked", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (21 * MIB, 22)],
)
def test_segments_are_of_2_or_20_mib_or_rounded_to_2_mib(asked: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved.bytes == segment * MIB


# should_split, kSmallSize
def test_a_large_block_is_split_only_where_more_than_1_mib_remains() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(10 * MIB + 512).size_bytes == 10 * MIB + 512  # of a segment of 12 MiB
    assert allocator.allocate(11 * MIB + 512).size_bytes == 12 * MIB
    assert allocator.allocate(11 * MIB).size_bytes == 12 * MIB
    assert allocator.allocated.bytes == 34 * MIB + 512 and allocator.reserved.bytes == 36 * MIB


# should_split
def test_a_small_block_is_split_anywhere() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(512) for _ in range(2 * MIB // 512)]
    assert allocator.reserved.bytes == 2 * MIB and [block.offset for block in blocks] == list(range(0, 2 * MIB, 512))
    allocator.allocate(1)
    assert allocator.reserved.bytes == 4 * MIB


# get_free_block, BlockComparatorSize
def test_the_best_fit_is_taken_and_the_lowest_among_equals() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * 512) for size in (4, 1, 2, 1, 2, 1)]
    for block in (blocks[0], blocks[2], blocks[4]):
        allocator.free(block)
    assert allocator.allocate(1000).offset == blocks[2].offset
    assert allocator.allocate(1024).offset == blocks[4].offset
    assert allocator.allocate(1024).offset == blocks[0].offset


# try_merge_blocks
def test_free_neighbours_merge_within_their_segment() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(6 * MIB) for _ in range(3))
    other = allocator.allocate(6 * MIB)
    assert allocator.reserved.bytes == 40 * MIB
    for block in (first, third, other):
        allocator.free(block)
    allocator.free(second)
    assert allocator.allocate(20 * MIB).offset == 0 and allocator.allocate(20 * MIB).offset == 0
    assert allocator.reserved.bytes == 40 * MIB


# get_pool, BlockComparatorSize
def test_streams_and_pools_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(512))
    allocator.allocate(512, stream=1)
    allocator.allocate(512, pool=(0, 1))
    assert allocator.reserved.bytes == 6 * MIB and allocator.count_pool_bytes((0, 1)) == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved.bytes == 6 * MIB


# malloc, release_cached_blocks, release_blocks
def test_unused_segments_are_returned_where_the_device_is_full() -> None:
    returned: list[int] = []
    allocator = CachingAllocator(37 * MIB, released=lambda segment: returned.append(segment.size_bytes))
    allocator.free(allocator.allocate(20 * MIB))
    small = allocator.allocate(512)
    allocator.allocate(12 * MIB)  # from the large segment: the rest of it cannot be returned
    assert returned == []
    with pytest.raises(DeviceFullError) as refused:
        allocator.allocate(16 * MIB)
    assert refused.value.asked_bytes == 16 * MIB
    allocator.free(small)
    allocator.allocate(16 * MIB)
    assert allocator.reserved.bytes == 36 * MIB and returned == [2 * MIB]


# graph_pools_freeable
def test_pools_of_graphs_are_kept_until_they_are_let_go() -> None:
    allocator = CachingAllocator()
    allocator.keep_pool((0, 1))
    allocator.free(allocator.allocate(512, pool=(0, 1)))
    allocator.release_unused()
    assert allocator.reserved.bytes == 2 * MIB
    allocator.let_pool_go((0, 1))
    allocator.release_unused()
    assert allocator.reserved.bytes == 0 and not list(allocator)


def test_peaks_are_counted_from_where_they_were_reset() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(3 * MIB))
    assert (allocator.allocated.bytes, allocator.allocated.peak_bytes) == (0, 3 * MIB)
    allocator.reset_peaks()
    allocator.allocate(512)
    assert allocator.allocated.peak_bytes == 512 and allocator.reserved.peak_bytes == 22 * MIB


# find_expandable_block, map_block
@pytest.mark.parametrize(
    ("asked", "reserved"), [(1, 2), (MIB, 2), (MIB + 1, 20), (20 * MIB, 20), (20 * MIB + 1, 40), (61 * MIB, 80)]
)
def test_expandable_segments_map_pages_of_2_or_20_mib(asked: int, reserved: int) -> None:
    allocator = CachingAllocator(rules=EXPANDABLE)
    allocator.allocate(asked)
    assert allocator.reserved.bytes == reserved * MIB


# try_allocate_expandable_block
def test_an_expandable_segment_grows_from_its_free_end() -> None:
    allocator = CachingAllocator(rules=EXPANDABLE)
    first = allocator.allocate(15 * MIB)
    second = allocator.allocate(15 * MIB)  # from the 5 MiB that are left on, with one more page
    assert (first.offset, second.offset) == (0, 15 * MIB)
    assert first.segment is second.segment and allocator.reserved.bytes == 40 * MIB
    other = allocator.allocate(15 * MIB, stream=1)
    assert other.segment is not first.segment and allocator.reserved.bytes == 60 * MIB


# should_split, is_expandable_segments_active
def test_blocks_of_expandable_segments_are_split_anywhere() -> None:
    allocator = CachingAllocator(rules=EXPANDABLE)
    assert allocator.allocate(20 * MIB - 512).size_bytes == 20 * MIB - 512
    assert allocator.free_bytes(next(iter(allocator))) == 512


# get_free_block, expandable_size
def test_a_free_block_that_can_grow_is_the_last_choice() -> None:
    allocator = CachingAllocator(rules=EXPANDABLE)
    gap, _, _ = allocator.allocate(12 * MIB), allocator.allocate(4 * MIB), allocator.allocate(19 * MIB)
    allocator.free(gap)  # before the free 5 MiB at the end, which could grow
    assert allocator.allocate(3 * MIB).offset == gap.offset


# release_blocks, unmap_block, ExpandableSegment::unmap
def test_whole_free_pages_of_expandable_segments_are_returned() -> None:
    returned: list[int] = []
    allocator = CachingAllocator(rules=EXPANDABLE, released=lambda segment: returned.append(segment.number))
    first, middle, last = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB), allocator.allocate(20 * MIB)
    allocator.free(middle)  # from 30 to 60 MiB, of which the page from 40 to 60 MiB is whole
    allocator.release_unused()
    assert allocator.reserved.bytes == 60 * MIB and returned == []
    again = allocator.allocate(30 * MIB)  # the page is mapped again, at the lowest address
    assert again.offset == 30 * MIB and allocator.reserved.bytes == 80 * MIB
    for block in (first, again, last):
        allocator.free(block)
    allocator.release_unused()
    assert allocator.reserved.bytes == 0 and returned == [0]


# alloc_block, ExpandableSegment::map: cuMemCreate without memory
def test_pages_are_returned_where_the_device_is_full() -> None:
    allocator = CachingAllocator(60 * MIB, rules=EXPANDABLE)
    allocator.free(allocator.allocate(40 * MIB, stream=1))
    allocator.allocate(30 * MIB)
    assert allocator.reserved.bytes == 40 * MIB and allocator.retries == 1
    with pytest.raises(DeviceFullError):
        allocator.allocate(31 * MIB)


# roundup_power2_next_division: its comment has 1200 in 4 divisions
@pytest.mark.parametrize(
    ("asked", "divisions", "rounded"),
    [(1200 * 512, 4, 1280 * 512), (1280 * 512, 4, 1280 * 512), (1024 * 512, 4, 1024 * 512), (1800, 4, 2048), (1200, 8, 1536)],
)
def test_sizes_are_rounded_to_parts_of_powers_of_two(asked: int, divisions: int, rounded: int) -> None:
    assert Rules(roundup_power2_divisions=divisions).round_bytes(asked) == rounded


# get_free_block, should_split, max_split_size, max_non_split_rounding_size
def test_oversize_blocks_are_not_split_and_serve_requests_of_their_size() -> None:
    allocator = CachingAllocator(rules=Rules(max_split_bytes=64 * MIB))
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(30 * MIB)
    assert allocator.reserved.bytes == 130 * MIB
    assert allocator.allocate(80 * MIB + 512).size_bytes == 100 * MIB
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(80 * MIB)  # 20 MiB less than the free one, which is too many
    assert allocator.reserved.bytes == 310 * MIB


# release_available_cached_blocks
def test_oversize_blocks_are_returned_before_all_others() -> None:
    allocator = CachingAllocator(200 * MIB, rules=Rules(max_split_bytes=64 * MIB))
    for size_bytes in (100 * MIB, 30 * MIB):
        allocator.free(allocator.allocate(size_bytes))
    allocator.allocate(76 * MIB)  # which the free 100 MiB are too large for
    assert allocator.reserved.bytes == 106 * MIB and allocator.retries == 0


# large_segment_size
def test_the_size_of_large_segments_can_be_set() -> None:
    allocator = CachingAllocator(rules=Rules(large_segment_bytes=32 * MIB))
    allocator.allocate(2 * MIB)
    assert allocator.reserved.bytes == 32 * MIB


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(9 * MIB, 12 * MIB), st.integers(1, 40 * MIB))
requests = st.lists(st.tuples(st.sampled_from(["alloc", "alloc", "free", "release"]), sizes, st.integers(0, 2)), max_size=60)


@pytest.mark.parametrize("rules", [Rules(), EXPANDABLE, Rules(max_split_bytes=16 * MIB, roundup_power2_divisions=8)])
@given(asked=requests)
def test_whatever_is_asked_for_blocks_never_overlap_and_sums_hold(rules: Rules, asked: list[tuple[str, int, int]]) -> None:
    allocator = CachingAllocator(rules=rules)
    held: list[Block] = []
    for what, size, stream in asked:
        if what == "alloc":
            held.append(allocator.allocate(size, stream))
            assert held[-1].segment.stream == stream and held[-1].size_bytes >= size
        elif what == "free" and held:
            allocator.free(held.pop(size % len(held)))
        elif what == "release":
            allocator.release_unused()
        assert allocator.allocated.bytes == sum(block.size_bytes for block in held) <= allocator.reserved.bytes
        assert allocator.requested.bytes == sum(block.requested_bytes for block in held)
        assert allocator.reserved.bytes == sum(segment.size_bytes for segment in allocator)
        assert {block.segment.number for block in held} <= allocator.segments.keys()
        for segment in allocator:
            here = sorted((block.offset, block.size_bytes) for block in held if block.segment is segment)
            ends = [0, *(offset + size_bytes for offset, size_bytes in here)]
            starts = [*(offset for offset, _ in here), 2**60 if segment.expandable else segment.size_bytes]
            assert all(end <= start for end, start in zip(ends, starts, strict=True))
    for block in held:
        allocator.free(block)
    allocator.release_unused()
    assert allocator.reserved.bytes == 0 and not list(allocator)
