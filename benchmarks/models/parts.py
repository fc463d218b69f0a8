"""Parts shared by the handwritten models."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.workload.models import Workload

Layers = list[nn.Module]


class FunctionModule(nn.Module):
    """A module whose forward pass is a function of itself and its inputs; it has `parts` as attributes."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def classification(model: nn.Module, x: torch.Tensor, classes: int = 10) -> Workload:
    return Workload(model, F.cross_entropy, (x, torch.randint(classes, (len(x),))))


def next_tokens(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm, nn.ReLU(inplace=True))


class Residual(nn.Module):
    """A sum of the input and the output of its layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)
