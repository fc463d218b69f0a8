"""What no step can be planned for, or does not do, is one clear error."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from graphs.errors import InfeasibleError, PlannerError

X, Y = torch.randn(16, 8), torch.randn(16, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def compiled(given: Any, batch: Any = (X, Y), **options: Any) -> planner.PlannedStep:
    return planner.compile(given, F.mse_loss, batch, budget="100%", compare_eager=False, **options)


def traced(given: Any, batch: Any = (X, Y), **options: Any) -> object:
    return planner.trace(given, F.mse_loss, batch, **options)


@pytest.mark.parametrize("call", [compiled, traced, lambda given: planner.checkpoint(given, budget="50%")])
@pytest.mark.parametrize(
    ("given", "said"), [(None, "is None"), (F.relu, "is a function"), (nn.ReLU, "is the class ReLU"), ("gpt2", "is a str")]
)
def test_what_is_no_module_raises(call: Callable[[Any], object], given: Any, said: str) -> None:
    with pytest.raises(PlannerError, match=f"the model {said}, and must be a torch.nn.Module"):
        call(given)


@pytest.mark.parametrize("call", [compiled, traced])
@pytest.mark.parametrize(("batch", "said"), [(None, "is None"), (X, "is a Tensor"), (3, "is a int")])
def test_what_is_no_batch_raises(call: Callable[[Any, Any], object], batch: Any, said: str) -> None:
    with pytest.raises(PlannerError, match=rf"the batch {said}: give what the step is called with, as in \(inputs, targets\)"):
        call(model(), batch)


@pytest.mark.parametrize("call", [compiled, traced])
@pytest.mark.parametrize("passes", [0, -1])
def test_an_op_is_measured_at_least_once(call: Callable[..., object], passes: int) -> None:
    with pytest.raises(PlannerError, match=f"passes is {passes}: must be at least 1"):
        call(model(), passes=passes)


def test_a_batch_without_values_raises() -> None:
    with pytest.raises(PlannerError, match="model and batch must be on one device, found cpu, meta"):
        compiled(model(), (X.to("meta"), Y))


def test_a_cache_without_a_name_raises() -> None:
    with pytest.raises(PlannerError, match="cache is '': name a folder"):
        compiled(model(), cache="")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(copied: Callable[[object], object]) -> None:
    step = compiled(model())
    with pytest.raises(PlannerError, match=r"neither copied nor pickled: copy the model, and call planner\.compile"):
        copied(step)


def test_gradients_of_gradients_raise() -> None:
    x = X.clone().requires_grad_()
    step = compiled(model(), (x, Y))
    with pytest.raises(RuntimeError, match="create_graph=True asks for one: compute what needs gradients of gradients"):
        torch.autograd.grad(step(x, Y), x, create_graph=True)
    (gradient,) = torch.autograd.grad(step(x, Y), x)
    assert gradient.shape == x.shape and not gradient.requires_grad


def test_a_budget_that_is_too_small_is_not_spoken_of_as_an_option_of_the_command() -> None:
    with pytest.raises(InfeasibleError, match=r"Raise the budget, or lower the batch size\.") as refused:
        planner.compile(model(), F.mse_loss, (X, Y), budget="1kB")
    assert "--" not in str(refused.value)
