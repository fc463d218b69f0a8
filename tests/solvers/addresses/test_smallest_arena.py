"""The smallest arena against brute force, and the order bound <= optimum <= heuristics."""

import random

import pytest

from planner.graphs.addresses import Buffer, live_bytes
from planner.solvers.addresses import solve as solving
from planner.solvers.addresses.greedy import construct_offsets, improve
from planner.solvers.addresses.instance import split_into_instances
from planner.solvers.addresses.solve import solve
from planner.solvers.clock import WorkClock
from planner.solvers.result import Status
from tests.support.graphs.buffers import packed_buffers, random_buffers, smallest_arena
from tests.support.marks import slow

WORK = 20.0


@pytest.mark.parametrize("seed", range(12))
def test_smallest_arena_is_that_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        buffers = random_buffers(draw, draw.randint(1, 6))
        result = solve(buffers, work_limit=WORK)
        assert (result.status, result.height_bytes) == (Status.OPTIMAL, smallest_arena(buffers))


@pytest.mark.parametrize("seed", range(6))
def test_aligned_arena_is_that_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    alignments = [(4,), (1, 2, 4), (2, 3)][seed % 3]
    for _ in range(60):
        buffers = random_buffers(draw, draw.randint(1, 5), most=9, alignments=alignments)
        result = solve(buffers, work_limit=WORK)
        assert (result.status, result.height_bytes) == (Status.OPTIMAL, smallest_arena(buffers)), buffers


@pytest.mark.parametrize("seed", range(6))
def test_capacity_is_met_or_proved_too_small(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        buffers = random_buffers(draw, draw.randint(2, 6), alignments=(1,) if seed % 2 else (1, 4))
        smallest = smallest_arena(buffers)
        for capacity in (smallest - 1, smallest, smallest + 1):
            if capacity < max(buffer.size for buffer in buffers):
                continue
            result = solve(buffers, capacity, work_limit=WORK)
            assert (result.offsets is None) == (capacity < smallest)
            assert (result.status is Status.INFEASIBLE) == (capacity < smallest)
            assert result.offsets is None or result.offsets.height_bytes <= capacity
            assert result.bound_bytes <= smallest


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4)])
def test_bounds_are_below_the_optimum_and_heuristics_above(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        buffers = random_buffers(draw, 6, alignments=(1, 4) if seed % 2 else (1,))
        smallest = smallest_arena(buffers)
        instances = split_into_instances(buffers)
        assert live_bytes(buffers) <= max(instance.bound_bytes for instance in instances) <= smallest
        for constructions in zip(*(construct_offsets(instance, WorkClock(WORK)) for instance in instances), strict=True):
            heights = []
            for instance, offsets in zip(instances, constructions, strict=True):
                better = improve(instance, offsets, 0, WorkClock(WORK), patience=5)
                assert instance.compute_height_bytes(better) <= instance.compute_height_bytes(offsets)
                heights.append(instance.compute_height_bytes(better))
            assert max(heights) >= smallest


@pytest.mark.parametrize(("count", "removed"), [(30, 0.0), (60, 0.0), (60, 0.05), *slow((100, 0.1))])
def test_packing_without_slack_is_found(count: int, removed: float) -> None:
    buffers = packed_buffers(count, horizon=count, height=1000, seed=count, removed=removed)
    assert live_bytes(buffers) == 1000
    result = solve(buffers, 1000, work_limit=60.0)
    assert result.status is Status.OPTIMAL


def test_the_tightest_sections_are_placed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "_LARGEST", 100)
    tight = packed_buffers(60, horizon=60, height=1000, seed=60)
    behind = [Buffer(f"{i} {k}", 60 + i, 62 + i, 100) for i in range(0, 100, 2) for k in range(4)]
    buffers = [*tight, *behind, Buffer("throughout", 0, 160, 50)]
    (instance,) = split_into_instances(buffers)
    assert set(instance.find_tight_buffers(0.9)) == {instance.index.index(u) for u in (*range(len(tight)), len(buffers) - 1)}
    heights = [instance.compute_height_bytes(offsets) for offsets in construct_offsets(instance, WorkClock(WORK))]
    assert solve(buffers, work_limit=8.0).height_bytes == live_bytes(buffers) == 1050 < min(heights)
    monkeypatch.setattr(solving, "_TIGHT", ())
    assert solve(buffers, work_limit=1.0).height_bytes > 1050


def test_pools_have_ranges_of_their_own() -> None:
    buffers = [Buffer("a", 0, 1, 10, pool="one"), Buffer("b", 1, 2, 6, pool="two"), Buffer("c", 2, 3, 8, pool="one")]
    result = solve(buffers, work_limit=1.0)
    assert (result.status, result.height_bytes) == (Status.OPTIMAL, 16)
    assert solve(buffers, 15, work_limit=1.0).status is Status.INFEASIBLE
    assert solve(buffers, 16, work_limit=1.0).status is Status.OPTIMAL


def test_work_limit_repeats_the_same_offsets() -> None:
    buffers = packed_buffers(80, horizon=40, height=500, seed=3, removed=0.1)
    first, second = (solve(buffers, work_limit=0.5, seed=1) for _ in range(2))
    assert first.offsets is not None and second.offsets is not None
    assert first.offsets == second.offsets


def test_no_buffers_need_no_arena() -> None:
    result = solve([])
    assert (result.status, result.height_bytes, result.bound_bytes, result.gap) == (Status.OPTIMAL, 0, 0, 0.0)
