"""Requests of a training loop, and what the caching allocator reserves for them: small graphs with known answers."""

from dataclasses import replace

from hypothesis import given, strategies as st

from planner.graphs.addresses import Buffer, live_bytes
from planner.graphs.allocators.caching import DEFAULT, EXPANDABLE, CachingAllocator, DeviceFullError
from planner.graphs.allocators.training import (
    Training,
    combine_passes,
    find_growth_above,
    least_capacity_bytes,
    play,
    training_of,
    usage_of,
)
from planner.graphs.ir import Graph, Kind
from planner.graphs.options.offload import OFFLOAD
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.pools import HOST
from planner.graphs.schedule import Schedule, find_boundary, keep_everything, live_after
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.solvers.clock import WorkClock
from planner.solvers.windows.strategies.offloaded_orders import find_least_offloaded
from tests.support.graphs.small_graphs import random_overwriting

MIB = 2**20


def sized(graph: Graph, size_bytes: int) -> Graph:
    return replace(graph, tensors=tuple(replace(t, size_bytes=size_bytes) for t in graph.tensors))


def test_a_chain_reserves_a_segment_for_each_tensor_in_use() -> None:
    graph = sized(make_training_chain(8), 12 * MIB)
    schedule = keep_everything(graph)
    usage = usage_of(training_of(graph, schedule))
    assert usage.reserved_bytes == usage.allocated_bytes == simulate(graph, schedule).peak_bytes == 9 * 12 * MIB
    assert {max(step) for step in usage.by_step} == {9 * 12 * MIB} and usage.retries == 0


def test_growth_is_known_by_steps_of_the_schedule() -> None:
    graph = sized(make_training_chain(8), 12 * MIB)
    training = training_of(graph, keep_everything(graph))
    usage = usage_of(training)
    assert find_growth_above(training, usage, 7 * 12 * MIB) == {7: 12 * MIB, 8: 12 * MIB}
    assert find_growth_above(training, usage, 8 * 12 * MIB + 5 * MIB) == {8: 7 * MIB}
    assert find_growth_above(training, usage, usage.reserved_bytes) == {}


def test_static_memory_libraries_and_workspaces_are_requested() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [12 * MIB], workspace_bytes=30 * MIB)
    draft.add_op("b", [a], [14 * MIB])
    graph = draft.build_graph().holding(Kind.PARAMETER, "weight", 40 * MIB)
    training = training_of(graph, keep_everything(graph), library_bytes=(32 * MIB, 32 * MIB))
    assert training.static == (40 * MIB,) and training.libraries == (32 * MIB, 32 * MIB)
    # The 14 MiB of b take the 30 MiB of the workspace, which the second step finds without the rest of b: it takes 30 anew.
    assert [max(step) // MIB for step in usage_of(training).by_step] == [40 + 64 + 12 + 30] * 3


def test_libraries_take_the_memory_behind_static_memory() -> None:
    """One workspace lies in the segment of a parameter, so that the other takes a new one, and the first tensor goes there."""
    graph = sized(make_training_chain(1), 4 * MIB).holding(Kind.PARAMETER, "weight", 6 * MIB)
    training = replace(training_of(graph, keep_everything(graph)), static=(6 * MIB,), libraries=(12 * MIB, 9 * MIB))
    (first, *_), *_ = usage_of(training).by_step
    assert first == 2 * 20 * MIB


def test_the_state_of_an_optimizer_comes_after_the_first_step() -> None:
    graph = make_training_chain(3).holding(Kind.PARAMETER, "w", 12 * MIB).holding(Kind.PARAMETER, "b", 512)
    graph = graph.holding(Kind.OPTIMIZER_STATE, "state", 2 * (12 * MIB + 512))
    graph = replace(graph, provenance={"optimizer": "adamw"})
    training = training_of(graph, keep_everything(graph))
    assert training.static == (12 * MIB, 512) == training.temporaries
    assert training.state == (12 * MIB, 12 * MIB, 512, 512)
    first, *later = (max(step) for step in usage_of(training).by_step)
    assert first == 14 * MIB and later == [14 * MIB + 36 * MIB] * 2
    assert training_of(replace(graph, provenance={"optimizer": "sgd"}), keep_everything(graph)).temporaries == ()


def test_overwriting_output_shares_the_block_of_its_input() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [12 * MIB])
    (b,) = draft.add_op("b", [a], [12 * MIB])
    plain = draft.build_graph()
    ops = (plain.ops[0], replace(plain.ops[1], overwrites=((b, a),)))
    graph = replace(plain, ops=ops)
    assert usage_of(training_of(plain, keep_everything(plain))).reserved_bytes == 24 * MIB
    assert usage_of(training_of(graph, keep_everything(graph))).reserved_bytes == 12 * MIB


def test_a_graph_with_transfers_reserves_memory_in_each_pool() -> None:
    graph = OFFLOAD.add_to(sized(make_training_chain(8), 12 * MIB), Surroundings(Link.even(1e9)))
    schedule = find_least_offloaded(graph, WorkClock(1)).schedule
    device, host = simulate(graph, schedule).pool_peaks_bytes
    assert host > 0 and device < 9 * 12 * MIB
    assert usage_of(training_of(graph, schedule)).reserved_bytes == device
    assert usage_of(training_of(graph, schedule, pool=HOST)).reserved_bytes == host


@given(st.integers(0, 10**6), st.integers(2, 30))
def test_a_step_reserves_its_peak_at_least(seed: int, ops: int) -> None:
    graph = random_overwriting(seed, ops)
    graph = replace(graph, tensors=tuple(replace(t, size_bytes=t.size_bytes * MIB) for t in graph.tensors))
    schedule = keep_everything(graph)
    training = training_of(graph, schedule)
    for rules in (DEFAULT, EXPANDABLE):
        usage = usage_of(training, rules)
        assert simulate(graph, schedule).peak_bytes <= usage.allocated_bytes <= usage.reserved_bytes
        assert all(step[-1] <= usage.reserved_bytes for step in usage.by_step)


def test_places_of_buffers_that_are_in_use_at_once_do_not_overlap() -> None:
    training = Training((MIB,), tuple(Buffer(f"b{i}", i, i + 1 + i % 7, (i % 5 + 1) * MIB) for i in range(60)))
    for rules in (DEFAULT, EXPANDABLE):
        places = usage_of(training, rules).places
        for i, (one, here) in enumerate(zip(training.buffers, places, strict=True)):
            for other, there in zip(training.buffers[:i], places, strict=False):
                if other.upper > one.lower and here.segment == there.segment:
                    assert here.offset + here.size_bytes <= there.offset or there.offset + there.size_bytes <= here.offset


def test_the_least_capacity_runs_by_returning_unused_memory() -> None:
    # On a full device the segment of the first buffer has to go for the second, which is larger.
    training = Training((), (Buffer("first", 0, 1, 30 * MIB), Buffer("second", 1, 2, 32 * MIB)))
    assert usage_of(training).reserved_bytes == 62 * MIB
    least = least_capacity_bytes(training)
    assert least == 32 * MIB
    assert play(training, CachingAllocator(least)).retries > 0


@given(st.integers(0, 10**6))
def test_the_least_capacity_is_one_at_which_the_step_runs(seed: int) -> None:
    graph = random_overwriting(seed, 20)
    graph = replace(graph, tensors=tuple(replace(t, size_bytes=t.size_bytes * 3 * MIB) for t in graph.tensors))
    training = training_of(graph, keep_everything(graph))
    for rules in (DEFAULT, EXPANDABLE):
        least = least_capacity_bytes(training, rules)
        assert (
            play(training, CachingAllocator(least, rules=rules)).allocated_bytes
            <= least
            <= usage_of(training, rules).reserved_bytes
        )
        try:
            play(training, CachingAllocator(least - 2 * MIB, rules=rules))
        except DeviceFullError:
            continue
        raise AssertionError("it runs with 2 MiB less")


def test_passes_of_one_graph_request_the_same_memory() -> None:
    graph = sized(make_training_chain(8), 12 * MIB)
    schedule = keep_everything(graph)
    alone = replace(training_of(graph, schedule), static=(3 * MIB,))
    assert usage_of(combine_passes([(graph, schedule)], [3 * MIB])) == usage_of(alone)


@given(seeds=st.lists(st.integers(0, 1000), min_size=2, max_size=3))
def test_passes_follow_each_other_and_go_back(seeds: list[int]) -> None:
    graphs = [draw_training_step(seed, 5) for seed in seeds]
    parts = [(graph, keep_everything(graph)) for graph in graphs]
    levels = [
        [size - graph.static_bytes for size in simulate(*part).memory_bytes] for graph, part in zip(graphs, parts, strict=True)
    ]
    cuts = [find_boundary(*part) for part in parts]
    between = [live(*part, cut) for part, cut in zip(parts, cuts, strict=True)]
    ends = [live(*part, len(part[1].steps)) for part in parts]
    forward = [max(levels[i][: cuts[i]]) + sum(between[:i]) for i in range(len(parts))]
    backward = [max(levels[i][cuts[i] :]) + sum(between[:i]) + sum(ends[i + 1 :]) for i in range(len(parts))]
    training = combine_passes(parts, [])
    assert live_bytes(training.buffers) == max(*forward, *backward)
    assert len({buffer.id for buffer in training.buffers}) == len(training.buffers)


def live(graph: Graph, schedule: Schedule, steps: int) -> int:
    """Bytes of tensors, without static ones, after so many steps."""
    return sum(graph.tensors[t].size_bytes for t in live_after(graph, schedule.steps[:steps]))
