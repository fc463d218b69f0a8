"""Kernels that Inductor generates, given one memory for an input and an output: the bits that they make otherwise."""

import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.parts import FunctionModule
from planner.capture.kernels.in_place import _is_shared_by_threads
from planner.capture.kernels.variants import CompileVariant
from planner.capture.lowering.lower import Capture
from planner.capture.signature import detach_batch
from planner.capture.trace import capture_kernels
from planner.torch_private.inductor import CppScheduling, MemoryDep

pytestmark = [
    pytest.mark.usefixtures("fresh_compilers"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]


def pairs(after: Callable[[Tensor], Tensor]) -> list[tuple[str, str, str]]:
    """For each op that may write over an input its name, what it makes, and over what."""
    torch.manual_seed(0)
    step = FunctionModule(lambda m, x: after(x @ m.weight).square().sum(), weight=nn.Parameter(torch.ones(32, 32)))
    captured: Capture = capture_kernels(step, None, detach_batch((torch.randn(32, 32),)), variant=CompileVariant.DEFAULT)
    names = [tensor.name for tensor in captured.graph.tensors]
    calls = zip(captured.graph.ops, captured.program.calls, strict=True)
    return [(op.target, names[o], names[t]) for op, call in calls if call.launches for o, t, _ in call.over]


def test_elementwise_kernel_may_overwrite_its_input() -> None:
    # The product is read again, which is for a schedule to look at.
    found = [over for name, _, over in pairs(lambda h: torch.sin(h) @ h) if name.startswith("cpp_fused_sin")]
    assert found == ["extern_kernels.mm[0]"]


def test_softmax_kernel_may_overwrite_its_input() -> None:
    assert [name for name, _, _ in pairs(lambda h: F.softmax(h, 1) @ h) if "softmax" in name]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda h: (h + h.t()).matmul(h), id="its mirror image is read too"),
        pytest.param(lambda h: torch.flip(h, (0,)).matmul(h), id="backwards"),
        pytest.param(lambda h: torch.roll(h, 1, 1).matmul(h), id="moved on"),
        pytest.param(lambda h: h.sum(0, keepdim=True).expand(32, 32).sin().matmul(h), id="a sum of all rows"),
        pytest.param(lambda h: h.to(torch.float64).matmul(h.double()), id="another type"),
    ],
)
def test_an_element_that_is_read_elsewhere_is_not_written_over(after: Callable[[Tensor], Tensor]) -> None:
    forward = [(name, over) for name, _, over in pairs(after) if "cpp_fused" in name and over.startswith("extern_kernels.mm[")]
    assert forward == []


ROW, COLUMN = sympy.symbols("x r", integer=True)
MATRIX = MemoryDep("buf0", 4 * ROW + COLUMN, (ROW, COLUMN), (8, 4))
FLAT = MemoryDep("buf0", ROW, (ROW,), (32,))
ONE_PER_ROW = MemoryDep("buf1", ROW, (ROW,), (8,))


def node(*sizes: int, backend: object = None) -> Any:
    """A part of a kernel that makes so many elements, each of so many."""
    group = torch.device("cuda"), tuple(map(sympy.Integer, sizes))
    return SimpleNamespace(group=group, scheduler=SimpleNamespace(get_backend=lambda _: backend), get_device=lambda: group[0])


@pytest.mark.parametrize(
    ("read", "kernel", "shared"),
    [
        (FLAT, [node(32, 1)], False),
        (MATRIX, [node(8, 4)], False),
        (MATRIX, [node(8, 4), node(32, 1), node(8, 1)], False),
        (ONE_PER_ROW, [node(8, 1)], False),
        (ONE_PER_ROW, [node(8, 4)], True),
        (ONE_PER_ROW, [node(8, 1), node(32, 1)], True),
    ],
)
def test_inputs_shared_by_gpu_threads_are_not_overwritten(read: MemoryDep, kernel: list[Any], shared: bool) -> None:
    """Inductor emits a barrier where it writes over such an input; a kernel that two pointers are given of has none."""
    assert _is_shared_by_threads(read, kernel) is shared


def test_rows_on_the_cpu_are_not_shared_by_threads() -> None:
    backend = CppScheduling.__new__(CppScheduling)
    assert not _is_shared_by_threads(ONE_PER_ROW, [node(8, 4, backend=backend)])
