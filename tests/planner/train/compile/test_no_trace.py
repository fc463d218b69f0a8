"""Planning leaves no trace: parameters, gradients, buffers, optimizer and random states, and what Python objects hold."""

import functools
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.frontend.preserved_state import UndoWrites, preserve_training_state
from planner.capture.step import TrainingStep
from planner.graphs.errors import PlannerError, TraceError
from tests.support.marks import slow
from tests.support.models.planned import BATCH, CALLS, Remembers, assert_no_trace, plan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what a planned step does not change


class Fails(Remembers):
    """Stops the capture after it has changed what it can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        self.count += 1
        self.history.append(2)
        self.by_name["calls"] += 1
        CALLS.append(1)
        return hidden if hidden.sum().item() > 0 else -hidden


def steps_behind_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())


def steps_in_tensor_hooks(model: nn.Module, optimizer: Optimizer) -> None:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        CALLS.append(2)
        return 2 * gradient

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(hook)


def steps_behind_accumulation(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.accumulation = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            parameter.accumulation.register_hook(lambda *_: optimizer.step())


@pytest.mark.parametrize("hook", [steps_behind_parameters, steps_behind_accumulation, *slow(steps_in_tensor_hooks)])
def test_an_optimizer_in_the_backward_pass_does_not_step(hook: Callable[[nn.Module, Optimizer], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    hook(model, optimizer)
    step = None

    def act() -> None:
        nonlocal step
        step = plan(model, accumulate=True)
        planner.run(step.plan, model, F.cross_entropy, BATCH, repeats=1)

    assert_no_trace(model, act, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()  # the budget has no room for gradients of the step above
    step(*BATCH).backward()
    assert not all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))  # in training, hooks act


@pytest.mark.slow
def test_planning_restores_attributes_changed_by_forward() -> None:
    torch.manual_seed(0)
    model = Remembers()
    assert_no_trace(model, lambda: plan(model))
    assert_no_trace(model, lambda: planner.trace(model, F.cross_entropy, BATCH, passes=1))


def test_hooks_of_modules_leave_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    seen: list[Any] = []
    counted = 0

    def hook(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal counted
        counted += 1
        seen.append(output)
        CALLS.append(3)
        return 2 * output

    model[0].register_forward_hook(hook)

    def act() -> None:
        plan(model)
        with preserve_training_state(model, BATCH):
            model(BATCH[0])
            assert counted == len(seen) == 1

    assert_no_trace(model, act)
    assert seen == []
    assert counted == 0


class Interrupted(BaseException):
    """As Ctrl-C is no ``Exception``."""


@pytest.mark.parametrize(
    ("make", "where", "error"),
    [
        (Remembers, "plans.search.solve_graph", Interrupted),
        (Fails, None, TraceError),
        *slow(
            (Remembers, "train.compile.compiler.measure_peak", RuntimeError),
            (Remembers, "train.compile.compiler.profile_capture", Interrupted),
        ),
    ],
)
def test_a_failure_on_the_way_leaves_nothing(
    make: type[nn.Module], where: str | None, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = make()

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    if where is not None:
        monkeypatch.setattr(f"planner.{where}", fail)

    def act() -> None:
        with pytest.raises(error):
            plan(model)

    assert_no_trace(model, act)


def test_a_failure_inside_a_step_leaves_nothing() -> None:
    torch.manual_seed(0)
    model = Remembers()

    def changes() -> None:
        model.train(mode=False)
        model(BATCH[0]).sum().backward()
        model.norm.running_mean.add_(1)
        model.extra = 3
        random.random()
        np.random.rand()  # noqa: NPY002
        raise Interrupted

    def act() -> None:
        with pytest.raises(Interrupted), preserve_training_state(model, BATCH, written=[model.scale]):
            changes()

    assert_no_trace(model, act)


def accumulates(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes to a tensor that is no buffer, which no capture takes."""
    m.total.add_(1)
    return m.linear(x)


@pytest.mark.slow
def test_tensors_that_are_no_buffers_are_put_back() -> None:
    model = FunctionModule(accumulates, linear=nn.Linear(16, 3), total=torch.zeros(3))
    with pytest.raises(TraceError):
        plan(model)
    assert torch.equal(model.total, torch.zeros(3))


@pytest.mark.parametrize("mode", [torch.no_grad, *slow(torch.inference_mode)])
def test_a_call_without_gradients_is_refused(mode: Callable[[], Any]) -> None:
    model = Remembers()

    def act() -> None:
        with mode(), pytest.raises(PlannerError, match=rf"called under torch\.{mode.__name__}\(\), where nothing is trained"):
            plan(model)

    assert_no_trace(model, act)
    with torch.inference_mode(), pytest.raises(TraceError, match=r"under torch\.inference_mode\(\) nothing is trained"):
        planner.trace(model, F.cross_entropy, BATCH)


def test_the_graph_behind_an_input_is_left_for_the_loop() -> None:
    torch.manual_seed(0)
    encoder, model = nn.Linear(16, 16), nn.Linear(16, 3)
    x = torch.sigmoid(encoder(BATCH[0]))  # autograd has saved it
    plan(model, (x, BATCH[1]))
    assert encoder.weight.grad is None
    x.sum().backward()
    assert encoder.weight.grad is not None


def test_writes_are_undone_wherever_they_go() -> None:
    kept, wide = torch.arange(6.0), torch.zeros(2, 3)
    versions = kept._version, wide._version
    with UndoWrites() as undone:
        made = torch.ones(3)
        made.add_(1)
        wide[0].add_(made)
        wide[1].mul_(0).sub_(1)
        torch._foreach_add_([kept[2:]], 1)
        kept.data.zero_()
    assert torch.equal(kept, torch.arange(6.0))
    assert torch.equal(wide, torch.zeros(2, 3))
    assert (kept._version, wide._version) == versions
    assert len(undone.written) == 2


class Stats:
    def __init__(self) -> None:
        self.count = 0


def test_generators_and_objects_of_the_users_are_put_back() -> None:
    generator, stats, groups = torch.Generator().manual_seed(3), Stats(), {1, 2}

    def loss_fn(y: torch.Tensor) -> torch.Tensor:
        stats.count += 1
        groups.add(3)
        return (y * torch.rand(3, generator=generator)).sum()

    model = TrainingStep(nn.Linear(16, 3), loss_fn)
    with preserve_training_state(model, BATCH):
        expected = loss_fn(torch.ones(3))
    assert (stats.count, groups) == (0, {1, 2})
    assert torch.equal(loss_fn(torch.ones(3)), expected)


@functools.lru_cache
def ramp(size: int) -> torch.Tensor:
    return torch.arange(float(size))


@functools.cache
def named(size: int) -> dict[str, torch.Tensor]:
    return {"ones": torch.ones(size)}


class Cached(nn.Linear):
    """Takes tensors from caches, and remembers something that asks for runs on fake tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 1
        return super().forward(x) + ramp(3) * named(3)["ones"]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_no_cache_keeps_a_fake_tensor(*, frozen: bool) -> None:
    """Also none that the garbage collector was told to leave alone."""
    torch.manual_seed(0)
    gc.unfreeze()
    if frozen:
        gc.freeze()
    ramp.cache_clear()
    named.cache_clear()
    model = Cached(16, 3)
    x, y = BATCH
    planner.compile(model, F.cross_entropy, BATCH, budget="1MB", compare_eager=False, time_limit_s=1.0)
    assert type(ramp(3)) is torch.Tensor and type(named(3)["ones"]) is torch.Tensor
    assert bool(gc.get_freeze_count()) is frozen
    F.cross_entropy(model(x), y).backward()
    assert type(model.weight.grad) is torch.Tensor
