"""Batches of varying sizes of which parts are computed in chunks: within the budget, and what may differ said at each size."""

import pytest
import torch

import planner
from graphs.options import remove_options
from graphs.simulate import simulate
from planner.capture.step import TrainingStep
from planner.measure.steps import measure_outcome
from planner.train.compile.dynamic import DynamicStep
from solvers.bounds import bound_least_budget
from tests.support.marks import slow
from tests.support.models.alternatives import CLASSES, in_chunks, make, schedule_with

Batch = tuple[torch.Tensor, torch.Tensor]


def batch(rows: int) -> Batch:
    return torch.randn(rows, 12), torch.randint(CLASSES, (rows,))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("exact", [True, *slow(False)])
def test_a_loss_head_is_in_chunks_at_each_size(*, exact: bool) -> None:
    torch.manual_seed(0)
    model, loss_fn, _ = make("smoothed")
    first = batch(64)
    graph = planner.trace(model, loss_fn, first, passes=1, options=["chunks"])
    budget = simulate(graph, schedule_with(graph, in_chunks(graph, 4))).peak_bytes
    assert budget < bound_least_budget(remove_options(graph)).budget_bytes  # so it takes chunks
    if exact:
        budget = simulate(graph, schedule_with(graph, ())).peak_bytes
    step = planner.compile(
        model, loss_fn, first, budget=budget, options=["chunks"], exact=exact, dynamic=True, passes=1, tolerance=0.5
    )
    assert isinstance(step, DynamicStep)
    for rows in (56, 72) if not exact else (56,):
        given = batch(rows)
        found = measure_outcome(step, model, given, seed=1)
        wanted = measure_outcome(TrainingStep(model, loss_fn), model, given, seed=1)
        assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
        if exact:
            assert (wanted.list_differences(found), step.plan.differs, step.plan.settings["exact"]) == ((), (), [])
            continue
        assert step.plan.differs[0].startswith("rounding: nll_loss_forward[0]")
        for name in wanted.list_differences(found):
            relative = wanted.compute_difference(name, found).relative
            assert relative is not None and relative < 2e-6, name
