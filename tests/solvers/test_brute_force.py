"""The exact solver against all schedules of small graphs: plain, with writes over inputs, variants, packing, resources."""

import random
from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.options.compress import VARIANCE
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_graph, draw_options, draw_overwriting
from planner.solvers.bounds import bound_least_budget
from planner.solvers.least import bracket_least_budget
from planner.solvers.problem import build_problem
from planner.solvers.windows import solve
from planner.solvers.windows.relaxation.discretization import Discretization
from planner.solvers.windows.relaxation.models import build_relaxation
from tests.support.graphs.small_graphs import random_overwriting
from tests.support.marks import slow
from tests.support.solvers.answers import SLACK, TOLERANCE, Case, ask, check, check_answer, check_models, check_optimum
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
            assert all(map(np.array_equal, astuple(programs[0].matrix), astuple(other.matrix)))
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


EXACT = settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
FEW, MANY = settings(EXACT, max_examples=40), settings(EXACT, max_examples=4000)
drawn = given(seed=st.integers(0, 10**6), ops=st.integers(1, 7), tightness=st.floats(0, 1))
seeds = st.integers(0, 10**6)


def budget_of(graph: Graph, share: float) -> int:
    least, peak = bound_least_budget(graph).budget_bytes, simulate(graph, keep_everything(graph)).peak_bytes
    return least + round((peak - least) * share)


def check_at(graph: Graph, tightness: float) -> None:
    budget = budget_of(graph, tightness**2)  # tight budgets are the hard ones
    check(graph, budget, fastest(graph, budget))


@EXACT
@drawn
def test_equals_brute_force(seed: int, ops: int, tightness: float) -> None:
    check_at(draw_graph(seed, ops), tightness)


@FEW
@drawn
def test_equals_brute_force_where_ops_overwrite(seed: int, ops: int, tightness: float) -> None:
    check_at(random_overwriting(seed, ops), tightness)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw_graph, random_overwriting])
@MANY
@drawn
def test_equals_brute_force_on_many_graphs(draw: Callable[[int, int], Graph], seed: int, ops: int, tightness: float) -> None:
    check_at(draw(seed, ops), tightness)


def check_least_budget(graph: Graph) -> None:
    bracket = bracket_least_budget(graph, precision=0.0)
    assert bracket.exact
    assert simulate(graph, bracket.schedule).peak_bytes == bracket.found_bytes
    assert fastest(graph, bracket.found_bytes) is not None
    assert fastest(graph, bracket.found_bytes - 1) is None


@settings(EXACT, max_examples=60)
@given(seed=seeds, ops=st.integers(1, 7))
def test_the_least_budget_is_found_to_the_byte(seed: int, ops: int) -> None:
    check_least_budget(draw_graph(seed, ops))


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw_graph, random_overwriting])
@settings(EXACT, max_examples=200)
@given(seed=seeds, ops=st.integers(1, 7))
def test_the_least_budget_is_found_to_the_byte_on_many_graphs(draw: Callable[[int, int], Graph], seed: int, ops: int) -> None:
    check_least_budget(draw(seed, ops))


def check_relaxation(graph: Graph, share: float) -> None:
    """Rows 1 to 8 with everything in them, without the search over states that decides small graphs."""
    budget = budget_of(graph, share)
    check_models(Case(0, graph, budget, fastest_with_options(graph, budget)))


@pytest.mark.slow
@settings(EXACT, max_examples=200)
@given(seed=seeds, ops=st.integers(2, 7), share=st.floats(0, 1))
def test_relaxation_never_exceeds_the_brute_force_optimum(seed: int, ops: int, share: float) -> None:
    check_relaxation(draw_graph(seed, ops), share)


@settings(EXACT, max_examples=30)
@given(seed=seeds, ops=st.integers(2, 7), share=st.floats(0, 1))
def test_relaxation_never_exceeds_the_optimum_where_ops_overwrite(seed: int, ops: int, share: float) -> None:
    check_relaxation(random_overwriting(seed, ops), share)


def test_writing_over_inputs_makes_a_difference() -> None:
    """Of 8 graphs, at the least budget that they need with it, most need more, or more time, without."""
    harder = 0
    for seed in range(8):
        graph = random_overwriting(seed, 6)
        budget = bracket_least_budget(graph, precision=0.0).found_bytes
        harder += fastest(graph.out_of_place(), budget) != fastest(graph, budget)
    assert harder > 4
