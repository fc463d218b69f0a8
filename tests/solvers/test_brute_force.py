"""The exact solver against all schedules of small graphs, also of those in which ops may write over what they read."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from graphs.ir import Graph
from graphs.schedule import keep_everything
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_graph
from solvers.bounds import bound_least_budget
from solvers.least import bracket_least_budget
from tests.support.graphs.small_graphs import random_overwriting
from tests.support.solvers.answers import Case, check, check_models
from tests.support.solvers.brute_force import fastest, fastest_with_options

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
    """Rows 1 to 9 with everything in them, without the search over states that decides small graphs."""
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
