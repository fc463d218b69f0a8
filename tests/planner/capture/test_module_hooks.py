"""Hooks of modules that a step registers and removes again are captured; those that stay are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import TraceError
from tests.support.models.as_eager import check_trains_as_eager


def scaled(m: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Takes by keyword what its caller does not pass."""
    hidden = m.inner(x).tanh()
    return m.outer(hidden if scale is None else hidden * scale)


def pass_scale(_: nn.Module, args: Any, kwargs: dict[str, Any], scale: torch.Tensor) -> Any:
    kwargs["scale"] = scale
    return args, kwargs


class Passing(nn.Module):
    """Passes a part of the batch to its layers by hooks of one call; one layer has a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FunctionModule(scaled, inner=nn.Linear(16, 64), outer=nn.Linear(64, 16)) for _ in range(3))
        self.layers[1].register_forward_pre_hook(halve)

    @contextmanager
    def hook(self, scale: torch.Tensor) -> Iterator[None]:
        hook = partial(pass_scale, scale=scale)
        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        with self.hook(scale), self.layers[0].register_forward_hook(lambda _module, _args, output: outputs.append(output)):
            for layer in self.layers:
                x = x + layer(x)
        return (self.layers[0](x) + outputs[0]).square().mean()


def halve(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (0.5 * args[0],)


def vectors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(96, 16, generator=generator), torch.rand(96, 1, generator=generator)


def test_hooks_of_one_step_pass_their_arguments_as_in_eager_pytorch() -> None:
    model = Passing()
    check_trains_as_eager(Passing, None, vectors)
    planner.trace(model, None, vectors(0), passes=1)
    assert [len(layer._forward_pre_hooks) for layer in model.layers] == [0, 1, 0]


def test_hooks_run_in_the_order_in_which_eager_pytorch_runs_them() -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        last = model.layer.register_forward_pre_hook(lambda _, args: (args[0] - 2,))
        first = model.layer.register_forward_pre_hook(lambda _, args: (args[0] * 3,), prepend=True)
        hidden = model.layer(x)
        first.remove()
        first.remove()
        hidden = model.layer(hidden)
        last.remove()
        return model.layer(hidden)

    model, x = running(run), torch.randn(4, 4)
    step = planner.compile(model, None, (x,), budget="100%", passes=1, wait=0)
    assert torch.equal(step(x), model(x))


def running(run: Callable[..., torch.Tensor]) -> nn.Module:
    """Calls a function, with a layer."""
    return FunctionModule(lambda m, x: run(m, x).square().mean(), layer=nn.Linear(4, 4))


def leave(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.layer.register_forward_pre_hook(halve)
    return model.layer(x)


def replace_next(model: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "handle"):
        model.handle.remove()
    model.handle = model.layer.register_forward_pre_hook(halve)
    return model.layer(x)


def keep_handle(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.handle = model.layer.register_forward_pre_hook(halve)
    x = model.layer(x)
    model.handle.remove()
    return x


@pytest.mark.parametrize("run", [leave, replace_next, keep_handle])
def test_hook_that_outlives_the_step_is_refused_with_its_line(run: Callable[..., torch.Tensor]) -> None:
    model = running(run)
    with pytest.raises(TraceError, match=r"\(.*model.layer.register_forward_pre_hook\(halve\)\) registers a hook in the step"):
        planner.trace(model, None, (torch.randn(4, 4),), passes=1)
    assert not model.layer._forward_pre_hooks
