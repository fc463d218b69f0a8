"""The exact solver with optional ops and round trips to the host at once, against all schedules of small graphs."""

import random
from dataclasses import dataclass

import pytest

from graphs.ir import Graph
from graphs.options import with_options, without_options
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import Schedule
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import random_options
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.policies.store_all import store_all
from solvers.problem import OBJECTIVE_SCALE, problem_of
from solvers.result import Status
from solvers.windows import solve
from solvers.windows.formulation.granularity import Discretization
from solvers.windows.formulation.models import build_relaxation
from tests.support.brute_force_copies import fastest_with_copies
from tests.support.requests import ask

TOLERANCE = 1e-3
SLACK = 1e-6  # what HiGHS's arithmetic may be off by
SEEDS = [
    range(30),
    *(pytest.param(range(first, first + 100), marks=pytest.mark.slow) for first in range(1000, 3000, 100)),
]


@dataclass(frozen=True)
class Case:
    """A small graph with up to two optional ops, round trips and a budget, and the best of all its schedules."""

    seed: int
    graph: Graph
    budget_bytes: int
    optimum: tuple[float, Schedule] | None


def cases(seeds: range) -> list[Case]:
    """Without those that have too many schedules to try."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        graph = random_options(draw.randint(0, 10**6), draw.randint(2, 4), 2)
        program = without_options(graph)
        peak = simulate(program, store_all(program)).peak_bytes
        budget = max(1, round(peak * draw.uniform(0.6, 1.0)))
        host_bytes = draw.choice((None, None, draw.randint(3, 20)))
        graph = with_options(graph, ("offload",), Surroundings(Link.even(draw.choice((1.0, 2.0, 4.0))), host_bytes))
        try:
            found.append(Case(seed, graph, budget, fastest_with_copies(graph, budget, most=40_000)))
        except TimeoutError:
            continue
    assert len(found) > 0.8 * len(seeds)
    return found


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_bounds_and_schedules(seeds: range) -> None:
    met = feasible = both = 0
    for one in cases(seeds):
        check_models(one)
        result = solve(ask(one.graph, one.budget_bytes, tolerance=TOLERANCE, time_limit_s=2))
        assert result.status is not Status.ERROR and not (result.message and result.schedule), one.seed
        if one.optimum is None:
            assert result.schedule is None, one.seed
            continue
        feasible += 1
        best_s, schedule = one.optimum
        simulation = simulate(one.graph, schedule)
        assert simulation.time_s == pytest.approx(best_s)
        assert simulation.peak_bytes <= one.budget_bytes
        assert result.status is not Status.INFEASIBLE, one.seed
        if result.schedule is None or result.bound_s is None or result.time_s is None:
            continue
        assert result.bound_s <= best_s * (1 + SLACK) + SLACK, one.seed
        assert result.time_s >= best_s * (1 - SLACK), one.seed
        if result.status is Status.OPTIMAL:
            assert result.time_s <= best_s * (1 + TOLERANCE) + SLACK, one.seed
        met += result.time_s <= best_s * (1 + TOLERANCE) + SLACK
        streams = {one.graph.ops[op].stream for op in result.schedule.computed if op >= len(one.graph.program)}
        both += len(streams) > 1
    assert met >= 0.85 * feasible
    assert both > 0


def check_models(one: Case) -> None:
    """All rows, in windows of each place, in two, and in one, do not refute what exists."""
    problem = problem_of(one.graph, one.budget_bytes)
    assert problem.copies is not None
    every = tuple(sorted(set(problem.places.last)))
    for ends in {every, tuple(sorted({every[len(every) // 2], every[-1]})), every[-1:]}:
        pairs = frozenset((end, x) for end in ends for x in range(end))
        chains = frozenset((end, x, z) for end, z in pairs for x in range(z))
        spans = frozenset((first, last) for last in ends for first in range(last))
        firsts = frozenset(range(problem.ops))
        detail = Discretization(ends, firsts, pairs, chains, spans=spans, places=problem.places.last)
        answer = solve_program(build_relaxation(problem, detail).program, clock=WallClock(60))
        if one.optimum is not None:
            assert answer.outcome is Outcome.OPTIMAL, (one.seed, ends)
            bound_s = one.graph.time_s * (1 + answer.bound / OBJECTIVE_SCALE)
            assert bound_s <= one.optimum[0] * (1 + SLACK) + SLACK, (one.seed, ends)
