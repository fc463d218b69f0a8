"""A model of PyTorch's caching allocator on a CUDA device: where blocks lie, and what is reserved. No memory is touched.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``; each is named here by the constant or function that states it there.
Garbage collection (``garbage_collection_threshold``) and ``cudaMallocAsync`` are not modelled.

Why a model: a budget of allocated bytes is exceeded by what is reserved, most by tight plans, and where blocks lie depends on all
requests before. Beyond these rules two things decide how good it is, both found on an H100: the order of requests within an op
(without it 10% more was reserved by a ResNet-50 than predicted), and workspaces of libraries, which come before the first step
(``training.Training``).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 2**20  # kSmallSize: up to this size, blocks are in small segments
_SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer
LEAST_OWN_SEGMENT_BYTES = 10 * 2**20  # kMinLargeAlloc: from this size on, a segment is as large as its first block
_SEGMENT_ROUNDING_BYTES = 2 * 2**20  # kRoundLarge
_ADDRESSES = 2**60  # bytes of an expandable segment's range of addresses: more than it ever maps

DEFAULT_POOL = (0, 0)
PoolId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the allocator, as in ``PYTORCH_CUDA_ALLOC_CONF``.

    Attributes:
        expandable_segments: one segment for each stream and pool, which grows by pages of 2 or 20 MiB.
        roundup_power2_divisions: sizes are rounded up to one of so many parts between two powers of two; 1 for multiples of 512.
        max_split_bytes: larger blocks are not split, and serve requests of about their size only (``max_split_size_mb``); None
            for no limit.
        max_non_split_rounding_bytes: by how much such a block may be larger than the request.
        large_segment_bytes: size of the segments for blocks of 1 to 10 MiB, and of large pages.
    """

    expandable_segments: bool = False
    roundup_power2_divisions: int = 1
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES

    def round_bytes(self, size_bytes: int) -> int:
        """Return the size of the block for a request of `size_bytes` (``round_size``)."""
        divisions = self.roundup_power2_divisions
        if divisions > 1 and size_bytes > BLOCK_BYTES * divisions:
            part = (1 << size_bytes.bit_length() - 1) >> divisions.bit_length() - 1  # roundup_power2_next_division
            return -(-size_bytes // part) * part
        return max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES

    def choose_segment_bytes(self, size_bytes: int) -> int:
        """Return the size of a new segment for a block of `size_bytes` (``get_allocation_size``)."""
        if size_bytes <= SMALL_BYTES:
            return _SMALL_SEGMENT_BYTES
        if size_bytes < LEAST_OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return -(-size_bytes // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES

    def get_page_bytes(self, *, small: bool) -> int:
        """Return the size of the pages of an expandable segment (``find_expandable_block``)."""
        return _SMALL_SEGMENT_BYTES if small else self.large_segment_bytes

    def is_oversize(self, size_bytes: int) -> bool:
        """Return True if a block or request of `size_bytes` is not split."""
        return self.max_split_bytes is not None and size_bytes >= self.max_split_bytes


DEFAULT = Rules()
EXPANDABLE = Rules(expandable_segments=True)


class DeviceFullError(Exception):
    """The error that no memory can be reserved for a block, even after all that is unused was released."""

    def __init__(self, asked_bytes: int) -> None:
        super().__init__(f"no room for a block of {asked_bytes} bytes")
        self.asked_bytes = asked_bytes


@dataclass(eq=False, slots=True)
class Segment:
    """A range of addresses whose memory is reserved from the driver: at once, or in pages.

    Attributes:
        number: unique among the segments of an allocator, in the order of their addresses.
        small: True if it holds blocks of up to 1 MiB.
        expandable: True if pages are reserved and released one by one.
    """

    number: int
    size_bytes: int
    stream: int
    pool: PoolId
    small: bool
    expandable: bool = False


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: in use, free, or not mapped.

    Attributes:
        size_bytes: rounded size, which counts as allocated.
        requested_bytes: requested size; 0 while it is free.
        in_use: True if it was handed out.
        mapped: False for addresses of an expandable segment without memory.
    """

    segment: Segment
    offset: int
    size_bytes: int
    requested_bytes: int = 0
    in_use: bool = False
    mapped: bool = True
    previous: "Block | None" = field(default=None, repr=False)
    next: "Block | None" = field(default=None, repr=False)

    @property
    def is_split(self) -> bool:
        """True if it is not its whole segment."""
        return self.previous is not None or self.next is not None

    @property
    def expanded_bytes(self) -> int:
        """Bytes that a free block of an expandable segment can grow to."""
        return self.size_bytes + (self.next.size_bytes if self.next is not None and not self.next.mapped else 0)


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


_Key = tuple[PoolId, int, bool]  # of a pool of blocks: of which pool, stream, and if small


class CachingAllocator:
    """The blocks of one device: best fit among the free blocks of a stream and pool, in segments that stay reserved.

    Attributes:
        allocated: bytes of blocks in use, rounded.
        requested: requested bytes of blocks in use.
        reserved: bytes of segments.
        retries: number of times that all unused memory was released for a request that the device had no room for.
        segments: reserved segments, by number.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        rules: Rules = DEFAULT,
        released: Callable[[Segment], object] = lambda _: None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """Initialize for a device of `capacity_bytes`; None for no limit.

        Args:
            released: called with each segment that is returned to the driver.
            numbers: of the segments as they are reserved, in the order of their addresses; by default each is above the last.
        """
        self.capacity_bytes, self.rules = capacity_bytes, rules
        self.allocated, self.requested, self.reserved = Level(), Level(), Level()
        self.retries = 0
        self.segments: dict[int, Segment] = {}
        self._released = released
        self._numbers = count() if numbers is None else numbers
        self._free: dict[_Key, list[tuple[int, int, int, Block]]] = {}
        self._unmapped: dict[_Key, list[Block]] = {}  # by address
        self._kept_pools: set[PoolId] = set()

    def allocate(self, size_bytes: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> Block:
        """Return a block of at least `size_bytes` (more than 0) for `stream` (``malloc``).

        Raises:
            DeviceFullError: the device has no room for it.
        """
        rounded = self.rules.round_bytes(size_bytes)
        key = pool, stream, rounded <= SMALL_BYTES
        block = self._take_best_fit(rounded, key) or self._reserve_block(rounded, key)
        self._split(block, rounded)
        block.in_use, block.requested_bytes = True, size_bytes
        self.allocated.add(block.size_bytes)
        self.requested.add(size_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free `block`: it merges with free neighbours in its segment, which stays reserved (``free_block``)."""
        self.allocated.add(-block.size_bytes)
        self.requested.add(-block.requested_bytes)
        block.in_use, block.requested_bytes = False, 0
        self._put_merged(block)

    def release_unused(self) -> None:
        """Release segments without used blocks, and pages of free blocks, except of kept pools (``release_cached_blocks``)."""
        for key, entries in list(self._free.items()):
            if key[0] in self._kept_pools:
                continue
            for *_, block in list(entries):
                if block.segment.expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def keep_pool(self, pool: PoolId) -> None:
        """Keep the segments of `pool` from now on, as for a CUDA graph."""
        self._kept_pools.add(pool)

    def let_pool_go(self, pool: PoolId) -> None:
        """Allow segments of `pool` to be released again."""
        self._kept_pools.discard(pool)

    def reset_peaks(self) -> None:
        """Reset all peaks to the current values."""
        for level in (self.allocated, self.requested, self.reserved):
            level.peak_bytes = level.bytes

    def count_pool_bytes(self, pool: PoolId) -> int:
        """Return the bytes of the segments of `pool`."""
        return sum(segment.size_bytes for segment in self.segments.values() if segment.pool == pool)

    def free_bytes(self, segment: Segment) -> int:
        """Return the bytes of the free blocks of `segment`."""
        blocks = (entry[-1] for entries in self._free.values() for entry in entries)
        return sum(block.size_bytes for block in blocks if block.segment is segment)

    def free_blocks(self, pool: PoolId) -> list[Block]:
        """Return the free blocks of `pool`, the smallest first, the lowest among equals: as best fit looks at them."""
        entries = (entry for key, of_key in self._free.items() if key[0] == pool for entry in of_key)
        return [entry[-1] for entry in sorted(entries, key=lambda entry: entry[:3])]

    def find_fitting_block(self, size_bytes: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> Block | None:
        """Return the free block from which a request of `size_bytes` would be served; None if memory would be reserved for it."""
        rounded = self.rules.round_bytes(size_bytes)
        key = pool, stream, rounded <= SMALL_BYTES
        block = self._take_best_fit(rounded, key)
        if block is not None:
            self._put(block)
        return block

    def _take_best_fit(self, size_bytes: int, key: _Key) -> Block | None:
        """Remove and return the smallest free block that is large enough, the lowest among equals (``get_free_block``).

        In expandable segments a block counts with the size that it can grow to. An oversize block serves oversize requests
        that are nearly as large.
        """
        entries = self._free.get(key, [])
        place = bisect_left(entries, (size_bytes, -1, -1), key=lambda entry: entry[:3])
        if place == len(entries):
            return None
        # PyTorch stops at the first block that can grow to no less, although a better one may come later.
        if self.rules.expandable_segments:
            while place + 1 < len(entries) and entries[place + 1][-1].expanded_bytes < entries[place][-1].expanded_bytes:
                place += 1
        found_bytes = entries[place][0]
        if self.rules.is_oversize(found_bytes) and (
            not self.rules.is_oversize(size_bytes) or found_bytes >= size_bytes + self.rules.max_non_split_rounding_bytes
        ):
            return None
        return entries.pop(place)[-1]

    def _reserve_block(self, size_bytes: int, key: _Key) -> Block:
        """Return a block of new memory, for which unused memory is released if the device is full: the end of ``malloc``.

        Raises:
            DeviceFullError: the device has no room for it.
        """
        reserve = self._expand if self.rules.expandable_segments else self._allocate_segment
        block = reserve(size_bytes, key)
        if block is None and self._release_oversize(size_bytes, key):
            block = reserve(size_bytes, key)
        if block is None:
            self.retries += 1
            self.release_unused()
            block = reserve(size_bytes, key)
        if block is None:
            raise DeviceFullError(size_bytes)
        return block

    def _allocate_segment(self, size_bytes: int, key: _Key) -> Block | None:
        """Return the block of a new segment; None if the device has no room for it (``alloc_block``)."""
        segment_bytes = self.rules.choose_segment_bytes(size_bytes)
        if not self._has_room(segment_bytes):
            return None
        pool, stream, small = key
        segment = Segment(next(self._numbers), segment_bytes, stream, pool, small)
        self.segments[segment.number] = segment
        self.reserved.add(segment_bytes)
        return Block(segment, 0, segment_bytes)

    def _has_room(self, more_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved.bytes + more_bytes <= self.capacity_bytes

    def _release_oversize(self, size_bytes: int, key: _Key) -> bool:
        """Release oversize free blocks to make room for a request, if they can (``release_available_cached_blocks``)."""
        if self.rules.max_split_bytes is None:
            return False
        wanted_bytes = max(size_bytes, self.rules.max_split_bytes)
        oversize = [entry[-1] for entry in self._free.get(key, []) if self.rules.is_oversize(entry[0]) and not entry[-1].is_split]
        one = next((block for block in oversize if block.size_bytes >= wanted_bytes), None)
        if one is not None:
            self._release(one)
            return True
        released_bytes = 0
        for block in reversed(oversize):
            if released_bytes >= wanted_bytes:
                break
            released_bytes += block.size_bytes
            self._release(block)
        return released_bytes >= wanted_bytes

    def _release(self, block: Block) -> None:
        """Return the segment of a free block, which is all of it, to the driver."""
        self._take_out(block)
        segment = block.segment
        del self.segments[segment.number]
        self.reserved.add(-segment.size_bytes)
        self._released(segment)

    def _expand(self, size_bytes: int, key: _Key) -> Block | None:
        """Return a block of a grown expandable segment; None if the device is full (``try_allocate_expandable_block``)."""
        block = self._take_expandable(size_bytes, key)
        if not block.mapped and not self._map(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            following = block.next
            assert following is not None
            if not self._map(following, min(size_bytes - block.size_bytes, following.size_bytes)):
                return None
            block = following  # it has merged with the one before it
        self._take_out(block)
        return block

    def _take_expandable(self, size_bytes: int, key: _Key) -> Block:
        """Return the first of the lowest free and unmapped blocks with `size_bytes` in all (``find_expandable_block``)."""
        for block in self._unmapped.get(key, []):
            first = block.previous if block.previous is not None and not block.previous.in_use else block
            room_bytes = 0
            one: Block | None = first
            while room_bytes < size_bytes and one is not None and not one.in_use:
                room_bytes += one.size_bytes
                one = one.next
            if room_bytes >= size_bytes:
                return first
        pool, stream, small = key
        segment = Segment(next(self._numbers), 0, stream, pool, small, expandable=True)
        self.segments[segment.number] = segment
        whole = Block(segment, 0, _ADDRESSES, mapped=False)
        self._put(whole)
        return whole

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Map pages for the first `size_bytes` of an unmapped block; return False if the device is full (``map_block``)."""
        page_bytes = self.rules.get_page_bytes(small=block.segment.small)
        mapped_bytes = -(-size_bytes // page_bytes) * page_bytes
        if not self._has_room(mapped_bytes):
            return False
        self._take_out(block)
        if mapped_bytes < block.size_bytes:
            self._cut(block, mapped_bytes)
        block.mapped = True
        self._put_merged(block)
        block.segment.size_bytes += mapped_bytes
        self.reserved.add(mapped_bytes)
        return True

    def _unmap(self, block: Block) -> None:
        """Release the whole pages of a free block, and its segment if that has no others (``unmap_block``)."""
        page_bytes = self.rules.get_page_bytes(small=block.segment.small)
        begin = -(-block.offset // page_bytes) * page_bytes
        end = (block.offset + block.size_bytes) // page_bytes * page_bytes
        if begin >= end:
            return
        self._take_out(block)
        if begin > block.offset:
            before, block = block, self._cut_off(block, begin - block.offset)
            self._put(before)
        if end < block.offset + block.size_bytes:
            self._cut(block, end - begin)
        block.mapped = False
        self._put_merged(block)
        segment = block.segment
        segment.size_bytes -= end - begin
        self.reserved.add(begin - end)
        if not block.is_split:
            self._take_out(block)
            del self.segments[segment.number]
            self._released(segment)

    def _split(self, block: Block, size_bytes: int) -> None:
        """Split `block` if the remainder is usable (``should_split``).

        Any is in a small block or an expandable segment; in a large block more than 1 MiB, unless the request is oversize.
        """
        remaining = block.size_bytes - size_bytes
        if block.segment.small or block.segment.expandable:
            splits = remaining >= BLOCK_BYTES
        else:
            splits = remaining > SMALL_BYTES and not self.rules.is_oversize(size_bytes)
        if splits:
            self._cut(block, size_bytes)

    def _cut(self, block: Block, size_bytes: int) -> None:
        """Cut `block` after `size_bytes`, and put the rest with the free or unmapped ones."""
        self._put(self._cut_off(block, size_bytes))

    def _cut_off(self, block: Block, size_bytes: int) -> Block:
        """Cut `block` after `size_bytes`, and return the rest."""
        rest = Block(
            block.segment,
            block.offset + size_bytes,
            block.size_bytes - size_bytes,
            mapped=block.mapped,
            previous=block,
            next=block.next,
        )
        if block.next is not None:
            block.next.previous = rest
        block.size_bytes, block.next = size_bytes, rest
        return rest

    def _put_merged(self, block: Block) -> None:
        """Put `block` with the free or unmapped ones, merged with neighbours that are alike (``try_merge_blocks``)."""
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.in_use and neighbour.mapped == block.mapped:
                self._take_out(neighbour)
                _merge(block, neighbour)
        self._put(block)

    def _put(self, block: Block) -> None:
        if block.mapped:
            insort(self._free.setdefault(_get_key(block), []), _make_entry(block), key=lambda entry: entry[:3])
        else:
            insort(self._unmapped.setdefault(_get_key(block), []), block, key=lambda one: (one.segment.number, one.offset))

    def _take_out(self, block: Block) -> None:
        if block.mapped:
            entries, entry = self._free[_get_key(block)], _make_entry(block)
            del entries[bisect_left(entries, entry[:3], key=lambda one: one[:3])]
        else:
            self._unmapped[_get_key(block)].remove(block)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments.values())


def _get_key(block: Block) -> _Key:
    return block.segment.pool, block.segment.stream, block.segment.small


def _make_entry(block: Block) -> tuple[int, int, int, Block]:
    return block.size_bytes, block.segment.number, block.offset, block


def _merge(block: Block, neighbour: Block) -> None:
    """Extend `block` over its free `neighbour`."""
    if neighbour is block.previous:
        block.offset, block.previous = neighbour.offset, neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
    block.size_bytes += neighbour.size_bytes
