"""Which stretches of which steps may be computed in chunks, and graphs that hold such ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.errors import UsageError
from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.options import remove_options
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.options.chunks.rows import NotByRowsError, RowDimensions, find_rows_behind
from planner.capture.options.traced import add_traced
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.measure.roofline import model_times
from planner.settings.devices import get_device
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
