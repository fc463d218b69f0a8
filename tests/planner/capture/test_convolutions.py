"""Convolutions are not recomputed where cuDNN chooses their algorithm by timing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.kernels.variants import CompileVariant
from planner.capture.rewrites import convolutions
from planner.capture.trace import capture, capture_kernels
from planner.graphs.ir import Graph
from tests.support.raised_warnings import raise_warnings


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3))


def _captured() -> Graph:
    return capture(_model(), F.mse_loss, (torch.randn(2, 3, 8, 8), torch.randn(2, 4, 4, 4))).graph


def _recomputable(graph: Graph) -> list[bool]:
    return [op.recomputable for op in graph.ops if op.target == "aten.convolution.default"]


def test_convolutions_chosen_by_timing_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.warns(UserWarning, match=r"cudnn.benchmark is True: .* 2 convolutions are not recomputed"):
        assert _recomputable(_captured()) == [False, False]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with raise_warnings(UserWarning):
        assert _recomputable(_captured()) == [True, True]


def test_flag_has_no_effect_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert _recomputable(_captured()) == [True, True]


@pytest.mark.slow
def test_convolutions_between_inductor_kernels_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    batch = (torch.randn(2, 3, 8, 8), torch.randn(2, 4, 4, 4))
    with pytest.warns(UserWarning, match="2 convolutions are not recomputed"):
        graph = capture_kernels(_model(), F.mse_loss, batch, variant=CompileVariant.DEFAULT).graph
    assert not any(op.recomputable for op in graph.ops if op.target == "extern_kernels.convolution")
