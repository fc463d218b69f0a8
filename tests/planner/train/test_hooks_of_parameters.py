"""Hooks of parameters run where eager PyTorch runs them: never for parameters that get no gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning:torch.*")]

QUICK: dict[str, Any] = {"budget": "100%", "wait": 0.1}
Step = Callable[[Tensor, Tensor], Tensor]
Entry = Callable[[nn.Module, Tensor, Tensor], Step]


class Partial(nn.Module):
    """A model with parameters of every kind that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.unused, self.detached, self.silent = (nn.Linear(8, 8) for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = self.first
        self.register_buffer("scale", torch.ones(8, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.first(x).tanh() + self.tied(x))
        with torch.no_grad():
            quiet = self.silent(h)
        return self.last(h + self.detached(h).detach() + quiet + (h * self.scale).detach())


def eager(model: nn.Module, _: Tensor, __: Tensor) -> Step:
    return lambda x, y: F.cross_entropy(model(x), y)


def compiled(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return planner.compile(model, F.cross_entropy, (x, y), **QUICK)


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return eager(planner.checkpoint(model, **QUICK), x, y)


def as_backend(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return eager(torch.compile(model, backend="planner", options=QUICK), x, y)  # type: ignore[arg-type]


def called_hooks(entry: Entry) -> list[tuple[str, str, bool]]:
    """Return the hooks that a step with a batch from another layer calls: kind, parameter, and True if it got a gradient."""
    torch.manual_seed(0)
    model, before, called, alive = Partial(), nn.Linear(4, 4), [], []
    leaves = {**dict(model.named_parameters()), "scale": model.scale, "before": before.weight}

    def note(kind: str, name: str, gradient: object) -> None:
        called.append((kind, name, gradient is not None))

    for name, leaf in leaves.items():
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(lambda p, name=name: note("after", name, p.grad))
            leaf.register_hook(lambda gradient, name=name: note("tensor", name, gradient))
            alive.append(leaf.view_as(leaf).grad_fn.next_functions[0][0])
            alive[-1].register_hook(lambda *_, name=name: note("node", name, True))
    y = torch.randint(3, (16,))
    step = entry(model, before(torch.randn(16, 4)), y)
    called.clear()
    step(before(torch.randn(16, 4)), y).backward()
    return sorted(called)


@pytest.mark.parametrize("entry", [compiled, checkpointed, as_backend])
def test_hooks_run_for_parameters_with_a_gradient_only(entry: Entry) -> None:
    wanted = called_hooks(eager)
    assert {name for _, name, _ in wanted} == {"first.weight", "first.bias", "last.weight", "last.bias", "before"}
    assert called_hooks(entry) == wanted


@pytest.mark.parametrize("entry", [compiled, checkpointed, as_backend])
def test_an_optimizer_in_the_backward_pass_trains_as_eager(entry: Entry) -> None:
    def train(entry: Entry) -> list[Tensor]:
        torch.manual_seed(0)
        model = Partial()
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters() if p.requires_grad}

        def update(parameter: Tensor) -> None:
            parameter.grad.clamp_(-0.1, 0.1)  # type: ignore[union-attr]  # which fails without a gradient
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(update)
        x, y = torch.randn(16, 4), torch.randint(3, (16,))
        step = entry(model, x, y)
        for _ in range(3):
            step(x, y).backward()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, train(eager), train(entry)))


def test_an_input_that_gets_no_gradient_keeps_its_history_unused() -> None:
    torch.manual_seed(0)

    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.detach()).square().mean()

    model, x, called = Detaching(), torch.randn(4, 4, requires_grad=True), []
    x.register_hook(called.append)
    for step in (planner.compile(model, None, (x * 2,), **QUICK), planner.checkpoint(model, **QUICK)):
        step(x * 2).backward()
        assert called == []
        assert x.grad is None
