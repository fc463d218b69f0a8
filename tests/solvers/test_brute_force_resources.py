"""The exact solver with variants, packed tensors and limits on resources, against all schedules of small graphs."""

import random
from dataclasses import replace

import numpy as np
import pytest

from graphs.ir import Graph
from graphs.options import remove_options
from graphs.options.compress import VARIANCE
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_options, draw_overwriting
from solvers.bounds import bound_least_budget
from solvers.problem import build_problem
from solvers.windows import solve
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.relaxation.models import build_relaxation
from tests.support.marks import slow
from tests.support.solvers.answers import SLACK, TOLERANCE, Case, ask, check_answer, check_models, check_optimum
from tests.support.solvers.brute_force import fastest, fastest_with_options


def with_variances(graph: Graph, draw: random.Random, resource: str = VARIANCE) -> Graph:
    """`graph` where most of its optional ops use whole amounts of `resource`, and a limit below their sum, now and then 0."""
    ops = tuple(op.using(resource, float(draw.choice((0, 1, 1, 2, 3, 5)))) if op.optional else op for op in graph.ops)
    total = int(sum(op.used(resource) for op in ops))
    return replace(graph, ops=ops, limits=(*graph.limits, (resource, float(draw.randint(0, max(0, total - 1))))))


SEEDS = [
    range(25),
    *slow(*(range(first, first + 250) for first in range(1000, 5000, 250))),
    *slow(range(25, 50)),
]


def limited(seed: int) -> tuple[Graph, int]:
    """A graph with variances, every third with another resource too, and a budget."""
    draw = random.Random(seed)
    graph = with_variances(draw_options(seed, draw.randint(2, 6)), draw)
    graph = graph if seed % 3 else with_variances(graph, random.Random(seed), "another")
    program = remove_options(graph)
    return graph, max(1, round(simulate(program, keep_everything(program)).peak_bytes * draw.uniform(0.55, 1.05)))


def cases(seeds: range) -> list[Case]:
    return [Case(seed, graph, budget, fastest_with_options(graph, budget)) for seed in seeds for graph, budget in [limited(seed)]]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_solve_with_resource_limits_agrees_with_brute_force(seeds: range) -> None:
    met = feasible = limiting = exact = 0
    for one in cases(seeds):
        result = solve(ask(one.graph, one.budget_bytes, tolerance=TOLERANCE, time_limit_s=5))
        met += check_answer(one, result)
        exact += check_models(one)
        if one.optimum is None:
            continue
        feasible += 1
        check_optimum(one)
        assert result.bound_s is not None
        best_s, _ = one.optimum
        without_limit = fastest_with_options(replace(one.graph, limits=()), one.budget_bytes)
        assert without_limit is not None and without_limit[0] <= best_s + SLACK, one.seed
        limiting += without_limit[0] < best_s * (1 - TOLERANCE)
        for resource, limit in one.graph.limits if result.schedule is not None else ():
            assert one.graph.used(resource, result.schedule.computed) <= limit, one.seed
    assert met >= 0.95 * feasible
    assert exact >= 0.9 * feasible
    assert limiting > 0.05 * feasible


def test_unbinding_resource_limits_leave_the_program_unchanged() -> None:
    """And with a limit that all ops together are within."""
    for seed in range(20):
        graph, budget = limited(seed)
        free = replace(graph, limits=())
        wide = replace(graph, limits=tuple((name, sum(op.used(name) for op in graph.ops)) for name, _ in graph.limits))
        bare = replace(free, ops=tuple(replace(op, uses=()) for op in graph.ops))
        programs = []
        for one in (bare, free, wide):
            problem = build_problem(one, budget)
            discretization = Discretization(tuple(sorted(set(problem.places.last))), places=problem.places.last)
            programs.append(build_relaxation(problem, discretization).program)
        for other in programs[1:]:
            assert (programs[0].matrix != other.matrix).nnz == 0
            for name in ("cost", "lower", "upper", "row_lower", "row_upper", "integer"):
                assert np.array_equal(getattr(programs[0], name), getattr(other, name)), name


OPTION_SEEDS = [
    range(50),
    *slow(range(50, 100), range(100, 150)),
    *slow(*(range(first, first + 250) for first in range(1000, 5000, 250))),
]


def cases_of_options(seeds: range) -> list[Case]:
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        graph = draw_options(seed, draw.randint(2, 6))
        if draw.random() < 0.5:
            graph = draw_overwriting(graph, draw)
        program = remove_options(graph)
        peak = simulate(program, keep_everything(program)).peak_bytes
        budget = max(1, round(peak * draw.uniform(0.55, 1.05)))
        found.append(Case(seed, graph, budget, fastest_with_options(graph, budget)))
    return found


@pytest.mark.parametrize("seeds", OPTION_SEEDS, ids=str)
def test_schedules_and_bounds_with_options_agree_with_brute_force(seeds: range) -> None:
    """All rows too, in windows of each place, in two, and in one; what refutes budgets before any model; and the judge."""
    met = feasible = better = faster = exact = optional = 0
    for one in cases_of_options(seeds):
        result = solve(ask(one.graph, one.budget_bytes, tolerance=TOLERANCE, time_limit_s=5))
        met += check_answer(one, result)
        exact += check_models(one)
        without = fastest(remove_options(one.graph), one.budget_bytes)
        if one.optimum is None:
            assert without is None
            continue
        feasible += 1
        check_optimum(one)
        best_s, schedule = one.optimum
        assert without is None or best_s <= without * (1 + SLACK), one.seed
        optional += any(op >= len(one.graph.program) for op in schedule.computed)
        assert build_problem(one.graph, one.budget_bytes).least_s <= best_s + SLACK, one.seed
        assert bound_least_budget(one.graph).budget_bytes <= one.budget_bytes, one.seed
        assert result.bound_s is not None
        if result.time_s is not None:
            better += without is None or result.time_s < without * (1 - TOLERANCE)
            faster += result.time_s < one.graph.time_s * (1 - TOLERANCE)
    # Nearly all are solved; options are what solves some, and the step may take less time than its program's ops.
    assert met >= 0.97 * feasible
    # With a window for each place the bound is the optimum, nearly always.
    assert exact >= 0.95 * feasible
    assert better > 0.1 * feasible
    assert optional > 0.2 * feasible
    assert faster > 0
