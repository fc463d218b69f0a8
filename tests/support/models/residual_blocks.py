"""A model of residual blocks with dropout, to be trained and checkpointed."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import Residual
from planner.capture.workload.models import Workload


def blocks() -> Workload:
    layers = [Residual(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(3)]
    return Workload(nn.Sequential(*layers), F.mse_loss, (torch.randn(64, 16), torch.randn(64, 16)))
