"""The exact solver on its way: progress, stops, limits of time and memory; failures are said, and cost no schedule."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.graphs.errors import PlannerError, SolverWarning
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.plans.solve import solve as plan
from planner.solvers.highs import solve_program
from planner.solvers.highs.program import Answer, Outcome
from planner.solvers.memory import give_back, read_resident_bytes
from planner.solvers.problem import OBJECTIVE_SCALE
from planner.solvers.registry import SOLVERS, get_solver
from planner.solvers.result import Result, SolveProgress, Status
from planner.solvers.windows import solve
from planner.solvers.windows.decoding.decode import try_out
from planner.solvers.windows.params import BoundParams, WindowsParams
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies import refinement
from planner.solvers.windows.strategies.first_schedules import Imitation
from planner.solvers.windows.strategies.portfolio import Portfolio
from planner.solvers.windows.strategies.strategy import Strategy
from tests.support.budgets import budget_at, peak_bytes
from tests.support.marks import slow
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
        while not portfolio.search.stopping.poll_stop():
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


def test_progress_only_gets_better() -> None:
    seen: list[SolveProgress] = []
    graph = draw_training_step(3, 30)
    result = solve(ask(graph, peak_bytes(graph) * 6 // 10, time_limit_s=60, on_progress=seen.append))
    assert seen
    best = [p.best_s for p in seen if p.best_s is not None]
    bounds = [p.bound_s for p in seen if p.bound_s is not None]
    assert best == sorted(best, reverse=True)
    assert bounds == sorted(bounds)
    assert best[-1] == result.time_s
    assert all(p.seconds <= result.seconds for p in seen)
    assert all(p.activity for p in seen)


def test_a_stop_gives_the_best_so_far() -> None:
    graph = draw_training_step(5, 60)
    best: list[float] = []

    def note(progress: SolveProgress) -> None:
        if progress.best_s is not None:
            best.append(progress.best_s)

    result = solve(
        ask(
            graph, peak_bytes(graph) * 4 // 10, tolerance=0.0, time_limit_s=3600, on_progress=note, should_stop=lambda: bool(best)
        )
    )
    assert result.status is Status.FEASIBLE
    assert result.time_s <= best[0]


def test_a_stop_before_anything_is_found() -> None:
    graph = make_training_chain(30)
    result = solve(ask(graph, 5, should_stop=lambda: True))
    assert result.status is Status.LIMIT
    assert "Raise the time limit or the budget" in result.message


def test_a_time_limit_that_has_passed() -> None:
    assert solve(ask(make_training_chain(30), 5, time_limit_s=1e-9)).status is Status.LIMIT


def test_without_memory_to_grow_there_is_still_a_schedule() -> None:
    params = WindowsParams(bound=BoundParams(most_bytes=0))
    graph = transformer(TransformerSize(layers=2))
    budget = int(0.7 * peak_bytes(graph))
    result = solve(ask(graph, budget, time_limit_s=3, params=params))
    assert simulate(graph, result.schedule).peak_bytes <= budget


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not say")
def test_resident_bytes_follow_allocations() -> None:
    before = read_resident_bytes()
    block = np.ones(10_000_000)
    assert 60_000_000 < read_resident_bytes() - before < 200_000_000
    del block
    give_back()
    assert read_resident_bytes() - before < 40_000_000


@pytest.mark.parametrize("share", [7, *slow(9, 6)])
def test_no_other_method_is_faster_even_where_time_is_short(share: int) -> None:
    graph = transformer(TransformerSize(layers=4))
    budget = peak_bytes(graph) * share // 10
    search = Search.of(ask(graph, budget, tolerance=0.0, time_limit_s=60.0))
    Imitation(search).step(60.0)
    # Programs take as long as they are let.
    policies = [name for name, entry in SOLVERS.items() if name != "windows" and not entry.large_programs]
    times = [get_solver(name)(ask(graph, budget)).time_s for name in policies]
    assert search.incumbent.best_trial.peak_bytes <= budget
    assert search.incumbent.best_trial.time_s <= min(time_s for time_s in times if time_s is not None)
