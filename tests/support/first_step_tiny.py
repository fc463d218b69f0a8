"""A model for ``benchmarks.first_step`` that is planned and trained in seconds, in processes that import it from here."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.first_step_cases import FirstStepCase, checkpoint_by_blocks
from planner.capture.workload.models import Workload

NAME = "tiny"


def blocks() -> Workload:
    """Wide activations and few operations: what is capped is more than planning itself takes."""
    parts = [nn.Sequential(nn.PReLU(), nn.PReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(1, 2048), *parts, nn.Linear(2048, 1))
    return Workload(model, F.mse_loss, (torch.randn(4096, 1), torch.randn(4096, 1)))


TINY = {NAME: FirstStepCase.of(blocks, checkpoint_by_blocks, share=0.3, steps=2)}
