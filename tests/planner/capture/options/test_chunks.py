"""Which stretches of which steps may be computed in chunks or by other kernels, and graphs that hold such ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.options.chunks.rows import NotByRowsError, RowDimensions, find_rows_behind
from planner.capture.options.traced import add_traced
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import UsageError
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.ir import Op
from planner.graphs.options import remove_options
from planner.measure import tracing
from planner.measure.roofline import model_times
from planner.settings.devices import get_device
from planner.settings.plan import PlanSettings
from planner.torch_private.core import FakeTensorMode
from tests.support.models.alternatives import CLASSES, Classifier, make, optional_ops, transformers_model


def chunked(workload: Workload) -> Capture:
    return add_traced(capture(*workload), ["chunks"])


def targets(found: Capture, kind: str) -> list[list[str]]:
    """Of the ops that each of the ops in 2 chunks stands for, without ``aten`` and the overload."""
    graph = found.graph
    return [[graph.ops[p].target.split(".")[1] for p in op.replaces] for op in optional_ops(graph, kind=kind, chunks=2)]


HEAD = ["mm", "_log_softmax", "nll_loss_forward"]
HEAD_BACKWARD = ["nll_loss_backward", "_log_softmax_backward_data", "mm", "mm"]


def test_the_loss_head_of_a_language_model_is_found() -> None:
    found = chunked(build("gpt2", layers=1, width=32, heads=2, vocab=2000, seq=16, batch=4))
    assert targets(found, "forward") == [HEAD]
    assert targets(found, "backward") == targets(found, "backward_kept") == [HEAD_BACKWARD]
    forward, backward = (optional_ops(found.graph, kind=kind, chunks=2)[0] for kind in ("forward", "backward"))
    names = [[found.graph.tensors[t].name for t in tensors] for tensors in (forward.inputs, forward.outputs, backward.inputs)]
    assert names == [
        ["native_layer_norm_2[0]", "model.tokens.weight", "input_1"],
        ["nll_loss_forward[0]", "nll_loss_forward[1]"],
        ["native_layer_norm_2[0]", "model.tokens.weight", "input_tangent", "input_1", "nll_loss_forward[1]"],
    ]
    assert all(not found.graph.tensors[t].static for t in backward.outputs)


def test_so_is_one_that_casts() -> None:
    found = chunked(build("llama", layers=1, width=32, heads=2, kv_heads=2, hidden=48, vocab=2000, seq=16, batch=4))
    assert targets(found, "forward") == [["mm", "_to_copy", "_log_softmax", "nll_loss_forward"]]
    assert targets(found, "backward") == [["nll_loss_backward", "_log_softmax_backward_data", "_to_copy", "mm", "mm"]]


def test_layers_between_and_attention_are_found_where_they_set_the_peak() -> None:
    found = chunked(make("attention"))
    # Before torch 2.14 dropout at 0 is captured as a copy.
    assert [[target for target in group if target != "clone"] for group in targets(found, "forward")] == [
        ["bmm", "div", "masked_fill", "_softmax", "bmm"],
        ["addmm", "gelu", "addmm"],
    ]
    gated = chunked(make("feed_forward"))
    assert targets(gated, "forward") == [["mm", "silu", "mm", "mul", "mm"]]
    assert targets(gated, "backward") == [["mm", "mm", "mul", "mul", "mm", "mm", "silu_backward", "mm", "mm"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_models_of_transformers_with_their_own_loss_are_found(name: str) -> None:
    found = chunked(transformers_model(name))
    heads = [group for group in targets(found, "forward") if "nll_loss_forward" in group]
    cast = ["_to_copy"] if name == "llama" else []
    product = "addmm" if name == "bert" else "mm"
    assert heads == [[product, *cast, "_log_softmax", "nll_loss_forward"]]
    assert any("nll_loss_backward" in group for group in targets(found, "backward"))


@pytest.mark.slow
def test_a_classifier_is_found_under_autocast_and_on_fake_tensors() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked(make("smoothed"))
    assert len(targets(found, "forward")) == len(targets(found, "backward")) == 1
    with FakeTensorMode():
        large = Workload(Classifier(100_000), nn.CrossEntropyLoss(), (torch.empty(4096, 12), torch.empty(4096, dtype=torch.long)))
        found = chunked(large)
    graph = model_times(found, get_device("h200"))
    heads = [optional_ops(graph, kind="forward", chunks=chunks)[0] for chunks in (2, 4, 8, 16)]
    sizes = [op.workspace_bytes / (4096 * 100_000 * 4) for op in heads]
    assert sizes == pytest.approx([2 / 2, 2 / 4, 2 / 8, 2 / 16], rel=0.01)
    group_s = sum(graph.ops[p].time_s for p in heads[0].replaces)
    assert all(0.9 * group_s < op.time_s < 1.3 * group_s for op in heads)


class Returning(Classifier):
    """Its scores are a result of the step, which must be there whole."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        scores = super().forward(x)
        return F.cross_entropy(scores, target), scores


class Dropping(Classifier):
    """Draws for each score."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1)


class Normalising(Classifier):
    """Each score depends on those of other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(super().forward(x), 0)


@pytest.mark.parametrize(
    ("model", "loss"), [(Returning, None), (Dropping, nn.CrossEntropyLoss()), (Normalising, nn.CrossEntropyLoss())]
)
def test_losses_not_computed_row_by_row_are_not_chunked(model: Callable[[int], nn.Module], loss: nn.Module | None) -> None:
    batch = (torch.randn(24, 12), torch.randint(CLASSES, (24,)))
    assert targets(chunked(Workload(model(CLASSES), loss, batch)), "forward") == []


def test_rows_behind_finds_row_dimensions_after_leading_ones() -> None:
    assert find_rows_behind((32, 7), 1, 32) == RowDimensions(0, 0)
    assert find_rows_behind((4, 8, 7), 1, 32) == RowDimensions(0, 1)
    assert find_rows_behind((4, 8, 7), 1, 4) == find_rows_behind((32, 7), 1, 4) == RowDimensions(0, 0)
    assert find_rows_behind((3, 1, 4, 8), 3, 32) == RowDimensions(2, 3)
    for shape, before, rows in (((6, 8), 1, 32), ((4, 8, 7), 2, 8), ((4, 8), 32, 7)):
        with pytest.raises(NotByRowsError):
            find_rows_behind(shape, before, rows)
    assert RowDimensions(0, 1).compute_chunk_shape((4, 8, 7), 16, 32) == [1, 16, 7]
    assert RowDimensions(0, 0).compute_chunk_shape((32, 7), 1, 4) == [8, 7]


def test_graph_keeps_named_options_and_drops_others() -> None:
    found = chunked(make("smoothed")).graph
    plain = capture(*make("smoothed")).graph
    assert apply_options(found, ["chunks"]) is found
    left = apply_options(found, ())
    assert left.plain and left.ops == plain.ops and left.tensors == plain.tensors
    assert left.fingerprint == remove_options(found).fingerprint == plain.fingerprint != found.fingerprint
    assert build_from_dict(convert_to_dict(found)) == found
    with pytest.raises(UsageError, match=r"traced without the option 'chunks'.*--options chunks"):
        apply_options(plain, ["chunks"])
    with pytest.raises(UsageError, match="the option 'chunks' is named twice"):
        apply_options(found, ["chunks", "chunks"])


def test_the_same_step_has_the_same_ops_each_time() -> None:
    first, second = (chunked(make("smoothed")).graph for _ in range(2))
    assert first.fingerprint == second.fingerprint and first.ops == second.ops


def test_a_step_without_such_stretches_was_looked_at_all_the_same() -> None:
    found = chunked(Workload(nn.Linear(4, 3), nn.MSELoss(), (torch.randn(5, 4), torch.randn(5, 3)))).graph
    assert found.plain and found.provenance["options"] == ["chunks"]
    assert apply_options(found, ["chunks"]).plain


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
