"""Gradients of earlier steps beside a step that does not count them: refused where they do not fit, and only there."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.graphs.errors import BudgetError
from planner.graphs.schedule import Schedule, keep_everything
from planner.runtime.earlier_gradients import EarlierGradients, pass_peaks
from planner.train.compile.step import PlannedStep
from tests.support.budgets import HALF_WAY, half_way_known
from tests.support.marks import slow

Workload = tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Loop = Callable[[PlannedStep, torch.optim.Optimizer, torch.Tensor, torch.Tensor], None]


def workload() -> Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 4)), F.cross_entropy, (torch.randn(512, 64), torch.randint(4, (512,)))


def zeroed_behind(step: PlannedStep, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x, y).backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def zeroed_before(step: PlannedStep, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    step(x, y).backward()
    optimizer.step()


def zeroed_between(step: PlannedStep, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = step(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def filled_with_zeros(step: PlannedStep, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x, y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def never_zeroed(step: PlannedStep, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x, y).backward()
    optimizer.step()


def two_losses(step: PlannedStep, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    step(x, y).backward()
    step(x, y).backward()
    optimizer.step()


def two_losses_at_once(step: PlannedStep, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    first, second = step(x, y), step(x, y)
    first.backward()
    second.backward()
    optimizer.step()


FITTING = [zeroed_behind, zeroed_before, *slow(two_losses_at_once)]
NOT_FITTING = [never_zeroed, *slow(filled_with_zeros, two_losses)]


@pytest.fixture(autouse=True)
def _half_way() -> Iterator[None]:
    with half_way_known():
        yield


def trained(loop: Loop, step: Callable[..., torch.Tensor], work: Workload) -> list[torch.Tensor]:
    model, _, (x, y) = work
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loop(step, optimizer, x, y)
    return [parameter.detach() for parameter in model.parameters()]


def eager(loop: Loop) -> list[torch.Tensor]:
    model, loss_fn, batch = workload()
    return trained(loop, lambda x, y: loss_fn(model(x), y), (model, loss_fn, batch))


@pytest.mark.parametrize("loop", FITTING)
def test_loops_that_keep_no_gradients_train(loop: Loop) -> None:
    work = workload()
    assert all(map(torch.equal, trained(loop, planner.compile(*work, budget=HALF_WAY, passes=1, wait="1%"), work), eager(loop)))


@pytest.mark.parametrize("loop", NOT_FITTING)
def test_gradients_that_do_not_fit_are_one_error(loop: Loop) -> None:
    work = workload()
    step = planner.compile(*work, budget=HALF_WAY, passes=1, wait="1%")
    with pytest.raises(BudgetError, match=r"gradients of an earlier step \(.* over the budget .*zero_grad\(\).*accumulate=True"):
        trained(loop, step, work)
    work[0].zero_grad()
    step(*work[2]).backward()


@pytest.mark.parametrize("loop", NOT_FITTING)
def test_gradients_that_are_counted_are_accumulated(loop: Loop) -> None:
    work = workload()
    step = planner.compile(*work, budget=HALF_WAY, passes=1, accumulate=True, wait="1%")
    assert all(map(torch.equal, trained(loop, step, work), eager(loop)))


@pytest.mark.parametrize("loop", NOT_FITTING)
def test_gradients_for_which_there_is_room_are_no_error(loop: Loop) -> None:
    work = workload()
    step = planner.compile(*work, budget="200%", passes=1)
    assert all(map(torch.equal, trained(loop, step, work), eager(loop)))


def test_gradients_that_go_before_the_backward_pass_count_in_the_forward_pass_only() -> None:
    work = workload()
    graph = planner.trace(*work, passes=1)
    forward, backward = pass_peaks(graph, keep_everything(graph))
    there = sum(p.nbytes for p in work[0].parameters())
    step = planner.compile(*work, budget=max(forward + there, backward), passes=1)
    assert all(map(torch.equal, trained(zeroed_between, step, work), eager(zeroed_between)))


def test_gradients_that_are_there_while_a_step_is_planned_are_none_of_its_own() -> None:
    model, loss_fn, (x, y) = workload()
    loss_fn(model(x), y).backward()
    step = planner.compile(model, loss_fn, (x, y), budget=HALF_WAY, passes=1)
    model.zero_grad()
    step(x, y).backward()


def test_no_plan_is_taken_beside_which_they_do_not_fit() -> None:
    model, loss_fn, batch = workload()
    graph = planner.trace(model, loss_fn, batch, passes=1)
    kept: Schedule = keep_everything(graph)
    forward, backward = pass_peaks(graph, kept)
    assert forward < backward
    beside = EarlierGradients(graph, kept)
    loss_fn(model(batch[0]), batch[1]).backward()
    there = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    beside.budget_bytes = max(forward + there, backward)
    assert beside.count("forward", model.parameters()) == there
    assert beside.fit_with(graph, kept)
    beside.budget_bytes -= 1
    assert not beside.fit_with(graph, kept)
    with pytest.raises(BudgetError, match="backward pass begins"):
        beside.count("backward", model.parameters())
