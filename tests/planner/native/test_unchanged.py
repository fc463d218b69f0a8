"""Guards that need not be checked where a step holds the objects that it held before."""

import gc
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.guards.python_guards import PythonGuards
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.graphs.errors import MismatchError
from planner.native.library import wait_for_library
from planner.native.unchanged import StepGuards
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY
BATCH = (torch.ones(2, 4), torch.ones(2, 4))


class Layer(nn.Linear):
    """A layer that reads a number, a list, a dict and an object."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.alpha, self.factors, self.table, self.unread = 0.5, [1.0, 2.0], {"beta": 3.0}, 0
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.alpha * self.factors[0] * self.table["beta"] * self.inner.gamma
        return super().forward(x if self.training else -x) * scale


class Inner:
    def __init__(self) -> None:
        self.gamma = 2.0


class RecordedGuards:
    """Guards that record for each check if most of them are known to pass."""

    def __init__(self, guards: PythonGuards) -> None:
        self.stored, self.replaceable = guards.stored, guards.replaceable
        self.unchanged: list[bool] = []
        self._guards = guards

    def check(self, *args: Any, is_unchanged: bool) -> tuple[Any, ...]:
        self.unchanged.append(is_unchanged)
        return self._guards.check(*args, is_unchanged=is_unchanged)


def build_guards(model: nn.Module) -> tuple[RecordedGuards, Callable[[], object]]:
    """Return the guards of a step of `model`, and a function that checks them."""
    wait_for_library()
    guards = capture(model, F.mse_loss, BATCH).guards
    assert guards is not None
    recorded: Any = RecordedGuards(guards)
    step = StepGuards(recorded, TrainingStep(model, F.mse_loss))
    return recorded, lambda: step.check(BATCH, {})


def freeze(layer: Layer) -> None:
    layer.weight.requires_grad_(False)


def replace_inner(layer: Layer) -> None:
    layer.inner = Inner()
    layer.inner.gamma = 2.5


# By what is changed, and whether the plan applies all the same.
CHANGES: dict[str, tuple[Callable[[Layer], object], bool]] = {
    "number": (lambda layer: setattr(layer, "alpha", layer.alpha + 0.25), False),
    "item of a list": (lambda layer: layer.factors.__setitem__(0, 4.0), False),
    "item of a dict": (lambda layer: layer.table.__setitem__("beta", 4.0), False),
    "attribute of an object": (lambda layer: setattr(layer.inner, "gamma", 4.0), False),
    "object": (replace_inner, False),
    "class": (lambda layer: setattr(layer, "__class__", nn.Linear), False),
    "mode": (nn.Module.eval, False),
    "hook": (lambda layer: layer.register_forward_hook(lambda *_: None), False),
    "method of its own": (lambda layer: setattr(layer, "forward", lambda x: x), False),
    "frozen weight": (freeze, False),
    "no bias": (lambda layer: setattr(layer, "bias", None), False),
    "weight": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4, 4))), True),
    "equal number": (lambda layer: setattr(layer, "alpha", float("0.5")), True),
    "new attribute": (lambda layer: setattr(layer, "more", 1), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_what_guards_read_is_noticed(name: str) -> None:
    change, applies = CHANGES[name]
    model = nn.Sequential(Layer())
    guards, check = build_guards(model)
    for _ in range(3):
        check()
    change(model[0])
    if applies:
        check()
        check()
        assert guards.unchanged == [False, True, True, False, True]
    else:
        with pytest.raises(MismatchError):
            check()
        assert guards.unchanged == [False, True, True, False]


def test_another_function_of_the_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, check = build_guards(nn.Sequential(Layer()))
    check()
    check()
    monkeypatch.setattr(Layer, "forward", lambda self, x: x)
    with pytest.raises(MismatchError, match="replaced since"):
        check()


def test_what_no_guard_reads_and_writes_in_place_are_no_change() -> None:
    model = nn.Sequential(Layer())
    guards, check = build_guards(model)
    check()
    model[0].unread = 3
    with torch.no_grad():
        model[0].weight.add_(1)
    check()
    assert guards.unchanged == [False, True]


def test_replaced_parameters_leave_the_memory_at_once() -> None:
    model = nn.Sequential(Layer())
    _, check = build_guards(model)
    check()
    replaced = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()
    assert replaced() is None
    check()


def test_tensors_of_an_unchanged_step_are_not_looked_up() -> None:
    model = nn.Sequential(Layer())
    captured, step = capture(model, F.mse_loss, BATCH), TrainingStep(model, F.mse_loss)
    assert captured.guards is not None
    guards = StepGuards(captured.guards, step, captured.program.sources)
    for _ in range(2):
        assert guards.check(BATCH, {})[1] == []
        found, expected = guards.check(BATCH, {})[1], captured.program.gather(step, [None] * len(BATCH))
        assert len(found) == len(expected) and all(map(is_, found, expected))
        model[0].weight = nn.Parameter(torch.ones(4, 4))


def test_a_step_that_differs_each_time_is_not_looked_at_again() -> None:
    model = nn.Sequential(Layer())
    guards, check = build_guards(model)
    for _ in range(5):
        model[0].weight = nn.Parameter(torch.ones(4, 4))
        check()
    check()
    assert guards.unchanged == [False] * 6
