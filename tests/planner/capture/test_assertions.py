"""Steps that check activations: a planned step has the checks as ops, and raises where eager PyTorch does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import planner
from planner.graphs.errors import TraceError
from tests.support.models import checked
from tests.support.models.checked import SIZE, Checked, Forward


def train(model: Checked, step: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    left = []
    for x in batches:
        loss = step(x)
        loss.backward()
        left += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), model.usage.clone()]
        model.zero_grad()
    return left


CHECKS = (
    checked.assertion,
    checked.assertion_of_two,
    checked.assertion_of_either,
    checked.raised,
    checked.raised_otherwise,
    checked.counted,
)


@pytest.mark.parametrize(
    ("forward", "options"),
    [*((forward, {}) for forward in CHECKS), (checked.assertion, {"kernels": "inductor"})],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_checks_of_activations_are_planned(forward: Forward, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Checked(forward)
    plain, batches = copy.deepcopy(model), [torch.randn(8, SIZE) for _ in range(3)]
    step = planner.compile(model, None, (batches[0],), budget="100%", wait=0, **options)
    found, wanted = train(model, step, batches), train(plain, plain, batches)
    assert all(torch.allclose(a, b, atol=1e-6) if options else torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    broken, before = torch.full((8, SIZE), torch.nan), model.usage.clone()
    with pytest.raises(RuntimeError, match=r"checked.py:\d+ \("):
        step(broken)
    assert torch.equal(model.usage, before)
    assert torch.equal(step(batches[0]), plain(batches[0])) or options


@pytest.mark.parametrize(
    "forward",
    [checked.caught, checked.caught_by_a_caller, checked.either_way],
    ids=lambda f: f.__name__,
)
def test_other_branches_on_activations_are_refused(forward: Forward) -> None:
    torch.manual_seed(0)
    with pytest.raises(TraceError, match="parameters or activations that differ from step to step"):
        planner.compile(Checked(forward), None, (torch.randn(8, SIZE),), budget="100%", wait=0)


def test_counting_without_a_length_is_refused_with_a_way_out() -> None:
    with pytest.raises(TraceError, match="give minlength= above all numbers"):
        planner.compile(Checked(checked.counted_without_a_length), None, (torch.randn(8, SIZE),), budget="100%", wait=0)
