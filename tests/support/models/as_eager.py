"""Training by a plan beside training in eager PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import planner
from graphs.schedule import Compute
from planner.capture.step import TrainingStep
from tests.support.budgets import HALF_WAY, half_way_known

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
    plain = TrainingStep(eager, loss_fn)
    found, wanted = (_trained(run, model, batch_of) for run, model in ((step, planned), (lambda *batch: plain(*batch)[0], eager)))
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []
    return step


def _trained(run: Callable[..., Any], model: nn.Module, batch_of: Callable[[int], tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    left: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        loss = run(*batch_of(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left[f"loss {number}"] = loss.detach()
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return left | {name: _dense(value.detach()) for name, value in values.items()}


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value if value.layout is torch.strided else value.to_dense()
