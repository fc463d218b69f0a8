"""What backward reads is under autograd's version check, whoever writes to it in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule

Write = Callable[[Any], object]


def exponential() -> nn.Module:
    return FunctionModule(lambda m, x, y: torch.exp((x * m.weight - y).mean()), weight=nn.Parameter(torch.full((4,), 0.1)))


class Logits(nn.Module):
    """Returns what its loss was computed from, in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = torch.tanh(self.linear(x))
        loss = F.mse_loss(logits, y)
        match self.kind:
            case "tuple":
                return loss, logits
            case "view":
                return loss, logits.view(-1)
            case "dict":
                return {"loss": loss, "some": logits[1:, ::2]}
        raise AssertionError


WRITES: dict[str, tuple[Callable[[], nn.Module], Write]] = {
    "the loss": (exponential, lambda loss: loss.div_(4)),
    "logits": (lambda: Logits("tuple"), lambda returned: returned[1].zero_()),
    "a view of a view": (lambda: Logits("view"), lambda returned: returned[1][3:5].zero_()),
    "a view in a dict": (lambda: Logits("dict"), lambda returned: returned["some"].mul_(2)),
}


def loss_of(returned: Any) -> torch.Tensor:
    match returned:
        case torch.Tensor():
            return returned
        case dict():
            return returned["loss"]
    return returned[0]


@pytest.mark.parametrize("name", WRITES)
def test_a_write_before_backward_is_an_error_as_in_eager_mode(name: str) -> None:
    make, write = WRITES[name]
    model, batch = make(), (torch.randn(5, 4), torch.randn(5, 4))
    step = planner.compile(model, None, batch, budget="100%")
    for run in (model, step):
        returned = run(*batch)
        write(returned)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            loss_of(returned).backward()
    returned = step(*batch)
    loss_of(returned).backward()
    write(returned)  # nobody reads it any more


def test_a_write_that_backward_does_not_read_is_none() -> None:
    model = nn.Linear(4, 4)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    step = planner.compile(model, F.mse_loss, (x, y), budget="100%")
    gradients = []
    for run in (step, lambda x, y: F.mse_loss(model(x), y)):
        model.weight.grad = None
        loss = run(x, y)
        loss /= 4
        loss.backward()
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("what", ["a parameter", "an input"])
def test_write_to_parameter_or_input_before_backward_raises(what: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    loss = planner.compile(model, F.mse_loss, (x, y), budget="100%")(x, y)
    with torch.no_grad():
        (model[2].weight if what == "a parameter" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
