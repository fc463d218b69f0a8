"""The judge: memory and time of every step by hand, and all errors; test_two_judges.py has random schedules."""

from dataclasses import replace

import pytest

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.schedule import Compute, Free, Schedule, Step
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft


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
