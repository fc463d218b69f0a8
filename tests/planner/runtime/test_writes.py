"""Writes between the passes: under autograd's version check, or found by ``check_writes=True`` behind its back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.checksum import compute_checksum
from planner.graphs.errors import PlannerError
from planner.runtime import saved_hooks
from tests.support.marks import slow

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


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Made = tuple[nn.Module, torch.Tensor, torch.Tensor]


def make() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.randn(16, 4), torch.randn(16, 4)


def compiled(made: Made, **options: bool) -> Loss:
    model, x, y = made
    return planner.compile(model, F.mse_loss, (x, y), budget="100%", passes=1, compare_eager=False, **options)


def by_backend(made: Made, **options: bool) -> Loss:
    model = torch.compile(made[0], backend="planner", dynamic=False, options={"budget": "100%", "time_limit_s": 5, **options})
    return lambda x, y: F.mse_loss(model(x), y)


def checkpointed(made: Made, **options: bool) -> Loss:
    model = planner.checkpoint(made[0], budget="100%", time_limit_s=5, **options)
    return lambda x, y: F.mse_loss(model(x), y)


WAYS = [compiled, by_backend, *slow(checkpointed)]
UNSEEN: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], str]] = {
    "a parameter's data": (lambda model, x: model[3].weight.data.mul_(2), r"3\.weight was written between the step and its back"),
    "a batch by NumPy": (lambda model, x: x.numpy().fill(1), "input 0 .*was written between the step and its backward"),
    "a batch in another order": (lambda model, x: x.numpy().sort(axis=0), "input 0 .*was written between the step"),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", UNSEEN)
def test_a_write_that_autograd_does_not_see_is_found(way: Callable[..., Loss], what: str) -> None:
    model, x, y = made = make()
    step = way(made, check_writes=True)
    write, message = UNSEEN[what]
    for _ in range(2):
        step(x, y).backward()
        model.zero_grad()
    loss = step(x, y)
    write(model, x)
    with pytest.raises(PlannerError, match=message):
        loss.backward()
    step(x, y).backward()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_change_saved_tensors_warn(way: Callable[..., Loss]) -> None:
    made = make()
    step = way(made)
    saved_hooks._warn.cache_clear()
    with saved_tensors_hooks(lambda t: t * 0.5, lambda t: t), pytest.warns(UserWarning, match="hooks on saved tensors"):
        step(*made[1:])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
def test_unseen_writes_are_not_checked_by_default(way: Callable[..., Loss]) -> None:
    model, x, y = made = make()
    loss = way(made)(x, y)
    model[3].weight.data.mul_(2)
    loss.backward()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
def test_writes_seen_by_autograd_raise_its_own_error(way: Callable[..., Loss]) -> None:
    model, x, y = made = make()
    loss = way(made, check_writes=True)(x, y)
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7.0),
        torch.arange(12.0).view(3, 4).t(),
        torch.full((2**17,), 2.0),
        torch.arange(2**17 + 3, dtype=torch.bfloat16),
        torch.arange(5) > 2,
        torch.arange(6).to(torch.complex64),
        torch.arange(4).to(torch.uint8),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_checksum_tells_bits_and_their_order(tensor: torch.Tensor) -> None:
    assert torch.equal(compute_checksum(tensor), compute_checksum(tensor.clone()))
    other = tensor.clone()
    other[-1] = other[-1] == 0
    assert not torch.equal(compute_checksum(tensor), compute_checksum(other))
    if not torch.equal(tensor, tensor.flip(0)):
        assert not torch.equal(compute_checksum(tensor), compute_checksum(tensor.flip(0)))


def test_a_checksum_tells_zeros_apart() -> None:
    assert not torch.equal(compute_checksum(torch.tensor([0.0])), compute_checksum(torch.tensor([-0.0])))
    assert torch.equal(compute_checksum(torch.zeros(0)), compute_checksum(torch.zeros(0)))
