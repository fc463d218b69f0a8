"""Hooks on gradients that record or need values are called in the backward pass of a plan, as eager PyTorch calls them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import TraceError
from tests.support.library_states import set_library
from tests.support.models.as_eager import check_trains_as_eager

SEEN: list[Any] = []


class Hooked(nn.Module):
    """Registers hooks of its modules once, and of its tensors in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))
        self.last: torch.Tensor | None = None
        self.found: list[torch.Tensor] = []
        self.scale = 0.5
        for i, layer in enumerate(self.layers[:3]):
            layer.register_full_backward_hook(partial(note_call, i))
        self.layers[0].register_full_backward_pre_hook(lambda _, returned: SEEN.append(("before", float(returned[0].norm()))))
        self.layers[1].register_full_backward_pre_hook(lambda _, returned: (returned[0].clamp(-1e-3, 1e-3),))
        self.layers[2].register_full_backward_hook(lambda _, given, __: (2 * given[0],))
        self.layers[5].register_forward_hook(lambda _, __, output: output.register_hook(note_sum) and None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 3:
                x.register_hook(lambda gradient, i=i: SEEN.append((i, i_last, float(gradient.norm()))))  # noqa: B023
                x.register_hook(self.keep)
            elif i == 2:
                x.register_hook(self.normalize)
            elif i == 4:
                for handle in (x.register_hook(lambda gradient: 3 * gradient), x.register_hook(SEEN.append)):
                    handle.remove()
                x.register_hook(self.note)
            i_last = i
        return x.square().mean()

    # Not the gradients: memory that hooks keep is not known to a plan (docs/limits.md).
    def keep(self, gradient: torch.Tensor) -> None:
        self.last = gradient.sum()

    def note(self, gradient: torch.Tensor) -> None:
        self.found.append(gradient.sum())

    def normalize(self, gradient: torch.Tensor) -> torch.Tensor:
        SEEN.append(self.last)
        return gradient * self.scale / max(1e-3, float(gradient.norm()))


def note_sum(gradient: torch.Tensor) -> None:
    SEEN.append(gradient.sum())


def note_call(number: int, _: nn.Module, given: Any, returned: Any) -> None:
    SEEN.append((number, None if given[0] is None else given[0].sum(), float(returned[0].norm())))


def rows(number: int) -> tuple[torch.Tensor]:
    return (torch.randn(64, 32, generator=torch.Generator().manual_seed(number)),)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # as in eager PyTorch
def test_hooks_are_called_as_in_eager_pytorch() -> None:
    SEEN.clear()
    check_trains_as_eager(Hooked, None, rows)
    half = len(SEEN) // 2  # those of the plan come first
    assert half == 4 * 7
    assert list(map(describe, SEEN[:half])) == list(map(describe, SEEN[half:]))


def describe(seen: Any) -> Any:
    return tuple(map(describe, seen)) if isinstance(seen, tuple) else seen.tolist() if isinstance(seen, torch.Tensor) else seen


@pytest.mark.parametrize("entry", ["compile", "checkpoint", "backend"])
@pytest.mark.filterwarnings("ignore:model.handle is set by the step")
def test_hooks_that_a_step_removes_are_not_called(entry: str) -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model.layer(x).tanh()
        handle = hidden.register_hook(lambda gradient: -gradient)
        handle.remove()

        def remove_and_double(gradient: torch.Tensor) -> torch.Tensor:
            if model.handle is not None:
                model.handle.remove()
            return 2 * gradient

        if entry == "compile":  # no graph holds it, and Dynamo captures nothing of the model
            model.handle = hidden.register_hook(remove_and_double)
        return hidden.square().mean()

    torch.manual_seed(0)
    model, x = FunctionModule(run, layer=nn.Linear(4, 4), handle=None), torch.randn(4, 4)
    (wanted,) = torch.autograd.grad(model(x), model.layer.weight)
    assert (model.handle is None) is (entry != "compile")
    model.handle = None
    options: dict[str, Any] = {"budget": "100%", "wait": 0.1}
    step = torch.compile(model, backend="planner", options=options) if entry == "backend" else model
    if entry == "checkpoint":
        planner.checkpoint(model, **options)
    if entry == "compile":
        step = planner.compile(model, None, (x,), **options, on_progress=False)
    step(x).backward()
    assert torch.equal(model.layer.weight.grad, wanted)


def remove_after_use(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.layer(x).tanh()
    handle = hidden.register_hook(lambda gradient: 2 * gradient)
    (slope,) = torch.autograd.grad(hidden.square().sum(), hidden, create_graph=True)
    handle.remove()
    return slope


def retain(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.hidden = model.layer(x).tanh()
    model.hidden.retain_grad()
    return model.hidden


@pytest.mark.parametrize(
    ("run", "said"), [(remove_after_use, "hook is removed after torch.autograd.grad"), (retain, r"take the gradient in a hook")]
)
def test_what_a_plan_does_not_do_around_hooks_raises(run: Callable[..., torch.Tensor], said: str) -> None:
    model = FunctionModule(lambda m, x: run(m, x).square().mean(), layer=nn.Linear(4, 4))
    with pytest.raises(TraceError, match=said):
        planner.trace(model, None, (torch.randn(4, 4),), passes=1)


def keep_by_tensor(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.layer(x).tanh()
    hidden.register_hook(lambda gradient: SEEN.append((gradient * hidden).sum()))
    return hidden


def keep_in_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden, model.found = model.layer(x).tanh(), []
    hidden.register_hook(model.found.append)
    return hidden


def count_in_closure(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden, count = model.layer(x).tanh(), 0

    def note(gradient: torch.Tensor) -> None:
        nonlocal count
        count += 1
        SEEN.append((count, gradient))

    hidden.register_hook(note)
    return hidden


@pytest.mark.parametrize("run", [keep_by_tensor, keep_in_list, count_in_closure])
def test_hook_that_reads_what_the_step_makes_is_refused_with_its_line(run: Callable[..., torch.Tensor]) -> None:
    model = FunctionModule(lambda m, x: run(m, x).square().mean(), layer=nn.Linear(4, 4))
    with pytest.raises(TraceError, match=r"\(.*register_hook\(.*\) registers a hook that changes Python objects"):
        planner.trace(model, None, (torch.randn(4, 4),), passes=1)


def give_by_grad(model: nn.Module, loss: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def give_in_anomaly_mode(_: nn.Module, loss: torch.Tensor) -> None:
    with torch.autograd.set_detect_anomaly(True):
        loss.backward()


@pytest.mark.parametrize("is_native", [True, False])
def test_gradients_are_given_as_autograd_gives_them(monkeypatch: pytest.MonkeyPatch, *, is_native: bool) -> None:
    if not is_native:
        set_library(monkeypatch, None)
    kinds: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
        "plain": lambda _, loss: loss.backward(),
        "twice": lambda _, loss: (loss.backward(retain_graph=True), loss.backward()),
        "penalty": lambda model, loss: (loss + sum(p.square().sum() for p in model.parameters())).backward(),
        "returned": give_by_grad,
        "anomaly": give_in_anomaly_mode,
        "chosen": lambda model, loss: loss.backward(inputs=[model[0].weight]),
        "hook": lambda model, loss: (model[0].weight.register_hook(lambda gradient: 2 * gradient), loss.backward()),
        "written": lambda model, loss: (model[2].bias.register_post_accumulate_grad_hook(SEEN.append), loss.backward()),
        "frozen": lambda model, loss: (model[0].weight.requires_grad_(False), loss.backward()),
    }
    SEEN.clear()
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    eager, batch = copy.deepcopy(model), (*rows(0), *rows(1))
    step = planner.compile(model, nn.MSELoss(), batch, budget="300%", passes=1, on_progress=False)
    for kind, run in kinds.items():
        for _ in range(1 if kind == "frozen" else 2):  # the gradients of the first step are new, those of the second are added
            loss = step(*batch)
            run(model, loss)
            run(eager, nn.functional.mse_loss(eager(batch[0]), batch[1]))
            pairs = list(zip(model.parameters(), eager.parameters(), strict=True))
            assert all(p.grad is other.grad is None or torch.equal(p.grad, other.grad) for p, other in pairs)
            assert (loss.grad_fn.next_functions == ()) == (is_native and kind in ("plain", "twice"))
        for module in (model, eager):
            module.zero_grad()
    assert len(SEEN) == 2 * (1 + 2 + 2)
