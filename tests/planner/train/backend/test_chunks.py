"""Loss heads in chunks inside the graphs of a compiled model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.plans import search
from planner.plans.plan import Plan
from planner.plans.solve import solve_graph
from planner.settings.budget import Budget, Bytes
from planner.solvers.bounds import bound_least_budget
from tests.support.models.alternatives import CLASSES, in_chunks, make, schedule_with
from tests.support.models.outcomes import peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh_compilers() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps() -> tuple[nn.Module, Callable[..., torch.Tensor], Batch]:
    torch.manual_seed(0)
    model, loss_fn, _ = make("smoothed")
    assert loss_fn is not None
    return model, lambda x, y: loss_fn(model(x), y), (torch.randn(64, 12), torch.randint(CLASSES, (64,)))


def trained(model: nn.Module, step: Callable[..., torch.Tensor], batch: Batch) -> list[torch.Tensor]:
    model.zero_grad()
    loss = step(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("measured", [True, False])
def test_a_loss_head_in_a_graph_is_in_chunks(*, measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, batch = steps()
    solved: list[tuple[Graph, Plan]] = []

    def solving(graph: Graph, _: Budget, *settings: Any, **options: Any) -> Plan:
        budget = Bytes(simulate(graph, schedule_with(graph, in_chunks(graph, 4))).peak_bytes)
        plan = solve_graph(graph, budget, *settings, **options)
        solved.append((graph, plan))
        return plan

    monkeypatch.setattr(search, "solve_graph", solving)
    options = {"budget": "100%", "options": ["chunks"], "tolerance": 0.5, **({} if measured else {"roofline": "cpu"})}
    planned = torch.compile(step, backend="planner", dynamic=False, options=options)
    trained(model, planned, batch)
    wanted, found = trained(model, step, batch), trained(model, planned, batch)
    ((graph, plan),) = solved
    assert plan.budget_bytes < bound_least_budget(remove_options(graph)).budget_bytes
    assert any(graph.ops[op].optional for op in plan.schedule.computed) and plan.differs
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(wanted, found, strict=True))
    again, kept = peak_bytes(lambda: trained(model, planned, batch)), simulate(graph, keep_everything(remove_options(graph)))
    assert again < peak_bytes(lambda: trained(model, step, batch)) < kept.peak_bytes


def test_a_graph_without_a_loss_has_none() -> None:
    model, _, (x, _) = steps()
    planned = torch.compile(model, backend="planner", dynamic=False, options={"budget": "100%", "options": ["chunks"]})
    assert torch.equal(planned(x), model(x))
