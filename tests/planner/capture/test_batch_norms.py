"""Capture of batch norms with cuDNN's kernels, which CPU kernels replace under the same names."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from planner.capture.rewrites import batch_norms
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.measure.tracing import profile_capture
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from planner.torch_private.core import DispatchKey, register_python_kernels, scoped_library
from tests.support.budgets import HALF_WAY, half_way_known, on_the_way
from tests.support.marks import slow
from tests.support.models.outcomes import assert_equal_steps, assert_exact
from tests.support.models.steps import random_schedule

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def chosen_on_cuda() -> Iterator[list[bool]]:
    """Let batch norms call on the CPU what they call on CUDA where there is cuDNN.

    Yields:
        For each call of ``call_cudnn_batch_norm``, which has a kernel on CUDA only, True if it read running statistics.
    """
    calls: list[bool] = []

    def cpu_kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        calls.append(mean is not None)
        out, mean, scale = aten.native_batch_norm.default(x, weight, bias, mean, *args)
        return out, mean, scale, torch.empty(0, dtype=torch.uint8)

    def native_batch_norm(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return batch_norms.call_cudnn_batch_norm(*args)[:3]

    with (
        register_python_kernels(aten.native_batch_norm.default, {DispatchKey.Autograd: native_batch_norm}),
        scoped_library("aten", "IMPL") as library,
    ):
        library.impl("cudnn_batch_norm", cpu_kernel, "CPU")
        yield calls


def _twice(norm: nn.Module) -> FunctionModule:
    return FunctionModule(lambda m, x: m.b(m.norm(m.a(m.norm(m.a(x))))), norm=norm, a=nn.Linear(32, 32), b=nn.Linear(32, 3))


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3)])
@pytest.mark.parametrize(
    ("norm", "training", "targets"),
    [
        (nn.BatchNorm1d(32), True, ("aten._batch_norm_with_update_functional.default", "aten.batch_norm_backward.default")),
        (nn.BatchNorm1d(32), False, ("aten.cudnn_batch_norm.default", "aten.native_batch_norm_backward.default")),
        (
            nn.BatchNorm1d(32, track_running_stats=False),
            True,
            ("aten.cudnn_batch_norm.default", "aten.cudnn_batch_norm_backward.default"),
        ),
    ],
)
def test_eager_kernel_is_captured(norm: nn.Module, training: bool, targets: tuple[str, str], seed: int) -> None:
    torch.manual_seed(0)
    model = _twice(copy.deepcopy(norm)).train(training)
    batch = (torch.randn(24, 32), torch.randint(3, (24,)))
    captured = capture(model, F.cross_entropy, batch)
    called = {op.target for op in captured.graph.ops if "batch_norm" in op.target}
    assert called == set(targets)
    if targets[1] == "aten.cudnn_batch_norm_backward.default":
        return  # no such kernel on the CPU
    captured = profile_capture(captured, Workload(model, F.cross_entropy, batch), PlanSettings())
    planned = Executor(captured, random_schedule(captured.graph, seed), model, F.cross_entropy)
    assert_exact(planned, model, batch, F.cross_entropy)


def test_torch_compile_recomputes_without_running_statistics(chosen_on_cuda: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    # So little that batch norms are recomputed, whatever the ops were measured to take.
    monkeypatch.setattr("tests.support.budgets.between", lambda graph: on_the_way(graph, 0.05)[0])
    torch.manual_seed(0)
    norms = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8))))
    model, x = nn.Sequential(norms, nn.Linear(8, 1)), torch.randn(512, 8)
    twin = copy.deepcopy(model)
    with half_way_known():
        assert_equal_steps(torch.compile(twin, backend="planner", options={"budget": HALF_WAY}), twin, model, x)
    assert chosen_on_cuda  # some are recomputed
    assert not any(chosen_on_cuda)
