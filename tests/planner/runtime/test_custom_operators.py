"""Custom operators that draw random numbers without a tag that says so: never computed again, by any planner."""

import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner.capture.frontend.random_states import RandomStates
from planner.graphs.ir import Op
from planner.train.compile.step import PlannedStep
from tests.support.budgets import HALF_WAY, half_way_known, on_the_way
from tests.support.marks import slow, slow_except
from tests.support.raised_warnings import raise_warnings

Operator = Callable[[torch.Tensor], torch.Tensor]
OWN = torch.Generator().manual_seed(0)


def operator(name: str, compute: Operator, *tags: torch.Tag) -> Operator:
    """A custom operator whose gradient is the incoming one, where its result is not 0."""
    defined = torch.library.custom_op(
        f"planner_tests::{name}", compute, mutates_args=(), schema="(Tensor x) -> Tensor", tags=tags
    )
    defined.register_fake(torch.empty_like)
    defined.register_autograd(
        lambda ctx, gradient: gradient * (ctx.saved_tensors[0] != 0),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return defined


DRAWING = {
    "bernoulli": operator("bernoulli", lambda x: x * torch.empty_like(x).bernoulli_(0.5)),
    "rand": operator("rand", lambda x: x + torch.rand(x.shape)),
    "numpy": operator("numpy", lambda x: x + torch.from_numpy(np.random.rand(*x.shape)).float()),  # noqa: NPY002
    "python": operator("python", lambda x: x * random.random()),
}
TAGGED = operator("tagged", lambda x: x * torch.empty_like(x).bernoulli_(0.5), torch.Tag.nondeterministic_seeded)
OF_ITS_OWN = operator("of_its_own", lambda x: x + torch.rand(x.shape, generator=OWN))
SCALING = operator("scaling", lambda x: x * 0.5)


class Net(nn.Module):
    def __init__(self, op: Operator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(torch.cos(self.op(layer(x))))
        return x.square().mean()


@pytest.fixture(autouse=True)
def _half_way() -> Iterator[None]:
    with half_way_known():
        yield


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(512, 16)


def gradients(model: nn.Module, step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    model.zero_grad()
    step(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def planned(model: nn.Module, x: torch.Tensor, budget: str | int = HALF_WAY, **options: object) -> PlannedStep:
    return planner.compile(model, None, (x,), budget=budget, passes=1, **options)


def tight(model: nn.Module, x: torch.Tensor) -> int:
    """A budget at which most ops are computed again that may be."""
    (budget,) = on_the_way(planner.trace(model, None, (x,), passes=1), 0.1)
    return budget


def computed_again(step: PlannedStep, name: str) -> list[Op]:
    assert step.measured is not None
    ops = [step.measured.ops[op] for op in step.plan.schedule.computed]
    return [op for op in dict.fromkeys(ops) if ops.count(op) > 1 and op.target.startswith(name)]


EACH_DRAWING = pytest.mark.parametrize("name", slow_except(DRAWING, "python", "rand"))


@EACH_DRAWING
def test_untagged_random_operators_are_not_recomputed(name: str, x: torch.Tensor) -> None:
    model = Net(DRAWING[name])
    wanted = gradients(model, model, x)
    with pytest.warns(UserWarning, match=rf"op {name} .*, and 5 others .*nondeterministic_seeded"):
        step = planned(model, x)
    assert step.plan.recomputed
    assert all(map(torch.equal, wanted, gradients(model, step, x)))


@pytest.mark.usefixtures("fresh_compiler")
@EACH_DRAWING
def test_untagged_random_operators_are_not_recomputed_under_torch_compile(name: str, x: torch.Tensor) -> None:
    model = Net(DRAWING[name])
    wanted = gradients(model, model, x)
    step = torch.compile(model, backend="planner", dynamic=False, options={"budget": HALF_WAY, "time_limit_s": 5})
    with pytest.warns(UserWarning, match=rf"op {name} .*, and 5 others .*nondeterministic_seeded"):
        found = gradients(model, step, x)
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize(("operator", "name"), [(TAGGED, "planner_tests.tagged"), *slow((SCALING, "planner_tests.scaling"))])
def test_tagged_and_deterministic_operators_are_computed_again_with_the_same_numbers(
    operator: Callable[..., torch.Tensor], name: str, x: torch.Tensor
) -> None:
    model = Net(operator)
    wanted = gradients(model, model, x)
    with raise_warnings():
        step = planned(model, x, tight(model, x))
    assert computed_again(step, name)
    assert all(map(torch.equal, wanted, gradients(model, step, x)))


def test_operator_with_private_generator_is_detected_by_differing_results(x: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="returns different bits when it is executed again"):
        step = planned(Net(OF_ITS_OWN), x, compare_eager=False)
    assert not computed_again(step, "planner_tests")


@pytest.mark.slow
def test_cached_plan_remembers_unrepeatable_ops(tmp_path: Path, x: torch.Tensor) -> None:
    model = Net(DRAWING["python"])
    with pytest.warns(UserWarning, match="computed once"):
        budget = tight(model, x)
    with pytest.warns(UserWarning, match="computed once"):
        first = planned(model, x, budget, cache=tmp_path, wait="1%")
    with raise_warnings():
        again = planned(model, x, budget, cache=tmp_path, wait="1%")
    assert again.measured is None
    assert again.plan.schedule == first.plan.schedule
    assert len(again.plan.graph.provenance.unrepeatable_ops) == 6


def test_with_a_roofline_no_custom_operator_is_computed_again(x: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="not executed with a roofline"):
        graph = planner.trace(Net(SCALING), None, (x,), roofline="cpu")
    assert {op.recomputable for op in graph.ops if re.match("planner_tests", op.target)} == {False}


def test_measuring_leaves_random_states_as_they_are(x: torch.Tensor) -> None:
    for name in ("numpy", "python"):
        model = Net(DRAWING[name])
        states = RandomStates()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planner.trace(model, None, (x,), passes=1)
        assert not states.find_changed()
