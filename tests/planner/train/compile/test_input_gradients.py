"""Gradients to the inputs of a planned step: counted, exact, and never left out in silence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.trace import capture
from planner.graphs.errors import MismatchError
from planner.graphs.ir import Kind
from tests.support.budgets import HALF_WAY
from tests.support.marks import slow


def model_and_encoder() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    return model, nn.Sequential(nn.Linear(6, 8), nn.Tanh())


@pytest.mark.usefixtures("half_way")
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_encoder_before_the_planned_model_trains_as_in_eager_mode(dynamic: bool) -> None:
    model, encoder = model_and_encoder()
    x, y = torch.randn(32, 6), torch.randn(32, 4)
    everything = [*model.parameters(), *encoder.parameters()]
    step = planner.compile(model, F.mse_loss, (encoder(x), y), budget=HALF_WAY, dynamic=dynamic)
    assert all(p.grad is None for p in everything) and step.plan.measured_peak_bytes <= step.plan.budget_bytes

    def gradients(run: object, rows: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for parameter in everything:
            parameter.grad = None
        run(encoder(x[:rows]), y[:rows]).backward()
        return [parameter.grad for parameter in everything]

    for rows in (32, 24) if dynamic else (32,):
        eager = gradients(lambda inputs, target: F.mse_loss(model(inputs), target), rows)
        assert all(map(torch.equal, gradients(step, rows), eager))


def test_a_leaf_gets_its_gradient_and_planning_leaves_none() -> None:
    model, _ = model_and_encoder()
    x, y = torch.randn(32, 8, requires_grad=True), torch.randn(32, 4)
    step = planner.compile(model, F.mse_loss, (x, y), budget="100%")
    assert x.grad is None
    torch.manual_seed(1)
    (step(x, y) * 3).backward()
    found, x.grad = x.grad, None
    torch.manual_seed(1)
    (F.mse_loss(model(x), y) * 3).backward()
    assert torch.equal(found, x.grad)


def test_both_inputs_of_a_pair_and_one_tensor_for_both() -> None:
    model, _ = model_and_encoder()
    first, second = torch.randn(16, 8, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    planner.compile(model, F.mse_loss, (first, second), budget="100%")(first, second).backward()
    assert first.grad is not None and second.grad is not None
    squared = nn.Linear(8, 8)
    step = planner.compile(squared, F.mse_loss, (first, first), budget="100%")
    first.grad = None
    step(first, first).backward()
    found, first.grad = first.grad, None
    F.mse_loss(squared(first), first).backward()
    assert torch.equal(found, first.grad)


def test_the_gradient_is_an_output_of_the_step_and_counts() -> None:
    model, _ = model_and_encoder()
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    plain, trained = (capture(model, F.mse_loss, (inputs, y)).graph for inputs in (x, x.clone().requires_grad_()))
    sizes = [sum(g.tensors[t].size_bytes for t in g.kept if g.tensors[t].kind is Kind.GRADIENT) for g in (plain, trained)]
    assert sizes[1] - sizes[0] == x.nbytes


@pytest.mark.parametrize(("planned", "dynamic"), [(False, True), (True, False), *slow((False, False), (True, True))])
def test_another_requires_grad_than_planned_is_refused(planned: bool, dynamic: bool) -> None:
    model, _ = model_and_encoder()
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    step = planner.compile(model, F.mse_loss, (x.clone().requires_grad_(planned), y), budget="100%", dynamic=dynamic)
    with pytest.raises(MismatchError, match=f"input 0 .* requires_grad={not planned}, but the step was planned for {planned}"):
        step(x.clone().requires_grad_(not planned), y)


def test_run_compares_gradients_of_inputs_too() -> None:
    model, _ = model_and_encoder()
    batch = torch.randn(32, 8, requires_grad=True), torch.randn(32, 4)
    graph = planner.trace(model, F.mse_loss, batch, passes=1)
    report = planner.run(planner.solve(graph, "100%"), model, F.mse_loss, batch, repeats=1)
    assert report.identical and not report.eager_differences and batch[0].grad is None
