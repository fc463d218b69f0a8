"""A small model, planned with a folder for plans."""

from pathlib import Path
from typing import Any

import torch

import planner
from planner.models import Workload, build


def workload(batch: int = 8) -> Workload:
    torch.manual_seed(0)
    return build("mlp", batch=batch, layers=2, width=16, classes=3)


def compiled(cache: Path, *, budget: str = "100%", batch: int = 8, **options: Any) -> planner.PlannedStep:
    return planner.compile(*workload(batch), budget=budget, passes=1, cache=cache, **options)
