"""Orders of execution as schedules with the shortest lifetimes."""

import pytest
from hypothesis import given, settings, strategies as st

from graphs.errors import ScheduleError
from graphs.schedule import Compute, Free, Schedule, schedule_of
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph
from graphs.synthetic.small import make_training_chain


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
