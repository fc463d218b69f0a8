"""Ops that are measured alone get integers that they can use, of which 0 need not be one."""

import warnings
from collections.abc import Callable
from runpy import run_path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.measure import synthetic_inputs
from tests.support.raised_warnings import raise_warnings

RANK = torch.library.custom_op("planner_tests::rank", lambda x: 1 + x.argsort(), mutates_args=(), schema="(Tensor x) -> Tensor")
RANK.register_fake(lambda x: torch.empty_like(x, dtype=torch.int64))


def _pick(x: Tensor, ranks: Tensor) -> Tensor:
    if int(ranks.min()) < 1:
        raise ValueError("ranks count from 1")
    return x[ranks - 1]


PICK = torch.library.custom_op("planner_tests::pick", _pick, mutates_args=(), schema="(Tensor x, Tensor ranks) -> Tensor")
PICK.register_fake(lambda x, ranks: torch.empty_like(x))


def ranked(m: Any, x: Tensor) -> Tensor:
    scaled = m.weight * x
    with torch.no_grad():
        picked = PICK(scaled, RANK(scaled))
    return (scaled * picked).sum()


def test_integers_are_computed_where_zeros_are_refused() -> None:
    with raise_warnings():  # that the time of an op is modelled
        graph = planner.trace(FunctionModule(ranked, weight=nn.Parameter(torch.ones(8))), None, (torch.randn(8),), passes=1)
    (pick,) = (op for op in graph.ops if op.target.startswith("planner_tests.pick"))
    assert pick.time_s > 0


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: ~torch.eye(len(x), dtype=torch.bool),
        lambda x: torch.ones(len(x), len(x)).tril(-1).add(torch.ones(len(x), len(x)).triu(1)).bool(),
    ],
)
def test_masks_select_as_many_elements_as_in_the_step(mask: Callable[[Tensor], Tensor]) -> None:
    model = FunctionModule(lambda m, x: (m.layer(x) @ x.t())[mask(x)].pow(2).sum(), layer=nn.Linear(8, 8))
    with raise_warnings():  # that the time of an op is modelled
        graph = planner.trace(model, None, (torch.randn(16, 8),), passes=1)
    (index,) = (op for op in graph.ops if op.target == "aten.index.Tensor")
    assert [graph.tensors[t].size_bytes for t in index.outputs] == [16 * 15 * 4]


def test_inputs_are_made_under_another_default_type() -> None:
    spec = run_path(synthetic_inputs.__file__)["TensorSpec"].make_smallest(torch.empty(8))  # as a new process has it
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = spec.make("aten.relu.default")
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.dtype == torch.float32 and made.ge(0.25).all() and made.le(0.75).all()


@pytest.mark.parametrize(("rows", "activated"), [(16, True), (24, False)])
def test_masks_count_whole_where_memory_grows_with_what_they_select(rows: int, activated: bool) -> None:
    def fill(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.layer(x)
        mask = hidden.tanh() < 0 if activated else x[:, :1] < 0
        return hidden.masked_scatter(mask.expand_as(hidden), model.layer(x.flip(0))).sum()

    graph = planner.trace(FunctionModule(fill, layer=nn.Linear(8, 8)), None, (torch.ones(rows, 8),), passes=1)
    (backward,) = (op for op in graph.ops if op.target == "aten.masked_scatter_backward.default")
    assert backward.workspace_bytes >= 2 * 8 * rows * 8  # two lists of the places of all elements


@pytest.mark.usefixtures("fresh_compiler")
def test_offsets_of_padded_windows_are_valid() -> None:
    batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    # Inductor keeps the places of the greatest elements as offsets in windows, of which the first begin at -1.
    model = FunctionModule(
        lambda m, x: m.last(F.max_pool2d(torch.relu(m.first(x)), 3, 2, 1).flatten(1)),
        first=nn.Conv2d(3, 4, 3, padding=1),
        last=nn.Linear(64, 3),
    )
    step = planner.compile(model, F.cross_entropy, batch, budget="1MB", kernels="inductor", passes=1)
    pooling = [op for op in step.measured.ops if "max_pool2d_with_indices_backward" in op.name]
    assert pooling
    assert all(op.time_s > 0 for op in pooling)


def _refuse(x: Tensor) -> Tensor:
    raise ValueError("it runs on no values")


PARTICULAR = torch.library.custom_op("planner_tests::particular", _refuse, mutates_args=(), schema="(Tensor x) -> Tensor")
PARTICULAR.register_fake(torch.empty_like)


class Particular(nn.Module):
    """Ops of several shapes that do not run on synthetic values."""

    def __init__(self, shapes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8 + i) for i in range(shapes))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for weight in self.weights:
            with torch.no_grad():
                kept = PARTICULAR(weight * x.sum())
            total = total + (weight * kept).sum()
        return total


@pytest.mark.parametrize(
    ("shapes", "said"), [(1, "op particular"), (5, "5 ops cannot be measured alone (planner_tests.particular.default)")]
)
def test_ops_that_cannot_be_measured_are_one_warning(shapes: int, said: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        planner.trace(Particular(shapes), None, (torch.randn(8),), passes=1)
    (message,) = (str(one.message) for one in warned if "measured alone" in str(one.message))
    assert said in message and "it runs on no values" in message
