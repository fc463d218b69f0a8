"""Steering of PyTorch's caching allocator: the requests of a step get planned addresses in one segment, the slab.

The slab is the only large segment of a private pool. The allocator gives a request the smallest free block that is large enough,
from its beginning. So before an op all free memory of the slab is *held*, that is, allocated for nobody, but for *holes* of just
the sizes that the op asks for, at the addresses planned for them; after the op it is released. Where best fit chooses these
addresses anyway, nothing is held. PyTorch's allocator hands out all memory, so that none is given away while it is in use: a
request that was not expected gets other memory, or a segment of its own. From then on holds get other addresses than planned,
which whoever makes them has to notice.

Holes are multiples of 2 MiB. What the allocator splits off from a hole, since a request is smaller, is held as long as the tensor
is in use. Requests of up to 1 MiB come from small segments of the pool, as ever.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from graphs.allocators.caching import LEAST_OWN_SEGMENT_BYTES, SMALL_BYTES, Block, CachingAllocator, PoolId, Segment
from graphs.allocators.training import Training

GRAIN_BYTES = 2 * 2**20  # of holes and their addresses
_POOL: PoolId = (0, 1)


def is_placed(size_bytes: int) -> bool:
    """Return True if a request of `size_bytes` comes from the slab."""
    return size_bytes > SMALL_BYTES


def least_hole_bytes(size_bytes: int) -> int:
    """Return the size of the smallest hole for a request of `size_bytes`."""
    return -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of addresses in the slab, for one buffer: multiples of 2 MiB."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """The allocation of `size_bytes` that nobody uses.

    Attributes:
        offset: where in the slab it comes to lie; None if in another segment.
    """

    size_bytes: int
    offset: int | None


@dataclass(frozen=True, slots=True)
class Release:
    """The end of hold `number`, counted from the first one of the step, which is 0."""

    number: int


Action = Hold | Release


@dataclass(frozen=True, slots=True)
class Steering:
    """Actions around the ops of a step, with which its requests get their addresses.

    Attributes:
        slab_bytes: size of the slab.
        holes: where buffers lie, by index, but for those that are `missed`.
        pool_bytes: all that the pool reserves: the slab, small segments, and segments of requests that found no hole.
        before, after: actions before and after steps of the schedule.
        missed: buffers that get another address than planned.
    """

    slab_bytes: int
    holes: Mapping[int, Hole]
    pool_bytes: int
    before: Mapping[int, Sequence[Action]]
    after: Mapping[int, Sequence[Action]]
    missed: frozenset[int]

    @property
    def outside_bytes(self) -> int:
        """Bytes that the pool reserves besides the slab."""
        return self.pool_bytes - self.slab_bytes


def steer(training: Training, holes: Mapping[int, Hole], slab_bytes: int) -> Steering:
    """Return the actions that give the buffers of a step their addresses, by a run on the model of the allocator.

    Args:
        training: requests of the step.
        holes: of the buffers for which ``is_placed`` is true, by index. Those of one op serve the requests that they are for if
            they are apart, and differ in size, the larger ones for later requests.
        slab_bytes: a multiple of 2 MiB; the slab has 10 MiB at least, as smaller segments have another size than was asked for.
    """
    return _ModelledStep(training, holes, max(slab_bytes, LEAST_OWN_SEGMENT_BYTES)).steering()


_Requests = Sequence[tuple[int, bool]]  # of an op: index of the buffer, and if it is requested or freed


@dataclass(slots=True)
class _ModelledStep:
    """A step on the model of the allocator.

    Attributes:
        slab: its segment.
        blocks: of the buffers in use.
        numbers: number of each hold that was not released; `held`: how many there were.
        rests: the hold of what is left of the hole of a buffer.
        actions: since they were taken last.
        missed: buffers that got another address.
    """

    training: Training
    holes: Mapping[int, Hole]
    slab_bytes: int
    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    slab: Segment = field(init=False)
    blocks: dict[int, Block] = field(default_factory=dict)
    numbers: dict[Block, int] = field(default_factory=dict)
    rests: dict[int, Block] = field(default_factory=dict)
    held: int = 0
    actions: list[Action] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        block = self.allocator.alloc(self.slab_bytes, pool=_POOL)
        self.slab = block.segment
        self.allocator.free(block)

    def steering(self) -> Steering:
        """Return the actions around each step."""
        before, after = dict[int, Sequence[Action]](), dict[int, Sequence[Action]]()
        for step, freed, requests in self._steps():
            for index in freed:
                self._free(index)
            if requests:
                held = self._make_holes(requests)
                before[step] = self._taken()
                self._request(requests)
                for block in held:
                    self._release(block)
                after[step] = self._taken()
        for rest in self.rests.values():
            self._release(rest)
        if after:
            last = max(after)
            after[last] = (*after[last], *self._taken())
        reserved_bytes = self.allocator.pool_bytes(_POOL)
        return Steering(self.slab_bytes, self.holes, reserved_bytes, before, after, frozenset(self.missed))

    def _steps(self) -> Iterator[tuple[int, list[int], _Requests]]:
        """Yield steps of the schedule with the buffers that are freed before their op, and what it requests and frees itself."""
        moments = self.training.moments
        for step, events in groupby(self.training.events, key=lambda event: event[0] // moments):
            freed, requests = [], []
            for time, index, requested in events:
                if not requested and time == step * moments:
                    freed.append(index)
                else:
                    requests.append((index, requested))
            yield step, freed, requests

    def _make_holes(self, requests: _Requests) -> list[Block]:
        """Hold what is free, but for the holes of `requests`; return these holds."""
        asked = [index for index, requested in requests if requested and index in self.holes]
        if not asked or self._comes_by_itself(asked):
            return []
        covers = [block for block in self.allocator.free_blocks(_POOL) if not block.segment.small]
        for block in covers:  # the smallest first, so that each hold fits its block exactly
            self._hold(block.size_bytes)
        holes = sorted((self.holes[index].offset, self.holes[index].size_bytes) for index in asked)
        held, left_free = list[Block](), list[Block]()
        for cover in covers:
            end = cover.offset + cover.size_bytes
            inside = [(at, size) for at, size in holes if cover.segment is self.slab and cover.offset <= at and at + size <= end]
            if not inside:
                held.append(cover)
                continue
            begin = cover.offset
            self._release(cover)
            for at, size in inside:
                held += [self._hold(at - begin)] if at > begin else []
                left_free.append(self._hold(size))
                begin = at + size
            held += [self._hold(end - begin)] if end > begin else []
        for block in left_free:
            self._release(block)
        return held

    def _comes_by_itself(self, asked: Sequence[int]) -> bool:
        """Return True if best fit chooses the hole of the only request, and leaves no rest of it."""
        if len(asked) > 1:
            return False
        size_bytes = self.training.buffers[asked[0]].size
        block, hole = self.allocator.fitting_block(size_bytes, pool=_POOL), self.holes[asked[0]]
        if block is None or (block.segment, block.offset) != (self.slab, hole.offset):
            return False
        return hole.size_bytes in (size_bytes, block.size_bytes)

    def _request(self, requests: _Requests) -> None:
        """Make the requests of an op, and hold the rests of their holes."""
        placed = []
        for index, requested in requests:
            if not requested:
                self._free(index)
                continue
            block = self.blocks[index] = self.allocator.alloc(self.training.buffers[index].size, pool=_POOL)
            if index not in self.holes:
                continue
            if (block.segment, block.offset) == (self.slab, self.holes[index].offset):
                placed.append(index)
            else:
                self.missed.add(index)
        for index in sorted(set(placed) & self.blocks.keys(), key=lambda index: self.holes[index].offset):
            block = self.blocks[index]
            rest_bytes = self.holes[index].size_bytes - block.size_bytes
            if rest_bytes > SMALL_BYTES:
                rest = self.rests[index] = self._hold(rest_bytes)
                if rest.previous is not block:
                    self.missed.add(index)

    def _free(self, index: int) -> None:
        self.allocator.free(self.blocks.pop(index))
        if index in self.rests:
            self._release(self.rests.pop(index))

    def _hold(self, size_bytes: int) -> Block:
        block = self.allocator.alloc(size_bytes, pool=_POOL)
        self.actions.append(Hold(size_bytes, block.offset if block.segment is self.slab else None))
        self.numbers[block] = self.held
        self.held += 1
        return block

    def _release(self, block: Block) -> None:
        self.allocator.free(block)
        self.actions.append(Release(self.numbers.pop(block)))

    def _taken(self) -> Sequence[Action]:
        taken, self.actions = tuple(self.actions), []
        return taken
