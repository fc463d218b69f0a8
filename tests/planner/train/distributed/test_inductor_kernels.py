"""DDP on two processes over Inductor's kernels: one plan, and the gradients of DDP around a model by ``torch.compile``."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.models.parts import FunctionModule
from tests.support.distributed import on_two

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")


def with_loss() -> nn.Module:
    """A model that returns its loss, so that ``torch.compile`` compiles the same step."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16))
    return FunctionModule(lambda m, x, y: F.mse_loss(m.layers(x), y), layers=layers)


def check(rank: int) -> None:
    torch.manual_seed(0)
    planned, plain = DistributedDataParallel(with_loss()), with_loss()
    plain.load_state_dict(planned.module.state_dict())
    torch.manual_seed(rank)
    batch = torch.randn(64, 16), torch.randn(64, 16)
    step = planner.compile(planned, None, batch, budget="100%", kernels="inductor", passes=1)
    plans = [None, None]
    dist.all_gather_object(plans, (step.plan.schedule, step.plan.graph))
    assert plans[0] == plans[1] and step.plan.eager.identical
    compiled = torch.compile(plain, dynamic=False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (planned, plain)]
    for turn in range(3):
        losses = []
        for run in (step, compiled):
            torch.manual_seed(10 * rank + turn)
            losses.append(run(*batch))
            losses[-1].backward()
        assert torch.equal(*losses)
        for parameter in plain.parameters():  # what DDP does
            dist.all_reduce(parameter.grad.div_(2))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(planned.parameters(), plain.parameters(), strict=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_two_processes_train_by_one_plan(tmp_path: Path) -> None:
    on_two((check,), tmp_path)
