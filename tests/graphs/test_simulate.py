"""The judge by hand: memory and time of every step, all errors; orders as schedules with the shortest lifetimes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.schedule import Compute, Free, Schedule, Step, schedule_of
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph
from graphs.synthetic.small import make_training_chain


def run(graph: Graph, *steps: Step) -> None:
    simulate(graph, Schedule(steps))


def small() -> Graph:
    """Static w (100); a: w -> x (10), y (20), 2 s, workspace 5; b: x -> z (3, kept), 1 s, workspace 50."""
    draft = Draft()
    w = draft.add_static("w", 100)
    x, _ = draft.add_op("a", [w], [10, 20], time_s=2.0, workspace_bytes=5)
    (z,) = draft.add_op("b", [x], [3], time_s=1.0, workspace_bytes=50)
    return draft.build_graph([z])


W, X, Y, Z = range(4)


def test_memory_and_time_of_each_step() -> None:
    steps = (Compute(0), Free(Y), Compute(1), Compute(0), Free(Y), Free(X))
    result = simulate(small(), Schedule(steps))
    assert result.memory_bytes == (
        100 + 30 + 5,  # outputs and workspace
        100 + 10,
        100 + 10 + 3 + 50,
        100 + 10 + 3 + 30 + 5,  # x is there already, and made a second time
        100 + 10 + 3,
        100 + 3,
    )
    assert result.peak_bytes == 163
    assert result.peak_step == 2
    assert result.time_s == 5.0
    assert result.recomputed == 1


def test_peak_step_is_the_first_of_equal_peaks() -> None:
    draft = Draft()
    draft.add_op("a", [], [4])
    draft.add_op("b", [], [4])
    result = simulate(draft.build_graph(), Schedule((Compute(0), Free(0), Compute(1))))
    assert (result.peak_bytes, result.peak_step) == (4, 0)


def test_invalid_schedules_raise() -> None:
    graph = small()
    first = Compute(0)
    with pytest.raises(ScheduleError, match=r"step 0 computes op 7, but the graph has 2 ops"):
        run(graph, Compute(7))
    with pytest.raises(ScheduleError, match=r"step 0 computes op -1"):
        run(graph, Compute(-1))
    with pytest.raises(ScheduleError, match=r"step 1 frees tensor 4, but the graph has 4"):
        run(graph, first, Free(4))
    with pytest.raises(ScheduleError, match=r"step 0 computes 'b', but its input 'a' is not in memory"):
        run(graph, Compute(1))
    with pytest.raises(ScheduleError, match=r"step 2 computes 'b', but its input 'a' is not in memory"):
        run(graph, first, Free(X), Compute(1))
    with pytest.raises(ScheduleError, match=r"step 0 frees 'a', which is not in memory"):
        run(graph, Free(X))
    with pytest.raises(ScheduleError, match=r"step 2 frees 'a', which is not in memory"):
        run(graph, first, Free(X), Free(X))
    with pytest.raises(ScheduleError, match=r"step 1 frees 'w', which must stay"):
        run(graph, first, Free(W))
    with pytest.raises(ScheduleError, match=r"step 2 frees 'b', which must stay"):
        run(graph, first, Compute(1), Free(Z))
    with pytest.raises(ScheduleError, match=r"never computes 'b'"):
        run(graph, first)


def test_unknown_step_kind_raises() -> None:
    with pytest.raises(ScheduleError, match="is not a step of a schedule"):
        simulate(small(), Schedule((Compute(0), "offload")))


def test_schedules_of_a_graph_are_judged_once() -> None:
    graph, schedule = small(), Schedule((Compute(0), Free(Y), Compute(1), Free(X)))
    assert simulate(graph, schedule) is simulate(graph, Schedule(schedule.steps))
    assert simulate(replace(graph, tensors=graph.tensors), schedule) is not simulate(graph, schedule)


def test_tensors_are_freed_after_their_last_use() -> None:
    graph = make_training_chain(3)  # f1 f2 f3 g3(f2, f3) g2(f1, g3) g1(g2); tensor i is made by op i
    assert schedule_of(graph, range(6)).steps == (
        Compute(0), Compute(1), Compute(2),
        Compute(3), Free(1), Free(2),
        Compute(4), Free(0), Free(3),
        Compute(5), Free(4), Free(5),
    )  # fmt: skip


def test_tensor_is_freed_before_its_recomputation() -> None:
    steps = schedule_of(make_training_chain(3), (0, 1, 2, 3, 0, 4, 5)).steps
    assert steps[:3] == (Compute(0), Compute(1), Free(0))
    assert steps[6:10] == (Free(2), Compute(0), Compute(4), Free(0))


def test_kept_tensors_are_never_freed() -> None:
    draft = Draft()
    kept, passing = draft.add_op("a", [], [1, 2])
    draft.add_op("b", [kept, passing], [1])
    graph = draft.build_graph([kept])
    steps = schedule_of(graph, (0, 0, 1)).steps
    assert Free(kept) not in steps
    # The passing output goes before it is made again, the kept one is there twice while that happens.
    assert steps[:3] == (Compute(0), Free(passing), Compute(0))
    assert simulate(graph, Schedule(steps)).memory_bytes[2] == 1 + 1 + 2


def test_static_tensors_are_never_freed() -> None:
    draft = Draft()
    weight = draft.add_static("weight", 5)
    draft.add_op("a", [weight], [1])
    assert schedule_of(draft.build_graph(), [0]).steps == (Compute(0), Free(1))


@pytest.mark.parametrize("op", [-1, 6])
def test_unknown_op_raises(op: int) -> None:
    with pytest.raises(ScheduleError, match=rf"op {op}, but the graph has 6"):
        schedule_of(make_training_chain(3), [0, op])


def test_computed_includes_repeated_ops() -> None:
    assert schedule_of(make_training_chain(3), (0, 1, 2, 3, 0, 4, 5)).computed == (0, 1, 2, 3, 0, 4, 5)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), ops=st.integers(1, 8))
def test_no_lifetime_can_be_shortened(seed: int, ops: int) -> None:
    graph = draw_graph(seed, ops)
    steps = schedule_of(graph, range(ops)).steps
    simulate(graph, Schedule(steps))
    for index, step in enumerate(steps):
        # Freed one execution earlier, every tensor would be missing somewhere.
        if isinstance(step, Free):
            before = max(i for i in range(index) if isinstance(steps[i], Compute))
            earlier = [*steps[:before], step, *(s for s in steps[before:] if s != step)]
            with pytest.raises(ScheduleError):
                simulate(graph, Schedule(tuple(earlier)))
