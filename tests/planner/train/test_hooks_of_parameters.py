"""Hooks of parameters run where eager PyTorch runs them: never for parameters that get no gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from benchmarks.models.parts import FunctionModule
from tests.support.marks import slow

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
    return eager(torch.compile(model, backend="planner", options=QUICK), x, y)


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


@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
def test_hooks_run_for_parameters_with_a_gradient_only(entry: Entry) -> None:
    wanted = called_hooks(eager)
    assert {name for _, name, _ in wanted} == {"first.weight", "first.bias", "last.weight", "last.bias", "before"}
    assert called_hooks(entry) == wanted


class TwoHeads(nn.Module):
    """A model of which a loss may read only one of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.aside = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.main(hidden), self.aside(hidden) * extra


def hooks_of_heads(wrap: Callable[[nn.Module], Callable[..., Any]]) -> list[object]:
    """Return the hooks that three backward passes call, of which the second also reads the result aside, and the gradients."""
    torch.manual_seed(0)
    model, scale, called, alive = TwoHeads(), torch.ones(3, requires_grad=True), [], []
    for name, leaf in {**dict(model.named_parameters()), "scale": scale}.items():
        leaf.register_hook(lambda gradient, name=name: called.append(("tensor", name, gradient.shape)))
        leaf.register_post_accumulate_grad_hook(lambda p, name=name: called.append(("after", name, p.grad.shape)))
        alive.append(leaf.view_as(leaf).grad_fn.next_functions[0][0])
        alive[-1].register_prehook(lambda gradients, name=name: called.append(("before node", name, gradients[0].shape)))
        alive[-1].register_hook(lambda _, gradients, name=name: called.append(("after node", name, gradients[0].shape)))
    run, seen = wrap(model), list[object]()
    for aside in (0.0, 0.5, 0.0):
        extra = scale * 2.0  # between the graph and a leaf
        extra.register_hook(lambda gradient: called.append(("tensor", "extra", gradient.shape)))
        main, other = run(torch.randn(16, 4), extra)
        (main.square().sum() + other.sum() * aside if aside else main.square().sum()).backward()
        seen += [sorted(called), *(None if leaf.grad is None else leaf.grad.tolist() for leaf in (*model.parameters(), scale))]
        called.clear()
    return seen


@pytest.mark.parametrize("options", [{}, {"kernels": "inductor"}])
def test_hooks_of_a_result_that_the_loss_does_not_read_are_not_called(options: dict[str, object]) -> None:
    wanted = hooks_of_heads(lambda model: model)
    found = hooks_of_heads(lambda model: torch.compile(model, backend="planner", options={**QUICK, **options}))
    if options:  # other kernels have other bits
        wanted, found = wanted[::8], found[::8]
    assert found == wanted
    assert wanted[0] != wanted[len(wanted) // 3]


def test_a_backward_pass_that_fails_leaves_the_hooks_of_the_next() -> None:
    torch.manual_seed(0)
    model, called = TwoHeads(), list[bool]()
    model.aside.weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad is not None))
    planned = planner.checkpoint(model, **QUICK)
    x, extra = torch.randn(16, 4, requires_grad=True), torch.ones(3)

    def fail(_: Tensor) -> None:
        raise FloatingPointError

    failing = x * 2.0
    failing.register_hook(fail)
    with pytest.raises(FloatingPointError):
        planned(failing, extra)[0].sum().backward()
    planned(x, extra)[1].sum().backward()
    planned(x, extra)[0].sum().backward()
    assert called == [True]


@pytest.mark.parametrize("entry", [compiled, as_backend, *slow(checkpointed)])
def test_an_optimizer_in_the_backward_pass_trains_as_eager(entry: Entry) -> None:
    def train(entry: Entry) -> list[Tensor]:
        torch.manual_seed(0)
        model = Partial()
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters() if p.requires_grad}

        def update(parameter: Tensor) -> None:
            parameter.grad.clamp_(-0.1, 0.1)  # which fails without a gradient
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

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

    model = FunctionModule(lambda m, x: m.layer(x.detach()).square().mean(), layer=nn.Linear(4, 4))
    x, called = torch.randn(4, 4, requires_grad=True), []
    x.register_hook(called.append)
    for step in (planner.compile(model, None, (x * 2,), **QUICK), planner.checkpoint(model, **QUICK)):
        step(x * 2).backward()
        assert called == []
        assert x.grad is None
