"""Residual blocks with dropout, and a model of some, to be trained and checkpointed."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import Residual
from planner.capture.workload.models import Workload


def mlp_block(width: int) -> Residual:
    """What a layer of a transformer does after its attention."""
    return Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))


def blocks() -> Workload:
    layers = [Residual(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(3)]
    return Workload(nn.Sequential(*layers), F.mse_loss, (torch.randn(64, 16), torch.randn(64, 16)))
