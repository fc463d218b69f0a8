"""The simulation of PyTorch's caching allocator: its rules one by one, and what holds for any sequence of requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.runtime.caching_allocator import Block, CachingAllocator, DeviceFullError, rounded_bytes

MIB = 2**20


@pytest.mark.parametrize(("asked", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (10**9, 10**9)])
def test_requests_are_rounded_to_512_bytes(asked: int, rounded: int) -> None:
    allocator = CachingAllocator()
    assert allocator.alloc(asked).size_bytes >= rounded == rounded_bytes(asked)
    assert allocator.requested.bytes == asked


@pytest.mark.parametrize(
    ("asked", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (21 * MIB, 22)],
)
def test_segments_are_of_2_or_20_mib_or_rounded_to_2_mib(asked: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.alloc(asked)
    assert allocator.reserved.bytes == segment * MIB


def test_a_large_block_is_split_only_where_more_than_1_mib_remains() -> None:
    allocator = CachingAllocator()
    assert allocator.alloc(10 * MIB + 512).size_bytes == 10 * MIB + 512  # of a segment of 12 MiB
    assert allocator.alloc(11 * MIB + 512).size_bytes == 12 * MIB
    assert allocator.alloc(11 * MIB).size_bytes == 12 * MIB
    assert allocator.allocated.bytes == 34 * MIB + 512 and allocator.reserved.bytes == 36 * MIB


def test_a_small_block_is_split_anywhere() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.alloc(512) for _ in range(2 * MIB // 512)]
    assert allocator.reserved.bytes == 2 * MIB and [block.offset for block in blocks] == list(range(0, 2 * MIB, 512))
    allocator.alloc(1)
    assert allocator.reserved.bytes == 4 * MIB


def test_the_best_fit_is_taken_and_the_lowest_among_equals() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.alloc(size * 512) for size in (4, 1, 2, 1, 2, 1)]
    for block in (blocks[0], blocks[2], blocks[4]):
        allocator.free(block)
    assert allocator.alloc(1000).offset == blocks[2].offset
    assert allocator.alloc(1024).offset == blocks[4].offset
    assert allocator.alloc(1024).offset == blocks[0].offset


def test_free_neighbours_merge_within_their_segment() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.alloc(6 * MIB) for _ in range(3))
    other = allocator.alloc(6 * MIB)
    assert allocator.reserved.bytes == 40 * MIB
    for block in (first, third, other):
        allocator.free(block)
    allocator.free(second)
    assert allocator.alloc(20 * MIB).offset == 0 and allocator.alloc(20 * MIB).offset == 0
    assert allocator.reserved.bytes == 40 * MIB


def test_streams_and_pools_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.alloc(512))
    allocator.alloc(512, stream=1)
    allocator.alloc(512, pool=(0, 1))
    assert allocator.reserved.bytes == 6 * MIB and allocator.pool_bytes((0, 1)) == 2 * MIB
    allocator.alloc(512)
    assert allocator.reserved.bytes == 6 * MIB


def test_unused_segments_are_returned_where_the_device_is_full() -> None:
    returned: list[int] = []
    allocator = CachingAllocator(37 * MIB, released=lambda segment: returned.append(segment.size_bytes))
    allocator.free(allocator.alloc(20 * MIB))
    small = allocator.alloc(512)
    allocator.alloc(12 * MIB)  # from the large segment: the rest of it cannot be returned
    assert returned == []
    with pytest.raises(DeviceFullError) as refused:
        allocator.alloc(16 * MIB)
    assert refused.value.asked_bytes == 16 * MIB
    allocator.free(small)
    allocator.alloc(16 * MIB)
    assert allocator.reserved.bytes == 36 * MIB and returned == [2 * MIB]


def test_pools_of_graphs_are_kept_until_they_are_let_go() -> None:
    allocator = CachingAllocator()
    allocator.keep_pool((0, 1))
    allocator.free(allocator.alloc(512, pool=(0, 1)))
    allocator.release_unused()
    assert allocator.reserved.bytes == 2 * MIB
    allocator.let_pool_go((0, 1))
    allocator.release_unused()
    assert allocator.reserved.bytes == 0 and not list(allocator)


def test_peaks_are_counted_from_where_they_were_reset() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.alloc(3 * MIB))
    assert (allocator.allocated.bytes, allocator.allocated.peak_bytes) == (0, 3 * MIB)
    allocator.reset_peaks()
    allocator.alloc(512)
    assert allocator.allocated.peak_bytes == 512 and allocator.reserved.peak_bytes == 22 * MIB


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(9 * MIB, 12 * MIB), st.integers(1, 40 * MIB))
requests = st.lists(st.tuples(st.sampled_from(["alloc", "alloc", "free", "release"]), sizes, st.integers(0, 2)), max_size=60)


@given(requests)
def test_whatever_is_asked_for_blocks_never_overlap_and_sums_hold(asked: list[tuple[str, int, int]]) -> None:
    allocator = CachingAllocator()
    held: list[Block] = []
    for what, size, stream in asked:
        if what == "alloc":
            held.append(allocator.alloc(size, stream))
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
            starts = [*(offset for offset, _ in here), segment.size_bytes]
            assert all(end <= start for end, start in zip(ends, starts, strict=True))
    for block in held:
        allocator.free(block)
    allocator.release_unused()
    assert allocator.reserved.bytes == 0
