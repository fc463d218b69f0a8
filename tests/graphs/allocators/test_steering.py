"""Steering of the caching allocator: the actions are repeated on a fresh model of it, and give each request its address."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby

import pytest
from hypothesis import given, settings, strategies as st

from planner.graphs.addresses import Buffer, live_bytes
from planner.graphs.allocators.caching import Block, CachingAllocator, Segment
from planner.graphs.allocators.steering import (
    LEAST_GRAIN_BYTES,
    Action,
    Hold,
    Hole,
    Steering,
    compute_least_hole_bytes,
    is_placed,
    steer,
)
from planner.graphs.allocators.training import Training
from planner.solvers.addresses.solve import solve

MIB = 2**20
POOL = (0, 7)


def training(*buffers: tuple[int, int, float], temporaries: Sequence[float] = ()) -> Training:
    """A step with buffers that begin and end at steps of its schedule, and an optimizer's temporaries, of so many MiB."""
    made = tuple(Buffer(str(i), lower, upper, int(size * MIB)) for i, (lower, upper, size) in enumerate(buffers))
    return Training(static=(), buffers=made, temporaries=tuple(int(size * MIB) for size in temporaries))


def holes(*places: tuple[float, float]) -> dict[int, Hole]:
    """Holes of buffers 0, 1 and so on, as offset and size in MiB."""
    return {index: Hole(int(offset * MIB), int(size * MIB)) for index, (offset, size) in enumerate(places)}


class Replay:
    """A step on a fresh allocator, with the actions of a steering: as the runtime carries them out."""

    def __init__(self, step: Training, steering: Steering) -> None:
        self.step, self.steering = step, steering
        self.allocator = CachingAllocator()
        slab = self.allocator.allocate(steering.slab_bytes, pool=POOL)
        self.slab: Segment = slab.segment
        self.allocator.free(slab)
        self.places: dict[int, Block] = {}

    def run(self) -> None:
        """Run the step, and the optimizer if it is served; what the step has left in use is freed."""
        holds: dict[int, Block] = {}
        numbers = count()
        blocks: dict[int, Block] = {}

        def act(actions: Mapping[int, Sequence[Action]], time: int) -> None:
            for action in actions.get(time, ()):
                if isinstance(action, Hold):
                    block = self.allocator.allocate(action.size_bytes, pool=POOL)
                    assert action.offset == (block.offset if block.segment is self.slab else None)
                    holds[next(numbers)] = block
                else:
                    self.allocator.free(holds.pop(action.number))

        moments = self.step.moments
        for number, of_step in groupby(self.step.events, key=lambda event: event[0] // moments):
            events = list(of_step)
            for time, index, requested in events:
                if time == number * moments and not requested:
                    self.allocator.free(blocks.pop(index))
            act(self.steering.before, number)
            for time, index, requested in events:
                if requested:
                    block = blocks[index] = self.allocator.allocate(self.step.buffers[index].size, pool=POOL)
                    self.places[index] = replace(block)
                elif time > number * moments:
                    self.allocator.free(blocks.pop(index))
        for block in holds.values():
            self.allocator.free(block)
        temporaries = self.step.temporaries if self.steering.serves_optimizer else ()
        for block in [self.allocator.allocate(size, pool=POOL) for size in temporaries]:
            self.allocator.free(block)
        for block in blocks.values():
            self.allocator.free(block)


SIZES = st.sampled_from([0.5, 1.1, 1.9, 2, 3, 3.1, 4, 5.6, 8, 12])
BUFFERS = st.dictionaries(st.integers(0, 14), st.tuples(st.integers(1, 8), SIZES), min_size=1)


@settings(max_examples=150, deadline=None)
@given(BUFFERS, st.sampled_from([LEAST_GRAIN_BYTES, 5 * MIB // 4, 3 * MIB // 2, 2 * MIB]), st.lists(SIZES, max_size=3))
def test_requests_get_their_addresses_in_each_step(
    buffers: dict[int, tuple[int, float]], grain_bytes: int, temporaries: list[float]
) -> None:
    step = training(*((begin, begin + length, size) for begin, (length, size) in buffers.items()), temporaries=temporaries)
    placed = [
        replace(buffer, size=compute_least_hole_bytes(buffer.size, grain_bytes), alignment=grain_bytes)
        for buffer in step.buffers
        if is_placed(buffer.size)
    ]
    found = solve(placed, work_limit=0.05).offsets
    planned = {int(b.id): Hole(offset, b.size) for b, offset in zip(found.buffers, found.offsets, strict=True)}
    steering = steer(step, planned, found.height_bytes)
    assert not steering.missed
    replay = Replay(step, steering)
    for _ in range(3):
        replay.run()
        for index, hole in planned.items():
            assert (replay.places[index].segment, replay.places[index].offset) == (replay.slab, hole.offset)
        assert replay.allocator.allocated.bytes == 0
        assert replay.allocator.count_pool_bytes(POOL) == steering.pool_bytes
    assert [segment for segment in replay.allocator if not segment.small] == [replay.slab]


def test_the_optimizer_is_served_where_its_temporaries_fit_beside_the_gradients() -> None:
    step = ((0, 2, 4), (1, 3, 4))  # of 12 MiB the second buffer, a gradient, keeps 4 in the middle
    served = {
        sizes: steer(training(*step, temporaries=sizes), holes((0, 4), (4, 4)), 12 * MIB).serves_optimizer
        for sizes in ((), (4, 4), (2, 2, 4), (5,), (4, 4, 1.5))
    }
    assert served == {(): False, (4, 4): True, (2, 2, 4): True, (5,): False, (4, 4, 1.5): False}


def test_nothing_is_done_where_best_fit_chooses_the_address() -> None:
    step = training((0, 3, 4), (1, 3, 2), (3, 4, 6))
    steering = steer(step, holes((0, 4), (4, 2), (0, 6)), 10 * MIB)
    assert not steering.before and not steering.missed


def test_a_fragmented_step_fits_its_live_bytes_when_steered() -> None:
    # Best fit puts the second buffer right above the first, and its gap is too small for the third.
    step = training((0, 2, 4), (1, 4, 4), (2, 4, 8))
    unsteered = CachingAllocator()
    unsteered.free(unsteered.allocate(12 * MIB))
    first, second = unsteered.allocate(4 * MIB), unsteered.allocate(4 * MIB)
    unsteered.free(first)
    unsteered.allocate(8 * MIB)
    assert unsteered.reserved.bytes > 12 * MIB and second.offset == 4 * MIB
    assert live_bytes(step.buffers) == 12 * MIB
    steering = steer(step, holes((0, 4), (8, 4), (0, 8)), 12 * MIB)
    assert steering.pool_bytes == 12 * MIB and not steering.missed


def test_rest_of_a_hole_is_held() -> None:
    step = training((0, 3, 10.5), (1, 2, 1.2), (2, 4, 1.2))
    steering = steer(step, holes((0, 12), (12, 2), (12, 2)), 14 * MIB)
    assert not steering.missed and steering.pool_bytes == 14 * MIB
    rest = Hold(int(1.5 * MIB), int(10.5 * MIB))
    assert rest in steering.before[1]


def test_nothing_is_held_for_a_workspace_that_its_op_has_freed() -> None:
    buffers = Buffer("output", 0, 8, 10 * MIB), Buffer("workspace", 1, 2, int(10.5 * MIB)), Buffer("next", 4, 8, 12 * MIB)
    step = Training(static=(), buffers=buffers, moments=4)
    steering = steer(step, holes((14, 10), (0, 12), (0, 12)), 24 * MIB)
    assert not steering.missed and steering.pool_bytes == 24 * MIB
    assert Hold(int(1.5 * MIB), int(10.5 * MIB)) not in steering.before.get(1, ())
    Replay(step, steering).run()


def test_holes_side_by_side_of_one_op_are_one_to_the_allocator() -> None:
    step = training((0, 1, 4), (0, 1, 8))
    assert steer(step, holes((8, 4), (0, 8)), 12 * MIB).missed
    assert not steer(step, holes((0, 4), (4, 8)), 12 * MIB).missed
    assert not steer(step, holes((10, 4), (0, 8)), 14 * MIB).missed


def test_holes_of_one_size_and_one_op_are_alike_to_the_allocator() -> None:
    step = training((0, 1, 4), (0, 2, 4))
    assert steer(step, holes((6, 4), (0, 4)), 10 * MIB).missed
    assert not steer(step, holes((0, 4), (6, 4)), 10 * MIB).missed
    assert not steer(step, holes((8, 4), (0, 6)), 12 * MIB).missed


def test_a_request_without_a_hole_gets_a_segment_of_its_own() -> None:
    step = training((0, 2, 10), (1, 3, 12))
    steering = steer(step, holes((0, 10)), 10 * MIB)
    assert steering.outside_bytes == 12 * MIB and not steering.missed


@pytest.mark.parametrize(("size_bytes", "grains"), [(1, 1), (2 * MIB, 1), (2 * MIB + 1, 2)])
def test_holes_are_multiples_of_the_grain(size_bytes: int, grains: int) -> None:
    assert compute_least_hole_bytes(size_bytes, 2 * MIB) == grains * 2 * MIB
