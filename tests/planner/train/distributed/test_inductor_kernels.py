"""DDP and FSDP2 on two processes over Inductor's kernels: one plan, and the averaged gradients of ``torch.compile``."""

import copy
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.models.parts import FunctionModule
from tests.support.distributed import on_processes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")


def with_loss() -> nn.Module:
    """A model that returns its loss, so that ``torch.compile`` compiles the same step."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16))
    return FunctionModule(lambda m, x, y: F.mse_loss(m.layers(x), y), layers=layers)


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.layers[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def get_whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(rank: int, wrap: Callable[[nn.Module], nn.Module], budget: str) -> None:
    torch.manual_seed(0)
    plain = with_loss()
    planned = wrap(copy.deepcopy(plain))
    torch.manual_seed(rank)
    batch = torch.randn(64, 16), torch.randn(64, 16)
    step = planner.compile(planned, None, batch, budget=budget, kernels="inductor", passes=1)
    plans = [None, None]
    dist.all_gather_object(plans, (step.plan.schedule, step.plan.graph))
    assert plans[0] == plans[1] and (step.plan.eager.identical or step.plan.eager.reference == "FSDP2")
    assert step.plan.measured_peak_bytes == step.plan.peak_bytes
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
        assert all(torch.equal(get_whole(a.grad), b.grad) for a, b in zip(planned.parameters(), plain.parameters(), strict=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_two_processes_train_by_one_plan(tmp_path: Path) -> None:
    with_fsdp2 = (partial(check, wrap=shard, budget=budget) for budget in ("100%", "85%"))
    on_processes(2, (partial(check, wrap=DistributedDataParallel, budget="100%"), *with_fsdp2), tmp_path)
