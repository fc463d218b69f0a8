"""A model of the C library's allocator on Linux (glibc), which PyTorch asks for memory on the CPU: what a process keeps mapped.

The rules are those of ``malloc/malloc.c``, for the main arena; each is named here by its constant or function. Caches of small
chunks are not modelled: tensors are larger. Chunks of the heap are taken by best fit, where glibc takes the first of a bin.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

from planner.graphs.allocators.caching import Level, Segment

_PAGE_BYTES = 4096
_HEADER_BYTES = 8  # SIZE_SZ
_CHUNK_BYTES = 16  # MALLOC_ALIGNMENT
_LEAST_BYTES = 32  # MINSIZE
_TENSOR_ALIGNMENT = 64  # gAlignment of c10/core/impl/alloc_cpu.cpp, which calls posix_memalign
MMAP_THRESHOLD_BYTES = 128 * 2**10  # DEFAULT_MMAP_THRESHOLD_MIN, and the trim threshold at first
MOST_MMAP_THRESHOLD_BYTES = 32 * 2**20  # DEFAULT_MMAP_THRESHOLD_MAX
_TOP_PAD_BYTES = 128 * 2**10  # DEFAULT_TOP_PAD: by how much the heap grows and is left beyond what is needed


@dataclass(eq=False, slots=True)
class Chunk:
    """Memory in use.

    Attributes:
        segment: the heap, or a mapping of its own.
        offset: in the segment.
        size_bytes: with its header.
    """

    segment: Segment
    offset: int
    size_bytes: int


class GlibcAllocator:
    """Memory of a process: a heap that grows and shrinks at its end, and mappings for what is larger than a threshold.

    Attributes:
        allocated: bytes of chunks in use.
        reserved: bytes that are mapped: the resident memory, once all of it was written.
        retries: always 0, as for an allocator without a limit.
        mmap_threshold_bytes: larger chunks get a mapping. It rises with those that are freed, and the threshold for returning the
            end of the heap with it, unless it was set.
    """

    def __init__(self, *, mmap_threshold_bytes: int | None = None) -> None:
        """Initialize an empty heap.

        Args:
            mmap_threshold_bytes: as set by ``MALLOC_MMAP_THRESHOLD_``; None for the one that adapts.
        """
        self.allocated, self.reserved, self.retries = Level(), Level(), 0
        self._adapts = mmap_threshold_bytes is None
        self.mmap_threshold_bytes = MMAP_THRESHOLD_BYTES if mmap_threshold_bytes is None else mmap_threshold_bytes
        self._trim_threshold_bytes = MMAP_THRESHOLD_BYTES
        self._numbers = count()
        self._heap = Segment(next(self._numbers), 0, 0, (0, 0), small=False)
        self._top = 0  # offset of the free end of the heap
        self._sizes: dict[int, int] = {}  # of the free chunks before it, by offset
        self._by_size: list[tuple[int, int]] = []
        self._by_offset: list[int] = []

    def allocate(self, size_bytes: int) -> Chunk:
        """Return memory for a tensor of `size_bytes` (``posix_memalign``, ``_int_malloc``, ``sysmalloc``)."""
        chunk_bytes, wanted_bytes = (
            _compute_chunk_bytes(size_bytes),
            _compute_chunk_bytes(size_bytes + _TENSOR_ALIGNMENT + _LEAST_BYTES),
        )
        place = bisect_left(self._by_size, (wanted_bytes, 0))
        if place < len(self._by_size):
            found_bytes, offset = self._by_size[place]
            self._take_out(offset)
            if found_bytes - chunk_bytes >= _LEAST_BYTES:
                self._put(offset + chunk_bytes, found_bytes - chunk_bytes)
            else:
                chunk_bytes = found_bytes
            return self._mark_used(Chunk(self._heap, offset, chunk_bytes))
        if self._heap.size_bytes - self._top < wanted_bytes + _LEAST_BYTES:
            if wanted_bytes >= self.mmap_threshold_bytes:
                mapped_bytes = _round_to_pages(wanted_bytes + _HEADER_BYTES)
                self.reserved.add(mapped_bytes)
                segment = Segment(next(self._numbers), mapped_bytes, 0, (0, 0), small=False)
                return self._mark_used(Chunk(segment, 0, mapped_bytes))
            missing_bytes = wanted_bytes + _TOP_PAD_BYTES + _LEAST_BYTES - (self._heap.size_bytes - self._top)
            self._grow(_round_to_pages(missing_bytes))
        offset, self._top = self._top, self._top + chunk_bytes
        return self._mark_used(Chunk(self._heap, offset, chunk_bytes))

    def free(self, chunk: Chunk) -> None:
        """Free `chunk` (``__libc_free``, ``_int_free``): a mapping is returned, in the heap neighbours merge."""
        self.allocated.add(-chunk.size_bytes)
        if chunk.segment is not self._heap:
            self.reserved.add(-chunk.size_bytes)
            if self._adapts and self.mmap_threshold_bytes < chunk.size_bytes <= MOST_MMAP_THRESHOLD_BYTES:
                self.mmap_threshold_bytes, self._trim_threshold_bytes = chunk.size_bytes, 2 * chunk.size_bytes
            return
        offset, size_bytes = chunk.offset, chunk.size_bytes
        place = bisect_left(self._by_offset, offset)
        if place and (before := self._by_offset[place - 1]) + self._sizes[before] == offset:
            offset, size_bytes = before, size_bytes + self._sizes[before]
            self._take_out(before)
        if offset + size_bytes in self._sizes:
            behind = offset + size_bytes
            size_bytes += self._sizes[behind]
            self._take_out(behind)
        if offset + size_bytes < self._top:
            self._put(offset, size_bytes)
            return
        self._top = offset
        # The end of the heap is returned if it is larger than the threshold (``systrim``).
        top_bytes = self._heap.size_bytes - self._top
        if top_bytes >= self._trim_threshold_bytes:
            self._grow(-max(0, (top_bytes - _LEAST_BYTES - 1 - _TOP_PAD_BYTES) // _PAGE_BYTES * _PAGE_BYTES))

    def _grow(self, size_bytes: int) -> None:
        self._heap.size_bytes += size_bytes
        self.reserved.add(size_bytes)

    def _mark_used(self, chunk: Chunk) -> Chunk:
        self.allocated.add(chunk.size_bytes)
        return chunk

    def _put(self, offset: int, size_bytes: int) -> None:
        self._sizes[offset] = size_bytes
        insort(self._by_size, (size_bytes, offset))
        insort(self._by_offset, offset)

    def _take_out(self, offset: int) -> None:
        del self._by_size[bisect_left(self._by_size, (self._sizes.pop(offset), offset))]
        del self._by_offset[bisect_left(self._by_offset, offset)]


def _compute_chunk_bytes(size_bytes: int) -> int:
    """Return the size of the chunk for a request (``request2size``)."""
    return max(_LEAST_BYTES, -(-(size_bytes + _HEADER_BYTES) // _CHUNK_BYTES) * _CHUNK_BYTES)


def _round_to_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
