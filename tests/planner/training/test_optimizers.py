"""Optimizers whose memory is known: one table says all of them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from graphs.errors import PlannerError
from graphs.ir import Kind
from graphs.optimizers import OPTIMIZERS, Optimizer
from planner.capture.trace import capture
from planner.cli.main import build_parser
from planner.training.optimizers import optimizer_kind


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.optim.SGD, "sgd"),
        (partial(torch.optim.SGD, momentum=0.9), "momentum"),
        (torch.optim.Adam, "adamw"),
        (torch.optim.AdamW, "adamw"),
    ],
)
def test_optimizers_of_torch_are_recognized(make: Any, kind: str) -> None:
    assert optimizer_kind(make(parameters(), lr=0.1)) == kind


def test_the_optimizer_may_be_given_itself() -> None:
    accelerate = pytest.importorskip("accelerate.optimizer")
    model, batch = nn.Linear(4, 1), (torch.randn(2, 4), torch.randn(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    for given in (optimizer, accelerate.AcceleratedOptimizer(optimizer)):
        step = planner.compile(model, nn.functional.mse_loss, batch, budget="100%", optimizer=given, passes=1)
        assert step.plan.graph.provenance["optimizer"] == "momentum"


class SGD(torch.optim.SGD):
    """Another one of the same name."""


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, amsgrad=True), torch.optim.Adagrad, SGD])
def test_unknown_optimizers_raise(make: Any) -> None:
    with pytest.raises(PlannerError, match=r"takes is not known: .* one of 'none' \(0\), 'sgd' .*, 'adamw' \(2\)"):
        optimizer_kind(make(parameters(), lr=0.1))


def test_one_line_is_all_that_another_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        OPTIMIZERS, "amsgrad", Optimizer(3, counter_bytes=4, classes=("Adam", "AdamW"), switches={"amsgrad": True})
    )
    model, batch = nn.Linear(4, 1), (torch.randn(2, 4), torch.randn(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    state_bytes = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    kind = optimizer_kind(optimizer)
    graph = capture(model, nn.functional.mse_loss, batch, optimizer=kind).graph
    assert graph.static_bytes_by_kind[Kind.OPTIMIZER_STATE] == state_bytes
    assert build_parser().parse_args(["trace", "zoo:mlp", "-o", "x", "--optimizer", kind]).optimizer == kind
