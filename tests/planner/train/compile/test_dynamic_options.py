"""Batches of varying sizes with options that are found in the step: offered and right at each size, and within the budget."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from graphs.options.selection import get_option_name
from graphs.simulate import simulate
from planner.capture.step import TrainingStep
from planner.measure.steps import measure_outcome
from planner.train.compile.dynamic import DynamicStep
from tests.support.budgets import between
from tests.support.marks import slow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
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
    assert isinstance(step, DynamicStep)
    for count in (28, 25):
        batch = images(count)
        found = measure_outcome(step, model, batch, seed=1)
        wanted = measure_outcome(TrainingStep(model, F.cross_entropy), model, batch, seed=1)
        assert step.plan.settings["options"] == [option]
        assert step.plan.measured_peak_bytes <= budget
        for name in wanted.list_differences(found):
            relative = wanted.compute_difference(name, found).relative
            assert step.plan.differs and relative is not None and relative < 2e-6, name
        graph, schedule = step.measured, step.plan.schedule
        assert graph is not None
        if option == "in-place":
            assert sum(simulate(graph, schedule).memory_bytes) < sum(simulate(graph.out_of_place(), schedule).memory_bytes)
        else:
            assert any(op.optional and get_option_name(op) == option for op in graph.ops)
