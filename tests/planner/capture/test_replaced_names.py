"""Guards on names: replaced functions, methods and environment variables raise errors that name them."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from graphs.errors import MismatchError
from planner.capture.trace import capture

HERE = sys.modules[__name__]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Gain:
    """No module: what it computes is part of the step all the same."""

    factor = 2.0

    def value(self) -> float:
        return self.factor

    @property
    def offset(self) -> float:
        return 0.5


GAIN = Gain()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.act(self.first(x))).sigmoid() * GAIN.value() + GAIN.offset
        if os.environ.get("PLANNER_TESTS_DOUBLE"):
            hidden = doubled(hidden)
        if hasattr(torch, "planner_tests_double"):
            hidden = torch.planner_tests_double(hidden)
        return self.scaled(torch.exp(self.second(hidden)))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


REPLACED: dict[str, tuple[object, str, Any, str]] = {
    "a function of a module": (F, "gelu", F.relu, "torch.nn.functional.gelu was replaced"),
    "a function of torch": (torch, "exp", torch.sin, "torch.exp was replaced"),
    "one that a module of torch calls": (torch, "tanh", torch.sin, "torch.tanh was replaced"),
    "the loss": (F, "mse_loss", F.l1_loss, "torch.nn.functional.mse_loss was replaced"),
    "a method of tensors": (torch.Tensor, "sigmoid", torch.Tensor.tanh, "torch.Tensor.sigmoid was added"),
    "forward of the model": (Net, "forward", lambda self, x: self.first(x), r"Net.forward was replaced"),
    "another method of the model": (Net, "scaled", lambda self, x: x, r"Net.scaled was replaced"),
    "forward of a layer": (nn.Linear, "forward", lambda self, x: x, r"linear.Linear.forward was replaced"),
    "how modules are called": (nn.Module, "__call__", lambda self, x: self.forward(x), r"module.Module.__call__ was replaced"),
    "how a layer is called": (nn.Linear, "__call__", lambda self, x: self.forward(x), r"linear.Linear.__call__ was added"),
    "a method of an object": (Gain, "value", lambda self: 3.0, r"Gain.value was replaced"),
    "a property of an object": (Gain, "offset", property(lambda self: 3.0), r"Gain.offset was replaced"),
    "what torch was asked for": (torch, "planner_tests_double", doubled, "torch.planner_tests_double was added"),
}


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 4), torch.randn(6, 4)


def planned(batch: tuple[torch.Tensor, torch.Tensor], **options: object) -> planner.PlannedStep:
    torch.manual_seed(1)
    return planner.compile(Net(), lambda x, y: F.mse_loss(x, y), batch, budget="100%", passes=1, compare_eager=False, **options)


def test_replaced_objects_are_named(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch)
    before = step(*batch)
    for owner, name, value, message in REPLACED.values():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            with pytest.raises(MismatchError, match=f"{message} since the step was planned: .*replan=True"):
                step(*batch)
        assert torch.equal(step(*batch), before)


def test_environment_variable_is_guarded(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch)
    monkeypatch.setenv("PLANNER_TESTS_OTHER", "1")
    before = step(*batch)
    monkeypatch.setenv("PLANNER_TESTS_DOUBLE", "1")
    with pytest.raises(MismatchError, match=r"environment variable PLANNER_TESTS_DOUBLE was None .* and is '1' now"):
        step(*batch)
    monkeypatch.delenv("PLANNER_TESTS_DOUBLE")
    assert torch.equal(step(*batch), before)


def test_replan_uses_the_replacement(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch, replan=True)
    monkeypatch.setattr(F, "gelu", F.relu)
    with pytest.warns(UserWarning, match="planned again: torch.nn.functional.gelu was replaced"):
        found = step(*batch)
    torch.manual_seed(1)
    assert torch.equal(found, F.mse_loss(Net()(batch[0]), batch[1]))


def test_unused_names_may_be_replaced(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch)
    before = step(*batch)
    others: list[tuple[object, str, Callable[..., Any]]] = [
        (F, "silu", F.relu),
        (torch, "cos", torch.sin),
        (nn.Conv2d, "forward", lambda self, x: x),
        (HERE, "planned", planned),
    ]
    for owner, name, value in others:
        monkeypatch.setattr(owner, name, value)
    assert torch.equal(step(*batch), before)


def test_layout_queried_by_the_step_is_guarded(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    other = x.t().contiguous().t()
    model = FunctionModule(lambda m, x: m.linear(x) * (2.0 if x.is_contiguous() else 1.0), linear=nn.Linear(4, 4))
    step = planner.compile(model, F.mse_loss, batch, budget="100%", passes=1)
    step(x, y)
    with pytest.raises(MismatchError, match=r"had strides \(\(4, 1\), \(4, 1\)\) .* have \(\(1, 6\), \(4, 1\)\)"):
        step(other, y)
    other_step = planned(batch)  # which does not ask
    assert torch.allclose(other_step(other, y), other_step(x, y))


def test_few_names_are_compared(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    guards = capture(Net(), F.mse_loss, batch).guards
    assert 10 < sum(len(names.keys) for names in guards.replaceable.names) < 100
    assert list(guards.replaceable.environment) == ["PLANNER_TESTS_DOUBLE"]
