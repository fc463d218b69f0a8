"""Numbers that a step counts itself: a plan counts them in each step, and in none of its measurements."""

import itertools
import math
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn

import planner
from graphs.errors import TraceError
from tests.support.marks import slow


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
        loss, expected = step(x), eager(x)
        loss.backward(), expected.backward()
        assert torch.equal(loss, expected) and torch.equal(planned.layer.weight.grad, eager.layer.weight.grad)
        assert counts(planned) == counts(eager)
        planned.zero_grad(), eager.zero_grad()
    with torch.no_grad():
        assert torch.equal(step(x), eager(x)) and counts(planned) == counts(eager)


class Listing(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.calls)
        return super().read(hidden) / len(self.seen)


def test_what_is_no_number_is_refused_by_name() -> None:
    model = Listing()
    with pytest.raises(TraceError, match=r"model.seen changes at every step .*, and the step reads it"):
        planner.compile(model, None, (torch.randn(4, 8),), budget="1MB")
    assert model.calls == 0 and model.seen == []


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
