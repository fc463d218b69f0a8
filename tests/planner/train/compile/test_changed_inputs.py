"""Buffers, inputs and parameters that are written between the passes: eager PyTorch's results, and its errors."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.graphs.errors import PlannerError
from planner.graphs.ir import Kind
from planner.measure.steps import measure_memory
from planner.runtime.changed_inputs import ChangedInputs
from tests.support.budgets import HALF_WAY

pytestmark = pytest.mark.usefixtures("half_way")

ROWS, WIDTH = 64, 128
QUICK: dict[str, Any] = {"passes": 1, "time_limit_s": 5.0, "compare_eager": False}


class Centred(nn.Module):
    """Subtracts a running mean of its inputs from them, as agents and teachers do: whatever is evicted is recomputed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.scales = nn.ParameterList(torch.full((WIDTH,), 1.0 / k) for k in range(1, 7))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = (scale * torch.sin((x - self.mean) * k + self.shift) for k, scale in enumerate(self.scales, start=1))
        return self.head(sum(waves))

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.1)
        self.shift.add_(0.01)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH) * 3 + 1, torch.randn(ROWS, 16)


def model() -> Centred:
    torch.manual_seed(0)
    return Centred()


def train(module: Centred, step: Callable[..., Any], between: Callable[..., None], steps: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters())
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = batch()
        loss = step(x, y)
        between(module, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *module.state_dict().values()]


def update(module: Centred, x: torch.Tensor) -> None:
    module.update(x)


def update_data(module: Centred, x: torch.Tensor) -> None:
    module.mean.data = module.mean.lerp(x.mean(0), 0.1)
    module.shift.data.add_(0.01)


def eager(between: Callable[..., None]) -> list[torch.Tensor]:
    plain = model()
    return train(plain, lambda x, y: F.mse_loss(plain(x), y), between)


@pytest.mark.parametrize(("budget", "write"), [(HALF_WAY, update), ("100%", update), (HALF_WAY, update_data)])
def test_training_equals_eager_within_the_budget(budget: str, write: Callable[..., None]) -> None:
    module = model()
    step = planner.compile(module, F.mse_loss, batch(), budget=budget, optimizer="adamw", **QUICK)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = train(module, step, write)
    assert all(map(torch.equal, found, eager(write)))
    said = [str(warning.message) for warning in seen if "changed between" in str(warning.message)]
    if budget == "100%":  # nothing is recomputed
        assert not said
        return
    assert len(said) == 1
    assert said[0].startswith("planned again: shift, mean changed between forward and backward pass")
    assert len(step.history) >= 2
    assert any(use.plan.graph.static_bytes == step.history[0].plan.graph.static_bytes + 2 * 4 * WIDTH for use in step.history)
    again = measure_memory(step, batch(), static_bytes=step.plan.graph.static_bytes - 4, device=torch.device("cpu"))
    assert again.peak_bytes <= step.plan.budget_bytes


def test_what_nothing_writes_is_not_planned_again_for_its_nan() -> None:
    module = model()
    module.mean[0] = torch.nan
    step = planner.compile(module, F.mse_loss, batch(), budget=HALF_WAY, optimizer="adamw", swap="never", **QUICK)
    train(module, step, lambda *_: None)
    assert len(step.history) == 1


def test_small_tensors_are_copied_first() -> None:
    graph = planner.trace(model(), F.mse_loss, batch(), passes=1)
    weights = [t for t in graph.tensors if t.kind is Kind.PARAMETER]
    smallest = min(weights, key=lambda t: t.size_bytes)
    changed = ChangedInputs(graph, [t.id for t in weights])
    assert smallest is not weights[0] and changed.begin(smallest.size_bytes) == 0
    assert [given.tensor for given in changed.save(lambda _: torch.zeros(())) if given.copy is not None] == [smallest.id]


def test_an_input_may_be_overwritten_between_the_passes() -> None:
    def overwrite(module: Centred, x: torch.Tensor) -> None:
        x.zero_()

    module = model()
    step = planner.compile(module, F.mse_loss, batch(), budget=HALF_WAY, optimizer="adamw", **QUICK)
    with pytest.warns(UserWarning, match="planned again: input 0 of the batch changed"):
        found = train(module, step, overwrite)
    assert all(map(torch.equal, found, eager(overwrite)))


def test_a_write_where_eager_raises_still_raises() -> None:
    module = model()

    def clip(module: Centred, x: torch.Tensor) -> None:
        with torch.no_grad():
            module.head.weight.clamp_(-0.01, 0.01)

    for step in (planner.compile(module, F.mse_loss, batch(), budget=HALF_WAY, optimizer="adamw", **QUICK), None):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(module, step or (lambda x, y: F.mse_loss(module(x), y)), clip)


def test_a_write_that_comes_after_many_steps_loses_one_step() -> None:
    module = model()
    step = planner.compile(module, F.mse_loss, batch(), budget=HALF_WAY, optimizer="adamw", swap="never", **QUICK)
    train(module, step, lambda module, x: None, steps=2)
    with pytest.raises(PlannerError, match=r"mean was written between the step and its backward pass.* call the step again"):
        train(module, step, update, steps=1)
    module.zero_grad()
    plain = model()
    plain.load_state_dict(module.state_dict())
    with pytest.warns(UserWarning, match="planned again: shift, mean changed"):
        found = train(module, step, update)
    assert all(map(torch.equal, found, train(plain, lambda x, y: F.mse_loss(plain(x), y), update)))


def test_copies_stay_for_a_second_backward_pass() -> None:
    module, plain = model(), model()
    step = planner.compile(module, F.mse_loss, batch(), budget=HALF_WAY, accumulate=True, **QUICK)
    x, y = batch()
    for run, changed in ((step, module), (lambda x, y: F.mse_loss(plain(x), y), plain)):
        loss = run(x, y)
        changed.update(x)
        loss.backward(retain_graph=True)
        changed.update(x)
        loss.backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True) if b.grad is not None
    )


def test_writes_that_autograd_does_not_see_are_still_found() -> None:
    module = model()
    step = planner.compile(module, F.mse_loss, batch(), budget=HALF_WAY, check_writes=True, **QUICK)
    for _ in range(2):
        loss = step(*batch())
        module.mean.data.add_(1.0)
        with pytest.raises(PlannerError, match="mean was written between the step and its backward pass in a way"):
            loss.backward()


@pytest.mark.parametrize("through", ["checkpoint", "backend"])
def test_checkpoint_and_backend_equal_eager(through: str) -> None:
    torch._dynamo.reset()
    module = model()
    options = {"budget": HALF_WAY, "time_limit_s": 5.0, "wait": 0}
    if through == "checkpoint":
        called = planner.checkpoint(module, **options)
    else:
        called = torch.compile(module, backend="planner", options=options)
    with pytest.warns(UserWarning, match="planned again: .*mean.* changed between forward and backward pass") as seen:
        found = train(module, lambda x, y: F.mse_loss(called(x), y), update)
    assert all(map(torch.equal, found, eager(update)))
    assert len([warning for warning in seen if "changed between" in str(warning.message)]) == 1
