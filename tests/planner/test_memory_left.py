"""Planning leaves nothing in memory: what stays would count for the budgets of later steps in the process."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture import checksum
from planner.measure import synthetic_inputs

_FEW_BYTES = 1024  # constants that PyTorch's caches keep


def compile_step(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return planner.compile(model, None, (x,), budget="100%", time_limit_s=5)


def checkpoint(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return planner.checkpoint(model, budget="100%", time_limit_s=5)


def backend(model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return torch.compile(model, backend="planner", options={"budget": "100%", "time_limit_s": 5})


def tensor_bytes() -> int:
    """Return the bytes of all tensors on the CPU."""
    gc.collect()
    found = [value for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found if t.device.type == "cpu"}.values())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", [compile_step, checkpoint, backend])
def test_a_planned_step_leaves_no_tensors(plan: Callable[..., Callable[..., Any]], dtype: torch.dtype) -> None:
    for made in (synthetic_inputs._build_random_block, checksum._build_weights):
        made.cache_clear()
    before = tensor_bytes()
    layers = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32)).to(dtype)
    model, x = FunctionModule(lambda m, x: m.layers(x).square().mean(), layers=layers), torch.randn(16, 32, dtype=dtype)
    step = plan(model, x)
    step(x).backward()
    del model, layers, x, step
    torch._dynamo.reset()
    assert tensor_bytes() - before < _FEW_BYTES
