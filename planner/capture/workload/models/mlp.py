"""A multilayer perceptron."""

import torch
from torch import nn

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import compute_class_loss, create_tensors_in


def mlp(
    *,
    batch: int = 1024,
    layers: int = 8,
    width: int = 4096,
    classes: int = 1000,
    dropout: float = 0.1,
    dtype: str = "float32",
    device: str = "cpu",
) -> Workload:
    """Build `layers` hidden layers of `width` units with ReLU and dropout, then a classifier."""
    with create_tensors_in(dtype, device):
        blocks: list[nn.Module] = []
        for _ in range(layers):
            blocks += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)]
        model = nn.Sequential(*blocks, nn.Linear(width, classes))
        return Workload(model, compute_class_loss, (torch.randn(batch, width), torch.randint(classes, (batch,))))
