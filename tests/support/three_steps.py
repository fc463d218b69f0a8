"""Three steps by a plan beside three of eager PyTorch."""

from typing import Any

import torch
from torch import nn

from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.runtime.executor import Executor
from planner.runtime.measure import outcome
from tests.support.steps import random_schedule


def executor(model: nn.Module, batch: Batch, loss_fn: Any = None) -> Executor:
    captured = capture(model, loss_fn, batch)
    return Executor(captured, random_schedule(captured.graph, 1), model, loss_fn)


def check_three_steps(model: nn.Module, batch: Batch, loss_fn: Any = None) -> Executor:
    """Three steps of a plan equal eager PyTorch's to the last bit, as parameters change."""
    planned, eager = executor(model, batch, loss_fn), TrainingStep(model, loss_fn)
    for seed in range(3):
        found = outcome(eager, model, batch, seed=seed).differences(outcome(planned, model, batch, seed=seed))
        # wav2vec2 makes its input's view a leaf (requires_grad = True), whose gradient nobody can read.
        assert [name for name in found if "outside the model" not in name] == []
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
    return planned
