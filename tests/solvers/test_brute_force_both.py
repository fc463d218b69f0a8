"""The exact solver with optional ops and transfers to the host at once, against all schedules of small graphs."""

import random

import pytest

from graphs.options import remove_options
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_options, draw_overwriting
from planner.capture.options import apply_options
from solvers.windows import solve
from tests.support.solvers.answers import TOLERANCE, Case, ask, check_answer, check_models, check_optimum
from tests.support.solvers.brute_force_transfers import fastest_with_copies

SEEDS = [
    range(10, 20),
    pytest.param(range(30), marks=pytest.mark.slow),
    *(pytest.param(range(first, first + 100), marks=pytest.mark.slow) for first in range(1000, 3000, 100)),
]


def cases(seeds: range) -> list[Case]:
    """Without those that have too many schedules to try."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        graph = draw_options(draw.randint(0, 10**6), draw.randint(2, 4), 2)
        if draw.random() < 0.5:
            graph = draw_overwriting(graph, draw)
        program = remove_options(graph)
        peak = simulate(program, keep_everything(program)).peak_bytes
        budget = max(1, round(peak * draw.uniform(0.6, 1.0)))
        host_bytes = draw.choice((None, None, draw.randint(3, 20)))
        graph = apply_options(graph, ("offload",), Surroundings(Link.even(draw.choice((1.0, 2.0, 4.0))), host_bytes))
        try:
            found.append(Case(seed, graph, budget, fastest_with_copies(graph, budget, most=40_000)))
        except TimeoutError:
            continue
    assert len(found) > 0.8 * len(seeds)
    return found


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_bounds_and_schedules_agree_with_brute_force(seeds: range) -> None:
    met = feasible = both = 0
    for one in cases(seeds):
        check_models(one)
        result = solve(ask(one.graph, one.budget_bytes, tolerance=TOLERANCE, time_limit_s=2))
        met += check_answer(one, result)
        if one.optimum is None:
            continue
        feasible += 1
        check_optimum(one)
        if result.schedule is not None:
            both += len({one.graph.ops[op].stream for op in result.schedule.computed if op >= len(one.graph.program)}) > 1
    assert met >= 0.85 * feasible
    assert both > 0


@pytest.mark.slow
def test_tensors_without_readers_are_not_offloaded() -> None:
    """A plain graph that is committed to may lack what reads a tensor that may go to the host."""
    (one,) = cases(range(2166, 2167))
    result = solve(ask(one.graph, one.budget_bytes, tolerance=TOLERANCE, time_limit_s=2))
    assert result.schedule is not None and result.message == ""
