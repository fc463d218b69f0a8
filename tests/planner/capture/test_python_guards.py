"""Guards on Python values and names, checked at every step, with messages that name what changed or was replaced."""

import copy
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.trace import capture
from planner.graphs.errors import MismatchError, TraceError
from tests.support.marks import slow
from tests.support.raised_warnings import raise_warnings

CONFIG = SimpleNamespace(alpha=0.5)
WEIGHTS = torch.ones(4)
STEPS = 0


class Net(nn.Module):
    """Dropout, BatchNorm, tied weights, a list of blocks, a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.scale = torch.ones(4)
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.norm(self.dropout(self.first(x)))) * self.scale / self.temperature
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 1), nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def loss_with(schedule: list[float]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output * WEIGHTS, target) * CONFIG.alpha * schedule[0]

    return loss_fn


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 4), torch.randn(6, 4)


@pytest.fixture
def annealed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Globals are afterwards as they were."""
    monkeypatch.setattr(CONFIG, "alpha", 0.5)
    monkeypatch.setitem(globals(), "WEIGHTS", torch.ones(4))
    return [2.0]


CHANGES = {
    "an attribute of a global": (
        lambda m, b: setattr(CONFIG, "alpha", 0.25),
        r"CONFIG.alpha was 0.5 .* and is 0.25 now \(.*test_python_guards.py:",
    ),
    "an item of a closure": (lambda m, b: b.__setitem__(0, 3.0), r"schedule\[0\] was 2.0 .* and is 3.0 now"),
    "a number of the model": (lambda m, b: setattr(m, "temperature", 4.0), r"model.temperature was 2.0 .* and is 4.0"),
    "Dropout.p": (lambda m, b: setattr(m.dropout, "p", 0.5), r"model.dropout.p was 0.1 .* and is 0.5 now"),
    "momentum": (lambda m, b: setattr(m.norm, "momentum", 0.5), r"model.norm.momentum was 0.1 .* and is 0.5 now"),
    "a submodule": (
        lambda m, b: setattr(m, "dropout", nn.Identity()),
        r"model.dropout was a .*Dropout .* and is a .*Identity now",
    ),
    "an adapter": (lambda m, b: setattr(m, "first", Adapted(m.first)), r"model.first was a .*Linear .* and is a .*Adapted now"),
    "a bias that is gone": (lambda m, b: setattr(m.first, "bias", None), r"model.first.bias was a tensor .* and is None now"),
    "untied": (
        lambda m, b: setattr(m.second, "weight", nn.Parameter(m.first.weight.detach().clone())),
        r"model.first.weight and model.second.weight were one object .* two now",
    ),
    "a block more": (lambda m, b: m.blocks.append(nn.Linear(4, 4)), r"model.blocks.* had 2 items .* and has 3 now"),
    "a hook": (lambda m, b: m.first.register_forward_hook(lambda *_: None), "hooks of model.first were added"),
    "a hook that takes keyword arguments": (
        lambda m, b: m.first.register_forward_hook(lambda *_: None, with_kwargs=True),
        "hooks of model.first were added",
    ),
    "a hook before": (lambda m, b: m.register_forward_pre_hook(lambda *_: None), "hooks of model were added"),
    "a backward hook": (lambda m, b: m.norm.register_full_backward_hook(lambda *_: None), "hooks of model.norm were added"),
    "eval": (lambda m, b: m.eval(), r"training was True .* and is False now \(train\(\) or eval\(\) was called\)"),
    "frozen": (lambda m, b: m.first.bias.requires_grad_(False), r"model.first.bias.requires_grad was True .* is False now"),
    "a forward of its own": (lambda m, b: setattr(m.first, "forward", lambda x: x), "model.first.forward was set"),
    "pruned": (lambda m, b: prune.random_unstructured(m.first, "weight", 0.5), "model.first.weight was removed, or replaced"),
    "another tensor": (lambda m, b: setattr(m, "scale", torch.zeros(4)), r"model.scale is another tensor .*\(model.scale.copy_"),
    "another global tensor": (lambda m, b: globals().__setitem__("WEIGHTS", torch.zeros(4)), "WEIGHTS is another tensor"),
    "no tensor any more": (lambda m, b: globals().__setitem__("WEIGHTS", [0.5]), r"WEIGHTS was a tensor .* and is \[0.5\] now"),
}


def keep(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives the modules of `model`, and all that the step reads, what they have now."""
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    kept += [(value, dict(value)) for _, attributes in kept for value in attributes.values() if isinstance(value, dict)]
    weights = WEIGHTS

    def restore() -> None:
        for table, items in kept:
            table.clear()
            table.update(items)
        model.requires_grad_(True)
        CONFIG.alpha, globals()["WEIGHTS"] = 0.5, weights

    return restore


def test_guard_errors_name_each_change_and_what_is_undone_is_as_planned(
    batch: tuple[torch.Tensor, ...], annealed: list[float]
) -> None:
    model = Net()
    step = planner.compile(model, loss_with(annealed), batch, budget="100%", replan=False)  # None would follow numbers
    restore = keep(model)
    for act, message in CHANGES.values():
        step(*batch)
        act(model, annealed)
        before, state = model.norm.running_mean.clone(), torch.get_rng_state()
        with pytest.raises(MismatchError, match=message) as error:
            step(*batch)
        assert "planner.compile" in str(error.value) and "replan=True" in str(error.value)
        assert torch.equal(before, model.norm.running_mean) and torch.equal(state, torch.get_rng_state())
        restore()
        annealed[0] = 2.0


def test_values_read_at_every_step_may_change(batch: tuple[torch.Tensor, ...], annealed: list[float]) -> None:
    model = Net()
    loss_fn = loss_with(annealed)
    step = planner.compile(model, loss_fn, batch, budget="100%")
    model.scale.fill_(3.0)
    WEIGHTS.mul_(2.0)
    model.first.bias = nn.Parameter(torch.ones(4))
    model.blocks[0].load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
    torch.set_num_threads(torch.get_num_threads())
    model.eval()
    model(batch[0])
    model.train()
    model.unread = "anything"
    torch._dynamo.mark_dynamic(model.norm.weight, 0)
    for _ in range(2):
        torch.manual_seed(3)
        planned = step(*batch)
        torch.manual_seed(3)
        assert torch.equal(planned, loss_fn(model(batch[0]), batch[1]))


def test_only_modules_with_hooks_have_guards_on_the_arguments_of_hooks(batch: tuple[torch.Tensor, ...]) -> None:
    model = Net()
    model.blocks[0].register_forward_hook(lambda module, args, kwargs, output: output * 2, with_kwargs=True)
    guards = capture(model, F.mse_loss, batch).guards
    named = [part for part in guards.parts if "hooks_with_kwargs" in part]
    assert named and all("_forward_hooks_with_kwargs" in part and "blocks" in part for part in named)


def test_removing_a_planned_hook_raises(batch: tuple[torch.Tensor, ...]) -> None:
    model = Net()
    handle = model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 2)
    step = planner.compile(model, F.mse_loss, batch, budget="100%")
    torch.manual_seed(1)
    loss = step(*batch)
    torch.manual_seed(1)
    assert torch.equal(loss, F.mse_loss(model(batch[0]), batch[1]))
    handle.remove()
    with pytest.raises(MismatchError, match=re.escape("hooks of model.blocks.0 were added or removed")):
        step(*batch)


def test_hooks_on_all_modules_and_the_default_dtype_are_guarded(batch: tuple[torch.Tensor, ...]) -> None:
    step = planner.compile(Net(), F.mse_loss, batch, budget="100%")
    refused = pytest.raises(MismatchError, match="the number of hooks on all modules was")
    with nn.modules.module.register_module_forward_hook(lambda *_: None), refused:
        step(*batch)
    step(*batch)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(MismatchError, match=r"get_default_dtype\(\) was torch.float32 .* is torch.float64 now"):
            step(*batch)
    finally:
        torch.set_default_dtype(torch.float32)


def test_tensor_passed_twice_is_one_in_the_plan(batch: tuple[torch.Tensor, ...]) -> None:
    x, _ = batch
    model = Net()
    step = planner.compile(model, F.mse_loss, (x, x), budget="100%")
    step(x, x)
    with pytest.raises(MismatchError, match="input 0 and input 1 were one object"):
        step(x, x.clone())


class Stateful(nn.Module):
    """Changes something of itself in each forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.calls, self.seen, self.memory, self.mask = 0, [], torch.zeros(6, 4), None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global STEPS
        hidden = self.linear(x)
        match self.kind:
            case "counter":
                self.calls += 1
                return hidden / self.calls
            case "list":
                self.seen.append(len(self.seen))
                return hidden * (1 + len(self.seen))
            case "global":
                STEPS += 1
                return hidden * STEPS
            case "memory":
                hidden = hidden + self.memory
                self.memory = hidden.detach()
            case "output":
                self.last = hidden
            case "mask":
                if self.mask is None:
                    self.mask = torch.ones(4)
                return hidden * self.mask
            case "flag":
                self.called = True
            case "buffer":
                self.count += 1
                return hidden / self.count
        return hidden


@pytest.mark.parametrize(("kind", "name"), [("list", "model.seen"), *slow(("memory", "model.memory"))])
def test_value_changed_at_every_step_raises_when_planning(kind: str, name: str, batch: tuple[torch.Tensor, ...]) -> None:
    model = Stateful(kind)
    with pytest.raises(TraceError, match=rf"{name} changes at every step \(.*test_python_guards.py:\d+\), and the step reads it"):
        planner.compile(model, F.mse_loss, batch, budget="100%")
    assert (model.calls, model.seen, STEPS) == (0, [], 0) and not model.memory.any()


def test_global_number_is_counted_by_the_plan(batch: tuple[torch.Tensor, ...]) -> None:
    model = Stateful("global")
    eager = copy.deepcopy(model)
    before = STEPS
    step = planner.compile(model, F.mse_loss, batch, budget="100%")
    assert before == STEPS
    for _ in range(2):
        loss = step(*batch)
        counted = globals()["STEPS"]
        globals()["STEPS"] -= 1
        assert torch.equal(loss, F.mse_loss(eager(batch[0]), batch[1])) and counted == STEPS


def test_value_that_is_only_set_warns(batch: tuple[torch.Tensor, ...]) -> None:
    model = Stateful("output")
    with pytest.warns(UserWarning, match="model.last is set by the step"):
        planner.compile(model, F.mse_loss, batch, budget="100%")
    assert not hasattr(model, "last")


def test_values_of_the_first_step_are_set_before_planning(batch: tuple[torch.Tensor, ...]) -> None:
    model, other = Stateful("mask"), Stateful("mask")
    other.load_state_dict(model.state_dict())
    with pytest.warns(
        UserWarning, match=r"model.mask is set by the first step \(.*test_python_guards.py:\d+\), and read by later ones"
    ):
        step = planner.compile(model, F.mse_loss, batch, budget="100%")
    model(batch[0])
    assert torch.equal(model.mask, torch.ones(4))
    for _ in range(3):
        assert torch.equal(step(*batch), F.mse_loss(other(batch[0]), batch[1]))


@pytest.mark.parametrize("kind", ["buffer", *slow("flag")])
def test_unread_values_and_tensor_counters_work(kind: str, batch: tuple[torch.Tensor, ...]) -> None:
    model, other = Stateful(kind), Stateful(kind)
    other.load_state_dict(model.state_dict())
    with raise_warnings(UserWarning):
        step = planner.compile(model, F.mse_loss, batch, budget="100%")
    for _ in range(3):
        assert torch.equal(step(*batch), F.mse_loss(other(batch[0]), batch[1]))


def test_external_parameter_raises_but_trains_in_a_loss_module(batch: tuple[torch.Tensor, ...]) -> None:
    criterion = nn.Linear(4, 4)

    with pytest.raises(TraceError, match=r"criterion\.(weight|bias) requires a gradient, but is no parameter of the model"):
        planner.compile(Net(), lambda output, target: F.mse_loss(criterion(output), target), batch, budget="100%")
    loss = FunctionModule(lambda m, output, target: F.mse_loss(m.inner(output), target), inner=criterion)
    planner.compile(Net(), loss, batch, budget="100%")(*batch).backward()
    assert criterion.weight.grad is not None


def test_guards_on_tensors_are_for_calls_outside_of_a_capture(batch: tuple[torch.Tensor, ...]) -> None:
    captured = capture(Net(), F.mse_loss, batch)
    guards = str(captured.guards.manager.guard_manager)
    assert "DispatchKeySet" in guards
    assert "PythonDispatcher" not in guards  # Dynamo skips guards of unchanged modules, but not always


HERE = sys.modules[__name__]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Gain:
    """No module: what it computes is part of the step all the same."""

    factor = 2.0

    def value(self) -> float:
        return self.factor

    @property
    def offset(self) -> float:
        return 0.5


GAIN = Gain()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.act(self.first(x))).sigmoid() * GAIN.value() + GAIN.offset
        if os.environ.get("PLANNER_TESTS_DOUBLE"):
            hidden = doubled(hidden)
        if hasattr(torch, "planner_tests_double"):
            hidden = torch.planner_tests_double(hidden)
        return self.scaled(torch.exp(self.second(hidden)))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


REPLACED: dict[str, tuple[object, str, Any, str]] = {
    "a function of a module": (F, "gelu", F.relu, "torch.nn.functional.gelu was replaced"),
    "a function of torch": (torch, "exp", torch.sin, "torch.exp was replaced"),
    "one that a module of torch calls": (torch, "tanh", torch.sin, "torch.tanh was replaced"),
    "the loss": (F, "mse_loss", F.l1_loss, "torch.nn.functional.mse_loss was replaced"),
    "a method of tensors": (torch.Tensor, "sigmoid", torch.Tensor.tanh, "torch.Tensor.sigmoid was added"),
    "forward of the model": (Named, "forward", lambda self, x: self.first(x), r"Named.forward was replaced"),
    "another method of the model": (Named, "scaled", lambda self, x: x, r"Named.scaled was replaced"),
    "forward of a layer": (nn.Linear, "forward", lambda self, x: x, r"linear.Linear.forward was replaced"),
    "how modules are called": (nn.Module, "__call__", lambda self, x: self.forward(x), r"module.Module.__call__ was replaced"),
    "how a layer is called": (nn.Linear, "__call__", lambda self, x: self.forward(x), r"linear.Linear.__call__ was added"),
    "a method of an object": (Gain, "value", lambda self: 3.0, r"Gain.value was replaced"),
    "a property of an object": (Gain, "offset", property(lambda self: 3.0), r"Gain.offset was replaced"),
    "what torch was asked for": (torch, "planner_tests_double", doubled, "torch.planner_tests_double was added"),
}


def planned(batch: tuple[torch.Tensor, torch.Tensor], **options: object) -> planner.PlannedStep:
    torch.manual_seed(1)
    return planner.compile(Named(), lambda x, y: F.mse_loss(x, y), batch, budget="100%", passes=1, compare_eager=False, **options)


def test_replaced_objects_are_named(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch)
    before = step(*batch)
    for owner, name, value, message in REPLACED.values():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            with pytest.raises(MismatchError, match=f"{message} since the step was planned: .*replan=True"):
                step(*batch)
        assert torch.equal(step(*batch), before)


def test_environment_variable_is_guarded(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch)
    monkeypatch.setenv("PLANNER_TESTS_OTHER", "1")
    before = step(*batch)
    monkeypatch.setenv("PLANNER_TESTS_DOUBLE", "1")
    with pytest.raises(MismatchError, match=r"environment variable PLANNER_TESTS_DOUBLE was None .* and is '1' now"):
        step(*batch)
    monkeypatch.delenv("PLANNER_TESTS_DOUBLE")
    assert torch.equal(step(*batch), before)


def test_replan_uses_the_replacement(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch, replan=True)
    monkeypatch.setattr(F, "gelu", F.relu)
    with pytest.warns(UserWarning, match="planned again: torch.nn.functional.gelu was replaced"):
        found = step(*batch)
    torch.manual_seed(1)
    assert torch.equal(found, F.mse_loss(Named()(batch[0]), batch[1]))


def test_unused_names_may_be_replaced(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned(batch)
    before = step(*batch)
    others: list[tuple[object, str, Callable[..., Any]]] = [
        (F, "silu", F.relu),
        (torch, "cos", torch.sin),
        (nn.Conv2d, "forward", lambda self, x: x),
        (HERE, "planned", planned),
    ]
    for owner, name, value in others:
        monkeypatch.setattr(owner, name, value)
    assert torch.equal(step(*batch), before)


def test_layout_queried_by_the_step_is_guarded(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = batch
    other = x.t().contiguous().t()
    model = FunctionModule(lambda m, x: m.linear(x) * (2.0 if x.is_contiguous() else 1.0), linear=nn.Linear(4, 4))
    step = planner.compile(model, F.mse_loss, batch, budget="100%", passes=1)
    step(x, y)
    with pytest.raises(MismatchError, match=r"had strides \(\(4, 1\), \(4, 1\)\) .* have \(\(1, 6\), \(4, 1\)\)"):
        step(other, y)
    other_step = planned(batch)  # which does not ask
    assert torch.allclose(other_step(other, y), other_step(x, y))


def test_few_names_are_compared(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    guards = capture(Named(), F.mse_loss, batch).guards
    assert 10 < sum(len(names.keys) for names in guards.replaceable.names) < 100
    assert list(guards.replaceable.environment) == ["PLANNER_TESTS_DOUBLE"]
