"""Training by a plan beside training in eager PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import planner
from planner.capture.step import TrainingStep
from planner.graphs.schedule import Compute
from tests.support.budgets import HALF_WAY, half_way_known
from tests.support.models.outcomes import assert_same, train_by

STEPS = 4


class Together(nn.Module):
    """Returns the sum of what several models return for the same batch: one step with all that each of them does."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *batch: Any) -> torch.Tensor:
        return torch.stack([part(*batch) for part in self.parts]).sum(0)


def check_trains_as_eager(
    make: Callable[[], nn.Module], loss_fn: Any, batch_of: Callable[[int], tuple[Any, ...]], **options: Any
) -> planner.PlannedStep:
    """Train two models from `make` on the same batches, one by a plan below the peak, and compare all that the steps leave.

    Args:
        batch_of: the batch of a step, by its number.
        options: of ``planner.compile``.
    """
    torch.manual_seed(11)
    planned = make()
    torch.manual_seed(11)
    eager = make()
    with half_way_known():
        step = planner.compile(planned, loss_fn, batch_of(0), budget=HALF_WAY, passes=1, wait="5%", swap="never", **options)
    executed = [each.op for each in step.plan.schedule.steps if isinstance(each, Compute)]
    assert len(executed) > len(set(executed)), "nothing is recomputed"
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
    assert step.plan.eager is None or step.plan.eager.differences == ()
    ways: tuple[tuple[Callable[..., Any], nn.Module], ...] = (step, planned), (TrainingStep(eager, loss_fn), eager)
    assert_same(*(train_by(run, model, map(batch_of, range(STEPS))) for run, model in ways))
    return step
