"""The model of glibc's allocator: its rules one by one, and beside the C library itself in a process of its own."""

import json
import os
import subprocess
import sys
from ctypes import CDLL
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from planner.graphs.addresses import Buffer
from planner.graphs.allocators.glibc import MMAP_THRESHOLD_BYTES, MOST_MMAP_THRESHOLD_BYTES, Chunk, GlibcAllocator
from planner.graphs.allocators.training import Training, play

KIB, MIB = 2**10, 2**20
# Bytes in mappings and in the heap after each call of a list of sizes to allocate, or indices to free as negative numbers.
REAL = """
import ctypes, json, sys
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.free.argtypes = [ctypes.c_void_p]
calls, held, found = json.loads(sys.argv[1]), [ctypes.c_void_p() for _ in range(1000)], []
libc.malloc_trim(0)
before = libc.mallinfo2()
used = 0
for call in calls:
    if call > 0:
        assert libc.posix_memalign(ctypes.byref(held[used]), 64, call) == 0
        used += 1
    else:
        libc.free(held[-call])
    now = libc.mallinfo2()
    found.append((now.hblkhd - before.hblkhd, now.arena - before.arena))
print(json.dumps(found))
"""


def test_small_chunks_grow_the_heap_and_large_ones_are_mapped() -> None:
    allocator = GlibcAllocator()
    small, large = allocator.allocate(100 * KIB), allocator.allocate(200 * KIB)
    assert large.size_bytes > MMAP_THRESHOLD_BYTES > small.size_bytes
    assert small.segment.number == 0 and large.segment.number == 1 and large.size_bytes == 204 * KIB
    allocator.free(large)
    assert allocator.reserved.bytes == small.segment.size_bytes == 232 * KIB  # with a pad of 128 KiB, in pages


def test_mmap_threshold_rises_with_freed_sizes_up_to_32_mib() -> None:
    allocator = GlibcAllocator()
    for size_bytes, threshold_bytes in ((MIB, MIB + 4096), (8 * MIB, 8 * MIB + 4096), (2 * MIB, 8 * MIB + 4096)):
        allocator.free(allocator.allocate(size_bytes))
        assert allocator.mmap_threshold_bytes == threshold_bytes
    allocator.free(allocator.allocate(MOST_MMAP_THRESHOLD_BYTES))  # with its header it is larger
    assert allocator.mmap_threshold_bytes == 8 * MIB + 4096
    assert allocator.allocate(4 * MIB).segment.number == 0


def test_a_threshold_that_was_set_stays() -> None:
    allocator = GlibcAllocator(mmap_threshold_bytes=MIB)
    allocator.free(allocator.allocate(8 * MIB))
    assert allocator.mmap_threshold_bytes == MIB and allocator.reserved.bytes == 0


def test_a_free_end_of_the_heap_is_returned_and_a_gap_is_not() -> None:
    allocator = GlibcAllocator(mmap_threshold_bytes=64 * MIB)
    first, second, third = (allocator.allocate(4 * MIB) for _ in range(3))
    held_bytes = allocator.reserved.bytes
    allocator.free(second)
    assert allocator.reserved.bytes == held_bytes
    assert allocator.allocate(2 * MIB).offset == second.offset
    allocator.free(third)
    assert first.size_bytes < allocator.reserved.bytes < held_bytes - 5 * MIB + 256 * KIB


def test_training_keeps_the_memory_that_fragments_the_heap() -> None:
    buffers = tuple(Buffer(f"b{i}", i, i + 3 + i % 5, (1 + i % 4) * MIB) for i in range(40))
    usage = play(Training((MIB,), buffers), GlibcAllocator())
    first, *later = (max(step) for step in usage.by_step)
    assert usage.allocated_bytes < usage.reserved_bytes == first < 1.6 * usage.allocated_bytes
    assert later[0] == later[1] <= first


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 300 * KIB), st.integers(1, 40 * MIB))


@given(st.lists(st.tuples(st.sampled_from(["alloc", "alloc", "free"]), sizes), max_size=60))
def test_chunks_never_overlap_and_sums_hold(asked: list[tuple[str, int]]) -> None:
    allocator = GlibcAllocator()
    held: list[Chunk] = []
    for what, size in asked:
        if what == "alloc":
            held.append(allocator.allocate(size))
            assert held[-1].size_bytes >= size + 8
        elif held:
            allocator.free(held.pop(size % len(held)))
        assert allocator.allocated.bytes == sum(chunk.size_bytes for chunk in held) <= allocator.reserved.bytes
        here = sorted((chunk.offset, chunk.size_bytes) for chunk in held if chunk.segment.number == 0)
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(here))


@pytest.mark.skipif(not hasattr(CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later")
@pytest.mark.parametrize(
    "calls",
    [
        [MIB, 8 * MIB, 100 * KIB, 0, -1, 4 * MIB, 4 * MIB, 16 * MIB, -3, -4, 3 * MIB],
        [40 * MIB, 0, 20 * MIB, -1, 10 * MIB, 10 * MIB, 10 * MIB, -3, 9 * MIB, -4, -2, -5],
        [2 * MIB, 0, *([MIB] * 12), -3, -4, -5, 2 * MIB, -7, 3 * MIB, -9, -10, -11, -12],
    ],
)
def test_the_c_library_does_the_same(calls: list[int]) -> None:
    # A thread's cache holds what alignment leaves of a chunk, which then keeps its neighbours apart.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    script = [sys.executable, "-c", REAL, json.dumps(calls)]
    made = subprocess.run(script, capture_output=True, text=True, check=True, env=environment)
    allocator, held = GlibcAllocator(), list[Chunk]()
    for call, (mapped_bytes, heap_bytes) in zip(calls, json.loads(made.stdout), strict=True):
        if call > 0:
            held.append(allocator.allocate(call))
        else:
            allocator.free(held[-call])
        # The interpreter has a heap of its own, in which there may be room.
        assert abs(allocator.reserved.bytes - mapped_bytes - heap_bytes) <= 512 * KIB, (call, mapped_bytes, heap_bytes)
