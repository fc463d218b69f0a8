"""The budget holds: measured bytes of tensors and workspaces against the predicted ones."""

import pytest

from planner.capture.step import TrainingStep
from planner.measure.pool_memory import measure_peak
from planner.measure.run_plan import run
from planner.measure.tracing import profile_capture
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.budgets import on_the_way
from tests.support.marks import slow_except
from tests.support.models.steps import STEPS, capture_of, make, solve_for

QUICK = ("gpt2_sdpa", "tied", "frozen", "mutated", "shared_gradient")


@pytest.mark.parametrize("name", slow_except(STEPS, *QUICK))
def test_measured_peak_is_within_the_budget_and_as_predicted(name: str) -> None:
    workload = make(name)
    captured = profile_capture(capture_of(name), workload, PlanSettings(passes=1))
    step = TrainingStep(workload.model, workload.loss_fn)
    for budget in on_the_way(captured.graph, 1.0, 0.6, 0.3, 0.1):
        plan = solve_for(0.0, captured.graph, budget)
        executor = Executor(captured, plan.schedule, workload.model, workload.loss_fn)
        measured = measure_peak(captured, executor, step, workload.batch).peak_bytes
        assert measured <= budget
        assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    report = run(plan, *workload, repeats=1)
    assert report.measured_peak_bytes == measured
    assert report.identical
