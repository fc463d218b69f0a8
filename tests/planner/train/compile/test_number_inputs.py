"""Numbers that a step reads each time: after their first change nothing is captured again, and bits stay as in eager PyTorch."""

import math
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import Unwrapped
from tests.support.budgets import between
from tests.support.marks import slow_among, slow_except

Expression = Callable[[torch.Tensor, Any], torch.Tensor]


class Reading(nn.Module):
    """Evaluates an expression of a hidden tensor, a weight and a count several times."""

    def __init__(self, expression: Expression, times: int = 3) -> None:
        super().__init__()
        self.times = times
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 3)
        self.expression, self.weight, self.count = expression, 0.5, 1
        self.config: dict[str, Any] = {"rates": [0.5], "on": True}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        for _ in range(self.times):
            hidden = torch.sin(self.expression(hidden, self).float())
        return self.outer(hidden).square().mean()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the captures in the length of a list."""
    made: list[int] = []
    capture = Unwrapped.capture
    monkeypatch.setattr(Unwrapped, "capture", lambda *given: (made.append(1), capture(*given))[1])
    return made


def compare(step: PlannedStep, planned: nn.Module, eager: nn.Module, *batch: Any) -> None:
    """Compare one step with eager PyTorch; both draw the same random numbers."""
    torch.manual_seed(0)
    loss = step(*batch)
    loss.backward()
    torch.manual_seed(0)
    expected = eager(*batch)
    expected.backward()
    assert torch.equal(loss, expected)
    for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        ours.grad = theirs.grad = None


def follow(expression: Expression, values: range, *, times: int = 3, **options: Any) -> PlannedStep:
    """Train a planned and an eager model while their numbers change; return the planned step."""
    torch.manual_seed(0)
    planned, batch = Reading(expression, times), torch.randn(8, 16)
    eager = deepcopy(planned)
    step = planner.compile(planned, None, (batch,), budget="1MB", compare_eager=False, wait=0, **options)
    for i in values:
        for model in (planned, eager):
            model.weight, model.count = 0.41 + 0.0137 * i, i + 2
            model.config["rates"][0] = 1 / (i + 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if i == 0 else "error")
            compare(step, planned, eager, batch)
    return step


EXPRESSIONS: dict[str, Expression] = {
    "product": lambda h, m: h * m.weight,
    "quotient": lambda h, m: m.weight / (h * h + 1),
    "power": lambda h, m: h * m.weight**2 - h * 0.9**m.count,
    "decay": lambda h, m: h * math.exp(-0.1 * m.count) + (1 - m.weight),
    "cosine": lambda h, m: h * 0.5 * (1 + math.cos(math.pi * m.count / 20)),
    "warmup": lambda h, m: h * min(1.0, m.count / 30) + max(0.1, m.weight - 0.5, 0.2),
    "whole": lambda h, m: h * (1 + m.count % 7) + (m.count // 3) - round(m.weight, 1),
    "conversion": lambda h, m: h * float(m.count) + int(m.weight * 100),
    "scalars": lambda h, m: torch.add(h.clamp(-m.weight, m.weight), h.sin(), alpha=m.weight).mul_(m.weight),
    "masks": lambda h, m: torch.where(h > m.weight, h, m.weight).masked_fill(h < -m.weight, m.count),
    "temperature": lambda h, m: F.gumbel_softmax(h, tau=m.weight) + F.softmax(h / m.weight, dim=-1),
    "noise": lambda h, m: h + m.weight * torch.randn(8, 16),
    "tensors": lambda h, m: h * torch.tensor(m.weight) + torch.full_like(h, m.count),
    "half": lambda h, m: h.bfloat16() * m.weight + m.count,
    "integers": lambda h, m: h + torch.arange(16) * m.count,
    "nested": lambda h, m: h * m.config["rates"][0],
    "exponents": lambda h, m: h.abs() ** m.weight + (h[:1] * h).square().pow(m.count / 2) + h**2,
    "half exponents": lambda h, m: (h.abs() + 1).bfloat16() ** (m.count / 2) + h.double().abs() ** -m.weight,
    "interpolation": lambda h, m: torch.lerp(h[:1], h.sin(), m.weight) + torch.lerp(h.half(), h[:, :1].half(), 1 - m.weight),
    "comparison": lambda h, m: h * m.weight if m.weight > 0.1 and m.count != 1 else h,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_arithmetic_is_captured_again_once(name: str, captures: list[int]) -> None:
    follow(EXPRESSIONS[name], range(6))
    assert len(captures) == 2


def test_all_arithmetic_in_one_step_is_captured_again_once(captures: list[int]) -> None:
    def evaluate_all(hidden: torch.Tensor, model: Any) -> torch.Tensor:
        for expression in expressions:
            hidden = torch.sin(expression(hidden, model).float())
        return hidden

    expressions = tuple(EXPRESSIONS.values())
    follow(evaluate_all, range(6), times=1)
    assert len(captures) == 2


BY_VALUE: dict[str, Expression] = {
    "probability": lambda h, m: F.dropout(h, m.weight / 10),
    "epsilon": lambda h, m: F.layer_norm(h, (16,), eps=m.weight),
    "size": lambda h, m: F.pad(h[:, : m.count], (0, 16 - m.count)),
    "item": lambda h, m: h * (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)[m.count],
    "text": lambda h, m: h * len("x" * m.count),
}


@pytest.mark.parametrize("name", slow_except(BY_VALUE, "probability", "size"))
def test_where_the_number_itself_is_needed_each_value_is_captured(name: str, captures: list[int]) -> None:
    follow(BY_VALUE[name], range(3), times=1)
    assert 3 <= len(captures) <= 4


def test_recomputed_ops_get_the_number_of_their_step(captures: list[int]) -> None:
    torch.manual_seed(0)
    planned, batch = Reading(lambda h, m: torch.exp(h * m.weight) * (1 - m.weight)), torch.randn(512, 16)
    eager = deepcopy(planned)
    budget = between(planner.trace(planned, None, (batch,)))
    step = planner.compile(planned, None, (batch,), budget=budget, compare_eager=False, wait="0%", swap="never")
    assert max(Counter(step.plan.schedule.computed).values()) > 1

    def train(weight: float) -> None:
        planned.weight = eager.weight = weight
        loss = step(batch)
        planned.weight = 0.1  # the backward pass is that of the step
        loss.backward()
        expected = eager(batch)
        expected.backward()
        assert torch.equal(loss, expected)
        for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
            ours.grad = theirs.grad = None

    with pytest.warns(UserWarning, match=r"model.weight was 0.5 .* \(said once; it is read in each step from now on"):
        train(0.25)
    for i in range(20):
        train(0.3 + i / 17)
    assert len(captures) == 2


def test_a_condition_is_planned_for_once_per_outcome(captures: list[int]) -> None:
    follow(lambda h, m: torch.relu(h) if m.count % 3 == 0 else h * m.count, range(9))
    assert len(captures) <= 4  # the first one, one that reads the count, and the other outcome


class Scaled(torch.autograd.Function):
    """Multiplies by a number, and so its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * (1 - ctx.factor), None


REGIONS: dict[str, Expression] = {
    "checkpoint": lambda h, m: checkpoint(lambda x: torch.sin(x * m.weight) * math.exp(-m.weight), h, use_reentrant=False),
    "custom function": lambda h, m: Scaled.apply(h, 1 - m.weight),
    "gradient inside": lambda h, m: torch.autograd.grad((h**2 * m.weight).sum(), h, create_graph=True)[0],
}


@pytest.mark.parametrize("name", slow_among(REGIONS, "gradient inside"))
def test_numbers_enter_regions_of_their_own(name: str) -> None:
    follow(REGIONS[name], range(3), times=1)


def test_a_smaller_batch_reads_numbers_too(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.train.compile.step._EAGER_RUNS", 1)
    torch.manual_seed(0)
    planned, x = Halves(), torch.randn(8, 16)
    eager = deepcopy(planned)
    step = planner.compile(planned, None, (x, 1, 0.5), budget="1MB", compare_eager=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(6):
            rows = 8 - 3 * (i % 2)
            assert torch.equal(step(x[:rows], i, 1 / (i + 1)), eager(x[:rows], i, 1 / (i + 1)))
    assert len(captures) == 4


class Halves(nn.Module):
    """A model whose loss takes numbers as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, index: int, scale: float, unread: int = 0) -> torch.Tensor:
        return (self.layer(x) * scale).square().mean() * (1 / (index + 1))


@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_arguments_are_numbers_like_others(named: bool, captures: list[int]) -> None:
    torch.manual_seed(0)
    planned, x = Halves(), torch.randn(8, 16)
    eager = deepcopy(planned)

    def batch(i: int) -> Any:
        values = {"x": x, "index": i, "scale": 1 / (i + 1), "unread": i}
        return values if named else tuple(values.values())

    step = planner.compile(planned, None, batch(0), budget="1MB", compare_eager=False)

    def train(i: int) -> None:
        given = batch(i)
        loss, expected = (call(**given) if named else call(*given) for call in (step, eager))
        loss.backward(), expected.backward()
        assert torch.equal(loss, expected) and torch.equal(planned.layer.weight.grad, eager.layer.weight.grad)
        planned.zero_grad(), eager.zero_grad()

    with pytest.warns(UserWarning, match="captured again: input .* is read in each step from now on"):
        train(1)
    for i in range(2, 6):
        train(i)
    assert len(captures) == 2


def test_arguments_that_are_not_read_may_have_any_value(captures: list[int]) -> None:
    planned, x = Halves(), torch.randn(8, 16)
    step = planner.compile(planned, None, (x, 1, 0.5, 0), budget="1MB", compare_eager=False)
    for i in range(3):
        step(x, 1, 0.5, i).backward()
    assert len(captures) == 1


def test_what_has_no_finite_value_is_as_in_eager() -> None:
    planned, x = Halves(), torch.randn(8, 16)
    eager = deepcopy(planned)
    step = planner.compile(planned, None, (x, 1, 0.5), budget="1MB", compare_eager=False)

    def train(scale: float) -> None:
        loss, expected = step(x, 1, scale), eager(x, 1, scale)
        assert torch.equal(loss.isnan(), expected.isnan()) and torch.equal(loss.nan_to_num(), expected.nan_to_num())

    with pytest.warns(UserWarning, match="captured again"):
        train(0.25)
    for scale in (math.inf, 0.125, math.nan):
        train(scale)
    with pytest.raises(ZeroDivisionError):
        step(x, -1, 0.5)
