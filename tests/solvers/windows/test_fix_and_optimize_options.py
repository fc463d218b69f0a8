"""Fix-and-optimize near the best schedule of a graph with options."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from graphs.ir import Graph
from graphs.options import remove_options
from graphs.options.compress import VARIANCE
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_options
from solvers.clock import WorkClock
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows import solve
from solvers.windows.decoding.decode import order_of
from solvers.windows.search import Search
from solvers.windows.strategies.neighbourhoods import FixAndOptimizeOptions
from solvers.windows.strategies.substitution import substitute
from tests.solvers.windows.test_options import head, in_chunks, with_packed_mask

EXACT = Tolerance.of(0.0)


def searched(graph: Graph, budget_bytes: int) -> Search:
    """With nothing found yet."""
    return Search.of(Request(graph, budget_bytes, EXACT, WorkClock(100.0)))


def begun(graph: Graph, share: float) -> Search | None:
    """With the fastest schedule of the program alone, in this share of its peak; None where it has none, or needs no more."""
    program = remove_options(graph)
    budget = round(share * simulate(program, keep_everything(program)).peak_bytes)
    found = solve(Request(program, budget, EXACT, WorkClock(20.0)))
    if found.schedule is None:
        return None
    search = searched(graph, budget)
    places = search.problem.places
    search.offer(order_of(search.problem, [places.ids.index(op) for op in found.schedule.computed]))
    return None if search.stopping.is_enough() else search


def instances() -> Iterator[tuple[Graph, float]]:
    """Graphs with options, and shares of their programs' peaks."""
    for seed in range(12):
        for share in (0.9, 0.8):
            yield draw_options(seed, 12), share


def judged(search: Search) -> float:
    """Time of the best schedule, which is what it says."""
    best = search.incumbent.best_trial
    graph = search.problem.whole
    result = simulate(graph, best.schedule)
    assert result.time_s == pytest.approx(best.time_s) and result.peak_bytes == best.peak_bytes <= search.budget_bytes
    assert graph.allows(best.schedule.computed)
    return best.time_s


def test_the_head_in_fewer_chunks_and_a_packed_mask() -> None:
    program = head()
    program = replace(program, ops=(replace(program.ops[0], recomputable=False), *program.ops[1:]))
    graph = with_packed_mask(in_chunks(in_chunks(program, 2, 7.75), 4, 8.5))
    search = searched(graph, 17)
    places = search.problem.places
    # layer; pack; the head in four chunks; unpack; its gradient.
    order = substitute(search.problem, frozenset({places.ids.index(6)}))
    assert order is not None
    computed = [places.ids.index(op) for op in (0, 7, 6, 8, 4)]
    search.offer(replace(order, computed=tuple(computed), windows=(0,) * 5, first=(True, False, True, False, True)))
    assert judged(search) == pytest.approx(12.5)
    exhausted(search)
    assert judged(search) == pytest.approx(11.75)
    assert {graph.ops[op].name for op in search.incumbent.best_trial.schedule.computed if op > 4} == {"chunks2", "pack", "unpack"}


def exhausted(search: Search) -> FixAndOptimizeOptions:
    """What has nothing left to do."""
    strategy = FixAndOptimizeOptions(search)
    while strategy.step(1.0):
        pass
    return strategy


def test_exhausted_strategy_resumes_after_a_new_best_schedule() -> None:
    graph = next(graph for graph, share in instances() if begun(graph, share) is not None)
    assert not FixAndOptimizeOptions(searched(graph, 1 << 40)).step(1.0)  # there is nothing to begin with
    search = next(search for search in (begun(graph, share) for graph, share in instances()) if search is not None)
    strategy = exhausted(search)
    best, spent = search.incumbent.best_trial, search.clock.now
    assert not strategy.step(1.0)
    assert search.incumbent.best is best and (search.stopping.is_enough() or search.clock.now == spent)
    search.incumbent.best = replace(best)
    strategy.step(1.0)
    assert search.stopping.is_enough() or search.clock.now > spent


@pytest.mark.slow
def test_a_limit_on_variance_is_kept_to() -> None:
    slower = 0
    for graph, share in instances():
        ops = tuple(op.using(VARIANCE, 1.0) if op.optional else op for op in graph.ops)
        both = [begun(replace(graph, ops=ops, limits=((VARIANCE, limit),)), share) for limit in (0.0, 1e9)]
        times = []
        for search in filter(None, both):
            exhausted(search)
            times.append(judged(search))
        if len(times) == 2:
            assert times[0] >= times[1] * (1 - 1e-9)
            slower += times[0] > times[1]
    assert slower > 2


@pytest.mark.slow
def test_most_small_graphs_come_to_their_optimum() -> None:
    tried = better = optimal = 0
    for graph, share in instances():
        if (search := begun(graph, share)) is None:
            continue
        before_s = search.incumbent.best_s
        exhausted(search)
        best_s = judged(search)
        assert best_s <= before_s
        result = solve(Request(graph, search.budget_bytes, EXACT, WorkClock(20.0)))
        assert result.time_s is not None and best_s >= result.time_s * (1 - 1e-9)
        tried += 1
        better += best_s < before_s
        optimal += best_s <= result.time_s * (1 + 1e-9)
    assert better > 2 and optimal >= 0.9 * tried
