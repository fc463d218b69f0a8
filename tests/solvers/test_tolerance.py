"""A tolerance that widens with time, and what a solve settles for."""

import time
from types import SimpleNamespace

import pytest

from planner.graphs.errors import PlannerError
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.plan_check import check_plan
from planner.plans.solve import solve as plan
from planner.solvers.clock import WorkClock
from planner.solvers.registry import get_solver
from planner.solvers.request import Request
from planner.solvers.result import Status
from planner.solvers.tolerance import WIDENING, Tolerance
from planner.solvers.windows import solve
from planner.solvers.windows.search import Search
from tests.support.budgets import budget_at
from tests.support.solvers.answers import ask

# Takes minutes to be solved to the last bit.
GRAPH = draw_training_step(2, 80)
BUDGET = budget_at(GRAPH, 0.25)


def test_tolerance_schedule_widens_with_time_and_a_constant_does_not() -> None:
    assert [WIDENING.compute_at(seconds) for seconds in (0.0, 19.9, 20.0, 119.9, 120.0, 1e9)] == [
        0.001,
        0.001,
        0.005,
        0.005,
        0.02,
        0.02,
    ]
    assert [Tolerance.of(0.1).compute_at(seconds) for seconds in (0.0, 1e9)] == [0.1, 0.1]
    assert Tolerance.of(WIDENING) is WIDENING
    assert [WIDENING.limit(3e-3).compute_at(seconds) for seconds in (0.0, 20.0, 120.0)] == [0.001, 0.003, 0.003]
    assert WIDENING.limit(1e-4).compute_at(1e9) == WIDENING.first


@pytest.mark.parametrize("given", [-1e-9, float("nan"), float("inf")])
def test_invalid_tolerance_raises(given: float) -> None:
    with pytest.raises(PlannerError, match=r"tolerance is .*: must be a fraction of the step time"):
        Tolerance.of(given)


def search_at(gap: float, tolerance: float | Tolerance) -> Search:
    """A search whose best schedule is so far above the bound; its clock is set by spending work."""
    graph = make_training_chain(5)
    peak_bytes = simulate(graph, keep_everything(graph)).peak_bytes
    search = Search.of(Request(graph, peak_bytes, Tolerance.of(tolerance), WorkClock()))
    search.incumbent.best = SimpleNamespace(time_s=(1 + gap) * search.incumbent.bound_s)
    return search


def test_a_search_is_solved_when_the_tolerance_comes_to_its_gap() -> None:
    search = search_at(0.004, WIDENING)
    search.clock.spend(19.9)
    assert not search.stopping.is_solved() and not search.stopping.poll_satisfied()
    assert search.stopping.compute_settled() == 0.001
    search.clock.spend(0.2)
    assert search.stopping.is_solved() and not search.stopping.poll_satisfied()
    assert search.stopping.compute_settled() == 0.005
    search.clock.spend(0.9)  # no more than a moment for better: it has had 20 seconds
    assert search.stopping.poll_satisfied()
    search.clock.spend(109.0)
    assert search.stopping.compute_settled() == 0.005


def test_a_search_within_its_tolerance_goes_on_for_half_as_long() -> None:
    for tolerance in (0.005, Tolerance(((0.0, 0.005), (1000.0, 0.1)))):
        search = search_at(0.004, tolerance)
        search.clock.spend(100.0)
        assert not search.stopping.poll_satisfied()
        search.clock.spend(49.0)
        assert not search.stopping.poll_satisfied()
        search.clock.spend(2.0)
        assert search.stopping.poll_satisfied()


def test_result_records_the_accepted_tolerance() -> None:
    began = time.monotonic()
    result = solve(ask(GRAPH, BUDGET, tolerance=Tolerance(((0.0, 0.0), (1.5, 1.0), (1000.0, 2.0))), time_limit_s=600.0))
    assert time.monotonic() - began < 100
    assert result.gap > 1e-3
    assert result.status is Status.WITHIN
    assert result.settings["tolerance"] == 1.0


def test_plan_within_the_first_tolerance_is_accepted_at_once() -> None:
    graph = make_training_chain(8)
    found = plan(graph, 8)
    assert (found.status, found.settings["tolerance"]) == ("optimal", 0.001)
    assert check_plan(graph, found).peak_bytes <= 8


def test_other_solvers_take_the_first_value() -> None:
    graph = make_training_chain(4)
    result = get_solver("checkmate")(ask(graph, 5, tolerance=WIDENING))
    assert (result.status, result.settings["tolerance"]) == (Status.OPTIMAL, 0.001)
    assert get_solver("keep-everything")(ask(graph, 100, tolerance=WIDENING)).status is Status.OPTIMAL
