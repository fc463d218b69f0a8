"""A plan says why its solve ended, how long all of it took, and is optimal only if its gap is small."""

import itertools
from dataclasses import replace

import pytest

import planner
from graphs.errors import MismatchError
from graphs.synthetic.random_graphs import draw_training_step
from planner.plans.document import plan_to_dict
from planner.plans.plan import plan_from_dict
from planner.show.report.describe import plan_data, plan_text
from solvers import clock
from solvers.result import Ending, Status
from solvers.windows import driver
from solvers.windows.strategies.first_schedules import EvictionRules, KeepEverything
from tests.support.budgets import budget_at

# Takes minutes to be solved to the last bit.
GRAPH = draw_training_step(2, 80)
BUDGET = budget_at(GRAPH, 0.25)


def test_a_gap_within_a_wide_tolerance_is_not_called_optimal() -> None:
    plan = planner.solve(GRAPH, BUDGET, tolerance=5.0, work_limit=5.0, reorder=False)
    assert 1e-3 < plan.gap <= 5.0
    assert plan.status is Status.WITHIN
    said = f"{plan}\n{plan_text(plan)}"
    assert "optimal" not in said and "the gap is within the tolerance" in said and "tolerance 500%" in said
    assert planner.solve(GRAPH, "100%", tolerance=5.0, reorder=False).status is Status.OPTIMAL  # nothing is recomputed


def test_the_status_follows_from_gap_and_tolerance() -> None:
    plan = planner.solve(GRAPH, BUDGET, tolerance=5.0, work_limit=5.0, reorder=False)
    close = replace(plan, bound_s=plan.time_s / 1.0005)
    assert close.status is Status.OPTIMAL
    assert replace(close, settings={**close.settings, "tolerance": 1e-4}).status is Status.FEASIBLE
    assert replace(close, bound_s=plan.time_s / 7).status is Status.FEASIBLE
    assert replace(close, bound_s=None).status is Status.FEASIBLE
    written = plan_to_dict(plan)
    assert written["status"] == "within tolerance" and plan_from_dict(written).status is Status.WITHIN
    with pytest.raises(MismatchError, match=r"says that it is within tolerance, but its gap of .* is over the tolerance"):
        plan_from_dict({**written, "bound_s": plan.time_s / 7})


def test_a_solve_that_reaches_its_limit_says_so() -> None:
    plan = planner.solve(GRAPH, BUDGET, tolerance=0.0, work_limit=0.5, reorder=False)
    assert (plan.status, plan.ended) == (Status.FEASIBLE, Ending.LIMIT)
    assert "the limit was reached: a longer one may lower the gap" in plan_text(plan)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert plan_data(plan)["ended"] == "limit"


def test_a_solve_that_is_stopped_says_so() -> None:
    found: list[object] = []
    plan = planner.solve(
        GRAPH, BUDGET, tolerance=0.0, work_limit=100.0, reorder=False, on_plan=found.append, should_stop=lambda: bool(found)
    )
    assert (plan.status, plan.ended) == (Status.FEASIBLE, Ending.STOPPED)
    assert "it was stopped early" in str(plan)


def test_a_solve_with_nothing_left_to_try_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(stage for stage in driver.STAGES if stage.strategy in (KeepEverything, EvictionRules))
    monkeypatch.setattr(driver, "STAGES", few)
    plan = planner.solve(GRAPH, BUDGET, tolerance=0.0, work_limit=100.0, reorder=False)
    assert (plan.status, plan.ended) == (Status.FEASIBLE, Ending.EXHAUSTED)
    assert "nothing was left to try: more time is of no use" in plan_text(plan)


def test_the_seconds_are_those_of_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(clock.time, "monotonic", lambda: float(next(ticks)))
    began = next(ticks)
    plan = planner.solve(GRAPH, None, max_overhead=0.2, tolerance=0.5, work_limit=2.0, reorder=False)  # several solves
    assert next(ticks) - began - 3 <= plan.seconds < next(ticks) - began
