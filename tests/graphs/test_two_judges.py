"""The judge compared with a second one on random graphs with options: validity, peaks, clocks and lifetimes."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from graphs.clocks import run_clocks
from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.lifetimes import find_lifetimes
from graphs.schedule import Compute, Free, Schedule, Step
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_overwriting
from tests.support.graphs.event_judge import during, judged, live, runs
from tests.support.graphs.options import in_two_passes
from tests.support.graphs.random_choices import graph_with_choices, schedule_with_choices
from tests.support.graphs.small_graphs import random_overwriting

seeds = st.integers(0, 2**32)


def _graph(draw: random.Random) -> Graph:
    if draw.random() < 0.3:
        return random_overwriting(draw.randrange(2**32), draw.randint(3, 6))
    graph = graph_with_choices(draw)
    graph = in_two_passes(graph) if draw.random() < 0.5 else graph
    return draw_overwriting(graph, draw) if draw.random() < 0.5 else graph


@settings(max_examples=300)
@given(seeds)
def test_both_judges_agree_on_valid_schedules(seed: int) -> None:
    draw = random.Random(seed)
    graph = _graph(draw)
    schedule = schedule_with_choices(draw, graph)
    if not runs(graph, schedule.steps):
        with pytest.raises(ScheduleError):
            simulate(graph, schedule)
        return
    found, verdict = simulate(graph, schedule), judged(graph, schedule)
    assert found.pool_peaks_bytes == tuple(verdict.peaks_bytes[pool.name] for pool in graph.pools)
    assert found.pool_memory_bytes == tuple(
        tuple(during(graph, schedule.steps, k, pool.name) for k in range(len(schedule.steps))) for pool in graph.pools
    )
    assert found.clocks_s == tuple(verdict.done_s[stream] for stream in graph.streams)
    assert found.time_s == max(end_s for _, end_s in verdict.times_s)
    clocks = run_clocks(graph, schedule)
    computes = [isinstance(step, Compute) for step in schedule.steps]
    assert clocks.ends_s == tuple(end_s for _, end_s in verdict.times_s)
    assert [s for s, c in zip(clocks.starts_s, computes, strict=True) if c] == [
        start_s for (start_s, _), c in zip(verdict.times_s, computes, strict=True) if c
    ]
    # Whatever the timing: no more is in a pool at any moment than is counted in the order of steps.
    assert all(verdict.peaks_in_time_bytes[name] <= peak for name, peak in verdict.peaks_bytes.items())
    for t, stays in enumerate(find_lifetimes(graph, schedule)):
        there = {k for stay in stays for k in range(stay.first_step, stay.end_step)}
        after = [live(graph, schedule.steps[: k + 1]) for k in range(len(schedule.steps))]
        assert there == {k for k, now in enumerate(after) if t in now and graph.tensors[t].producers}
        for stay in stays:
            assert stay.start_s == verdict.times_s[stay.first_step][0]
            assert stay.end_s == (verdict.times_s[stay.end_step][1] if stay.end_step < len(after) else found.time_s)


@settings(max_examples=300)
@given(seeds)
def test_both_judges_refuse_the_same_schedules(seed: int) -> None:
    draw = random.Random(seed)
    graph = _graph(draw)
    steps: list[Step] = list(schedule_with_choices(draw, graph).steps) or [Compute(0)]
    place = draw.randrange(len(steps))
    match draw.randrange(3):
        case 0:
            del steps[place]
        case 1:
            steps.insert(place, draw.choice((Compute(draw.randrange(len(graph.ops))), Free(draw.randrange(len(graph.tensors))))))
        case _:
            steps[place:] = [*steps[place + 1 :], steps[place]]
    try:
        simulate(graph, Schedule(tuple(steps)))
    except ScheduleError:
        assert not runs(graph, steps)
    else:
        assert runs(graph, steps)


def test_most_random_schedules_are_valid() -> None:
    draws = [random.Random(seed) for seed in range(60)]
    graphs = [graph_with_choices(draw) for draw in draws]
    schedules = [schedule_with_choices(draw, graph) for draw, graph in zip(draws, graphs, strict=True)]
    accepted = [(g, s) for g, s in zip(graphs, schedules, strict=True) if runs(g, s.steps)]
    assert len(accepted) > 45
    assert sum(simulate(g, s).time_s < sum(g.ops[op].time_s for op in s.computed) for g, s in accepted) > 15
    assert sum(any(g.ops[op].optional for op in s.computed) for g, s in accepted) > 15
