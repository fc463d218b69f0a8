"""A model that calls one norm twice."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from planner.models import Workload


class Call(nn.Module):
    """A module whose forward pass is a function of itself and its inputs."""

    def __init__(self, forward: Callable[..., torch.Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.function(self, *inputs)


def classes(model: nn.Module, *inputs: Any) -> Workload:
    return Workload(model, F.cross_entropy, (*inputs, torch.randint(3, (24,))))


def norm_twice() -> Workload:
    model = Call(lambda m, x: m.b(m.norm(m.a(m.norm(m.a(x))))), norm=nn.BatchNorm1d(32), a=nn.Linear(32, 32), b=nn.Linear(32, 3))
    return classes(model, torch.randn(24, 32))
