"""What a model only records of its tensors, with graph breaks where it does: as in eager PyTorch."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner


class Recording(nn.Module):
    """A model that records numbers of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.total, self.average, self.best = 0.0, 0.0, math.inf
        self.losses: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layers(x).square().mean()
        self.total += loss.item()
        self.average = 0.9 * self.average + 0.1 * loss.item()
        if loss.item() < self.best:
            self.best = loss.item()
        self.losses.append((f"{loss.item():.3f}", math.exp(loss.item()), loss.detach()))
        return loss * (1 + self.average)


def checkpoint(model: nn.Module) -> Callable[..., Any]:
    return planner.checkpoint(model, budget="100%")


def compile_by_backend(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="planner", options={"budget": "100%"})


@pytest.mark.filterwarnings("ignore:the model is captured as several graphs")
@pytest.mark.parametrize("plan", [checkpoint, compile_by_backend])
def test_what_a_model_records_is_as_in_eager_mode(plan: Callable[[nn.Module], Callable[..., Any]]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Recording(), torch.randn(8, 16)
    found = []
    for one in (copy.deepcopy(model), model):
        step = plan(one) if found else one
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            step(x).backward()
            optimizer.step()
        found.append(torch.utils._pytree.tree_leaves([one.total, one.average, one.best, one.losses, one.state_dict()]))
    for wanted, value in zip(*found, strict=True):
        assert torch.equal(wanted, value) if isinstance(wanted, torch.Tensor) else wanted == value
