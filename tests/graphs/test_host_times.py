"""The judge with host times: ops are issued in order, and start when they are issued and their stream is free."""

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, strategies as st

from graphs.errors import GraphError
from graphs.ir import Graph
from graphs.schedule import Schedule, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.small import make_chain
from tests.support.graphs.event_judge import runs
from tests.support.graphs.random_choices import graph_with_choices, schedule_with_choices


def with_times(graph: Graph, times_s: list[float], host_s: list[float]) -> Graph:
    ops = tuple(replace(op, time_s=t, host_s=h) for op, t, h in zip(graph.ops, times_s, host_s, strict=True))
    return replace(graph, ops=ops)


def issue_and_run(graph: Graph, schedule: Schedule) -> float:
    """Return the end of the last kernel on one stream, by the definition."""
    issued_s = free_s = 0.0
    for op_id in schedule.computed:
        op = graph.ops[op_id]
        issued_s += op.host_s
        free_s = max(issued_s, free_s) + op.time_s
    return free_s


seconds = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(seconds, seconds), min_size=6, max_size=6))
def test_kernels_wait_for_the_host_and_for_their_stream(times: list[tuple[float, float]]) -> None:
    graph = make_chain(6)
    graph = with_times(graph, *(list(column) for column in zip(*times, strict=True)))
    schedule = keep_everything(graph)
    found = simulate(graph, schedule)
    plain = simulate(with_times(graph, [op.time_s for op in graph.ops], [0.0] * 6), schedule)
    assert found.step_s == pytest.approx(issue_and_run(graph, schedule))
    assert found.step_s >= found.time_s * (1 - 1e-12) and replace(found, step_s=plain.step_s) == plain
    assert found.step_s <= found.time_s + sum(op.host_s for op in graph.ops) + 1e-9


def test_a_slow_host_decides_and_a_fast_one_does_not() -> None:
    graph = make_chain(4)
    schedule = keep_everything(graph)
    judge = partial(with_times, graph, [2.0] * 4)
    assert simulate(judge([0.5] * 4), schedule).step_s == 0.5 + 4 * 2.0
    assert simulate(judge([3.0] * 4), schedule).step_s == 4 * 3.0 + 2.0
    late = simulate(judge([0.0, 0.0, 7.0, 0.0]), schedule)  # the first two kernels have ended before the third is issued
    assert (late.step_s, late.time_s) == (11.0, 8.0)


@given(st.integers(0, 2**32))
def test_host_times_of_nothing_change_nothing_and_others_only_delay(seed: int) -> None:
    """With several streams and pools too; the clock without host times is held to a second judge elsewhere."""
    draw = random.Random(seed)
    graph = graph_with_choices(draw)
    schedule = schedule_with_choices(draw, graph)
    if not runs(graph, schedule.steps):
        return
    plain = simulate(graph, schedule)
    assert plain.step_s == plain.time_s
    slow = replace(graph, ops=tuple(replace(op, host_s=draw.random()) for op in graph.ops))
    found = simulate(slow, schedule)
    issued_s = sum(slow.ops[op].host_s for op in schedule.computed)
    assert replace(found, step_s=plain.step_s) == plain
    assert max(plain.time_s, issued_s) <= found.step_s * (1 + 1e-9) and found.step_s <= (plain.time_s + issued_s) * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_invalid_host_times_raise(wrong: float) -> None:
    with pytest.raises(GraphError, match="host time"):
        with_times(make_chain(2), [1.0, 1.0], [0.0, wrong])
