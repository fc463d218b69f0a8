"""A pure simulation of PyTorch's caching allocator on a CUDA device: where blocks are placed, and what is reserved.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with default settings (no ``expandable_segments``, no
``max_split_size_mb``, no rounding to parts of a power of two). No memory is touched and torch is not imported.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

BLOCK_BYTES = 512
_SMALL_BYTES = 2**20  # up to this size, blocks are in small segments
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_SEGMENT_BYTES = 20 * 2**20
_LEAST_OWN_SEGMENT_BYTES = 10 * 2**20  # from this size on, a segment is as large as its first block
_SEGMENT_ROUNDING_BYTES = 2 * 2**20

DEFAULT_POOL = (0, 0)
PoolId = tuple[int, int]


class DeviceFullError(Exception):
    """The error that no segment can be reserved for a block, even after all unused segments were released.

    Attributes:
        asked_bytes: size of the block.
    """

    def __init__(self, asked_bytes: int) -> None:
        super().__init__(f"no room for a block of {asked_bytes} bytes")
        self.asked_bytes = asked_bytes


@dataclass(eq=False, slots=True)
class Segment:
    """Memory reserved from the driver at once.

    Attributes:
        number: unique among the segments of an allocator, in the order in which they were reserved.
        size_bytes: its size.
        stream: stream of its blocks.
        pool: its pool.
        small: True if it holds blocks of up to 1 MiB.
    """

    number: int
    size_bytes: int
    stream: int
    pool: PoolId
    small: bool


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, in use or free.

    Attributes:
        segment, offset: its position.
        size_bytes: rounded size, which counts as allocated.
        requested_bytes: requested size; 0 while it is free.
        in_use: True if it was handed out.
    """

    segment: Segment
    offset: int
    size_bytes: int
    requested_bytes: int = 0
    in_use: bool = False
    before: "Block | None" = field(default=None, repr=False)
    behind: "Block | None" = field(default=None, repr=False)


@dataclass(slots=True)
class Level:
    """A number of bytes, and its peak.

    Attributes:
        bytes: now.
        peak_bytes: the most since the last reset.
    """

    bytes: int = 0
    peak_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """Add `size_bytes`, which may be negative."""
        self.bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def reset_peak(self) -> None:
        """Reset the peak to the current value."""
        self.peak_bytes = self.bytes


class CachingAllocator:
    """The blocks of one device: best fit among the free blocks of a stream and pool, in segments that stay reserved.

    Attributes:
        allocated: bytes of blocks in use, rounded.
        requested: requested bytes of blocks in use.
        reserved: bytes of segments.
        segments: reserved segments, by number.
    """

    def __init__(self, capacity_bytes: int | None = None, *, released: Callable[[Segment], object] = lambda _: None) -> None:
        """Initialize for a device of `capacity_bytes`; None for no limit.

        Args:
            released: called with each segment that is returned to the driver.
        """
        self.capacity_bytes = capacity_bytes
        self.allocated, self.requested, self.reserved = Level(), Level(), Level()
        self.segments: dict[int, Segment] = {}
        self._released = released
        self._numbers = count()
        self._free: dict[tuple[PoolId, int, bool], list[tuple[int, int, int, Block]]] = {}
        self._kept_pools: set[PoolId] = set()

    def alloc(self, size_bytes: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> Block:
        """Return a block of at least `size_bytes` (more than 0) for `stream`.

        Raises:
            DeviceFullError: the device has no room for it.
        """
        rounded = rounded_bytes(size_bytes)
        small = rounded <= _SMALL_BYTES
        block = self._best_fit(rounded, stream, pool, small=small) or self._whole_segment(rounded, stream, pool, small=small)
        self._split(block, rounded)
        block.in_use, block.requested_bytes = True, size_bytes
        self.allocated.add(block.size_bytes)
        self.requested.add(size_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free `block`: it merges with free neighbours in its segment, which stays reserved."""
        self.allocated.add(-block.size_bytes)
        self.requested.add(-block.requested_bytes)
        block.in_use, block.requested_bytes = False, 0
        for neighbour in (block.before, block.behind):
            if neighbour is not None and not neighbour.in_use:
                self._take_out(neighbour)
                _merge(block, neighbour)
        self._put(block)

    def release_unused(self) -> None:
        """Release all segments without used blocks to the driver, except those of kept pools."""
        for key, blocks in self._free.items():
            if key[0] in self._kept_pools:
                continue
            whole = [entry for entry in blocks if entry[-1].before is None and entry[-1].behind is None]
            for entry in whole:
                blocks.remove(entry)
                segment = entry[-1].segment
                del self.segments[segment.number]
                self.reserved.add(-segment.size_bytes)
                self._released(segment)

    def keep_pool(self, pool: PoolId) -> None:
        """Keep the segments of `pool` from now on, as for a CUDA graph."""
        self._kept_pools.add(pool)

    def let_pool_go(self, pool: PoolId) -> None:
        """Allow segments of `pool` to be released again."""
        self._kept_pools.discard(pool)

    def reset_peaks(self) -> None:
        """Reset all peaks to the current values."""
        for level in (self.allocated, self.requested, self.reserved):
            level.reset_peak()

    def pool_bytes(self, pool: PoolId) -> int:
        """Return the bytes of the segments of `pool`."""
        return sum(segment.size_bytes for segment in self.segments.values() if segment.pool == pool)

    def free_bytes(self, segment: Segment) -> int:
        """Return the bytes of the free blocks of `segment`."""
        blocks = (entry[-1] for entries in self._free.values() for entry in entries)
        return sum(block.size_bytes for block in blocks if block.segment is segment)

    def _best_fit(self, size_bytes: int, stream: int, pool: PoolId, *, small: bool) -> Block | None:
        """Remove and return the smallest free block that is large enough; among equals, the one at the lowest address."""
        blocks = self._free.get((pool, stream, small), [])
        place = bisect_left(blocks, (size_bytes, -1, -1), key=lambda entry: entry[:3])
        return blocks.pop(place)[-1] if place < len(blocks) else None

    def _whole_segment(self, size_bytes: int, stream: int, pool: PoolId, *, small: bool) -> Block:
        segment_bytes = _segment_bytes(size_bytes)
        if not self._has_room(segment_bytes):
            self.release_unused()
            if not self._has_room(segment_bytes):
                raise DeviceFullError(size_bytes)
        segment = Segment(next(self._numbers), segment_bytes, stream, pool, small)
        self.segments[segment.number] = segment
        self.reserved.add(segment_bytes)
        return Block(segment, 0, segment_bytes)

    def _has_room(self, segment_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved.bytes + segment_bytes <= self.capacity_bytes

    def _split(self, block: Block, size_bytes: int) -> None:
        """Split `block` if the remainder is usable: any for a small block, more than 1 MiB for a large one."""
        remaining = block.size_bytes - size_bytes
        if remaining < BLOCK_BYTES or (not block.segment.small and remaining <= _SMALL_BYTES):
            return
        rest = Block(block.segment, block.offset + size_bytes, remaining, before=block, behind=block.behind)
        if block.behind is not None:
            block.behind.before = rest
        block.size_bytes, block.behind = size_bytes, rest
        self._put(rest)

    def _put(self, block: Block) -> None:
        insort(self._free.setdefault(_key(block), []), _entry(block), key=lambda entry: entry[:3])

    def _take_out(self, block: Block) -> None:
        self._free[_key(block)].remove(_entry(block))

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments.values())


def rounded_bytes(size_bytes: int) -> int:
    """Return the size of the block for a request of `size_bytes`."""
    return max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size_bytes < _LEAST_OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size_bytes // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES


def _key(block: Block) -> tuple[PoolId, int, bool]:
    return block.segment.pool, block.segment.stream, block.segment.small


def _entry(block: Block) -> tuple[int, int, int, Block]:
    return block.size_bytes, block.segment.number, block.offset, block


def _merge(block: Block, neighbour: Block) -> None:
    """Extend `block` over its free `neighbour`."""
    if neighbour is block.before:
        block.offset, block.before = neighbour.offset, neighbour.before
        if block.before is not None:
            block.before.behind = block
    else:
        block.behind = neighbour.behind
        if block.behind is not None:
            block.behind.before = block
    block.size_bytes += neighbour.size_bytes
