"""Numbers that a step reads and that change: the step follows them, without another plan where only arguments of ops differ."""

from collections.abc import Callable
from copy import deepcopy
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from graphs.errors import MismatchError
from planner.train.compile.compiler import Compiler
from planner.train.distributed.wrappers import Unwrapped
from tests.support.marks import slow
from tests.support.raised_warnings import raise_warnings

SETTINGS = {"temperature": 1}


class Annealed(nn.Module):
    """Reads a coefficient, a count and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(24, 32), nn.Linear(32, 3)
        self.beta, self.steps, self.gated = 0.5, 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x)) * self.beta * min(1.0, (self.steps + 1) / 4)
        if self.steps > 5 or self.gated:
            hidden = torch.sigmoid(hidden)
        return self.outer(hidden)


class Twins:
    """A planned and an eager model that must train alike."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.planned, self.settings = Annealed(), SimpleNamespace(weight=1.0)
        self.eager = deepcopy(self.planned)
        self.batch = torch.randn(8, 24), torch.randn(8, 3)
        self.step = planner.compile(self.planned, self.loss, self.batch, budget="1MB", compare_eager=False, **options)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output / SETTINGS["temperature"], target) * self.settings.weight

    def compare(self, rows: int = 8, **numbers: float) -> None:
        """Set numbers of both models, and compare one step."""
        vars(self.planned).update(numbers), vars(self.eager).update(numbers)
        x, y = (tensor[:rows] for tensor in self.batch)
        loss, expected = self.step(x, y), self.loss(self.eager(x), y)
        loss.backward(), expected.backward()
        assert torch.equal(loss, expected)
        pairs = zip(self.planned.parameters(), self.eager.parameters(), strict=True)
        assert all(torch.equal(planned.grad, eager.grad) for planned, eager in pairs)
        self.planned.zero_grad(), self.eager.zero_grad()


def anneal(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(3):
        twins.compare(beta=0.1 * i, steps=i)


def weigh(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    twins.settings.weight = 0.25
    twins.compare()


def cool(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "temperature", 0.7)  # it was an integer
    twins.compare()


@pytest.mark.parametrize("change", [anneal, weigh, cool])
def test_numbers_in_arithmetic_keep_the_plan(
    change: Callable[[Twins, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins()
    schedule = twins.step.plan.schedule
    monkeypatch.setattr(Compiler, "profile", None)  # nothing is measured, solved or rehearsed again
    monkeypatch.setattr(Compiler, "_build_executor", None)
    with pytest.warns(UserWarning, match="captured again") as caught:
        change(twins, monkeypatch)
    assert len({str(warning.message) for warning in caught}) == len(caught) and twins.step.plan.schedule == schedule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_of_numpy_are_followed_and_round_as_in_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    planned = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 3)).to(dtype)
    eager, batch = deepcopy(planned), (torch.randn(8, 24, dtype=dtype), torch.randn(8, 3, dtype=dtype))
    settings = SimpleNamespace(weight=np.float64(0.1))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss((output * settings.weight).exp() / (settings.weight + 0.7), target)

    step = planner.compile(planned, loss, batch, budget="1MB", compare_eager=False)

    def compare() -> None:
        assert torch.equal(step(*batch), loss(eager(batch[0]), batch[1]))

    compare()
    settings.weight = np.cos(settings.weight)
    with pytest.warns(UserWarning, match="captured again: settings.weight was np.float64"):
        compare()
    settings.weight = np.cos(settings.weight)
    compare()


def test_a_numpy_number_that_is_no_float_of_python_is_refused_with_a_way_out() -> None:
    model, batch = nn.Linear(8, 3), (torch.randn(4, 8), torch.randn(4, 3))
    settings = SimpleNamespace(weight=np.float32(0.5))
    step = planner.compile(model, lambda output, target: F.mse_loss(output * settings.weight, target), batch, budget="1MB")
    settings.weight = np.float32(0.25)
    with pytest.raises(MismatchError, match=r"settings.weight is another NumPy number .*make it a number of Python"):
        step(*batch)


def test_a_number_that_chooses_a_branch_is_planned_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    with pytest.warns(UserWarning, match=r"planned again: model.gated was False .* and is True now"):
        twins.compare(gated=True)
    assert "which chooses other ops" in str(twins.step)
    monkeypatch.setattr(Unwrapped, "capture", None)
    for gated in (False, True, False):
        twins.compare(gated=gated)


class Kind(Enum):
    """How a loss is computed."""

    SUM = "sum"
    MEAN = "mean"


class Schedule:
    """Values that choose ops, first those of the class."""

    count, kind, text, pair, scale = 0, Kind.SUM, "plain", (1, 0.5), None

    @property
    def weight(self) -> float:
        return min(1.0, (self.count + 1) / 4)


@pytest.mark.filterwarnings("ignore:(captured|planned) again")
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("count", [1, 2, 0]),
        ("kind", [Kind.MEAN, Kind.SUM, Kind.MEAN]),
        ("text", ["double", "plain"]),
        ("pair", [(2, 0.5), (2, 0.25)]),
        ("scale", [0.5, 0.25, None]),
    ],
)
def test_values_that_are_no_numbers_are_followed(name: str, values: list[Any]) -> None:
    torch.manual_seed(0)
    planned, schedule = nn.Linear(24, 3), Schedule()
    eager, batch = deepcopy(planned), (torch.randn(8, 24), torch.randn(8, 3))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = (output * schedule.weight - target).square() * schedule.pair[1]
        found = found.sum() if schedule.kind is Kind.SUM else found.mean()
        found = found * 2 if schedule.text == "double" else found
        return found if schedule.scale is None else found * schedule.scale

    step = planner.compile(planned, loss, batch, budget="1MB", compare_eager=False)
    for value in values:
        setattr(schedule, name, value)
        assert torch.equal(step(*batch), loss(eager(batch[0]), batch[1]))


def test_numbers_change_while_smaller_batches_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.train.compile.step._EAGER_RUNS", 1)
    twins = Twins()
    with pytest.warns(UserWarning, match="captured again: model.beta"):
        twins.compare(beta=0.25)
    twins.compare(rows=5)
    with raise_warnings():
        twins.compare(rows=5, beta=0.75)
        twins.compare()


def test_a_better_plan_is_found_while_numbers_change() -> None:
    twins = Twins()
    with pytest.warns(UserWarning, match="captured again: model.beta"):
        twins.compare(beta=0.25)
    for _ in range(4):
        twins.compare()
    twins.step.wait(10)
    twins.compare(beta=0.5)
    twins.compare(beta=0.75)


@pytest.mark.parametrize("options", [{"replan": None}, *slow({"replan": False})], ids=str)
def test_other_changes_are_refused(options: dict[str, Any]) -> None:
    twins = Twins(**options)
    twins.planned.outer.bias.requires_grad_(False)
    with pytest.raises(MismatchError, match=r"model.outer.bias.requires_grad was True"):
        twins.step(*twins.batch)


def test_numbers_are_part_of_a_strict_plan() -> None:
    twins = Twins(replan=False)
    with pytest.raises(MismatchError, match=r"model.beta was 0.5 .* and is 0.25 now"):
        twins.compare(beta=0.25)
