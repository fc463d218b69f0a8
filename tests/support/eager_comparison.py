"""Planned steps to compare with eager PyTorch, and a comparison that differs."""

import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.models import Workload, build
from planner.plans.eager import Difference, DifferingOp, EagerComparison


def gpt2() -> Workload:
    torch.manual_seed(0)
    return build("gpt2", layers=1, width=32, heads=2, vocab=61, seq=24, batch=4, dropout=0.1)


def plain() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    return Workload(model, F.cross_entropy, (torch.randn(8, 16), torch.randint(3, (8,))))


def compiled(workload: Workload, **options: object) -> planner.PlannedStep:
    return planner.compile(*workload, budget="100%", passes=1, **options)


DIFFERS = EagerComparison(
    differences=(
        Difference("loss", 0.5, 0.25),
        Difference("buffer mean"),
        *(Difference(f"gradient of {i}", 1e-7) for i in range(3)),
    ),
    first_op=DifferingOp("mm_3", "aten.mm.default", "h.0"),
    gradient_error=2e-6,
    eager_error=1e-7,
    peak_bytes=1000,
    time_s=0.01,
    planned_time_s=0.02,
)
