"""Steering of PyTorch's caching allocator: the requests of a step get planned addresses in one segment, the slab.

The slab is the only large segment of a private pool. The allocator gives a request the smallest free block that is large enough,
from its beginning. So before an op all free memory of the slab is *held*, that is, allocated for nobody, but for *holes* of just
the sizes that the op asks for, at the addresses planned for them. What is held stays so until a hole is to be made there, or the
step is over. Where best fit chooses the planned address anyway, nothing is held. PyTorch's allocator hands out all memory, so
that none is given away while it is in use: a request that was not expected gets other memory, or a segment of its own. If it
comes to lie in a hole, later holds get other addresses than planned, which whoever makes them has to notice.

Holes and their addresses are multiples of a *grain* of more than 1 MiB, the most that comes from the allocator's small segments.
So what is held before a hole is larger than that. The rest of a hole that its request leaves is split off by the allocator if it
is larger too, and can then be held.

Tried and given up: a pool with one large segment, without holds. In 49 of 51 plans it reserves as much as expandable segments, or
more. Also addresses in multiples of 1 MiB and a block: this took 1.5% of a ResNet-50's step, and 2.3% of a MobileNetV2's. The
grain is now the one with which a step takes the fewest bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from planner.graphs.allocators.caching import (
    BLOCK_BYTES,
    DEFAULT,
    LEAST_OWN_SEGMENT_BYTES,
    SMALL_BYTES,
    Block,
    CachingAllocator,
    PoolId,
    Segment,
)
from planner.graphs.allocators.training import Training

LEAST_GRAIN_BYTES = SMALL_BYTES + BLOCK_BYTES
_POOL: PoolId = (0, 1)


def is_placed(size_bytes: int) -> bool:
    """Return True if a request of `size_bytes` comes from the slab."""
    return size_bytes > SMALL_BYTES


def compute_least_hole_bytes(size_bytes: int, grain_bytes: int) -> int:
    """Return the size of the smallest hole for a request of `size_bytes`."""
    return -(-size_bytes // grain_bytes) * grain_bytes


@dataclass(frozen=True, slots=True)
class Hole:
    """A range of addresses in the slab, for one buffer: multiples of the grain of its step."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """The allocation of `size_bytes` that nobody uses.

    Attributes:
        offset: its offset in the slab; None if it lies in another segment.
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
        holes: the holes of the buffers, by index, except those that are `missed`.
        pool_bytes: all that the pool reserves: the slab, small segments, and segments of requests that found no hole.
        before: actions before steps of the schedule. What is held at the end of the last is to be released.
        missed: buffers that get another address than planned.
        grows: a step takes large segments besides the slab. In another step these would be free from the beginning, so that it
            would get other addresses: it needs a new pool.
        serves_optimizer: the temporaries of the optimizer find room in the slab behind a step, beside its gradients.
    """

    slab_bytes: int
    holes: Mapping[int, Hole]
    pool_bytes: int
    before: Mapping[int, Sequence[Action]]
    missed: frozenset[int]
    grows: bool
    serves_optimizer: bool

    @property
    def outside_bytes(self) -> int:
        """Bytes that the pool reserves besides the slab."""
        return self.pool_bytes - self.slab_bytes


def steer(training: Training, holes: Mapping[int, Hole], slab_bytes: int) -> Steering:
    """Return the actions that give the buffers of a step their addresses, by a run on the model of the allocator.

    Args:
        holes: of the buffers for which ``is_placed`` is true, by index. Those of one op serve the requests that they are for if
            they are apart, and differ in size, the larger ones for later requests. Buffers that one op has one after the other
            may share a hole.
        slab_bytes: at least; the slab is a whole segment of its own, of 10 MiB at least.
    """
    return _ModelledStep(training, holes, DEFAULT.choose_segment_bytes(max(slab_bytes, LEAST_OWN_SEGMENT_BYTES))).run()


_Requests = Sequence[tuple[int, bool]]  # of an op: index of the buffer, and if it is requested or freed


@dataclass(slots=True)
class _ModelledStep:
    """A step on the model of the allocator.

    Attributes:
        blocks: of the buffers in use.
        numbers: number of each hold that was not released; `held`: how many there were.
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
    held: int = 0
    actions: list[Action] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        block = self.allocator.allocate(self.slab_bytes, pool=_POOL)
        self.slab = block.segment
        self.allocator.free(block)

    def run(self) -> Steering:
        """Run the step, and return the actions around each step of its schedule."""
        before = dict[int, Sequence[Action]]()
        for step, freed, requests in self._iterate_steps():
            for index in freed:
                self.allocator.free(self.blocks.pop(index))
            self._make_holes([index for index, requested in requests if requested and index in self.holes])
            if self.actions:
                before[step], self.actions = tuple(self.actions), []
            for index, requested in requests:
                if requested:
                    self._request(index)
                else:
                    self.allocator.free(self.blocks.pop(index))
        pool_bytes, grows = self.allocator.count_pool_bytes(_POOL), self._has_grown()
        serves_optimizer = not grows and self._has_room_for_optimizer()
        if serves_optimizer:
            pool_bytes = self.allocator.count_pool_bytes(_POOL)  # with small segments
        return Steering(self.slab_bytes, self.holes, pool_bytes, before, frozenset(self.missed), grows, serves_optimizer)

    def _has_grown(self) -> bool:
        """Return True if the pool has large segments besides the slab."""
        return any(not segment.small and segment is not self.slab for segment in self.allocator)

    def _has_room_for_optimizer(self) -> bool:
        """Return True if the optimizer has temporaries, and these fit into the slab behind the step."""
        for block in self.numbers:
            self.allocator.free(block)
        for size_bytes in self.training.temporaries:
            self.allocator.allocate(size_bytes, pool=_POOL)
        return bool(self.training.temporaries) and not self._has_grown()

    def _iterate_steps(self) -> Iterator[tuple[int, list[int], _Requests]]:
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

    def _make_holes(self, asked: Sequence[int]) -> None:
        """Hold all that is free, but for the holes of the buffers `asked`."""
        # Each hold and release is a call in the step, so the fewer the better.
        if not asked or self._comes_by_itself(asked):
            return
        holes = sorted({(self.holes[index].offset, self.holes[index].size_bytes) for index in asked})
        for block in [block for block in self.numbers if self._find_inside(block, holes, whole=False)]:
            self._release(block)
        free = [block for block in self.allocator.free_blocks(_POOL) if not block.segment.small]
        divided = [(block, inside) for block in free if (inside := self._find_inside(block, holes, whole=True))]
        sizes = [block.size_bytes for block in free]
        stays_free = divided[0][0] if len(divided) == 1 and sizes.count(divided[0][0].size_bytes) == 1 else None
        for block in free:  # the smallest first, so that each hold fits its block exactly
            if block is not stays_free:
                self._hold(block.size_bytes)
        left_free = list[Block]()
        for block, inside in divided:
            begin, end = block.offset, block.offset + block.size_bytes
            if block is not stays_free:
                self._release(block)
            for at, size in inside:
                if at > begin:
                    self._hold(at - begin)
                left_free.append(self._hold(size))
                begin = at + size
            if is_placed(end - begin):  # else what is left of the slab stays with the last hole
                self._hold(end - begin)
        for block in left_free:
            self._release(block)

    def _find_inside(self, block: Block, holes: Sequence[tuple[int, int]], *, whole: bool) -> list[tuple[int, int]]:
        """Return those of `holes`, as offset and bytes, that are in `block`; if not `whole`, also those that overlap it."""
        if block.segment is not self.slab:
            return []
        begin, end = block.offset, block.offset + block.size_bytes
        if whole:
            return [(at, size) for at, size in holes if begin <= at and at + size <= end]
        return [(at, size) for at, size in holes if at < end and begin < at + size]

    def _comes_by_itself(self, asked: Sequence[int]) -> bool:
        """Return True if best fit chooses the hole of the only request, and leaves no rest of it."""
        if len(asked) > 1:
            return False
        size_bytes = self.training.buffers[asked[0]].size
        block, hole = self.allocator.find_fitting_block(size_bytes, pool=_POOL), self.holes[asked[0]]
        if block is None or (block.segment, block.offset) != (self.slab, hole.offset):
            return False
        return hole.size_bytes in (size_bytes, block.size_bytes)

    def _request(self, index: int) -> None:
        block = self.blocks[index] = self.allocator.allocate(self.training.buffers[index].size, pool=_POOL)
        if index in self.holes and (block.segment, block.offset) != (self.slab, self.holes[index].offset):
            self.missed.add(index)

    def _hold(self, size_bytes: int) -> Block:
        block = self.allocator.allocate(size_bytes, pool=_POOL)
        self.actions.append(Hold(size_bytes, block.offset if block.segment is self.slab else None))
        self.numbers[block] = self.held
        self.held += 1
        return block

    def _release(self, block: Block) -> None:
        self.allocator.free(block)
        self.actions.append(Release(self.numbers.pop(block)))
