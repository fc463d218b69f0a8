"""Kernels that Inductor generates, given one memory for an input and an output: the bits that they make otherwise."""

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.capture.kernels.variants import Variant
from graphs.capture.lower import Capture
from graphs.capture.program import Launches
from graphs.capture.signature import as_leaves
from graphs.capture.trace import capture_kernels

pytestmark = [
    pytest.mark.usefixtures("fresh_compilers"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]


class Step(nn.Module):
    """A product, what `after` makes of it, and a loss."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x @ self.weight).square().sum()


def pairs(after: Callable[[Tensor], Tensor]) -> list[tuple[str, str, str]]:
    """For each op that may write over an input its name, what it makes, and over what."""
    torch.manual_seed(0)
    captured: Capture = capture_kernels(Step(after), None, as_leaves((torch.randn(32, 32),)), variant=Variant.DEFAULT)
    names = [tensor.name for tensor in captured.graph.tensors]
    calls = zip(captured.graph.ops, captured.program.calls, strict=True)
    return [(op.target, names[o], names[t]) for op, call in calls if isinstance(call, Launches) for o, t, _ in call.over]


def test_an_element_is_written_where_it_was_read() -> None:
    # The product is read again, which is for a schedule to look at.
    found = [over for name, _, over in pairs(lambda h: torch.sin(h) @ h) if name.startswith("cpp_fused_sin")]
    assert found == ["extern_kernels.mm[0]"]


def test_a_row_is_read_before_it_is_written() -> None:
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
