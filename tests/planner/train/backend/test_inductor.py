"""The backend over Inductor's kernels: within the budget, and with the bits of ``torch.compile``."""

import copy
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

from planner.capture.workload.models import Workload
from planner.graphs.ir import Graph
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.measure.steps import StepOutcome, measure_memory, measure_outcome
from planner.plans import search
from planner.plans.plan import Plan
from planner.settings.budget import Budget
from tests.support.budgets import between
from tests.support.marks import slow
from tests.support.models.backend import Broken

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]


def mlp(norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.0) -> Workload:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), norm(32), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)]
    return Workload(nn.Sequential(*layers), F.mse_loss, (torch.randn(512, 32), torch.randn(512, 32)))


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Graph, Plan]]:
    """What was solved, with its plan."""
    found: list[tuple[Graph, Plan]] = []
    solve = search.solve_graph

    def noted(graph: Graph, budget: Budget, *settings: Any, **options: Any) -> Plan:
        found.append((graph, solve(graph, budget, *settings, **options)))
        return found[-1][1]

    monkeypatch.setattr(search, "solve_graph", noted)
    return found


def run(
    workload: Workload, budget: str | int | None, *, steps: int = 2, choices: Sequence[str] = (), **given: Any
) -> tuple[StepOutcome, int]:
    """What the last of some steps leaves behind, and its peak; None: of ``torch.compile`` itself."""
    model = copy.deepcopy(workload.model)
    planned = {"budget": budget, "kernels": "inductor", "options": choices, **given}
    options: dict[str, Any] = {"backend": "planner", "options": planned}
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False, **(options if budget is not None else {}))

    def step(*batch: Any) -> Any:
        return workload.loss_fn(compiled(*batch[:-1]), batch[-1])

    for seed in range(steps):
        found = measure_outcome(step, model, workload.batch, seed=seed)
    return found, measure_memory(step, workload.batch, static_bytes=0, device=torch.device("cpu")).peak_bytes


@pytest.mark.parametrize(("norm", "dropout"), [(nn.LayerNorm, 0.3), *slow((nn.BatchNorm1d, 0.0))])
def test_computing_again_leaves_the_bits_of_torch_compile(
    norm: type[nn.Module], dropout: float, solved: list[tuple[Graph, Plan]]
) -> None:
    workload = mlp(norm, dropout)
    wanted, _ = run(workload, None)
    found, whole = run(workload, "100%")
    assert not wanted.list_differences(found)
    found, tight = run(workload, between(solved[0][0]))
    assert not wanted.list_differences(found)
    plan = solved[1][1]
    assert len(plan.schedule.computed) > plan.graph.ops
    assert tight < whole
    # The loss function is not in the graph: a gradient and its input's size, besides.
    assert tight <= plan.budget_bytes + 2 * workload.batch[0].nbytes


def test_outputs_written_over_inputs_leave_the_bits_of_torch_compile(solved: list[tuple[Graph, Plan]]) -> None:
    workload = mlp()
    wanted, _ = run(workload, None)
    found, _ = run(workload, "100%", choices=["in-place"])
    assert not wanted.list_differences(found)
    graph = solved[0][0]
    schedule = keep_everything(graph)
    assert sum(simulate(graph, schedule).memory_bytes) < sum(simulate(graph.out_of_place(), schedule).memory_bytes)
    found, tight = run(workload, between(graph), choices=["in-place"])
    assert not wanted.list_differences(found)
    assert tight <= solved[1][1].budget_bytes + 2 * workload.batch[0].nbytes


def test_in_place_and_offload_together_leave_the_bits_of_torch_compile(solved: list[tuple[Graph, Plan]]) -> None:
    workload = mlp()
    wanted, _ = run(workload, None)
    found, peak_bytes = run(workload, "75%", choices=["in-place", "offload"], link="1000GB/s", host_budget="1MB")
    assert not wanted.list_differences(found)
    ((graph, plan),) = solved
    assert plan.copied > 0
    written_over, apart = (simulate(how, plan.schedule).memory_bytes for how in (graph, graph.out_of_place()))
    assert sum(written_over) < sum(apart)
    assert peak_bytes <= plan.budget_bytes + 2 * workload.batch[0].nbytes


@pytest.mark.slow
def test_recomputed_dropout_is_exact_with_fallback_random(solved: list[tuple[Graph, Plan]]) -> None:
    workload = mlp(dropout=0.3)
    with inductor_config.patch(fallback_random=True):
        wanted, _ = run(workload, None)
        assert not wanted.list_differences(run(workload, "100%")[0])
        assert not wanted.list_differences(run(workload, between(solved[0][0]))[0])


@pytest.mark.slow
def test_several_graphs_share_the_budget() -> None:
    workload = Workload(Broken(mlp().model, mlp().model), F.mse_loss, (torch.randn(512, 32), torch.randn(512, 32)))
    wanted, _ = run(workload, None, steps=3)
    found, _ = run(workload, "70%", steps=3)
    assert not wanted.list_differences(found)


def test_evaluation_is_compiled_without_a_plan() -> None:
    workload = mlp()
    compiled = torch.compile(workload.model, backend="planner", dynamic=False, options={"budget": "1GB", "kernels": "inductor"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(workload.batch[0]), workload.model(workload.batch[0]))
