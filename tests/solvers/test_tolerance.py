"""A tolerance that widens with time, and what a solve settles for."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from graphs.errors import PlannerError
from graphs.simulate import simulate
from graphs.synthetic import random_training_step, training_chain
from planner.plan_check import check_plan
from planner.solving import solve as plan
from solvers.bounds import least_budget_bound
from solvers.policies.store_all import store_all
from solvers.registry import get_solver
from solvers.result import Status
from solvers.tolerance import WIDENING, Tolerance
from solvers.windows import incumbent, solve
from solvers.windows.incumbent import Search

# Takes minutes to be solved to the last bit.
GRAPH = random_training_step(2, 80)
_LEAST, _PEAK = least_budget_bound(GRAPH).budget_bytes, simulate(GRAPH, store_all(GRAPH)).peak_bytes
BUDGET = _LEAST + (_PEAK - _LEAST) // 4


def test_it_widens_with_time_and_a_number_does_not() -> None:
    assert [WIDENING.at(seconds) for seconds in (0.0, 19.9, 20.0, 119.9, 120.0, 1e9)] == [0.001, 0.001, 0.005, 0.005, 0.02, 0.02]
    assert [Tolerance.of(0.1).at(seconds) for seconds in (0.0, 1e9)] == [0.1, 0.1]
    assert Tolerance.of(WIDENING) is WIDENING


@pytest.mark.parametrize("given", [-1e-9, float("nan"), float("inf")])
def test_what_is_no_tolerance_is_refused(given: float) -> None:
    with pytest.raises(PlannerError, match=r"tolerance is .*: must be a fraction of the step time"):
        Tolerance.of(given)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock of a search; its `now` is set by hand."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(incumbent, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def search_at(gap: float, tolerance: float | Tolerance) -> Search:
    """A search whose best schedule is so far above the bound."""
    graph = training_chain(5)
    search = Search(graph, simulate(graph, store_all(graph)).peak_bytes, tolerance, 3600.0, None, None)
    search.best = SimpleNamespace(time_s=(1 + gap) * search.bound_s)  # type: ignore[assignment]
    return search


def test_a_search_is_solved_when_the_tolerance_comes_to_its_gap(clock: Any) -> None:
    search = search_at(0.004, WIDENING)
    clock.now = 19.9
    assert not search.solved() and not search.satisfied()
    assert search.settled_for() == 0.001
    clock.now = 20.1
    assert search.solved() and not search.satisfied()
    assert search.settled_for() == 0.005
    clock.now = 21.0  # no more than a moment for better: it has had 20 seconds
    assert search.satisfied()
    clock.now = 130.0
    assert search.settled_for() == 0.005


def test_a_search_within_its_tolerance_goes_on_for_half_as_long(clock: Any) -> None:
    for tolerance in (0.005, Tolerance(((0.0, 0.005), (1000.0, 0.1)))):
        clock.now = 0.0
        search = search_at(0.004, tolerance)
        clock.now = 100.0
        assert not search.satisfied()
        clock.now = 149.0
        assert not search.satisfied()
        clock.now = 151.0
        assert search.satisfied()


def test_a_plan_says_what_was_settled_for() -> None:
    began = time.monotonic()
    result = solve(GRAPH, BUDGET, tolerance=Tolerance(((0.0, 0.0), (1.5, 1.0), (1000.0, 2.0))), time_limit_s=600.0)
    assert time.monotonic() - began < 100
    assert result.status is Status.OPTIMAL
    assert result.gap is not None and result.gap > 0
    assert result.settings["tolerance"] == 1.0


def test_what_is_within_the_first_tolerance_is_settled_for_at_once() -> None:
    graph = training_chain(8)
    found = plan(graph, 8)
    assert (found.status, found.settings["tolerance"]) == ("optimal", 0.001)
    assert check_plan(graph, found).peak_bytes <= 8


def test_other_solvers_take_the_first_value() -> None:
    graph = training_chain(4)
    result = get_solver("checkmate")(graph, 5, tolerance=WIDENING)
    assert (result.status, result.settings["tolerance"]) == (Status.OPTIMAL, 0.001)
    assert get_solver("store_all")(graph, 100, tolerance=WIDENING).status is Status.OPTIMAL
