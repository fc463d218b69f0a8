"""The judge: memory and time of every step by hand, and all errors."""

import pytest

from graphs.errors import ScheduleError
from graphs.ir import Graph, Op, Tensor
from graphs.schedule import Compute, Free, Schedule, Step
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.small import make_training_chain
from tests.support.graphs.small_graphs import kept_output


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


def test_peaks_of_a_training_chain() -> None:
    graph = make_training_chain(3)
    once = (Compute(0), Compute(1), Compute(2), Compute(3), Free(1), Free(2), Compute(4), Compute(5))
    assert simulate(graph, Schedule(once)).peak_bytes == 4
    again = (Compute(0), Compute(1), Free(0), Compute(2), Compute(3), Free(1), Free(2), Compute(0), Compute(4), Compute(5))
    # Nothing is freed after g3 and f1 made again: f1, g3, g2, then g1 beside them.
    assert simulate(graph, Schedule(again)).memory_bytes == (1, 2, 1, 2, 3, 2, 1, 2, 3, 4)


def test_recomputed_kept_output_counts_twice() -> None:
    graph = kept_output()  # a -> x (2), y (1, kept); b (4); c: b -> 1; d: x, c -> 1
    steps = (Compute(0), Free(0), Compute(1), Compute(2), Free(2), Compute(0), Compute(3))
    memory = simulate(graph, Schedule(steps)).memory_bytes
    assert memory[5] == 1 + 1 + (2 + 1)  # y, c's output, and both outputs of a
    assert memory[6] == 1 + 1 + 2 + 1


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
        simulate(small(), Schedule((Compute(0), "offload")))  # type: ignore[arg-type]


def test_recomputing_an_unrepeatable_op_raises() -> None:
    draft = Draft()
    draft.add_op("draw", [], [1], recomputable=False)
    with pytest.raises(ScheduleError, match=r"step 2 computes 'draw' again"):
        run(draft.build_graph(), Compute(0), Free(0), Compute(0))


def test_random_ops_keep_their_order() -> None:
    ops = tuple(Op(i, f"r{i}", "rand", (), (i,), 1.0, random=True) for i in range(2))
    graph = Graph(ops, tuple(Tensor(i, f"t{i}", 1, (i,)) for i in range(2)), frozenset())
    run(graph, Compute(0), Compute(1), Compute(0))  # again, in any order: from the state it had before
    with pytest.raises(ScheduleError, match=r"step 0 computes 'r1' before 'r0'"):
        run(graph, Compute(1), Compute(0))


def test_readers_stay_on_their_side_of_an_in_place_write() -> None:
    draft = Draft()
    state = draft.add_static("state", 1)
    draft.add_op("before", [state], [1])
    draft.add_op("write", [state], [1], mutates=(state,), recomputable=False)
    draft.add_op("after", [state], [1])
    graph = draft.build_graph()
    run(graph, Compute(0), Compute(0), Compute(1), Compute(2))
    with pytest.raises(ScheduleError, match=r"step 2 computes 'before' after 'write' writes 'state'"):
        run(graph, Compute(0), Compute(1), Compute(0), Compute(2))
    with pytest.raises(ScheduleError, match=r"step 1 computes 'after' before 'write' writes 'state'"):
        run(graph, Compute(0), Compute(2), Compute(1))


def test_missing_kept_tensor_raises() -> None:
    # A kept tensor is never freed and its op always executed: what is left is a graph whose kept op is missing.
    with pytest.raises(ScheduleError, match=r"never computes 'b'"):
        run(small(), Compute(0), Compute(0))


def in_place() -> Graph:
    """a: -> x (10); b: x -> y (10), z (3), y may be written over x, workspace 2; c: y, z -> v (10, kept), over y."""
    draft = Draft()
    (x,) = draft.add_op("a", [], [10])
    y, z = draft.add_op("b", [x], [10, 3], workspace_bytes=2, overwrites=((1, 0),))
    (v,) = draft.add_op("c", [y, z], [10], overwrites=((3, 1),))
    return draft.build_graph([v])


def test_output_overwrites_an_input_freed_after_its_op() -> None:
    chain = Schedule((Compute(0), Compute(1), Free(0), Compute(2), Free(2), Free(1)))
    # x is y's memory from its op on, y is v's; freeing what was written over gives nothing back.
    assert simulate(in_place(), chain).memory_bytes == (10, 10 + 3 + 2, 13, 13, 10, 10)
    assert simulate(in_place().out_of_place(), chain).memory_bytes == (10, 10 + 10 + 3 + 2, 13, 23, 20, 10)


def test_input_freed_later_is_not_overwritten() -> None:
    steps = (Compute(0), Compute(1), Free(2), Compute(1), Free(0), Compute(2), Free(1), Free(2))
    # At first x stays; then y is made a second time, over x, and is there once afterwards.
    assert simulate(in_place(), Schedule(steps)).memory_bytes == (10, 25, 20, 10 + 10 + 3 + 2, 13, 13, 13, 10)
