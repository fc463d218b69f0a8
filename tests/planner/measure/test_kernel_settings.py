"""Settings that select kernels."""

from collections.abc import Callable

import pytest
import torch

from planner.measure.kernel_settings import collect_kernel_settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _set_precision(_: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("high")


def _allow_tf32(_: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


@pytest.mark.parametrize(
    ("change", "device"),
    [
        (_set_precision, CPU),
        (_set_precision, CUDA),
        (_allow_tf32, CUDA),
        (lambda patch: patch.setattr(torch.backends.cudnn, "allow_tf32", False), CUDA),
        (lambda patch: patch.setattr(torch.backends.cudnn, "deterministic", True), CUDA),
        (lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True), CUDA),
        (lambda patch: patch.setattr(torch.backends.cudnn, "enabled", False), CUDA),
        (lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8"), CUDA),
        (lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"), CPU),
    ],
)
def test_each_setting_is_recorded(
    change: Callable[[pytest.MonkeyPatch], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = torch.get_float32_matmul_precision()
    before = collect_kernel_settings(device)
    try:
        change(monkeypatch)
        assert collect_kernel_settings(device) != before
    finally:
        monkeypatch.undo()
        torch.set_float32_matmul_precision(precision)


def test_deterministic_algorithms_are_recorded() -> None:
    before = collect_kernel_settings(CPU)
    torch.use_deterministic_algorithms(True)
    try:
        assert collect_kernel_settings(CPU) != before
    finally:
        torch.use_deterministic_algorithms(False)
