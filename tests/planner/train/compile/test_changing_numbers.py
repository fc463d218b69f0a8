"""Numbers that a step reads, counts, and that change: it follows them, is not captured again, and has eager bits."""

import itertools
import math
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
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
from planner.graphs.errors import MismatchError, TraceError
from planner.train.compile.compiler import Compiler
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import Unwrapped
from tests.support.budgets import between
from tests.support.marks import slow, slow_among, slow_except
from tests.support.models.outcomes import assert_equal_steps
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
            assert_equal_steps(step, planned, eager, batch)
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
        assert torch.equal(loss, expected)
        assert torch.equal(*(torch.autograd.grad(each, of.layer.weight)[0] for each, of in ((loss, planned), (expected, eager))))

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


class Counting(nn.Module):
    """Counts its calls, and reads the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.rate = nn.Linear(8, 8), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(torch.tanh(self.layer(x))).square().mean()

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden


class WarmUp(Counting):
    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden * min(1.0, self.calls / 4)


class Decay(Counting):
    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # counted twice in a step
            self.rate *= 0.9
            hidden = hidden * self.rate + math.exp(-self.rate)
        return super().read(hidden)


class Alternating(Counting):
    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(hidden) if self.calls % 3 == 0 else hidden * self.calls


class Nested(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Decay()

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.inner(hidden)


def counts(model: nn.Module) -> list[tuple[int, float]]:
    return [(module.calls, module.rate) for module in model.modules() if isinstance(module, Counting)]


@pytest.mark.filterwarnings("ignore:planned again:UserWarning")  # once, for the other branch
@pytest.mark.parametrize("kind", [Alternating, Nested, *slow(Counting, WarmUp, Decay)])
def test_steps_count_as_in_eager(kind: type[Counting]) -> None:
    torch.manual_seed(0)
    planned, x = kind(), torch.randn(4, 8)
    eager = deepcopy(planned)
    step = planner.compile(planned, None, (x,), budget="1MB")
    assert counts(planned) == counts(eager)
    for _ in range(5):
        assert_equal_steps(step, planned, eager, x)
        assert counts(planned) == counts(eager)
    with torch.no_grad():
        assert torch.equal(step(x), eager(x)) and counts(planned) == counts(eager)


class Listing(Counting):
    def __init__(self, seen: list[int] | deque[int]) -> None:
        super().__init__()
        self.seen = seen

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.calls)
        return super().read(hidden) / len(self.seen)


@pytest.mark.parametrize("seen", [[], deque(maxlen=2)], ids=["list", "deque"])
def test_what_is_no_number_is_refused_by_name(seen: list[int] | deque[int]) -> None:
    model = Listing(seen)
    with pytest.raises(TraceError, match=r"model.seen changes at every step .*, and the step reads it"):
        planner.compile(model, None, (torch.randn(4, 8),), budget="1MB")
    assert model.calls == 0 and not model.seen


class Iterating(Counting):
    def __init__(self, numbers: Iterator[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * next(self.numbers)


ITERATORS: dict[str, Callable[[], Iterator[float]]] = {
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle([1, 2]),
    "generator": lambda: (number for number in range(1, 4)),
    "range_iterator": lambda: iter(range(1, 4)),
    "list_iterator": lambda: iter([1, 2, 3]),
    "map": lambda: map(float, range(1, 4)),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_is_refused_and_not_advanced(name: str) -> None:
    model = Iterating(ITERATORS[name]())
    with pytest.raises(TraceError, match=rf"advances an iterator \((model.numbers|{name})\).*self.calls \+= 1"):
        planner.compile(model, None, (torch.randn(4, 8),), budget="1MB")
    assert next(model.numbers) == 1
