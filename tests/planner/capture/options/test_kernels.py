"""Which ops of which steps may be computed by other kernels, and graphs that hold such ops."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from graphs.errors import UsageError
from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.ir import Op
from graphs.options import remove_options
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.options.traced import add_traced
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.measure import tracing
from planner.settings.plan import PlanSettings
from planner.torch_private.core import FakeTensorMode
from tests.support.models.alternatives import make


def with_kernels(workload: Workload, *, as_on_cuda: bool = False) -> Capture:
    return add_traced(capture(*workload, as_on_cuda=as_on_cuda), ["kernels"])


def rows(found: Capture) -> list[list[str]]:
    """Of the ops that each row of ops in place stands for, without ``aten`` and the overload."""
    graph = found.graph
    ops = [op for op in graph.ops if op.target == "kernels.in_place"]
    return [[graph.ops[p].target.split(".")[1] for p in op.replaces] for op in ops]


def ways(found: Capture, name: str) -> list[str]:
    """By which ways else the op `name` may be computed."""
    op = next(op for op in found.graph.program if op.name == name)
    return [other.target.split(".")[1] for other in found.graph.ops if op.id in other.replaces]


def image_step(layer: nn.Module) -> Workload:
    return Workload(nn.Sequential(layer, nn.Tanh()), nn.MSELoss(), (torch.randn(2, 4, 9, 9), torch.randn(2, 8, 7, 7)))


def test_convolution_has_an_optional_op_per_supported_kernel() -> None:
    found = with_kernels(image_step(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3))))
    assert ways(found, "convolution_1") == ["native", "onednn", "channels_last", "in_place"]
    assert ways(found, "convolution_backward") == ["weight", "native", "channels_last"]
    assert ways(found, "convolution_backward_1") == ["native", "channels_last"]  # the first layer's: no gradient of its input


def test_a_roofline_has_the_same_time_for_all_kernels_of_a_convolution() -> None:
    graph = tracing.trace(
        *image_step(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3))), roofline="h200", options=["kernels"]
    )
    left_out = graph.provenance["left_out"]
    assert isinstance(left_out, list)
    assert {"convolution_1_native", "convolution_1_channels_last", "convolution_backward_native"} <= set(left_out)


@pytest.mark.parametrize("how", [{"groups": 2}, {"dilation": 1, "groups": 4}])
def test_only_plain_ones_have_a_native_kernel(how: dict[str, int]) -> None:
    found = with_kernels(image_step(nn.Conv2d(4, 8, 3, **how)))
    assert ways(found, "convolution") == ["onednn", "channels_last", "in_place"]


@pytest.mark.slow
def test_rows_of_ops_in_place_go_as_far_as_nobody_else_reads() -> None:
    assert ["bmm", "div", "masked_fill", "_softmax"] in rows(with_kernels(make("attention")))
    head = rows(with_kernels(build("gpt2", layers=1, width=32, heads=2, vocab=100, seq=8, batch=2, dropout=0.0)))
    assert ["mm", "_log_softmax"] in head and ["nll_loss_backward", "_log_softmax_backward_data"] in head


@pytest.mark.parametrize(
    ("function", "forward"),
    [
        (lambda y: torch.log_softmax(y, 1), [["addmm", "_log_softmax"]]),
        (lambda y: torch.log_softmax(y, 0), []),  # not by rows
        (lambda y: torch.log_softmax(y, 1) + y, []),  # read by both, and the backward pass reads what is between
        (lambda y: y + 2.0, [["addmm", "add"]]),
        (lambda y: torch.sigmoid(y[:, :3]), []),  # a part of it
        (lambda y: F.dropout(y, 0.5) + 1.0, []),  # drawn
        (lambda y: (y + y) * 2.0, [["add", "mul"]]),  # read twice
    ],
)
def test_tensors_read_elsewhere_are_not_overwritten(function: Callable[[torch.Tensor], torch.Tensor], forward: list[str]) -> None:
    model = FunctionModule(lambda m, x: function(m.layer(x)).sum(), layer=nn.Linear(6, 6))
    found = with_kernels(Workload(model, None, (torch.randn(5, 6),)))
    graph = found.graph
    kinds = [row for row in rows(found) if row[0] in ("addmm", "_log_softmax", "add")]
    assert kinds == forward
    for op in graph.ops:
        if op.target == "kernels.in_place":
            inside = {t for p in op.replaces[:-1] for t in graph.ops[p].outputs}
            assert inside.isdisjoint((*op.inputs, *op.outputs, *graph.kept))


def attention_step(dtype: torch.dtype, **how: object) -> Workload:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        query, key, value = m.layer(x).view(2, 40, 2, 96).transpose(1, 2).split(32, 3)
        return F.scaled_dot_product_attention(query, key, value, **how).float().sum()

    with FakeTensorMode():
        model = FunctionModule(forward, layer=nn.Linear(64, 192, dtype=dtype))
        return Workload(model, None, (torch.empty(2, 40, 64, dtype=dtype),))


def test_attention_is_written_out_or_by_the_other_fused_kernel_of_cuda() -> None:
    found = with_kernels(attention_step(torch.bfloat16, is_causal=True), as_on_cuda=True)
    flash = "_scaled_dot_product_flash_attention"
    assert ways(found, flash) == ["math", "efficient"] and ways(found, f"{flash}_backward") == ["math", "efficient"]
    forward, backward = (op for op in found.graph.ops if op.target == "kernels.efficient")
    (kept,) = {t for t in forward.outputs if len(found.graph.tensors) - 1 == t}
    assert kept in backward.inputs and found.graph.tensors[kept].shape == (2, 2, 64)  # rows of 40, padded
    assert found.graph.tensors[kept].producers == (forward.id,)

    found = with_kernels(attention_step(torch.float32, is_causal=True), as_on_cuda=True)
    efficient = "_scaled_dot_product_efficient_attention"
    assert ways(found, efficient) == ways(found, f"{efficient}_backward") == ["math"]  # flash attention takes halves
    dropping = with_kernels(attention_step(torch.bfloat16, dropout_p=0.1), as_on_cuda=True)
    assert not [op for op in dropping.graph.ops if op.target in ("kernels.math", "kernels.efficient")]


def test_roofline_keeps_kernels_with_less_memory() -> None:
    with FakeTensorMode():
        workload = build("gpt2", layers=1, width=64, heads=2, vocab=5000, seq=64, batch=8, dropout=0.0)
    graph = tracing.trace(*workload, roofline="h200", options=["kernels"])
    assert {"mm_in_place", "nll_loss_backward_in_place"} <= {op.name for op in graph.ops if op.optional}
    assert all(op.differs for op in graph.ops if op.optional)  # nothing was run
    assert graph.provenance["left_out"]


def test_unnamed_options_are_dropped_from_the_graph() -> None:
    workload = make("smoothed")
    found = tracing.trace(*workload, roofline="cpu", options=["chunks", "kernels"])
    plain = capture(*workload).graph
    assert apply_options(found, ()).fingerprint == remove_options(found).fingerprint == plain.fingerprint
    assert build_from_dict(convert_to_dict(found)) == found
    alone = apply_options(found, ["kernels"])
    assert {op.target.partition(".")[0] for op in alone.ops if op.optional} == {"kernels"}
    with pytest.raises(UsageError, match=r"traced without the option 'kernels'.*--options kernels"):
        apply_options(plain, ["kernels"])


def test_recaptured_step_has_the_same_optional_ops() -> None:
    workload = image_step(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3)))
    measured = tracing.trace(*workload, passes=1, options=["kernels"])
    again = tracing.restore_recorded(tracing.capture_step(workload, PlanSettings()), measured.provenance, ["kernels"])
    assert again.graph.fingerprint == measured.fingerprint

    def called(op: Op) -> tuple[object, ...]:
        return op.name, op.inputs, op.outputs, op.replaces

    assert list(map(called, again.graph.ops)) == list(map(called, measured.ops))
