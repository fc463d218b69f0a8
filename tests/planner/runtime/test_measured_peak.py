"""The budget holds: measured bytes of tensors and workspaces against the predicted ones."""

import pytest

from graphs.capture.step import TrainingStep
from graphs.capture.trace import capture
from graphs.cost.profile import profile
from planner.api import run
from planner.solving import summarize
from solvers.clock import WallClock
from solvers.least import least_budget
from tests.support.steps import STEPS, make, solve_for


@pytest.mark.parametrize("name", STEPS)
def test_measured_peak_is_within_the_budget_and_as_predicted(name: str) -> None:
    workload = make(name)
    graph = profile(capture(*workload), TrainingStep(workload.model, workload.loss_fn), workload.batch, passes=1)
    peak, least = summarize(graph).store_all_peak_bytes, least_budget(graph, clock=WallClock(2.0)).found_bytes
    for share in (1.0, 0.6, 0.3, 0.1):
        plan = solve_for(2.0, graph, int(least + share * (peak - least)))
        report = run(plan, *workload, repeats=1)
        assert report.measured_peak_bytes <= plan.budget_bytes
        assert abs(report.measured_peak_bytes - plan.peak_bytes) <= 0.01 * plan.peak_bytes
        assert report.identical
