"""The exact solver against all schedules of small graphs, also of those in which ops may write over what they read."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from graphs.ir import Graph
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_graph
from solvers.bounds import bound_least_budget
from solvers.clock import WallClock
from solvers.highs import solve_program
from solvers.highs.program import Outcome
from solvers.least import bracket_least_budget
from solvers.problem import OBJECTIVE_SCALE, build_problem
from solvers.windows.relaxation.discretization import Discretization
from solvers.windows.relaxation.models import build_relaxation
from tests.support.graphs.small_graphs import random_overwriting
from tests.support.solvers.answers import SLACK, TOLERANCE, check
from tests.support.solvers.brute_force import fastest

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


@pytest.mark.slow
@settings(EXACT, max_examples=40)
@given(seed=seeds, ops=st.integers(4, 7))
def test_lower_budgets_never_take_less_time(seed: int, ops: int) -> None:
    graph = draw_graph(seed, ops)
    least = bound_least_budget(graph).budget_bytes
    peak = simulate(graph, keep_everything(graph)).peak_bytes
    best: float | None = None
    for budget in range(peak, least - 1, -max(1, (peak - least) // 6)):
        optimum = fastest(graph, budget)
        result = check(graph, budget, optimum)
        if best is not None and result.time_s is not None:
            assert result.time_s >= best * (1 - TOLERANCE) - SLACK
        best = result.time_s if result.time_s is not None else float("inf")


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
    """Rows 1 to 9 with everything in them, without the search over states that decides small graphs."""
    budget, ops = budget_of(graph, share), len(graph.ops)
    optimum = fastest(graph, budget)
    for ends in (tuple(range(ops)), (ops // 2, ops - 1), (ops - 1,)):
        pairs = frozenset((end, x) for end in ends for x in range(end))
        precedences = frozenset((end, x, z) for end in ends for z in range(end) for x in range(z))
        discretization = Discretization(tuple(sorted(set(ends))), frozenset(range(ops)), pairs, precedences)
        answer = solve_program(build_relaxation(build_problem(graph, budget), discretization).program, clock=WallClock(60))
        if optimum is not None:
            assert answer.outcome is Outcome.OPTIMAL
            assert graph.time_s * (1 + answer.bound / OBJECTIVE_SCALE) <= optimum * (1 + SLACK) + SLACK


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
