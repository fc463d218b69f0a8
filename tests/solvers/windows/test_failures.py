"""What must not happen in a solve ends it at once, is said, and costs no schedule that was found before."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from graphs.errors import PlannerError, SolverWarning
from graphs.synthetic.random_graphs import draw_training_step
from planner.plans.solve import solve as plan
from solvers.highs import solve_program
from solvers.highs.program import Answer, Outcome
from solvers.problem import OBJECTIVE_SCALE
from solvers.result import Result, Status
from solvers.windows import solve
from solvers.windows.decoding.decode import try_out
from solvers.windows.search import Search
from solvers.windows.strategies import refinement
from solvers.windows.strategies.first_schedules import Imitation
from solvers.windows.strategies.portfolio import Portfolio
from solvers.windows.strategies.strategy import Strategy
from tests.support.budgets import budget_at
from tests.support.solvers.answers import ask

GRAPH = draw_training_step(2, 36)
BUDGET = budget_at(GRAPH, 0.25)


def solved() -> Result:
    """A solve that would take ten minutes: no gap is small enough."""
    began = time.monotonic()
    result = solve(ask(GRAPH, BUDGET, tolerance=0.0, time_limit_s=600.0))
    assert time.monotonic() - began < 100
    return result


def fails(self: Strategy, limit: float) -> None:
    raise RuntimeError("no such choice")


@pytest.mark.parametrize("strategy", [Portfolio, Imitation], ids=["in the background", "in the caller's thread"])
def test_failing_heuristic_ends_the_solve_and_keeps_the_best_schedule(
    strategy: type[Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "step", fails)
    result = solved()
    assert result.status is Status.FEASIBLE
    assert result.schedule is not None and result.bound_s is not None
    assert "RuntimeError: no such choice" in result.message and "test_failures.py" in result.message


@pytest.mark.slow
def test_where_nothing_was_found_before_the_error_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Portfolio, "step", fails)
    monkeypatch.setattr(Search, "offer", lambda search, order, *_: try_out(search.problem, order))
    with pytest.raises(PlannerError, match="windows failed: looking for schedules failed: RuntimeError: no such choice"):
        plan(GRAPH, BUDGET, tolerance=0.0, time_limit_s=600.0, reorder=False)


@pytest.mark.slow
def test_a_plan_from_a_solve_that_failed_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Portfolio, "step", fails)
    with pytest.warns(SolverWarning, match="ended early, for looking for schedules failed: RuntimeError: no such choice"):
        found = plan(GRAPH, BUDGET, tolerance=0.0, time_limit_s=600.0)
    assert found.peak_bytes <= BUDGET


def answers_once_known(monkeypatch: pytest.MonkeyPatch, change: Callable[[Answer], Answer]) -> None:
    """Change what HiGHS says of relaxations when a schedule is known; meanwhile nobody looks for others."""
    began: list[bool] = []

    def waits(portfolio: Portfolio, limit: float) -> None:
        began.append(portfolio.search.incumbent.best is not None)
        while not portfolio.search.stopping.is_stopped():
            time.sleep(0.01)

    def answer(*args: Any, **options: Any) -> Answer:
        found = solve_program(*args, **options)
        return change(found) if any(began) else found

    monkeypatch.setattr(Portfolio, "step", waits)
    monkeypatch.setattr(refinement, "solve_program", answer)


def test_a_relaxation_that_refutes_a_known_schedule_ends_the_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_once_known(monkeypatch, lambda found: replace(found, outcome=Outcome.INFEASIBLE, values=None))
    result = solved()
    assert result.status is Status.FEASIBLE
    assert "relaxation is infeasible, though a schedule within the budget is known" in result.message


@pytest.mark.slow
def test_a_bound_above_a_known_schedule_ends_the_solve_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_once_known(monkeypatch, lambda found: replace(found, bound=10 * OBJECTIVE_SCALE))
    result = solved()
    assert result.status is Status.FEASIBLE
    assert "is above the time of a schedule within the budget" in result.message
    assert result.bound_s == GRAPH.time_s
