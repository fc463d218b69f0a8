"""Both passes of a step, as Inductor compiles them."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile

from benchmarks.models.parts import FunctionModule
from planner.capture.kernels.variants import CompileVariant
from planner.capture.signature import detach_batch
from planner.capture.trace import capture_kernels

pytestmark = [
    pytest.mark.usefixtures("fresh_compilers"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]


def step_forward(m: Any, x: Tensor) -> Tensor:
    """A product that two kernels read, and a table that is part of what is compiled."""
    table = torch.tensor([0.5, 2.0, 1.0, 4.0] * 8)
    return ((x @ m.weight).sin() @ m.weight * table).square().sum()


def test_kernels_are_those_that_the_compiled_step_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that tunes itself must be one for both, or two copies of it may make other bits."""
    loaded: list[str] = []
    called: list[str] = []
    load = AsyncCompile.cpp_pybinding

    def kernel(self: AsyncCompile, *args: Any, **options: Any) -> Any:
        made, number = load(self, *args, **options), len(loaded)
        loaded.append(f"kernel {number}")

        def run(*given: Any) -> None:
            called.append(f"kernel {number}")
            (made.result() if hasattr(made, "result") else made)(*given)

        return run

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", kernel)
    model, batch = FunctionModule(step_forward, weight=nn.Parameter(torch.ones(32, 32))), detach_batch((torch.randn(32, 32),))
    captured = capture_kernels(model, None, batch, variant=CompileVariant.DEFAULT)
    captured.whole(*batch).backward()
    assert set(called) == set(loaded)
    kernels = [value for value in captured.program.names.values() if getattr(value, "__name__", "") == "run"]
    assert len(kernels) == len(loaded)
