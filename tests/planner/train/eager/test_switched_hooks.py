"""A block that begins before the C++ library is there: it takes over between two steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.native import library
from planner.native.library import wait_for_library
from planner.torch_private.core import TorchDispatchMode, current_dispatch_mode
from planner.train.eager.session import rematerialize
from tests.support.eager.chains import chain, is_native
from tests.support.eager.tensors import other_bytes
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY


@pytest.fixture
def arrive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Take the library away, and return what brings it back."""
    loaded = wait_for_library()
    monkeypatch.setattr(library._LOADER, "library", None)
    monkeypatch.setattr(library._LOADER, "start", lambda: None)
    return lambda: monkeypatch.setattr(library._LOADER, "library", loaded)


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def test_the_library_takes_over_between_two_steps(arrive: Callable[[], None]) -> None:
    model, x = chain(), torch.randn(256, 64)
    expected = train(model, x)
    with rematerialize("1GB") as session:
        assert all(map(torch.equal, expected, train(model, x)))
        assert session.debug.native is None
        ops = session.ops
        loss = model(x).square().mean()
        arrive()
        loss.backward()  # of a step that was recorded in Python
        assert session.debug.native is None
        for _ in range(2):
            assert all(map(torch.equal, expected, train(model, x)))
        assert is_native(session)
        late = model(x).square().mean()  # its saved tensors outlive the block
    assert session.ops > 3 * ops
    assert session.peak_bytes <= session.budget_bytes
    model.zero_grad()
    late.backward()
    assert all(map(torch.equal, expected[1:], [parameter.grad for parameter in model.parameters()]))
    with rematerialize("1GB") as session:
        for _ in range(3):
            assert all(map(torch.equal, expected, train(model, x)))
        assert is_native(session)


def test_after_the_library_took_over_steps_still_fit_the_budget(arrive: Callable[[], None]) -> None:
    model, x = chain(), torch.randn(2048, 64)
    expected = train(model, x)
    model.zero_grad()
    with rematerialize(other_bytes() + 7 * x.nbytes) as session:
        train(model, x[:32])
        arrive()
        for _ in range(2):
            train(model, x[:32])
        assert is_native(session)
        found = train(model, x)
        assert session.evictions > 0
    assert session.peak_bytes <= session.budget_bytes
    assert all(map(torch.equal, expected, found))


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Recomputed(torch.autograd.Function):
    """Saves nothing, and runs a model with its gradients in the backward pass."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.x, ctx.model = x.detach(), model
        return model(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            torch.autograd.backward(ctx.model(ctx.x), gradient)
        return gradient, None


def in_a_transform(model: nn.Module, x: Tensor) -> None:
    torch.func.grad(lambda x: model(x).square().mean())(x)


def in_a_backward_pass(model: nn.Module, x: Tensor) -> None:
    Recomputed.apply(x.clone().requires_grad_(), model).sum().backward()


def under_another_mode(model: nn.Module, x: Tensor) -> None:
    with Other():
        model(x).square().mean().backward()


@pytest.mark.parametrize("run", [in_a_transform, in_a_backward_pass, under_another_mode])
def test_the_library_waits_while_pytorch_will_restore_its_state(
    run: Callable[[nn.Module, Tensor], None], arrive: Callable[[], None]
) -> None:
    model, x = chain(2), torch.randn(16, 64)
    with rematerialize("1GB") as session:
        train(model, x)
        arrive()
        run(model, x)
        assert session.debug.native is None
        for _ in range(3):
            train(model, x)
        assert is_native(session)
    assert current_dispatch_mode() is None
