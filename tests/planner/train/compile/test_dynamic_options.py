"""Batches of varying sizes with options found in the step and parts in chunks: right at each size, and within the budget."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.step import TrainingStep
from planner.graphs.options import remove_options
from planner.graphs.options.selection import get_option_name
from planner.graphs.simulate import simulate
from planner.measure.steps import measure_outcome
from planner.solvers.bounds import bound_least_budget
from tests.support.budgets import between
from tests.support.marks import slow
from tests.support.models.alternatives import CLASSES, in_chunks, make, schedule_with

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


Batch = tuple[torch.Tensor, torch.Tensor]


def images(count: int) -> Batch:
    return torch.randn(count, 3, 16, 16), torch.randint(5, (count,))


@pytest.mark.parametrize("option", ["pack", *slow("in-place", "kernels")])
def test_an_option_goes_with_each_size(option: str) -> None:
    torch.manual_seed(0)
    found_in = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.GELU())
    model = nn.Sequential(found_in, nn.Dropout(0.3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 6 * 6, 5))
    budget = between(planner.trace(model, F.cross_entropy, images(32), passes=1))
    step = planner.compile(
        model, F.cross_entropy, images(32), budget=budget, options=[option], dynamic=True, passes=1, tolerance=0.5
    )
    for count in (28, 25):
        batch = images(count)
        found = measure_outcome(step, model, batch, seed=1)
        wanted = measure_outcome(TrainingStep(model, F.cross_entropy), model, batch, seed=1)
        assert step.plan.settings["options"] == [option]
        assert step.plan.measured_peak_bytes <= budget
        for name in wanted.list_differences(found):
            relative = wanted.compute_difference(name, found).relative
            assert step.plan.differs and relative < 2e-6, name
        graph, schedule = step.measured, step.plan.schedule
        if option == "in-place":
            assert sum(simulate(graph, schedule).memory_bytes) < sum(simulate(graph.out_of_place(), schedule).memory_bytes)
        else:
            assert any(op.optional and get_option_name(op) == option for op in graph.ops)


def points(rows: int) -> Batch:
    return torch.randn(rows, 12), torch.randint(CLASSES, (rows,))


@pytest.mark.parametrize("exact", [True, *slow(False)])
def test_a_loss_head_is_in_chunks_at_each_size(*, exact: bool) -> None:
    torch.manual_seed(0)
    model, loss_fn, _ = make("smoothed")
    first = points(64)
    graph = planner.trace(model, loss_fn, first, passes=1, options=["chunks"])
    budget = simulate(graph, schedule_with(graph, in_chunks(graph, 4))).peak_bytes
    assert budget < bound_least_budget(remove_options(graph)).budget_bytes  # so it takes chunks
    if exact:
        budget = simulate(graph, schedule_with(graph, ())).peak_bytes
    step = planner.compile(
        model, loss_fn, first, budget=budget, options=["chunks"], exact=exact, dynamic=True, passes=1, tolerance=0.5
    )
    for rows in (56, 72) if not exact else (56,):
        given = points(rows)
        found = measure_outcome(step, model, given, seed=1)
        wanted = measure_outcome(TrainingStep(model, loss_fn), model, given, seed=1)
        assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
        if exact:
            assert (wanted.list_differences(found), step.plan.differs, step.plan.settings["exact"]) == ((), (), [])
            continue
        assert step.plan.differs[0].startswith("rounding: nll_loss_forward[0]")
        for name in wanted.list_differences(found):
            relative = wanted.compute_difference(name, found).relative
            assert relative < 2e-6, name
